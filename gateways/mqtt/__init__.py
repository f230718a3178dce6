"""The MQTT door: 3.1.1 and 5.0. Pure names only; see the files."""
