"""How much memory this process has and how full its disk is, and the alarms that follow. Driver: /proc, cgroups, trio.

Memory is what the kernel counts against us (resident set), and the limit the smaller of the machine's memory and the
container's (cgroup v2 or v1). Reading both takes some 30 us a second.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from headrace.core_log.env import Env
from headrace.gateways.delivery.alarms import Alarm, Alarms, Measured

_log = logging.getLogger(__name__)

PERIOD_S = 1.0


class Meter(Protocol):
    def read(self) -> Measured:
        """May block for as long as a disk does."""


class SystemMeter:
    """This process on this machine."""

    def __init__(self, data: Path, *, root: Path = Path("/")) -> None:
        """`root`: where /proc and /sys are, for tests."""
        self._data = data
        self._root = root
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._memory_files = _memory_limit_files(root)

    def read(self) -> Measured:
        disk = os.statvfs(self._data)
        return Measured(
            memory_bytes=self.memory_bytes(),
            memory_bytes_max=self.memory_bytes_max(),
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            disk_bytes=disk.f_blocks * disk.f_frsize,
        )

    def memory_bytes(self) -> int:
        return int((self._root / "proc/self/statm").read_bytes().split()[1]) * self._page_bytes

    def memory_bytes_max(self) -> int:
        limits = [self._machine_bytes()]
        for file in self._memory_files:
            try:
                text = file.read_text().strip()
            except OSError:
                continue
            # v2 says "max" for none; v1 a number beyond all machines, which the minimum passes over.
            if text.isdecimal():
                limits.append(int(text))
        return min(limits)

    def _machine_bytes(self) -> int:
        for line in (self._root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
        raise OSError("no MemTotal in /proc/meminfo")


def _memory_limit_files(root: Path) -> list[Path]:
    """The limits of our control group and of all above it."""
    files: list[Path] = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in groups:
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, or just "/"; what is not there is passed over when read.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        files += [base.joinpath(*parts[:depth], name) for depth in range(len(parts), -1, -1)]
    return files


class Watch:
    """Measures once a second and tells whoever waits."""

    def __init__(self, alarms: Alarms, meter: Meter, env: Env) -> None:
        self.alarms = alarms
        self._meter = meter
        self._env = env
        self._listeners: list[Callable[[], None]] = []
        # (bytes, vhost, queue) of those that hold most of the disk.
        self.holders: Callable[[], Sequence[tuple[int, str, str]]] = lambda: ()
        self._failed = False

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it whenever an alarm was raised or cleared."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Call it no more, as what it serves is being torn down."""
        self._listeners.remove(listener)

    def tell(self) -> None:
        """An alarm was raised or cleared."""
        for listener in tuple(self._listeners):
            listener()

    async def run(self) -> None:
        while True:
            await self.look()
            await self._env.clock.sleep(PERIOD_S)

    async def look(self) -> None:
        try:
            measured = await self._env.worker.run(self._meter.read)
        except (OSError, ValueError) as error:
            # Nothing is known: what was known last stays.
            if not self._failed:
                _log.error("memory and disk cannot be measured: %s", error)
            self._failed = True
            return
        self._failed = False
        turned = self.alarms.measure(measured)
        for one in turned:
            extra = {"alarm": one.alarm, "bytes": one.measured, "limit": one.limit}
            if one.raised and one.alarm is Alarm.DISK:
                # The first question that somebody will ask.
                held = [f"queue '{queue}' in vhost '{vhost}': {size} bytes" for size, vhost, queue in self.holders()]
                _log.warning("alarm raised: publishers wait", extra=extra | {"held_by": held})
            elif one.raised:
                _log.warning("alarm raised: publishers wait", extra=extra)
            else:
                _log.warning("alarm cleared", extra=extra)
        if turned:
            self.tell()
