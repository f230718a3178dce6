"""The fixture `headrace_broker` for every project that has headrace installed. Driver of pytest.

Found by pytest through the entry point of the package. It imports nothing of the broker until a test asks for one:
every run of pytest in that environment loads this file. Neighbours: testing/ is what it starts, docs/testing.md tells.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.testing import EmbeddedBroker


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "headrace(config, settings, doors, frozen): how the broker of `headrace_broker` is started"
    )


@pytest.fixture
def headrace_broker(request: pytest.FixtureRequest) -> Iterator["EmbeddedBroker"]:
    """A broker of the test's own, empty, with every door on a free port and a clock that the test moves."""
    from headrace.testing import EmbeddedBroker

    marker = request.node.get_closest_marker("headrace")
    with EmbeddedBroker(**(marker.kwargs if marker is not None else {})) as broker:
        yield broker
