"""The programs of docs/filtering.md are run as they stand, against a broker of their own."""

import re
from pathlib import Path

import pytest

from tests.gateways.mqtt.conftest import MqttBroker

PAGE = (Path(__file__).parent.parent / "docs" / "filtering.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["pika", "paho"])
def test_program_of_the_page_does_what_it_says(program: str, tmp_path: Path) -> None:
    with MqttBroker(tmp_path) as broker:
        program = program.replace(
            'ConnectionParameters("localhost")', f'ConnectionParameters("127.0.0.1", {broker.port})'
        )
        program = program.replace('connect("localhost", 1883)', f'connect("127.0.0.1", {broker.mqtt_port})')
        assert "localhost" not in program
        exec(compile(program, "docs/filtering.md", "exec"), {})


def test_rule_of_the_page_is_a_configuration(tmp_path: Path) -> None:
    (rule,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    with MqttBroker(tmp_path, config=rule) as broker:
        assert broker.is_running()
