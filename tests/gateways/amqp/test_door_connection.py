"""From the protocol header to close-ok: login, tuning, heartbeats, frames of every cut. Driven frame by frame and by
pika."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pika
import pytest
from pamqp import body, commands, frame, header, heartbeat
from pika.exceptions import AMQPConnectionError, ProbableAuthenticationError
from tests.running_broker import RunningBroker, eventually

from .conftest import Connect, unlike_rabbitmq
from .pika_client import PERSISTENT, Inbox, bodies, counts, get, publish, refused
from .wire import CAPABILITIES, Closed, Wire

Basic, Channel, Connection = commands.Basic, commands.Channel, commands.Connection
Exchange, Queue = commands.Exchange, commands.Queue
MIB = 1024 * 1024


# -- the handshake ------------------------------------------------------------------------------------------------


@unlike_rabbitmq(reason="it may reset the connection before its answer is read")
@pytest.mark.parametrize(
    "hello", [b"AMQP\0\0\x09\x00", b"AMQP\x01\x01\x00\x0a", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\0\0\0\0\0"]
)
def test_wrong_header_is_answered_with_the_right_one_and_the_end(broker: RunningBroker, hello: bytes) -> None:
    with broker.open_socket() as client:
        client.sendall(hello)
        answer = b""
        while data := client.recv(100):
            answer += data
    assert answer == b"AMQP\0\0\x09\x01"


def test_start_names_mechanisms_locales_and_capabilities(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        start = wire.greet()
    assert (start.version_major, start.version_minor) == (0, 9)
    assert {"PLAIN", "AMQPLAIN"} <= set(str(start.mechanisms).split())
    assert start.locales == "en_US"
    properties = start.server_properties
    assert {"product", "version", "platform", "capabilities"} <= set(properties)
    assert {
        "publisher_confirms",
        "exchange_exchange_bindings",
        "basic.nack",
        "consumer_cancel_notify",
        "connection.blocked",
        "consumer_priorities",
        "authentication_failure_close",
        "per_consumer_qos",
        "direct_reply_to",
    } <= {name for name, able in properties["capabilities"].items() if able}


def test_amqplain_logs_in_too(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.greet()
        table = b"".join(
            bytes((len(key),)) + key + b"S" + len(value).to_bytes(4, "big") + value
            for key, value in ((b"LOGIN", b"guest"), (b"PASSWORD", b"guest"))
        )
        wire.send(0, Connection.StartOk({}, "AMQPLAIN", table.decode("latin-1"), "en_US"))
        wire.expect(Connection.Tune, 0)


def test_wrong_password_is_403_for_those_who_understand_it(broker: RunningBroker) -> None:
    with pytest.raises(ProbableAuthenticationError, match="403"):
        broker.connect(password="wrong")
    with pytest.raises(ProbableAuthenticationError, match="403"):
        broker.connect(user="nobody")


def test_wrong_password_is_the_end_for_those_who_do_not(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.greet()
        wire.send(0, Connection.StartOk({"capabilities": {}}, "PLAIN", "\0guest\0wrong", "en_US"))
        with pytest.raises(Closed):
            wire.receive()


@unlike_rabbitmq(reason="it ends without a word before connection.open")
def test_unknown_mechanism_is_refused(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.greet()
        wire.send(0, Connection.StartOk({"capabilities": CAPABILITIES}, "GUESS", "guest", "en_US"))
        wire.expect_connection_close(503, Connection.StartOk)
        wire.expect_end()


@unlike_rabbitmq(reason="it ends without a word before connection.open")
@pytest.mark.parametrize("response", ["", "guest", "\0guest", "\0guest\0guest\0more"])
def test_login_that_is_none_is_refused(broker: RunningBroker, response: str) -> None:
    with Wire(broker.port) as wire:
        wire.greet()
        wire.send(0, Connection.StartOk({"capabilities": CAPABILITIES}, "PLAIN", response, "en_US"))
        found = wire.expect(Connection.Close, 0)
        assert found.reply_code in (403, 501)


def test_vhost_that_is_not_there_is_530(broker: RunningBroker) -> None:
    with pytest.raises(AMQPConnectionError, match="530"):
        broker.connect(virtual_host="nowhere")


def test_methods_out_of_turn_end_the_handshake(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.greet()
        wire.send(0, Connection.Open("/"))
        with pytest.raises((Closed, AssertionError)):
            wire.expect(Connection.OpenOk)
    with Wire(broker.port) as wire:
        wire.greet()
        wire.authenticate()
        wire.send(1, Channel.Open())
        with pytest.raises((Closed, AssertionError)):
            wire.expect(Channel.OpenOk)


def test_handshake_may_come_octet_by_octet_and_all_at_once(broker: RunningBroker) -> None:
    start_ok = Connection.StartOk({"capabilities": CAPABILITIES}, "PLAIN", "\0guest\0guest", "en_US")
    said = b"AMQP\0\0\x09\x01" + b"".join(
        frame.marshal(one, 0) for one in (start_ok, Connection.TuneOk(2047, 131_072, 0), Connection.Open("/"))
    )
    said += frame.marshal(Channel.Open(), 1)
    for step in (1, len(said)):
        with Wire(broker.port) as wire:
            for place in range(0, len(said), step):
                wire.send_octets(said[place : place + step])
            for expected in (Connection.Start, Connection.Tune, Connection.OpenOk, Channel.OpenOk):
                wire.expect(expected)


@unlike_rabbitmq(reason="its handshake timeout is 10 s")
def test_client_that_says_nothing_is_let_go(tmp_path: Path) -> None:
    with RunningBroker(tmp_path, config="[amqp]\nhandshake_s = 1\n") as quick, quick.open_socket() as client:
        assert client.recv(1) == b""


# -- tuning -------------------------------------------------------------------------------------------------------


@unlike_rabbitmq(reason="it ends without a word before connection.open")
@pytest.mark.parametrize(
    "tune_ok",
    [
        pytest.param(Connection.TuneOk(2047, 4095, 0), id="frame-max too small"),
        pytest.param(Connection.TuneOk(2047, 10 * MIB, 0), id="frame-max too large"),
        pytest.param(Connection.TuneOk(65535, 131_072, 0), id="channel-max too large"),
    ],
)
def test_tuning_beyond_the_offer_is_530(broker: RunningBroker, tune_ok: Connection.TuneOk) -> None:
    with Wire(broker.port) as wire:
        wire.greet()
        wire.authenticate()
        wire.send(0, tune_ok, Connection.Open("/"))
        wire.expect_connection_close(530, Connection.TuneOk)
        wire.expect_end()


def test_frame_max_holds_both_ways(broker: RunningBroker, name: str) -> None:
    data = os.urandom(50_000)
    with Wire(broker.port) as wire:
        wire.log_in(frame_max=4096)
        wire.open_channel(1)
        wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
        pieces = [body.ContentBody(data[place : place + 4088]) for place in range(0, len(data), 4088)]
        content = header.ContentHeader(body_size=len(data), properties=Basic.Properties())
        wire.send(1, Basic.Publish(routing_key=name), content, *pieces)
        wire.call(1, Basic.Consume(queue=name), Basic.ConsumeOk)
        wire.expect(Basic.Deliver)
        assert wire.expect(header.ContentHeader).body_size == len(data)
        got = b""
        while len(got) < len(data):
            piece = wire.expect(body.ContentBody).value
            assert len(piece) <= 4088
            got += piece
        assert got == data


def test_frame_above_the_maximum_is_501(broker: RunningBroker, name: str) -> None:
    with Wire(broker.port) as wire:
        wire.log_in(frame_max=4096)
        wire.open_channel(1)
        content = header.ContentHeader(body_size=5000, properties=Basic.Properties())
        wire.send(1, Basic.Publish(routing_key=name), content, body.ContentBody(b"x" * 5000))
        assert wire.expect(Connection.Close, 0).reply_code == 501
        wire.expect_end()


def test_as_many_channels_as_were_tuned(connect: Connect, name: str) -> None:
    connection = connect(channel_max=40)
    channels = [connection.channel() for _ in range(40)]
    channels[0].queue_declare(name)
    for channel in channels:
        publish(channel, name, b"x")
    channels[17].close()
    channels[17] = connection.channel()
    for channel in channels:
        assert get(channel, name) is not None


# -- heartbeats ---------------------------------------------------------------------------------------------------


def test_broker_beats_when_it_has_nothing_to_say(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.log_in(beat=1)
        for _ in range(2):
            wire.send_octets(frame.marshal(heartbeat.Heartbeat(), 0))
            assert isinstance(wire.receive_any()[1], heartbeat.Heartbeat)


def test_silent_client_is_let_go_and_gives_back_what_it_held(
    broker: RunningBroker, connect: Connect, name: str
) -> None:
    channel = connect().channel()
    channel.queue_declare(name)
    publish(channel, name, b"1")
    with Wire(broker.port) as wire:
        wire.log_in(beat=1)
        wire.open_channel(1)
        wire.call(1, Queue.Declare(queue=f"{name}.own", exclusive=True), Queue.DeclareOk)
        wire.call(1, Basic.Get(queue=name), Basic.GetOk)
        inbox = Inbox(channel, name)
        assert [(one.body, one.redelivered) for one in inbox.wait(1)] == [(b"1", True)]
        eventually(lambda: _declares(connect, f"{name}.own"))


def _declares(connect: Connect, queue: str) -> bool:
    try:
        connect().channel().queue_declare(queue)
    except pika.exceptions.ChannelClosedByBroker as error:
        assert error.reply_code == 405
        return False
    return True


def test_traffic_is_as_good_as_a_beat(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.log_in(beat=1)
        wire.open_channel(1)
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            wire.call(1, Basic.Qos(prefetch_count=1), Basic.QosOk)
            time.sleep(0.2)


def test_client_may_want_no_heartbeat(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.log_in(beat=0)
        wire.socket.settimeout(2.5)
        with pytest.raises(TimeoutError):
            wire.receive_any()
        wire.socket.settimeout(30)
        wire.open_channel(1)


# -- frames cut anywhere ------------------------------------------------------------------------------------------


def test_messages_may_be_cut_anywhere(wire: Wire, name: str) -> None:
    wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
    bodies_sent = [os.urandom(size) for size in (0, 1, 100, 5000, 1, 0, 300)]
    said = b""
    for one in bodies_sent:
        said += frame.marshal(Basic.Publish(routing_key=name), 1)
        said += frame.marshal(header.ContentHeader(body_size=len(one), properties=Basic.Properties(message_id="m")), 1)
        for place in range(0, len(one), 700):
            said += frame.marshal(body.ContentBody(one[place : place + 700]), 1)
    for step in (1, 2, 7, 64, 999):
        for place in range(0, len(said), step):
            wire.send_octets(said[place : place + step])
        wire.call(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk)
        for one in bodies_sent:
            wire.call(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
            size = wire.expect(header.ContentHeader).body_size
            got = b""
            while len(got) < size:
                got += wire.expect(body.ContentBody).value
            assert got == one


def test_contents_of_two_channels_may_be_mixed(wire: Wire, name: str) -> None:
    wire.open_channel(2)
    wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
    content = header.ContentHeader(body_size=2, properties=Basic.Properties())
    for number in (1, 2):
        wire.send(number, Basic.Publish(routing_key=name))
    for number in (1, 2):
        wire.send(number, content)
    for number in (2, 1, 2, 1):
        wire.send(number, body.ContentBody(b"%d" % number))
    for number in (1, 2):
        wire.call(number, Basic.Qos(prefetch_count=0), Basic.QosOk)
    got = []
    for _ in range(2):
        wire.call(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
        wire.expect(header.ContentHeader)
        got.append(wire.expect(body.ContentBody).value)
    assert sorted(got) == [b"11", b"22"]


# -- size ---------------------------------------------------------------------------------------------------------


def test_body_of_128_mib_goes_in_and_out(broker: RunningBroker, connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name, durable=True)
    channel.confirm_delivery()
    data = os.urandom(MIB) * 128
    channel.basic_publish("", name, data, PERSISTENT)
    method, _properties, got = channel.basic_get(name)
    assert got == data
    channel.basic_nack(method.delivery_tag)
    inbox = Inbox(channel, name)
    assert inbox.wait(1)[0].body == data
    channel.queue_delete(name)


def test_body_above_the_limit_is_406_and_the_connection_lives(connect: Connect, name: str) -> None:
    connection = connect()
    channel, other = connection.channel(), connection.channel()
    channel.queue_declare(name)
    with refused(406, "larger than"):
        channel.basic_publish("", name, bytes(128 * MIB + 1))
        channel.basic_qos(prefetch_count=1)
    publish(other, name, b"x")
    assert bodies(other, name) == [b"x"]


@unlike_rabbitmq(reason="it takes the whole body before it refuses it")
def test_announced_size_costs_nothing(wire: Wire) -> None:
    wire.send(1, Basic.Publish(routing_key="k"), header.ContentHeader(body_size=2**62, properties=Basic.Properties()))
    wire.expect_channel_close(1, 406, Basic.Publish)


# -- the end ------------------------------------------------------------------------------------------------------


def test_close_is_answered_and_then_comes_the_end(wire: Wire) -> None:
    wire.call(0, Connection.Close(200, "bye", 0, 0), Connection.CloseOk)
    wire.expect_end()


def test_every_close_is_answered_and_what_comes_behind_it_resets_nothing(wire: Wire) -> None:
    # As a client with threads does (amqp091-go's TestConcurrentClose); RabbitMQ leaves the end of the socket to it too.
    close = Connection.Close(200, "bye", 0, 0)
    wire.call(0, close, Connection.CloseOk)
    wire.send(0, heartbeat.Heartbeat(), close)
    wire.send(1, Queue.Declare(queue="nobody hears of it"))
    wire.expect(Connection.CloseOk, 0)
    assert wire.socket.recv(1) == b"", "the end, and no reset"


def test_closed_channel_may_be_opened_again_and_counts_anew(wire: Wire, name: str) -> None:
    wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
    for _ in range(3):
        wire.publish(1, "", name)
        assert wire.call(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk).delivery_tag == 1
        wire.expect(header.ContentHeader)
        wire.expect(body.ContentBody)
        wire.call(1, Channel.Close(200, "", 0, 0), Channel.CloseOk)
        wire.open_channel(1)


def test_clients_that_vanish_leave_nothing_behind(broker: RunningBroker, connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name)
    publish(channel, name, b"1", b"2")
    said = b"".join(
        frame.marshal(one, 1)
        for one in (
            Queue.Declare(queue=f"{name}.own", exclusive=True),
            Basic.Consume(queue=name),
            Basic.Publish(routing_key=name),
            header.ContentHeader(body_size=5, properties=Basic.Properties()),
            body.ContentBody(b"12345"),
        )
    )
    for cut in range(1, len(said), 9):
        with Wire(broker.port) as wire:
            wire.log_in()
            wire.open_channel(1)
            wire.send_octets(said[:cut])
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    eventually(lambda: counts(channel, name) == (2, 0))
    eventually(lambda: _declares(connect, f"{name}.own"))
    assert bodies(channel, name) == [b"1", b"2"]


@unlike_rabbitmq(reason="3.10 takes any secret")
def test_update_secret_takes_the_right_one_and_refuses_others(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.log_in()
        wire.call(0, Connection.UpdateSecret("guest", "renewed"), Connection.UpdateSecretOk)
        wire.open_channel(1)
        wire.send(0, Connection.UpdateSecret("wrong", "renewed"))
        wire.expect_connection_close(530, Connection.UpdateSecret)


def test_random_octets_never_end_the_broker(broker: RunningBroker, connect: Connect) -> None:
    witness = connect().channel()
    for seed in range(40):
        with broker.open_socket() as client:
            client.settimeout(10)
            noise = os.urandom(50 + seed * 10)
            try:
                if seed % 2:
                    client.sendall(b"AMQP\0\0\x09\x01" + noise)
                else:
                    client.sendall(noise)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1000):
                    pass
            except OSError:
                pass
    witness.basic_qos(prefetch_count=1)


def test_pika_connects_with_each_of_its_ways(broker: RunningBroker) -> None:
    settings: dict[str, Any]
    for settings in ({}, {"heartbeat": 5}, {"frame_max": 4096}, {"channel_max": 3}, {"locale": "en_US"}):
        broker.connect(**settings).close()
    with pytest.raises(AMQPConnectionError):
        broker.connect(virtual_host="/absent")
    pika.BlockingConnection(pika.URLParameters(broker.url())).close()
