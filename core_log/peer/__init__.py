"""Links between the nodes of a cluster: frames, handshake, both ends. See README.md of core_log."""
