"""Vhosts, users, rights, policies and limits as the configuration file gives them. Format.

    [[vhosts]]
    name = "shop"

    [[users]]
    name = "ann"
    password = "..."                        # or password_hash (with hashing_algorithm if RabbitMQ exported it); without
    tags = ["monitoring"]                   # either, a new user has certificates only and an old one keeps its password

    [[permissions]]                         # regular expressions; "" matches nothing, ".*" everything
    user = "ann"
    vhost = "shop"                          # "/" when left out
    configure = ""
    write = "^orders"
    read = ".*"

    [[topic_permissions]]                   # user, vhost, exchange, write, read

    [[policies]]
    name = "short"
    pattern = "^tmp\\\\."
    apply_to = "queues"                     # "all" when left out; priority 0, vhost "/"
    definition = { message-ttl = 60000 }

    [limits.vhosts.shop]                    # what is left out has no limit
    max_connections = 100
    max_queues = 1000
    [limits.users.ann]
    max_connections = 10
    max_channels = 100

A mistake raises ConfigError with the name of the field, as `users[1].tags`, and never with a secret.
What the file names is created or updated; what it does not name is left alone (service.py seeds it).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import TypeVar

from headrace.controller.entities import (
    ApplyTo,
    Permission,
    Policy,
    TopicPermission,
    User,
    UserLimits,
    Vhost,
    VhostLimits,
)
from headrace.controller.errors import Invalid
from headrace.controller.passwords import RABBITMQ_ALGORITHMS, check_rabbitmq_hash, is_password_hash
from headrace.controller.patterns import compile_pattern
from headrace.controller.policies import check_definition
from headrace.controller.table import FieldIn, Table
from headrace.controller.verifiers import parse as parse_verifier

T = TypeVar("T")


class ConfigError(ValueError):
    """A field of the configuration is wrong; the text begins with its name."""


@dataclass(frozen=True, slots=True)
class UserDefinition:
    name: str
    tags: tuple[str, ...] = ()
    password: str | None = field(default=None, repr=False)
    # In our own form, or as exported from RabbitMQ if `hashing_algorithm` says so.
    password_hash: str | None = field(default=None, repr=False)
    hashing_algorithm: str | None = None
    # A SCRAM verifier, for whoever gives no password to make it from.
    scram: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        User(self.name, tags=self.tags)
        if self.password is not None and self.password_hash is not None:
            raise Invalid("password and password_hash exclude each other")
        if self.password is not None and self.scram is not None:
            raise Invalid("password and scram exclude each other: a verifier is made from the password")
        if self.password == "":
            raise Invalid("password must not be blank")
        if self.scram is not None:
            parse_verifier(self.scram)
        if self.hashing_algorithm is not None:
            if self.password_hash is None:
                raise Invalid("hashing_algorithm says how password_hash was made, which is missing")
            check_rabbitmq_hash(self.password_hash, self.hashing_algorithm)
        elif self.password_hash is not None and not is_password_hash(self.password_hash):
            raise Invalid(
                "password_hash is not an argon2 hash; if it was exported from RabbitMQ, say hashing_algorithm = "
                + " or ".join(f'"{name}"' for name in RABBITMQ_ALGORITHMS)
            )


@dataclass(frozen=True, slots=True)
class Definitions:
    vhosts: tuple[Vhost, ...] = ()
    users: tuple[UserDefinition, ...] = ()
    permissions: tuple[Permission, ...] = ()
    topic_permissions: tuple[TopicPermission, ...] = ()
    policies: tuple[Policy, ...] = ()
    vhost_limits: tuple[VhostLimits, ...] = ()
    user_limits: tuple[UserLimits, ...] = ()


SECTIONS = ("vhosts", "users", "permissions", "topic_permissions", "policies", "limits")


def parse_definitions(toml: Mapping[str, object]) -> Definitions:
    """The definitions of a parsed TOML file; sections other than SECTIONS are somebody else's."""
    limits = _Fields("limits", toml.get("limits", {}))
    vhost_limits = limits.tables("vhosts", _vhost_limits)
    user_limits = limits.tables("users", _user_limits)
    limits.end()
    return Definitions(
        vhosts=_list(toml, "vhosts", _vhost, lambda vhost: vhost.name),
        users=_list(toml, "users", _user, lambda user: user.name),
        permissions=_list(toml, "permissions", _permission, lambda right: (right.user, right.vhost)),
        topic_permissions=_list(
            toml, "topic_permissions", _topic_permission, lambda right: (right.user, right.vhost, right.exchange)
        ),
        policies=_list(toml, "policies", _policy, lambda policy: (policy.vhost, policy.name)),
        vhost_limits=vhost_limits,
        user_limits=user_limits,
    )


def _list(
    toml: Mapping[str, object], section: str, parse: "Callable[[_Fields], T]", key: Callable[[T], object]
) -> tuple[T, ...]:
    entries = toml.get(section, [])
    if not isinstance(entries, list):
        raise ConfigError(f"{section}: expected a list of tables ([[{section}]]), got {_kind(entries)}")
    found: dict[object, T] = {}
    for index, entry in enumerate(entries):
        fields = _Fields(f"{section}[{index}]", entry)
        with fields.named():
            parsed = parse(fields)
        fields.end()
        if key(parsed) in found:
            raise ConfigError(f"{fields.path}: an earlier entry has the same name")
        found[key(parsed)] = parsed
    return tuple(found.values())


def _vhost(fields: "_Fields") -> Vhost:
    return Vhost(fields.text("name"))


def _user(fields: "_Fields") -> UserDefinition:
    return UserDefinition(
        fields.text("name"),
        fields.texts("tags"),
        fields.maybe_text("password"),
        fields.maybe_text("password_hash"),
        fields.maybe_text("hashing_algorithm"),
        fields.maybe_text("scram"),
    )


def _permission(fields: "_Fields") -> Permission:
    return Permission(
        fields.text("user"),
        fields.text("vhost", "/"),
        fields.pattern("configure"),
        fields.pattern("write"),
        fields.pattern("read"),
    )


def _topic_permission(fields: "_Fields") -> TopicPermission:
    return TopicPermission(
        fields.text("user"),
        fields.text("vhost", "/"),
        fields.text("exchange"),
        fields.pattern("write"),
        fields.pattern("read"),
    )


def _policy(fields: "_Fields") -> Policy:
    definition = fields.table("definition")
    with fields.named("definition"):
        check_definition(definition)
    applies = fields.text("apply_to", ApplyTo.ALL.value)
    if applies not in set(ApplyTo):
        raise ConfigError(f"{fields.path}.apply_to: expected one of {', '.join(ApplyTo)}, got '{applies}'")
    return Policy(
        fields.text("vhost", "/"),
        fields.text("name"),
        fields.pattern("pattern"),
        definition,
        ApplyTo(applies),
        fields.integer("priority", 0),
    )


def _vhost_limits(vhost: str, fields: "_Fields") -> VhostLimits:
    return VhostLimits(vhost, fields.maybe_integer("max_connections"), fields.maybe_integer("max_queues"))


def _user_limits(user: str, fields: "_Fields") -> UserLimits:
    return UserLimits(user, fields.maybe_integer("max_connections"), fields.maybe_integer("max_channels"))


class _Fields:
    """One table of the file, and the names of its fields that have been read."""

    def __init__(self, path: str, table: object) -> None:
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: expected a table, got {_kind(table)}")
        self.path = path
        self._left: dict[str, object] = dict(table)

    def _take(self, name: str, kind: type[T], expected: str, default: T | None = None) -> T:
        value = self._left.pop(name, default)
        if value is None:
            raise ConfigError(f"{self.path}.{name}: missing")
        # TOML's true is no number, though Python's is.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.path}.{name}: expected {expected}, got {_kind(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        return self._take(name, str, "text", default)

    def maybe_text(self, name: str) -> str | None:
        return self._take(name, str, "text") if name in self._left else None

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._take(name, list, "a list of text", [])
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{self.path}.{name}: expected a list of text")
        return tuple(values)

    def pattern(self, name: str) -> str:
        pattern = self.text(name)
        with self.named(name):
            compile_pattern(pattern)
        return pattern

    def integer(self, name: str, default: int) -> int:
        return self._take(name, int, "a whole number", default)

    def maybe_integer(self, name: str) -> int | None:
        return self._take(name, int, "a whole number") if name in self._left else None

    def table(self, name: str) -> Table:
        value: dict[str, object] = self._take(name, dict, "a table")
        with self.named(name):
            return Table({key: _field(item) for key, item in value.items()})

    def tables(self, name: str, parse: "Callable[[str, _Fields], T]") -> tuple[T, ...]:
        """A table of tables, each with a name chosen by the user."""
        found: list[T] = []
        for key, entry in self._take(name, dict, "a table", {}).items():
            fields = _Fields(f"{self.path}.{name}.{key}", entry)
            with fields.named():
                found.append(parse(key, fields))
            fields.end()
        return tuple(found)

    def end(self) -> None:
        """Whatever nobody asked for is a misspelling."""
        for name in self._left:
            raise ConfigError(f"{self.path}.{name}: unknown field")

    @contextmanager
    def named(self, name: str | None = None) -> Iterator[None]:
        """Refusals by the values themselves, with the place in the file."""
        try:
            yield
        except Invalid as refusal:
            where = f"{self.path}.{name}" if name else self.path
            raise ConfigError(f"{where}: {refusal}") from None


def _field(value: object) -> FieldIn:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        # As `tag-rules` are; what a table may hold, the setting's own check says.
        return {str(name): _field(inner) for name, inner in value.items()}
    raise Invalid(f"a setting is text, a number, true or false, or a table of those, not {_kind(value)}")


def _kind(value: object) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "a table"
        case datetime() | date() | time():
            return "a date or time"
        case _:
            return type(value).__name__
