"""One PostgreSQL for all tests of the stores. Driver."""

from collections.abc import Iterator

import pytest
from tests.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.stop("immediate")
    server.remove()
