"""Policies: settings given to many exchanges and queues by a pattern over their names. Machine.

RabbitMQ's rules: of the policies of a vhost that may apply to a thing of that kind and whose pattern matches its name,
the one with the highest priority applies, whole; nothing is merged. An argument of the thing itself and the policy both
count, as the reader of the setting decides. Names of settings are RabbitMQ's, and for our own the argument's name
without `x-`. A setting that is not known here is refused: it would be accepted and do nothing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from headrace.controller.entities import ApplyTo, Policy
from headrace.controller.errors import Invalid
from headrace.controller.patterns import compile_pattern
from headrace.controller.table import Table
from headrace.filtering.rules import InvalidRule, TagRules


class Resource(Enum):
    """What kind of thing a policy is looked up for."""

    EXCHANGE = "exchange"
    CLASSIC_QUEUE = "classic"
    QUORUM_QUEUE = "quorum"
    STREAM = "stream"


_APPLIES: Mapping[Resource, frozenset[ApplyTo]] = {
    Resource.EXCHANGE: frozenset({ApplyTo.ALL, ApplyTo.EXCHANGES}),
    Resource.CLASSIC_QUEUE: frozenset({ApplyTo.ALL, ApplyTo.QUEUES, ApplyTo.CLASSIC_QUEUES}),
    Resource.QUORUM_QUEUE: frozenset({ApplyTo.ALL, ApplyTo.QUEUES, ApplyTo.QUORUM_QUEUES}),
    Resource.STREAM: frozenset({ApplyTo.ALL, ApplyTo.QUEUES, ApplyTo.STREAMS}),
}


def effective_policy(ranked: Sequence[Policy], name: str, resource: Resource) -> Policy | None:
    """The first of `ranked` (the policies of a vhost, highest priority first) that applies, or None."""
    applies = _APPLIES[resource]
    for policy in ranked:
        if policy.apply_to in applies and compile_pattern(policy.pattern).matches(name):
            return policy
    return None


def _count(low: int) -> Callable[[object], str | None]:
    def check(value: object) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool) and value >= low:
            return None
        return f"a whole number, {low} or more"

    return check


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else "text"


def _boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _one_of(*words: str) -> Callable[[object], str | None]:
    def check(value: object) -> str | None:
        return None if value in words else "one of " + ", ".join(words)

    return check


def _age(value: object) -> str | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}[YMDhms]", value) and int(value[:-1]) > 0:
        return None
    return "a number above 0 with one of the units Y, M, D, h, m, s"


def _tag_rules(value: object) -> str | None:
    if not isinstance(value, Mapping) or not value or not all(isinstance(tags, str) for tags in value.values()):
        return "a table of patterns, each with the tags it gives as text"
    try:
        TagRules({str(pattern): tags for pattern, tags in value.items()})
    except InvalidRule as error:
        return f"rules that can be understood ({error})"
    return None


# Ten years, of policies and of arguments: the delay engine (delay/config.py) takes nothing that waits longer.
RETRY_DELAY_MS_MAX = 10 * 365 * 86_400_000

# Each check gives None, or what was expected.
SETTINGS: Mapping[str, Callable[[object], str | None]] = {
    "alternate-exchange": _text,
    "compression": _one_of("none", "lz4", "auto"),
    "consumer-timeout": _count(1),
    "dead-letter-exchange": _text,
    "dead-letter-routing-key": _text,
    "dead-letter-strategy": _one_of("at-most-once", "at-least-once"),
    "delivery-limit": _count(-1),
    "durability": _one_of("sync", "interval", "os"),
    "expires": _count(1),
    "filter-unmatched": _one_of("stay", "dead-letter", "drop"),
    "max-age": _age,
    "max-length": _count(0),
    "max-length-bytes": _count(0),
    "message-ttl": _count(0),
    "overflow": _one_of("drop-head", "reject-publish", "reject-publish-dlx"),
    "queue-mode": _one_of("default", "lazy"),
    "retention-bytes": _count(0),
    "retention-ms": _count(0),
    "retry-backoff": _one_of("fixed", "exponential", "levels"),
    "retry-delay-max-ms": _count(0),
    "retry-delay-ms": _count(0),
    "retry-jitter": _boolean,
    "retry-max": _count(0),
    "stream-max-segment-size-bytes": _count(0),
    "tag-rules": _tag_rules,
}


def check_definition(definition: Table) -> None:
    """Invalid unless every setting is known and well formed."""
    if not definition:
        raise Invalid("a policy's definition must not be empty")
    for name, value in definition.items():
        check = SETTINGS.get(name)
        if check is None:
            raise Invalid(f"'{name}' is not a policy setting")
        expected = check(value)
        if expected is not None:
            raise Invalid(f"policy setting '{name}': expected {expected}, got {value!r}")
    _check_retry(definition)


def _check_retry(definition: Table) -> None:
    delay, longest = definition.get("retry-delay-ms"), definition.get("retry-delay-max-ms")
    if definition.get("retry-backoff") == "levels" and (delay is not None or longest is not None):
        raise Invalid("policy setting 'retry-backoff': levels have delays of their own, retry-delay-* sets others")
    for name, value in (("retry-delay-ms", delay), ("retry-delay-max-ms", longest)):
        if isinstance(value, int) and value > RETRY_DELAY_MS_MAX:
            raise Invalid(f"policy setting '{name}': expected at most {RETRY_DELAY_MS_MAX}, got {value}")
    if isinstance(delay, int) and isinstance(longest, int) and longest < delay:
        raise Invalid(f"policy setting 'retry-delay-max-ms': {longest} is less than the delay of {delay}")
