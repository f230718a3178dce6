"""A broker's HTTP door as a way to the segments: one manifest to plan by, ranges of bytes to read. Driver: http.client.

Nothing but the standard library, since executors need it too. Executors hold no state: a segment is opened by asking
for its bytes. Ranges are of 1 to 8 MiB; a batch that a range cuts is asked for again from its beginning. Whatever only
the moment refuses (a broken connection, a broker that starts again) is tried again, with pauses that grow; everything
here only reads. The entity tag of a segment is its salt, so bytes of a rewritten one are never taken for those planned.
Neighbours: gateways/http/segments.py answers, tokens.py says who asks.
"""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit
from uuid import UUID

from headrace.core_log.errors import StorageError
from headrace.core_log.format import SEGMENT_HEAD_SIZE, maybe_segment_head
from headrace.spark.access import (
    BrokerAway,
    DataLoss,
    NotAllowed,
    PartitionEnds,
    Slice,
    TopicInfo,
    TopicNotFound,
    covering,
)
from headrace.spark.tokens import authorization, check_token_name

TIMEOUT_S = 60.0
# Tried so often in all, with so long between the first two and twice as long each time after.
ATTEMPTS = 5
PAUSE_S = 0.2
LIST_MAX = 10_000
# A request for less costs as much.
READ_AHEAD = 2 * 1024 * 1024
_PORTS = {"http": 15672, "https": 15671}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Door:
    """One connection to a broker, opened when it is needed and again when it broke. For one thread."""

    def __init__(self, url: str, token_name: str | None) -> None:
        """ValueError for a URL that is none, or that holds a password for everybody to see."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("the url is http://host:port or https://host:port")
        if parts.username is not None or parts.password is not None:
            raise ValueError("no user or password in the url, which others can see: name a token")
        if token_name is not None:
            check_token_name(token_name)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._prefix = parts.path.rstrip("/")
        self._token_name = token_name
        port = parts.port or _PORTS[parts.scheme]
        self._connection = (
            http.client.HTTPSConnection(parts.hostname, port, timeout=TIMEOUT_S, context=ssl.create_default_context())
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT_S)
        )

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Response:
        """What the broker answers, whatever that is. Raises BrokerAway."""
        return self.request("GET", path, headers=headers)

    def request(
        self, method: str, path: str, *, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """The same for what may be done twice without harm: it is, when nobody knows whether it was done."""
        sent = {"accept": "*/*", **(headers or {})}
        known = authorization(self._token_name)
        if known is not None:
            sent["authorization"] = known
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            sent["content-type"] = "application/json"
        pause_s = PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._connection.request(method, self._prefix + path, data, sent)
                found = self._connection.getresponse()
                answer = Response(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
                if found.status != 503 or attempt == ATTEMPTS:
                    return answer
            except ssl.SSLError as error:
                self._connection.close()
                raise BrokerAway(f"{self.url}: TLS fails: {error.reason or error}") from error
            except (OSError, http.client.HTTPException) as error:
                # What is left of the exchange must not be taken for the answer to the next one.
                self._connection.close()
                if attempt == ATTEMPTS:
                    what = getattr(error, "strerror", None) or str(error) or type(error).__name__
                    raise BrokerAway(f"no broker answers at {self.url}: {what}") from error
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")

    def json(self, method: str, path: str, *, body: object = None) -> Any:
        """What the broker answers, None if that is nothing. Raises TopicNotFound, NotAllowed, StorageError."""
        answer = self.request(method, path, body=body)
        if answer.status < 400 and not answer.body:
            return None
        try:
            document = json.loads(answer.body)
        except ValueError:
            raise BrokerAway(f"{self.url}: what answers there is no Headrace broker (HTTP {answer.status})") from None
        if answer.status < 400:
            return document
        raise refused(answer.status, document)

    def close(self) -> None:
        self._connection.close()

    def __del__(self) -> None:
        # Who plans a query has no end to close it at.
        if hasattr(self, "_connection"):
            self._connection.close()


def refused(status: int, document: Any) -> Exception:
    """The error that a problem document means."""
    known = document if isinstance(document, dict) else {}
    text = str(known.get("detail") or known.get("title") or f"HTTP {status}")
    match status:
        case 401 | 403 | 429:
            return NotAllowed(text)
        case 404:
            return TopicNotFound(text)
        case 400 | 409 | 412 | 416 | 422:
            return ValueError(text)
        case _:
            return StorageError(text)


class HttpAccess:
    def __init__(self, url: str, *, token_name: str | None = None) -> None:
        self._door = Door(url, token_name)
        self._token_name = token_name

    def topics(self) -> list[str]:
        found: list[str] = []
        while True:
            after = quote(found[-1], safe="") if found else ""
            page = self._door.json("GET", f"/api/v1/topics?limit={LIST_MAX}&after={after}")
            found += [one["topic"] for one in page["topics"]]
            if not page["more"]:
                return sorted(found)

    def topic(self, name: str) -> TopicInfo:
        found = self._door.json("GET", _path(name))
        partitions = tuple(
            PartitionEnds(one["partition"], one["first_offset"], one["end_offset"]) for one in found["partition_list"]
        )
        return TopicInfo(found["topic"], UUID(found["stream"]), found["compacted"], partitions)

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        time_text = quote((_EPOCH + timedelta(microseconds=timestamp_us)).isoformat(timespec="microseconds"), safe="")
        path = f"{_path(topic)}/partitions/{partition}/messages?limit=1&bytes_max=1&timestamp={time_text}"
        page = self._door.json("GET", path)
        offset: int = page["offset"]
        return offset if offset < page["end_offset"] else None

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[Slice]:
        path = f"{_path(topic)}/partitions/{partition}/segments"
        found = self._door.json("GET", f"{path}?from={start}&to={end}")
        if start < found["first_offset"]:
            what = f"offset {start} of partition {partition} of '{topic}' is not there any more"
            raise DataLoss(f"{what}: its records begin at {found['first_offset']}")
        if end > found["end_offset"]:
            raise ValueError(f"offset {end} lies above the watermark {found['end_offset']}")
        slices = []
        for one in found["segments"]:
            base = one["base_offset"]
            location = HttpSegment(
                self._door.url, f"{path}/{base}", UUID(found["stream"]), partition, base, self._token_name
            )
            slices.append(
                Slice(
                    locations=(location,),
                    base_offset=base,
                    salt=int(one["salt"], 16),
                    position=one["position"],
                    end_position=one["committed_bytes"],
                    first_offset=base,
                    next_offset=one["next_offset"],
                    first_timestamp_us=one["first_timestamp_us"],
                    max_timestamp_us=one["max_timestamp_us"],
                    is_sealed=one["sealed"],
                    cuts=tuple((offset, position) for offset, position in one["cuts"]),
                )
            )
        return covering(slices, topic, partition, start, end)


def _path(topic: str) -> str:
    return f"/api/v1/topics/{quote(topic, safe='')}"


# -- a segment ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpSegment:
    """A segment behind a broker's door."""

    url: str
    path: str
    topic_id: UUID
    partition: int
    base_offset: int
    token_name: str | None

    def open(self) -> "HttpFile":
        return HttpFile(self)


class HttpFile:
    __slots__ = ("_door", "_location", "path", "salt")
    read_ahead = READ_AHEAD

    def __init__(self, location: HttpSegment) -> None:
        self._location = location
        self._door = _door(location.url, location.token_name)
        self.path = location.url + location.path
        self.salt = self._salt()

    def read(self, position: int, length: int) -> bytes:
        """Fewer bytes only where the committed part ends."""
        if length <= 0:
            return b""
        answer = self._door.get(
            self._location.path,
            {"range": f"bytes={position}-{position + length - 1}", "if-match": f'"{self.salt:016x}"'},
        )
        match answer.status:
            case 206:
                return answer.body
            case 416:
                return b""
            case 404 | 412:
                raise self._gone()
        raise self._refused(answer)

    def check(self) -> None:
        if self._salt() != self.salt:
            raise self._gone()

    def mend(self) -> bool:
        """The broker has put back what there was."""
        return False

    def close(self) -> None:
        """The connection stays for the next segment."""

    def _salt(self) -> int:
        answer = self._door.get(self._location.path, {"range": f"bytes=0-{SEGMENT_HEAD_SIZE - 1}"})
        if answer.status == 404:
            raise self._gone()
        if answer.status != 206:
            raise self._refused(answer)
        head = maybe_segment_head(answer.body)
        mine = self._location
        if head is None or (head.stream_id, head.partition, head.base_offset) != (
            mine.topic_id.bytes,
            mine.partition,
            mine.base_offset,
        ):
            raise self._gone()
        return head.salt

    def _gone(self) -> DataLoss:
        return DataLoss(f"{self.path} is not there any more: retention took it, or its topic was deleted")

    def _refused(self, answer: Response) -> Exception:
        try:
            document = json.loads(answer.body)
        except ValueError:
            document = None
        return refused(answer.status, document)


_threads = threading.local()


def _door(url: str, token_name: str | None) -> Door:
    """A connection of this thread's own, kept from one segment to the next."""
    known: dict[tuple[str, str | None], Door] = _threads.__dict__.setdefault("doors", {})
    if (url, token_name) not in known:
        known[url, token_name] = Door(url, token_name)
    return known[url, token_name]
