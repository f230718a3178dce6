"""Claims: what two followers cost a leader, and how fast one that is far behind catches up. Driver: processes, sockets.

Three processes with a data directory each, linked over loopback; this one leads. The log alone, no broker: sixteen
publishers append fifty records of 100 B at a time and wait for the commit, as AMQP connections with confirms do. Cost:
messages per CPU second of the leader's process, with two followers in sync beside a directory of its own with none. A
broker spends most of its time on its clients, so what it loses is less. That is measured with brokers: scenario A1-100
(scenarios.py) against a node alone and against the leader of three, turn by turn, messages per CPU second of that one
process.

`python -m bench.replication 5` has a follower catch up with 5 GB (1 unless said); `python -m bench.replication broker`
measures what a leader loses, and nothing else.
"""

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from random import Random
from statistics import median
from subprocess import PIPE, Popen
from typing import NamedTuple
from uuid import UUID

import trio

from bench.claim import Better, Claim
from bench.comparison import broken_promise
from bench.peers.headrace import Headrace
from bench.peers.headrace_cluster import HeadraceCluster
from bench.peers.peer import NotInstalled
from bench.scenarios import SCENARIOS, play
from bench.scratch import open_directory, scratch_folder
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.log import PartitionLog
from headrace.core_log.peer.door import PeerDoor
from headrace.core_log.peer.errors import PeerUnreachable
from headrace.core_log.peer.frames import Hello, Purpose
from headrace.core_log.peer.link import PeerLink, Peers
from headrace.core_log.real import real_env
from headrace.core_log.replication.assignment import Assignment, Ballot, Member, RowVersion
from headrace.core_log.replication.config import ReplicationConfig
from headrace.core_log.replication.shard import ShardReplica

SECONDS = 5.0
PUBLISHERS = 16
RECORDS = 50
VALUE = b"v" * 100
GIGABYTES = 1
LARGE = 10_000
BALLOT = Ballot(1, 1)
SECRET = b"nobody else is on loopback"
SCENARIO = "A1-100"
# Turns of each of the two brokers.
TURNS = 3
PATIENT = ReplicationConfig(lag_s=600, gone_s=600)


class Where(NamedTuple):
    host: str
    port: int


def member(node: int) -> Member:
    return Member(node, 1, UUID(int=node + 1))


def row(in_sync: int) -> Assignment:
    copies = tuple(member(node).copy for node in range(in_sync))
    return Assignment((0, 1, 2), 0, 1, 1, copies, RowVersion(1, BALLOT), min(in_sync, 2))


def hello(node: int) -> Hello:
    return Hello(UUID(int=77), node, 1, UUID(int=node + 1), Purpose.FETCH)


async def closed() -> None:
    await trio.lowlevel.checkpoint()


def replica(folder: Path, node: int, leader: Where | None) -> ShardReplica:
    peers = Peers(lambda: hello(node), SECRET, lambda: os.urandom(32))

    async def connect(_node: int) -> PeerLink:
        if leader is None:
            raise PeerUnreachable("this one leads")
        return await peers.connect(leader, Purpose.FETCH, b"0")

    return ShardReplica(
        real_env(folder),
        0,
        member(node),
        DirectoryConfig(),
        connect=connect,
        alter=lambda _shard, _request: None,
        stepped_down=closed,
        leading=lambda _stint: None,
        config=PATIENT,
    )


async def follow(folder: Path, node: int, port: int, in_sync: int) -> None:
    """The whole life of a follower's process."""
    found = replica(folder, node, Where("127.0.0.1", port))
    await found.open(clean=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run)
        await found.obey(BALLOT, row(in_sync))
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


@contextmanager
def follower(folder: Path, node: int, port: int, in_sync: int):  # type: ignore[no-untyped-def]
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.replication", "follow", str(folder), str(node), str(port), str(in_sync)]
    with Popen(command, stdin=PIPE) as process:
        try:
            yield process
        finally:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            process.wait()


@asynccontextmanager
async def leader(folder: Path, in_sync: int) -> AsyncIterator[tuple[ShardReplica, int]]:
    folder.mkdir()
    found = replica(folder, 0, None)
    await found.open(clean=False)
    door = PeerDoor(lambda: hello(0), SECRET, lambda: os.urandom(32), {Purpose.FETCH: found.serve_fetch})
    _host, port = await door.open("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(door.serve)
        nursery.start_soon(found.run)
        await found.obey(BALLOT, row(in_sync))
        yield found, port
        nursery.cancel_scope.cancel()


async def publish(directory: LogDirectory, log: PartitionLog, seconds: float) -> tuple[int, float]:
    """Messages confirmed, and CPU seconds of this process for them."""
    confirmed = 0
    end = time.monotonic() + seconds

    async def one() -> None:
        nonlocal confirmed
        keys, properties, values = [b"key"] * RECORDS, [b""] * RECORDS, [VALUE] * RECORDS
        while time.monotonic() < end:
            done = trio.Event()
            appended = log.append(keys, properties, values, timestamp_us=time.time_ns() // 1000)
            log.when_committed(appended.next_offset, done.set)
            directory.committer.urgent(log)
            await done.wait()
            confirmed += RECORDS

    begun = time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(PUBLISHERS):
            nursery.start_soon(one)
    return confirmed, time.process_time() - begun


async def alone(folder: Path, seconds: float) -> tuple[int, float]:
    folder.mkdir()
    directory = open_directory(folder)
    stream = await directory.create_stream("bench", kind="topic")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.run)
        await publish(directory, stream.partitions[0], 1.0)
        found = await publish(directory, stream.partitions[0], seconds)
        nursery.cancel_scope.cancel()
    return found


async def replicated(folder: Path, seconds: float) -> tuple[int, float]:
    folder.mkdir()
    async with leader(folder / "0", 3) as (found, port):
        with follower(folder / "1", 1, port, 3), follower(folder / "2", 2, port, 3):
            stream = await found.directory.create_stream("bench", kind="topic")
            log = stream.partitions[0]
            with trio.fail_after(60):
                await publish(found.directory, log, 1.0)
            return await publish(found.directory, log, seconds)


async def catch_up(folder: Path, gigabytes: int) -> tuple[float, float, float]:
    """MB/s of a follower that has nothing, and the CPU seconds of both sides for each GB."""
    folder.mkdir()
    async with leader(folder / "0", 1) as (found, port):
        config = LogConfig(compression="none")
        stream = await found.directory.create_stream("bench", kind="topic", config=config)
        log = stream.partitions[0]
        value = Random(1).randbytes(LARGE)
        while log.byte_count < gigabytes * 10**9:
            for _ in range(100):
                log.append([b"k"] * 50, [b""] * 50, [value] * 50, timestamp_us=1)
            found.directory.committer.urgent(log)
            await found.directory.committer.flush()
        size = log.byte_count
        from_key = next(iter(found.logs))
        spent = time.process_time()
        with follower(folder / "1", 1, port, 1) as process:
            while not any(found.replica.position(1, one) for one in found.logs):
                await trio.sleep(0.001)
            begun, skipped = time.monotonic(), found.replica.position(1, from_key) / log.written_end
            while found.replica.position(1, from_key) < log.written_end:
                await trio.sleep(0.005)
            seconds = time.monotonic() - begun
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            theirs = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        gb = size / 1e9
        return size * (1 - skipped) / 1e6 / seconds, (time.process_time() - spent) / gb, theirs / gb


def bare_write_mb_s(folder: Path, size: int = 500_000_000) -> float:
    """What the disk takes: 4 MB at a time, each synced."""
    block = Random(2).randbytes(4_000_000)
    begun = time.monotonic()
    with (folder / "bare").open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
            file.flush()
            os.fdatasync(file.fileno())
    return size / 1e6 / (time.monotonic() - begun)


def lost_by_leader(seconds: float) -> Claim:
    """What replication costs a broker that leads, of what it does alone."""
    name = "what a leader of three loses of a node alone, messages per CPU second of its process"
    scenario = next(one for one in SCENARIOS if one.name == SCENARIO)
    rates: dict[str, list[float]] = {"alone": [], "leads": []}
    with ExitStack() as up:
        try:
            leader = up.enter_context(HeadraceCluster(is_one_node=True).start())
        except NotInstalled as error:
            return Claim(name, None, 0.3, Better.LESS, "lost", str(error))
        servers = {"alone": up.enter_context(Headrace("amqp").start()), "leads": leader}
        for _ in range(TURNS):
            for which, server in servers.items():
                result = play(scenario, server, seconds)[SCENARIO]
                wrong = broken_promise(result)
                if wrong is not None:
                    return Claim(name, 1.0, 0.3, Better.LESS, "lost", f"the one that is {which}: {wrong}")
                rates[which].append(float(result["received_per_server_cpu_s"]))
    single, leading = median(rates["alone"]), median(rates["leads"])
    detail = f"{SCENARIO}, median of {TURNS}: {leading:,.0f} against {single:,.0f} messages per CPU second"
    return Claim(name, 1 - leading / single, 0.3, Better.LESS, "lost", detail)


def claim(gigabytes: int = GIGABYTES, seconds: float = SECONDS) -> list[Claim]:
    with scratch_folder() as folder:
        one_count, one_cpu = trio.run(alone, folder / "alone", seconds)
        count, cpu = trio.run(replicated, folder / "replicated", seconds)
        rate, ours, theirs = trio.run(catch_up, folder / "far", gigabytes)
        disk = bare_write_mb_s(folder)
    lost = lost_by_leader(seconds)
    single, shared = one_count / one_cpu, count / cpu
    extra = max(0.0, 1 / shared - 1 / single)
    detail = (
        f"{shared:,.0f} against {single:,.0f} messages per CPU second of the leader, {extra * 1e6:.2f} us more each"
    )
    return [
        Claim("a leader with two followers beside a log alone", shared / single, None, detail=detail),
        lost,
        Claim(
            "a follower catches up",
            rate,
            150.0,
            unit="MB/s",
            detail=f"{gigabytes} GB; bare synced writes {disk:,.0f} MB/s; CPU s per GB: leader {ours:.2f}, "
            f"follower {theirs:.2f}",
        ),
        Claim("the same beside bare synced writes of this disk", rate / disk, None),
    ]


def main() -> None:
    if sys.argv[1:2] == ["follow"]:
        folder, node, port, in_sync = sys.argv[2:]
        trio.run(follow, Path(folder), int(node), int(port), int(in_sync))
        return
    found = [lost_by_leader(SECONDS)] if sys.argv[1:2] == ["broker"] else claim(*map(int, sys.argv[1:2]))
    for one in found:
        figure = "not run" if one.figure is None else f"{one.figure:.3g}"
        print(f"{one.name}: {figure} {one.unit} ({one.verdict.value}); {one.detail}")


if __name__ == "__main__":
    main()
