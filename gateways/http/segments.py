"""Segments over HTTP: what a partition's log is made of, and its bytes as they are stored. Driver.

    GET /api/v1/topics/{topic}/partitions/{partition}/segments            the manifest
    GET /api/v1/topics/{topic}/partitions/{partition}/segments/{base}     bytes of one, with Range

Nothing above the high watermark is told of or sent (V1). A segment is named by its base offset, a number: no name from
outside becomes a file name. Its salt is its entity tag: who asks with If-Match gets no bytes of a file that was
rewritten since. Who may read only some keys of an exchange may not have its segments, which hold them all.
Neighbours: download.py sends, spark/access_http.py is the client, core_log/README.md draws the bytes.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import trio
from msgspec import Meta

from headrace.core_log.format import FLAG_GAP, SEGMENT_HEAD_SIZE
from headrace.core_log.index import NEVER
from headrace.core_log.log import PartitionLog
from headrace.core_log.segment import Segment
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.topics import Place, TopicKind
from headrace.gateways.http.download import Download
from headrace.gateways.http.operations import Answer, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.topics import PATH, PartitionPath, found
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

# Places to cut a segment at lie about so far apart.
CUT_BYTES = 4 * 1024 * 1024
_OFFSET_MAX = 2**62
_PER_TURN = 16
_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})?")


class SegmentPath(PartitionPath, frozen=True, kw_only=True):
    base: Annotated[int, Meta(ge=0, le=_OFFSET_MAX, description="the segment's `base_offset`")]


class ManifestQuery(Parameters, frozen=True, kw_only=True, rename={"start": "from", "end": "to"}):
    start: Annotated[int, Meta(ge=0, le=_OFFSET_MAX, description="segments that hold this offset or later ones")] = 0
    end: Annotated[
        Annotated[int, Meta(ge=0, le=_OFFSET_MAX)] | None, Meta(description="and offsets below this one")
    ] = None


class SegmentOut(Answer, frozen=True, kw_only=True):
    base_offset: int
    next_offset: Annotated[int, Meta(description="where its committed batches end")]
    salt: Annotated[str, Meta(description="what its batches carry, 16 hex digits; also its entity tag")]
    position: Annotated[int, Meta(description="the byte at which its first batch begins")]
    committed_bytes: Annotated[int, Meta(description="no byte from here on is sent")]
    first_timestamp_us: Annotated[int | None, Meta(description="of its first batch, if that holds records")]
    max_timestamp_us: Annotated[int | None, Meta(description="no record is newer")]
    sealed: Annotated[bool, Meta(description="it grows no more")]
    cuts: Annotated[list[tuple[int, int]], Meta(description="(offset, byte) of batches that begin within it")]


class Manifest(Answer, frozen=True, kw_only=True):
    topic: str
    stream: Annotated[UUID, Meta(description="the same name later may be another stream")]
    partition: int
    compacted: Annotated[bool, Meta(description="not every offset has a record")]
    first_offset: int
    end_offset: Annotated[int, Meta(description="where readers stop")]
    segments: list[SegmentOut]


async def list_segments(call: Call[PartitionPath, ManifestQuery, None]) -> Reply:
    door, query = call.door, call.query
    place = _found(door, call.visitor, call.path.topic)
    log = door.topics.log_at(place, call.path.partition)
    segments: list[SegmentOut] = []
    if log is not None:
        end = int(log.high_watermark) if query.end is None else min(query.end, log.high_watermark)
        for number, segment in enumerate(log.segments):
            if segment.end_offset <= max(query.start, log.log_start) or segment.base_offset >= end:
                continue
            # Others had their turn: retention may have been one of them.
            if segment in log.segments and (shown := _shown(log, segment)) is not None:
                segments.append(shown)
            if number % _PER_TURN == 0:
                await trio.lowlevel.checkpoint()
    return Reply(
        Manifest(
            topic=place.public_name,
            stream=place.stream_id,
            partition=call.path.partition,
            compacted=log is not None and log.config.cleanup == "compact",
            first_offset=0 if log is None else log.log_start,
            end_offset=0 if log is None else log.high_watermark,
            segments=segments,
        )
    )


async def get_segment(call: Call[SegmentPath, Parameters, None]) -> Reply:
    door, base = call.door, call.path.base
    place = _found(door, call.visitor, call.path.topic)
    log = door.topics.log_at(place, call.path.partition)
    segment = None
    if log is not None:
        segment = next((one for one in log.segments if one.base_offset == base), None)
    if log is None or segment is None:
        raise Problem(Code.NOT_FOUND, f"no segment begins at offset {base}: it was removed, or never did")
    tag = f'"{segment.salt:016x}"'
    if call.headers.get("if-match", tag) not in (tag, "*"):
        raise Problem(Code.PRECONDITION_FAILED, "the segment was rewritten", headers={"etag": tag})
    _next_offset, size = _committed(log, segment)
    headers = {"etag": tag, "accept-ranges": "bytes"}
    asked = call.headers.get("range")
    first, end, status = 0, size, 200
    if asked is not None and (wanted := _RANGE.fullmatch(asked.strip())) is not None:
        first = int(wanted[1])
        end = min(size, int(wanted[2]) + 1) if wanted[2] else size
        if first >= end:
            raise Problem(
                Code.RANGE_NOT_SATISFIABLE,
                f"{size} bytes of the segment are committed",
                headers={"content-range": f"bytes */{size}", "etag": tag},
            )
        status = 206
        headers["content-range"] = f"bytes {first}-{end - 1}/{size}"
    # Any other range is not understood, and then the whole is the answer (RFC 9110, 14.2).
    download = Download(segment.file, first, end - first)
    return Reply(download, status=status, headers=headers, media_type="application/octet-stream")


def _found(door: "HttpDoor", visitor: Visitor, name: str) -> Place:
    place = found(door, visitor, Right.READ, name)
    if place.kind is TopicKind.EXCHANGE and visitor.access.narrows_keys(visitor.name, place.vhost, place.name):
        what = f"user '{visitor.name}' may read only some keys of '{place.name}'"
        raise Problem(Code.FORBIDDEN, f"{what}, and its segments hold them all: read its messages instead")
    return place


def _shown(log: PartitionLog, segment: Segment) -> SegmentOut | None:
    next_offset, size = _committed(log, segment)
    if size <= SEGMENT_HEAD_SIZE:
        return None
    index = segment.index
    assert index is not None, "it was looked for the end just now"
    _position, first = next(segment.headers())
    return SegmentOut(
        base_offset=segment.base_offset,
        next_offset=next_offset,
        salt=f"{segment.salt:016x}",
        position=SEGMENT_HEAD_SIZE,
        committed_bytes=size,
        first_timestamp_us=None if first.flags & FLAG_GAP else first.first_timestamp,
        max_timestamp_us=None if index.max_timestamp == NEVER else index.max_timestamp,
        sealed=segment is not log.segments[-1],
        cuts=list(_cuts(segment, size)),
    )


def _committed(log: PartitionLog, segment: Segment) -> tuple[int, int]:
    """Where the committed batches of a segment end, as offset and byte."""
    interval = log.config.index_interval_bytes
    if segment.index is None:
        segment.locate(segment.base_offset, interval)
    assert segment.index is not None
    watermark = int(log.high_watermark)
    if segment.end_offset <= watermark:
        return segment.end_offset, segment.end_position
    offset, position = segment.index.position_before(watermark) or (segment.base_offset, SEGMENT_HEAD_SIZE)
    for at, header in segment.headers(position):
        if header.next_offset > watermark:
            break
        offset, position = header.next_offset, at + header.size
    return offset, position


def _cuts(segment: Segment, size: int) -> Iterator[tuple[int, int]]:
    assert segment.index is not None
    last = 0
    for offset, position in zip(segment.index.offsets, segment.index.positions, strict=True):
        if position - last >= CUT_BYTES and position < size:
            yield offset, position
            last = position


def operations() -> list[Operation]:
    path = f"{PATH}/{{topic}}/partitions/{{partition}}/segments"
    return [
        Operation(
            "GET",
            path,
            list_segments,
            "List segments of a partition",
            "Where the bytes of which offsets are, up to the high watermark; `from` and `to` narrow it down.",
            parameters=PartitionPath,
            query=ManifestQuery,
            answers={200: Manifest},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "GET",
            f"{path}/{{base}}",
            get_segment,
            "Bytes of a segment",
            "As they are stored, up to the high watermark. `Range: bytes=first-last` for a part, best of 1 to 8 MiB; "
            "`If-Match` with the salt in quotes, so as not to get bytes of a segment that was rewritten since.",
            parameters=SegmentPath,
            answers={200: None, 206: None},
            media_type="application/octet-stream",
            problems=(Code.NOT_FOUND, Code.PRECONDITION_FAILED, Code.RANGE_NOT_SATISFIABLE),
        ),
    ]
