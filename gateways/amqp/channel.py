"""One AMQP channel: what it holds unacked, its confirms, its prefetch, its transaction. Machine: no I/O.

Deliveries are held in runs (first tag, stretch), in the order of their tags; an ack up to a tag takes whole runs off
the front, a single one splits at most one run. Confirms are told in the order of the publishes, as many as possible
with one `multiple`, never across a publish that is not yet safe (D1).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING

from headrace.gateways.amqp.errors import ReplyCode, amqp_error
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import UNLIMITED, View

if TYPE_CHECKING:
    from headrace.gateways.amqp.consumer import AmqpConsumer
    from headrace.gateways.amqp.replyto import ReplyConsumer

_first_tag = attrgetter("tag")


class Held:
    """Deliveries tag..tag+count-1 of one stretch, not yet settled."""

    __slots__ = ("consumer", "queue", "since_s", "stretch", "tag")

    def __init__(
        self, tag: int, queue: View, stretch: Stretch, consumer: "HeldBy | None", since_s: float | None = None
    ) -> None:
        self.tag = tag
        self.queue = queue
        self.stretch = stretch
        # Who got it; None for basic.get.
        self.consumer = consumer
        # When it was first looked at by `overdue`: asking the clock for each delivery would cost more.
        self.since_s = since_s


class HeldBy:
    """The part of a consumer that its channel counts with."""

    __slots__ = ("outstanding",)

    def __init__(self) -> None:
        self.outstanding = 0


class Outcome(Enum):
    WAITING = 0
    ACK = 1
    NACK = 2


class Confirm:
    """`count` publishes that succeed or fail together."""

    __slots__ = ("count", "outcome")

    def __init__(self, count: int) -> None:
        self.count = count
        self.outcome = Outcome.WAITING


class Channel:
    def __init__(self, number: int) -> None:
        self.number = number
        self.confirming = False
        self.transactional = False
        self.open = True
        # False after channel.flow: the client wants no deliveries for a while.
        self.flowing = True
        self.consumers: dict[str, AmqpConsumer] = {}
        # Where direct answers to this channel's requests arrive.
        self.reply_consumer: ReplyConsumer | None = None
        self.last_queue = ""
        self.next_tag = 1
        # Tags below were given out by an earlier leader: what they were for comes again, and acks of them are void.
        self.first_tag = 1
        # What consumers hold unacked; basic.get does not count for the prefetch.
        self.outstanding = 0
        # Prefetch for consumers that come later, and for the channel as a whole.
        self.consumer_prefetch = 0
        self.channel_prefetch = 0
        # Publishes and settlements of an open transaction, carried out by tx.commit in this order. What is to be
        # settled still counts as held: the prefetch opens with the commit.
        self.pending: list[Callable[[], None]] = []
        self.pending_settles: list[tuple[Callable[[View, Stretch], None], Held]] = []
        self._held: list[Held] = []
        self._front = 0
        self._confirms: deque[Confirm] = deque()
        self._confirmed = 0

    def go_on(self, next_tag: int, published: int) -> None:
        """Count on from where an earlier leader was."""
        self.next_tag = self.first_tag = next_tag
        self._confirmed = published

    # -- deliveries ---------------------------------------------------------------------------------------------

    def hold(self, queue: View, stretch: Stretch, consumer: HeldBy | None) -> int:
        """Give a stretch its delivery tags; returns the first."""
        tag = self.next_tag
        self.next_tag = tag + stretch.count
        self._held.append(Held(tag, queue, stretch, consumer))
        if consumer is not None:
            self.outstanding += stretch.count
            consumer.outstanding += stretch.count
        return tag

    def skip(self, count: int) -> int:
        """Tags for deliveries that need no ack; returns the first."""
        tag = self.next_tag
        self.next_tag = tag + count
        return tag

    def room(self) -> int:
        return self.channel_prefetch - self.outstanding if self.channel_prefetch else UNLIMITED

    def release(self, tag: int, multiple: bool) -> list[tuple[View, Stretch]]:
        """Take deliveries off the channel: all up to the tag (0: all there are), or just the one.

        Raises PRECONDITION_FAILED for a tag that is not held.
        """
        if 0 < tag < self.first_tag:
            return []
        if not multiple:
            return [self._release_one(tag)]
        held, front = self._held, self._front
        if tag == 0:
            tag = self.next_tag - 1
        else:
            # The tag itself must be held, as in RabbitMQ: acknowledging twice is a mistake of the client's.
            self._place(tag)
        released: list[tuple[View, Stretch]] = []
        while front < len(held) and held[front].tag <= tag:
            run = held[front]
            count = tag - run.tag + 1
            stretch = run.stretch
            if count < stretch.count:
                stretch = stretch.split(count)
                run.tag += count
                front -= 1
            released.append((run.queue, stretch))
            self._count_off(run, stretch.count)
            front += 1
        self._trim(front)
        return released

    def _release_one(self, tag: int) -> tuple[View, Stretch]:
        held, front = self._held, self._front
        # Clients mostly ack in order.
        if front < len(held) and held[front].tag == tag:
            place = front
        else:
            place = self._place(tag)
        run = held[place]
        stretch = run.stretch
        before = tag - run.tag
        if before:
            ahead = stretch.split(before)
            held.insert(place, Held(run.tag, run.queue, ahead, run.consumer, run.since_s))
            place += 1
        one = stretch.split(1) if stretch.count > 1 else stretch
        if one is stretch:
            if place == front:
                self._trim(front + 1)
            else:
                del held[place]
        else:
            run.tag = tag + 1
        self._count_off(run, 1)
        return run.queue, one

    def _place(self, tag: int) -> int:
        """Where the run with this tag is held."""
        held, front = self._held, self._front
        place = bisect_right(held, tag, lo=front, key=_first_tag) - 1
        if place < front or tag >= held[place].tag + held[place].stretch.count:
            raise _unknown_tag(tag)
        return place

    def set_aside(self, tag: int, multiple: bool, settle: Callable[[View, Stretch], None]) -> None:
        """Deliveries to be settled so by tx.commit; until then only the transaction knows them."""
        if 0 < tag < self.first_tag:
            return
        if multiple and tag:
            self._place(tag)
        last = tag or self.next_tag - 1
        places = range(self._front, len(self._held)) if multiple else (self._place(tag),)
        for run in [self._held[place] for place in places]:
            if run.tag > last:
                break
            first = run.tag if multiple else tag
            count = min(last - first + 1, run.stretch.count - (first - run.tag))
            self.pending_settles.append((settle, self._cut_out(run, first, count)))

    def _cut_out(self, run: Held, tag: int, count: int) -> Held:
        """Take tag..tag+count-1 out of a run; still counted."""
        place = self._held.index(run, self._front)
        stretch, parts = run.stretch, []
        if tag > run.tag:
            parts.append(Held(run.tag, run.queue, stretch.split(tag - run.tag), run.consumer, run.since_s))
        taken = stretch if count == stretch.count else stretch.split(count)
        if taken is not stretch:
            parts.append(Held(tag + count, run.queue, stretch, run.consumer, run.since_s))
        self._held[place : place + 1] = parts
        return Held(tag, run.queue, taken, run.consumer, run.since_s)

    def take_pending(self) -> list[tuple[Callable[[View, Stretch], None], Held]]:
        """The settlements of the transaction, which is being committed."""
        pending, self.pending_settles = self.pending_settles, []
        for _settle, held in pending:
            self._count_off(held, held.stretch.count)
        return pending

    def put_back(self) -> None:
        """The transaction is rolled back: its publishes are forgotten, its deliveries are unacked as before."""
        self.pending.clear()
        pending, self.pending_settles = self.pending_settles, []
        self._held = sorted([*self._held[self._front :], *(held for _settle, held in pending)], key=_first_tag)
        self._front = 0

    def release_all(self) -> list[tuple[View, Stretch]]:
        released = [(one.queue, one.stretch) for one in self._held[self._front :]]
        for one in self._held[self._front :]:
            self._count_off(one, one.stretch.count)
        self._held.clear()
        self._front = 0
        return released

    def overdue(self, now_s: float, timeout_s: float) -> Held | None:
        """A delivery that has been held for too long: for the timeout of its queue, else for this one (0: for ever).

        Counted from the first look at it, so that nobody is timed out early.
        """
        for one in self._held[self._front :]:
            if one.since_s is None:
                one.since_s = now_s
                continue
            own_ms = one.queue.settings.consumer_timeout_ms
            limit_s = timeout_s if own_ms is None else own_ms / 1000
            if limit_s and now_s - one.since_s >= limit_s:
                return one
        return None

    def _count_off(self, run: Held, count: int) -> None:
        if run.consumer is not None:
            self.outstanding -= count
            run.consumer.outstanding -= count

    def _trim(self, front: int) -> None:
        if front > 512 or front == len(self._held):
            del self._held[:front]
            front = 0
        self._front = front

    # -- confirms -----------------------------------------------------------------------------------------------

    def expect(self, count: int) -> Confirm:
        """Publishes whose outcome will be told."""
        confirm = Confirm(count)
        self._confirms.append(confirm)
        return confirm

    def unexpect(self, confirm: Confirm) -> None:
        """The newest expectation is taken back, to be replaced by finer ones."""
        assert self._confirms[-1] is confirm
        self._confirms.pop()

    def told(self) -> list[tuple[int, Outcome]]:
        """(tag, outcome) for every run of publishes that can be told now: each up to and including its tag."""
        answers: list[tuple[int, Outcome]] = []
        confirms = self._confirms
        while confirms and confirms[0].outcome is not Outcome.WAITING:
            confirm = confirms.popleft()
            self._confirmed += confirm.count
            if answers and answers[-1][1] is confirm.outcome:
                answers[-1] = (self._confirmed, confirm.outcome)
            else:
                answers.append((self._confirmed, confirm.outcome))
        return answers

    @property
    def unconfirmed(self) -> int:
        return sum(confirm.count for confirm in self._confirms)


def _unknown_tag(tag: int) -> Exception:
    return amqp_error(ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
