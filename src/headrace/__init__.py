"""Headrace: AMQP and MQTT doors on one commit log. Imports nothing heavy."""

__version__ = "0.1.0"
