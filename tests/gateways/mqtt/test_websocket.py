"""A WebSocket carries octets unchanged, and nobody gets one who should not: the socket, then a running broker."""

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import h11
import paho.mqtt.client as paho
import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion
from tests.gateways.delivery.certificates import Authority
from tests.running_broker import RunningBroker
from wsproto.connection import Connection as Frames
from wsproto.connection import ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.packets import Connect, Disconnect, Pingreq, Pingresp, Publish, Subscribe, Subscription
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import PacketType, ReasonCode, Version
from headrace.gateways.mqtt.websocket import (
    FRAMES_PER_READ,
    MESSAGE_BYTES,
    READ_BYTES,
    Grant,
    Refusal,
    WebSocket,
    judge,
    may_come_from,
)

from .ws_client import connect

PATIENCE_S = 20

# -- who gets one -----------------------------------------------------------------------------------------------------

ASKED = {
    "Host": "broker.example:8083",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Protocol": "mqtt",
}


def asked(method: str = "GET", target: str = "/mqtt", **headers: str | None) -> h11.Request:
    """A lawful request, but for the headers named (`_` for `-`); None leaves one out."""
    given = ASKED | {name.replace("_", "-"): value for name, value in headers.items()}
    pairs = [(key, value.encode("latin-1")) for key, value in given.items() if value is not None]
    return h11.Request(method=method, target=target, headers=pairs)


def verdict(request: h11.Request, *origins: str, loopback: bool = False) -> Refusal | Grant:
    return judge(request, origins, peer_is_loopback=loopback)


def test_answer_has_the_key_of_rfc_6455_and_the_subprotocol_mqtt() -> None:
    """[MQTT-6.0.0-4] and the example of RFC 6455, 1.3."""
    granted = verdict(asked())
    assert isinstance(granted, Grant)
    head = granted.answer.decode().lower()
    assert head.startswith("http/1.1 101 ")
    assert "sec-websocket-protocol: mqtt\r\n" in head
    assert "sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=\r\n" in head


def test_compression_is_not_agreed_to() -> None:
    granted = verdict(asked(Sec_WebSocket_Extensions="permessage-deflate"))
    assert isinstance(granted, Grant)
    assert b"extensions" not in granted.answer.lower()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (asked(target="/"), 404),
        (asked(target="/mqtt/more"), 404),
        (asked("POST"), 405),
        (asked("HEAD"), 405),
        (asked(Upgrade=None), 400),
        (asked(Upgrade="h2c"), 400),
        (asked(Connection="close"), 400),
        (asked(Sec_WebSocket_Key=None), 400),
        (asked(Sec_WebSocket_Version=None), 400),
        (asked(Sec_WebSocket_Version="8"), 426),
        (asked(Sec_WebSocket_Protocol=None), 400),
        (asked(Sec_WebSocket_Protocol="mqttv3.1, wamp"), 400),
        (asked(Sec_WebSocket_Protocol="mqtt\xff"), 400),
        (asked(Content_Length="5"), 400),
        (asked(Origin="https://elsewhere.example"), 403),
    ],
    ids=str,
)
def test_request_that_is_none_for_mqtt_is_refused(request_: h11.Request, status: int) -> None:
    refused = verdict(request_)
    assert isinstance(refused, Refusal)
    assert refused.status == status


@pytest.mark.parametrize(
    "request_",
    [
        asked(target="/mqtt?token=1"),
        asked(Sec_WebSocket_Protocol="wamp, mqtt"),
        asked(Connection="keep-alive, Upgrade"),
    ],
)
def test_request_may_say_more_than_it_must(request_: h11.Request) -> None:
    assert isinstance(verdict(request_), Grant)


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1:8083", "http://[::1]"])
def test_page_of_this_machine_may_connect_on_it(origin: str) -> None:
    assert may_come_from(origin, "127.0.0.1:8083", (), peer_is_loopback=True)


@pytest.mark.parametrize(
    "origin", ["http://evil.example:8083", "http://localhost.evil.example", "null", "", "http://[", "http://10.0.0.1"]
)
def test_no_other_page_may_use_the_browser_of_this_machine(origin: str) -> None:
    """Not even one whose name was made to lead here, so that it is the host of the request too."""
    host = origin.rpartition("/")[2]
    assert not may_come_from(origin, host, (), peer_is_loopback=True)


def test_page_of_the_broker_host_may_connect_from_elsewhere() -> None:
    assert may_come_from("https://Broker.example:8083", "broker.example:8083", (), peer_is_loopback=False)
    assert not may_come_from("https://broker.example", "broker.example:8083", (), peer_is_loopback=False)
    assert not may_come_from("http://localhost", "broker.example:8083", (), peer_is_loopback=False)
    assert not may_come_from("null", "", (), peer_is_loopback=False)


@pytest.mark.parametrize("loopback", [True, False])
def test_page_that_is_named_may_connect(loopback: bool) -> None:
    app = "https://app.example"
    assert may_come_from(app, "proxy", (app,), peer_is_loopback=loopback)
    assert may_come_from("null", "proxy", ("any",), peer_is_loopback=loopback)
    assert not may_come_from("https://app.example.evil", "proxy", (app,), peer_is_loopback=loopback)


# -- octets -----------------------------------------------------------------------------------------------------------


class Peer:
    """A WebSocket of ours, and the client's end of it."""

    def __init__(self, *, buffer_bytes: int | None = None) -> None:
        ours, self.socket = socket.socketpair()
        if buffer_bytes is not None:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        ours.setblocking(False)
        self.socket.setblocking(False)
        self.ws = WebSocket(ours)
        self.frames = Frames(ConnectionType.CLIENT)

    def send(self, *events: Event) -> None:
        self.send_octets(b"".join(self.frames.send(event) for event in events))

    def send_octets(self, octets: bytes) -> None:
        self.socket.setblocking(True)
        self.socket.sendall(octets)
        self.socket.setblocking(False)

    def came(self) -> list[Event]:
        """What our end has sent so far."""
        while True:
            try:
                data = self.socket.recv(1 << 20)
            except BlockingIOError:
                break
            if not data:
                break
            self.frames.receive_data(data)
        return list(self.frames.events())

    def read(self, bytes_max: int = 1 << 20) -> bytes:
        """All that comes until it would wait or has ended."""
        found = bytearray()
        while True:
            try:
                data = self.ws.recv(bytes_max)
            except BlockingIOError:
                if self.ws.has_more():
                    continue
                return bytes(found)
            if not data:
                return bytes(found)
            found += data

    def close(self) -> None:
        self.ws.close()
        self.socket.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


messages = st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=20)


@given(messages, st.lists(st.integers(0, 4_000), max_size=6), st.integers(1, 700))
def test_octets_come_out_as_they_went_in_however_they_are_cut(
    parts: list[tuple[bytes, bool]], cuts: list[int], bytes_max: int
) -> None:
    """Whole messages and fragments, cut anywhere on the way, read in pieces of any size."""
    peer = Peer()
    try:
        wire = b"".join(peer.frames.send(BytesMessage(data=data, message_finished=last)) for data, last in parts)
        found = b""
        for start, end in pairwise([0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]):
            peer.send_octets(wire[start:end])
            found += peer.read(bytes_max)
        assert found == b"".join(data for data, _last in parts)
    finally:
        peer.close()


def test_read_that_has_more_says_so(peer: Peer) -> None:
    peer.send(BytesMessage(data=b"abcdef"))
    assert peer.ws.recv(4) == b"abcd"
    assert peer.ws.has_more()
    assert peer.ws.recv(4) == b"ef"
    assert not peer.ws.has_more()
    with pytest.raises(BlockingIOError):
        peer.ws.recv(4)


def test_flood_of_small_frames_is_read_in_parts(peer: Peer) -> None:
    peer.send(*[BytesMessage(data=b"x")] * (FRAMES_PER_READ + 10))
    assert len(peer.ws.recv(1 << 20)) == FRAMES_PER_READ
    assert peer.ws.has_more()
    assert len(peer.read()) == 10


def test_flood_of_pings_is_read_in_parts_and_answered_once_each_time(peer: Peer) -> None:
    peer.send(*[Ping(payload=b"%d" % number) for number in range(FRAMES_PER_READ + 10)])
    with pytest.raises(BlockingIOError):
        peer.ws.recv(100)
    assert peer.ws.has_more()
    assert peer.read() == b""
    assert [bytes(pong.payload) for pong in peer.came() if isinstance(pong, Pong)] == [
        b"%d" % (FRAMES_PER_READ - 1),
        b"%d" % (FRAMES_PER_READ + 9),
    ]


def test_no_more_than_one_read_is_held(peer: Peer) -> None:
    peer.send(BytesMessage(data=bytes(READ_BYTES * 2)))
    assert len(peer.ws.recv(10)) == 10
    assert len(peer.ws._came) <= READ_BYTES


def test_text_is_refused_after_what_came_before_it(peer: Peer) -> None:
    """[MQTT-6.0.0-1]"""
    peer.send(BytesMessage(data=b"before"), TextMessage(data="text"), BytesMessage(data=b"after"))
    assert peer.read() == b"before"
    assert peer.ws.recv(10) == b""
    (close,) = peer.came()
    assert isinstance(close, CloseConnection)
    assert close.code == 1003


def test_frame_without_a_mask_is_refused(peer: Peer) -> None:
    peer.send_octets(b"\x82\x01x")
    assert peer.ws.recv(10) == b""
    (close,) = peer.came()
    assert isinstance(close, CloseConnection)
    assert close.code == 1002


def test_end_is_told_though_the_peer_keeps_its_socket_open(peer: Peer) -> None:
    peer.send(BytesMessage(data=b"last"), CloseConnection(1000))
    assert peer.ws.recv(10) == b"last"
    assert peer.ws.has_more()
    assert peer.ws.recv(10) == b""
    (close,) = peer.came()
    assert isinstance(close, CloseConnection)
    assert close.code == 1000
    with pytest.raises(BrokenPipeError):
        peer.ws.send(b"x")


def test_socket_that_ends_without_a_word_is_an_end(peer: Peer) -> None:
    peer.send(BytesMessage(data=b"last"))
    peer.socket.shutdown(socket.SHUT_WR)
    assert peer.read() == b"last"
    assert peer.ws.recv(10) == b""


def test_large_send_goes_out_in_messages_that_clients_take() -> None:
    peer = Peer(buffer_bytes=1 << 14)
    data = bytes(range(256)) * (MESSAGE_BYTES // 256 * 2 + 3)
    left = memoryview(data)
    found: list[Event] = []
    while left:
        try:
            left = left[peer.ws.send(left) :]
        except BlockingIOError:
            found += peer.came()
    found += peer.came()
    assert b"".join(event.data for event in found if isinstance(event, BytesMessage)) == data
    assert sum(event.message_finished for event in found if isinstance(event, BytesMessage)) == 3
    peer.close()


def test_pong_does_not_break_into_a_frame_that_was_begun() -> None:
    peer = Peer(buffer_bytes=1 << 14)
    data = bytes(MESSAGE_BYTES)
    with pytest.raises(BlockingIOError):
        peer.ws.send(data)
    peer.send(Ping(payload=b"there?"))
    with pytest.raises(BlockingIOError):
        peer.ws.recv(10)
    found: list[Event] = []
    sent = 0
    while not sent:
        found += peer.came()
        try:
            sent = peer.ws.send(data)
        except BlockingIOError:
            continue
    assert sent == len(data)
    peer.ws.send(b"next")
    found += peer.came()
    assert b"".join(event.data for event in found if isinstance(event, BytesMessage)) == data + b"next"
    assert [bytes(event.payload) for event in found if isinstance(event, Pong)] == [b"there?"]
    peer.close()


def test_goodbye_is_said(peer: Peer) -> None:
    peer.ws.send(b"last")
    peer.ws.shutdown(socket.SHUT_WR)
    last, close = peer.came()
    assert isinstance(last, BytesMessage)
    assert isinstance(close, CloseConnection)
    assert close.code == 1000
    # What the peer sent before it heard of it can be read, and a ping is no mistake.
    peer.frames = Frames(ConnectionType.CLIENT)
    peer.send(Ping(payload=b""), BytesMessage(data=b"x"), CloseConnection(1000))
    assert peer.read() == b"x"


def test_connection_that_is_closed_from_our_side_says_that_it_goes_away() -> None:
    peer = Peer()
    peer.ws.close()
    (close,) = peer.came()
    assert isinstance(close, CloseConnection)
    assert close.code == 1001
    peer.socket.close()


# -- a running broker -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[RunningBroker]:
    certificate, key = authority.server()
    config = f"""
[tls]
certificate = "{certificate}"
key = "{key}"
client_ca = "{authority.file}"
[mqtt]
handshake_s = 1
[[users]]
name = "ann"
[[permissions]]
user = "ann"
configure = ""
write = ".*"
read = ".*"
"""
    doors = [word for door in ("mqtt", "mqtts", "ws", "wss") for word in (f"--{door}", "127.0.0.1:0")]
    with RunningBroker(tmp_path_factory.mktemp("broker"), config=config, arguments=doors) as running:
        yield running
        assert running.is_running(), running.last_lines()
        running.stop()
        told = running.log_path.read_text()
        assert "Traceback" not in told, told


def test_mqtt_works_over_websocket_with_packets_cut_anywhere(broker: RunningBroker) -> None:
    """[MQTT-6.0.0-2] One octet in each message, and then many packets in one."""
    slow = connect(broker.ports["ws"], message_bytes_max=1)
    slow.sendall(encode_packet(Connect("slow"), Version.V5))
    assert _kind(slow.recv(1 << 20)) is PacketType.CONNACK
    slow.sendall(encode_packet(Subscribe(1, (Subscription("ws/#"),)), Version.V5))
    publishes = [encode_packet(Publish("ws/topic", b"%d" % number), Version.V5) for number in range(3)]
    slow.message_bytes_max = 1 << 20
    slow.sendall(b"".join(publishes) + encode_packet(Pingreq(), Version.V5))
    data = b""
    while not data.endswith(encode_packet(Pingresp(), Version.V5)):
        data += slow.recv(1 << 20)
    assert [publish in data for publish in publishes] == [True] * 3
    slow.close()


def _kind(packet: bytes) -> PacketType:
    return PacketType(packet[0] >> 4)


def test_ping_is_answered_and_close_too(broker: RunningBroker) -> None:
    sock = connect(broker.ports["ws"])
    sock.send(Ping(payload=b"still there?"))
    pong = sock.wait_for_event()
    assert isinstance(pong, Pong)
    assert bytes(pong.payload) == b"still there?"
    sock.send(CloseConnection(1000))
    assert isinstance(sock.wait_for_event(), CloseConnection)
    # The server closes first [RFC 6455, 7.1.1].
    assert sock.socket.recv(10) == b""
    sock.close()


@pytest.mark.parametrize("header_bytes", [1, 4096, 10_000])
@pytest.mark.parametrize("door", ["ws", "wss"])
def test_first_frames_may_come_with_the_request(
    broker: RunningBroker, authority: Authority, door: str, header_bytes: int
) -> None:
    """In one piece, also of TLS, which then holds what was not read of it."""
    sock = socket.create_connection(("127.0.0.1", broker.ports[door]), timeout=PATIENCE_S)
    if door == "wss":
        sock = authority.client_context().wrap_socket(sock, server_hostname="localhost")
    headers = ASKED | {"Cookie": "x" * header_bytes}
    head = "GET /mqtt HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    connect = Connect("early", user_name="guest", password=b"guest")
    frame = Frames(ConnectionType.CLIENT).send(BytesMessage(data=encode_packet(connect, Version.V5)))
    sock.sendall(head.encode() + frame)
    came = b""
    while b"\r\n\r\n" not in came or came.endswith(b"\r\n\r\n"):
        data = sock.recv(1 << 16)
        assert data, came
        came += data
    frame = came.partition(b"\r\n\r\n")[2]
    assert frame[0] == 0x82
    assert _kind(frame[2:]) is PacketType.CONNACK
    sock.close()


@pytest.mark.parametrize(
    ("method", "target", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("POST", "/mqtt", {}, 405),
        ("GET", "/mqtt", {}, 400),
        ("GET", "/mqtt", ASKED | {"Origin": "https://elsewhere.example"}, 403),
        ("GET", "/mqtt", ASKED | {"Sec-WebSocket-Protocol": "chat"}, 400),
        ("GET", "/mqtt", ASKED | {"X-Long": "x" * 40_000}, 431),
    ],
)
def test_others_get_an_answer_in_http(
    broker: RunningBroker, method: str, target: str, headers: dict[str, str], status: int
) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", broker.ports["ws"], timeout=PATIENCE_S)) as asking:
        asking.request(method, target, headers=headers)
        answer = asking.getresponse()
        assert answer.status == status
        assert answer.read()


@pytest.mark.parametrize("octets", [b"", b"GET /mqtt HTTP/1.1\r\n", encode_packet(Connect("plain"), Version.V5)])
def test_whoever_does_not_ask_in_time_is_cut_off(broker: RunningBroker, octets: bytes) -> None:
    plain = socket.create_connection(("127.0.0.1", broker.ports["ws"]), timeout=PATIENCE_S)
    plain.sendall(octets)
    while plain.recv(1 << 16):
        pass
    plain.close()


class Paho:
    """A client of paho's, connected; gathers what comes."""

    def __init__(self, port: int, *, transport: str = "tcp", context: ssl.SSLContext | None = None) -> None:
        kind = "websockets" if transport == "websockets" else "tcp"
        self.client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5, transport=kind)
        if context is not None:
            self.client.tls_set_context(context)
        self.connected, self.subscribed, self.came = threading.Event(), threading.Event(), threading.Event()
        self.reason = ""
        self.got: list[bytes] = []
        self.client.on_connect = self._on_connect
        self.client.on_subscribe = lambda *_: self.subscribed.set()
        self.client.on_message = self._on_message
        self.client.connect("localhost" if context else "127.0.0.1", port)
        self.client.loop_start()
        assert self.connected.wait(PATIENCE_S)

    def _on_connect(self, client: object, data: object, flags: object, reason: object, properties: object) -> None:
        self.reason = str(reason)
        self.connected.set()

    def _on_message(self, client: object, data: object, message: paho.MQTTMessage) -> None:
        self.got.append(message.payload)
        self.came.set()

    def echoes(self, topic: str, payload: bytes) -> bool:
        """Whether what it publishes comes back to it."""
        self.client.subscribe(topic, 2)
        assert self.subscribed.wait(PATIENCE_S)
        self.client.publish(topic, payload, 2).wait_for_publish(PATIENCE_S)
        return self.came.wait(PATIENCE_S) and self.got == [payload]

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()
        # It has no public way to close the sockets that its threads wake each other by.
        self.client._reset_sockets()


@pytest.mark.parametrize("payload", [b"small", bytes(3_000_000)], ids=["small", "large"])
def test_paho_speaks_over_websocket(broker: RunningBroker, payload: bytes) -> None:
    client = Paho(broker.ports["ws"], transport="websockets")
    assert client.reason == "Success"
    assert client.echoes(f"paho/{len(payload)}", payload)
    client.close()


@pytest.mark.parametrize(("door", "transport"), [("mqtts", "tcp"), ("wss", "websockets")])
def test_certificate_is_a_login(broker: RunningBroker, authority: Authority, door: str, transport: str) -> None:
    """Without user name and password; the name of the server is asked for (SNI) and checked."""
    certificate = authority.issue(f"ann-{door}", names=[x509.DNSName("ann")])
    client = Paho(broker.ports[door], transport=transport, context=authority.client_context(certificate))
    assert client.reason == "Success"
    assert client.echoes(f"tls/{door}", bytes(300_000))
    client.close()


@pytest.mark.parametrize("door", ["mqtts", "wss"])
def test_certificate_of_somebody_unknown_is_no_login(broker: RunningBroker, authority: Authority, door: str) -> None:
    certificate = authority.issue(f"eve-{door}", names=[x509.DNSName("eve")])
    transport = "websockets" if door == "wss" else "tcp"
    client = Paho(broker.ports[door], transport=transport, context=authority.client_context(certificate))
    assert client.reason == "Bad user name or password"
    client.close()


@pytest.mark.parametrize("door", ["mqtts", "wss"])
def test_certificate_of_another_authority_gets_no_tls(
    broker: RunningBroker, authority: Authority, tmp_path: Path, door: str
) -> None:
    strange = Authority(tmp_path, "strange").issue("ann", names=[x509.DNSName("ann")])
    context = authority.client_context(strange)
    with (
        socket.create_connection(("127.0.0.1", broker.ports[door]), timeout=PATIENCE_S) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        # TLS 1.3 lets a client send before it hears that it was refused.
        secured.sendall(b"x")
        if not secured.recv(1):
            raise ConnectionError("closed")


def test_stop_tells_clients_and_does_not_wait_for_those_who_never_asked(tmp_path: Path) -> None:
    with RunningBroker(tmp_path, arguments=["--ws", "127.0.0.1:0"]) as broker:
        silent = socket.create_connection(("127.0.0.1", broker.ports["ws"]), timeout=PATIENCE_S)
        sock = connect(broker.ports["ws"])
        sock.sendall(encode_packet(Connect("told"), Version.V5))
        assert _kind(sock.recv(1 << 20)) is PacketType.CONNACK
        broker.stop()
        # DISCONNECT with 0x8B and why, then the close of the WebSocket.
        why = Properties(reason_string="broker is shutting down")
        assert encode_packet(Disconnect(ReasonCode.SERVER_SHUTTING_DOWN, why), Version.V5) == sock.recv(100)
        assert isinstance(sock.wait_for_event(), CloseConnection)
        sock.close()
        silent.close()
