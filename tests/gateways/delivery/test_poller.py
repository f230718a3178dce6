"""Connections that are watched: read in one turn, handed over to their tasks, paused for while many trickle."""

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import pairwise

import pytest
import trio

from headrace.gateways.delivery.poller import GATHERED, PAUSE_MAX_S, READS_PER_TURN, SILENT_MIN, WINDOW_S, Poller
from headrace.gateways.delivery.turn import Turn

from .house import House


class CountedTurn(Turn):
    count = 0

    def end(self) -> None:
        self.count += 1
        super().end()


class Peer:
    """A connection: what its reads brought, and how often it was handed over."""

    def __init__(self, poller: Poller, here: socket.socket, there: socket.socket) -> None:
        self.poller = poller
        self.here = here
        self.there = there
        self.reads: list[bytes] = []
        self.handed_over = 0
        self.bytes_max = 100
        self.then: Callable[[], None] = lambda: None

    def ready(self) -> None:
        self.reads.append(self.here.recv(self.bytes_max))
        self.then()

    async def run(self) -> None:
        while True:
            await self.poller.watch(self.here.fileno(), self.ready)
            self.handed_over += 1

    def hand_over(self) -> None:
        self.poller.hand_over(self.here.fileno())


@asynccontextmanager
async def polling() -> AsyncIterator[tuple[Poller, CountedTurn]]:
    """The poller does not run yet."""
    async with House().broker() as running:
        turn = CountedTurn(running.broker)
        yield Poller(turn, running.broker.env.clock), turn


@contextmanager
def peers(poller: Poller, count: int) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            here, there = socket.socketpair()
            stack.enter_context(here)
            stack.enter_context(there)
            here.setblocking(False)
            made.append(Peer(poller, here, there))
        yield made


@asynccontextmanager
async def watched(poller: Poller, count: int) -> AsyncIterator[tuple[list[Peer], trio.Nursery]]:
    with peers(poller, count) as made:
        async with trio.open_nursery() as nursery:
            for peer in made:
                nursery.start_soon(peer.run)
            await trio.testing.wait_all_tasks_blocked()
            assert len(poller) == count
            yield made, nursery
            nursery.cancel_scope.cancel()


async def test_whatever_has_come_from_whomever_is_read_in_one_turn() -> None:
    async with polling() as (poller, turn), watched(poller, 3) as (made, nursery):
        turns: set[int] = set()
        for peer in made[:2]:
            peer.then = lambda: turns.add(turn.count)
            peer.there.send(b"hello")
        nursery.start_soon(poller.run)
        await trio.testing.wait_all_tasks_blocked()
        assert [peer.reads for peer in made] == [[b"hello"], [b"hello"], []]
        assert len(turns) == 1


async def test_a_turn_reads_each_connection_once_and_the_rest_is_found_again() -> None:
    async with polling() as (poller, _turn), watched(poller, 2) as (made, nursery):
        order: list[int] = []
        for index, peer in enumerate(made):
            peer.bytes_max = 1
            peer.then = lambda index=index: order.append(index)  # type: ignore[misc]
            peer.there.send(b"abc")
        nursery.start_soon(poller.run)
        await trio.testing.wait_all_tasks_blocked()
        assert [peer.reads for peer in made] == [[b"a", b"b", b"c"]] * 2
        assert [{*order[at : at + 2]} for at in range(0, 6, 2)] == [{0, 1}] * 3


async def test_more_connections_than_a_turn_takes_are_all_read() -> None:
    count = READS_PER_TURN + 10
    async with polling() as (poller, turn), watched(poller, count) as (made, nursery):
        turns: set[int] = set()
        for peer in made:
            peer.then = lambda: turns.add(turn.count)
            peer.there.send(b"x")
        nursery.start_soon(poller.run)
        await trio.testing.wait_all_tasks_blocked()
        assert all(peer.reads == [b"x"] for peer in made)
        assert len(turns) == 2


async def test_what_is_handed_over_is_not_read_until_its_task_comes_back() -> None:
    async with polling() as (poller, _turn):
        with peers(poller, 1) as (peer,):
            go_on = trio.Event()

            async def run() -> None:
                await poller.watch(peer.here.fileno(), peer.ready)
                await go_on.wait()
                await poller.watch(peer.here.fileno(), peer.ready)

            peer.then = peer.hand_over
            async with trio.open_nursery() as nursery:
                nursery.start_soon(poller.run)
                nursery.start_soon(run)
                peer.there.send(b"first")
                await trio.testing.wait_all_tasks_blocked()
                peer.there.send(b"second")
                await trio.testing.wait_all_tasks_blocked()
                assert peer.reads == [b"first"]
                assert len(poller) == 0
                go_on.set()
                await trio.testing.wait_all_tasks_blocked()
                assert peer.reads == [b"first", b"second"]
                nursery.cancel_scope.cancel()


async def test_one_whom_another_ones_packets_have_ended_is_not_called_any_more() -> None:
    async with polling() as (poller, _turn), watched(poller, 2) as (made, nursery):
        one, two = made
        one.then, two.then = two.hand_over, one.hand_over
        for peer in made:
            peer.there.send(b"x")
        nursery.start_soon(poller.run)
        while not (one.handed_over and two.handed_over):
            await trio.testing.wait_all_tasks_blocked()
        # Whoever came first sent the other to its task, which came back and was read in the turn after that.
        assert sorted(len(peer.reads) for peer in made) == [1, 1]


async def test_one_that_is_cancelled_is_forgotten_and_its_descriptor_free() -> None:
    async with polling() as (poller, _turn), watched(poller, 1) as ((peer,), nursery):
        nursery.start_soon(poller.run)
        other = trio.CancelScope()
        with peers(poller, 1) as (gone,):

            async def run() -> None:
                with other:
                    await poller.watch(gone.here.fileno(), gone.ready)

            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            assert len(poller) == 2
            other.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert len(poller) == 1
            gone.there.send(b"for nobody")
            peer.there.send(b"x")
            await trio.testing.wait_all_tasks_blocked()
            assert (gone.reads, peer.reads) == ([], [b"x"])


async def test_it_ends_while_connections_are_watched() -> None:
    async with polling() as (poller, _turn):
        with peers(poller, 1) as (peer,), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(poller.run)
                nursery.start_soon(peer.run)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert len(poller) == 0


async def test_reads_are_gathered_only_while_many_connections_trickle(autojump_clock: trio.testing.MockClock) -> None:
    async with polling() as (poller, _turn), watched(poller, 1) as ((peer,), nursery):
        times: list[float] = []
        silent = wanted = 0

        def note() -> None:
            times.append(trio.current_time())
            poller.silent_count += silent
            if len(times) < wanted:
                peer.there.send(b"x")

        peer.then = note
        nursery.start_soon(poller.run)

        async def gaps() -> list[float]:
            """Between the reads of one that sends again as soon as it is read."""
            nonlocal wanted
            times.clear()
            wanted = 20
            peer.there.send(b"x")
            await trio.sleep(1)
            wanted = 0
            return [later - earlier for earlier, later in pairwise(times)]

        async def trickle() -> None:
            for _ in range(5):
                peer.there.send(b"x")
                await trio.sleep(WINDOW_S * 0.6)

        await trickle()
        assert await gaps() == [0.0] * 19
        silent = SILENT_MIN
        await trickle()
        assert await gaps() == pytest.approx([PAUSE_MAX_S] * 19)
        silent = SILENT_MIN // 8
        await trickle()
        assert await gaps() == [0.0] * 19


async def test_the_faster_reads_come_the_shorter_is_the_pause_for_as_many(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rate = 4 * GATHERED / PAUSE_MAX_S
    async with polling() as (poller, _turn), watched(poller, 1) as ((peer,), nursery):
        times = [trio.current_time()]
        sends_on = False

        def note() -> None:
            times.append(trio.current_time())
            poller.silent_count += round(rate * (times[-1] - times[-2]))
            if sends_on:
                peer.there.send(b"x")

        peer.then = note
        nursery.start_soon(poller.run)
        for _ in range(5):
            peer.there.send(b"x")
            await trio.sleep(WINDOW_S * 0.6)
        sends_on = True
        peer.there.send(b"x")
        await trio.sleep(1)
        sends_on = False
        gaps = [later - earlier for earlier, later in pairwise(times[-10:])]
        assert gaps == pytest.approx([PAUSE_MAX_S / 4] * 9, rel=0.1)
