"""The machine that a figure was measured on: its limits, cores and load. Driver: runs the limits program.

A ratio tells how well the broker does; these tell how good the machine lets anybody be.
"""

import os
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIMITS = Path(__file__).parent / "limits"

# Field -> the line that `limits` prints for it.
LINES = {
    "memcpy_cached_mb_s": r"memcpy 64 KB blocks \(in cache\): ([\d.]+) MB/s",
    "memcpy_memory_mb_s": r"memcpy 64 MB blocks \(memory\): ([\d.]+) MB/s",
    "tcp_mb_s": r"loopback TCP, 65536 B writes: ([\d.]+) MB/s",
    "tcp_mb_per_cpu_s": r"loopback TCP, 65536 B writes: .*, ([\d.]+) MB per CPU-s",
    "tcp_small_writes_s": r"loopback TCP, 128 B writes: .*, ([\d.]+) writes/s",
    "tcp_round_trip_us": r"loopback TCP round trip, 100 B: .*p50 ([\d.]+) us",
    "write_cached_mb_s": r"sequential write, 1048576 B blocks, no sync: ([\d.]+) MB/s",
    "write_synced_mb_s": r"sequential write, 1048576 B blocks, fdatasync every 16777216 B: ([\d.]+) MB/s",
    "fdatasync_growing_us": r"sequential write, 4096 B blocks, .*latency p50 ([\d.]+) us",
    "fdatasync_preallocated_us": r"overwrite 4 KB of a preallocated file \+ fdatasync: .*p50 ([\d.]+) us",
}


def cpu_s(pid: int) -> float:
    """What a process has spent of its processors so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Limits:
    """What `limits` found; MB are 10^6 bytes, latencies are medians."""

    memcpy_cached_mb_s: float
    memcpy_memory_mb_s: float
    tcp_mb_s: float
    tcp_mb_per_cpu_s: float  # both ends
    tcp_small_writes_s: float
    tcp_round_trip_us: float
    write_cached_mb_s: float
    write_synced_mb_s: float
    fdatasync_growing_us: float
    fdatasync_preallocated_us: float


@dataclass(frozen=True, slots=True)
class Machine:
    processor: str
    cores: int
    load: float  # average over the minute before
    kernel: str
    python: str
    directory: str  # where brokers and limits write
    file_system: str
    limits: Limits


def parse(output: str) -> Limits:
    found = {field: re.search(pattern, output) for field, pattern in LINES.items()}
    missing = [field for field, match in found.items() if match is None]
    if missing:
        raise ValueError(f"limits did not print {', '.join(missing)}; it printed:\n{output}")
    return Limits(**{field: float(match[1]) for field, match in found.items() if match is not None})


def measure(directory: Path, seconds: float) -> Limits:
    """`seconds` for each of the dozen measurements."""
    command = [str(LIMITS), str(directory), str(seconds)]
    return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def file_system(directory: Path) -> str:
    """The type of the file system that holds a directory: the longest mount point above it, the last one if many."""
    path = directory.resolve()
    mounts = (line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines())
    above = [(len(point), order, kind) for order, (point, kind) in enumerate(mounts) if path.is_relative_to(point)]
    return max(above)[2]


def describe(seconds: float) -> Machine:
    directory = Path(tempfile.gettempdir())
    load = os.getloadavg()[0]
    return Machine(
        processor=processor(),
        cores=os.cpu_count() or 1,
        load=load,
        kernel=platform.release(),
        python=platform.python_version(),
        directory=str(directory),
        file_system=file_system(directory),
        limits=measure(directory, seconds),
    )
