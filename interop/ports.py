"""Ports for a broker that is killed and started again. Driver: sockets, files.

A port that the kernel chose may be given away while its broker is down: to a client that tries to reconnect, as its
own end. The broker then cannot listen, or the client even connects to itself. So these lie outside that range.
"""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Linux's own, where it does not tell.
_GIVEN_AWAY = (32768, 60999)
_FIRST = 10240
_LAST = 65535
_TRIES_MAX = 1000


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that nobody listens on and nobody is given."""
    lowest, highest = map(int, _RANGE.read_text().split()) if _RANGE.exists() else _GIVEN_AWAY
    outside = [port for port in range(_FIRST, _LAST + 1) if not lowest <= port <= highest]
    if len(outside) < _TRIES_MAX:
        raise OSError(f"too few ports outside {lowest}-{highest}, from which clients are given theirs")
    free: list[int] = []
    for port in random.sample(outside, _TRIES_MAX):
        if len(free) == count:
            return free
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.append(port)
    raise OSError(f"no {count} free ports among {_TRIES_MAX} outside {lowest}-{highest}")
