"""Who gets a message: the subscriptions of connected sessions, and what they come to for a topic. Machine.

All subscriptions of a session that match a topic are one delivery, with the highest QoS granted and all identifiers
[MQTT-3.3.4-2, MQTT-3.3.4-3]. Topics with the same subscribers share one plan, and subscribers to whom a message looks
the same share its bytes. Neighbours: filtering/topics.py matches, fan_out.py and catch_up.py ask, session.py is asked
to take it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.core_log.record import RecordBatch
from headrace.filtering.expression import parse
from headrace.filtering.tags import Tags, is_small
from headrace.filtering.topics import MQTT, TopicTrie
from headrace.gateways.mqtt.origin import publisher
from headrace.gateways.mqtt.properties import encode_subscription_identifiers
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.session import Interest, Session

PLANS_MAX = 16_384
# Of one plan, for different tags.
TAGGED_MAX = 256
# Whoever keeps topics keeps no longer ones: what is kept for strangers is bounded in bytes too.
KNOWN_TOPIC_BYTES_MAX = 256
TOPICS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Shape:
    """How a message looks to a subscriber; those who share it share the bytes."""

    version: Version
    retain_as_published: bool
    identifiers: bytes


@dataclass(frozen=True, slots=True)
class Delivery:
    """All of one session's subscriptions that match, as one."""

    session: Session
    qos: int
    shape: Shape


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One subscription of a session that is connected; the same one on another connection is another."""

    session: Session
    interest: Interest
    version: Version


class Plan:
    """Who gets the messages of some topics, by the QoS they were published with."""

    __slots__ = (
        "_at",
        "_helds",
        "_tagged",
        "_without",
        "deliveries",
        "has_filters",
        "has_no_local",
        "plain",
        "since",
        "tracked",
    )

    def __init__(self, helds: Sequence[Held], *, tested: bool = False) -> None:
        """`tested`: what they want of the tags was asked already."""
        self._helds = helds
        self.has_filters = not tested and any(held.interest.wants for held in helds)
        self._tagged: dict[Tags, Plan] = {}
        self.deliveries = list(_deliveries(helds))
        self.has_no_local = any(held.interest.no_local for held in helds)
        self._without: dict[int, Plan] = {}
        # Records before this are not for all of them.
        self.since = max((held.interest.since for held in helds), default=0)
        self._at: dict[int, Plan] = {}
        # For each QoS: those who get it with QoS 0, by shape; and those who must acknowledge it.
        self.plain: list[list[tuple[Shape, list[Session]]]] = []
        self.tracked: list[list[Delivery]] = []
        for qos in range(3):
            shapes: dict[Shape, list[Session]] = {}
            tracked = []
            for delivery in self.deliveries:
                if min(qos, delivery.qos):
                    tracked.append(delivery)
                else:
                    shapes.setdefault(delivery.shape, []).append(delivery.session)
            self.plain.append(list(shapes.items()))
            self.tracked.append(tracked)

    def without(self, origin: int) -> "Plan":
        """[MQTT-3.8.3-3] The same for what this client published itself."""
        if not self.has_no_local:
            return self
        origin = publisher(origin)
        found = self._without.get(origin)
        if found is None:
            if len(self._without) >= PLANS_MAX:
                self._without.clear()
            found = self._without[origin] = Plan(
                [one for one in self._helds if not (one.interest.no_local and one.session.origin == origin)]
            )
        return found

    def tagged(self, tags: Tags) -> "Plan":
        """The same for messages with these tags: without the subscriptions that do not want them."""
        if not self.has_filters:
            return self
        found = self._tagged.get(tags)
        if found is None:
            wanted = [one for one in self._helds if not one.interest.wants or parse(one.interest.wants).matches(tags)]
            found = Plan(wanted, tested=True)
            if is_small(tags):
                if len(self._tagged) >= TAGGED_MAX:
                    self._tagged.clear()
                self._tagged[tags] = found
        return found

    def by_tags(self, batch: RecordBatch, first: int, last: int) -> Iterable[tuple["Plan", int, int]]:
        """(plan, from, to) pieces that cover records first..last-1."""
        if not self.has_filters:
            return ((self, first, last),)
        sets = batch.tag_sets
        return [(self.tagged(sets[place]), low, high) for place, low, high in batch.tags.spans(first, last)]

    def at(self, offset: int) -> "Plan":
        """The same for a record that is older than some of the subscriptions: they do not get it."""
        if self.since <= offset:
            return self
        # The newest subscription that gets it tells which ones do.
        since = max((one.interest.since for one in self._helds if one.interest.since <= offset), default=-1)
        found = self._at.get(since)
        if found is None:
            if len(self._at) >= PLANS_MAX:
                self._at.clear()
            found = self._at[since] = Plan([one for one in self._helds if one.interest.since <= since])
        return found


def _deliveries(helds: Iterable[Held]) -> Iterable[Delivery]:
    by_session: dict[Session, list[Held]] = {}
    for held in helds:
        by_session.setdefault(held.session, []).append(held)
    for session, matched in by_session.items():
        identifiers = tuple(sorted({one.interest.identifier for one in matched} - {0}))
        version = matched[0].version
        shape = Shape(
            version,
            any(one.interest.retain_as_published for one in matched),
            encode_subscription_identifiers(identifiers) if version is Version.V5 else b"",
        )
        yield Delivery(session, max(one.interest.qos for one in matched), shape)


class Topic:
    """One topic, with the plan it had when it was last asked about."""

    __slots__ = ("helds", "name", "plan", "text")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.text = name.decode()
        self.helds: tuple[Held, ...] | None = None
        self.plan: Plan | None = None


class Topics(dict[bytes, Topic]):
    """Topics by routing key, made when they are first asked for. Full means start again; long ones are not kept."""

    def __init__(self, topic_of: Callable[[bytes], bytes]) -> None:
        self._topic_of = topic_of

    def __missing__(self, key: bytes) -> Topic:
        topic = Topic(self._topic_of(key))
        if len(key) <= KNOWN_TOPIC_BYTES_MAX:
            if len(self) >= TOPICS_MAX:
                self.clear()
            self[key] = topic
        return topic


def identifiers_of(interest: Interest, version: Version) -> bytes:
    """Of one subscription, to be put behind the properties of what it is sent."""
    if not interest.identifier or version is not Version.V5:
        return b""
    return encode_subscription_identifiers((interest.identifier,))


class Interests:
    """The subscriptions of some sessions. Changes cost what the changed filter's topics cost, and nothing else."""

    def __init__(self) -> None:
        self._trie: TopicTrie[Held] = TopicTrie(MQTT, cached_keys_max=65_536)
        self._held: dict[Session, dict[str, Held]] = {}
        self._plans: dict[tuple[Held, ...], Plan] = {}

    def __len__(self) -> int:
        return len(self._trie)

    def add(self, session: Session, interest: Interest, version: Version) -> None:
        """Takes the place of one with the same filter [MQTT-3.8.4-3]."""
        self.remove(session, interest.filter)
        held = Held(session, interest, version)
        self._held.setdefault(session, {})[interest.filter] = held
        self._trie.add(MQTT.pattern(interest.filter), held)

    def remove(self, session: Session, topic_filter: str) -> None:
        helds = self._held.get(session)
        held = None if helds is None else helds.pop(topic_filter, None)
        if helds is None or held is None:
            return
        if not helds:
            del self._held[session]
        self._trie.remove(MQTT.pattern(topic_filter), held)
        # Plans keep sessions alive.
        self._plans.clear()

    def remove_all(self, session: Session) -> None:
        for topic_filter in list(self._held.get(session, ())):
            self.remove(session, topic_filter)

    def plan(self, topic: Topic) -> Plan:
        helds = self._trie.match(topic.text)
        if topic.helds is helds and topic.plan is not None:
            return topic.plan
        plan = self._plans.get(helds)
        if plan is None:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            plan = self._plans[helds] = Plan(helds)
        topic.helds, topic.plan = helds, plan
        return plan
