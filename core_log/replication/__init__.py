"""Replication of one partition over several nodes: the protocol's machines. See README.md of core_log."""
