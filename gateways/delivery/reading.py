"""A reading view: one consumer goes through what a queue has received, and takes nothing away. Machine.

It stands beside the work view of an ordinary queue, and is the only way into a stream. Its place is a number of the
queue's history; records come from the logs again, a window at a time, through a lane of its own, so memory is bounded
however far back it starts. An ack gives the consumer room for more and nothing else; nothing comes back, nothing is
dead-lettered. Readers see offsets, so they see committed records only (K3), and each record under one number for ever.
A reader with a filter is handed what matches; batches that hold nothing of it are passed over unread where every record
of them is the queue's, and a long way without a match is gone in several turns.
"""

from functools import partial
from typing import TYPE_CHECKING

from headrace.gateways.delivery.history import History, Piece
from headrace.gateways.delivery.lane import Extent, Lane, Stretch, spans_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.filtering.expression import Expression
    from headrace.gateways.delivery.queue import Consumer, Queue, QueueSettings

# One turn hands a reader at most so many records at a time, so that buffers stay small.
CHUNK_COUNT_MAX = 512
# With a filter so many are looked at together, and so many in one turn.
LOOK_COUNT_MAX = 4096
TURN_COUNT_MAX = 16 * 1024
# As long as one look at summaries takes, in records.
PASS_COUNT = TURN_COUNT_MAX // 8


class ReadingView:
    def __init__(self, queue: "Queue", consumer: "Consumer", start: int, wants: "Expression | None" = None) -> None:
        """`start`: the number of the first record to be read; those that are gone are passed over."""
        self.queue = queue
        self.consumer = consumer
        self.delivered_count = 0
        self._history = queue.history
        self.lane = Lane(partial(spans_of, view_id=queue.view_id))
        self._wants = self.lane.sieve = wants
        # There is more to look at than one turn has time for.
        self.is_unfinished = False
        # Everything below this number is with the lane, and was taken from offsets below `_resume` of its log.
        self._fed = min(max(start, self._history.first_seq), self._history.next_seq)
        self._resume: int | None = None
        if self._fed == self._history.next_seq:
            self._resume = self._history.end
        self.lane.restore(self._fed, self._fed, (), ())

    @property
    def deleted(self) -> bool:
        return self.queue.deleted

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def settings(self) -> "QueueSettings":
        return self.queue.settings

    def dispatch(self) -> None:
        """Hand out what may be seen while there is room."""
        if self._wants is not None:
            self._dispatch_wanted(self._wants)
            return
        lane, consumer = self.lane, self.consumer
        lane.hidden_in = None
        while (room := consumer.room()) > 0:
            if not lane.ready_count and not self._feed():
                return
            stretch = lane.take(min(room, CHUNK_COUNT_MAX), early=False)
            if stretch is not None:
                self.delivered_count += stretch.count
                consumer.deliver(self, stretch)
            elif lane.ready_count:
                # Not committed yet.
                return

    def _dispatch_wanted(self, wants: "Expression") -> None:
        lane, consumer = self.lane, self.consumer
        lane.hidden_in = None
        self.is_unfinished = False
        left = TURN_COUNT_MAX
        while consumer.room() > 0:
            if left <= 0:
                self.is_unfinished = True
                return
            if not lane.ready_count and not self._feed():
                return
            lane.is_passing = False
            stretch = lane.take(LOOK_COUNT_MAX, early=False)
            if stretch is not None:
                left -= stretch.count
                self._hand_out(wants, stretch)
            elif lane.is_passing:
                left -= PASS_COUNT
            elif lane.ready_count:
                # Not committed yet.
                return

    def _hand_out(self, wants: "Expression", stretch: Stretch) -> None:
        """What matches, as far as there is room; what is behind that comes back."""
        lane, consumer = self.lane, self.consumer
        batch = stretch.loaded()
        for low, high in wants.spans(batch, stretch.index, stretch.index + stretch.count):
            if low > stretch.index:
                passed = stretch.split(low - stretch.index)
                lane.settle(passed.seq, passed.count)
            room = min(consumer.room(), CHUNK_COUNT_MAX, high - low)
            if room <= 0:
                lane.put_back(stretch)
                return
            part = stretch.split(room) if room < stretch.count else stretch
            self.delivered_count += part.count
            if part is stretch:
                consumer.deliver(self, part)
                return
            consumer.deliver(self, part)
            if room < high - low:
                lane.put_back(stretch)
                return
        lane.settle(stretch.seq, stretch.count)

    def _feed(self) -> bool:
        """Tell the lane of the next piece of the history; False when there is none."""
        piece = self._history.piece(self._fed, self._resume)
        if piece is None:
            return False
        lane = self.lane
        if piece.seq > self._fed:
            # What lay between is gone.
            lane.skip(piece.seq - self._fed)
        end = piece.seq + piece.count
        if piece.source is None:
            lane.skip(end - max(self._fed, piece.seq))
        elif piece.exact:
            count = end - max(self._fed, piece.seq)
            lane.extend(piece.source, count, piece.end - count, piece.end, exact=True)
        elif piece.seq < self._fed:
            self._enter(piece)
        else:
            lane.extend(piece.source, piece.count, piece.first, piece.end)
        self._fed, self._resume = end, piece.end
        return True

    def _enter(self, piece: Piece) -> None:
        """Start in the middle of a piece: the lane finds the place by counting from its beginning."""
        assert piece.source is not None and not self.lane.unacked_count
        extent = Extent(piece.seq, piece.count, piece.source, piece.first, piece.end)
        self.lane.restore(piece.seq + piece.count, self._fed, (), [extent])

    # -- as a queue for the channel that holds what was delivered ------------------------------------------------

    def settle(self, stretch: Stretch) -> None:
        stretch.lane.settle(stretch.seq, stretch.count)

    def reject(self, stretch: Stretch) -> None:
        self.settle(stretch)

    def give_back(self, stretches: "Iterable[Stretch]", *, failed: bool = True) -> None:
        for stretch in stretches:
            self.settle(stretch)


def sequence_at(history: History, view_id: int, time_us: int) -> int:
    """The number of the first record at this time or later; of the next one to come when there is none."""
    piece = history.piece_before(time_us)
    if piece is None:
        return history.next_seq
    seq, source = piece.seq, piece.source
    if source is None:
        return seq + piece.count
    # Numbers are certain from the end of the piece: what retention took of it was at its beginning.
    found: list[tuple[int, int]] = []
    offset = max(piece.first, source.log_start)
    while offset < piece.end:
        for run in source.read(offset, end=piece.end):
            spans = [(run.first, run.last)] if piece.exact else spans_of(run.batch, run.first, run.last, view_id)
            for low, high in spans:
                found += ((value, end - start) for value, start, end in run.batch.timestamps.spans(low, high))
            offset = run.batch.next_offset
    end = piece.seq + piece.count
    seq = end - sum(count for _value, count in found)
    for value, count in found:
        if value >= time_us:
            return seq
        seq += count
    return end
