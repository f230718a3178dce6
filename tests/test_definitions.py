"""Definitions that name what is not there are refused with their place in the file."""

from uuid import UUID

from headrace.controller.config import parse_definitions
from headrace.controller.entities import User, Version, Vhost
from headrace.controller.snapshot import load
from headrace.core_log.ids import ViewId
from headrace.definitions import has_real_user, problems

FRESH = load(UUID(int=1), Version(0), ViewId(1))
RIGHT = {"configure": "", "write": "", "read": ""}


def test_what_the_file_itself_defines_may_be_named() -> None:
    definitions = parse_definitions(
        {
            "vhosts": [{"name": "shop"}],
            "users": [{"name": "ann"}],
            "permissions": [{"user": "ann", "vhost": "shop", **RIGHT}],
            "policies": [{"name": "p", "pattern": ".*", "definition": {"max-length": 1}, "vhost": "shop"}],
            "limits": {"vhosts": {"shop": {"max_queues": 1}}, "users": {"ann": {"max_channels": 1}}},
        }
    )
    assert problems(definitions, FRESH) == []


def test_what_a_first_start_makes_may_be_named() -> None:
    assert problems(parse_definitions({"permissions": [{"user": "guest", **RIGHT}]}), FRESH) == []


def test_what_the_metadata_has_may_be_named() -> None:
    known = load(UUID(int=1), Version(3), ViewId(1), vhosts=[Vhost("shop")], users=[User("ann")])
    definitions = parse_definitions({"permissions": [{"user": "ann", "vhost": "shop", **RIGHT}]})
    assert problems(definitions, known) == []
    deleted = parse_definitions({"permissions": [{"user": "guest", **RIGHT}]})
    assert problems(deleted, known) == ["permissions[0].user: no user 'guest'", "permissions[0].vhost: no vhost '/'"]


def test_all_that_is_missing_is_told_with_its_place() -> None:
    definitions = parse_definitions(
        {
            "permissions": [{"user": "guest", **RIGHT}, {"user": "bob", "vhost": "shp", **RIGHT}],
            "topic_permissions": [{"user": "eve", "exchange": "amq.topic", "write": "", "read": ""}],
            "policies": [{"name": "p", "pattern": ".*", "definition": {"max-length": 1}, "vhost": "shp"}],
            "limits": {"vhosts": {"shp": {"max_queues": 1}}, "users": {"eve": {"max_channels": 1}}},
        }
    )
    assert problems(definitions, FRESH) == [
        "permissions[1].user: no user 'bob'",
        "permissions[1].vhost: no vhost 'shp'",
        "topic_permissions[0].user: no user 'eve'",
        "policies[0].vhost: no vhost 'shp'",
        "limits.vhosts.shp: no such vhost",
        "limits.users.eve: no such user",
    ]


def test_guest_is_no_real_user() -> None:
    assert not has_real_user(FRESH)
    assert not has_real_user(load(UUID(int=1), Version(1), ViewId(1), users=[User("guest")]))
    assert has_real_user(load(UUID(int=1), Version(1), ViewId(1), users=[User("guest"), User("ann")]))
