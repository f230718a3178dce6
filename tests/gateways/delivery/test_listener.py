"""A listener accepts, counts, turns away, shakes hands, and stops without cutting off who is there."""

import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import pytest
import trio
from cryptography import x509

from headrace.controller.entities import Version
from headrace.controller.snapshot import load
from headrace.core_log.ids import ViewId
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.limits import SPARE_MIN, Limits, LimitsConfig
from headrace.gateways.delivery.listener import Connection, Listener, TlsSide, is_loopback
from headrace.gateways.delivery.tls import TlsConfig, load_context

from .certificates import Authority

NOTHING = load(UUID(int=1), Version(0), ViewId(1))


class Hall:
    """A door that keeps its guests until their side closes, and echoes nothing."""

    def __init__(self, limits: Limits, tls: TlsSide | None) -> None:
        self.alarms = Alarms()
        self.limits = limits
        self.guests: list[Connection] = []
        self.came = trio.Event()
        self.listener = Listener(self.serve, limits, self.alarms, tls)
        self.port = 0

    async def serve(self, connection: Connection) -> None:
        self.guests.append(connection)
        self.came.set()
        while True:
            await trio.lowlevel.wait_readable(connection.socket.fileno())
            try:
                if not connection.socket.recv(100):
                    break
            except BlockingIOError:
                continue
            except OSError:
                break
        self.guests.remove(connection)

    async def guest(self) -> Connection:
        with trio.fail_after(30):
            await self.came.wait()
        self.came = trio.Event()
        return self.guests[-1]


@asynccontextmanager
async def hall(
    limits: Limits | None = None, tls: TlsSide | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Hall]:
    built = Hall(limits or Limits(NOTHING), tls)
    _host, built.port = await built.listener.open(host, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(built.listener.run)
        yield built
        built.listener.close()


async def is_closed(stream: trio.SocketStream) -> bool:
    """Perhaps after some last words."""
    with trio.fail_after(30):
        async with stream:
            try:
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass
    return True


async def test_connection_has_a_socket_that_does_not_block_and_its_peer() -> None:
    async with hall() as built, await trio.open_tcp_stream("127.0.0.1", built.port) as stream:
        guest = await built.guest()
        assert (guest.host, guest.port) == stream.socket.getsockname()
        assert guest.is_loopback and not guest.tls and guest.certified_name is None
        with pytest.raises(BlockingIOError):
            guest.socket.recv(1)


async def test_who_is_connected_stays_when_the_listener_closes_and_run_waits_for_them() -> None:
    async with hall() as built:
        stream = await trio.open_tcp_stream("127.0.0.1", built.port)
        await built.guest()
        built.listener.close()
        with pytest.raises(OSError):
            await trio.open_tcp_stream("127.0.0.1", built.port)
        assert len(built.guests) == 1
        await stream.aclose()
    assert built.limits.socket_count == 0


async def test_one_too_many_is_closed_unheard_and_heard_again_when_another_left() -> None:
    limits = Limits(NOTHING, LimitsConfig(connections_max=1))
    async with hall(limits) as built:
        streams = []
        for _ in range(1 + SPARE_MIN):
            streams.append(await trio.open_tcp_stream("127.0.0.1", built.port))
            await built.guest()
        assert await is_closed(await trio.open_tcp_stream("127.0.0.1", built.port))
        assert limits.dropped_count == 1
        await streams.pop().aclose()
        while limits.socket_count > SPARE_MIN:
            await trio.lowlevel.checkpoint()
        streams.append(await trio.open_tcp_stream("127.0.0.1", built.port))
        await built.guest()
        for stream in streams:
            await stream.aclose()


async def test_nobody_new_is_heard_while_memory_is_nearly_used_up(caplog: pytest.LogCaptureFixture) -> None:
    async with hall() as built:
        built.alarms.refusing = True
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                assert await is_closed(await trio.open_tcp_stream("127.0.0.1", built.port))
        assert len(caplog.records) == 1 and "too little memory" in caplog.text
        built.alarms.refusing = False
        async with await trio.open_tcp_stream("127.0.0.1", built.port):
            await built.guest()


async def test_host_may_be_a_name_or_an_address_of_either_family() -> None:
    for host in ("localhost", "127.0.0.1", "::1"):
        try:
            async with hall(host=host) as built, await trio.open_tcp_stream(host, built.port):
                assert (await built.guest()).is_loopback
        except OSError:
            if host != "::1" or socket.has_dualstack_ipv6():
                raise


async def test_listener_that_is_closed_before_it_runs_ends_at_once() -> None:
    built = Hall(Limits(NOTHING), None)
    await built.listener.open("127.0.0.1", 0)
    built.listener.close()
    with trio.fail_after(30):
        await built.listener.run()


async def test_taken_port_is_an_error() -> None:
    async with hall() as built:
        with pytest.raises(OSError):
            await Listener(built.serve, built.limits, built.alarms).open("127.0.0.1", built.port)


async def test_tls_listener_hands_over_the_name_in_the_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    side = TlsSide(load_context(TlsConfig(*authority.server(), client_ca=authority.file)))
    ann = authority.issue("ann", common_names=["x"], names=[x509.DNSName("ann")])
    async with hall(tls=side) as built:
        for shown, name in ((ann, "ann"), (None, None)):
            plain = await trio.open_tcp_stream("127.0.0.1", built.port)
            context = authority.client_context(shown)
            async with trio.SSLStream(plain, context, server_hostname="localhost") as stream:
                await stream.do_handshake()
                guest = await built.guest()
                assert guest.tls and guest.certified_name == name


async def test_clear_text_on_a_tls_port_is_closed_and_others_are_served(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    side = TlsSide(load_context(TlsConfig(*authority.server())))
    async with hall(tls=side) as built:
        plain = await trio.open_tcp_stream("127.0.0.1", built.port)
        await plain.send_all(b"AMQP\0\0\x09\x01")
        assert await is_closed(plain)
        plain = await trio.open_tcp_stream("127.0.0.1", built.port)
        async with trio.SSLStream(plain, authority.client_context(), server_hostname="localhost") as stream:
            await stream.do_handshake()
            await built.guest()
    assert built.limits.socket_count == 0


async def test_renewed_certificate_is_shown_to_those_who_come_later(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    side = TlsSide(load_context(TlsConfig(*old.server("first"))))
    async with hall(tls=side) as built:

        async def trusts(authority: Authority) -> bool:
            plain = await trio.open_tcp_stream("127.0.0.1", built.port)
            stream = trio.SSLStream(plain, authority.client_context(), server_hostname="localhost")
            try:
                await stream.do_handshake()
            except trio.BrokenResourceError as error:
                assert isinstance(error.__cause__, ssl.SSLCertVerificationError)
                await trio.aclose_forcefully(stream)
                return False
            await stream.aclose()
            return True

        assert await trusts(old) and not await trusts(new)
        side.context = load_context(TlsConfig(*new.server("second")))
        assert await trusts(new) and not await trusts(old)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:192.0.2.1", False),
        ("192.0.2.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback_is_this_machine_only(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
