"""A consumer group: its members, which partitions each reads, how far the group has come. Machine.

A *slot* is one partition of one stream. A member holds a slot for a *tenure*, from the generation in which it was given
to it until it has given it up, left, or was not heard of for too long; only then does the next one get it. Every change
of who should read what begins a generation, and so does a reset. A member says with each request which generation it
has acted upon: by that it gives up what this generation asked it for.

A commit counts if it comes from the holder and from a generation not older than the tenure. Who keeps a slot while
others come and go is not fenced off by that, and who lost it is, also if it got it back (as Kafka does since KIP-1251).

Invariants: a slot has at most one tenure, and of each generation at most one tenure begins (G1); while somebody asks
for a stream, each of its slots has a tenure; a committed offset never falls but by a reset, which ends all tenures'
older generations (G1).
Nothing here depends on there being one node: a group is a value of its own, and whoever leads the partition of
`__offsets` that it hashes to can take it up from there (consumer_groups_journal.py). Neighbours:
consumer_groups_coordinator.py drives it, consumer_groups_assignment.py says who should have what.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from headrace.core_log.errors import Refused
from headrace.core_log.ids import StreamId
from headrace.core_log.outbox import Outbox
from headrace.gateways.delivery.consumer_groups_assignment import Slot, assign
from headrace.gateways.delivery.retry import RetryPolicy


class UnknownMember(Refused):
    """Nobody of this id is in the group (any more): it has to join again."""


class NotHeld(Refused):
    """A commit for a partition that somebody else holds, or nobody."""


class Fenced(Refused):
    """A commit of a generation in which the member did not hold the partition as it does now."""


class OffsetBehind(Refused):
    """A commit below what is committed: only a reset moves it back."""


class GroupInUse(Refused):
    """Members hold the partitions that are to be reset or committed from outside."""


class Start(StrEnum):
    """Where reading begins in a partition that the group has never read."""

    FIRST = "first"
    NEXT = "next"


@dataclass(slots=True)
class Member:
    id: str
    user: str
    topics: frozenset[StreamId]
    session_ms: int
    rebalance_ms: int
    start: Start = Start.FIRST
    # What it calls itself, for people.
    name: str = ""
    # When it counts as gone, unless it is heard of before.
    deadline_ms: float = 0
    # The last generation that an answer to it spoke of.
    told: int = 0
    # When it counts as stuck, unless it has given up by then what it was asked for.
    give_up_by_ms: float | None = None


@dataclass(slots=True)
class Tenure:
    member: str
    # The generation in which it began.
    since: int
    # The generation in which the member was asked to give it up, and who will have it then.
    revoked: int | None = None
    heir: str | None = None


class Committed(NamedTuple):
    offset: int
    generation: int
    time_us: int


class Held(NamedTuple):
    slot: Slot
    since: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What a member is told."""

    generation: int
    holds: tuple[Held, ...]
    # To be given up: no longer read, committed as far as it was worked on, then said so.
    give_up: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class GroupSettings:
    # None: what a member fails with cannot be tried again.
    retry: RetryPolicy | None = None
    # Where what has failed its last attempt goes; None: to the queue `<group>.dlq`.
    dead_letter_exchange: str | None = None


class Return(NamedTuple):
    """The stream in which failed records of one topic come back to the group, and its number among them."""

    number: int
    stream: StreamId


class Failure(NamedTuple):
    """A record that a member could not work on."""

    slot: Slot
    offset: int
    reason: str
    time_us: int


@dataclass(slots=True)
class Failures:
    """Records that have failed and are on their way: to wait for another attempt, or to the dead letters."""

    # 16 bytes, by which logs know the numbers of this group.
    owner: bytes
    # Without a number yet.
    waiting: list[Failure] = field(default_factory=list)
    outbox: Outbox[list[Failure]] = field(init=False)

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.owner)

    def __iter__(self) -> Iterator[Failure]:
        for transfer in self.outbox.pending():
            yield from transfer.what
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.waiting) + sum(transfer.count for transfer in self.outbox.pending())


@dataclass(slots=True)
class ConsumerGroup:
    generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    tenures: dict[Slot, Tenure] = field(default_factory=dict)
    committed: dict[Slot, Committed] = field(default_factory=dict)
    # Since when it has no members.
    empty_since_us: int = 0
    settings: GroupSettings = GroupSettings()
    # By the stream that they failed in, where its records come back.
    returns: dict[StreamId, Return] = field(default_factory=dict)
    # None: nothing ever failed.
    failures: Failures | None = None
    # What has to be written down: members, generation, tenures and settings; single offsets; failures.
    changed: bool = False
    changed_offsets: set[Slot] = field(default_factory=set)
    changed_failures: bool = False
    # How many partitions each stream has.
    _counts: dict[StreamId, int] = field(default_factory=dict)
    # The slots of each member, in order; None: to be found out anew.
    _held: dict[str, list[Slot]] | None = None

    # -- members ------------------------------------------------------------------------------------------------

    def join(self, member: Member, counts: Mapping[StreamId, int], now_ms: float) -> Standing:
        """`counts`: how many partitions each stream has that this or another member asks for."""
        assert member.id not in self.members, "ids are never used again"
        member.deadline_ms = now_ms + member.session_ms
        self.members[member.id] = member
        self._counts = dict(counts)
        self._rebalance(now_ms)
        return self.standing(member.id)

    def heartbeat(self, member_id: str, generation: int, now_ms: float) -> Standing:
        """The member lives, and has acted upon what it was told of this generation."""
        member = self.member(member_id)
        if not 0 <= generation <= member.told:
            raise Refused(f"generation {generation} was never told to this member; the last one was {member.told}")
        self.touch(member, now_ms)
        self._give_up(member, generation)
        return self.standing(member_id)

    def touch(self, member: Member, now_ms: float) -> None:
        """It was heard of."""
        member.deadline_ms = now_ms + member.session_ms

    def ask_for(
        self, member_id: str, topics: frozenset[StreamId], counts: Mapping[StreamId, int], now_ms: float
    ) -> None:
        """The member wants other streams than before."""
        member = self.member(member_id)
        if member.topics != topics:
            member.topics = topics
            self._counts = dict(counts)
            self._rebalance(now_ms)

    def leave(self, member_id: str, now_ms: float, now_us: int) -> None:
        self.member(member_id)
        self._remove([member_id], now_ms, now_us)

    def expire(self, now_ms: float, now_us: int) -> dict[str, str]:
        """Members that are gone, or hold on to what they should give up: who, and why."""
        gone: dict[str, str] = {}
        for member in self.members.values():
            if member.deadline_ms <= now_ms:
                gone[member.id] = f"not heard of for {member.session_ms} ms"
            elif member.give_up_by_ms is not None and member.give_up_by_ms <= now_ms:
                gone[member.id] = f"did not give up what it was asked for in {member.rebalance_ms} ms"
        if gone:
            self._remove(gone, now_ms, now_us)
        return gone

    def next_deadline_ms(self) -> float | None:
        times = [member.deadline_ms for member in self.members.values()]
        times += [one.give_up_by_ms for one in self.members.values() if one.give_up_by_ms is not None]
        return min(times, default=None)

    def lay_out(self, counts: Mapping[StreamId, int], now_ms: float) -> bool:
        """Streams may have come, gone or grown; True if that changes who should read what."""
        if dict(counts) == self._counts:
            return False
        self._counts = dict(counts)
        if self._wanted() <= self.tenures.keys() and not any(self._is_gone(slot) for slot in self.tenures):
            return False
        self._rebalance(now_ms)
        return True

    def streams(self) -> set[StreamId]:
        """All that some member asks for, or has not given up yet."""
        return self._wished() | {slot.stream for slot in self.tenures}

    def _wished(self) -> set[StreamId]:
        return {stream for member in self.members.values() for stream in self.with_returns(member.topics)}

    def with_returns(self, topics: frozenset[StreamId]) -> frozenset[StreamId]:
        """Who reads a topic reads what comes back of it, too."""
        return topics | {self.returns[stream].stream for stream in topics if stream in self.returns}

    def member(self, member_id: str) -> Member:
        found = self.members.get(member_id)
        if found is None:
            raise UnknownMember(f"no member {member_id!r}: it has left, was not heard of in time, or never joined")
        return found

    def standing(self, member_id: str) -> Standing:
        """What the member is told now; from here on it counts as told."""
        member = self.members[member_id]
        member.told = self.generation
        mine = [(slot, self.tenures[slot]) for slot in self._slots_of(member_id)]
        return Standing(
            self.generation,
            tuple(Held(slot, tenure.since) for slot, tenure in mine if tenure.revoked is None),
            tuple(slot for slot, tenure in mine if tenure.revoked is not None),
        )

    def _slots_of(self, member_id: str) -> list[Slot]:
        if self._held is None:
            self._held = {}
            for slot in sorted(self.tenures):
                self._held.setdefault(self.tenures[slot].member, []).append(slot)
        return self._held.get(member_id, [])

    def _remove(self, gone: Iterable[str], now_ms: float, now_us: int) -> None:
        for member_id in gone:
            del self.members[member_id]
        if not self.members:
            self.empty_since_us = now_us
        self._rebalance(now_ms)

    def _rebalance(self, now_ms: float) -> None:
        self.generation += 1
        self.changed = True
        self._held = None
        wishes = {member.id: self.with_returns(member.topics) for member in self.members.values()}
        slots = self._wanted()
        for slot in [one for one, tenure in self.tenures.items() if tenure.member not in wishes or self._is_gone(one)]:
            del self.tenures[slot]
        held = {slot: tenure.member for slot, tenure in self.tenures.items()}
        # What nobody holds is moved first, where something has to be: it can begin at once.
        target = assign(sorted(slots, key=lambda slot: (slot not in held, slot)), wishes, held)
        for slot, tenure in list(self.tenures.items()):
            self._settle(tenure, target.get(slot), now_ms)
        for slot, member_id in target.items():
            if slot not in self.tenures:
                self.tenures[slot] = Tenure(member_id, self.generation)
        self._note_given_up()

    def _wanted(self) -> set[Slot]:
        return {Slot(stream, at) for stream in self._wished() for at in range(self._counts.get(stream, 0))}

    def _is_gone(self, slot: Slot) -> bool:
        return slot.partition >= self._counts.get(slot.stream, 0)

    def _settle(self, tenure: Tenure, wanted: str | None, now_ms: float) -> None:
        """A tenure goes on, or its member is asked to end it."""
        member = self.members[tenure.member]
        if wanted == tenure.member:
            if tenure.revoked is not None and member.told >= tenure.revoked:
                # It may have let go of what it had read: it begins anew at what is committed.
                tenure.since = self.generation
            tenure.revoked = tenure.heir = None
            return
        tenure.heir = wanted
        if tenure.revoked is None:
            tenure.revoked = self.generation
            if member.give_up_by_ms is None:
                member.give_up_by_ms = now_ms + member.rebalance_ms

    def _give_up(self, member: Member, generation: int) -> None:
        if member.give_up_by_ms is None:
            return
        for slot in self._slots_of(member.id):
            tenure = self.tenures[slot]
            if tenure.revoked is not None and tenure.revoked <= generation:
                self.changed = True
                self._held = None
                del self.tenures[slot]
                if tenure.heir is not None:
                    self.tenures[slot] = Tenure(tenure.heir, self.generation)
        self._note_given_up()

    def _note_given_up(self) -> None:
        stuck = {tenure.member for tenure in self.tenures.values() if tenure.revoked is not None}
        for member in self.members.values():
            if member.id not in stuck:
                member.give_up_by_ms = None

    # -- failures -----------------------------------------------------------------------------------------------

    def configure(self, settings: GroupSettings) -> None:
        if settings != self.settings:
            self.settings = settings
            self.changed = True

    def add_return(self, origin: StreamId, stream: StreamId, now_us: int) -> None:
        """What fails in one stream comes back in another, which nothing was written to. `lay_out` shares it out."""
        number = max((one.number for one in self.returns.values()), default=-1) + 1
        self.returns[origin] = Return(number, stream)
        # From its beginning, whoever reads it first and whenever that is.
        self.place(Slot(stream, 0), 0, now_us)
        self.changed = True

    def drop_return(self, origin: StreamId) -> None:
        """The stream is gone."""
        slot = Slot(self.returns.pop(origin).stream, 0)
        if slot in self.committed:
            self.forget([slot])
        self.changed = True

    def check_failures(self, offsets: Mapping[Slot, int], failed: Mapping[Slot, Iterable[int]]) -> None:
        """A commit says of what it passes which records have failed: by that each fails once."""
        if self.settings.retry is None:
            raise Refused("the group has no retry policy, by which failed records would be tried again")
        for slot, numbers in failed.items():
            low = self.committed[slot].offset if slot in self.committed else 0
            high = offsets.get(slot, low)
            for offset in numbers:
                if not low <= offset < high:
                    raise Refused(
                        f"offset {offset} of partition {slot.partition} cannot fail: the commit is of {low} to {high}"
                    )

    def fail(self, failures: Iterable[Failure], owner: bytes) -> None:
        """What was checked in this same turn. `owner`: for the first of them."""
        if self.failures is None:
            self.failures = Failures(owner)
        self.failures.waiting += failures
        self.changed_failures = True

    # -- offsets ------------------------------------------------------------------------------------------------

    def check_commit(self, member_id: str, generation: int, offsets: Mapping[Slot, int]) -> None:
        """Raises if one of them may not be committed by this member."""
        self.member(member_id)
        if generation > self.generation:
            raise Refused(f"generation {generation} is not there yet; the group is at {self.generation}")
        for slot, offset in offsets.items():
            tenure = self.tenures.get(slot)
            if tenure is None or tenure.member != member_id:
                raise NotHeld(f"partition {slot.partition} is not held by this member (any more)")
            if generation < tenure.since:
                raise Fenced(
                    f"generation {generation} is over for partition {slot.partition}: it was given to this member, or "
                    f"reset, in generation {tenure.since}"
                )
            self._check_order(slot, offset)

    def check_commit_from_outside(self, offsets: Mapping[Slot, int]) -> None:
        """The same for somebody who is no member, and may commit only where no member reads."""
        self._check_unheld(offsets, "be committed without being one of its members")
        for slot, offset in offsets.items():
            self._check_order(slot, offset)

    def _check_order(self, slot: Slot, offset: int) -> None:
        found = self.committed.get(slot)
        if found is not None and offset < found.offset:
            raise OffsetBehind(
                f"offset {offset} of partition {slot.partition} is behind {found.offset}, which is committed; only a "
                "reset moves it back"
            )

    def _check_unheld(self, slots: Iterable[Slot], what: str) -> None:
        held = sorted(slot.partition for slot in slots if slot in self.tenures)
        if held:
            raise GroupInUse(f"members of the group hold partitions {held}, which cannot {what}")

    def commit(self, offsets: Mapping[Slot, int], now_us: int) -> None:
        """What was checked in this same turn."""
        for slot, offset in offsets.items():
            self._set(slot, offset, now_us)

    def place(self, slot: Slot, offset: int, now_us: int) -> None:
        """Where the group begins to read a slot: from here on it is committed, so that nothing behind is missed."""
        assert slot not in self.committed
        self._set(slot, offset, now_us)

    def unplaced(self) -> Sequence[tuple[Slot, Start]]:
        """Slots that are held and were never read, each with where its reading should begin."""
        known = {slot.stream for slot in self.committed}
        found = [(slot, tenure) for slot, tenure in self.tenures.items() if slot not in self.committed]
        # A partition that was added to a stream holds nothing that is older than the group's reading of it.
        return [
            (slot, Start.FIRST if slot.stream in known else self.members[tenure.member].start) for slot, tenure in found
        ]

    def check_reset(self, slots: Iterable[Slot]) -> None:
        self._check_unheld(slots, "be reset (unless that is forced)")

    def reset(self, offsets: Mapping[Slot, int], now_us: int, *, force: bool = False) -> None:
        """Go on elsewhere. What members have read is worth nothing then, so they must not hold it, or be forced."""
        if not force:
            self.check_reset(offsets)
        self.generation += 1
        self.changed = True
        for slot, offset in offsets.items():
            tenure = self.tenures.get(slot)
            if tenure is not None:
                tenure.since = self.generation
            self._set(slot, offset, now_us)

    def forget(self, slots: Iterable[Slot]) -> None:
        """The streams of these are gone."""
        for slot in slots:
            del self.committed[slot]
            self.changed_offsets.add(slot)

    def _set(self, slot: Slot, offset: int, now_us: int) -> None:
        self.committed[slot] = Committed(offset, self.generation, now_us)
        self.changed_offsets.add(slot)

    def is_over(self, before_us: int) -> bool:
        """No members, nothing was committed since that time, and nobody has set it up to stay."""
        if self.members or self.failures or self.settings != GroupSettings():
            return False
        last_us = max((one.time_us for one in self.committed.values()), default=0)
        return max(self.empty_since_us, last_us) <= before_us
