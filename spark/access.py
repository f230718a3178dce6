"""What a reader of the log asks of wherever its segments lie: names, ends, and where the bytes are. Values.

Three ways lead there, and all speak of the same things: the files of a data directory (access_local.py), a broker's
HTTP door (access_http.py), an archive of sealed segments (access_archive.py). Ends come from the high watermark only,
never from the length of a file. Offsets are integers, an end is exclusive everywhere, and a topic's id tells it from
another that had its name before. What travels to executors (Slice and what is in it) is small, can be pickled and holds
the name of a token, never the token. Neighbours: plan.py cuts slices into tasks, decode.py reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args
from uuid import UUID

from headrace.core_log.errors import Refused, StorageError

AccessKind = Literal["auto", "local", "http", "archive"]
ACCESS_KINDS: tuple[str, ...] = get_args(AccessKind)


class TopicNotFound(Refused):
    """No topic, exchange or queue of this name, or nothing was ever written to it."""


class NotAllowed(Refused):
    """This reader may not read that, or has not said who it is."""


class DataLoss(StorageError):
    """Records that were promised are not there any more: retention took them, or the topic is another one now."""


class BrokerAway(StorageError):
    """The broker does not answer, or not as one would."""


@dataclass(frozen=True, slots=True)
class PartitionEnds:
    """Offsets start..high_watermark-1 can be read now."""

    partition: int
    start: int
    high_watermark: int


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """`name` leads to the same topic whatever else there is. Of a compacted topic not every offset has a record."""

    name: str
    id: UUID
    is_compacted: bool
    partitions: tuple[PartitionEnds, ...]


class SegmentBytes(Protocol):
    """An open segment. Its salt is what its batches carry; another one than a slice says: it was rewritten since."""

    @property
    def salt(self) -> int: ...

    @property
    def path(self) -> str:
        """For messages."""

    @property
    def read_ahead(self) -> int:
        """To ask for fewer bytes at once is no cheaper."""

    def read(self, position: int, length: int) -> bytes:
        """So many bytes from there, fewer only where the segment ends. DataLoss when it is gone, or was used again."""

    def check(self) -> None:
        """Raise DataLoss if these bytes are another segment's by now: asked before anything is called corrupt."""

    def mend(self) -> bool:
        """Whether there are other bytes from now on, which may be the right ones: asked of what would be corrupt."""

    def close(self) -> None: ...


class Location(Protocol):
    """Where a segment can be read: a value that travels to the executor, which opens it there."""

    def open(self) -> SegmentBytes:
        """Raises DataLoss when the segment is not there any more, or belongs to another topic."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Batches of one segment that lie behind each other: bytes position..end_position-1, all below the watermark.

    The first batch begins at first_offset, the last one ends below next_offset. Timestamps: no record is newer than
    the last one; the first is that of the first batch, or None. `cuts` are further places at which a batch begins, as
    (offset, position): a task may be cut there.
    """

    # Tried in this order.
    locations: tuple[Location, ...]
    base_offset: int
    salt: int
    position: int
    end_position: int
    first_offset: int
    next_offset: int
    first_timestamp_us: int | None = None
    max_timestamp_us: int | None = None
    is_sealed: bool = False
    cuts: tuple[tuple[int, int], ...] = ()

    @property
    def byte_count(self) -> int:
        return self.end_position - self.position


class Access(Protocol):
    def topics(self) -> list[str]:
        """Names of what this reader may read, sorted."""

    def topic(self, name: str) -> TopicInfo:
        """What there is to read now. Raises TopicNotFound, NotAllowed."""

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        """The first record at or after this time; None when there is none."""

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[Slice]:
        """Where offsets start..end-1 lie, in order and without holes; the first and last may reach beyond them.

        Raises DataLoss when `start` lies below the first offset there is, ValueError when `end` lies above the
        watermark: nobody may know what is there.
        """


def open_access(
    *,
    path: str | None = None,
    url: str | None = None,
    archive: str | None = None,
    access: str = "auto",
    token_name: str | None = None,
) -> Access:
    """The way to the segments that these options mean.

    `path` is a broker's data directory, `url` its HTTP door, `archive` the URI or path that `headrace log archive` has
    written to. auto: the directory where this machine can read it, else the door, else the archive alone; where an
    archive is given as well, it has what retention took. `token_name` names a login that each machine has (tokens.py).
    """
    if access not in ACCESS_KINDS:
        raise ValueError(f"access is {', '.join(ACCESS_KINDS)}, not {access!r}")
    needed = {"local": ("path", path), "http": ("url", url), "archive": ("archive", archive)}
    if access in needed and needed[access][1] is None:
        raise ValueError(f"access={access} needs {needed[access][0]!r}")
    # Whoever reads files needs nothing of the others, so each is loaded when it is wanted.
    live: Access | None = None
    if access in ("auto", "local") and path is not None:
        from headrace.spark.access_local import LocalAccess, is_readable

        if access == "local" or url is None or is_readable(path):
            live = LocalAccess(path)
    if live is None and access in ("auto", "http") and url is not None:
        from headrace.spark.access_http import HttpAccess

        live = HttpAccess(url, token_name=token_name)
    if archive is None:
        if live is None:
            raise ValueError("say where to read from: 'path', 'url' or 'archive'")
        return live
    from headrace.spark.access_archive import ArchiveAccess, WithArchive

    archived = ArchiveAccess(archive)
    return archived if live is None else WithArchive(live, archived)


def covering(slices: Sequence[Slice], topic: str, partition: int, start: int, end: int) -> list[Slice]:
    """Those that hold offsets start..end-1, if they hold all of them. Raises DataLoss."""
    found = [one for one in slices if one.next_offset > start and one.first_offset < end]
    at = start
    for one in found:
        if one.first_offset > at:
            break
        at = max(at, one.next_offset)
    if at < end:
        raise DataLoss(f"offsets {at} to {end - 1} of partition {partition} of '{topic}' are not there any more")
    return found
