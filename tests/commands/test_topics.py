"""`headrace topics` on a real broker."""

import pytest

from headrace.exits import Answered, NotAllowed

from .conftest import Headrace


def test_topic_is_created_described_listed_and_deleted(headrace: Headrace, name: str) -> None:
    assert headrace.ok("topics", "create", name, "--partitions", 3) == f"topic {name} created, 3 partitions\n"
    described = headrace.ok("topics", "describe", name)
    for text in (name, "durability", "sync", "end offset"):
        assert text in described
    (listed,) = [one for one in headrace.json("topics", "list", "--kind", "topic")["topics"] if one["name"] == name]
    assert (listed["partitions"], listed["vhost"], listed["kind"]) == (3, "/", "topic")
    assert name in headrace.ok("topics", "list")
    assert headrace.ok("topics", "delete", name, "--yes") == f"topic {name} deleted\n"
    with pytest.raises(Answered, match=f"no topic, exchange or queue '{name}'"):
        headrace("topics", "describe", name)


def test_delete_asks_first_and_where_nobody_can_be_asked_wants_a_yes(headrace: Headrace, name: str) -> None:
    headrace.ok("topics", "create", name)
    result = headrace("topics", "delete", name)
    assert result.exit_code == 2
    assert "say --yes" in result.stderr
    headrace.ok("topics", "describe", name)


def test_settings_are_given_changed_and_given_back(headrace: Headrace, name: str) -> None:
    options = ("--durability", "interval", "--retention", "12h", "--retention-bytes", "10GiB", "--compression", "lz4")
    headrace.ok("topics", "create", name, *options)
    settings = headrace.json("topics", "describe", name)["settings"]
    assert settings == {
        "durability": "interval",
        "compression": "lz4",
        "retention_ms": 12 * 3_600_000,
        "retention_bytes": 10 * 2**30,
    }
    changed = headrace.json("topics", "configure", name, "--retention", "default", "--durability", "default")
    assert (changed["settings"]["retention_ms"], changed["settings"]["durability"]) == (7 * 86_400_000, "sync")
    assert changed["settings"]["retention_bytes"] == 10 * 2**30
    assert "retention ms" in headrace.ok("topics", "configure", name, "--compression", "none")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "nothing to change"),
        (("--retention", "long"), "--retention"),
        (("--retention-bytes", "-1"), "--retention-bytes"),
        (("--durability", "never"), "--durability"),
    ],
)
def test_setting_that_makes_no_sense_is_a_usage_error(
    headrace: Headrace, name: str, options: tuple[str, ...], told: str
) -> None:
    result = headrace("topics", "configure", name, *options)
    assert result.exit_code == 2
    assert told in result.stderr


def test_topic_grows_and_does_not_shrink(headrace: Headrace, name: str) -> None:
    headrace.ok("topics", "create", name)
    assert headrace.ok("topics", "grow", name, 4) == f"topic {name} has 4 partitions\n"
    with pytest.raises(Answered):
        headrace("topics", "grow", name, 2)


def test_who_lacks_the_right_is_told_so(headrace: Headrace, name: str) -> None:
    headrace.ok("topics", "create", name)
    with pytest.raises(NotAllowed, match=f"read access to '{name}' in vhost '/' refused for user 'ann'"):
        headrace("topics", "describe", name, "--user", "ann", HEADRACE_PASSWORD="right")


def test_name_with_control_characters_reaches_no_terminal(headrace: Headrace, name: str) -> None:
    odd = f"{name}\x1b[2J"
    headrace.ok("topics", "create", odd)
    assert "\x1b[2J" not in headrace.ok("topics", "list")
    assert "\\x1b[2J" in headrace.ok("topics", "list")
