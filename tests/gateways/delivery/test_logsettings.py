"""How the logs of exchanges and queues are kept, by argument and policy: what is asked for, and that it is done."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from headrace.controller.changes import DeletePolicy
from headrace.controller.entities import Binding, DestinationKind
from headrace.controller.table import EMPTY, Table
from headrace.core_log.config import LogConfig
from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, Protocol
from headrace.core_log.spec import read_spec
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.delivery.logsettings import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, LogSettings, log_settings

from .house import NO_PROPERTIES, House, Running

DEFAULT = LogConfig(retention_ms=1_000_000, retention_bytes=5_000_000)


# -- what is asked for ------------------------------------------------------------------------------------------------


def test_who_asks_for_nothing_gets_the_default() -> None:
    assert log_settings(EMPTY).over(DEFAULT) == DEFAULT
    assert log_settings(Table({"x-max-length": 5, "x-partitions": 3}), Table({"max-length": 5})) == LogSettings()


def test_arguments_and_policy_have_the_same_names_but_for_an_x() -> None:
    asked: dict[str, Any] = {"durability": "os", "compression": "lz4", "retention-ms": 7, "retention-bytes": 8}
    wanted = LogSettings(durability="os", compression="lz4", retention_ms=7, retention_bytes=8)
    assert log_settings(Table({f"x-{name}": value for name, value in asked.items()})) == wanted
    assert log_settings(EMPTY, Table(asked)) == wanted
    config = wanted.over(DEFAULT)
    assert (config.durability, config.compression) == ("os", "lz4")
    assert (config.retention_ms, config.retention_bytes) == (7, 8)


def test_argument_decides_over_a_policy_and_of_two_retentions_the_shorter_counts() -> None:
    arguments = Table({"x-durability": "sync", "x-compression": "none", "x-retention-ms": 10, "x-retention-bytes": 20})
    policy = Table({"durability": "os", "compression": "lz4", "retention-ms": 5, "retention-bytes": 30})
    assert log_settings(arguments, policy) == LogSettings("sync", "none", 5, 20)


@pytest.mark.parametrize(("asked", "given"), [(0, SEGMENT_BYTES_MIN), (100_000, 100_000), (1 << 40, SEGMENT_BYTES_MAX)])
def test_size_of_segments_is_what_a_stream_may_ask_for_within_reason(asked: int, given: int) -> None:
    arguments = Table({"x-stream-max-segment-size-bytes": asked})
    assert log_settings(arguments, is_stream=True).over(DEFAULT).segment_bytes_max == given
    assert log_settings(arguments).over(DEFAULT) == DEFAULT


# -- that it is done --------------------------------------------------------------------------------------------------


async def declare(running: Running, name: str = "x", **arguments: Any) -> None:
    table = Table({f"x-{key.replace('_', '-')}": value for key, value in arguments.items()})
    await running.host.declare_exchange(
        name, "fanout", durable=True, auto_delete=False, internal=False, arguments=table
    )


def publish(running: Running, body: bytes, exchange: str = "x") -> tuple[PartitionLog, int]:
    target = running.host.target(exchange, b"", [""])
    attributes = int(Protocol.AMQP) | PERSISTENT
    reached = running.broker.publish(target, [NO_PROPERTIES], [body], attributes=attributes)
    running.broker.dispatch()
    assert target.log is not None and reached is not None
    return target.log, reached


def config_of(running: Running, name: str) -> LogConfig:
    (found,) = [one for one in running.broker.directory.streams.values() if one.spec.name == name]
    return found.partitions[0].config


def written_of(house: House, running: Running, name: str) -> LogConfig:
    (found,) = [one for one in running.broker.directory.streams.values() if one.spec.name == name]
    return read_spec(house.storage, str(found.spec.id)).config


async def test_log_is_born_as_arguments_and_policy_ask(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        await running.policy({"retention-ms": 5000, "compression": "none"})
        await declare(running, durability="os", compression="lz4")
        await running.declare("q", retention_bytes=100_000)
        publish(running, b"1")
        await running.publish("q", b"1")
        exchange, queue = config_of(running, "x"), config_of(running, "q")
        assert (exchange.durability, exchange.compression, exchange.retention_ms) == ("os", "lz4", 5000)
        assert (queue.durability, queue.compression) == ("sync", "none")
        assert (queue.retention_ms, queue.retention_bytes) == (5000, 100_000)


async def test_policy_reaches_logs_that_exist_holds_at_a_restart_and_its_end_gives_the_default_back(
    autojump_clock: MockClock,
) -> None:
    house = House()
    async with house.broker() as running:
        await declare(running)
        await running.declare("q")
        publish(running, b"1")
        await running.publish("q", b"1")
        await running.policy({"durability": "interval", "retention-bytes": 4096})
        for name in ("x", "q"):
            assert config_of(running, name) == LogConfig(durability="interval", retention_bytes=4096)
        await trio.sleep(1)
        assert written_of(house, running, "x") == config_of(running, "x")
    async with house.broker() as running:
        assert config_of(running, "x") == LogConfig(durability="interval", retention_bytes=4096)
        await running.metadata.commit(DeletePolicy("/", "p"))
        assert config_of(running, "x") == config_of(running, "q") == LogConfig()
    async with house.broker() as running:
        assert config_of(running, "x") == config_of(running, "q") == LogConfig()
        assert written_of(house, running, "q") == LogConfig()


async def test_policy_counts_after_a_crash_though_no_file_was_written(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        await declare(running)
        publish(running, b"1")
        await running.broker.committed()
        before = house.storage
        assert isinstance(before, MemoryStorage)
        snapshot = before.after_power_loss(lambda change: True)
        await running.policy({"compression": "lz4"})
    house.storage = snapshot
    async with house.broker(clean=False) as running:
        assert config_of(running, "x").compression == "lz4"


async def test_defaults_of_the_node_reach_streams_that_asked_for_nothing_at_its_next_start(
    autojump_clock: MockClock,
) -> None:
    house = House()
    async with house.broker() as running:
        await declare(running)
        await declare(running, "y", retention_ms=1000)
        publish(running, b"1")
        publish(running, b"1", "y")
    house.log_config = LogConfig(retention_ms=777_777)
    async with house.broker() as running:
        assert (config_of(running, "x").retention_ms, config_of(running, "y").retention_ms) == (777_777, 1000)


async def test_full_disk_keeps_no_policy_from_counting_and_the_file_follows(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House()
    async with house.broker() as running:
        await declare(running)
        publish(running, b"1")
        await running.broker.committed()
        configure = running.broker.directory.configure_stream
        calls = 0

        async def full_at_first(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise DiskFull("no room")
            await configure(*arguments)

        monkeypatch.setattr(running.broker.directory, "configure_stream", full_at_first)
        await running.policy({"retention-ms": 1234})
        assert config_of(running, "x").retention_ms == 1234
        await trio.sleep(1)
        assert written_of(house, running, "x").retention_ms != 1234
        await trio.sleep(10)
        assert written_of(house, running, "x").retention_ms == 1234


async def test_settings_that_change_while_they_are_written_are_never_those_of_before(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House()
    async with house.broker() as running:
        await declare(running)
        publish(running, b"1")
        await running.broker.committed()
        configure = running.broker.directory.configure_stream

        async def slow(*arguments: Any) -> None:
            await trio.sleep(1)
            await configure(*arguments)

        monkeypatch.setattr(running.broker.directory, "configure_stream", slow)
        await running.policy({"durability": "os"})
        await trio.sleep(0.5)
        await running.policy({"durability": "interval"})
        for _ in range(40):
            assert config_of(running, "x").durability == "interval"
            await trio.sleep(0.1)
        assert written_of(house, running, "x").durability == "interval"


async def confirmed(running: Running, body: bytes, exchange: str = "x") -> None:
    log, reached = publish(running, body, exchange)
    await running.broker.wait_committed(log, reached)


@pytest.mark.parametrize("durability", ["sync", "interval", "os"])
async def test_confirm_means_what_the_stream_promises(autojump_clock: MockClock, durability: str) -> None:
    """sync: on the disk. interval: written, and on the disk one interval later at most. os: written."""
    house = House()
    async with house.broker() as running:
        await declare(running, durability=durability)
        # The first one of a log is synced in any case, with the promise not to issue its offset again.
        await confirmed(running, b"first")
        await trio.sleep(1)
        await confirmed(running, b"second")
        assert isinstance(house.storage, MemoryStorage)
        at_once = house.storage.after_power_loss(lambda change: False)
        crashed = house.storage.after_power_loss(lambda change: True)
        await trio.sleep(0.2)
        later = house.storage.after_power_loss(lambda change: False)
    left = {}
    for moment, storage in (("at once", at_once), ("after a crash", crashed), ("later", later)):
        house.storage = storage
        async with house.broker(clean=False) as running:
            (stream,) = [one for one in running.broker.directory.streams.values() if one.spec.name == "x"]
            log = stream.partitions[0]
            left[moment] = [value for run in log.read(0) for value in run.batch.values]
    assert left["after a crash"] == [b"first", b"second"]
    assert (left["at once"] == [b"first", b"second"]) or durability != "sync"
    assert (left["later"] == [b"first", b"second"]) is (durability != "os")


@pytest.mark.parametrize("before", ["sync", "interval", "os"])
@pytest.mark.parametrize("after", ["sync", "interval", "os"])
async def test_durability_changed_while_publishers_wait_leaves_none_of_them_waiting(
    autojump_clock: MockClock, before: str, after: str
) -> None:
    house = House()
    async with house.broker() as running, trio.open_nursery() as nursery:
        await running.policy({"durability": before})
        await declare(running)
        for number in range(20):
            nursery.start_soon(confirmed, running, b"%d" % number)
            if number == 10:
                await running.policy({"durability": after})
            if number % 3 == 0:
                await trio.lowlevel.checkpoint()
        with trio.fail_after(10):
            await running.broker.committed()
        await confirmed(running, b"last")
        assert isinstance(house.storage, MemoryStorage)
        if after == "sync":
            house.storage = house.storage.after_power_loss(lambda change: False)
    async with house.broker(clean=after != "sync") as running:
        (stream,) = [one for one in running.broker.directory.streams.values() if one.spec.name == "x"]
        assert [value for run in stream.partitions[0].read(0) for value in run.batch.values][-1] == b"last"


async def test_retention_of_an_exchange_takes_what_no_queue_needs_and_nothing_else(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        await declare(running, retention_ms=60_000, compression="none")
        await running.declare("q")
        await running.host.bind(Binding("/", "x", DestinationKind.QUEUE, "q", ""))
        await confirmed(running, b"wanted")
        await trio.sleep(100)
        (stream,) = [one for one in running.broker.directory.streams.values() if one.spec.name == "x"]
        log = stream.partitions[0]
        assert log.log_start == 0
        assert running.bodies("q") == [b"wanted"]
        await trio.sleep(5)
        # With nothing new at all, everything goes.
        assert log.log_start == log.end == 1
        await confirmed(running, b"new")
        assert running.bodies("q") == [b"new"]


async def test_stream_takes_its_retention_from_either_name_and_from_a_policy(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("s", queue_type="stream", retention_ms=60_000, max_length_bytes=1 << 20)
        assert (queue.settings.max_age_ms, queue.settings.length_bytes_max) == (60_000, 1 << 20)
        await running.policy({"max-age": "10s", "retention-bytes": 5000, "stream-max-segment-size-bytes": 70_000})
        assert (queue.settings.max_age_ms, queue.settings.length_bytes_max) == (10_000, 5000)
        for number in range(40):
            await running.publish("s", b"%d" % number * 500)
        config = config_of(running, "s")
        assert (config.segment_bytes_max, config.retention_ms, config.retention_bytes) == (65_536, None, None)
        await trio.sleep(3)
        # By size, in steps of a sixteenth.
        assert 5 <= queue.ready_count <= 20
        await trio.sleep(30)
        assert queue.ready_count <= 1
