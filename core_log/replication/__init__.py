"""Replication of a shard over several nodes: the machines, and what drives them. See README.md of core_log."""
