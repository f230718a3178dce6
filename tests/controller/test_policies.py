"""Which policy applies to what."""

from uuid import UUID

import pytest

from headrace.controller.changes import PutPolicy, PutVhost
from headrace.controller.entities import ApplyTo, Policy, Version, Vhost
from headrace.controller.errors import Invalid
from headrace.controller.policies import RETRY_DELAY_MS_MAX, Resource, check_definition
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.controller.table import FieldIn, Table
from headrace.core_log.ids import ViewId

ONE = Table({"max-length": 1})


def snapshot(*policies: Policy) -> Snapshot:
    empty = load(UUID(int=0), Version(0), ViewId(1))
    return apply(empty, [PutVhost(Vhost("/")), PutVhost(Vhost("two")), *map(PutPolicy, policies)])


def named(policy: Policy | None) -> str | None:
    return policy.name if policy else None


def test_highest_priority_among_the_matching_applies_whole() -> None:
    metadata = snapshot(
        Policy("/", "low", ".*", ONE, priority=-1),
        Policy("/", "high", "^orders", Table({"expires": 5}), priority=10),
        Policy("/", "elsewhere", "^invoices", ONE, priority=20),
        Policy("two", "other vhost", ".*", ONE, priority=30),
    )
    policy = metadata.effective_policy("/", "orders.eu", Resource.CLASSIC_QUEUE)
    assert policy is not None
    assert policy.definition.thaw() == {"expires": 5}
    assert named(metadata.effective_policy("/", "x", Resource.CLASSIC_QUEUE)) == "low"


def test_pattern_matches_anywhere_in_the_name() -> None:
    metadata = snapshot(Policy("/", "p", "ttl", ONE))
    assert named(metadata.effective_policy("/", "my-ttl-queue", Resource.CLASSIC_QUEUE)) == "p"


def test_equal_priorities_are_settled_by_name_so_that_every_node_agrees() -> None:
    metadata = snapshot(Policy("/", "b", ".*", ONE), Policy("/", "a", ".*", ONE))
    assert named(metadata.effective_policy("/", "q", Resource.CLASSIC_QUEUE)) == "a"


@pytest.mark.parametrize(
    ("apply_to", "resources"),
    [
        (ApplyTo.ALL, set(Resource)),
        (ApplyTo.QUEUES, {Resource.CLASSIC_QUEUE, Resource.QUORUM_QUEUE, Resource.STREAM}),
        (ApplyTo.CLASSIC_QUEUES, {Resource.CLASSIC_QUEUE}),
        (ApplyTo.QUORUM_QUEUES, {Resource.QUORUM_QUEUE}),
        (ApplyTo.STREAMS, {Resource.STREAM}),
        (ApplyTo.EXCHANGES, {Resource.EXCHANGE}),
    ],
)
def test_apply_to_chooses_the_kinds(apply_to: ApplyTo, resources: set[Resource]) -> None:
    metadata = snapshot(Policy("/", "p", ".*", ONE, apply_to))
    assert {kind for kind in Resource if metadata.effective_policy("/", "x", kind)} == resources


def test_vhost_without_policies_has_none() -> None:
    assert snapshot().effective_policy("/", "q", Resource.CLASSIC_QUEUE) is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max-length", -1),
        ("max-length", True),
        ("max-length", "5"),
        ("expires", 0),
        ("overflow", "drop-tail"),
        ("max-age", "7 days"),
        ("max-age", "0D"),
        ("max-age", 7),
        ("durability", "fast"),
        ("compression", "zip"),
        ("retention-ms", -1),
        ("retention-bytes", "1GB"),
        ("partitions", 3),
        ("dead-letter-exchange", 5),
        ("ha-mode", "all"),
        ("x-max-length", 5),
        ("retry-jitter", 1),
        ("retry-delay-ms", RETRY_DELAY_MS_MAX + 1),
        ("retry-delay-max-ms", RETRY_DELAY_MS_MAX + 1),
    ],
)
def test_bad_setting_is_refused_by_name(setting: str, value: FieldIn) -> None:
    with pytest.raises(Invalid, match=f"'{setting}'"):
        check_definition(Table({setting: value}))


def test_how_a_log_is_kept_may_be_said_by_a_policy() -> None:
    check_definition(
        Table(
            {
                "durability": "interval",
                "compression": "lz4",
                "retention-ms": 0,
                "retention-bytes": 1 << 40,
                "max-age": "7D",
                "stream-max-segment-size-bytes": 10**6,
            }
        )
    )


def test_empty_definition_is_refused() -> None:
    with pytest.raises(Invalid, match="empty"):
        check_definition(Table())
