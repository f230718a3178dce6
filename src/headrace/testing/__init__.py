"""A real broker inside a test or a notebook, and a clock that the test moves. docs/testing.md tells how.

Neighbours: broker.py runs the node in a thread, clock.py is its time, headrace/pytest_plugin.py has the fixture.
"""

from headrace.testing.broker import EmbeddedBroker
from headrace.testing.clock import VirtualClock

__all__ = ["EmbeddedBroker", "VirtualClock"]
