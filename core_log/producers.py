"""What idempotent producers have written to one partition. Machine; pure.

Per producer the last 4,096 sequences are kept as intervals: an unseen one is written, a seen one is acknowledged
and not written, one below the window is refused, never acknowledged (O4). Our own outboxes (outbox.py) number
densely: for them everything below the next number is seen, however long ago, and a gap is refused. They are remembered
until their owner is forgotten; clients until they were silent for the expiry. State is rebuilt from the headers of
idempotent batches; a snapshot at each roll keeps it when retention takes the records.
"""

import struct
from collections.abc import Iterator

import xxhash

from headrace.core_log.errors import SequenceRefused, UnknownFormat
from headrace.core_log.intervals import Intervals
from headrace.core_log.record import Producer

WINDOW = 4096
# When an outbox was used: it does not grow old.
NEVER_US = 2**63 - 1

#     | magic "HRprod01" | next offset u64 | producers u32 | then for each:
#     | id 16 bytes | epoch u32 | used at us i64 | intervals u32 | then first u64, end u64 of each | ... | hash u64
_MAGIC = b"HRprod01"
_HEAD = struct.Struct("<8sQI")
_ENTRY = struct.Struct("<16sIqI")


class _State:
    __slots__ = ("epoch", "seen", "used_us")

    def __init__(self, epoch: int, used_us: int) -> None:
        self.epoch = epoch
        self.used_us = used_us
        self.seen = Intervals()

    @property
    def next_sequence(self) -> int:
        return max((end for _, end in self.seen), default=0)


class ProducerTable:
    __slots__ = ("_count_max", "_expiry_us", "_states", "next_offset")

    def __init__(self, *, expiry_us: int, count_max: int) -> None:
        self._states: dict[bytes, _State] = {}
        self._expiry_us = expiry_us
        self._count_max = count_max
        # The state covers every batch below this offset.
        self.next_offset = 0

    def __len__(self) -> int:
        return len(self._states)

    def next_sequence(self, one: bytes, epoch: int) -> int:
        """The number after the last that this producer wrote. Raises SequenceRefused for an epoch that is over."""
        state = self._states.get(one)
        if state is None or epoch > state.epoch:
            return 0
        if epoch < state.epoch:
            raise SequenceRefused(f"producer epoch {epoch} is fenced by epoch {state.epoch}")
        return state.next_sequence

    def forget(self, one: bytes, now_us: int) -> None:
        """An outbox is gone for good: what it wrote is forgotten like what clients wrote."""
        state = self._states.get(one)
        if state is not None:
            state.used_us = min(state.used_us, now_us)

    def unseen(self, producer: Producer, count: int, *, now_us: int) -> list[tuple[int, int]]:
        """Which of the sequences first..first+count-1 are to be written, as (first, end) ranges.

        Raises SequenceRefused when even one may not be acknowledged; nothing is changed then.
        """
        first, end = producer.first_sequence, producer.first_sequence + count
        state = self._states.get(producer.id)
        if state is None:
            self._make_room(now_us)
            return [(first, end)]
        if producer.epoch < state.epoch:
            raise SequenceRefused(f"producer epoch {producer.epoch} is fenced by epoch {state.epoch}")
        if producer.epoch > state.epoch:
            return [(first, end)]
        following = state.next_sequence
        if first < following - WINDOW:
            raise SequenceRefused(
                f"sequence {first} is below the window of {WINDOW} behind {following}: outcome unknown"
            )
        return list(state.seen.missing(first, end))

    def note(self, producer: Producer, count: int, used_us: int) -> None:
        """These sequences are in the log now."""
        if producer.dense:
            used_us = NEVER_US
        state = self._states.get(producer.id)
        if state is None or producer.epoch > state.epoch:
            state = self._states[producer.id] = _State(producer.epoch, used_us)
        state.used_us = max(state.used_us, used_us)
        state.seen.add(producer.first_sequence, producer.first_sequence + count)
        state.seen.cut_below(state.next_sequence - WINDOW)

    def withdraw(self, producer: Producer, count: int) -> None:
        """These sequences are no longer in the log: a replica's records were cut, for those of its leader."""
        state = self._states.get(producer.id)
        if state is not None and state.epoch == producer.epoch:
            state.seen.remove(producer.first_sequence, producer.first_sequence + count)
            if not len(state.seen):
                del self._states[producer.id]

    def _make_room(self, now_us: int) -> None:
        """For a client. Outboxes are as many as there are queues and the like, and are not counted."""
        if len(self._states) < self._count_max:
            return
        dead = [one for one, state in self._states.items() if state.used_us < now_us - self._expiry_us]
        for one in dead:
            del self._states[one]
        count = sum(state.used_us != NEVER_US for state in self._states.values())
        if count >= self._count_max:
            raise SequenceRefused(f"{count} producers are known here, the most that are kept")

    def encode(self, now_us: int) -> bytes:
        """A snapshot; producers not heard of for longer than the expiry are left out."""
        alive = [(one, state) for one, state in self._states.items() if state.used_us >= now_us - self._expiry_us]
        parts = [_HEAD.pack(_MAGIC, self.next_offset, len(alive))]
        for one, state in alive:
            parts.append(_ENTRY.pack(one, state.epoch, state.used_us, len(state.seen)))
            parts.extend(struct.pack("<QQ", first, end) for first, end in state.seen)
        data = b"".join(parts)
        return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))

    def restore(self, data: bytes) -> None:
        """Take a snapshot's state. Raises UnknownFormat when the bytes are not one, and changes nothing then."""
        if len(data) < _HEAD.size + 8 or data[:8] != _MAGIC:
            raise UnknownFormat("not a producer snapshot")
        if struct.unpack("<Q", data[-8:])[0] != xxhash.xxh3_64_intdigest(data[:-8]):
            raise UnknownFormat("producer snapshot fails its hash")
        _magic, next_offset, count = _HEAD.unpack_from(data)
        self._states = dict(_entries(data, count))
        self.next_offset = next_offset


def _entries(data: bytes, count: int) -> Iterator[tuple[bytes, _State]]:
    at = _HEAD.size
    for _ in range(count):
        one, epoch, used_us, intervals = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        state = _State(epoch, used_us)
        for place in range(intervals):
            state.seen.add(*struct.unpack_from("<QQ", data, at + 16 * place))
        at += 16 * intervals
        yield one, state
