"""Exchanges and bindings of one vhost: which queues does a message go to? Machine: no I/O.

A message enters at one exchange and is carried on, breadth first, over exchange-to-exchange bindings; no exchange is
entered twice, so circles end. Where no binding of an exchange matches, its alternate exchange is entered (RabbitMQ's
rule: a match that leads to an exchange counts, even if that exchange then routes to nothing). The default exchange ""
is always there, takes no bindings, and leads to the queue that has the routing key as its name.

    kind                matches a binding when
    direct              its key equals one of the routing keys (routing key, CC, BCC)
    fanout              always
    topic               its key, as a pattern, matches one of the routing keys
    headers             its arguments match the headers: x-match all (default) | any, which pass over arguments named
                        x-..., or all-with-x | any-with-x, which pass over x-match only. An argument without value
                        (void) asks for presence. Integers of all sizes compare as integers, strings and byte arrays as
                        bytes; 1, 1.0, "1" and true are four values. No argument to compare: all matches, any does not.
    x-consistent-hash   it is the one that the hash of the first routing key, of the header `hash-header` or of the
                        property `hash-property` falls to; its key is its weight. See _HashRing.

A binding with the argument `x-filter` matches only messages whose tags its expression wants, whatever the kind.

Answers are cached per exchange and routing key (and tags, where a filter was asked), unless headers or properties were
looked at. A change of an exchange drops the answers of that exchange and of all from which it can be reached, and gives
exactly those a new version.

Invariants: a binding stands in its source and at its destination, or nowhere; a Route is current exactly as long as its
exchange has the Route's version; two current Routes of one exchange with the same queues are the same object.
Neighbours: filtering/topics.py below; publish.py and the doors' declare and bind above. x-delayed-message exchanges are
put here as the kind that their x-delayed-type names (`kind_of`).
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from headrace.controller.entities import DestinationKind
from headrace.controller.errors import Invalid, NotFound
from headrace.controller.table import EMPTY, Table
from headrace.filtering.expression import Expression, ExpressionError, parse
from headrace.filtering.tags import NO_TAGS, Tags, is_small
from headrace.filtering.topics import AMQP, CACHED_CHARS_MAX, TopicTrie

Q = TypeVar("Q", bound=Hashable)

DEFAULT_EXCHANGE: Final = ""
FILTER: Final = "x-filter"

# Headers or properties of a message, or how to get them: most routes never ask.
Fields: TypeAlias = Mapping[str, object] | Callable[[], Mapping[str, object] | None] | None


class ExchangeKind(StrEnum):
    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"
    CONSISTENT_HASH = "x-consistent-hash"


# The type of an exchange that was made for RabbitMQ's plugin. It routes as its argument says, and delays as all do.
DELAYED_EXCHANGE: Final = "x-delayed-message"
DELAYED_TYPE: Final = "x-delayed-type"


def kind_of(declared_type: str, arguments: Table) -> ExchangeKind:
    """How an exchange of this type routes. ValueError for a type that there is not."""
    return ExchangeKind(str(arguments.get(DELAYED_TYPE)) if declared_type == DELAYED_EXCHANGE else declared_type)


@dataclass(frozen=True, slots=True)
class Exchange:
    name: str
    kind: ExchangeKind
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    # By argument or policy; it need not exist.
    alternate: str | None = None
    arguments: Table = EMPTY
    # As it was declared, where that is another than the kind.
    declared_type: str = ""

    @property
    def type(self) -> str:
        """What clients know it as."""
        return self.declared_type or str(self.kind)


@dataclass(frozen=True, slots=True)
class Binding(Generic[Q]):
    """What identifies a binding is all of it: the same again is the same binding."""

    source: str
    destination_kind: DestinationKind
    # The queue, or the exchange's name.
    destination: Q | str
    key: str
    arguments: Table


@dataclass(frozen=True, slots=True, eq=False)
class Route(Generic[Q]):
    """Where a message goes. Compared by identity: see the invariants above."""

    exchange: str
    exchange_version: int
    # Each once, in the order of their names.
    queues: tuple[Q, ...]
    unroutable: bool
    # The answer is for these headers and properties only: not to be kept under exchange and routing key.
    reads_message: bool
    # The other exchanges that the message passes on its way.
    through: frozenset[str] = frozenset()
    # The answer is for these tags only.
    reads_tags: bool = False


class Router(Generic[Q]):
    """`queue_named` finds a queue for the default exchange; `name_of` gives a queue's name, unique in the vhost.

    `put_queue` and `remove_queue` are to be called whenever a queue comes or goes, bound or not.
    """

    def __init__(
        self, queue_named: Callable[[str], Q | None], *, name_of: Callable[[Q], str], cached_keys_max: int = 8192
    ) -> None:
        self._name_of = name_of
        self._cached_keys_max = cached_keys_max
        self._version = 0
        self._queues: dict[Q, _Target[Q]] = {}
        # Exchange -> the exchanges that have it as their alternate, whether it exists or not.
        self._alternates: dict[str, set[str]] = {}
        default: _Exchange[Q] = _Exchange(
            Exchange(DEFAULT_EXCHANGE, ExchangeKind.DIRECT), _ByName(queue_named, self._target_of)
        )
        self._exchanges = {DEFAULT_EXCHANGE: default}

    def put_exchange(
        self,
        name: str,
        kind: ExchangeKind,
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        alternate: str | None = None,
        arguments: Table = EMPTY,
        declared_type: str = "",
    ) -> None:
        """Make the exchange, or give the one that is there new settings (a policy may change its alternate)."""
        if name == DEFAULT_EXCHANGE:
            raise Invalid("the default exchange cannot be declared")
        made = Exchange(name, kind, durable, auto_delete, internal, alternate, arguments, declared_type)
        found = self._exchanges.get(name)
        if found is None:
            self._exchanges[name] = _Exchange(made, _matcher(made))
        else:
            if (found.settings.kind, found.settings.arguments) != (kind, arguments):
                raise Invalid(f"exchange '{name}' is there already, with another type or other arguments")
            self._forget_alternate(found.settings)
            found.settings = made
        if alternate is not None:
            self._alternates.setdefault(alternate, set()).add(name)
        self._changed((name,))

    def remove_exchange(self, name: str) -> tuple[str, ...]:
        """With all bindings from and to it. Returns the auto-delete exchanges that were left without bindings."""
        removed = self._found(name)
        if name == DEFAULT_EXCHANGE:
            raise Invalid("the default exchange cannot be deleted")
        for link in removed.links.values():
            del link.target.links[link]
        sources = self._unlink(removed.target)
        self._forget_alternate(removed.settings)
        del self._exchanges[name]
        self._changed((name, *sources))
        return self._to_auto_delete(sources)

    def put_queue(self, queue: Q) -> None:
        """A queue was declared: the default exchange leads to it from now on."""
        self._target_of(queue)
        self._changed((DEFAULT_EXCHANGE,))

    def queue_changed(self, queue: Q) -> None:
        """A queue has other settings: whoever keeps something about it beside a route looks again."""
        target = self._queues.get(queue)
        sources = () if target is None else tuple(link.binding.source for link in target.links)
        self._changed((DEFAULT_EXCHANGE, *sources))

    def exchange_changed(self, name: str) -> None:
        """The same for an exchange."""
        self._changed((name,))

    def remove_queue(self, queue: Q) -> tuple[str, ...]:
        """With all its bindings. Returns the auto-delete exchanges that were left without bindings."""
        target = self._queues.pop(queue, None)
        sources = self._unlink(target) if target is not None else ()
        self._changed((DEFAULT_EXCHANGE, *sources))
        return self._to_auto_delete(sources)

    def bind_queue(self, exchange: str, queue: Q, key: str, arguments: Table = EMPTY) -> bool:
        """Whether the binding is new. Raises NotFound or Invalid, with nothing changed."""
        binding: Binding[Q] = Binding(exchange, DestinationKind.QUEUE, queue, key, arguments)
        return self._bind(binding, self._target_of(queue))

    def check_filter(self, exchange: str, arguments: Table) -> None:
        """Raises Invalid for a filter that a binding of this exchange cannot have: before it is written down."""
        found = self._found(exchange)
        target: _Target[Q] = found.target
        _gate(found.settings, Binding(exchange, DestinationKind.EXCHANGE, "", "", arguments), target)

    def unbind_queue(self, exchange: str, queue: Q, key: str, arguments: Table = EMPTY) -> bool:
        """Whether the binding was there; then ask `is_unused` of an auto-delete exchange."""
        target = self._queues.get(queue)
        return target is not None and self._unbind(exchange, target, key, arguments)

    def bind_exchange(self, source: str, destination: str, key: str, arguments: Table = EMPTY) -> bool:
        binding: Binding[Q] = Binding(source, DestinationKind.EXCHANGE, destination, key, arguments)
        if DEFAULT_EXCHANGE in (source, destination):
            raise Invalid("the default exchange cannot be bound")
        return self._bind(binding, self._found(destination).target)

    def unbind_exchange(self, source: str, destination: str, key: str, arguments: Table = EMPTY) -> bool:
        target = self._exchanges.get(destination)
        return target is not None and self._unbind(source, target.target, key, arguments)

    def route(
        self,
        exchange: str,
        keys: Sequence[str],
        headers: Fields = None,
        properties: Fields = None,
        tags: Tags = NO_TAGS,
    ) -> Route[Q]:
        """Where a message goes that was published to `exchange`. Raises NotFound.

        `keys` are the routing key and then those of CC and BCC, so at least one. `properties` are asked only for
        correlation_id, message_id and timestamp, and only by exchanges that hash one of them.
        """
        entered = self._exchanges.get(exchange)
        if entered is None:
            raise NotFound(f"no exchange '{exchange}'")
        if len(keys) != 1:
            return self._route(entered, keys, _Message(headers, properties, tags))
        route = entered.cache.get(keys[0])
        if route is None and entered.by_tags:
            route = entered.by_tags.get((keys[0], tags))
        if route is None:
            route = self._route(entered, keys, _Message(headers, properties, tags))
            # MQTT's keys may be far longer than AMQP's: those are routed each time, so the bound holds in bytes too.
            known = not route.reads_tags or is_small(tags)
            if not route.reads_message and known and len(keys[0]) <= CACHED_CHARS_MAX:
                # Full means start again: the keys in use are back at once, and no hit pays for an order of use.
                if len(entered.cache) + len(entered.by_tags) >= self._cached_keys_max:
                    entered.cache.clear()
                    entered.by_tags.clear()
                if route.reads_tags:
                    entered.by_tags[keys[0], tags] = route
                else:
                    entered.cache[keys[0]] = route
        return route

    def is_current(self, route: Route[Q]) -> bool:
        """Whether routing the same again would give the same: for whoever keeps routes of their own."""
        found = self._exchanges.get(route.exchange)
        return found is not None and found.version == route.exchange_version

    def exchange_version(self, name: str) -> int:
        return self._found(name).version

    def exchange(self, name: str) -> Exchange | None:
        found = self._exchanges.get(name)
        return found.settings if found is not None else None

    def exchanges(self) -> tuple[Exchange, ...]:
        """All but the default exchange, in the order of their making."""
        return tuple(found.settings for name, found in self._exchanges.items() if name != DEFAULT_EXCHANGE)

    def bindings_from(self, exchange: str) -> tuple[Binding[Q], ...]:
        """In the order of their making, as below."""
        return tuple(link.binding for link in self._found(exchange).links.values())

    def bindings_to_exchange(self, exchange: str) -> tuple[Binding[Q], ...]:
        return tuple(link.binding for link in self._found(exchange).target.links)

    def bindings_to_queue(self, queue: Q) -> tuple[Binding[Q], ...]:
        """Without the one from the default exchange, which every queue has."""
        target = self._queues.get(queue)
        return tuple(link.binding for link in target.links) if target is not None else ()

    def is_unused(self, exchange: str) -> bool:
        """Whether nothing is bound from it: what if-unused and auto-delete ask."""
        return not self._found(exchange).links

    def _found(self, name: str) -> "_Exchange[Q]":
        found = self._exchanges.get(name)
        if found is None:
            raise NotFound(f"no exchange '{name}'")
        return found

    def _target_of(self, queue: Q) -> "_Target[Q]":
        target = self._queues.get(queue)
        if target is None:
            target = self._queues[queue] = _Target(DestinationKind.QUEUE, self._name_of(queue), queue)
        return target

    def _bind(self, binding: Binding[Q], target: "_Target[Q]") -> bool:
        source = self._found(binding.source)
        if source.settings.name == DEFAULT_EXCHANGE:
            raise Invalid("the default exchange cannot be bound")
        identity = (target, binding.key, binding.arguments)
        if identity in source.links:
            return False
        link = _Link(binding, target, _gate(source.settings, binding, target))
        source.matcher.add(link)
        source.gate_count += link.is_filtered
        source.links[identity] = link
        target.links[link] = None
        self._changed((binding.source,))
        return True

    def _unbind(self, source: str, target: "_Target[Q]", key: str, arguments: Table) -> bool:
        found = self._exchanges.get(source)
        link = found.links.pop((target, key, arguments), None) if found is not None else None
        if found is None or link is None:
            return False
        found.matcher.remove(link)
        found.gate_count -= link.is_filtered
        del target.links[link]
        self._changed((source,))
        return True

    def _unlink(self, target: "_Target[Q]") -> tuple[str, ...]:
        """Drop all bindings to the target; return their sources, each once."""
        for link in target.links:
            source = self._exchanges[link.binding.source]
            del source.links[target, link.binding.key, link.binding.arguments]
            source.matcher.remove(link)
            source.gate_count -= link.is_filtered
        sources = tuple(dict.fromkeys(link.binding.source for link in target.links))
        target.links.clear()
        return sources

    def _forget_alternate(self, settings: Exchange) -> None:
        if settings.alternate is not None:
            users = self._alternates[settings.alternate]
            users.remove(settings.name)
            if not users:
                del self._alternates[settings.alternate]

    def _to_auto_delete(self, names: Iterable[str]) -> tuple[str, ...]:
        left = (self._exchanges[name] for name in names if name in self._exchanges)
        return tuple(found.settings.name for found in left if found.settings.auto_delete and not found.links)

    def _changed(self, names: Iterable[str]) -> None:
        """These route differently now, and so may all from which they are reached."""
        self._version += 1
        waiting = list(names)
        seen = set(waiting)
        while waiting:
            name = waiting.pop()
            upstream = set(self._alternates.get(name, ()))
            found = self._exchanges.get(name)
            if found is not None:
                found.version = self._version
                found.forget()
                upstream.update(link.binding.source for link in found.target.links)
            waiting.extend(upstream - seen)
            seen |= upstream

    def _route(self, entered: "_Exchange[Q]", keys: Sequence[str], message: "_Message") -> Route[Q]:
        queues: dict[_Target[Q], None] = {}
        seen = {entered.settings.name}
        waiting = deque((entered,))
        while waiting:
            exchange = waiting.popleft()
            targets = exchange.matcher.match(keys, message)
            if exchange.gate_count:
                targets = _behind_gates(targets, message)
            onward = []
            for target in targets:
                if target.kind is DestinationKind.QUEUE:
                    queues[target] = None
                else:
                    onward.append(target.name)
            if not targets and exchange.settings.alternate is not None:
                onward.append(exchange.settings.alternate)
            for name in onward:
                if name not in seen:
                    seen.add(name)
                    if name in self._exchanges:
                        waiting.append(self._exchanges[name])
        found = tuple(target.queue for target in sorted(queues, key=_name) if target.queue is not None)
        through = frozenset(name for name in seen if name in self._exchanges) - {entered.settings.name}
        asked = (message.was_read, message.tags_read)
        route = entered.routes.get((found, asked, through))
        if route is None:
            route = Route(
                entered.settings.name, entered.version, found, not found, message.was_read, through, message.tags_read
            )
            entered.routes[found, asked, through] = route
        return route


def _gate(exchange: Exchange, binding: Binding[Q], target: "_Target[Q]") -> "_Target[Q]":
    """What a binding leads to: its target, or something before it that lets only some messages through."""
    text = binding.arguments.get(FILTER)
    if text is None:
        return target
    if not isinstance(text, str):
        raise Invalid(f"{FILTER} of a binding is text, not {text!r}")
    if exchange.kind is ExchangeKind.CONSISTENT_HASH:
        raise Invalid(f"{FILTER} is not possible with an x-consistent-hash exchange: its bindings divide all there is")
    try:
        wanted = parse(text)
    except ExpressionError as error:
        raise Invalid(str(error)) from None
    return _Target(target.kind, target.name, target.queue, behind=target, wanted=wanted)


def _behind_gates(targets: "Collection[_Target[Q]]", message: "_Message") -> "Collection[_Target[Q]]":
    """The targets that the message may reach."""
    reached: dict[_Target[Q], None] = {}
    for target in targets:
        if target.wanted is None or target.behind is None:
            reached[target] = None
        elif target.wanted.matches(message.tags()):
            reached[target.behind] = None
    return reached


class _Target(Generic[Q]):
    """A queue or an exchange that bindings lead to. One per thing, compared by identity."""

    __slots__ = ("behind", "kind", "links", "name", "queue", "wanted")

    def __init__(
        self,
        kind: DestinationKind,
        name: str,
        queue: Q | None = None,
        *,
        behind: "_Target[Q] | None" = None,
        wanted: Expression | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.queue = queue
        # Of a gate: the target behind it, and what it lets through.
        self.behind = behind
        self.wanted = wanted
        self.links: dict[_Link[Q], None] = {}


def _name(target: _Target[Q]) -> str:
    return target.name


class _Link(Generic[Q]):
    """A binding in place. Compared by identity."""

    __slots__ = ("binding", "gate", "target")

    def __init__(self, binding: Binding[Q], target: _Target[Q], gate: _Target[Q]) -> None:
        self.binding = binding
        self.target = target
        # What a match leads to: the target, or the filter before it.
        self.gate = gate

    @property
    def is_filtered(self) -> bool:
        return self.gate is not self.target


class _Exchange(Generic[Q]):
    __slots__ = ("by_tags", "cache", "gate_count", "links", "matcher", "routes", "settings", "target", "version")

    def __init__(self, settings: Exchange, matcher: "_Matcher[Q]") -> None:
        self.settings = settings
        self.target: _Target[Q] = _Target(DestinationKind.EXCHANGE, settings.name)
        self.matcher = matcher
        self.links: dict[tuple[_Target[Q], str, Table], _Link[Q]] = {}
        # Bindings with a filter.
        self.gate_count = 0
        self.version = 0
        self.cache: dict[str, Route[Q]] = {}
        # The same for keys whose bindings have filters.
        self.by_tags: dict[tuple[str, Tags], Route[Q]] = {}
        self.routes: dict[tuple[tuple[Q, ...], tuple[bool, bool], frozenset[str]], Route[Q]] = {}

    def forget(self) -> None:
        """Drop the answers."""
        self.cache.clear()
        self.by_tags.clear()
        self.routes.clear()


class _Message:
    """Headers and properties, fetched when first asked for; tags; and whether anybody asked."""

    __slots__ = ("_headers", "_properties", "_tags", "tags_read", "was_read")

    def __init__(self, headers: Fields, properties: Fields, tags: Tags) -> None:
        self._headers = headers
        self._properties = properties
        self._tags = tags
        self.was_read = self.tags_read = False

    def tags(self) -> Tags:
        self.tags_read = True
        return self._tags

    def headers(self) -> Mapping[str, object]:
        self.was_read = True
        if not isinstance(self._headers, Mapping):
            self._headers = (self._headers() if self._headers is not None else None) or {}
        return self._headers

    def properties(self) -> Mapping[str, object]:
        self.was_read = True
        if not isinstance(self._properties, Mapping):
            self._properties = (self._properties() if self._properties is not None else None) or {}
        return self._properties


class _Matcher(Protocol[Q]):
    """The bindings of one exchange, arranged for its kind."""

    def add(self, link: _Link[Q]) -> None:
        """Raises Invalid for a binding that the kind does not allow; then it is not added."""

    def remove(self, link: _Link[Q]) -> None: ...

    def match(self, keys: Sequence[str], message: _Message) -> Collection[_Target[Q]]:
        """Where the matching bindings lead."""


def _matcher(exchange: Exchange) -> _Matcher[Q]:
    match exchange.kind:
        case ExchangeKind.DIRECT:
            return _Direct()
        case ExchangeKind.FANOUT:
            return _Fanout()
        case ExchangeKind.TOPIC:
            return _Topic()
        case ExchangeKind.HEADERS:
            return _Headers()
        case ExchangeKind.CONSISTENT_HASH:
            return _ConsistentHash(exchange.arguments)


class _ByName(Generic[Q]):
    """The default exchange. Router lets no binding come here."""

    def __init__(self, queue_named: Callable[[str], Q | None], target_of: Callable[[Q], _Target[Q]]) -> None:
        self._queue_named = queue_named
        self._target_of = target_of

    def add(self, link: _Link[Q]) -> None:
        raise NotImplementedError

    def remove(self, link: _Link[Q]) -> None:
        raise NotImplementedError

    def match(self, keys: Sequence[str], message: _Message) -> Collection[_Target[Q]]:
        queues = [self._queue_named(key) for key in keys]
        return [self._target_of(queue) for queue in queues if queue is not None]


class _Counts(dict[_Target[Q], int]):
    """Targets, each with the number of bindings that lead to it: those may differ in their arguments alone."""

    __slots__ = ()

    def up(self, target: _Target[Q]) -> bool:
        """Whether it is the first."""
        self[target] = self.get(target, 0) + 1
        return self[target] == 1

    def down(self, target: _Target[Q]) -> bool:
        """Whether it was the last."""
        self[target] -= 1
        if self[target]:
            return False
        del self[target]
        return True


class _Fanout(Generic[Q]):
    def __init__(self) -> None:
        self._bound: _Counts[Q] = _Counts()

    def add(self, link: _Link[Q]) -> None:
        self._bound.up(link.gate)

    def remove(self, link: _Link[Q]) -> None:
        self._bound.down(link.gate)

    def match(self, keys: Sequence[str], message: _Message) -> Collection[_Target[Q]]:
        return self._bound


class _Direct(Generic[Q]):
    def __init__(self) -> None:
        self._bound: dict[str, _Counts[Q]] = {}

    def add(self, link: _Link[Q]) -> None:
        self._bound.setdefault(link.binding.key, _Counts()).up(link.gate)

    def remove(self, link: _Link[Q]) -> None:
        bound = self._bound[link.binding.key]
        bound.down(link.gate)
        if not bound:
            del self._bound[link.binding.key]

    def match(self, keys: Sequence[str], message: _Message) -> Collection[_Target[Q]]:
        return [target for key in keys for target in self._bound.get(key, ())]


class _Topic(Generic[Q]):
    def __init__(self) -> None:
        self._bound: dict[str, _Counts[Q]] = {}
        # With its own cache: the trie forgets only the keys that a new binding matches, Router all of the exchange's.
        self._trie: TopicTrie[_Target[Q]] = TopicTrie(AMQP)

    def add(self, link: _Link[Q]) -> None:
        key = link.binding.key
        if self._bound.setdefault(key, _Counts()).up(link.gate):
            self._trie.add(AMQP.pattern(key), link.gate)

    def remove(self, link: _Link[Q]) -> None:
        key = link.binding.key
        if self._bound[key].down(link.gate):
            self._trie.remove(AMQP.pattern(key), link.gate)
            if not self._bound[key]:
                del self._bound[key]

    def match(self, keys: Sequence[str], message: _Message) -> Collection[_Target[Q]]:
        return [target for key in keys for target in self._trie.match(key)]


@dataclass(frozen=True, slots=True)
class _Condition:
    """The arguments of a binding of a headers exchange, ready to be compared."""

    needs_all: bool
    # Header -> the value it must have; None asks for presence only.
    wanted: dict[str, Hashable | None]

    def holds(self, headers: Mapping[str, object], values: dict[str, Hashable]) -> bool:
        """`values` keeps what `_comparable` made of the headers, for the other bindings of the exchange."""
        for name, value in self.wanted.items():
            matches = name in headers
            if matches and value is not None:
                if name not in values:
                    values[name] = _comparable(headers[name])
                matches = values[name] == value
            if matches is not self.needs_all:
                return matches
        return self.needs_all


_X_MATCH: Final = ("all", "any", "all-with-x", "any-with-x")


def _condition(arguments: Table) -> _Condition:
    mode = arguments.get("x-match", "all")
    if mode not in _X_MATCH:
        raise Invalid(f"x-match is {', '.join(_X_MATCH[:-1])} or {_X_MATCH[-1]}, not {mode!r}")
    with_x = mode in ("all-with-x", "any-with-x")
    wanted = {
        name: _comparable(value) if value is not None else None
        for name, value in arguments.items()
        if name not in ("x-match", FILTER) and (with_x or not name.startswith("x-"))
    }
    return _Condition(mode in ("all", "all-with-x"), wanted)


class _Headers(Generic[Q]):
    def __init__(self) -> None:
        self._conditions: dict[_Link[Q], _Condition] = {}

    def add(self, link: _Link[Q]) -> None:
        self._conditions[link] = _condition(link.binding.arguments)

    def remove(self, link: _Link[Q]) -> None:
        del self._conditions[link]

    def match(self, keys: Sequence[str], message: _Message) -> Collection[_Target[Q]]:
        if not self._conditions:
            return ()
        headers = message.headers()
        values: dict[str, Hashable] = {}
        return [link.gate for link, wanted in self._conditions.items() if wanted.holds(headers, values)]


def _comparable(value: object) -> Hashable:
    """A stand-in that is equal when RabbitMQ holds two field values for equal: by value, whatever the size or letter.

    Inside tables and arrays too; there RabbitMQ also compares the letters and the order of a table's fields.
    """
    match value:
        case bool():
            return ("t", value)
        case int():
            return int(value)
        case float():
            return ("d", value.hex())
        case str():
            return value.encode(errors="surrogateescape")
        case bytes() | bytearray():
            return bytes(value)
        case datetime():
            return int(value.timestamp())
        case Decimal():
            return ("D", value.as_tuple())
        case Mapping():
            return ("F", tuple((name, _comparable(value[name])) for name in sorted(value)))
        case list() | tuple():
            return ("A", tuple(map(_comparable, value)))
        case None:
            return ("V",)
        case _:
            raise TypeError(f"{type(value).__name__} is not a type of header values")


_HASH_PROPERTIES: Final = ("correlation_id", "message_id", "timestamp")


class _ConsistentHash(Generic[Q]):
    """Of several bindings to one target the first counts, as in RabbitMQ; when it goes, the next does."""

    def __init__(self, arguments: Table) -> None:
        header, prop = arguments.get("hash-header"), arguments.get("hash-property")
        if header is not None and prop is not None:
            raise Invalid("hash-header and hash-property exclude each other")
        if header is not None and not isinstance(header, str):
            raise Invalid(f"hash-header is the name of a header, not {header!r}")
        if prop is not None and prop not in _HASH_PROPERTIES:
            raise Invalid(f"hash-property is one of {', '.join(_HASH_PROPERTIES)}, not {prop!r}")
        self._header = header
        self._property = prop if isinstance(prop, str) else None
        self._bound: dict[_Target[Q], dict[_Link[Q], int]] = {}
        self._ring: _HashRing[Q] = _HashRing()

    def add(self, link: _Link[Q]) -> None:
        weight = _weight(link.binding.key)
        bound = self._bound.setdefault(link.target, {})
        if not bound:
            self._ring.put(link.target, weight)
        bound[link] = weight

    def remove(self, link: _Link[Q]) -> None:
        bound = self._bound[link.target]
        counted = next(iter(bound))
        del bound[link]
        if counted is link:
            self._ring.remove(link.target)
            if bound:
                self._ring.put(link.target, next(iter(bound.values())))
            else:
                del self._bound[link.target]

    def match(self, keys: Sequence[str], message: _Message) -> Collection[_Target[Q]]:
        if not self._bound:
            return ()
        if self._header is not None:
            value = message.headers().get(self._header)
        elif self._property is not None:
            value = message.properties().get(self._property)
        else:
            value = keys[0]
        return (self._ring.owner(_hashed(value)),)


def _weight(key: str) -> int:
    digits = key.removeprefix("+")
    # No more digits than a routing key can have.
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 255 or int(digits) == 0:
        raise Invalid(f"the key of this binding is its weight, a whole number above 0, not {key!r}")
    return int(digits)


def _hashed(value: object) -> bytes:
    """What is hashed: text and bytes as they are, numbers as decimal text, nothing as no bytes."""
    plain = _comparable(value)
    if isinstance(plain, bytes):
        return plain
    return str(plain).encode() if value is not None else b""


_SLOT_BITS: Final = 16
_SLOTS: Final[npt.NDArray[np.uint64]] = np.arange(1 << _SLOT_BITS, dtype=np.uint64)


class _HashRing(Generic[Q]):
    """65,536 slots; each belongs to one target. A value falls into the slot of the upper 16 bits of its xxh3_64.

    A slot's owner is drawn by weighted rendezvous: every target draws a number for every slot from a hash of both
    (xxh3_64 of the target's name, then splitmix64), stretched by its weight, and the lowest takes it. So the share of a
    target is its part of the sum of weights; when it goes, its slots fall to the others and no other slot moves; when
    it comes, slots move to it and to no other; and neither history nor a restart has a part in it. Weights cost no
    memory; a million queues of weight one would share 65,536 slots.
    """

    def __init__(self) -> None:
        self._members: dict[int, tuple[_Target[Q], int]] = {}
        self._numbers: dict[_Target[Q], int] = {}
        self._next_number = 0
        # Per slot: the number of its owner, and what that drew.
        self._owners: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._draws: npt.NDArray[np.float64] = np.empty(0, dtype=np.float64)

    def put(self, target: _Target[Q], weight: int) -> None:
        if not self._members:
            self._owners = np.full(len(_SLOTS), -1, dtype=np.int64)
            self._draws = np.full(len(_SLOTS), np.inf)
        number = self._next_number
        self._next_number += 1
        self._numbers[target] = number
        self._members[number] = (target, weight)
        self._contend(number, _SLOTS)

    def remove(self, target: _Target[Q]) -> None:
        number = self._numbers.pop(target)
        del self._members[number]
        lost = _SLOTS[self._owners == number]
        self._draws[lost] = np.inf
        for other in self._members:
            self._contend(other, lost)

    def owner(self, value: bytes) -> _Target[Q]:
        slot = xxh3_64_intdigest(value) >> (64 - _SLOT_BITS)
        return self._members[self._owners.item(slot)][0]

    def _contend(self, number: int, slots: npt.NDArray[np.uint64]) -> None:
        target, weight = self._members[number]
        draws = _draw(xxh3_64_intdigest(f"{target.kind}:{target.name}".encode(errors="surrogateescape")), slots)
        draws /= weight
        won = draws < self._draws[slots]
        self._owners[slots[won]] = number
        self._draws[slots[won]] = draws[won]


def _draw(seed: int, slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number per slot, exponentially distributed: divided by weights, the lowest falls to each by its share."""
    mixed = slots * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(uniform)
