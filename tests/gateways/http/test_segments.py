"""Segments over HTTP: the manifest, ranges of bytes, who may have them; never a byte above the watermark."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace.core_log.format import SEGMENT_HEAD_SIZE, is_whole, maybe_header, maybe_segment_head

from .conftest import HttpBroker
from .test_app import code

CONFIG = """
[[users]]
name = "reader"
password = "reading"

[[permissions]]
user = "reader"
vhost = "/"
configure = ""
write = ""
read = "^(public|amq.topic)"

[[topic_permissions]]
user = "reader"
vhost = "/"
exchange = "amq.topic"
write = ".*"
read = "^public"
"""
TOPICS = "/api/v1/topics"


@pytest.fixture
def reader(broker: HttpBroker) -> Iterator[httpx.Client]:
    with broker.client(("reader", "reading")) as client:
        yield client


def filled(http: httpx.Client, name: str, count: int = 20, **settings: object) -> None:
    http.post(TOPICS, json={"name": name, **settings}).raise_for_status()
    for number in range(count):
        http.post(f"{TOPICS}/{name}/messages", json={"key": "k", "value": f"{number}" * 100}).raise_for_status()


def manifest(http: httpx.Client, name: str, query: str = "") -> dict[str, object]:
    answer = http.get(f"{TOPICS}/{name}/partitions/0/segments{query}")
    answer.raise_for_status()
    found: dict[str, object] = answer.json()
    return found


def test_manifest_tells_what_lies_where_up_to_the_watermark(http: httpx.Client, name: str) -> None:
    filled(http, name)
    found = manifest(http, name)
    assert found["topic"] == name
    assert found["stream"] == http.get(f"{TOPICS}/{name}").json()["stream"]
    assert (found["first_offset"], found["end_offset"], found["compacted"]) == (0, 20, False)
    (segment,) = found["segments"]  # type: ignore[misc]
    assert (segment["base_offset"], segment["next_offset"], segment["sealed"]) == (0, 20, False)
    assert segment["position"] == SEGMENT_HEAD_SIZE
    assert segment["first_timestamp_us"] <= segment["max_timestamp_us"]


def test_bytes_are_whole_batches_up_to_the_watermark_and_end_there(
    broker: HttpBroker, http: httpx.Client, name: str
) -> None:
    filled(http, name)
    (segment,) = manifest(http, name)["segments"]  # type: ignore[misc]
    answer = http.get(f"{TOPICS}/{name}/partitions/0/segments/0")
    assert answer.status_code == 200
    assert answer.headers["etag"] == f'"{segment["salt"]}"'
    data = answer.content
    head = maybe_segment_head(data[:SEGMENT_HEAD_SIZE])
    assert head is not None and f"{head.salt:016x}" == segment["salt"]
    at, offset = SEGMENT_HEAD_SIZE, 0
    while at < len(data):
        header = maybe_header(data, at, head.salt)
        assert header is not None and header.base_offset == offset and is_whole(data, at, header)
        at, offset = at + header.size, header.next_offset
    assert (at, offset) == (segment["committed_bytes"], 20)
    # The file is longer than that: it is filled ahead.
    (path,) = (broker.data / "streams").glob(f"{_stream(http, name)}/0/*.log")
    assert os.path.getsize(path) > segment["committed_bytes"]


def _stream(http: httpx.Client, name: str) -> str:
    found: str = http.get(f"{TOPICS}/{name}").json()["stream"]
    return found


@pytest.mark.parametrize("first, last", [(0, 63), (64, 64), (100, 10**12)])
def test_range_is_answered_with_that_part(http: httpx.Client, name: str, first: int, last: int) -> None:
    filled(http, name, 5)
    path = f"{TOPICS}/{name}/partitions/0/segments/0"
    whole = http.get(path).content
    part = http.get(path, headers={"range": f"bytes={first}-{last}"})
    assert part.status_code == 206
    assert part.content == whole[first : last + 1]
    end = min(last, len(whole) - 1)
    assert part.headers["content-range"] == f"bytes {first}-{end}/{len(whole)}"


def test_open_range_goes_to_the_end_and_one_behind_it_is_refused(http: httpx.Client, name: str) -> None:
    filled(http, name, 5)
    path = f"{TOPICS}/{name}/partitions/0/segments/0"
    whole = http.get(path).content
    assert http.get(path, headers={"range": "bytes=10-"}).content == whole[10:]
    behind = http.get(path, headers={"range": f"bytes={len(whole)}-"})
    assert code(behind) == "range_not_satisfiable"
    assert behind.headers["content-range"] == f"bytes */{len(whole)}"
    # What is no range we know is as if nobody had asked for one (RFC 9110, 14.2).
    assert http.get(path, headers={"range": "bytes=0-1,4-5"}).status_code == 200


def test_head_tells_the_size_and_the_connection_lives_on(http: httpx.Client, name: str) -> None:
    filled(http, name, 5)
    path = f"{TOPICS}/{name}/partitions/0/segments/0"
    told = http.head(path)
    assert told.status_code == 200 and told.content == b""
    assert int(told.headers["content-length"]) == len(http.get(path).content)


def test_segment_that_was_rewritten_is_not_sent_for_the_one_that_was_planned(http: httpx.Client, name: str) -> None:
    filled(http, name, 5)
    path = f"{TOPICS}/{name}/partitions/0/segments/0"
    assert code(http.get(path, headers={"if-match": '"0123456789abcdef"'})) == "precondition_failed"
    tag = http.get(path).headers["etag"]
    assert http.get(path, headers={"if-match": tag, "range": "bytes=0-7"}).content == b"HRsegm01"


def test_large_download_comes_whole_over_one_connection_and_then_another(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name, "compression": "none"}).raise_for_status()
    for _ in range(3):
        message = {"value": "x" * 3_000_000}
        http.post(f"{TOPICS}/{name}/messages", json=message).raise_for_status()
    path = f"{TOPICS}/{name}/partitions/0/segments/0"
    data = http.get(path).content
    assert len(data) > 9_000_000
    parts = [
        http.get(path, headers={"range": f"bytes={at}-{at + 999_999}"}).content for at in range(0, len(data), 10**6)
    ]
    assert b"".join(parts) == data


def test_manifest_of_what_was_never_written_to_is_empty(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name}).raise_for_status()
    found = manifest(http, name)
    assert (found["segments"], found["first_offset"], found["end_offset"]) == ([], 0, 0)
    assert manifest(http, "exchange:amq.fanout")["segments"] == []


def test_names_are_names_and_numbers_are_numbers(http: httpx.Client, name: str) -> None:
    filled(http, name, 1)
    for topic in ("..", "%2e%2e", "..%2f..%2fetc", "%2fetc%2fpasswd"):
        assert http.get(f"{TOPICS}/{topic}/partitions/0/segments").status_code in (400, 404)
        assert http.get(f"{TOPICS}/{topic}/partitions/0/segments/0").status_code in (400, 404)
    for base in ("..", "..%2fwatermark", "00000000000000000000.log", "-1", "1e3"):
        assert http.get(f"{TOPICS}/{name}/partitions/0/segments/{base}").status_code in (400, 404)
    assert code(http.get(f"{TOPICS}/{name}/partitions/0/segments/7")) == "not_found"
    assert code(http.get(f"{TOPICS}/{name}/partitions/9/segments")) == "not_found"


def test_only_who_may_read_a_topic_gets_its_segments(
    broker: HttpBroker, http: httpx.Client, reader: httpx.Client, name: str
) -> None:
    filled(http, f"private-{name}", 1)
    filled(http, f"public-{name}", 1)
    for path in ("segments", "segments/0"):
        assert code(reader.get(f"{TOPICS}/private-{name}/partitions/0/{path}")) == "forbidden"
        assert reader.get(f"{TOPICS}/public-{name}/partitions/0/{path}").status_code == 200
        with broker.client(None) as nobody:
            assert code(nobody.get(f"{TOPICS}/public-{name}/partitions/0/{path}")) == "unauthorized"


def test_who_may_read_only_some_keys_of_an_exchange_does_not_get_all_of_them(
    http: httpx.Client, reader: httpx.Client
) -> None:
    http.post(f"{TOPICS}/exchange:amq.topic/messages", json={"key": "secret.a", "value": "v"}).raise_for_status()
    assert code(reader.get(f"{TOPICS}/exchange:amq.topic/partitions/0/segments")) == "forbidden"
    assert code(reader.get(f"{TOPICS}/exchange:amq.topic/partitions/0/segments/0")) == "forbidden"
    assert http.get(f"{TOPICS}/exchange:amq.topic/partitions/0/segments").status_code == 200


def test_segments_are_listed_over_a_range(tmp_path: Path) -> None:
    with HttpBroker(tmp_path) as broker, broker.client() as http:
        http.post(TOPICS, json={"name": "t", "retention_bytes": 10**9, "compression": "none"}).raise_for_status()
        http.patch(f"{TOPICS}/t", json={"retention_bytes": 262_144}).raise_for_status()
        for _ in range(4):
            http.post(f"{TOPICS}/t/messages", json={"value": "y" * 50_000}).raise_for_status()
        bases = [one["base_offset"] for one in manifest(http, "t")["segments"]]  # type: ignore[attr-defined]
        assert len(bases) > 1
        (only,) = manifest(http, "t", f"?from={bases[1]}&to={bases[1] + 1}")["segments"]  # type: ignore[misc]
        assert only["base_offset"] == bases[1]
