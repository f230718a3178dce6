"""One socket of a relayed connection: what is sent arrives whole and in order, whoever is cancelled."""

import socket

import pytest
import trio
from tests.gateways.delivery.house import Clock

from headrace.gateways.delivery.listener import Connection
from headrace.gateways.relay.end import End, EndLost


def pair() -> tuple[End, socket.socket, socket.socket]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    return End(Connection(near, "127.0.0.1", 1), Clock()), near, far


async def read_all(far: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            data += far.recv(1 << 20)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(far)
    return data


async def test_a_piece_whose_sender_was_cancelled_is_finished_before_the_next() -> None:
    end, near, far = pair()
    with near, far, trio.fail_after(30):
        first, second = b"a" * 3_000_000, b"b" * 1000
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end.send, first)
                await trio.testing.wait_all_tasks_blocked()
                assert end.is_sending
                scope.cancel()
        assert not end.is_sending
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.send, second)
            assert await read_all(far, len(first) + len(second)) == first + second


async def test_what_need_not_be_said_is_left_out_while_something_is_being_sent() -> None:
    end, near, far = pair()
    with near, far, trio.fail_after(30):
        end.send_now(b"heard")
        assert await read_all(far, 5) == b"heard"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.send, b"a" * 3_000_000)
            await trio.testing.wait_all_tasks_blocked()
            end.send_now(b"not heard")
            assert await read_all(far, 3_000_000) == b"a" * 3_000_000
        assert end.sent_count == 3_000_005


async def test_the_end_of_the_other_side_is_told_to_readers_and_senders() -> None:
    end, near, far = pair()
    with near, trio.fail_after(30):
        far.send(b"last")
        far.close()
        assert await end.read() == b"last"
        with pytest.raises(EndLost):
            await end.read()
        with pytest.raises(EndLost):
            while True:
                await end.send(b"x" * 1000)
        end.send_now(b"nobody hears this")
