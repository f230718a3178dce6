"""Reads grow while they come back full, and shrink when for a while none did."""

import socket
from collections.abc import Iterator

import pytest

from headrace.core_log.real import SystemClock
from headrace.gateways.delivery.inbox import SMALL_READS, Inbox
from headrace.gateways.delivery.listener import Connection


@pytest.fixture
def pair() -> Iterator[tuple[Inbox, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        yield Inbox(Connection(here, "127.0.0.1", 1), SystemClock(), bytes_min=4, bytes_max=16), there


def test_a_read_of_what_is_there_says_when_it_came(pair: tuple[Inbox, socket.socket]) -> None:
    inbox, there = pair
    there.send(b"abc")
    assert inbox.read_now(17.5) == b"abc"
    assert (inbox.last_received, inbox.received_count) == (17.5, 3)


def test_nothing_there_is_not_the_end(pair: tuple[Inbox, socket.socket]) -> None:
    inbox, there = pair
    before = inbox.last_received
    assert inbox.read_now(1e9) is None
    there.close()
    assert inbox.read_now(1e9) == b""
    assert inbox.last_received == before


def test_reads_grow_to_their_limit_and_shrink_again(pair: tuple[Inbox, socket.socket]) -> None:
    inbox, there = pair
    there.send(bytes(4 + 8 + 16 + 16 + 2))
    sizes = []
    while (data := inbox.read_now(0.0)) is not None:
        sizes.append(len(data))
    assert sizes == [4, 8, 16, 16, 2]
    for _ in range(2 * SMALL_READS):
        there.send(b"x")
        assert inbox.read_now(0.0) == b"x"
    there.send(bytes(9))
    assert [len(inbox.read_now(0.0) or b"") for _ in range(3)] == [4, 5, 0]


def test_small_reads_between_large_ones_do_not_cut_the_large_ones(pair: tuple[Inbox, socket.socket]) -> None:
    inbox, there = pair
    there.send(bytes(4 + 8 + 15))
    assert [len(inbox.read_now(0.0) or b"") for _ in range(3)] == [4, 8, 15]
    for _ in range(100):
        for _ in range(SMALL_READS - 1):
            there.send(b"x")
            assert inbox.read_now(0.0) == b"x"
        there.send(bytes(15))
        assert len(inbox.read_now(0.0) or b"") == 15


async def test_waiting_for_a_read_gives_the_same(pair: tuple[Inbox, socket.socket]) -> None:
    inbox, there = pair
    there.send(b"abcdef")
    assert [await inbox.read(), await inbox.read()] == [b"abcd", b"ef"]
    there.close()
    assert await inbox.read() == b""
