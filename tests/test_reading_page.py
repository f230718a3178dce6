"""The examples of docs/reading.md run, each against a directory that the log wrote."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.spark.archive import archive
from tests.spark.directories import Written

PAGE = Path(__file__).parent.parent / "docs" / "reading.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, tmp_path: Path) -> None:
    program = EXAMPLES[number]
    for package in re.findall(r"^import (\w+)$", program, re.MULTILINE):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if "url=" in program:
        pytest.skip("tests/spark/test_access_http.py has a broker")
    written = Written(tmp_path / "headrace-data")
    (log,) = written.topic("orders")
    written.fill(log, 20, tags=("eu",))
    archive(written.path, str(tmp_path / "archive"))
    program = program.replace("/srv/archive", str(tmp_path / "archive"))
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)
