"""Jobs over the log: each a function that returns a DataFrame, and a command `headrace spark <job>`."""
