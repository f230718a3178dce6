"""The turns of a node's loop, shared by all doors. Driver.

A turn is what one read of one connection causes, without a wait in between: appends, deliveries, answers, whosoever's
connection and door they go to. At its end everything that became ready is dealt out, and every connection that got
something sends it in one piece.
"""

from collections.abc import Callable

import trio

from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.outbox import Outbox


class Turn:
    def __init__(self, broker: Broker) -> None:
        # True while somebody works through a read without awaiting, and while a turn ends.
        self.running = False
        self._broker = broker
        self._committer = broker.directory.committer
        self._to_flush: list[Outbox] = []
        self._to_append: list[Callable[[], None]] = []
        self._is_due = False
        self._token = trio.lowlevel.current_trio_token()
        broker.on_ready = self.soon
        self._committer.on_commit = self.end

    def note(self, outbox: Outbox) -> None:
        """An outbox has something to send: with the end of this turn, or soon when there is none."""
        self._to_flush.append(outbox)
        # Whoever is in a turn, or tells of a commit, ends it with a flush.
        if not self.running and not self._committer.telling:
            self.soon()

    def before_end(self, append: Callable[[], None]) -> None:
        """What is gathered in a turn is appended with its end; call in a turn, or end one."""
        self._to_append.append(append)

    def soon(self) -> None:
        """Something became ready while nobody is in a turn."""
        if not self._is_due:
            self._is_due = True
            self._token.run_sync_soon(self._due, idempotent=True)

    def _due(self) -> None:
        self._is_due = False
        self.end()

    def end(self) -> None:
        """Deliver what arrived and send what is to be sent."""
        # What is noted meanwhile goes out with it: to wake the loop for it would cost a whole iteration per message.
        self.running = True
        try:
            while self._to_append:
                appends, self._to_append = self._to_append, []
                for append in appends:
                    append()
            self._broker.dispatch()
            while self._to_flush:
                outboxes, self._to_flush = self._to_flush, []
                for outbox in outboxes:
                    outbox.flush()
        finally:
            self.running = False
