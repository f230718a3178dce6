"""A node locks, knows itself, opens its doors, drains, and leaves the mark of a clean stop."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import pytest
import trio

from headrace.config import Config
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.errors import DirectoryInUse, Poisoned, StorageError, UnknownFormat
from headrace.core_log.real import real_env
from headrace.core_log.storage.memory import MemoryStorage
from headrace.exits import DoorNotOpened
from headrace.kinds import Address
from headrace.node import Door, Identity, decode_identity, encode_identity, open_identity, run_node

T = TypeVar("T")
EXAMPLE = Identity(node=UUID(int=1), disk=UUID(int=2))


class Recorder:
    """A door that notes what is asked of it; told to, it refuses to open or never finishes draining."""

    def __init__(self, name: str, story: list[str], *, refuses: bool = False, lingers: bool = False) -> None:
        self.name = name
        self._story = story
        self._refuses = refuses
        self._lingers = lingers
        self._drained = trio.Event()

    async def open(self, address: Address) -> Address:
        if self._refuses:
            raise OSError(98, "Address already in use")
        self._story.append(f"{self.name} opens")
        return replace(address, port=address.port or 40_000)

    async def serve(self) -> None:
        try:
            await self._drained.wait()
        finally:
            self._story.append(f"{self.name} ends")

    async def drain(self) -> None:
        self._story.append(f"{self.name} drains")
        if self._lingers:
            await trio.sleep_forever()
        self._drained.set()


class Publisher:
    """A door that publishes one message to a stream of its own and waits for the commit."""

    name = "amqp"

    def __init__(self, config: Config, log: LogDirectory) -> None:
        self._config = config
        self._log = log
        self._committed = trio.Event()

    async def open(self, address: Address) -> Address:
        return address

    async def serve(self) -> None:
        stream = await self._log.create_stream("mill", kind="topic", config=self._config.storage.stream_defaults())
        log = stream.partitions[0]
        appended = log.append([b"key"], [b""], [b"value"], timestamp_us=1)
        log.when_committed(appended.next_offset, lambda *_: self._committed.set())
        self._log.committer.urgent(log)
        await trio.sleep_forever()

    async def drain(self) -> None:
        await self._committed.wait()


def no_doors(config: Config, log: LogDirectory) -> list[Door]:
    return []


def config_with(**doors: str | None) -> Config:
    config = Config()
    given = {name: None if text is None else Address("127.0.0.1", int(text)) for name, text in doors.items()}
    return replace(config, doors=replace(config.doors, **given))


async def run_and_stop(config: Config, env: Env, doors: list[Door]) -> Mapping[str, Address]:
    stop = trio.Event()
    start = partial(run_node, config, env, stop=stop, doors=lambda config, log: doors)
    async with trio.open_nursery() as nursery:
        bound: Mapping[str, Address] = await nursery.start(start)
        stop.set()
    return bound


async def test_doors_that_are_on_open_in_order_and_are_told_where(tmp_path: Path) -> None:
    story: list[str] = []
    doors: list[Door] = [Recorder(name, story) for name in ("amqp", "mqtt", "http")]
    bound = await run_and_stop(config_with(amqp="0", mqtt=None, http="15672"), real_env(tmp_path), doors)
    assert bound == {"amqp": Address("127.0.0.1", 40_000), "http": Address("127.0.0.1", 15672)}
    assert story[:2] == ["amqp opens", "http opens"]
    assert sorted(story[2:]) == ["amqp drains", "amqp ends", "http drains", "http ends"]


async def test_first_start_makes_an_identity_and_later_starts_keep_it(tmp_path: Path) -> None:
    await run_and_stop(Config(), real_env(tmp_path), [])
    first = (tmp_path / "node.json").read_bytes()
    await run_and_stop(Config(), real_env(tmp_path), [])
    assert (tmp_path / "node.json").read_bytes() == first
    assert json.loads(first)["format"] == 1


async def test_mark_of_a_clean_stop_is_there_only_while_nothing_runs(tmp_path: Path) -> None:
    stop = trio.Event()
    for _ in range(2):
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(run_node, Config(), real_env(tmp_path), stop=stop, doors=no_doors))
            assert not (tmp_path / "clean").exists()
            stop.set()
        assert (tmp_path / "clean").exists()


async def test_cancelled_node_counts_as_crashed_and_its_lock_is_free(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(run_node, Config(), real_env(tmp_path), stop=trio.Event(), doors=no_doors))
        nursery.cancel_scope.cancel()
    assert not (tmp_path / "clean").exists()
    await run_and_stop(Config(), real_env(tmp_path), [])


async def test_second_node_on_a_data_directory_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(run_node, Config(), real_env(tmp_path), stop=stop, doors=no_doors))
        with pytest.raises(DirectoryInUse):
            await run_node(Config(), real_env(tmp_path), stop=stop, doors=no_doors)
        with pytest.raises(DirectoryInUse):
            real_env(tmp_path).storage.lock()
        stop.set()


async def test_what_was_committed_is_there_after_a_clean_restart(tmp_path: Path) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        publish = partial(run_node, Config(), real_env(tmp_path), stop=stop, doors=lambda *of: [Publisher(*of)])
        await nursery.start(publish)
        stop.set()
    found: list[tuple[str, int]] = []

    def look(config: Config, log: LogDirectory) -> list[Door]:
        found.extend((stream.spec.name, stream.partitions[0].end) for stream in log.streams.values())
        return []

    stopped = trio.Event()
    stopped.set()
    await run_node(Config(), real_env(tmp_path), stop=stopped, doors=look)
    assert found == [("mill", 1)]


async def test_disk_that_fails_to_sync_ends_the_node_and_leaves_no_mark_of_a_clean_stop(tmp_path: Path) -> None:
    storage = MemoryStorage()
    env = replace(real_env(tmp_path), storage=storage, worker=Inline())

    def publish_on_a_failing_disk(config: Config, log: LogDirectory) -> list[Door]:
        storage.fail("sync", times=1_000)
        return [Publisher(config, log)]

    with pytest.RaisesGroup(Poisoned, flatten_subgroups=True):
        await run_node(Config(), env, stop=trio.Event(), doors=publish_on_a_failing_disk)
    assert not storage.process_crash().exists("clean")


async def test_door_that_cannot_listen_stops_the_start_and_shuts_the_others(tmp_path: Path) -> None:
    story: list[str] = []
    doors: list[Door] = [Recorder("amqp", story), Recorder("mqtt", story, refuses=True)]
    refusal = pytest.RaisesExc(DoorNotOpened, match=r"mqtt door: .* 127.0.0.1:1883: Address already")
    with pytest.RaisesGroup(refusal, flatten_subgroups=True):
        await run_node(Config(), real_env(tmp_path), stop=trio.Event(), doors=lambda config, log: doors)
    assert story == ["amqp opens", "amqp ends"]
    real_env(tmp_path).storage.lock()


async def test_drain_is_given_up_when_its_time_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    story: list[str] = []
    env = replace(real_env(tmp_path), worker=Inline())
    before = trio.current_time()
    with caplog.at_level(logging.WARNING):
        await run_and_stop(Config(), env, [Recorder("amqp", story, lingers=True)])
    assert trio.current_time() - before == Config().node.drain_seconds
    assert story == ["amqp opens", "amqp drains", "amqp ends"]
    assert "still connected" in caplog.text
    assert (tmp_path / "clean").exists()


class Inline:
    """A worker without threads: a clock that jumps would race them."""

    async def run(self, call: Callable[[], T]) -> T:
        return call()


def test_identity_reads_back() -> None:
    assert decode_identity(encode_identity(EXAMPLE)) == EXAMPLE


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"7", b"null", b'{"format": 1}', b'{"format": 1, "node": 5, "disk": 6}']
)
def test_damaged_identity_is_refused(data: bytes) -> None:
    with pytest.raises(StorageError, match=r"node\.json: cannot be read"):
        decode_identity(data)


def test_identity_of_a_later_format_is_refused() -> None:
    with pytest.raises(UnknownFormat, match="format 1, the directory has 2"):
        decode_identity(b'{"format": 2}')


@pytest.mark.parametrize("name", ["streams", "views", "meta.sqlite", "clean"])
def test_directory_that_lost_its_identity_is_not_adopted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(StorageError, match=rf"node\.json is missing though {name} is there"):
        open_identity(real_env(tmp_path))
