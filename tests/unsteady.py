"""Tests that failed beside others and are tried once more, alone. Driver of pytest, for conftest.py.

The suite runs several files at a time on machines that are shared, and its tests are of sockets, disks and processes:
one that waits for a peer may wait for too long while others start brokers. What fails alone as well has failed. What
passes alone is *unsteady*: the run is not red for it, but it is named at its end, and is a defect to be mended.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# More than so many are no accident.
TRIED_MAX = 5


def passes_alone(tests: Sequence[str], root: Path) -> bool:
    """Runs the tests, given as pytest names them, one after the other in a process of their own."""
    if not tests or len(tests) > TRIED_MAX:
        return False
    print(f"\nonce more, alone: {', '.join(tests)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    return subprocess.run(command, cwd=root).returncode == 0
