"""AMQP 0-9-1 clients that we did not write; clients.py lists them."""
