"""Definitions in the configuration file: what they mean, and mistakes that name the field."""

import tomllib

import pytest

from headrace.controller.config import ConfigError, Definitions, UserDefinition, parse_definitions
from headrace.controller.entities import (
    ApplyTo,
    Permission,
    Policy,
    TopicPermission,
    UserLimits,
    Vhost,
    VhostLimits,
)
from headrace.controller.passwords import HashCost, hash_password
from headrace.controller.table import Table

CANARY = "canary-77aa"
WHOLE = """
[log]
segment_bytes = 1

[[vhosts]]
name = "shop"

[[users]]
name = "ann"
password = "secret"
tags = ["monitoring", "administrator"]

[[users]]
name = "import"
password_hash = "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"
hashing_algorithm = "rabbit_password_hashing_sha256"

[[users]]
name = "certified"

[[permissions]]
user = "ann"
vhost = "shop"
configure = ""
write = "^orders"
read = ".*"

[[topic_permissions]]
user = "ann"
exchange = "amq.topic"
write = "^{username}"
read = ".*"

[[policies]]
name = "short"
pattern = '^tmp\\.'
apply_to = "queues"
priority = 5
definition = { message-ttl = 60000, overflow = "drop-head" }

[limits.vhosts."/"]
max_connections = 100
[limits.users.ann]
max_channels = 7
"""


def test_whole_file_gives_all_definitions_and_leaves_other_sections_alone() -> None:
    assert parse_definitions(tomllib.loads(WHOLE)) == Definitions(
        vhosts=(Vhost("shop"),),
        users=(
            UserDefinition("ann", ("monitoring", "administrator"), "secret"),
            UserDefinition(
                "import",
                password_hash="kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR",
                hashing_algorithm="rabbit_password_hashing_sha256",
            ),
            UserDefinition("certified"),
        ),
        permissions=(Permission("ann", "shop", "", "^orders", ".*"),),
        topic_permissions=(TopicPermission("ann", "/", "amq.topic", "^{username}", ".*"),),
        policies=(
            Policy(
                "/",
                "short",
                r"^tmp\.",
                Table({"message-ttl": 60000, "overflow": "drop-head"}),
                ApplyTo.QUEUES,
                5,
            ),
        ),
        vhost_limits=(VhostLimits("/", connections_max=100),),
        user_limits=(UserLimits("ann", channels_max=7),),
    )


def test_empty_file_defines_nothing() -> None:
    assert parse_definitions({}) == Definitions()


def test_own_password_hash_is_accepted() -> None:
    stored = hash_password("x", HashCost(8, 1))
    (user,) = parse_definitions({"users": [{"name": "ann", "password_hash": stored}]}).users
    assert user.password_hash == stored


@pytest.mark.parametrize(
    ("toml", "field", "why"),
    [
        ("vhosts = 5", "vhosts", "list"),
        ("[vhosts]\nname = 'x'", "vhosts", "list"),
        ("vhosts = [5]", "vhosts[0]", "table"),
        ("[[vhosts]]", "vhosts[0].name", "missing"),
        ("[[vhosts]]\nname = ''", "vhosts[0]", "empty"),
        ("[[vhosts]]\nname = 5", "vhosts[0].name", "text"),
        ("[[vhosts]]\nname = 'a'\n[[vhosts]]\nname = 'a'", "vhosts[1]", "same name"),
        ("[[users]]\nname = 'a'\npasword = 'x'", "users[0].pasword", "unknown"),
        ("[[users]]\nname = 'a'\npassword = ''", "users[0]", "blank"),
        ("[[users]]\nname = 'a'\npassword = 5", "users[0].password", "text"),
        ("[[users]]\nname = 'a'\ntags = 'admin'", "users[0].tags", "list"),
        ("[[users]]\nname = 'a'\ntags = [1]", "users[0].tags", "list of text"),
        ("[[users]]\nname = 'a'\npassword = 'x'\npassword_hash = 'y'", "users[0]", "exclude"),
        ("[[users]]\nname = 'a'\npassword = 'x'\nscram = 'y'", "users[0]", "exclude"),
        ("[[users]]\nname = 'a'\nscram = 'y'", "users[0]", "SCRAM verifier"),
        ("[[users]]\nname = 'a'\nhashing_algorithm = 'x'", "users[0]", "missing"),
        ("[[users]]\nname = 'a'\npassword_hash = 'AAAA'", "users[0]", "argon2"),
        (
            "[[users]]\nname = 'a'\npassword_hash = 'AAAA'\nhashing_algorithm = 'rabbit_password_hashing_md5'",
            "users[0]",
            "md5",
        ),
        ("[[permissions]]\nuser = 'a'\nconfigure = ''\nwrite = ''", "permissions[0].read", "missing"),
        ("[[permissions]]\nuser = 'a'\nconfigure = '('\nwrite = ''\nread = ''", "permissions[0].configure", "RE2"),
        ("[[policies]]\nname = 'p'\npattern = ''", "policies[0].definition", "missing"),
        ("[[policies]]\nname = 'p'\npattern = ''\ndefinition = {}", "policies[0].definition", "empty"),
        ("[[policies]]\nname = 'p'\npattern = ''\ndefinition = {max = 1}", "policies[0].definition", "'max'"),
        (
            "[[policies]]\nname = 'p'\npattern = ''\ndefinition = {expires = 2020-01-01}",
            "policies[0].definition",
            "date",
        ),
        (
            "[[policies]]\nname = 'p'\npattern = ''\ndefinition = {expires = 1}\napply_to = 'x'",
            "policies[0].apply_to",
            "one of all, queues",
        ),
        (
            "[[policies]]\nname = 'p'\npattern = ''\ndefinition = {expires = 1}\npriority = true",
            "policies[0].priority",
            "number",
        ),
        ("limits = 3", "limits", "table"),
        ("[limits.vhost.x]", "limits.vhost", "unknown"),
        ("[limits.vhosts.x]\nmax_channels = 1", "limits.vhosts.x.max_channels", "unknown"),
        ("[limits.users.x]\nmax_channels = -1", "limits.users.x", "max-channels"),
        ("[limits.users]\nx = 1", "limits.users.x", "table"),
    ],
)
def test_mistake_names_the_field_and_the_reason(toml: str, field: str, why: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        parse_definitions(tomllib.loads(toml))
    assert str(mistake.value).startswith(f"{field}: ")
    assert why in str(mistake.value)


@pytest.mark.parametrize(
    "user",
    [
        {"name": "a", "password": CANARY, "password_hash": CANARY},
        {"name": "a", "password": [CANARY]},
        {"name": "a", "password_hash": CANARY},
        {"name": "a", "password_hash": CANARY, "hashing_algorithm": "rabbit_password_hashing_sha256"},
        {"name": "", "password": CANARY},
        {"name": "a", "password": CANARY, "extra": 1},
    ],
    ids=str,
)
def test_mistake_never_shows_a_secret(user: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as mistake:
        parse_definitions({"users": [user]})
    seen: BaseException | None = mistake.value
    while seen is not None:
        assert CANARY not in str(seen) + repr(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def test_repr_of_definitions_shows_no_secret() -> None:
    definitions = parse_definitions({"users": [{"name": "a", "password": CANARY}]})
    assert CANARY not in repr(definitions)
