"""Links over real sockets: who gets one, what ends one, and that nothing unproven is heard."""

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import msgspec
import pytest
import trio
import trio.testing
from tests.gateways.delivery.certificates import Authority

from headrace.core_log.peer.door import PeerDoor
from headrace.core_log.peer.errors import PeerGone, PeerRefused, PeerUnreachable
from headrace.core_log.peer.frames import FRAME_BYTES_MAX, Hello, Purpose, encode_opening
from headrace.core_log.peer.link import PeerLink, Peers

from .memory import hello_of, memory_pair

SECRET = b"a secret of the cluster"


class Where(NamedTuple):
    host: str
    port: int


_count = iter(range(1, 1 << 30))


def nonce() -> bytes:
    return next(_count).to_bytes(32, "little")


def peers(node: int = 1, *, secret: bytes = SECRET, me: Hello | None = None, **more: object) -> Peers:
    return Peers(lambda: me or hello_of(node), secret, nonce, **more)  # type: ignore[arg-type]


async def echo(link: PeerLink) -> None:
    while True:
        kind, data = await link.receive()
        await link.send(kind, data)


@asynccontextmanager
async def door(
    handler: Callable[[PeerLink], Awaitable[None]] = echo, purpose: Purpose = Purpose.CONTROL, **more: object
) -> AsyncIterator[Where]:
    found = PeerDoor(lambda: hello_of(9), SECRET, nonce, {purpose: handler}, **more)  # type: ignore[arg-type]
    where = Where(*await found.open("127.0.0.1", 0))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.serve)
            yield where
            await found.drain()


async def test_frames_go_both_ways_and_each_side_knows_the_other() -> None:
    async with door() as where, await peers().connect(where, Purpose.CONTROL) as link:
        assert link.hello.node == 9
        for size in (0, 1, 70_000, 3_000_000):
            await link.send(size % 200, b"x" * size, b"tail")
            assert await link.receive() == (size % 200, b"x" * size + b"tail")


async def test_a_door_knows_who_calls_and_what_for() -> None:
    called: list[Hello] = []

    async def note(link: PeerLink) -> None:
        called.append(link.hello)
        await link.send(1)

    me = hello_of(3, incarnation=7, disk=UUID(int=77))
    async with door(note, Purpose.FETCH) as where, await peers(me=me).connect(where, Purpose.FETCH, b"2") as link:
        await link.receive()
    assert called == [msgspec.structs.replace(me, purpose=Purpose.FETCH, detail=b"2")]


async def test_another_secret_is_refused_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async with door() as where:
        with pytest.raises(PeerRefused, match="secret"):
            await peers(secret=b"another secret of another").connect(where, Purpose.CONTROL)
    assert "does not know the secret" in caplog.text


async def test_another_cluster_is_refused() -> None:
    async with door() as where:
        other = msgspec.structs.replace(hello_of(1), cluster=UUID(int=5))
        with pytest.raises(PeerRefused, match="this is cluster"):
            await peers(me=other).connect(where, Purpose.CONTROL)


async def test_a_purpose_that_is_not_served_is_refused() -> None:
    async with door() as where:
        with pytest.raises(PeerRefused, match="does not serve relay links"):
            await peers().connect(where, Purpose.RELAY)


async def test_an_older_peer_is_told_apart_by_its_version(caplog: pytest.LogCaptureFixture) -> None:
    async with door() as where:
        stream = await trio.open_tcp_stream(*where)
        async with stream:
            await stream.send_all(encode_opening(bytes(32), 0))
            while await stream.receive_some():
                pass
    assert "speaks version 0" in caplog.text


async def test_what_speaks_another_protocol_is_no_peer() -> None:
    async def speak_http(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            lambda task_status: trio.serve_tcp(speak_http, 0, host="127.0.0.1", task_status=task_status)
        )
        with pytest.raises(PeerRefused, match="another protocol"):
            await peers().connect(Where(*listeners[0].socket.getsockname()), Purpose.CONTROL)
        nursery.cancel_scope.cancel()


async def test_who_repeats_what_it_hears_proves_nothing() -> None:
    async def repeat(stream: trio.SocketStream) -> None:
        async for data in stream:
            await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            lambda task_status: trio.serve_tcp(repeat, 0, host="127.0.0.1", task_status=task_status)
        )
        with pytest.raises(PeerRefused, match="repeats"):
            await peers().connect(Where(*listeners[0].socket.getsockname()), Purpose.CONTROL)
        nursery.cancel_scope.cancel()


async def test_nobody_there_is_told_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = Where(*free.getsockname())
    with pytest.raises(PeerUnreachable, match="refused"):
        await peers().connect(where, Purpose.CONTROL)


async def test_a_door_that_says_nothing_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(PeerUnreachable, match="did not finish the handshake"):
            await peers(handshake_s=0.05).connect(Where(*silent.getsockname()), Purpose.CONTROL)


async def test_a_slow_caller_is_given_up_and_others_are_served_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    async with door(handshake_s=0.3) as where:
        slow = await trio.open_tcp_stream(*where)
        await slow.send_all(encode_opening(bytes(32))[:7])
        async with await peers().connect(where, Purpose.CONTROL) as link:
            await link.send(5, b"")
            assert await link.receive() == (5, b"")
        while await slow.receive_some():
            pass
        await slow.aclose()
    assert "took too long" in caplog.text


async def test_there_are_only_so_many_unproven_connections() -> None:
    async with door(unproven_max=1) as where:
        first = await trio.open_tcp_stream(*where)
        assert len(await first.receive_some(40)) == 40
        second = await trio.open_tcp_stream(*where)
        assert await second.receive_some() == b""
        await first.aclose()
        await second.aclose()


async def test_a_frame_that_is_too_long_ends_the_link() -> None:
    async with door() as where:
        link = await peers().connect(where, Purpose.CONTROL)
        sock, rest = link.detach()
        assert rest == b""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        await stream.send_all((FRAME_BYTES_MAX + 1).to_bytes(4, "little") + b"\1")
        assert await stream.receive_some() == b""
        await stream.aclose()


async def test_a_peer_that_goes_is_told_at_once() -> None:
    async def leave(link: PeerLink) -> None:
        await link.receive()

    async with door(leave) as where, await peers().connect(where, Purpose.CONTROL) as link:
        await link.send(1)
        with pytest.raises(PeerGone):
            await link.receive()
        with pytest.raises(PeerGone):
            while True:
                await link.send(1, bytes(1000))


async def test_closing_wakes_whoever_waits() -> None:
    async with door() as where, trio.open_nursery() as nursery:
        link = await peers().connect(where, Purpose.CONTROL)
        ended = trio.Event()

        async def wait() -> None:
            with pytest.raises(PeerGone):
                await link.receive()
            ended.set()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await link.aclose()
        await ended.wait()


async def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    near, far = memory_pair(hello_of(1), hello_of(2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near._wire.send, [b"\x07\0\0\0\1", b"abc"])
        with trio.move_on_after(0.01):
            await far.receive()
        nursery.start_soon(near._wire.send, [b"def"])
        assert await far.receive() == (1, b"abcdef")


async def test_a_send_that_is_cancelled_ends_the_link() -> None:
    async def sit(link: PeerLink) -> None:
        await trio.sleep_forever()

    async with door(sit) as where, await peers().connect(where, Purpose.CONTROL) as link:
        with trio.move_on_after(0.05):
            while True:
                await link.send(1, bytes(1_000_000))
        with pytest.raises(PeerGone):
            await link.send(1)


async def test_a_detached_socket_goes_on_where_the_link_stopped() -> None:
    async def hand_over(link: PeerLink) -> None:
        sock, rest = link.detach()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        async with stream:
            await stream.send_all(rest)
            async for data in stream:
                await stream.send_all(data)

    async with door(hand_over, Purpose.RELAY) as where:
        link = await peers().connect(where, Purpose.RELAY, b"opening")
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(link.detach()[0]))
        async with stream:
            await stream.send_all(b"raw octets")
            assert await stream.receive_some() == b"raw octets"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def contexts(authority: Authority) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*authority.server())
    server.load_verify_locations(authority.file)
    server.verify_mode = ssl.CERT_REQUIRED
    client = authority.client_context()
    client.load_cert_chain(*authority.server())
    return server, client


async def test_links_run_in_mutual_tls(authority: Authority) -> None:
    server, client = contexts(authority)
    async with door(tls=server) as where:
        link = await peers(tls=client).connect(Where("localhost", where.port), Purpose.CONTROL)
        async with link:
            await link.send(3, bytes(2_000_000))
            assert await link.receive() == (3, bytes(2_000_000))
            assert isinstance(link._wire.socket, ssl.SSLSocket)  # type: ignore[attr-defined]


async def test_a_caller_without_a_certificate_is_refused(authority: Authority) -> None:
    server, _ = contexts(authority)
    async with door(tls=server) as where:
        with pytest.raises((PeerRefused, PeerUnreachable)):
            await peers(tls=authority.client_context()).connect(Where("localhost", where.port), Purpose.CONTROL)
