"""Lets Spark find the `headrace` data source without a register call."""
