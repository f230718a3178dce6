"""Drivers killed with their JVM in the middle of batches, and the broker too: every row is there once.

Not in the suite: it is the start of some JVMs. What is decided by a batch that runs again is there (test_sink.py).
pytest tests/spark/proof_sink.py, KILLS=n for more of them.
"""

import hashlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
from interop.ports import free_ports
from tests.running_broker import RunningBroker, eventually

ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("KILLS", "2"))
ROWS = 600


class Fixed(RunningBroker):
    """Its HTTP door is where it was before."""

    def __init__(self, folder: Path) -> None:
        (self.http_port,) = free_ports(1)
        super().__init__(folder, arguments=["--http", f"127.0.0.1:{self.http_port}"])
        self.url = f"http://127.0.0.1:{self.http_port}"

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, auth=("guest", "guest"), timeout=60)


def test_killed_drivers_and_brokers_leave_every_row_once(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "test").write_text("guest:guest")
    with Fixed(tmp_path) as broker:
        with broker.client() as http:
            for name in ("source", "target"):
                http.post("/api/v1/topics", json={"name": name, "partitions": 2}).raise_for_status()
            messages = [{"value": f"row {n}", "key": str(n)} for n in range(ROWS)]
            http.post("/api/v1/topics/source/messages", json=messages).raise_for_status()
        for number in range(KILLS):
            before = _last(tmp_path, "offsets")
            driver = _start(broker.url, tmp_path)
            try:
                eventually(partial(_is_in_the_middle, tmp_path, before), 240)
                if number % 2:
                    broker.kill()
            finally:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
            if broker.process is None:
                broker.start()
        last = _start(broker.url, tmp_path, "finish")
        assert last.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
        found: list[str] = []
        with broker.client() as http:
            for partition in range(2):
                offset = 0
                while page := _page(http, partition, offset):
                    found += [one["value"] for one in page]
                    offset = page[-1]["offset"] + 1
    assert (len(found), _digest(found)) == (ROWS, _digest([f"row {n}" for n in range(ROWS)]))


def _start(url: str, folder: Path, *how: str) -> subprocess.Popen[bytes]:
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.spark.sink_driver", url, str(folder), *how],
            cwd=ROOT,
            env=os.environ | {"HEADRACE_TOKENS": str(folder / "tokens")},
            start_new_session=True,
            stdout=log,
            stderr=log,
        )


def _is_in_the_middle(folder: Path, before: int) -> bool:
    """Of a batch after the first of this life: its end is logged, and it is not committed."""
    return before + 1 < _last(folder, "offsets") > _last(folder, "commits")


def _page(http: httpx.Client, partition: int, offset: int) -> list[dict[str, str]]:
    path = f"/api/v1/topics/target/partitions/{partition}/messages"
    found = http.get(path, params={"offset": offset, "limit": 1000}).raise_for_status().json()
    return list(found["messages"])


def _last(folder: Path, log: str) -> int:
    """The number of the last batch in one of the checkpoint's logs; -1: none."""
    names = (one.name for one in (folder / "checkpoint" / log).glob("[0-9]*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _digest(rows: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()
