"""What a consumer group writes to the stream `__offsets`, and how it is read back. Format; pure.

    group:  u16 length, vhost, u16 length, name                          -> GroupState: generation, members, tenures
    offset: the same, then the stream's 16 bytes and u32 the partition   -> OffsetState
    failed: as of group:                                                 -> FailuresState: what has failed

The last record of a key is the truth and compaction may drop what came before; an empty value ends it. Offsets have
keys of their own, since they change with every commit and the rest hardly ever. What has failed is written in one batch
with the offsets that pass it, so a crash takes both or neither. Deadlines are not written: who was a
member when the broker ended has its whole session timeout to come back.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

import msgspec

from headrace.core_log.errors import CorruptLog
from headrace.core_log.ids import StreamId
from headrace.core_log.outbox import TargetPartition
from headrace.gateways.delivery.consumer_groups import (
    Committed,
    ConsumerGroup,
    Failure,
    Failures,
    GroupSettings,
    Member,
    Return,
    Start,
    Tenure,
)
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.retry import Backoff, RetryPolicy

STREAM_NAME = "__offsets"
FORMAT = 1

_GROUP = b"group:"
_OFFSET = b"offset:"
_FAILED = b"failed:"
_LENGTH = struct.Struct(">H")
_PARTITION = struct.Struct(">I")


class GroupName(NamedTuple):
    vhost: str
    name: str


class MemberState(msgspec.Struct, frozen=True, array_like=True):
    id: str
    user: str
    topics: list[bytes]
    session_ms: int
    rebalance_ms: int
    start: str
    name: str


class SettingsState(msgspec.Struct, frozen=True, array_like=True):
    # (retries, backoff, delay, longest delay, jitter)
    retry: tuple[int, str, int, int, bool] | None
    dead_letter_exchange: str | None


class GroupState(msgspec.Struct, frozen=True, array_like=True):
    format: int
    generation: int
    members: list[MemberState]
    # (stream, partition, member, since, generation of the revocation (-1: none), heir ("": none))
    tenures: list[tuple[bytes, int, str, int, int, str]]
    empty_since_us: int
    settings: SettingsState = SettingsState(None, None)
    # (number, the stream that records failed in, the one they come back in)
    returns: list[tuple[int, bytes, bytes]] = []


# (stream, partition, offset, reason, time) of one record.
FailureState = tuple[bytes, int, int, str, int]


class FailuresState(msgspec.Struct, frozen=True, array_like=True):
    format: int
    owner: bytes
    # (stream, partition, next number, [(first number, its records)]) of each log that something went to
    outbox: list[tuple[bytes, int, int, list[tuple[int, list[FailureState]]]]]
    waiting: list[FailureState]


class OffsetState(msgspec.Struct, frozen=True, array_like=True):
    format: int
    offset: int
    generation: int
    time_us: int


_encoder = msgspec.msgpack.Encoder()
_group_decoder = msgspec.msgpack.Decoder(GroupState)
_offset_decoder = msgspec.msgpack.Decoder(OffsetState)
_failures_decoder = msgspec.msgpack.Decoder(FailuresState)


def group_key(group: GroupName) -> bytes:
    return _GROUP + _name_bytes(group)


def offset_key(group: GroupName, slot: Slot) -> bytes:
    return _OFFSET + _name_bytes(group) + slot.stream.bytes + _PARTITION.pack(slot.partition)


def failures_key(group: GroupName) -> bytes:
    return _FAILED + _name_bytes(group)


def _name_bytes(group: GroupName) -> bytes:
    parts = [part.encode() for part in group]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def encode_group(group: ConsumerGroup) -> bytes:
    return _encoder.encode(
        GroupState(
            FORMAT,
            group.generation,
            [
                MemberState(
                    one.id,
                    one.user,
                    sorted(stream.bytes for stream in one.topics),
                    one.session_ms,
                    one.rebalance_ms,
                    one.start.value,
                    one.name,
                )
                for one in group.members.values()
            ],
            [
                (
                    slot.stream.bytes,
                    slot.partition,
                    one.member,
                    one.since,
                    -1 if one.revoked is None else one.revoked,
                    one.heir or "",
                )
                for slot, one in group.tenures.items()
            ],
            group.empty_since_us,
            _settings_state(group.settings),
            [(one.number, origin.bytes, one.stream.bytes) for origin, one in group.returns.items()],
        )
    )


def _settings_state(settings: GroupSettings) -> SettingsState:
    retry = settings.retry
    return SettingsState(
        None
        if retry is None
        else (retry.retries_max, retry.backoff.value, retry.delay_ms, retry.delay_max_ms, retry.jitter),
        settings.dead_letter_exchange,
    )


def encode_failures(failures: Failures) -> bytes:
    outbox = failures.outbox
    return _encoder.encode(
        FailuresState(
            FORMAT,
            failures.owner,
            [
                (
                    target.stream.bytes,
                    target.partition,
                    outbox.next_number(target),
                    [(one.first, [_failure_state(what) for what in one.what]) for one in outbox.pending(target)],
                )
                for target in outbox.targets
            ],
            [_failure_state(one) for one in failures.waiting],
        )
    )


def _failure_state(one: Failure) -> FailureState:
    return one.slot.stream.bytes, one.slot.partition, one.offset, one.reason, one.time_us


def encode_offset(one: Committed) -> bytes:
    return _encoder.encode(OffsetState(FORMAT, one.offset, one.generation, one.time_us))


def restored(entries: Iterable[tuple[int, bytes, bytes]], now_ms: float) -> dict[GroupName, ConsumerGroup]:
    """The groups that the log speaks of. `entries`: (offset, key, value) in log order. Raises CorruptLog."""
    latest: dict[bytes, tuple[int, bytes]] = {}
    for offset, key, value in entries:
        latest[key] = (offset, value)
    groups: dict[GroupName, ConsumerGroup] = {}
    for key, (offset, value) in latest.items():
        if not value:
            continue
        try:
            _take_up(groups, key, value, now_ms)
        except (msgspec.DecodeError, ValueError, struct.error) as error:
            raise CorruptLog(STREAM_NAME, 0, offset, f"a group's state cannot be read ({error})") from error
    return groups


def _take_up(groups: dict[GroupName, ConsumerGroup], key: bytes, value: bytes, now_ms: float) -> None:
    if key.startswith(_OFFSET):
        name, rest = _split(key[len(_OFFSET) :])
        slot = Slot(StreamId(UUID(bytes=rest[:16])), _PARTITION.unpack(rest[16:])[0])
        state = _offset_decoder.decode(value)
        _check_format(state.format)
        group = groups.setdefault(name, ConsumerGroup())
        group.committed[slot] = Committed(state.offset, state.generation, state.time_us)
    elif key.startswith(_FAILED):
        name, rest = _split(key[len(_FAILED) :])
        groups.setdefault(name, ConsumerGroup()).failures = _restored_failures(_failures_decoder.decode(value))
    elif key.startswith(_GROUP):
        name, rest = _split(key[len(_GROUP) :])
        _restore_group(groups.setdefault(name, ConsumerGroup()), _group_decoder.decode(value), now_ms)
    else:
        raise ValueError(f"unknown key {key[:16]!r}")


def _split(key: bytes) -> tuple[GroupName, bytes]:
    parts: list[str] = []
    for _ in range(2):
        (length,) = _LENGTH.unpack(key[:2])
        if len(key) < 2 + length:
            raise ValueError("a key ends too soon")
        parts.append(key[2 : 2 + length].decode())
        key = key[2 + length :]
    return GroupName(*parts), key


def _restored_failures(state: FailuresState) -> Failures:
    _check_format(state.format)
    found = Failures(state.owner, [_failure(one) for one in state.waiting])
    for stream, partition, next_number, moving in state.outbox:
        pending = [(first, len(those), [_failure(one) for one in those]) for first, those in moving]
        found.outbox.restore(TargetPartition(UUID(bytes=stream), partition), next_number, pending)
    return found


def _failure(state: FailureState) -> Failure:
    stream, partition, offset, reason, time_us = state
    return Failure(Slot(StreamId(UUID(bytes=stream)), partition), offset, reason, time_us)


def _restore_group(group: ConsumerGroup, state: GroupState, now_ms: float) -> None:
    _check_format(state.format)
    group.generation = state.generation
    group.empty_since_us = state.empty_since_us
    retry = state.settings.retry
    policy = None if retry is None else RetryPolicy(retry[0], Backoff(retry[1]), *retry[2:])
    group.settings = GroupSettings(policy, state.settings.dead_letter_exchange)
    for number, origin, stream in state.returns:
        group.returns[StreamId(UUID(bytes=origin))] = Return(number, StreamId(UUID(bytes=stream)))
    for one in state.members:
        topics = frozenset(StreamId(UUID(bytes=stream)) for stream in one.topics)
        # What it was told is not known: that it was told everything is the safe side.
        group.members[one.id] = Member(
            one.id,
            one.user,
            topics,
            one.session_ms,
            one.rebalance_ms,
            Start(one.start),
            one.name,
            deadline_ms=now_ms + one.session_ms,
            told=state.generation,
        )
    for held, partition, member, since, revoked, heir in state.tenures:
        slot = Slot(StreamId(UUID(bytes=held)), partition)
        group.tenures[slot] = Tenure(member, since, None if revoked < 0 else revoked, heir or None)
        if revoked >= 0:
            group.members[member].give_up_by_ms = now_ms + group.members[member].rebalance_ms


def _check_format(number: int) -> None:
    if number != FORMAT:
        raise ValueError(f"format {number} is not known to this release")
