"""Logins by SCRAM over the wire: RFC 7677's own exchange, wrong ones, proofs on an open connection."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from headrace.config import Config, load_config
from headrace.core_log.env import Env
from headrace.core_log.real import SystemIds, real_env
from headrace.gateways.mqtt.cutter import PacketCutter
from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.packets import Auth, Connack, Connect, Disconnect, Packet, Pingreq, Pingresp, Publish
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, Version
from headrace.node import run_node

from .conftest import MqttBroker
from .scram_client import MECHANISM, ScramClient
from .test_scram import CLIENT_FINAL, CLIENT_FIRST, NONCE, SERVER_FINAL, SERVER_FIRST, VERIFIER
from .wire import Open, Wire

CONTINUE, AGAIN = ReasonCode.CONTINUE_AUTHENTICATION, ReasonCode.REAUTHENTICATE
CONFIG = f"""
[[vhosts]]
name = "shop"
[[users]]
name = "ann"
password = "secret"
[[users]]
name = "user"
scram = "{VERIFIER}"
[[users]]
name = "bob"
password = "other"
""" + "".join(
    f"""
[[permissions]]
user = "{user}"
vhost = "{vhost}"
configure = ".*"
write = ".*"
read = ".*"
"""
    for user in ("ann", "user", "bob")
    for vhost in ("/", "shop")
)


def auth(reason: ReasonCode, data: bytes | None, method: str | None = MECHANISM) -> Auth:
    return Auth(reason, Properties(authentication_method=method, authentication_data=data))


def connect(data: bytes | None, method: str = MECHANISM, client_id: str = "") -> Connect:
    return Connect(client_id, properties=Properties(authentication_method=method, authentication_data=data))


def log_in(wire: Wire, name: str, password: str) -> Connack:
    """All of the exchange; the answer to the last word, or to the first if that was refused."""
    client = ScramClient(name, password)
    wire.send(connect(client.first()))
    challenge = wire.receive()
    if isinstance(challenge, Connack):
        return challenge
    assert isinstance(challenge, Auth)
    assert challenge.reason is CONTINUE
    assert challenge.properties.authentication_method == MECHANISM
    wire.send(auth(CONTINUE, client.final(challenge.properties.authentication_data or b"")))
    connack = wire.expect(Connack)
    if not connack.reason:
        assert connack.properties.authentication_method == MECHANISM
        assert client.knows_server(connack.properties.authentication_data or b"")
    return connack


# -- the exchange of the RFC, octet by octet ---------------------------------------------------------------------------


class RfcIds(SystemIds):
    def nonce(self) -> str:
        return NONCE


async def test_exchange_of_rfc_7677_over_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(CONFIG)
    doors = {f"doors.{name}": "off" for name in ("amqp", "ws", "http")}
    config: Config = load_config(path, {}, doors | {"doors.mqtt": "127.0.0.1:0", "node.data": str(tmp_path / "data")})
    (tmp_path / "data").mkdir()
    env: Env = replace(real_env(tmp_path / "data"), ids=RfcIds())
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        doors_open = await nursery.start(partial(run_node, config, env, stop=stop))
        stream = await trio.open_tcp_stream("127.0.0.1", doors_open["mqtt"].port)
        cutter = PacketCutter(from_client=False, version=Version.V5)

        async def told(packet: Packet) -> Packet:
            await stream.send_all(encode_packet(packet, Version.V5))
            while not (events := cutter.receive(await stream.receive_some())):
                pass
            (event,) = events
            return event  # type: ignore[return-value]

        assert await told(connect(CLIENT_FIRST)) == auth(CONTINUE, SERVER_FIRST)
        connack = await told(auth(CONTINUE, CLIENT_FINAL))
        assert isinstance(connack, Connack)
        assert connack.reason is ReasonCode.SUCCESS
        assert connack.properties.authentication_method == MECHANISM
        assert connack.properties.authentication_data == SERVER_FINAL
        await stream.aclose()
        stop.set()


# -- CONNECT -----------------------------------------------------------------------------------------------------------


def test_password_of_the_file_can_be_proven(wire: Open) -> None:
    client = wire()
    assert log_in(client, "ann", "secret").reason is ReasonCode.SUCCESS
    client.subscribe("scram/#")
    client.send(Publish("scram/x", b"hello"))
    assert client.expect(Publish).payload == b"hello"


def test_name_may_say_the_vhost(wire: Open) -> None:
    here, there = wire(), wire()
    assert log_in(here, "shop:ann", "secret").reason is ReasonCode.SUCCESS
    assert log_in(there, "shop:user", "pencil").reason is ReasonCode.SUCCESS
    here.subscribe("in/shop")
    there.publish("in/shop", b"x", 1)
    assert here.expect(Publish).payload == b"x"


@pytest.mark.parametrize(
    ("name", "password"),
    [("ann", "wrong"), ("nobody", "secret"), ("nowhere:ann", "secret"), ("shop:bobby", "x")],
)
def test_wrong_proof_is_answered_0x87(wire: Open, name: str, password: str) -> None:
    """[MQTT-4.12.0-4]"""
    client = wire()
    assert log_in(client, name, password).reason is ReasonCode.NOT_AUTHORIZED
    client.expect_end()


def test_unknown_user_is_challenged_like_a_known_one(wire: Open) -> None:
    shapes = []
    for name in ("ann", "nobody", "nobody"):
        client = wire()
        client.send(connect(ScramClient(name, "x").first()))
        parts = (client.expect(Auth).properties.authentication_data or b"").decode().split(",")
        shapes.append((parts[1], [len(part) for part in parts], parts[2]))
    known, unknown, again = shapes
    assert unknown[1:] == known[1:]
    assert unknown[0] == again[0] != known[0]


def test_client_may_leave_the_beginning_to_the_server(wire: Open) -> None:
    client, scram = wire(), ScramClient("ann", "secret")
    client.send(connect(None))
    assert client.expect(Auth) == auth(CONTINUE, None)
    client.send(auth(CONTINUE, scram.first()))
    client.send(auth(CONTINUE, scram.final(client.expect(Auth).properties.authentication_data or b"")))
    assert client.expect(Connack).reason is ReasonCode.SUCCESS


@pytest.mark.parametrize("data", [b"nonsense", b"p=tls-unique,,n=ann,r=x", b"n,a=bob,n=ann,r=x"])
def test_message_that_is_no_scram_is_refused(wire: Open, data: bytes) -> None:
    client = wire()
    client.send(connect(data))
    assert client.expect(Connack).reason is ReasonCode.NOT_AUTHORIZED
    client.expect_end()


@pytest.mark.parametrize("method", ["SCRAM-SHA-1", "SCRAM-SHA-256-PLUS", "GSSAPI", ""])
def test_method_that_we_do_not_know_is_answered_0x8c(wire: Open, method: str) -> None:
    """[MQTT-4.12.0-1]"""
    client = wire()
    client.send(connect(b"x", method))
    assert client.expect(Connack).reason is ReasonCode.BAD_AUTHENTICATION_METHOD
    client.expect_end()


@pytest.mark.parametrize(
    "packet", [auth(CONTINUE, b"x", "other"), auth(AGAIN, b"x"), Pingreq(), connect(b"x"), Publish("a")], ids=repr
)
def test_only_the_proof_that_was_begun_may_follow_connect(wire: Open, packet: Packet) -> None:
    """[MQTT-4.12.0-3, MQTT-4.12.0-5, MQTT-3.1.2-30]"""
    client = wire()
    client.send(connect(ScramClient("ann", "secret").first()))
    client.expect(Auth)
    client.send(packet)
    assert client.expect(Connack).reason is ReasonCode.PROTOCOL_ERROR
    client.expect_end()


def test_client_may_give_up(wire: Open) -> None:
    client = wire()
    client.send(connect(ScramClient("ann", "secret").first()))
    client.expect(Auth)
    client.send(Disconnect())
    client.expect_end()


def test_packets_that_come_with_the_proof_are_taken_after_it(wire: Open) -> None:
    client, scram = wire(), ScramClient("ann", "secret")
    client.send(connect(scram.first()))
    final = scram.final(client.expect(Auth).properties.authentication_data or b"")
    client.send(auth(CONTINUE, final), Pingreq())
    assert client.expect(Connack).reason is ReasonCode.SUCCESS
    client.expect(Pingresp)


def test_login_takes_no_longer_than_any_other(tmp_path: Path) -> None:
    with MqttBroker(tmp_path, config="[mqtt]\nhandshake_s = 1\n") as broker, broker.wire() as client:
        client.send(connect(ScramClient("guest", "guest").first()))
        client.expect(Auth)
        client.expect_end()


# -- again, on an open connection --------------------------------------------------------------------------------------


@pytest.fixture
def open_one(wire: Open) -> Wire:
    client = wire()
    assert log_in(client, "ann", "secret").reason is ReasonCode.SUCCESS
    return client


def test_client_proves_itself_again_and_all_goes_on_meanwhile(open_one: Wire) -> None:
    for _ in range(2):
        scram = ScramClient("ann", "secret")
        open_one.send(auth(AGAIN, scram.first()))
        challenge = open_one.expect(Auth)
        assert challenge.reason is CONTINUE
        open_one.ping()
        open_one.send(auth(CONTINUE, scram.final(challenge.properties.authentication_data or b"")))
        done = open_one.expect(Auth)
        assert done.reason is ReasonCode.SUCCESS
        assert done.properties.authentication_method == MECHANISM
        assert scram.knows_server(done.properties.authentication_data or b"")


@pytest.mark.parametrize(("name", "password"), [("ann", "wrong"), ("bob", "other"), ("shop:ann", "secret")])
def test_failed_proof_ends_the_connection(open_one: Wire, name: str, password: str) -> None:
    """[MQTT-4.12.1-2] Also the lawful one of somebody else."""
    scram = ScramClient(name, password)
    open_one.send(auth(AGAIN, scram.first()))
    open_one.send(auth(CONTINUE, scram.final(open_one.expect(Auth).properties.authentication_data or b"")))
    open_one.expect_disconnect(ReasonCode.NOT_AUTHORIZED)


@pytest.mark.parametrize(
    "packets",
    [
        [auth(AGAIN, b"n,,n=ann,r=x", "SCRAM-SHA-1")],
        [auth(CONTINUE, b"n,,n=ann,r=x")],
        [auth(AGAIN, b"n,,n=ann,r=x"), auth(AGAIN, b"n,,n=ann,r=x")],
    ],
    ids=["another method", "nothing begun", "begun twice"],
)
def test_auth_out_of_place_is_a_protocol_error(open_one: Wire, packets: list[Auth]) -> None:
    """[MQTT-4.12.1-1]"""
    open_one.send(*packets)
    found = open_one.receive()
    while isinstance(found, Auth):
        found = open_one.receive()
    assert isinstance(found, Disconnect)
    assert found.reason is ReasonCode.PROTOCOL_ERROR
    open_one.expect_end()


def test_whoever_came_with_a_password_cannot_go_on_with_a_proof(client: Open) -> None:
    """[MQTT-4.12.0-7]"""
    one = client()
    one.send(auth(AGAIN, b"n,,n=ann,r=x"))
    one.expect_disconnect(ReasonCode.PROTOCOL_ERROR)
