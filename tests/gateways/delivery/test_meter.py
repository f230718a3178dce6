"""What the kernel says about memory and disk is read right, and alarms follow it."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core_log.real import real_env
from headrace.gateways.delivery.alarms import GIB, Alarm, Alarms, Measured
from headrace.gateways.delivery.meter import SystemMeter, Watch

PLENTY = Measured(memory_bytes=100, memory_bytes_max=1000, disk_free_bytes=50 * GIB, disk_bytes=100 * GIB)


class FakeMeter:
    def __init__(self) -> None:
        self.now = PLENTY
        self.fails = False

    def read(self) -> Measured:
        if self.fails:
            raise OSError("the disk is gone")
        return self.now


def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    now = SystemMeter(tmp_path).read()
    assert 0 < now.memory_bytes < now.memory_bytes_max
    assert 0 <= now.disk_free_bytes <= now.disk_bytes


def machine(root: Path, *, cgroup: str, **files: str) -> SystemMeter:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/statm").write_text("9000 2000 300 1 0 500 0\n")
    (root / "proc/meminfo").write_text("MemTotal:        1000 kB\nMemFree:   10 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SystemMeter(root, root=root)


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/\n", {}, 1_024_000),
        ("0::/\n", {"memory.max": "max\n"}, 1_024_000),
        ("0::/\n", {"memory.max": "500000\n"}, 500_000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "400000\n"}, 400_000),
        ("0::/../other\n", {"memory.max": "300000\n"}, 300_000),
        ("5:cpu:/\n4:memory,hugetlb:/a\n", {"memory/a/memory.limit_in_bytes": "200000\n"}, 200_000),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 1_024_000),
        ("", {}, 1_024_000),
    ],
)
def test_memory_limit_is_the_smallest_of_machine_and_control_groups(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int
) -> None:
    assert machine(tmp_path, cgroup=cgroup, **files).memory_bytes_max() == limit


def test_memory_is_the_resident_set(tmp_path: Path) -> None:
    meter = machine(tmp_path, cgroup="0::/\n")
    assert meter.memory_bytes() % 2000 == 0 and meter.memory_bytes() >= 2000 * 4096


async def test_alarms_are_told_and_logged_once_each_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meter = FakeMeter()
    watch = Watch(Alarms(), meter, real_env(tmp_path))
    told: list[frozenset[Alarm]] = []
    watch.listen(lambda: told.append(watch.alarms.active))
    with caplog.at_level(logging.WARNING):
        for memory in (100, 700, 800, 700, 100, 100):
            meter.now = replace(PLENTY, memory_bytes=memory)
            await watch.look()
    assert told == [{Alarm.MEMORY}, frozenset()]
    assert [record.message for record in caplog.records] == ["alarm raised: publishers wait", "alarm cleared"]


async def test_alarm_of_the_disk_names_the_queues_that_hold_most_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meter = FakeMeter()
    watch = Watch(Alarms(), meter, real_env(tmp_path))
    watch.holders = lambda: [(500, "/", "forgotten"), (20, "shop", "orders")]
    meter.now = replace(PLENTY, disk_free_bytes=0)
    with caplog.at_level(logging.WARNING):
        await watch.look()
    (record,) = caplog.records
    held = ["queue 'forgotten' in vhost '/': 500 bytes", "queue 'orders' in vhost 'shop': 20 bytes"]
    assert record.held_by == held  # type: ignore[attr-defined]


async def test_what_cannot_be_measured_leaves_the_alarms_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meter = FakeMeter()
    meter.now = replace(PLENTY, disk_free_bytes=0)
    watch = Watch(Alarms(), meter, real_env(tmp_path))
    await watch.look()
    meter.fails = True
    with caplog.at_level(logging.ERROR):
        await watch.look()
        await watch.look()
    assert watch.alarms.active == {Alarm.DISK}
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
