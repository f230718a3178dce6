"""An MQTT client that sends what it likes and shows every packet it gets: what the tests of the door speak with.

It acknowledges nothing by itself. `seen_all` is how a test knows that nothing more was on its way: the answer to a PING
stands behind everything that the broker had for this client before.
"""

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.running_broker import eventually

from headrace.gateways.mqtt.cutter import AckRun, PacketCutter, PublishRun, Violation
from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, Version

PATIENCE_S = 20

_P = TypeVar("_P", bound=Packet)


class Wire:
    def __init__(self, port: int, version: Version = Version.V5) -> None:
        self.version = version
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._cutter = PacketCutter(from_client=False, version=version, topic_alias_max=65_535)
        self._came: deque[Packet] = deque()
        # Topic aliases as the broker gave them; what comes out has its topic, and keeps the alias.
        self._aliases: dict[int, str] = {}
        self._ids = count(1)
        self.ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Without a word, as a network that fails."""
        self.socket.close()

    # -- packets ----------------------------------------------------------------------------------------------------

    def send(self, *packets: Packet) -> None:
        self.socket.sendall(b"".join([encode_packet(one, self.version) for one in packets]))

    def send_octets(self, octets: bytes) -> None:
        self.socket.sendall(octets)

    def _read(self) -> None:
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            self.ended = True
            return
        for event in self._cutter.receive(data):
            assert not isinstance(event, Violation), f"the broker broke the protocol: {event.error}"
            assert not isinstance(event, PublishRun | AckRun), "a client's cutter gives packets"
            self._came.append(self._named(event) if isinstance(event, Publish) else event)

    def _named(self, message: Publish) -> Publish:
        alias = message.properties.topic_alias
        if alias is None:
            return message
        if message.topic:
            self._aliases[alias] = message.topic
        return replace(message, topic=self._aliases[alias])

    def receive(self) -> Packet | None:
        """The next packet; None: the broker has closed the connection."""
        while not self._came and not self.ended:
            self._read()
        return self._came.popleft() if self._came else None

    def expect(self, kind: type[_P]) -> _P:
        found = self.receive()
        assert isinstance(found, kind), f"{kind.__name__} expected, not {found}"
        return found

    def expect_end(self) -> None:
        """Nothing more, and the connection is closed."""
        found = self.receive()
        assert found is None, f"the end of the connection expected, not {found}"

    def expect_disconnect(self, reason: ReasonCode) -> Disconnect:
        """DISCONNECT with this reason, then the end; MQTT 3.1.1 has the end only."""
        if self.version is Version.V3_1_1:
            self.expect_end()
            return Disconnect(reason)
        found = self.expect(Disconnect)
        assert found.reason is reason, f"{reason!r} expected, not {found}"
        self.expect_end()
        return found

    # -- connection -------------------------------------------------------------------------------------------------

    def connect(
        self,
        client_id: str = "",
        *,
        clean_start: bool = True,
        will: Will | None = None,
        keep_alive_s: int = 0,
        user: str | None = None,
        password: bytes | None = None,
        **properties: Any,
    ) -> Connack:
        self.send(
            Connect(
                client_id,
                self.version,
                clean_start,
                keep_alive_s,
                user,
                password,
                will,
                Properties(**properties),
            )
        )
        return self.expect(Connack)

    def disconnect(self, reason: ReasonCode = ReasonCode.NORMAL_DISCONNECTION, **properties: Any) -> None:
        """Says goodbye, and returns when the broker has taken notice."""
        self.send(Disconnect(reason, Properties(**properties)))
        while self.receive() is not None:
            pass
        self.close()

    def cut(self) -> None:
        """The network fails, and the broker has noticed when this returns."""
        self.socket.shutdown(socket.SHUT_WR)
        while self.receive() is not None:
            pass
        self.close()

    def next_id(self) -> int:
        return next(self._ids)

    # -- subscribing ------------------------------------------------------------------------------------------------

    def subscribe(self, *filters: str | Subscription, qos: int = 0, **properties: Any) -> Suback:
        packet_id = self.next_id()
        wanted = tuple(Subscription(one, QoS(qos)) if isinstance(one, str) else one for one in filters)
        self.send(Subscribe(packet_id, wanted, Properties(**properties)))
        found = self.expect(Suback)
        assert found.packet_id == packet_id
        return found

    def unsubscribe(self, *filters: str) -> Unsuback:
        packet_id = self.next_id()
        self.send(Unsubscribe(packet_id, filters))
        found = self.expect(Unsuback)
        assert found.packet_id == packet_id
        return found

    # -- messages ---------------------------------------------------------------------------------------------------

    def publish(
        self, topic: str, payload: bytes = b"", qos: int = 0, *, retain: bool = False, **properties: Any
    ) -> ReasonCode:
        """Returns when the broker has taken it over, as far as its QoS lets anybody know."""
        packet_id = self.next_id() if qos else 0
        packet = Publish(topic, payload, QoS(qos), retain, False, packet_id, Properties(**properties))
        self.send(packet)
        match qos:
            case 0:
                self.ping()
                return ReasonCode.SUCCESS
            case 1:
                answer = self.expect(Puback)
                assert answer.packet_id == packet_id
                return answer.reason
            case _:
                received = self.expect(Pubrec)
                assert received.packet_id == packet_id
                if not received.reason.failed:
                    self.send(Pubrel(packet_id))
                    assert self.expect(Pubcomp).packet_id == packet_id
                return received.reason

    def ping(self) -> None:
        self.send(Pingreq())
        self.expect(Pingresp)

    def acknowledge(self, message: Publish) -> None:
        """The whole of what its QoS asks for."""
        match message.qos:
            case QoS.AT_LEAST_ONCE:
                self.send(Puback(message.packet_id))
            case QoS.EXACTLY_ONCE:
                self.send(Pubrec(message.packet_id))
                assert self._next(Pubrel).packet_id == message.packet_id
                self.send(Pubcomp(message.packet_id))

    def _next(self, kind: type[_P]) -> _P:
        """The next packet of this kind; messages that came before it are still to be seen."""
        passed: list[Packet] = []
        while isinstance(found := self.receive(), Publish):
            passed.append(found)
        self._came.extendleft(reversed(passed))
        assert isinstance(found, kind), f"{kind.__name__} expected, not {found}"
        return found

    def take(self, count: int = 1) -> list[Publish]:
        """The next so many messages, acknowledged one by one."""
        found = []
        for _ in range(count):
            found.append(self.expect(Publish))
            self.acknowledge(found[-1])
        return found

    def payloads(self, count: int) -> list[bytes]:
        return [one.payload for one in self.take(count)]

    def seen_all(self) -> list[Packet]:
        """What else the broker had sent."""
        self.send(Pingreq())
        found: list[Packet] = []
        while not isinstance(one := self.receive(), Pingresp):
            assert one is not None, "the broker closed the connection"
            found.append(one)
        return found

    def expect_nothing(self) -> None:
        assert self.seen_all() == []


Open = Callable[..., Wire]


def wait_seconds(client: Wire, name: str, seconds: int) -> None:
    """Until so many seconds have passed for the broker: it tells by a retained message that lives as long."""
    topic = f"{name}/seconds"
    client.publish(topic, b"tick", 1, retain=True, message_expiry_interval=seconds)

    def is_over() -> bool:
        client.subscribe(topic)
        return not client.seen_all()

    eventually(is_over)
    client.unsubscribe(topic)
