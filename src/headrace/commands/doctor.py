"""`headrace doctor`: what an operator would look at before the first start, and when something is odd. Driver: /proc,
sockets, files. It changes nothing and takes no lock, so it may run beside a broker.

Each check is a function that yields findings; one that meets something wrong says what to do about it. Neighbours:
config.py has the settings it looks at, commands/log.py looks deeper into the log itself.
"""

import ctypes
import json
import os
import platform
import re
import resource
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import click

from headrace import __version__
from headrace.config import Config, load_config
from headrace.core_log.errors import StorageError
from headrace.core_log.inspection import streams
from headrace.core_log.storage.readonly import ReadOnlyStorage
from headrace.gateways.delivery.meter import SystemMeter
from headrace.kinds import Address
from headrace.redaction import printable, redacted_text
from headrace.settings import ConfigError

# Beside connections and segments: sockets that listen, the journal, the metadata, logs, epoll.
HANDLES_BESIDES = 100
# Every kernel that this runs on was built later.
CLOCK_SANE_S = 1_704_067_200
# File systems that lose what was synced when the machine stops, or lock and sync by rules of their own.
FLEETING = frozenset(("tmpfs", "ramfs"))
DISTANT = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"))
LOST = {
    "interval": "up to one interval (storage.interval_ms) of confirmed messages",
    "os": "seconds of confirmed messages",
}


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    text: str


@click.command("doctor")
@click.option("--config", type=click.Path(path_type=Path), help="The TOML file that the broker is started with.")
@click.option("--data", type=click.Path(path_type=Path), help="The data directory, if it is not the configured one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def doctor(config: Path | None, data: Path | None, as_json: bool) -> None:
    """Look at this machine and the configuration as a broker would meet them. Exit status 1 when there is a problem."""
    found = []
    for one in examine(config, data):
        found.append(one)
        tell(one, as_json=as_json)
    if any(one.level is Level.PROBLEM for one in found):
        sys.exit(1)


def tell(one: Finding, *, as_json: bool) -> None:
    text = printable(redacted_text(one.text))
    if as_json:
        click.echo(json.dumps({"check": one.check, "level": one.level.value, "text": text}))
    else:
        colour = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}[one.level]
        click.echo(f"{click.style(f'{one.level.value:<8}', fg=colour)} {one.check:<14} {text}")


def examine(file: Path | None, data: Path | None) -> Iterator[Finding]:
    yield from _versions()
    overrides = {} if data is None else {"node.data": str(data)}
    try:
        config = load_config(file, os.environ, overrides)
    except ConfigError as error:
        for problem in error.problems:
            yield Finding("configuration", Level.PROBLEM, problem)
        return
    yield Finding("configuration", Level.OK, "defaults" if file is None else str(file))
    yield from _open_files(config)
    yield from _memory(config)
    yield from _clock()
    holder = _lock_holder(config.node.data / "lock")
    yield from _directory(config, holder)
    yield from _disk(config)
    yield from _streams(config.node.data)
    yield from _ports(config, holder)


def _versions() -> Iterator[Finding]:
    text = f"headrace {__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    yield Finding("version", Level.OK, text)
    for line in metadata.requires("headrace") or ():
        if "extra ==" in line:
            continue
        name = re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("packages", Level.PROBLEM, f"{name} is missing: install headrace again")


def _open_files(config: Config) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (config.limits.connections_max or 0) + config.storage.handles_max + HANDLES_BESIDES
    allowed = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft != resource.RLIM_INFINITY and soft < wanted:
        way = (
            f"ulimit -n {wanted}" if hard == resource.RLIM_INFINITY or hard >= wanted else "LimitNOFILE= of its service"
        )
        text = (
            f"{allowed} open files are allowed; limits.connections_max and storage.handles_max want {wanted:,}: "
            f"raise it ({way})"
        )
        yield Finding("open files", Level.WARNING, text)
    else:
        yield Finding("open files", Level.OK, f"{allowed} allowed, {wanted:,} wanted")


def _memory(config: Config) -> Iterator[Finding]:
    try:
        size = SystemMeter(Path("/")).memory_bytes_max()
    except OSError as error:
        yield Finding("memory", Level.WARNING, f"the memory of this machine cannot be read: {error}")
        return
    share = config.alarms.memory_share
    limit = f"publishers wait above {share:.0%} of it" if share else "alarms.memory_share = 0: nobody ever waits"
    yield Finding("memory", Level.OK if share else Level.WARNING, f"{size / 2**30:.1f} GiB; {limit}")


def _clock() -> Iterator[Finding]:
    if time.time() < CLOCK_SANE_S:
        yield Finding(
            "clock", Level.PROBLEM, f"the clock says {time.strftime('%Y-%m-%d')}: times of messages would lie"
        )
        return
    synchronised = _is_synchronised()
    if synchronised is None:
        yield Finding("clock", Level.OK, "whether anything keeps it right cannot be told here")
    elif synchronised:
        yield Finding("clock", Level.OK, "synchronised")
    else:
        text = "nothing keeps it right (NTP): delays, expiry and retention go by it"
        yield Finding("clock", Level.WARNING, text)


def _is_synchronised() -> bool | None:
    """What the kernel thinks of its clock; None: it does not say."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    # struct timex with `modes` 0 only asks; 5 is TIME_ERROR: unsynchronised.
    state = adjtimex(ctypes.create_string_buffer(1024))
    return None if state < 0 else bool(state != 5)


def _lock_holder(lock: Path) -> str | None:
    """The process that has the data directory, by the kernel's list of locks: asking for the lock would be felt."""
    try:
        inode = lock.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if "FLOCK" in words and words[-3].rpartition(":")[2] == str(inode):
            return lock.read_text(errors="replace").strip() or "?"
    return None


def _directory(config: Config, holder: str | None) -> Iterator[Finding]:
    data = config.node.data
    if not data.exists():
        parent = next((one for one in data.absolute().parents if one.exists()), Path("/"))
        if os.access(parent, os.W_OK | os.X_OK):
            yield Finding("data directory", Level.OK, f"{data} will be made by the first start")
        else:
            yield Finding("data directory", Level.PROBLEM, f"{data} cannot be made: {parent} is not ours to write in")
        return
    if not data.is_dir() or not os.access(data, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("data directory", Level.PROBLEM, f"{data} cannot be read and written by this user")
        return
    mode = stat.S_IMODE(data.stat().st_mode)
    if mode & 0o077:
        text = f"{data} can be looked into by others (mode {mode:04o}): chmod 700"
        yield Finding("data directory", Level.WARNING, text)
    used = f"in use by process {holder}" if holder is not None else "not in use"
    yield Finding("data directory", Level.OK, f"{data}, {used}")


def _disk(config: Config) -> Iterator[Finding]:
    at = config.node.data.absolute()
    at = next(one for one in (at, *at.parents) if one.exists())
    kind = _file_system(at)
    if kind in FLEETING:
        yield Finding("disk", Level.PROBLEM, f"{at} is on {kind}: it is gone when the machine stops")
    elif kind in DISTANT:
        yield Finding("disk", Level.WARNING, f"{at} is on {kind}: locks and syncs go by the rules of another machine")
    disk = os.statvfs(at)
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    wanted = max(config.alarms.disk_free_bytes, int(config.alarms.disk_free_share * size))
    text = f"{free / 2**30:.1f} of {size / 2**30:.1f} GiB free ({kind or 'unknown file system'})"
    if free < wanted:
        yield Finding("disk", Level.PROBLEM, f"{text}: with less than {wanted / 2**30:.1f} GiB publishers wait")
    else:
        yield Finding("disk", Level.OK, text)


def _file_system(at: Path) -> str | None:
    """The kind of the mount that a path lies on."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    best: tuple[int, str] | None = None
    for line in lines:
        before, _, behind = line.partition(" - ")
        mount = before.split()[4].encode().decode("unicode_escape")
        # Of two mounts at one place the later one counts.
        if at.is_relative_to(mount) and (best is None or len(mount) >= best[0]):
            best = (len(mount), behind.split()[0])
    return None if best is None else best[1]


def _streams(data: Path) -> Iterator[Finding]:
    if not (data / "streams").exists():
        return
    try:
        found = streams(ReadOnlyStorage(data))
    except (StorageError, OSError) as error:
        yield Finding("streams", Level.PROBLEM, f"{error}")
        return
    for one in found:
        if one.problem is not None:
            yield Finding("streams", Level.PROBLEM, f"{one.problem.path}: {one.problem.what}")
    yield Finding("streams", Level.OK, f"{len(found)} known; `headrace log verify` checks every hash")
    for durability, lost in LOST.items():
        names = sorted(
            one.spec.name
            for one in found
            if one.spec is not None and one.spec.kind != "internal" and one.spec.config.durability == durability
        )
        if names:
            text = f"{', '.join(names)}: durability {durability}, a loss of power may take {lost}"
            yield Finding("durability", Level.WARNING, text)


def _ports(config: Config, holder: str | None) -> Iterator[Finding]:
    for one in fields(config.doors):
        address: Address | None = getattr(config.doors, one.name)
        if address is None or not address.port:
            continue
        problem = _cannot_listen(address)
        if problem is None:
            yield Finding("ports", Level.OK, f"{one.name} {address} is free")
        elif holder is not None:
            yield Finding("ports", Level.OK, f"{one.name} {address} is taken, and a broker runs")
        else:
            yield Finding("ports", Level.PROBLEM, f"{one.name} {address}: {problem}; another: --{one.name} HOST:PORT")


def _cannot_listen(address: Address) -> str | None:
    try:
        for family, kind, protocol, _name, where in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
    except OSError as error:
        return error.strerror or str(error)
    return None
