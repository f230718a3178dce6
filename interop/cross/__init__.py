"""AMQP clients and MQTT clients that see each other's messages; clients.py lists the pairs."""
