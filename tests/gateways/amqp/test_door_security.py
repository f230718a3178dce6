"""Who may come in and do what: users from the file, rights, limits, TLS, certificates. Driven by pika."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from cryptography import x509
from pamqp import commands
from pika.credentials import ExternalCredentials
from pika.exceptions import (
    AMQPConnectionError,
    AuthenticationError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)
from tests.gateways.delivery.certificates import Authority
from tests.running_broker import RunningBroker, eventually

from .pika_client import Inbox, cut_off, refused
from .wire import Closed, Wire

ANN = """
[[vhosts]]
name = "shop"
[[users]]
name = "ann"
password = "canary-9b1e"
[[users]]
name = "bob"
password = "canary-77aa"
[[permissions]]
user = "ann"
configure = ".*"
write = ".*"
read = ".*"
[[permissions]]
user = "ann"
vhost = "shop"
configure = ".*"
write = ".*"
read = ".*"
"""
BOB = """
[[permissions]]
user = "bob"
configure = "^bob"
write = "^(bob|amq\\\\.)"
read = "^(bob|amq\\\\.)"
"""
ANNS_PASSWORD, BOBS_PASSWORD = "canary-9b1e", "canary-77aa"
USERS = ANN + BOB


def other_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("broker"), config=USERS) as broker:
        yield broker
        assert broker.is_running(), broker.last_lines()
        told = broker.log_path.read_text()
        assert "Traceback" not in told, told
        assert ANNS_PASSWORD not in told and BOBS_PASSWORD not in told


@pytest.fixture
def own(running: RunningBroker) -> Iterator[RunningBroker]:
    """Shared with the other tests; a test that has changed its configuration leaves it as it was."""
    yield running
    if running.config_path.read_text() != USERS:
        running.reload(USERS)


def as_ann(broker: RunningBroker, **settings: Any) -> pika.BlockingConnection:
    return broker.connect(user="ann", password=ANNS_PASSWORD, **settings)


def as_bob(broker: RunningBroker, **settings: Any) -> pika.BlockingConnection:
    return broker.connect(user="bob", password=BOBS_PASSWORD, **settings)


# -- users and rights of the file -------------------------------------------------------------------------------------


def test_users_of_the_file_log_in_with_the_rights_it_gives_them(own: RunningBroker) -> None:
    with as_ann(own, virtual_host="shop") as connection:
        connection.channel().queue_declare("q")
    with as_bob(own) as connection:
        connection.channel().queue_declare("bob.q")
        with refused(403, "configure access to queue 'q' in vhost '/' refused for user 'bob'"):
            connection.channel().queue_declare("q")
    with pytest.raises(ProbableAccessDeniedError, match="access to vhost 'shop' refused for user 'bob'"):
        as_bob(own, virtual_host="shop")
    with pytest.raises(ProbableAuthenticationError):
        own.connect(user="ann", password="wrong")


def test_password_changed_in_the_file_counts_after_a_reload(own: RunningBroker) -> None:
    with as_ann(own):
        own.reload((USERS).replace(ANNS_PASSWORD, "canary-new"))
    with pytest.raises(ProbableAuthenticationError):
        as_ann(own)
    own.connect(user="ann", password="canary-new").close()


def test_right_taken_away_counts_with_the_next_publish(own: RunningBroker) -> None:
    with as_bob(own) as connection:
        channel = connection.channel()
        channel.queue_declare("bob.q")
        channel.confirm_delivery()
        channel.basic_publish("amq.topic", "key", b"lawful")
        own.reload(USERS.replace("write = ", "write = '^bob' # "))
        with refused(403, "write access to exchange 'amq.topic' in vhost '/' refused for user 'bob'"):
            channel.basic_publish("amq.topic", "key", b"no longer")
        assert connection.is_open


def test_consumer_whose_right_to_read_is_taken_away_is_cancelled(own: RunningBroker) -> None:
    with as_ann(own) as anns, as_bob(own) as bobs:
        publisher = anns.channel()
        publisher.queue_declare("bob.q")
        channel = bobs.channel()
        inbox = Inbox(channel, "bob.q", auto_ack=True)
        cancelled: list[str] = []
        channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
        publisher.basic_publish("", "bob.q", b"one")
        inbox.wait(1)
        own.reload(USERS.replace("read = ", "read = '^amq' # "))
        until = time.monotonic() + 30
        while not cancelled and time.monotonic() < until:
            bobs.process_data_events(0.05)
        assert cancelled == [inbox.tag]
        publisher.basic_publish("", "bob.q", b"two")
        assert publisher.queue_declare("bob.q", passive=True).method.message_count == 1


def test_topic_permission_narrows_routing_keys(own: RunningBroker) -> None:
    tom = "\n[[users]]\nname = 'tom'\npassword = 'canary-tom'\n"
    tom += "[[permissions]]\nuser = 'tom'\nconfigure = ''\nwrite = '.*'\nread = ''\n"
    tom += "[[topic_permissions]]\nuser = 'tom'\nexchange = 'amq.topic'\nwrite = '^{username}\\.'\nread = ''\n"
    own.reload(USERS + tom)
    with own.connect(user="tom", password="canary-tom") as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("amq.topic", "tom.news", b"")
        with refused(403):
            channel.basic_publish("amq.topic", "ann.news", b"")


def test_policy_of_the_file_limits_queues_that_exist(own: RunningBroker) -> None:
    with as_ann(own) as connection:
        channel = connection.channel()
        channel.queue_declare("long")
        for number in range(5):
            channel.basic_publish("", "long", b"%d" % number)
        policy = "\n[[policies]]\nname = 'short'\npattern = '^long$'\ndefinition = { max-length = 2 }\n"
        own.reload(USERS + policy)
        assert channel.queue_declare("long", passive=True).method.message_count == 2


def test_everything_survives_a_restart_without_the_file(tmp_path: Path) -> None:
    with RunningBroker(tmp_path, config=USERS) as broker:
        broker.stop()
        broker.config_path.write_text("")
        broker.start()
        as_ann(broker, virtual_host="shop").close()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("[[users]]\nname = 'ann'\npasword = 'canary-1'\n", "users[0].pasword: unknown field"),
        ("[[users]]\nname = 'ann'\npassword = ''\n", "users[0]: password must not be blank"),
        (
            "[[permissions]]\nuser = 'eve'\nconfigure = ''\nwrite = ''\nread = ''\n",
            "permissions[0].user: no user 'eve'",
        ),
        (
            "[[permissions]]\nuser = 'guest'\nconfigure = '('\nwrite = ''\nread = ''\n",
            "permissions[0].configure:",
        ),
    ],
)
def test_mistake_in_the_definitions_stops_the_start_with_file_and_field(
    tmp_path: Path, config: str, problem: str
) -> None:
    path = tmp_path / "h.toml"
    path.write_text(config)
    done = serve_and_fail(tmp_path, "--config", str(path), "--amqp", "127.0.0.1:0")
    assert done.returncode == os.EX_CONFIG
    assert f"{path}: {problem}" in done.stderr
    assert "canary" not in done.stderr


def test_mistake_in_the_definitions_refuses_a_reload_whole(own: RunningBroker) -> None:
    own.config_path.write_text(
        USERS + "\n[log]\nlevel = 'debug'\n[[permissions]]\nuser = 'eve'\nconfigure = ''\nwrite = ''\nread = ''\n"
    )
    assert own.process is not None
    own.process.send_signal(signal.SIGHUP)
    eventually(lambda: "configuration refused, the old one stays" in own.log_path.read_text())
    assert re.search(r"headrace\.toml: permissions\[3\]\.user: no user 'eve'", own.log_path.read_text())
    assert "setting=log.level" not in own.log_path.read_text()


# -- what is open to whom ---------------------------------------------------------------------------------------------


def serve_and_fail(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    doors = [flag for door in ("mqtt", "ws", "http") for flag in (f"--{door}", "off")]
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(folder / "data"), *doors, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_door_open_to_others_does_not_start_with_guest_alone(tmp_path: Path, host: str) -> None:
    done = serve_and_fail(tmp_path, "--amqp", f"{host}:0")
    assert done.returncode == os.EX_CONFIG
    assert f"doors.amqp: {host}:0 can be reached from other machines, and guest is the only user" in done.stderr
    assert done.stdout == ""


def test_from_other_machines_nobody_sends_a_password_in_clear_text(tmp_path: Path) -> None:
    address = other_address()
    with RunningBroker(tmp_path, config=ANN, arguments=["--amqp", f"{address}:0"]) as running:
        with Wire(running.port, address) as wire:
            assert wire.greet().mechanisms == ""
        with pytest.raises(AMQPConnectionError) as caught:
            pika.BlockingConnection(
                pika.ConnectionParameters(
                    address, running.port, credentials=pika.PlainCredentials("ann", ANNS_PASSWORD)
                )
            )
        assert isinstance(caught.value, AuthenticationError)
        with Wire(running.port, address) as wire:
            wire.greet()
            wire.send(0, commands.Connection.StartOk({}, "PLAIN", f"\0ann\0{ANNS_PASSWORD}", "en_US"))
            with pytest.raises(Closed):
                close = wire.receive()[1]
                assert isinstance(close, commands.Connection.Close) and close.reply_code == 403
                raise Closed
        eventually(lambda: "allow_plaintext_auth" in running.log_path.read_text())


def test_clear_text_from_other_machines_can_be_allowed_but_guest_stays_home(tmp_path: Path) -> None:
    address = other_address()
    config = ANN + "\n[amqp]\nallow_plaintext_auth = true\n"

    def connect(user: str, password: str) -> None:
        credentials = pika.PlainCredentials(user, password)
        pika.BlockingConnection(pika.ConnectionParameters(address, running.port, credentials=credentials)).close()

    with RunningBroker(tmp_path, config=config, arguments=["--amqp", f"{address}:0"]) as running:
        connect("ann", ANNS_PASSWORD)
        with pytest.raises(ProbableAuthenticationError):
            connect("guest", "guest")
        assert "can only connect from the broker's own machine" in running.log_path.read_text()


def test_stranger_may_send_64_kib_before_the_login_and_no_more(own: RunningBroker) -> None:
    with Wire(own.port) as wire:
        wire.greet()
        with pytest.raises((Closed, OSError)):
            for _ in range(20):
                wire.send_octets(b"\x08\0\0\0\0\0\0\xce" * 1024)
            wire.receive()
    eventually(lambda: "too many octets before the login" in own.log_path.read_text())


# -- limits -----------------------------------------------------------------------------------------------------------

LIMITED = """
[[vhosts]]
name = "small"
[[users]]
name = "lim"
password = "canary-lim"
[[permissions]]
user = "lim"
configure = ""
write = ""
read = ""
[[permissions]]
user = "ann"
vhost = "small"
configure = ".*"
write = ".*"
read = ".*"
[limits.users.lim]
max_connections = 1
max_channels = 2
[limits.vhosts.small]
max_connections = 1
max_queues = 1
"""


def test_limits_of_users_and_vhosts_are_told_in_rabbitmqs_words(own: RunningBroker) -> None:
    own.reload(USERS + LIMITED)

    def as_lim() -> pika.BlockingConnection:
        return own.connect(user="lim", password="canary-lim")

    connection = as_lim()
    with pytest.raises(ProbableAccessDeniedError, match=r"NOT_ALLOWED - connection refused for user 'lim': user conn"):
        as_lim()
    connection.channel()
    connection.channel().close()
    connection.channel()
    with cut_off(530, "number of channels opened for user 'lim' has reached the maximum allowed user limit of (2)"):
        connection.channel()
    as_lim().close()
    with as_ann(own, virtual_host="small") as connection:
        with pytest.raises(
            ProbableAccessDeniedError,
            match=r"access to vhost 'small' refused for user 'ann': connection limit \(1\) is reached",
        ):
            as_ann(own, virtual_host="small")
        connection.channel().queue_declare("one")
        connection.channel().queue_declare("one")
        with refused(406, "cannot declare queue 'two': queue limit in vhost 'small' (1) is reached"):
            connection.channel().queue_declare("two", exclusive=True)
    as_ann(own, virtual_host="small").close()


def test_limit_of_the_node_is_told_and_counts_only_who_is_there(own: RunningBroker) -> None:
    own.reload(USERS + "\n[limits]\nconnections_max = 2\n")
    refusal = pytest.raises(ProbableAccessDeniedError, match=r"node connection limit \(2\) is reached")
    with as_ann(own), as_bob(own), refusal:
        as_ann(own)
    for _ in range(5):
        as_ann(own).close()


def test_loopback_is_spared_by_limits_per_address_and_user(own: RunningBroker) -> None:
    own.reload(USERS + "\n[limits]\nconnections_per_address_max = 1\nconnections_per_user_max = 1\n")
    with as_ann(own), as_ann(own), as_ann(own):
        pass


# -- patience ---------------------------------------------------------------------------------------------------------


def test_client_that_sits_on_a_delivery_loses_its_channel(tmp_path: Path) -> None:
    with RunningBroker(tmp_path, config="[amqp]\nconsumer_timeout_ms = '1s'\n") as running, running.connect() as one:
        channel = one.channel()
        channel.queue_declare("q")
        channel.basic_publish("", "q", b"slow")
        inbox = Inbox(channel, "q")
        inbox.wait(1)
        with refused(406, "delivery acknowledgement on channel 1 timed out. Timeout value used: 1000 ms"):
            channel.start_consuming()
        assert one.channel().queue_declare("q", passive=True).method.message_count == 1


# -- TLS --------------------------------------------------------------------------------------------------------------


class Secured:
    """A broker with a TLS door, and clients that trust it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        certificate, key = self.authority.server()
        self.tls = f"\n[tls]\ncertificate = '{certificate}'\nkey = '{key}'\nclient_ca = '{self.authority.file}'\n"
        self.broker = RunningBroker(folder, config=USERS + self.tls, arguments=["--amqps", "127.0.0.1:0"])

    def connect(
        self,
        credentials: Any,
        certificate: tuple[Path, Path] | None = None,
        context: ssl.SSLContext | None = None,
        **settings: Any,
    ) -> pika.BlockingConnection:
        context = context or self.authority.client_context(certificate)
        return pika.BlockingConnection(
            pika.ConnectionParameters(
                "127.0.0.1",
                self.broker.ports["amqps"],
                credentials=credentials,
                ssl_options=pika.SSLOptions(context, "localhost"),
                **{"heartbeat": 0, "socket_timeout": 30} | settings,
            )
        )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    built = Secured(tmp_path_factory.mktemp("secured"))
    with built.broker as running:
        yield built
        assert running.is_running(), running.last_lines()
        assert "Traceback" not in running.log_path.read_text()


PASSWORD = pika.PlainCredentials("ann", ANNS_PASSWORD)


def test_messages_go_in_and_out_over_tls_whatever_their_size(secured: Secured) -> None:
    with secured.connect(PASSWORD) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.confirm_delivery()
        sizes = (0, 1, 16_383, 16_385, 300_000, 5_000_000)
        for size in sizes:
            channel.basic_publish("", "q", os.urandom(1) * size)
        inbox = Inbox(channel, "q", auto_ack=True)
        assert [len(one.body) for one in inbox.wait(len(sizes))] == list(sizes)


def test_what_comes_in_by_tls_goes_out_in_clear_and_back(secured: Secured) -> None:
    with secured.connect(PASSWORD) as near, as_ann(secured.broker) as far:
        for publisher, reader in ((near.channel(), far.channel()), (far.channel(), near.channel())):
            queue = publisher.queue_declare("", auto_delete=True).method.queue
            inbox = Inbox(reader, queue, auto_ack=True)
            publisher.confirm_delivery()
            publisher.basic_publish("", queue, b"hello", pika.BasicProperties(delivery_mode=2))
            assert inbox.wait(1)[0].body == b"hello"


def test_many_messages_to_a_slow_reader_over_tls(secured: Secured) -> None:
    with secured.connect(PASSWORD) as near, as_ann(secured.broker) as far:
        channel = far.channel()
        channel.queue_declare("q")
        inbox = Inbox(near.channel(), "q", auto_ack=True)
        for number in range(2000):
            channel.basic_publish("", "q", b"%d " % number + b"." * 4096)
        assert [int(one.body.split()[0]) for one in inbox.wait(2000)] == list(range(2000))


def test_certificate_logs_in_by_external(secured: Secured) -> None:
    ann = secured.authority.issue("ann", common_names=["somebody"], names=[x509.DNSName("ann")])
    with secured.connect(ExternalCredentials(), ann, virtual_host="shop") as connection:
        connection.channel().queue_declare("q")
    stranger = secured.authority.issue("eve", common_names=["eve"])
    with pytest.raises(ProbableAuthenticationError):
        secured.connect(ExternalCredentials(), stranger)


def test_external_is_offered_to_those_who_showed_a_certificate(secured: Secured) -> None:
    cases = {
        "PLAIN AMQPLAIN EXTERNAL": secured.authority.issue("a", common_names=["ann"]),
        "PLAIN AMQPLAIN": None,
    }
    for offered, certificate in cases.items():
        with Wire(secured.broker.ports["amqps"]) as wire:
            context = secured.authority.client_context(certificate)
            wire.socket = context.wrap_socket(wire.socket, server_hostname="localhost")
            assert wire.greet().mechanisms == offered
    ambiguous = secured.authority.issue("b", common_names=["ann", "bob"])
    with pytest.raises((AuthenticationError, ProbableAuthenticationError)):
        secured.connect(ExternalCredentials(), ambiguous)
    with Wire(secured.broker.port) as wire:
        assert wire.greet().mechanisms == "PLAIN AMQPLAIN"
        wire.send(0, commands.Connection.StartOk({}, "EXTERNAL", "ann", "en_US"))
        with pytest.raises((Closed, AssertionError)):
            wire.expect(commands.Connection.Tune)


def test_certificate_that_our_ca_did_not_sign_does_not_get_in(secured: Secured, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").issue("false", common_names=["ann"])
    with pytest.raises(AMQPConnectionError):
        secured.connect(ExternalCredentials(), stranger)
    secured.connect(PASSWORD).close()


def test_renewed_certificate_is_shown_after_a_reload(secured: Secured, tmp_path: Path) -> None:
    new = Authority(tmp_path, "new")
    certificate, key = new.server("renewed")
    with secured.connect(PASSWORD) as old:
        new_files = f"\n[tls]\ncertificate = '{certificate}'\nkey = '{key}'\n"
        secured.broker.reload(USERS + new_files)
        with pytest.raises(ssl.SSLCertVerificationError):
            secured.connect(PASSWORD)
        secured.connect(PASSWORD, context=new.client_context()).close()
        old.channel().queue_declare("still-there")
        secured.broker.reload(USERS + secured.tls)
    secured.connect(PASSWORD).close()


@pytest.mark.parametrize("mistake", ["key mode", "empty ca"])
def test_tls_files_that_cannot_be_trusted_stop_the_start(tmp_path: Path, mistake: str) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.server()
    if mistake == "key mode":
        key.chmod(0o644)
    else:
        authority.file.write_text("")
    path = tmp_path / "h.toml"
    path.write_text(f"[tls]\ncertificate = '{certificate}'\nkey = '{key}'\nclient_ca = '{authority.file}'\n")
    done = serve_and_fail(tmp_path, "--config", str(path), "--amqp", "127.0.0.1:0", "--amqps", "127.0.0.1:0")
    assert done.returncode == os.EX_CONFIG
    assert str(key if mistake == "key mode" else authority.file) in done.stderr
