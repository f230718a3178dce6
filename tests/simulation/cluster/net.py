"""The network between simulated nodes: links with delays that stand still while they are cut, and are reset when the
process at the other end is gone. Driver for tests.

A link is as TCP is: octets arrive in order, or the link is reset. While one direction is cut, what goes that way waits;
whether the other side ever learns of anything is a matter of its own patience. Neighbour: core_log/peer/link.py runs
over these wires as it does over sockets; the handshake is left out.
"""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio
from outcome import Value
from tests.simulation.cluster.world import World

from headrace.core_log.env import Worker
from headrace.core_log.log import RawSlice
from headrace.core_log.peer.errors import PeerGone, PeerUnreachable
from headrace.core_log.peer.frames import Purpose
from headrace.core_log.peer.link import CONNECT_S, PeerLink

if TYPE_CHECKING:
    from tests.simulation.cluster.node import Life

# What is under way and not taken; then its sender waits.
WINDOW_BYTES = 64 * 1024


class Where(NamedTuple):
    host: str
    port: int


class Net:
    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.dice("net")
        # Directions in which nothing gets through: (from, to).
        self.cut: set[tuple[int, int]] = set()
        self.delay_s = self.random.choice((0.0003, 0.001, 0.01))
        # Of single nodes, on top of that.
        self.slow: dict[int, float] = {}
        self.lives: dict[int, Life] = {}
        # Machines that have lost their power: nobody says that there is nobody.
        self.dark: set[int] = set()
        self._held: list[tuple[_End, bytes | None]] = []
        self.ends: dict[int, _End] = {}
        self._numbers = 0

    def delay(self, a: int, b: int) -> float:
        more = max(self.slow.get(a, 0.0), self.slow.get(b, 0.0))
        return (self.delay_s + more) * (0.5 + self.random.random())

    def is_cut(self, a: int, b: int) -> bool:
        return (a, b) in self.cut

    def mend(self) -> None:
        """What waited goes on its way, if its direction is open again."""
        held, self._held = self._held, []
        for end, data in held:
            self.carry(end, data)

    def carry(self, end: "_End", data: bytes | None) -> None:
        """From this end to the other; None: the end of it all."""
        other = end.other
        if self.is_cut(end.node, other.node):
            self._held.append((end, data))
            return
        when = max(end.last_arrival, self.world.now + self.delay(end.node, other.node))
        end.last_arrival = when
        self.world.at(when, partial(self._arrive, end, data))

    def _arrive(self, end: "_End", data: bytes | None) -> None:
        self.world.mark(end.node, end.other.node, len(data or b""))
        if self.is_cut(end.node, end.other.node):
            # Cut while it was under way.
            self._held.append((end, data))
            return
        end.other.take(data)

    async def connect(self, life: "Life", port: int, purpose: Purpose, detail: bytes) -> PeerLink:
        task = trio.lowlevel.current_task()
        world, me = self.world, life.number
        is_given_up = False

        def give_up(_raise: object) -> trio.lowlevel.Abort:
            nonlocal is_given_up
            is_given_up = True
            return trio.lowlevel.Abort.SUCCEEDED

        def answer(result: PeerLink | None) -> None:
            if not is_given_up:
                life.reschedule(task, Value(result))
            elif result is not None:
                result.close()

        def call() -> None:
            target = self.lives.get(port)
            if self.is_cut(me, port) or self.is_cut(port, me) or (target is None and port in self.dark):
                # Nobody says anything.
                world.after(CONNECT_S, lambda: answer(None))
                return
            back = self.delay(port, me)
            if target is None or not target.listens:
                world.after(back, lambda: answer(None))
                return
            ours, theirs = self._pair(life, target)
            mine = msgspec.structs.replace(life.hello(), purpose=purpose, detail=detail)
            their = msgspec.structs.replace(target.hello(), purpose=purpose)
            target.accept(PeerLink(theirs, mine))
            link = PeerLink(ours, their)
            world.after(back, lambda: answer(link))

        world.after(self.delay(me, port), call)
        found: PeerLink | None = await trio.lowlevel.wait_task_rescheduled(give_up)
        if found is None:
            raise PeerUnreachable(f"node {port} cannot be reached")
        return found

    def _pair(self, a: "Life", b: "Life") -> "tuple[_End, _End]":
        first, second = _End(self, a), _End(self, b)
        first.other, second.other = second, first
        for end in (first, second):
            self._numbers += 1
            end.key = self._numbers
            self.ends[end.key] = end
        return first, second

    def process_gone(self, life: "Life", *, silently: bool) -> None:
        """Its system resets what it had; one without power says nothing, before it is back."""
        for end in list(self.ends.values()):
            if end.life is life:
                del self.ends[end.key]
                end.is_closed = True
                if silently:
                    end.is_silent = True
                else:
                    self.carry(end, None)


class _End:
    """One end of a link: a Wire."""

    other: "_End"
    key: int

    def __init__(self, net: Net, life: "Life") -> None:
        self.net = net
        self.life = life
        self.node = life.number
        self.is_closed = False
        # The machine had no power when the process went.
        self.is_silent = False
        self.last_arrival = 0.0
        self._arrived: deque[bytes] = deque()
        self._has_ended = False
        self._is_reset = False
        self._reader: trio.lowlevel.Task | None = None
        self._in_flight = 0
        self._writer: trio.lowlevel.Task | None = None

    def take(self, data: bytes | None) -> None:
        """Something has arrived here."""
        if self.is_closed:
            # Nobody is there for it, which the system says; at once, or when the machine is on again.
            if data is not None and not (self.is_silent and self.node not in self.net.lives):
                self.net.carry(self, None)
            return
        if data is None:
            self._has_ended = True
            self._is_reset = True
            self._wake_writer()
        else:
            self._arrived.append(data)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None:
            task, self._reader = self._reader, None
            self.life.reschedule(task, Value(None))

    def _wake_writer(self) -> None:
        if self._writer is not None:
            task, self._writer = self._writer, None
            self.life.reschedule(task, Value(None))

    async def send(self, parts: list[bytes | memoryview]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._in_flight > WINDOW_BYTES and not self._is_reset and not self.is_closed:
            assert self._writer is None, "one sends at a time"
            self._writer = trio.lowlevel.current_task()

            def abort(_raise: object) -> trio.lowlevel.Abort:
                self._writer = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if self._is_reset or self.is_closed:
            raise PeerGone("the link was reset")
        data = b"".join(parts)
        self._in_flight += len(data)
        self.net.carry(self, data)

    async def send_slice(self, worker: Worker, piece: RawSlice) -> None:
        await self.send([await worker.run(lambda: piece.segment.file.read(piece.position, piece.length))])

    async def receive_some(self) -> bytes:
        if not self._arrived and not self._has_ended and not self.is_closed:
            assert self._reader is None, "one receives at a time"
            self._reader = trio.lowlevel.current_task()

            def abort(_raise: object) -> trio.lowlevel.Abort:
                self._reader = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        if self.is_closed:
            raise PeerGone("this end is closed")
        if not self._arrived:
            return b""
        data = b"".join(self._arrived)
        self._arrived.clear()
        other = self.other
        other._in_flight -= len(data)
        if other._in_flight <= WINDOW_BYTES:
            other._wake_writer()
        return data

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.net.ends.pop(self.key, None)
            self._wake_reader()
            self._wake_writer()
            if not self.life.is_dead:
                self.net.carry(self, None)
