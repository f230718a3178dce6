"""Records as JSON and back: any octets survive, and what is no base64 or no string is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.record import PERSISTENT, RELOCATED, Protocol, RecordBatch
from headrace.gateways.http.records import Message, octets, shown, time_text, value_octets, written
from headrace.gateways.http.words import Plain


class NoWords:
    def read(self, key: bytes, properties: bytes, attributes: int) -> Plain:
        return Plain({"read": properties.decode()}, {"h": 1})

    def write(self, headers: object, *, content_type: object, tags: object, persistent: bool) -> bytes:
        raise NotImplementedError


@given(st.binary(), st.booleans())
def test_octets_that_are_written_are_read_back(data: bytes, base64: bool) -> None:
    text, encoding = written(data, base64=base64)
    assert octets(text, encoding) == data
    assert encoding == "base64" if base64 else True


@given(st.binary())
def test_octets_are_text_exactly_when_they_are_utf_8(data: bytes) -> None:
    try:
        data.decode()
        expected = "text"
    except UnicodeDecodeError:
        expected = "base64"
    assert written(data)[1] == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(JSON)
def test_json_value_is_stored_as_its_text_and_a_string_as_itself(value: object) -> None:
    try:
        raw = msgspec.Raw(msgspec.json.encode(value))
    except UnicodeEncodeError:
        return
    stored = value_octets(raw, None)
    if isinstance(value, str):
        assert stored == value.encode()
    else:
        assert msgspec.json.decode(stored) == value
    assert msgspec.json.decode(value_octets(raw, "json")) == value


@pytest.mark.parametrize("text", ["!", "a", "abc", "YWJj\n", "ä"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not base64"):
        octets(text, "base64")


def test_value_that_is_no_string_is_neither_text_nor_base64() -> None:
    for encoding in ("text", "base64"):
        with pytest.raises(ValueError, match="is a string"):
            value_octets(msgspec.Raw(b"5"), encoding)  # type: ignore[arg-type]
    assert value_octets(msgspec.Raw(b""), "text") == b""


@pytest.mark.parametrize(
    "raw", [b'"\\ud800"', b'"\xff"', b'{"a": "\xff"}', b'["\\udc00"]', b"[" * 10_000 + b"]" * 10_000]
)
@pytest.mark.parametrize("encoding", [None, "json"])
def test_value_whose_inside_is_no_json_is_refused(raw: bytes, encoding: str | None) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        value_octets(msgspec.Raw(raw), encoding)  # type: ignore[arg-type]


def one(**fields: object) -> RecordBatch:
    batch = RecordBatch(7, 1)
    known = {"timestamp_us": 1_000_001, "attributes": PERSISTENT}
    batch.add([b"k"], [b"p"], [b"\xff"], **(known | fields))  # type: ignore[arg-type]
    return batch


def test_record_of_a_topic_is_shown_with_its_headers() -> None:
    batch = one(headers=[((b"a", b"\xff"), (b"content-type", b"text/plain"))], tags=("x",), expiry_us=2_000_000)
    assert shown(NoWords(), 3, batch, 0) == Message(
        partition=3,
        offset=7,
        timestamp="1970-01-01T00:00:01.000001Z",
        key="k",
        value="/w==",
        encoding="base64",
        headers={"a": {"base64": "/w=="}},
        tags=["x"],
        properties={"content_type": "text/plain"},
        expires_at="1970-01-01T00:00:02.000000Z",
    )


def test_record_of_another_protocol_is_shown_in_its_plain_words() -> None:
    message = shown(NoWords(), 0, one(attributes=int(Protocol.AMQP) | RELOCATED), 0)
    assert (message.protocol, message.properties, message.headers) == ("amqp", {"read": "p"}, {"h": 1})
    assert message.relocated


def test_of_the_brokers_notes_on_a_record_only_those_that_consumers_are_told_are_shown() -> None:
    notes = (
        (b"x-origin-stream", b"s"),
        (b"x-origin-partition", b"2"),
        (b"x-origin-offset", b"9"),
        (b"x-origin-exchange", b"e"),
        (b"x-attempt", b"3"),
        (b"x-reason", b"rejected"),
        (b"attempts", b"1 rejected"),
        (b"timestamp", b"1"),
        (b"h", b"note"),
    )
    message = shown(NoWords(), 0, one(attributes=int(Protocol.AMQP), headers=[notes]), 0)
    assert message.headers == {
        "h": 1,
        "x-origin-stream": "s",
        "x-origin-partition": 2,
        "x-origin-offset": 9,
        "x-attempt": 3,
        "x-reason": "rejected",
    }


def test_headers_of_a_topics_record_are_its_publishers_whatever_their_names() -> None:
    given = ((b"timestamp", b"noon"), (b"attempts", b"many"), (b"x-attempt", b"first"))
    headers = shown(NoWords(), 0, one(headers=[given]), 0).headers
    assert headers == {"timestamp": "noon", "attempts": "many", "x-attempt": "first"}


@pytest.mark.parametrize(("time_us", "text"), [(0, "1970-01-01T00:00:00.000000Z"), (-1, "1969-12-31T23:59:59.999999Z")])
def test_time_is_rfc_3339(time_us: int, text: str) -> None:
    assert time_text(time_us) == text


def test_time_beyond_the_calendar_is_told_all_the_same() -> None:
    assert time_text(2**62).startswith("@")
