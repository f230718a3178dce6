"""What of the sessions of one vhost is written to `__sessions`, and when. Driver.

At once is written what a client will be told of (`keep`), the rest about once a second. A session that ends with its
connection is never written. Behind the states of each second stands a mark: how far they know what was received with
QoS 2 (received.py). Neighbours: state.py is the format, hub.py and session.py say when something changed.
"""

from collections.abc import Callable
from contextlib import suppress

import trio

from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.mqtt import state
from headrace.gateways.mqtt.session import Session

STATE_PERIOD_S = 1.0
# A start reads so many records again at most, and those of the last second.
MARK_COUNT = 250_000


class SessionStates:
    def __init__(self, broker: Broker, vhost: str, messages: PartitionLog, states: PartitionLog) -> None:
        """`messages`: the log of `amq.topic`; `states`: `__sessions`."""
        self._broker = broker
        self._vhost = vhost
        self._messages = messages
        self._states = states
        # Sessions whose state is to be written with the next ones.
        self._dirty: dict[Session, None] = {}
        # Set when there are some, or a mark is due.
        self._wake = trio.Event()
        # Those whose state waits for room on the disk, and what they call then.
        self._unwritten: list[tuple[Session, Callable[[], None]]] = []
        # Sessions that have ended, and that wait for the journal of the groups they were in.
        self._settling: dict[Session, None] = {}
        self._settle_wake = trio.Event()
        # By client id: set when a session that ended is gone for good.
        self._ending: dict[str, trio.Event] = {}
        # Sessions whose states name messages of groups that are complete.
        self._handing: dict[Session, None] = {}
        # How far the last mark reaches.
        self._marked_to = 0
        # While a QoS 2 publish is under way: where it began.
        self.noted_to: int | None = None
        # Whether a group has still to pass over a message (share, lane, number).
        self.is_taken: Callable[[str, int, int], bool] = lambda share, lane, seq: False

    # -- what has changed -----------------------------------------------------------------------------------------

    def changed(self, session: Session, at_once: bool = False) -> None:
        if at_once:
            self.write(session, session.to_release())
            return
        if not self._dirty:
            self._wake.set()
        self._dirty[session] = None

    def advanced(self) -> None:
        """The log of messages has grown."""
        if self._messages.end > self._marked_to + MARK_COUNT:
            self._wake.set()

    def write(self, session: Session, done: Callable[[], None]) -> None:
        """The same as `keep` for those who cannot tell anybody that the disk is full: they wait."""
        try:
            self.keep(session, done)
        except DiskFull:
            self._unwritten.append((session, done))
            self._wake.set()

    def keep(self, session: Session, done: Callable[[], None], *, first: bool = False) -> None:
        """Write the session down; `done` is called when that is safe. One that ends with its connection is not
        written at all. `first`: before what is appended to other logs from now on, where the disk has room."""
        self._dirty.pop(session, None)
        if not session.outlives:
            done()
            return
        self._states.when_committed(self._append_state(session), done)
        self._broker.directory.committer.urgent(self._states)
        if first:
            # A full disk is the committer's to wait for.
            with suppress(DiskFull):
                self._states.seal()

    # -- the end of a session -------------------------------------------------------------------------------------

    def forget(self, session: Session) -> None:
        """Nothing of it is kept from now on."""
        self._dirty.pop(session, None)
        self._handing.pop(session, None)
        if not session.is_kept:
            return
        session.is_kept = False
        self._ending[session.client_id] = trio.Event()
        if session.handed:
            # What it had of shared subscriptions must be settled for good first: nobody else may get it.
            self._settling[session] = None
            self._settle_wake.set()
        else:
            self._append_end(session)

    async def gone(self, client_id: str) -> bool:
        """Wait until no session of this identifier can come back after a crash; whether there was anything to wait
        for."""
        ending = self._ending.get(client_id)
        if ending is None:
            return False
        await ending.wait()
        return True

    async def _settle(self) -> None:
        while True:
            await self._settle_wake.wait()
            self._settle_wake = trio.Event()
            sessions = list(self._settling)
            await self._broker.write_journal()
            for session in sessions:
                del self._settling[session]
                self._append_end(session)

    def _append_end(self, session: Session) -> None:
        client_id = session.client_id
        try:
            end = self._append(state.session_key(self._vhost, client_id), b"")
        except DiskFull:
            self._broker.timers.after(STATE_PERIOD_S, lambda: self._append_end(session))
            return
        self._states.when_committed(end, lambda: self._ending.pop(client_id).set())
        self._broker.directory.committer.urgent(self._states)

    # -- writing --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._settle)
            while True:
                await self._wake.wait()
                await self._broker.env.clock.sleep(STATE_PERIOD_S)
                self._wake = trio.Event()
                try:
                    self.write_all()
                except DiskFull:
                    self._wake.set()
                    continue
                unwritten, self._unwritten = self._unwritten, []
                for session, done in unwritten:
                    self.write(session, done)
                await self._let_go_of_handed()

    def write_all(self) -> None:
        """What acknowledgements have moved since the last time. A crash before that repeats them, with the same
        packet identifiers. Raises DiskFull; what was not written is tried again."""
        some = bool(self._dirty)
        while self._dirty:
            session = next(iter(self._dirty))
            if session.outlives:
                self._append_state(session)
            del self._dirty[session]
        if some or self._messages.end > self._marked_to + MARK_COUNT:
            # Behind all of them: whoever finds it after a crash has them too.
            self._marked_to = int(self._messages.end)
            self._append(state.noted_key(self._vhost), state.encode_noted(self._marked_to))
            self._broker.directory.committer.lazy(self._states)

    async def _let_go_of_handed(self) -> None:
        """Once the groups' journal has that they are settled, the states of sessions need not name them."""
        handing, self._handing = self._handing, {}
        known = {one: [name for name in one.handed if not self.is_taken(*name)] for one in handing}
        if any(known.values()):
            await self._broker.write_journal()
        for session, handed in known.items():
            for name in handed:
                session.handed.pop(name, None)
            if not session.is_kept:
                # It has ended meanwhile.
                continue
            if session.handed:
                self._handing[session] = None
            if handed:
                self.changed(session)

    def close(self) -> None:
        """The broker ends, and the groups write their journal behind this."""
        for session in self._settling:
            self._append_end(session)
        self.write_all()

    def _append_state(self, session: Session) -> int:
        session.is_kept = True
        if session.handed:
            self._handing[session] = None
        end = int(self._messages.end)
        value = state.encode_session(session, end, end if self.noted_to is None else self.noted_to)
        return self._append(state.session_key(self._vhost, session.client_id), value)

    def _append(self, key: bytes, value: bytes) -> int:
        now_us = self._broker.env.clock.wall_us()
        appended = self._states.append([key], [b""], [value], timestamp_us=now_us, attributes=PERSISTENT)
        return int(appended.next_offset)
