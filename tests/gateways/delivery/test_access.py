"""Permissions by RabbitMQ's rules, and what a hostile name cannot do to them."""

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.changes import (
    Change,
    DeletePermission,
    DeleteUser,
    DeleteVhost,
    PutPermission,
    PutTopicPermission,
    PutUser,
    PutVhost,
)
from headrace.controller.entities import Permission, TopicPermission, User, Version, Vhost
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.core_log.ids import ViewId
from headrace.gateways.delivery.access import Access, Operation, Tag

CONFIGURE, WRITE, READ = Operation.CONFIGURE, Operation.WRITE, Operation.READ
BASE = apply(
    load(UUID(int=0), Version(0), ViewId(1)),
    [PutVhost(Vhost("/")), PutVhost(Vhost("two")), PutUser(User("ann")), PutUser(User("bob"))],
)


def with_rights(configure: str = "", write: str = "", read: str = "", user: str = "ann") -> Snapshot:
    return apply(BASE, [PutPermission(Permission(user, "/", configure, write, read))])


def with_topics(write: str, read: str = "", user: str = "ann") -> Access:
    changes: list[Change] = [PutUser(User(user)), PutTopicPermission(TopicPermission(user, "/", "t", write, read))]
    return Access(apply(BASE, changes))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (".*", "q", True),
        ("", "q", False),
        ("^$", "q", False),
        ("q", "my-q-too", True),
        ("^q$", "my-q-too", False),
        ("^q", "q1", True),
        ("^(a|b)-", "b-x", True),
        ("^(a|b)-", "c-x", False),
        ("^amq\\.default$", "", True),
        ("^amq\\.gen", "amq.gen-xyz", True),
        ("^(?!amq\\.)", "amq.topic", False),
        ("^(?!amq\\.)", "orders", True),
        ("", "", False),
        ("^ünï$", "ünï", True),
    ],
)
@pytest.mark.parametrize("operation", list(Operation))
def test_pattern_decides_by_rabbitmqs_rules(pattern: str, name: str, expected: bool, operation: Operation) -> None:
    access = Access(with_rights(**{operation.value: pattern}))
    assert access.may("ann", "/", operation, name) is expected
    assert access.may("ann", "/", operation, name) is expected
    for other in set(Operation) - {operation}:
        assert not access.may("ann", "/", other, name)


def test_new_user_can_do_nothing() -> None:
    access = Access(BASE)
    assert not access.may_enter("ann", "/")
    assert not any(access.may("ann", "/", operation, "q") for operation in Operation)


def test_rights_hold_in_their_vhost_and_for_their_user_only() -> None:
    access = Access(with_rights(".*", ".*", ".*"))
    assert access.may_enter("ann", "/") and access.may("ann", "/", READ, "q")
    assert not access.may_enter("ann", "two") and not access.may("ann", "two", READ, "q")
    assert not access.may_enter("bob", "/") and not access.may("bob", "/", READ, "q")
    assert not access.may_enter("nobody", "/") and not access.may("nobody", "/", READ, "q")
    assert not access.may_enter("ann", "none")


def test_permission_without_any_pattern_lets_in_and_no_further() -> None:
    access = Access(with_rights())
    assert access.may_enter("ann", "/")
    assert not any(access.may("ann", "/", operation, "q") for operation in Operation)


@pytest.mark.parametrize(
    "change",
    [
        PutPermission(Permission("ann", "/", "", "", "")),
        DeletePermission("ann", "/"),
        DeleteUser("ann"),
        DeleteVhost("/"),
    ],
    ids=repr,
)
def test_revoked_right_is_gone_with_the_next_snapshot(change: Change) -> None:
    granted = with_rights(".*", ".*", ".*")
    access = Access(granted)
    assert access.may("ann", "/", WRITE, "q")
    access.update(apply(granted, [change]))
    assert not access.may("ann", "/", WRITE, "q")


def test_user_deleted_and_made_again_does_not_inherit_answers() -> None:
    granted = with_rights(".*", ".*", ".*")
    access = Access(granted)
    assert access.may("ann", "/", WRITE, "q")
    access.update(apply(granted, [DeleteUser("ann"), PutUser(User("ann"))]))
    assert not access.may("ann", "/", WRITE, "q")


def test_kept_answers_are_bounded_and_stay_right() -> None:
    access = Access(with_rights(write="7$"), answers_max=10)
    for number in range(100):
        assert access.may("ann", "/", WRITE, f"q{number}") == (number % 10 == 7)
        assert access.may_use_key("ann", "/", "t", WRITE, f"k{number}")
        assert len(access._answers) <= 10 and len(access._key_answers) <= 10
    known = len(access._key_answers)
    assert access.may_use_key("ann", "/", "t", WRITE, "k" * 60_000)
    assert len(access._key_answers) == known


def test_tags_include_each_other_as_in_rabbitmq() -> None:
    def tags(*given: str) -> set[Tag]:
        access = Access(apply(BASE, [PutUser(User("ann", tags=given))]))
        return {tag for tag in Tag if access.has("ann", tag)}

    assert tags() == set()
    assert tags("anything") == set()
    assert tags("management") == {Tag.MANAGEMENT}
    assert tags("policymaker") == {Tag.MANAGEMENT, Tag.POLICYMAKER}
    assert tags("monitoring") == {Tag.MANAGEMENT, Tag.MONITORING}
    assert tags("administrator") == {Tag.MANAGEMENT, Tag.POLICYMAKER, Tag.MONITORING, Tag.ADMINISTRATOR}
    assert tags("impersonator") == {Tag.IMPERSONATOR}
    assert not Access(BASE).has("nobody", Tag.MANAGEMENT)


def test_administrator_needs_permissions_like_everybody() -> None:
    access = Access(apply(BASE, [PutUser(User("ann", tags=("administrator",)))]))
    assert not access.may("ann", "/", READ, "q")


# Routing keys on topic exchanges.


def test_without_a_topic_permission_every_key_is_allowed() -> None:
    access = with_topics("^a")
    assert access.may_use_key("ann", "/", "other", WRITE, "z")
    assert access.may_use_key("bob", "/", "t", WRITE, "z")
    assert not access.may_use_key("nobody", "/", "t", WRITE, "z")


def test_topic_permission_narrows_writing_and_reading_apart() -> None:
    access = with_topics(write="^a", read="^b")
    assert access.may_use_key("ann", "/", "t", WRITE, "a.x")
    assert not access.may_use_key("ann", "/", "t", WRITE, "b.x")
    assert access.may_use_key("ann", "/", "t", READ, "b.x")
    assert not access.may_use_key("ann", "/", "t", READ, "a.x")


def test_empty_topic_pattern_allows_only_the_empty_key() -> None:
    access = with_topics(write="")
    assert access.may_use_key("ann", "/", "t", WRITE, "")
    assert not access.may_use_key("ann", "/", "t", WRITE, "a")


def test_own_values_are_put_in_as_literals() -> None:
    access = with_topics(r"^{username}\.{client_id}\.{vhost}$")
    assert access.may_use_key("ann", "/", "t", WRITE, "ann.dev-1./", "dev-1")
    assert not access.may_use_key("ann", "/", "t", WRITE, "bob.dev-1./", "dev-1")
    assert not access.may_use_key("ann", "/", "t", WRITE, "ann.dev-2./", "dev-1")


def test_name_of_a_person_may_hold_a_dot_and_means_only_itself() -> None:
    access = with_topics("^{username}$", user="j.doe@example.org")
    assert access.may_use_key("j.doe@example.org", "/", "t", WRITE, "j.doe@example.org")
    assert not access.may_use_key("j.doe@example.org", "/", "t", WRITE, "jxdoe@example.org")


@pytest.mark.parametrize(
    "client_id",
    ["+", "#", "*", ".*", "a|b", ".", "a/b", "a.b", "^a", "a$", "a\nb", "\0", "", None, "x" * 65_536, "\ud800"],
)
def test_hostile_client_id_gains_nothing(client_id: str | None) -> None:
    access = with_topics(r"^sensors\.{client_id}$", r"^sensors\.{client_id}$")
    # What the wildcard, or the alternation, would reach if it were taken for a pattern or used as a binding key.
    for key in ("sensors.other", "sensors.*", "sensors.#", "b", "sensors.a", "sensors.a.b", f"sensors.{client_id}"):
        for operation in (WRITE, READ):
            allowed = access.may_use_key("ann", "/", "t", operation, key, client_id)
            assert allowed is (client_id == "a|b" and key == "sensors.a|b")


def test_value_cannot_bring_in_another_placeholder() -> None:
    access = with_topics("^{username}$", user="{vhost}")
    assert access.may_use_key("{vhost}", "/", "t", WRITE, "{vhost}")
    assert not access.may_use_key("{vhost}", "/", "t", WRITE, "/")


@settings(deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
    | st.text("ab.*+?()[]{}|^$\\#/-QE", min_size=1, max_size=8),
    st.text("ab.*#\\|", max_size=8),
)
def test_client_id_never_matches_more_than_itself(client_id: str, other: str) -> None:
    access = with_topics(r"^d\.{client_id}\.up$")
    assert access.may_use_key("ann", "/", "t", WRITE, f"d.{other}.up", client_id) <= (other == client_id)


@pytest.mark.parametrize("pattern", [r"^(a+)+$", r"^([a-z]+)*$", r"^(a|aa)+$", r"^(.*a){20}$"])
def test_redos_patterns_answer(pattern: str) -> None:
    access = Access(with_rights(write=pattern))
    assert not access.may("ann", "/", WRITE, "a" * 254 + "!")


def test_name_that_is_no_text_is_denied() -> None:
    assert not Access(with_rights(write=".*")).may("ann", "/", WRITE, "\ud800")
