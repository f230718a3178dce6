"""What the client-driven tests of the HTTP door share: a broker per file, clients that end, names of their own."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
from tests.running_broker import RunningBroker

GUEST = ("guest", "guest")
HTTP = ("--http", "127.0.0.1:0", "--mqtt", "127.0.0.1:0")
PATIENCE_S = 30


class HttpBroker(RunningBroker):
    def __init__(self, folder: Path, *, config: str = "") -> None:
        super().__init__(folder, config=config, arguments=HTTP)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    def client(self, auth: tuple[str, str] | None = GUEST) -> httpx.Client:
        return httpx.Client(base_url=self.url, auth=auth, timeout=PATIENCE_S)

    def restart(self, *, kill: bool = False) -> None:
        self.kill() if kill else self.stop()
        self.start()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[HttpBroker]:
    """One for all tests of a file, with the file's CONFIG if it has one; names from `name` keep tests apart."""
    config = getattr(request.module, "CONFIG", "")
    with HttpBroker(tmp_path_factory.mktemp("broker"), config=config) as running:
        yield running
        assert running.is_running(), f"the broker ended by itself\n{running.last_lines()}"
        running.stop()
        told = running.log_path.read_text()
        assert "Traceback" not in told, told


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[HttpBroker]:
    """One for this test alone, to be stopped, killed and started again."""
    with HttpBroker(tmp_path) as running:
        yield running


@pytest.fixture
def http(broker: HttpBroker) -> Iterator[httpx.Client]:
    """Logged in as guest."""
    with broker.client() as client:
        yield client


_numbers = count(1)


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t{os.getpid()}-{next(_numbers)}"
