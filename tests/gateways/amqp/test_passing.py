"""Frames found in passing: the same ones wherever the octets are cut, and whole contents only."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from headrace.gateways.amqp.frames import HEARTBEAT_FRAME, _with_content, encode_ack, encode_deliver_run, encode_method
from headrace.gateways.amqp.methods import encode_payload, make
from headrace.gateways.amqp.passing import HOLD_BYTES, Passing

FRAME_MAX = 4096
PROPERTIES = b"\x10\x00\x02"


class Found:
    def __init__(self) -> None:
        self.methods: list[tuple[int, bytes]] = []
        # How many contents, and the last one's method, on each channel.
        self.contents: dict[int, tuple[int, bytes]] = {}
        self.settled: dict[int, bytes] = {}
        self.headers: list[tuple[int, bytes]] = []

    def found_method(self, channel: int, payload: bytes) -> None:
        self.methods.append((channel, payload))

    def found_settling(self, channel: int, payload: bytes) -> None:
        self.settled[channel] = payload

    def found_contents(self, channel: int, payload: bytes, count: int) -> None:
        self.contents[channel] = (self.contents.get(channel, (0, b""))[0] + count, payload)

    def found_content(self, channel: int, payload: bytes, header: bytes) -> None:
        self.found_contents(channel, payload, 1)
        self.headers.append((channel, header))

    def all(self) -> object:
        return self.methods, self.contents, self.settled


def publish(channel: int, key: str, body: bytes) -> bytes:
    payload = encode_payload(make(commands.Basic.Publish, exchange="e", routing_key=key))
    return _with_content(channel, payload, PROPERTIES, body, FRAME_MAX)


def deliveries(channel: int, first: int, sizes: list[int]) -> bytes:
    count = len(sizes)
    return encode_deliver_run(
        channel,
        b"consumer",
        first,
        [False] * count,
        [b""] * count,
        [b"q"] * count,
        [PROPERTIES] * count,
        [b"\xce" * size for size in sizes],
        FRAME_MAX,
    )


pieces = st.one_of(
    st.builds(publish, st.integers(1, 3), st.sampled_from(["k", "key"]), st.binary(max_size=9000)),
    st.builds(lambda n, body, count: publish(n, "k", body) * count, st.integers(1, 3), st.binary(), st.integers(1, 40)),
    st.builds(deliveries, st.integers(1, 3), st.integers(1, 1 << 60), st.lists(st.integers(0, 300), min_size=1)),
    st.builds(
        lambda n, first, size, count: deliveries(n, first, [size] * count),
        st.integers(1, 3),
        st.integers(1, 1 << 60),
        st.integers(0, 300),
        st.integers(1, 60),
    ),
    st.builds(
        lambda n, tag, count: encode_ack(n, tag, False) * count,
        st.integers(1, 3),
        st.integers(1, 99),
        st.integers(1, 5),
    ),
    st.builds(lambda n: encode_method(n, make(commands.Basic.Get, queue="q")), st.integers(1, 3)),
    st.just(HEARTBEAT_FRAME),
)


@given(st.lists(pieces, max_size=8), st.lists(st.integers(0, 60_000)))
def test_wherever_the_octets_are_cut_the_same_is_found_and_handed_on(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    at_once, in_pieces = Found(), Found()
    assert Passing(at_once, frame_max=FRAME_MAX).receive(data) == data
    passing = Passing(in_pieces, frame_max=FRAME_MAX)
    handed = b""
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(edges):
        handed += passing.receive(data[start:end])
        assert passing.held_bytes < HOLD_BYTES + FRAME_MAX + 8
    assert handed == data
    assert in_pieces.all() == at_once.all()


@given(st.integers(1, 200), st.integers(0, 500), st.integers(1, 1 << 50))
def test_the_last_tag_and_the_number_of_a_run_are_told(count: int, size: int, first: int) -> None:
    found = Found()
    Passing(found, frame_max=FRAME_MAX).receive(deliveries(1, first, [size] * count))
    told, payload = found.contents[1]
    assert told == count
    assert int.from_bytes(payload[13:21], "big") == first + count - 1


@given(st.lists(st.integers(0, 2000), max_size=5))
def test_of_a_channel_that_is_watched_each_content_is_told_with_its_header(cuts: list[int]) -> None:
    payload = encode_payload(make(commands.Basic.Publish, routing_key="q"))
    data = _with_content(1, payload, PROPERTIES, b"body", FRAME_MAX) * 20
    found = Found()
    passing = Passing(found, frame_max=FRAME_MAX)
    passing.watched.add(1)
    handed_on = b""
    for start, end in pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
        handed_on += passing.receive(data[start:end])
    assert handed_on == data and not passing.holds_what_was_found
    assert found.contents == {1: (20, payload)}
    assert [header[12:] for _channel, header in found.headers] == [PROPERTIES] * 20


def test_a_content_that_is_not_complete_is_held_back_with_its_method() -> None:
    passing = Passing(Found(), frame_max=FRAME_MAX)
    whole = publish(1, "k", b"x" * 10_000)
    assert passing.receive(HEARTBEAT_FRAME + whole[:9000]) == HEARTBEAT_FRAME
    assert passing.begun == set()
    assert passing.receive(whole[9000:]) == whole


def test_a_large_content_is_handed_on_frame_by_frame_and_known_to_be_begun() -> None:
    found = Found()
    passing = Passing(found, frame_max=FRAME_MAX)
    whole = publish(1, "k", b"x" * (2 * HOLD_BYTES))
    handed = passing.receive(whole[: HOLD_BYTES + 10_000])
    assert 0 < len(handed) <= HOLD_BYTES + 10_000
    assert passing.begun == {1}
    assert found.contents == {}
    assert handed + passing.receive(whole[HOLD_BYTES + 10_000 :]) == whole
    assert passing.begun == set()
    assert found.contents[1][0] == 1


@given(st.binary(min_size=1, max_size=200), st.integers(0, 200))
def test_garbage_is_handed_on_for_the_leader_to_refuse(data: bytes, cut: int) -> None:
    passing = Passing(Found(), frame_max=FRAME_MAX)
    handed = passing.receive(data[:cut]) + passing.receive(data[cut:])
    assert data.startswith(handed)
    assert passing.lost is False or handed == data
