"""What the tests of the commands share: one real broker for all of them, and the commands run in this process."""

import json
import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.running_broker import RunningBroker

from headrace.cli import commands

CONFIG = """
[[users]]
name = "ann"
password = "right"
tags = ["administrator"]

[[permissions]]
user = "ann"
vhost = "/"
configure = ".*"
write = ".*"
read = "^open.*"
"""


@pytest.fixture(scope="package")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    folder = tmp_path_factory.mktemp("broker")
    with RunningBroker(folder, config=CONFIG, arguments=["--http", "127.0.0.1:0"]) as running:
        yield running
        running.stop()
        assert "Traceback" not in running.log_path.read_text(), running.log_path.read_text()


class Headrace:
    """`headrace ...` in this process, asking the broker of the tests."""

    def __init__(self, broker: RunningBroker, door: str = "http") -> None:
        self.url = f"{door}://localhost:{broker.ports[door]}"

    def __call__(self, *arguments: object, input: str | bytes | None = None, **environ: str | None) -> Result:
        """What it did, if that went well; else the error it met."""
        result = self.run(*arguments, input=input, **environ)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def run(self, *arguments: object, input: str | bytes | None = None, **environ: str | None) -> Result:
        variables = {"HEADRACE_URL": self.url, "HEADRACE_USER": None, "HEADRACE_PASSWORD": None} | environ
        return CliRunner().invoke(commands, [*map(str, arguments)], input=input, env=variables)

    def ok(self, *arguments: object, **more: Any) -> str:
        result = self(*arguments, **more)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: object, **more: Any) -> Any:
        return json.loads(self.ok(*arguments, "--json", **more))

    def lines(self, *arguments: object, **more: Any) -> list[Any]:
        return [json.loads(line) for line in self.ok(*arguments, "--json", **more).splitlines()]


@pytest.fixture
def headrace(broker: RunningBroker) -> Headrace:
    return Headrace(broker)


_numbers = count(1)


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t{os.getpid()}-{next(_numbers)}"
