"""How many connections and channels there may be: per node, address, user and vhost. Machine: counts and says no.

A connection is counted twice. As a *socket*, from accept to close, by address: beyond the hard limits, which leave some
room above the others, it is closed unheard, since whoever fills a node with strangers does not read our reasons. As a
*member*, once its user is known, by user and vhost: refused in RabbitMQ's words, which clients understand.

Limits of the configuration per address and per user spare loopback, where many programs share one address and often one
user; limits that the metadata sets for a user or vhost hold for everybody. Queues per vhost are counted where they are
declared (vhost.py).
Neighbours: the doors ask; all doors of a node share one of these.
"""

from collections import Counter
from dataclasses import dataclass

from headrace.controller.snapshot import Snapshot

# How far above the limit sockets are still heard, so that they can be refused with a reason.
SPARE_SHARE = 0.25
SPARE_MIN = 16


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """None: no limit."""

    connections_max: int | None = 10_000
    connections_per_user_max: int | None = 1000
    connections_per_address_max: int | None = 100
    channels_per_user_max: int | None = None
    queues_per_vhost_max: int | None = 50_000


@dataclass(frozen=True, slots=True)
class Member:
    """A connection whose user is known."""

    user: str
    vhost: str
    address: str
    loopback: bool


class Limits:
    def __init__(self, snapshot: Snapshot, config: LimitsConfig | None = None) -> None:
        self.config = config or LimitsConfig()
        self.socket_count = 0
        self.member_count = 0
        # Refused, for those who look: sockets closed unheard, connections, channels.
        self.dropped_count = self.refused_count = 0
        self._snapshot = snapshot
        # No entry for a count of zero.
        self._sockets: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()
        self._by_user: Counter[str] = Counter()
        self._by_vhost: Counter[str] = Counter()
        self._channels: Counter[str] = Counter()

    def update(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    # -- sockets ------------------------------------------------------------------------------------------------

    def accept(self, address: str, *, loopback: bool) -> bool:
        """Whether a new socket is heard at all. If so, `close` follows one day."""
        config = self.config
        here = _with_spare(config.connections_max)
        each = None if loopback else _with_spare(config.connections_per_address_max)
        if _reached(self.socket_count, here) or _reached(self._sockets[address], each):
            self.dropped_count += 1
            return False
        self.socket_count += 1
        self._sockets[address] += 1
        return True

    def close(self, address: str) -> None:
        self.socket_count -= 1
        _count_off(self._sockets, address)

    # -- members ------------------------------------------------------------------------------------------------

    def enter(self, member: Member) -> str | None:
        """None if the connection may be opened, and then `leave` follows one day; else why not."""
        refusal = self._refusal(member)
        if refusal is not None:
            self.refused_count += 1
            return refusal
        self.member_count += 1
        self._by_address[member.address] += 1
        self._by_user[member.user] += 1
        self._by_vhost[member.vhost] += 1
        return None

    def leave(self, member: Member) -> None:
        self.member_count -= 1
        _count_off(self._by_address, member.address)
        _count_off(self._by_user, member.user)
        _count_off(self._by_vhost, member.vhost)

    def _refusal(self, member: Member) -> str | None:
        config = self.config
        limit = config.connections_max
        if _reached(self.member_count, limit):
            return f"connection refused: node connection limit ({limit}) is reached"
        limit = None if member.loopback else config.connections_per_address_max
        if _reached(self._by_address[member.address], limit):
            return f"connection refused for address '{member.address}': address connection limit ({limit}) is reached"
        of_vhost = self._snapshot.vhost_limits.get(member.vhost)
        limit = None if of_vhost is None else of_vhost.connections_max
        if _reached(self._by_vhost[member.vhost], limit):
            who = f"access to vhost '{member.vhost}' refused for user '{member.user}'"
            return f"{who}: connection limit ({limit}) is reached"
        of_user = self._snapshot.user_limits.get(member.user)
        limit = None if member.loopback else config.connections_per_user_max
        if of_user is not None and of_user.connections_max is not None:
            limit = of_user.connections_max
        if _reached(self._by_user[member.user], limit):
            return f"connection refused for user '{member.user}': user connection limit ({limit}) is reached"
        return None

    # -- queues -------------------------------------------------------------------------------------------------

    def queues_max(self, vhost: str) -> int | None:
        limits = self._snapshot.vhost_limits.get(vhost)
        if limits is not None and limits.queues_max is not None:
            return limits.queues_max
        return self.config.queues_per_vhost_max

    # -- channels -----------------------------------------------------------------------------------------------

    def open_channel(self, member: Member) -> str | None:
        """None if it may be opened, and then `close_channel` follows one day; else why not."""
        of_user = self._snapshot.user_limits.get(member.user)
        limit = None if member.loopback else self.config.channels_per_user_max
        if of_user is not None and of_user.channels_max is not None:
            limit = of_user.channels_max
        if _reached(self._channels[member.user], limit):
            self.refused_count += 1
            whose = f"number of channels opened for user '{member.user}'"
            return f"{whose} has reached the maximum allowed user limit of ({limit})"
        self._channels[member.user] += 1
        return None

    def close_channel(self, member: Member) -> None:
        _count_off(self._channels, member.user)


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit


def _with_spare(limit: int | None) -> int | None:
    return None if limit is None else limit + max(SPARE_MIN, int(limit * SPARE_SHARE))


def _count_off(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    assert counts[key] >= 0, f"{key!r} was counted off more often than on"
    if not counts[key]:
        del counts[key]
