"""Sealed segments in an archive, and how they get there. Driver: pyarrow.fs, files.

    <archive>/streams/<uuid>/stream.json                            what the topic is, as the broker's directory has it
    <archive>/streams/<uuid>/<partition>/<base>.log                 a segment, byte for byte, cut behind its last batch
    <archive>/streams/<uuid>/<partition>/<base>-<next>.json         its manifest entry: it is there, whole, for ever

A segment is sent first and its entry written afterwards; without an entry it does not count, and the next run sends it
again. With one it is never touched again, so a run that is repeated or was interrupted does what is left and no more.
Only what lies below the watermark in a segment that grows no more is sent, and every batch is checked on the way: the
archive never holds what the log could not prove. The URI is any that pyarrow.fs knows (a path, s3://, gs://, hdfs://).
Neighbours: access_archive.py reads it, commands/log.py calls it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from pyarrow import fs

from headrace.core_log.errors import CorruptLog, StorageError
from headrace.core_log.format import is_whole, maybe_header
from headrace.spark.access import DataLoss, SegmentBytes, Slice
from headrace.spark.access_local import LocalAccess

FORMAT = 1
STREAMS = "streams"
SPEC = "stream.json"
CHUNK = 8 * 1024 * 1024


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of the archive."""

    stream: UUID
    partition: int
    base_offset: int
    next_offset: int
    salt: str
    position: int
    size: int
    first_timestamp_us: int | None
    max_timestamp_us: int | None
    cuts: tuple[tuple[int, int], ...] = ()
    format: int = FORMAT


@dataclass(slots=True)
class Report:
    """What a run did."""

    sent: int = 0
    sent_bytes: int = 0
    known: int = 0
    # Taken by retention before they could be sent.
    gone: int = 0


def opened(uri: str) -> tuple[Any, str]:
    """(filesystem, root) of an archive. StorageError for a URI that pyarrow cannot open."""
    try:
        # A path is made absolute: pyarrow takes no other.
        found, root = fs.FileSystem.from_uri(uri if "://" in uri else Path(uri).absolute().as_uri())
    except (OSError, ValueError, NotImplementedError) as error:
        raise StorageError(f"{uri}: cannot be opened as an archive: {error}") from error
    return found, root.rstrip("/")


def log_path(root: str, stream: UUID, partition: int, base_offset: int) -> str:
    return f"{root}/{STREAMS}/{stream}/{partition}/{base_offset:020d}.log"


def entry_path(root: str, entry: Entry) -> str:
    folder = f"{root}/{STREAMS}/{entry.stream}/{entry.partition}"
    return f"{folder}/{entry.base_offset:020d}-{entry.next_offset:020d}.json"


def archive(
    path: str, uri: str, topics: Iterable[str] | None = None, *, progress: Callable[[str, Entry], None] | None = None
) -> Report:
    """Send what is sealed and not in the archive yet, of these topics or of all that a data directory holds.

    May run beside a broker. Raises CorruptLog for a segment that is not what was written, TopicNotFound.
    """
    access = LocalAccess(path)
    files, root = opened(uri)
    report = Report()
    for name in access.topics() if topics is None else topics:
        info = access.topic(name)
        _put(files, f"{root}/{STREAMS}/{info.id}/{SPEC}", access.spec_bytes(name))
        for ends in info.partitions:
            known = {base for base, _next in listed(files, root, info.id, ends.partition)}
            for one in access.sealed(name, ends.partition):
                if one.base_offset in known:
                    report.known += 1
                    continue
                entry = _entry(info.id, ends.partition, one)
                try:
                    _send(files, log_path(root, info.id, ends.partition, one.base_offset), one)
                except DataLoss:
                    report.gone += 1
                    continue
                _put(files, entry_path(root, entry), msgspec.json.encode(entry))
                report.sent += 1
                report.sent_bytes += entry.size
                if progress is not None:
                    progress(info.name, entry)
    return report


def _entry(stream: UUID, partition: int, one: Slice) -> Entry:
    return Entry(
        stream=stream,
        partition=partition,
        base_offset=one.base_offset,
        next_offset=one.next_offset,
        salt=f"{one.salt:016x}",
        position=one.position,
        size=one.end_position,
        first_timestamp_us=one.first_timestamp_us,
        max_timestamp_us=one.max_timestamp_us,
        cuts=one.cuts,
    )


def _send(files: Any, path: str, one: Slice) -> None:
    """A segment's bytes up to its end, each batch checked before it goes."""
    files.create_dir(path.rpartition("/")[0], recursive=True)
    source = one.locations[0].open()
    if source.salt != one.salt:
        raise DataLoss(f"{source.path} was rewritten a moment ago")
    try:
        with files.open_output_stream(path) as target:
            target.write(source.read(0, one.position))
            for chunk in _checked(source, one):
                target.write(chunk)
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error
    finally:
        source.close()


def _checked(source: SegmentBytes, one: Slice) -> Iterator[bytes]:
    position, offset = one.position, one.first_offset
    while position < one.end_position:
        data = source.read(position, min(CHUNK, one.end_position - position))
        at = 0
        while (header := maybe_header(data, at, one.salt)) is not None:
            if at + header.size > len(data):
                if at:
                    break
                data = source.read(position, header.size)
            if header.base_offset != offset or not is_whole(data, at, header):
                break
            at += header.size
            offset = header.next_offset
        if not at:
            source.check()
            raise CorruptLog(source.path, position, offset, "no whole batch where one must be")
        yield data[:at]
        position += at
    if offset != one.next_offset:
        raise CorruptLog(source.path, position, offset, f"the segment must lead to offset {one.next_offset}")


def _put(files: Any, path: str, data: bytes) -> None:
    """A small file, whole or not at all."""
    try:
        files.create_dir(path.rpartition("/")[0], recursive=True)
        temporary = f"{path}.part"
        with files.open_output_stream(temporary) as target:
            target.write(data)
        files.move(temporary, path)
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error


def listed(files: Any, root: str, stream: UUID, partition: int) -> list[tuple[int, int]]:
    """(base offset, next offset) of what is archived of a partition, in order."""
    folder = f"{root}/{STREAMS}/{stream}/{partition}"
    found = []
    for one in infos(files, folder):
        stem, dot, kind = one.base_name.partition(".")
        base, dash, following = stem.partition("-")
        if dot and dash and kind == "json" and base.isdecimal() and following.isdecimal():
            found.append((int(base), int(following)))
    return sorted(found)


def infos(files: Any, folder: str) -> list[Any]:
    try:
        found: list[Any] = files.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    except OSError as error:
        raise StorageError(f"{folder}: {error}") from error
    return found


def read_file(files: Any, path: str) -> bytes:
    """FileNotFoundError when it is not there."""
    try:
        with files.open_input_file(path) as source:
            data: bytes = source.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error
    return data
