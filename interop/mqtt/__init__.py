"""MQTT 3.1.1 and 5 clients that we did not write; clients.py lists them."""
