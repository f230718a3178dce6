"""Topic names, topic filters, shared subscriptions: what is well formed, and what matches. Values: pure functions.

A topic is one or more levels with `/` between them; a level may be empty, so `/a` has two. In a filter `+` stands for
one level and `#`, last, for any number of them, none included: `a/#` matches `a`. A filter that begins with a wildcard
matches no topic that begins with `$`. `$share/<name>/<filter>` subscribes to <filter> as one of the group <name>
(MQTT 5; offered to 3.1.1 too, as other brokers do). Nothing is normalised: topics are equal when their bytes are.
Neighbours: decoder.py and cutter.py check with these; filtering/topics.py matches many filters at once and must agree.
"""

from dataclasses import dataclass

from headrace.gateways.mqtt.fields import decode_text
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode, Version, protocol_error

SHARE = "$share/"
TOPIC_BYTES_MAX = 65_535


@dataclass(frozen=True, slots=True)
class SharedFilter:
    """What `$share/<group>/<filter>` names."""

    group: str
    filter: str


def check_topic_name(topic: str, version: Version, statement: str = "") -> None:
    """Refuse what no topic name may be; strings from the wire hold no U+0000 already.

    `statement` says it of a PUBLISH; the general one counts for any other topic name.
    """
    if not topic:
        raise protocol_error("a topic name is empty", "MQTT-4.7.3-1")
    if "+" in topic or "#" in topic:
        statement = statement or ("MQTT-4.7.0-1" if version is Version.V5 else "MQTT-4.7.1-1")
        raise MqttError(ReasonCode.TOPIC_NAME_INVALID, f"the topic name {topic!r} holds a wildcard", statement)


def check_topic_filter(text: str, version: Version) -> SharedFilter | None:
    """Refuse an ill-formed filter; the two parts of a shared one, None for any other."""
    shared = None
    plain = text
    if text.startswith(SHARE):
        shared = _shared(text)
        plain = shared.filter
    if not plain:
        raise _invalid("a topic filter is empty", "MQTT-4.7.3-1")
    if "#" in plain or "+" in plain:
        levels = plain.split("/")
        number = 1 if version is Version.V5 else 2
        if "#" in plain[:-1] or ("#" in levels[-1] and levels[-1] != "#"):
            raise _invalid(f"# stands alone and last, not as in {text!r}", f"MQTT-4.7.1-{number}")
        if any("+" in level and level != "+" for level in levels):
            raise _invalid(f"+ stands alone in its level, not as in {text!r}", f"MQTT-4.7.1-{number + 1}")
    return shared


def parse_filter(text: str) -> tuple[str | None, str]:
    """(group or None, the filter without `$share/<group>/`) of a filter that has passed `check_topic_filter`."""
    if text.startswith(SHARE):
        _, group, plain = text.split("/", 2)
        return group, plain
    return None, text


def is_shared(text: str) -> bool:
    """The same question of a filter that has passed `check_topic_filter`."""
    return text.startswith(SHARE)


def literal_beginning(text: str) -> tuple[str, bool]:
    """How every topic begins that a well-formed filter (not a shared one) matches, and whether there is more to it."""
    levels = text.split("/")
    for place, level in enumerate(levels):
        if level == "#":
            return "/".join(levels[:place]), True
        if level == "+":
            return "".join(one + "/" for one in levels[:place]), True
    return text, False


def filter_matches(topic_filter: str, topic: str) -> bool:
    """Whether a well-formed filter (not a shared one) matches a topic name."""
    if topic_filter == topic:
        return True
    # [MQTT-4.7.2-1] Topics that begin with $ are the server's own: no wildcard finds them by its first level.
    if topic.startswith("$") and topic_filter[:1] in ("+", "#"):
        return False
    wanted = topic_filter.split("/")
    levels = topic.split("/")
    for index, level in enumerate(wanted):
        if level == "#":
            return True
        if index == len(levels):
            return False
        if level not in ("+", levels[index]):
            return False
    return len(wanted) == len(levels)


class TopicNames:
    """Topic names that were found lawful, each as one object: checked once, then a look-up. Bounded.

    One for all connections: a device that comes back, or a thousand that share a topic, find it checked.
    """

    __slots__ = ("_bytes_max", "_count_max", "known")

    def __init__(self, *, count_max: int = 65_536, bytes_max: int = 256) -> None:
        # The cutter looks here without a call. Longer names are checked each time, so the bound holds in bytes too.
        self.known: dict[bytes, bytes] = {}
        self._count_max = count_max
        self._bytes_max = bytes_max

    def check(self, raw: bytes, version: Version) -> bytes:
        """The same bytes, or MqttError. The empty name is the caller's to judge: with a topic alias it is lawful."""
        found = self.known.get(raw)
        if found is not None:
            return found
        check_topic_name(decode_text(raw, version), version)
        if len(raw) <= self._bytes_max:
            # Full means start again: names in use are back after one check each, and no hit pays for an order of use.
            if len(self.known) >= self._count_max:
                self.known.clear()
            self.known[raw] = raw
        return raw


def _shared(text: str) -> SharedFilter:
    levels = text.split("/", 2)
    if not levels[1]:
        raise _invalid(f"a shared subscription has a name, not as in {text!r}", "MQTT-4.8.2-1")
    if len(levels) < 3 or "+" in levels[1] or "#" in levels[1]:
        text = f"a share name is followed by / and a filter and holds no wildcard, not as in {text!r}"
        raise _invalid(text, "MQTT-4.8.2-2")
    return SharedFilter(levels[1], levels[2])


def _invalid(text: str, statement: str) -> MqttError:
    return MqttError(ReasonCode.TOPIC_FILTER_INVALID, text, statement)
