"""Other people's clients against a running broker. README.md says which, and what they show."""
