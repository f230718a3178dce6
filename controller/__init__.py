"""Metadata and placement: the store, leases, the snapshot that the data plane reads."""
