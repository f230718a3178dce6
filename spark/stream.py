"""The stream reader: where a query begins, how far each batch goes, what its tasks are. Driver of pyspark: clock.

Spark keeps offsets in its checkpoint, but not the first ones: a query whose first batch failed asks for them again, and
`latest` is then later, and `earliest` too where retention was there. Spark would plan from there to the end that it had
logged, find less or nothing between, and go on: records of that batch would be gone without a word. Closed here twice.
The end of the first batch says where that began (stream_offsets.py), and it is read from there when it is run again.
And the start itself can be kept (by a `cursor` in the broker, or beside the checkpoint by stream_start.py), for a query
that ends before its first batch was planned. A batch that ends before it starts is an error.

- Ends come from the high watermark, never from what is on the disk above it; offsets never move backwards.
- A batch reads exactly [start, end); a partition that was not there before is read from 0.
- A topic that was deleted and created again, records that retention took before they were read, a log that ends before
  where the query stands: each is an error, or (failOnDataLoss=false) the stream goes on with what there is.
- While it runs it holds a lease on what it has not read, which retention respects for a bounded time.
Neighbours: stream_offsets.py, stream_limits.py, stream_broker.py (what the broker keeps for a stream), source.py.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from headrace.spark.access import Access, DataLoss, PartitionEnds, TopicInfo, TopicNotFound
from headrace.spark.options import LATEST, Everywhere, Given, Partitions, Position, Since, SourceOptions, Topics
from headrace.spark.plan import Task
from headrace.spark.source import TaskPartition, opened, tasks_of
from headrace.spark.source_edges import Range, initial_offsets, subscribed
from headrace.spark.stream_broker import StreamBroker
from headrace.spark.stream_limits import by_bytes, by_rows
from headrace.spark.stream_offsets import Offsets, TopicOffsets
from headrace.spark.worker import keep_modules

if TYPE_CHECKING:
    import pyarrow as pa

# Between looking what is there and planning to read it, retention may take some: so often it is looked again.
PLAN_ATTEMPTS = 3


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        # Asked twice of a new query, and the log grows between the two.
        self._initial: Offsets | None = None
        # What there was when a run over what is there began.
        self._target: Mapping[str, TopicInfo] | None = None
        self._batch_at_s: float | None = None
        # Opened where they are used: readers are also made where nothing but `read` is asked of them.
        self._opened: Access | None = None
        self._broker: StreamBroker | None = None

    # -- where it begins, how far it goes -----------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            self._initial = self._begun()
        self._hold(self._initial)
        return self._initial.to_json()

    def _begun(self) -> Offsets:
        cursor = self._options.cursor
        if cursor is not None:
            # Before the options are looked at: what they say may not be there any more.
            known = self._kept_by().maybe_begun(cursor)
            return known or self._kept_by().begin(cursor, initial_offsets(self._access(), self._options))
        found = initial_offsets(self._access(), self._options)
        if not self._is_kept():
            warnings.warn(
                "this stream starts at latest or at a time, and nobody keeps where that is: should it end before its "
                "first batch is planned, it begins later next time; give it a 'cursor', or start it with "
                "headrace.spark.stream_start",
                stacklevel=2,
            )
        return found

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = subscribed(self._access(), self._options.subscription).topics

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark has no limit made of several; what is not said here is taken from the options below.
        options = self._options
        if options.max_offsets is not None:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes is not None:
            return ReadMaxBytes(options.max_bytes)
        return ReadAllAvailable() if options.min_offsets is None else ReadMinRows(options.min_offsets)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = Offsets.from_json(start)
        topics = self._there(at)
        waiting = self._backlog(at, topics)
        backlog = waiting if isinstance(limit, ReadAllAvailable) else self._limited(waiting, limit)
        ends = {position: end for position, (begin, end) in backlog.items() if end > begin}
        if ends:
            self._batch_at_s = time.monotonic()
        self._hold(at)
        moved = _moved(at, topics, ends)
        if at == self._initial:
            return Offsets(moved.topics, began=at.topics).to_json()
        # Nothing new must be the same text.
        return (at if moved.topics == at.topics else moved).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        try:
            topics = subscribed(self._access(), self._options.subscription).topics
        except TopicNotFound:
            # Whether that is an error is decided with the next batch.
            return None
        next = {
            name: TopicOffsets(info.id, {one.partition: one.high_watermark for one in info.partitions})
            for name, info in topics.items()
        }
        return Offsets(next).to_json()

    def _limited(self, backlog: Mapping[Position, Range], limit: ReadLimit) -> dict[Position, Range]:
        options = self._options
        if self._target is None and options.min_offsets is not None and self._waits_for_more(backlog):
            return {}
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else options.max_offsets
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else options.max_bytes
        ends = {at: end for at, (_, end) in backlog.items()}
        if rows is not None:
            ends = by_rows(backlog, rows)
        if size is not None:
            waiting = {at: one for at, one in backlog.items() if one[0] < one[1]}
            slices = {at: self._access().slices(*at, start, end) for at, (start, end) in waiting.items()}
            by_size = by_bytes(waiting, slices, size)
            ends = {at: min(end, by_size.get(at, end)) for at, end in ends.items()}
        return {at: (start, ends[at]) for at, (start, _) in backlog.items()}

    def _waits_for_more(self, backlog: Mapping[Position, Range]) -> bool:
        """The first batch waits for nobody, and none waits for longer than was allowed."""
        waiting = sum(end - start for start, end in backlog.values())
        delay_s = self._options.max_trigger_delay_ms / 1000
        is_early = self._batch_at_s is not None and time.monotonic() - self._batch_at_s < delay_s
        return is_early and waiting < (self._options.min_offsets or 0)

    # -- what is there, beside where the query stands -----------------------------------------------------------

    def _there(self, at: Offsets) -> Mapping[str, TopicInfo]:
        """The topics of the subscription, up to the target if there is one. A loss if one that was read is gone."""
        try:
            topics = self._target
            if topics is None:
                topics = subscribed(self._access(), self._options.subscription).topics
        except TopicNotFound:
            if self._options.fail_on_data_loss or not at.topics:
                raise
            topics = self._left()
        for name, topic in at.topics.items():
            if name not in topics:
                self._lost(f"'{name}' was read by this query, and its subscription leads there no more")
            elif topics[name].id != topic.id:
                self._lost(f"'{name}' was deleted and created again: it was {topic.id} and is {topics[name].id} now")
        return topics

    def _left(self) -> dict[str, TopicInfo]:
        """The topics of a list that are still there."""
        found = {}
        match self._options.subscription:
            case Topics(names):
                wanted = names
            case Partitions(numbers):
                wanted = tuple(numbers)
            case _:
                wanted = ()
        for name in wanted:
            try:
                info = self._access().topic(name)
            except TopicNotFound:
                continue
            found[info.name] = info
        return found

    def _backlog(self, at: Offsets, topics: Mapping[str, TopicInfo]) -> dict[Position, Range]:
        """What waits in each partition. A loss where the log begins behind where the query stands, or ends before."""
        found = {}
        for name, info in topics.items():
            known = at.topics.get(name)
            next = known.next if known is not None and known.id == info.id else {}
            for ends in info.partitions:
                start = next.get(ends.partition, 0)
                if not ends.start <= start <= ends.high_watermark:
                    self._lost(
                        f"partition {ends.partition} of '{name}' has offsets {ends.start} to "
                        f"{ends.high_watermark - 1}, and this query would go on at {start}"
                    )
                    start = max(start, ends.start)
                found[name, ends.partition] = (start, max(start, ends.high_watermark))
        return found

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLoss(f"{what}; with 'failOnDataLoss' false the query would go on with what there is")

    # -- a batch ------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begin, stop = Offsets.from_json(start), Offsets.from_json(end)
        if stop.began is not None and begin.began is None:
            # The first batch, and perhaps not for the first time.
            begin = Offsets(stop.began)
        ranges = batch_of(begin, stop)
        self._hold(begin)
        return [TaskPartition(task) for task in self._tasks(ranges, stop)]

    def _tasks(self, ranges: Mapping[Position, Range], end: Offsets) -> list[Task]:
        options = self._options
        access = self._access()
        ids = {name: topic.id for name, topic in end.topics.items()}
        for attempt in range(1, PLAN_ATTEMPTS + 1):
            there = self._readable(ranges, end)
            try:
                return tasks_of(access, there, ids, options)
            except (DataLoss, TopicNotFound):
                if options.fail_on_data_loss or attempt == PLAN_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _readable(self, ranges: Mapping[Position, Range], end: Offsets) -> dict[Position, Range]:
        """The ranges of a batch as far as they can be read now."""
        found = {}
        infos = {name: self._as_it_was(name, end) for name in {topic for topic, _ in ranges}}
        for (name, partition), (start, stop) in ranges.items():
            info = infos[name]
            ends = None if info is None else _partition(info, partition)
            if ends is None:
                self._lost(f"offsets {start} to {stop - 1} of partition {partition} of '{name}' are gone with it")
            elif start < ends.start or stop > ends.high_watermark:
                self._lost(
                    f"offsets {start} to {stop - 1} of partition {partition} of '{name}' were to be read, "
                    f"and it has {ends.start} to {ends.high_watermark - 1}"
                )
                start, stop = max(start, ends.start), min(stop, ends.high_watermark)
            if ends is not None and start < stop:
                found[name, partition] = (start, stop)
        return found

    def _as_it_was(self, name: str, end: Offsets) -> TopicInfo | None:
        """The topic, if it is the one that the batch was planned on."""
        try:
            info = self._access().topic(name)
        except TopicNotFound:
            return None
        return info if info.id == end.topics[name].id else None

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        if not isinstance(partition, TaskPartition):
            return iter(())
        # Where it is planned nobody decodes.
        from headrace.spark import decode

        keep_modules("pyarrow.compute")
        return decode.read(
            partition.task,
            columns=self._columns,
            tags=self._options.tags,
            check_contiguous=self._options.fail_on_data_loss,
        )

    # -- what others see of it ----------------------------------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        """Spark says so a batch late, and not at all of the last one: good enough for people who look, and no more."""
        offsets = Offsets.from_json(end)
        group = self._group()
        if group is not None and self._options.where.url is not None:
            self._kept_by().publish(group, offsets)
        self._hold(offsets)

    def stop(self) -> None:
        if self._broker is not None:
            self._broker.close()

    def _hold(self, offsets: Offsets) -> None:
        """What this query has not read stays for it, for a bounded time."""
        if self._options.where.url is not None:
            self._kept_by().hold(offsets)

    def _group(self) -> str | None:
        return self._options.group or self._options.cursor

    def _is_kept(self) -> bool:
        """Whether the start will be the same when it is asked for again."""
        return self._options.cursor is not None or _is_lasting(self._options)

    def _kept_by(self) -> StreamBroker:
        if self._broker is None:
            where = self._options.where
            assert where.url is not None, "nobody else is asked to keep something"
            self._broker = StreamBroker(where.url, token_name=where.token_name, name=self._group())
        return self._broker

    def _access(self) -> Access:
        if self._opened is None:
            self._opened = opened(self._options.where)
        return self._opened


def batch_of(start: Offsets, end: Offsets) -> dict[Position, Range]:
    """What lies between the two. Raises DataLoss where the end lies before the start, whatever was said about losses:
    nothing would be read, and nobody told."""
    ranges = {}
    for name, topic in end.topics.items():
        before = start.topics.get(name)
        next = before.next if before is not None and before.id == topic.id else {}
        for partition, stop in topic.next.items():
            begin = next.get(partition, 0)
            if stop < begin:
                raise DataLoss(
                    f"the batch of partition {partition} of '{name}' ends at {stop}, before its start {begin}: this "
                    "checkpoint does not say where the batch began, and records would be lost without a word. Begin "
                    "again with a new checkpoint"
                )
            if begin < stop:
                ranges[name, partition] = (begin, stop)
    return ranges


def _moved(at: Offsets, topics: Mapping[str, TopicInfo], ends: Mapping[Position, int]) -> Offsets:
    """Where the query stands after this batch. What it has not seen yet appears with its first record."""
    moved = {name: topic for name, topic in at.topics.items() if name in topics and topics[name].id == topic.id}
    for name, info in topics.items():
        next = dict(moved[name].next) if name in moved else {}
        next |= {number: end for (topic, number), end in ends.items() if topic == name}
        if next or name in moved:
            moved[name] = TopicOffsets(info.id, next)
    return Offsets(moved)


def _partition(info: TopicInfo, number: int) -> PartitionEnds | None:
    return next((one for one in info.partitions if one.partition == number), None)


def _is_lasting(options: SourceOptions) -> bool:
    """Whether the option says where, and not when."""
    match options.start:
        case Everywhere(offset):
            return offset != LATEST
        case Given(offsets):
            return LATEST not in offsets.values()
        case Since():
            return False
        case _:
            return True
