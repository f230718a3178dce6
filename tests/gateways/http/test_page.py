"""docs/http.md tells the truth: every path stands on it, and every example that it gives works."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.gateways.http.app import all_operations
from headrace.gateways.http.operations import Operation

from .conftest import PATIENCE_S, HttpBroker

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "http.md").read_text()
# Resources that have pages of their own, to which this one leads.
ELSEWHERE = {"consumer-groups", "delayed", "schedules", "dead-letters"}
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = [line for block in BLOCKS for line in re.split(r"\n(?=curl)", block)]
HERE = [one for one in all_operations() if one.tag not in ELSEWHERE]


@pytest.mark.parametrize("operation", HERE, ids=lambda one: one.id)
def test_every_path_stands_on_the_page(operation: Operation) -> None:
    assert operation.path in PAGE


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_example_works_in_the_order_of_the_page(own_broker: HttpBroker) -> None:
    with own_broker.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("jobs", durable=True)
        for number in range(5):
            channel.basic_publish("", "jobs", str(number).encode())
    for example in EXAMPLES:
        command = example.replace("http://localhost:15672", own_broker.url).replace(
            "curl ", "curl --fail-with-body ", 1
        )
        done = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={"PATH": os.environ["PATH"]},
        )
        assert done.returncode == 0, f"{example}\n{done.stdout}{done.stderr}"
        if "/metrics" not in example and "-X DELETE" not in example:
            json.loads(done.stdout)
    assert len(EXAMPLES) > 20
