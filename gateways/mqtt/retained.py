"""The last retained message of each topic of a vhost, found by topic filters. Machine.

Small payloads are in memory as long as the budget lasts; the others are read from `__retained` when they are sent. The
hub writes each change there in the same turn, so both are what the log says. Neighbours: retained_log.py.
Invariant: a node of the tree without a message has something below it (the root excepted).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

# Larger payloads are never in memory.
LOADED_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Retained:
    topic: bytes
    blob: bytes
    payload: bytes
    qos: int
    expiry_us: int = 0
    timestamp_us: int = 0
    origin: int = 0
    # Of its record in the log of messages; -1: from before this start.
    offset: int = -1
    tags: tuple[str, ...] = ()
    # Who published it; empty: nobody knows. As which client: over MQTT only.
    user: str = ""
    client_id: str = ""
    # The offset of its record in `__retained`; -1: it is in none.
    stored: int = -1
    # False: the payload is there, and not here.
    is_loaded: bool = True


@dataclass(slots=True)
class _Node:
    message: Retained | None = None
    below: dict[str, "_Node"] = field(default_factory=dict)


class RetainedMessages:
    def __init__(self, bytes_max: int | None = None) -> None:
        """`bytes_max`: of payloads in memory; None: all of them."""
        self._root = _Node()
        self._count = 0
        self._bytes_max = bytes_max
        # In memory.
        self.byte_count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, message: Retained) -> None:
        node = self._root
        for level in message.topic.decode().split("/"):
            found = node.below.get(level)
            if found is None:
                found = node.below[level] = _Node()
            node = found
        if node.message is None:
            self._count += 1
        else:
            self.byte_count -= len(node.message.payload)
        size = len(message.payload)
        if self._bytes_max is not None and (size > LOADED_BYTES_MAX or self.byte_count + size > self._bytes_max):
            assert message.stored >= 0, "what is not kept here can be read again"
            message = replace(message, payload=b"", is_loaded=False)
        node.message = message
        self.byte_count += len(message.payload)

    def remove(self, topic: bytes) -> bool:
        """Whether there was one."""
        path = [self._root]
        levels = topic.decode().split("/")
        for level in levels:
            node = path[-1].below.get(level)
            if node is None:
                return False
            path.append(node)
        if path[-1].message is None:
            return False
        self._count -= 1
        self.byte_count -= len(path[-1].message.payload)
        path[-1].message = None
        for level in reversed(levels):
            node = path.pop()
            if node.message is not None or node.below:
                break
            del path[-1].below[level]
        return True

    def matching(self, topic_filter: str, now_us: int) -> list[Retained]:
        """What a new subscription is sent; messages whose time is over are let go of on the way."""
        found: list[Retained] = []
        over: list[bytes] = []
        for message in self._search(topic_filter):
            if message.expiry_us and message.expiry_us <= now_us:
                over.append(message.topic)
            else:
                found.append(message)
        for topic in over:
            self.remove(topic)
        return found

    def _search(self, topic_filter: str) -> Iterator[Retained]:
        levels = topic_filter.split("/")
        if "+" not in levels and levels[-1] != "#":
            message = self._at(levels)
            if message is not None:
                yield message
            return
        # Depth first, with a list of our own: topics may be deeper than the stack.
        to_visit = [(self._root, 0)]
        while to_visit:
            node, depth = to_visit.pop()
            if depth == len(levels):
                if node.message is not None:
                    yield node.message
                continue
            level = levels[depth]
            if level == "#":
                if node.message is not None:
                    yield node.message
                to_visit += [(below, depth) for name, below in node.below.items() if depth or not name.startswith("$")]
            elif level == "+":
                to_visit += [(below, depth + 1) for below in self._open_below(node)]
            elif (below := node.below.get(level)) is not None:
                to_visit.append((below, depth + 1))

    def _open_below(self, node: _Node) -> list[_Node]:
        """What a wildcard finds below a node: [MQTT-4.7.2-1] at the first level nothing that begins with $."""
        if node is not self._root:
            return list(node.below.values())
        return [below for name, below in node.below.items() if not name.startswith("$")]

    def _at(self, levels: list[str]) -> Retained | None:
        node = self._root
        for level in levels:
            found = node.below.get(level)
            if found is None:
                return None
            node = found
        return node.message

    def get(self, topic: bytes) -> Retained | None:
        return self._at(topic.decode().split("/"))

    def messages(self) -> Iterator[Retained]:
        """All of them, also those of topics that begin with $."""
        to_visit = [self._root]
        while to_visit:
            node = to_visit.pop()
            if node.message is not None:
                yield node.message
            to_visit += node.below.values()
