"""What is counted of MQTT in one vhost since the start. Value; whoever does a thing adds it.

Neighbours: session.py, fan_out.py, publishes.py and client.py add, sys_topics.py tells.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    # PUBLISH packets of clients, wills included.
    published: int = 0
    # PUBLISH packets to clients, also those that were sent again.
    delivered: int = 0
    # Messages that a client was to get and never will: expired, too large for it, taken by retention, or more than may
    # wait for a session. Of those last ones the oldest were dropped, or the newest refused.
    dropped: int = 0
    overflowed: int = 0
    refused: int = 0
    # Octets of MQTT, brought up to date once a second.
    bytes_received: int = 0
    bytes_sent: int = 0
    # Connections that were accepted, and the most at one time.
    connections: int = 0
    clients_max: int = 0
    # Now: of all sessions, sleeping ones too.
    subscriptions: int = 0
