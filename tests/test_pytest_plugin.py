"""The fixture that ships with the package, and the page about it: its examples are run as they stand there."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from headrace.testing import EmbeddedBroker

ROOT = Path(__file__).parent.parent


def test_every_example_on_the_page_is_a_test_that_passes(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL)
    assert len(examples) == 3
    for number, example in enumerate(examples):
        (tmp_path / f"test_example_{number}.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-W", "error", "-p", "no:trio"]
    done = subprocess.run([*command, "--rootdir", tmp_path, tmp_path], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_the_fixture_is_a_broker_of_the_test(headrace_broker: EmbeddedBroker) -> None:
    assert headrace_broker.is_running
    assert {"amqp", "mqtt", "ws"} <= headrace_broker.ports.keys()


def test_pytest_finds_the_plugin_by_itself() -> None:
    assert "headrace.pytest_plugin" in {found.value for found in entry_points(group="pytest11")}


def test_the_plugin_brings_nothing_of_the_broker_into_other_peoples_tests() -> None:
    program = (
        "import sys, headrace.pytest_plugin; print([name for name in ('trio', 'headrace.node') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
