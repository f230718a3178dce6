"""Whole clusters in one process, run by a seed."""
