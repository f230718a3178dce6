"""What the delivery room asks of the log. Protocols only; core_log's PartitionLog keeps them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.core_log.ids import StreamId
from headrace.core_log.record import RecordBatch
from headrace.core_log.summary import Sieve


class LogRun(Protocol):
    """Records first..last-1 of a batch."""

    @property
    def batch(self) -> RecordBatch: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


class Source(Protocol):
    """One partition of a stream, as a view sees it."""

    stream_id: StreamId
    partition: int

    @property
    def log_start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def early_end(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def synced_end(self) -> int: ...

    def read(self, offset: int, *, bytes_max: int = ..., end: int | None = ...) -> Sequence[LogRun]: ...

    def pass_over(self, offset: int, sieve: Sieve, *, end: int) -> tuple[int, bool]:
        """Where the next batch begins that may hold something (then True), or how far was looked."""

    def when_committed(self, next_offset: int, done: Callable[[], None]) -> None: ...


class LogHolder(Protocol):
    """Somebody at work on logs, who needs them as they are."""

    @property
    def pins(self) -> Mapping[Source, int]:
        """For each log, the lowest offset that is needed."""


class Tap(Protocol):
    """Somebody who hears of every append to a log, besides its views."""

    # What reaches the log by way of other exchanges is copied into it.
    wants_copies: bool

    def take(self, batch: RecordBatch, first: int, last: int, /) -> None:
        """Records first..last-1 were appended."""

    def wants(self, key: bytes, tags: tuple[str, ...], /) -> bool:
        """Whether anybody there would get a record with this key and these tags now."""
