"""MQTT clients of a node that leads nothing: through the relay to the leader of their vhost, and to the next one."""

import socket
import threading
from itertools import pairwise

import paho.mqtt.client as paho
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion
from tests.gateways.relay.town import Town, in_thread, town

from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.front import PacketBorders
from headrace.gateways.mqtt.packets import Connack, Disconnect, Pingresp, Publish, QoS, Suback
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, ReturnCode, Version

from .wire import PATIENCE_S, Wire
from .ws_client import WsSocket

VERSIONS = pytest.mark.parametrize("version", [Version.V3_1_1, Version.V5], ids=["3.1.1", "5"])


async def lost(built: Town) -> None:
    """The leader dies, and another one comes."""
    assert built.leading is not None
    await built.leading.kill()
    await built.lead()


@VERSIONS
async def test_publish_and_subscribe_cross_the_relay(version: Version) -> None:
    async with town() as built:

        def story() -> None:
            with Wire(built.ports["mqtt"], version) as one, Wire(built.ports["mqtt"], version) as other:
                one.connect("one")
                other.connect("other")
                one.subscribe("a/#", qos=1)
                for number in range(50):
                    other.publish("a/b", b"%d" % number, qos=1)
                got = [one.expect(Publish).payload for _ in range(50)]
                assert got == [b"%d" % number for number in range(50)]

        await in_thread(story)
        await built.until(lambda: not built.mqtt.relays)


async def test_paho_sends_large_messages_through_the_relay() -> None:
    async with town() as built:

        def story() -> None:
            body = b"x" * 3_000_000
            came: list[bytes] = []
            done, ready = threading.Event(), threading.Event()
            client = paho.Client(CallbackAPIVersion.VERSION2, "large", protocol=paho.MQTTv5)
            client.on_subscribe = lambda *_: ready.set()

            def on_message(_client: object, _data: object, message: paho.MQTTMessage) -> None:
                came.append(message.payload)
                done.set()

            client.on_message = on_message
            client.connect("127.0.0.1", built.ports["mqtt"])
            client.loop_start()
            client.subscribe("t", qos=1)
            assert ready.wait(PATIENCE_S)
            client.publish("t", body, qos=1)
            assert done.wait(PATIENCE_S)
            assert came == [body]
            client.disconnect()
            client.loop_stop()

        await in_thread(story)


async def test_what_comes_over_websocket_is_relayed_as_mqtt() -> None:
    async with town() as built:

        def story() -> None:
            with socket.create_connection(("127.0.0.1", built.ports["ws"]), timeout=PATIENCE_S) as plain:
                wire = Wire(built.ports["mqtt"])
                wire.close()
                wire.socket = WsSocket(plain)  # type: ignore[assignment]
                wire.connect("web")
                wire.subscribe("t")
                wire.send(Publish("t", b"over the web"))
                assert wire.expect(Publish).payload == b"over the web"

        await in_thread(story)


async def test_a_client_that_comes_again_by_another_node_takes_its_session_over() -> None:
    async with town() as built:

        def story() -> None:
            with Wire(built.ports["mqtt"]) as one, Wire(built.ports["mqtt"]) as again:
                one.connect("same", session_expiry_interval=60)
                one.subscribe("t", qos=1)
                assert again.connect("same", clean_start=False).session_present
                assert one.expect(Disconnect).reason is ReasonCode.SESSION_TAKEN_OVER

        await in_thread(story)


@VERSIONS
async def test_a_client_whose_leader_is_lost_is_told_and_finds_its_session_with_the_next(version: Version) -> None:
    async with town() as built:

        def begin() -> Wire:
            wire = Wire(built.ports["mqtt"], version)
            kept = {"session_expiry_interval": 600} if version is Version.V5 else {}
            wire.connect("sleeper", clean_start=False, **kept)
            wire.subscribe("t", qos=1)
            with Wire(built.ports["mqtt"], version) as other:
                other.connect("other")
                other.publish("t", b"before", qos=1)
            assert wire.expect(Publish).payload == b"before"
            return wire

        def go_on(wire: Wire) -> None:
            if version is Version.V5:
                found = wire.expect(Disconnect)
                assert found.reason is ReasonCode.SERVER_SHUTTING_DOWN
                assert found.properties.reason_string is not None
                assert "connect again" in found.properties.reason_string
            wire.expect_end()
            wire.close()
            with Wire(built.ports["mqtt"], version) as again:
                kept = {"session_expiry_interval": 600} if version is Version.V5 else {}
                assert again.connect("sleeper", clean_start=False, **kept).session_present
                # It was not acknowledged.
                assert again.expect(Publish).payload == b"before"

        wire = await in_thread(begin)
        await lost(built)
        await in_thread(lambda: go_on(wire))


@VERSIONS
async def test_without_a_leader_the_connect_is_refused(version: Version) -> None:
    async with town() as built:
        built.is_hopeless = True
        assert built.leading is not None
        await built.leading.kill()

        def story() -> None:
            with Wire(built.ports["mqtt"], version) as wire:
                found = wire.connect("c")
                wanted = ReasonCode.SERVER_UNAVAILABLE if version is Version.V5 else ReturnCode.SERVER_UNAVAILABLE
                assert found.reason == wanted
                wire.expect_end()

        await in_thread(story)


async def test_a_vhost_that_is_led_here_is_served_here() -> None:
    async with town() as built:
        built.leader = 1

        def story() -> None:
            with Wire(built.ports["mqtt"]) as wire:
                wire.connect("c", user="/:guest", password=b"guest")
                wire.subscribe("t")
                wire.send(Publish("t", b"x"))
                assert wire.expect(Publish).payload == b"x"
                assert not built.mqtt.relays

        await in_thread(story)


async def test_garbage_is_refused_without_asking_anybody() -> None:
    async with town() as built:

        def story() -> None:
            with Wire(built.ports["mqtt"]) as wire:
                wire.send_octets(b"GET / HTTP/1.1\r\n\r\n")
                wire.expect_end()

        await in_thread(story)
        assert not built.mqtt.relays


async def test_clients_of_a_vhost_that_moved_are_told_to_come_again() -> None:
    async with town() as built:

        def begin() -> Wire:
            wire = Wire(built.ports["mqtt"])
            wire.connect("c")
            return wire

        wire = await in_thread(begin)
        built.mqtt.moved("other")
        built.mqtt.moved("/")
        with wire:
            await in_thread(lambda: wire.expect_disconnect(ReasonCode.SERVER_SHUTTING_DOWN))


packets = st.sampled_from(
    [
        encode_packet(Connack(), Version.V5),
        encode_packet(Pingresp(), Version.V5),
        encode_packet(Publish("t", b"x" * 100), Version.V5),
        encode_packet(Publish("t", b"x" * 20_000), Version.V5),
        encode_packet(Suback(7, (ReasonCode.SUCCESS,), Properties(reason_string="y")), Version.V5),
    ]
)


@given(st.lists(packets, min_size=1, max_size=6), st.lists(st.integers(0, 50_000)), st.integers(0, 4))
def test_borders_of_packets_are_found_wherever_the_octets_are_cut(
    parts: list[bytes], cuts: list[int], missing: int
) -> None:
    data = b"".join(parts)[: -missing or None]
    at_once, borders = PacketBorders(), PacketBorders()
    at_once.pass_on(data)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(edges):
        borders.pass_on(data[start:end])
    assert borders.may_end == at_once.may_end
    if not missing:
        assert borders.may_end
    elif missing < len(parts[-1]):
        assert not borders.may_end


@VERSIONS
async def test_publishes_get_a_definite_no_while_too_few_replicas_are_in_sync(version: Version) -> None:
    async with town() as built:
        assert built.leading is not None
        built.leading.service.broker.unwritable = lambda: "shard 0 has 1 replicas in sync, of at least 2"

        def story() -> None:
            with Wire(built.ports["mqtt"], version) as wire:
                wire.connect("c")
                if version is Version.V5:
                    assert wire.publish("t", b"x", qos=1) is ReasonCode.QUOTA_EXCEEDED
                    assert wire.publish("t", b"x", qos=2) is ReasonCode.QUOTA_EXCEEDED
                else:
                    wire.send(Publish("t", b"x", QoS.AT_LEAST_ONCE, packet_id=1))
                    wire.expect_end()

        await in_thread(story)
