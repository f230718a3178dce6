"""Three nodes as processes, with a PostgreSQL, and what may happen to them."""
