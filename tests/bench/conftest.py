"""The C programs of bench/, built once for these tests, apart from those that a benchmark may be using right now."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.peers.peer import Running, process

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with loadgen, limits and nullbroker. A warning of the compiler is an error."""
    out = tmp_path_factory.mktemp("programs")
    command = ["make", "--silent", "-C", str(BENCH), f"OUT={out}", "CFLAGS=-O2 -Werror"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return out


@pytest.fixture
def null_broker(programs: Path, tmp_path: Path) -> Iterator[Running]:
    """The smallest server that loadgen can talk to over MQTT."""
    log = tmp_path / "nullbroker.log"
    with process([str(programs / "nullbroker"), "0"], log, lambda: log.read_text().endswith("\n")) as server:
        port = int(log.read_text().rpartition(":")[2])
        yield Running("nullbroker", "mqtt", port, server.pid, "0", log)
