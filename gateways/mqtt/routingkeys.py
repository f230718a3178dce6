"""MQTT topics <-> routing keys of `amq.topic`, both ways. Values: pure functions and two bounded caches.

    topic           routing key             topic filter      binding key
    a/b/c           a.b.c                   a/+/#             a.*.#
    a//b            a..b                    /#                .#
    v1.0/*          v1%2E0.%2A              v1.0/+            v1%2E0.*
    50%/x           50%25.x

Inside a level `.` is `%2E`, `*` is `%2A`, `#` is `%23` and `%` is `%25`; everything else stands for itself. So every
topic has a key of its own and comes back from it as it was. The log keeps the key.

AMQP clients publish with any 255 bytes, so `topic_of` is total: what no topic name may hold (`/` `+` `#` inside a word,
U+0000, bytes that are not UTF-8) comes out as `%` and two hexadecimal digits, a `%` that begins none of our escapes as
itself, and the empty key as `%`. Such a key shares its topic with another key; none of the keys of topics do that among
themselves.

RabbitMQ's mapping (`lossy=True`) only exchanges `/` and `.`, `+` and `*`: `a.b/c` becomes `a.b.c` and comes back as
`a/b/c`. Neighbours: filtering/topics.py matches the keys, in AMQP's language; topics.py knows what a topic is.
"""

import re
from collections.abc import Callable, Sequence

from headrace.gateways.mqtt.memo import Memo

ROUTING_KEY_BYTES_MAX = 255  # of AMQP 0-9-1; the log's keys, like topics, may be longer

# Each stands for one byte that a word or a topic cannot hold, or that would not come back.
_ESCAPED = {b"%": b"%25", b".": b"%2E", b"*": b"%2A", b"#": b"%23", b"/": b"."}
_UNESCAPED = {
    b"%25": b"%",
    b"%2E": b".",
    b"%2A": b"*",
    b".": b"/",
    # From here on only in keys that no topic has.
    b"/": b"%2F",
    b"+": b"%2B",
    b"#": b"%23",
    b"\0": b"%00",
}
_LOSSY = {b"/": b".", b"+": b"*"}
_UNLOSSY = {b".": b"/", b"/": b"%2F", b"+": b"%2B", b"#": b"%23", b"\0": b"%00"}
_EMPTY_KEY = b"%"


def _replacing(table: dict[bytes, bytes]) -> Callable[[bytes], bytes]:
    pattern = re.compile(b"|".join(map(re.escape, table)))

    def one(found: re.Match[bytes]) -> bytes:
        return table[found[0]]

    return lambda text: pattern.sub(one, text)


_escape = _replacing(_ESCAPED)
_unescape = _replacing(_UNESCAPED)
_escape_lossy = _replacing(_LOSSY)
_unescape_lossy = _replacing(_UNLOSSY)


class RoutingKeys:
    """The mapping of one broker, with what it has mapped lately. Bounded; one for all connections."""

    def __init__(self, *, lossy: bool = False, count_max: int = 65_536, bytes_max: int = 256) -> None:
        self.lossy = lossy
        self._keys: Memo[bytes] = Memo(self._key_of, count_max=count_max, bytes_max=bytes_max)
        self._topics: Memo[bytes] = Memo(self._topic_of, count_max=count_max, bytes_max=bytes_max)

    def key_of(self, topic: bytes) -> bytes:
        """The routing key of a well-formed topic name."""
        return self._keys[topic]

    def topic_of(self, key: bytes) -> bytes:
        """A well-formed topic name, whatever the key is."""
        return self._topics[key]

    def keys_of(self, topics: Sequence[bytes]) -> list[bytes]:
        """A whole column; equal topics give one object."""
        return [*map(self._keys.__getitem__, topics)]

    def topics_of(self, keys: Sequence[bytes]) -> list[bytes]:
        return [*map(self._topics.__getitem__, keys)]

    def binding_key(self, topic_filter: str) -> str:
        """The binding key that matches the keys of the topics which a well-formed filter (not a shared one) matches.

        Except for one rule that AMQP does not have, and that the MQTT door must see to: a filter that begins with a
        wildcard matches no topic that begins with `$` [MQTT-4.7.2-1].
        """
        escape = _escape_lossy if self.lossy else _escape
        levels = topic_filter.encode().split(b"/")
        return b".".join([b"*" if one == b"+" else one if one == b"#" else escape(one) for one in levels]).decode()

    def _key_of(self, topic: bytes) -> bytes:
        return _escape_lossy(topic) if self.lossy else _escape(topic)

    def _topic_of(self, key: bytes) -> bytes:
        if not key:
            return _EMPTY_KEY
        topic = _unescape_lossy(key) if self.lossy else _unescape(key)
        try:
            topic.decode("utf-8")
        except UnicodeDecodeError:
            text = topic.decode("utf-8", "surrogateescape")
            topic = "".join([_hex(one) if "\udc80" <= one <= "\udcff" else one for one in text]).encode()
        return topic


def _hex(surrogate: str) -> str:
    return f"%{ord(surrogate) - 0xDC00:02X}"
