"""The leader's end of relay links: each goes to the door that its client came for. Driver.

The peer door's handler of Purpose.RELAY. Whoever asks for a vhost that is not led here is told so, and asks again.
Neighbours: dialing.py is the other side.
"""

import logging

import msgspec

from headrace.core_log.peer.link import PeerLink
from headrace.gateways.relay.dialing import detached
from headrace.gateways.relay.leaders import Leaders, Relayed, ShardDoors
from headrace.gateways.relay.opening import Destination, DoorName, Kind

_log = logging.getLogger(__name__)


class RelayAnswers:
    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders

    async def handle(self, link: PeerLink) -> None:
        """One client of another node, until it ends. Raises PeerGone."""
        try:
            wanted = msgspec.msgpack.decode(link.hello.detail, type=Destination)
        except msgspec.DecodeError as error:
            await link.send(Kind.REFUSED, f"the opening of the relay cannot be read: {error}".encode())
            return
        _kind, opening = await link.receive()
        doors = self._leaders.here(wanted.vhost)
        if doors is None:
            await link.send(Kind.REFUSED, f"this node does not lead vhost '{wanted.vhost}'".encode())
            return
        door = _door(doors, wanted.door)
        await link.send(Kind.READY)
        sock, leftover = detached(link)
        try:
            await door.take_relayed(sock, opening, leftover)
        except msgspec.DecodeError:
            _log.exception("node %d sent an opening that cannot be read", link.hello.node)
        finally:
            sock.close()


def _door(doors: ShardDoors, name: DoorName) -> Relayed:
    match name:
        case DoorName.AMQP:
            return doors.amqp
        case DoorName.MQTT:
            return doors.mqtt
        case DoorName.HTTP:
            return doors.http
