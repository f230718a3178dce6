"""Claims: 10,000 idle partitions open quickly, in little memory, with a bounded number of files. Driver: processes.

Each partition is a stream of its own, as queues are, and holds a few records. The directory was closed in good order; a
fresh process opens it as the broker does, and is asked for its time and its resident memory; then it reads from every
partition and is asked for its descriptors.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

from bench.claim import Better, Claim
from bench.scratch import commit, new_logs, open_directory, scratch_folder
from headrace.core_log.config import LogConfig

PARTITIONS = 10_000
HANDLES_MAX = 512
# The interpreter's own, pipes, the directory's.
OTHER_HANDLES = 32


def fill(folder: Path) -> None:
    # Nothing here must survive a loss of power, and 60,000 syncs take minutes.
    with patch("os.fdatasync"), patch("os.fsync"):
        directory = open_directory(folder, handles_max=HANDLES_MAX)
        for _ in range(PARTITIONS):
            (log,) = new_logs(directory, 1, LogConfig())
            log.append([b"key"] * 3, [b""] * 3, [b"v" * 100] * 3, timestamp_us=1)
            commit(log)
        directory.close_now()


def report(folder: Path) -> None:
    """In the fresh process: open, and say what it took."""
    begun = time.perf_counter()
    directory = open_directory(folder, clean=True, handles_max=HANDLES_MAX)
    seconds = time.perf_counter() - begun
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0]) / 1e3
    logs = [log for stream in directory.streams.values() for log in stream.partitions]
    records = sum(run.last - run.first for log in logs for run in log.read(0))
    handles = len(os.listdir("/proc/self/fd"))
    print(json.dumps({"seconds": seconds, "megabytes": resident, "handles": handles, "records": records}))


def claim() -> list[Claim]:
    with scratch_folder() as folder:
        fill(folder)
        command = [sys.executable, "-m", "bench.open_many", str(folder)]
        root = Path(__file__).parent.parent
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
        begun = time.perf_counter()
        bare = sum(len(path.read_bytes()) for name in ("watermark", "stream.json") for path in folder.rglob(name))
        floor = time.perf_counter() - begun
    found = json.loads(done.stdout)
    assert found["records"] == 3 * PARTITIONS
    name = f"open {PARTITIONS:,} idle partitions"
    beside = f"the bare read of their {bare / 1e6:.0f} MB of small files takes {floor:.2f} s"
    return [
        Claim(f"{name}: time", found["seconds"], 10.0, Better.LESS, "s", beside),
        Claim(f"{name}: resident memory", found["megabytes"], 200.0, Better.LESS, "MB", "with Python, numpy and trio"),
        Claim(
            f"{name}: open files",
            found["handles"],
            HANDLES_MAX + OTHER_HANDLES,
            Better.LESS,
            "",
            f"after a read of each; the cap is {HANDLES_MAX}",
        ),
    ]


if __name__ == "__main__":
    report(Path(sys.argv[1]))
