"""Headrace: AMQP and MQTT doors on one commit log. Imports nothing heavy."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Whoever only wants to know the version does not pay for Arrow.
    if name == "read":
        from headrace.reading import read

        return read
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
