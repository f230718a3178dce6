"""Members of a group at work while the broker is killed: every message reaches somebody, and no commit is lost."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from interop.ports import free_ports
from tests.running_broker import RunningBroker

GUEST = ("guest", "guest")
GROUP = "/api/v1/consumer-groups/workers"
PARTITIONS = 4
MESSAGES = 200


class Fixed(RunningBroker):
    """Its HTTP door is where it was before."""

    def __init__(self, folder: Path) -> None:
        (self.http_port,) = free_ports(1)
        super().__init__(folder, arguments=["--http", f"127.0.0.1:{self.http_port}"])

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.http_port}", auth=GUEST, timeout=30)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Fixed]:
    with Fixed(tmp_path) as running:
        yield running


class Worker(threading.Thread):
    """Polls, works, commits; whatever goes wrong, it goes on, and joins again when it has to."""

    def __init__(self, broker: Fixed, stop: threading.Event) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, str]] = []
        # What was answered, by partition.
        self.committed: dict[int, int] = {}
        self._broker = broker
        self._stop_asked = stop

    def run(self) -> None:
        with self._broker.client() as http:
            member: str | None = None
            generation = 0
            while not self._stop_asked.is_set():
                try:
                    if member is None:
                        joined = http.post(f"{GROUP}/members", json={"topics": ["jobs"]}).raise_for_status().json()
                        member, generation = joined["member_id"], joined["generation"]
                    query = {"generation": generation, "wait_ms": 200, "limit": 7}
                    answer = http.get(f"{GROUP}/members/{member}/messages", params=query)
                    if answer.status_code == 404:
                        member = None
                        continue
                    polled = answer.raise_for_status().json()
                    generation = polled["generation"]
                    self.seen += [(one["partition"], one["offset"], one["value"]) for one in polled["messages"]]
                    self._commit(http, member, generation, polled["positions"])
                except httpx.HTTPError:
                    time.sleep(0.05)

    def _commit(self, http: httpx.Client, member: str, generation: int, positions: list[dict[str, int]]) -> None:
        for one in positions:
            body = {"offsets": [one], "member_id": member, "generation": generation}
            if http.post(f"{GROUP}/offsets", json=body).status_code == 200:
                self.committed[one["partition"]] = max(one["offset"], self.committed.get(one["partition"], 0))


def publish(broker: Fixed, first: int, end: int) -> None:
    with broker.client() as http:
        messages = [{"value": str(number), "partition": number % PARTITIONS} for number in range(first, end)]
        http.post("/api/v1/topics/jobs/messages", json=messages).raise_for_status()


def test_members_lose_nothing_when_the_broker_is_killed(broker: Fixed) -> None:
    with broker.client() as http:
        http.post("/api/v1/topics", json={"name": "jobs", "partitions": PARTITIONS}).raise_for_status()
    stop = threading.Event()
    workers = [Worker(broker, stop) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        publish(broker, 0, MESSAGES // 2)
        while sum(len(worker.seen) for worker in workers) < MESSAGES // 4:
            time.sleep(0.01)
        broker.kill()
        broker.start()
        publish(broker, MESSAGES // 2, MESSAGES)
        until = time.monotonic() + 60
        with broker.client() as http:
            while http.get(GROUP).json()["lag"]:
                assert time.monotonic() < until, http.get(GROUP).json()
                time.sleep(0.05)
            described = http.get(GROUP).json()
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    seen = [one for worker in workers for one in worker.seen]
    assert {value for _partition, _offset, value in seen} == {str(number) for number in range(MESSAGES)}
    # One value for each place, whoever read it, before the kill or after.
    assert len({(partition, offset) for partition, offset, _value in seen}) == MESSAGES
    for one in described["partitions"]:
        for worker in workers:
            assert one["committed"] >= worker.committed.get(one["partition"], 0)
