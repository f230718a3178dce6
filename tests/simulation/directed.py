"""Known mistakes of other systems that no simulated cluster meets, each told by a test of the suite. Driver for tests.

    python -m tests.simulation.directed        each test as it is, and then under its mistake, which must fail it

The mistake is planted in a pytest of its own, of which this is a plugin (`-p tests.simulation.directed --plant NAME`).
Numbers are those of the design's list. What simulated clusters meet is planted there (cluster/mutants.py), the protocol
of one shard in the walks and stories, what a loss of power shows in tests/core_log/power, the wheel in tests/delay.
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest

from headrace.core_log.replication.leader import FollowerSession
from headrace.gateways.amqp.tracking import Tracker
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.mqtt import hub

ROOT = Path(__file__).parents[2]
# pytest's way to say that tests have failed, and not something else.
TESTS_FAILED = 1


@dataclass(frozen=True, slots=True)
class Directed:
    name: str
    test: str
    # Where, what, and what stands there instead.
    target: object
    attribute: str
    wrong: Any


def _nothing(*_arguments: object) -> None:
    return None


def _none_unnoted(*_arguments: object) -> list[object]:
    return []


_know = FollowerSession._know
_drop_unneeded = Broker._drop_unneeded
_why_not = Tracker._why_not


def _delete_what_the_leader_lacks(self: FollowerSession, streams: tuple[UUID, ...]) -> None:
    for stream in streams:
        if stream not in self._shard.directory.streams:
            self._shard.deletions.note(stream)
    _know(self, streams)


async def _drop_what_nobody_mentions(self: Broker) -> None:
    """As on a node alone, whose metadata and records are of one disk."""
    config = self.directory.config
    self.directory.config = replace(config, replica_count=1)
    await _drop_unneeded(self)
    self.directory.config = config


def _go_on_in_the_next_transaction(self: Tracker, channel: Any) -> str | None:
    why = _why_not(self, channel)
    return None if why is not None and "rolled back" in why else why


DIRECTED = (
    Directed(
        "MUT17 an id is noted after its message",
        "tests/gateways/mqtt/test_power_loss.py::test_message_comes_once_whenever_the_power_is_lost",
        hub,
        "find_unnoted",
        _none_unnoted,
    ),
    Directed(
        "MUT21 what metadata do not mention is deleted",
        "tests/gateways/delivery/test_broker.py"
        "::test_records_of_a_queue_that_the_metadata_have_forgotten_stay_for_a_day",
        Broker,
        "_drop_unneeded",
        _drop_what_nobody_mentions,
    ),
    Directed(
        "MUT21 what a leader does not mention is deleted",
        "tests/core_log/replication/test_shard.py"
        "::test_e8_a_replica_that_was_away_hears_of_a_deletion_and_deletes_nothing_else",
        FollowerSession,
        "_know",
        _delete_what_the_leader_lacks,
    ),
    Directed(
        "MUT22 what was left of a transaction is in the next",
        "tests/gateways/amqp/test_relay.py::test_a_transaction_under_way_is_rolled_back_and_said_to_be",
        Tracker,
        "_why_not",
        _go_on_in_the_next_transaction,
    ),
    Directed(
        "MUT23 retention takes what is not settled",
        "tests/gateways/delivery/test_broker.py::test_retention_takes_nothing_that_a_queue_has_not_settled",
        Broker,
        "_pinned_from",
        _nothing,
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", help="a mistake, by its name")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--plant")
    if name is not None:
        (mistake,) = (one for one in DIRECTED if one.name == name)
        patch.object(mistake.target, mistake.attribute, mistake.wrong).start()


def outcome(mistake: Directed, *, planted: bool) -> str | None:
    """What fails the test; None: nothing does."""
    plant = ["-p", __spec__.name, "--plant", mistake.name] if planted else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plant, mistake.test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    if done.returncode != TESTS_FAILED or f"FAILED {mistake.test}" not in done.stdout:
        raise RuntimeError(f"{mistake.test} was not run: {done.stdout}{done.stderr}")
    errors = [line.strip(" |E+-") for line in done.stdout.splitlines() if "Error" in line]
    return errors[0] if errors else "the test fails"


def main() -> int:
    print(f"{'planted, and told by a test':56}{'needed':>7}{'budget':>8}  caught as")
    survivors = 0
    for mistake in DIRECTED:
        wrong = outcome(mistake, planted=False)
        assert wrong is None, f"{mistake.test}, without a mistake: {wrong}"
        found = outcome(mistake, planted=True)
        survivors += found is None
        print(f"{mistake.name:56}{'alive' if found is None else 1:>7}{1:>8}  {(found or '')[:90]}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
