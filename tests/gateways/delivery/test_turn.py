"""A turn of the loop: what it causes goes out with its end; the loop is woken for what comes outside of one."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from headrace.core_log.record import PERSISTENT, Protocol
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.outbox import Outbox
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.turn import Turn

from .house import NO_PROPERTIES, House, Taker


class Sender(Taker):
    """A consumer at a socket."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def deliver(self, queue: Queue, stretch: Stretch) -> None:
        super().deliver(queue, stretch)
        self._outbox.put(self.got[-1])


@contextmanager
def connection(turn: Turn) -> Iterator[tuple[socket.socket, Outbox]]:
    """What the client has of it, and what the broker has."""
    client, server = socket.socketpair()
    with client, server:
        client.setblocking(False)
        server.setblocking(False)
        yield client, Outbox(server, 1 << 20, turn.note)


def wakes() -> int:
    return trio.lowlevel.current_statistics().run_sync_soon_queue_size


async def test_what_a_publish_causes_is_sent_with_the_end_of_its_turn_and_wakes_nobody() -> None:
    async with House().broker() as running:
        turn = Turn(running.broker)
        with connection(turn) as (client, outbox):
            queue = await running.declare("q")
            # The first commit of a log reserves the offsets that may be seen before theirs.
            await running.publish("q", b"earlier")
            assert running.bodies("q") == [b"earlier"]
            running.consume(queue, Sender(outbox))
            target = running.host.target("", b"q", ["q"])
            running.broker.publish(target, [NO_PROPERTIES], [b"hello"], attributes=int(Protocol.AMQP) | PERSISTENT)
            before = wakes()
            turn.end()
            assert client.recv(100) == b"hello"
            assert wakes() == before


async def test_what_is_put_outside_of_a_turn_is_sent_soon() -> None:
    async with House().broker() as running:
        with connection(Turn(running.broker)) as (client, outbox):
            outbox.put(b"heartbeat")
            with pytest.raises(BlockingIOError):
                client.recv(100)
            await trio.lowlevel.wait_readable(client)
            assert client.recv(100) == b"heartbeat"


async def test_after_a_turn_that_failed_the_loop_is_woken_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with House().broker() as running:
        turn = Turn(running.broker)
        with connection(turn) as (client, outbox):
            with monkeypatch.context() as patched:
                patched.setattr(running.broker, "dispatch", lambda: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    turn.end()
            outbox.put(b"later")
            await trio.lowlevel.wait_readable(client)
            assert client.recv(100) == b"later"
