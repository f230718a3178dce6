"""One HTTP connection over a socket pair, with a small application behind it: framing, limits, who closes when."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.gateways.delivery.house import Clock

from headrace.gateways.delivery.listener import Connection
from headrace.gateways.http.config import HEAD_BYTES_MAX, HttpConfig
from headrace.gateways.http.connection import HttpConnection, Message

GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


async def answer(send: Send, body: bytes = b"hello") -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def greet(scope: Any, receive: Receive, send: Send) -> None:
    """Reads nothing."""
    await answer(send)


async def echo(scope: Any, receive: Receive, send: Send) -> None:
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    await answer(send, body)


class Client:
    def __init__(self, stream: trio.SocketStream, connection: HttpConnection, ended: trio.Event) -> None:
        self.stream = stream
        self.connection = connection
        self.ended = ended
        self.got = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def until(self, text: bytes) -> bytes:
        """What came up to and with this text; the rest is kept."""
        while text not in self.got:
            data = await self.stream.receive_some()
            assert data, f"it ended after {self.got!r}"
            self.got += data
        found, _, self.got = self.got.partition(text)
        return found + text

    async def rest(self) -> bytes:
        """Everything up to the end."""
        while data := await self.stream.receive_some():
            self.got += data
        return self.got


@asynccontextmanager
async def serving(application: Any, **settings: Any) -> AsyncIterator[Client]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    ended = trio.Event()
    connection = HttpConnection(application, Connection(ours, "127.0.0.1", 1), HttpConfig(**settings), Clock())

    async def run() -> None:
        with ours:
            await connection.run()
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        async with trio.SocketStream(trio.socket.from_stdlib_socket(theirs)) as stream:
            yield Client(stream, connection, ended)
        nursery.cancel_scope.cancel()


async def test_requests_are_answered_one_after_the_other_on_one_connection() -> None:
    async with serving(greet) as client:
        for _ in range(3):
            await client.send(GET)
            assert b"200 OK" in await client.until(b"hello")


async def test_requests_sent_together_are_answered_in_their_order() -> None:
    async with serving(echo) as client:
        post = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 3\r\n\r\n"
        await client.send(post + b"one" + post + b"two")
        assert b"200" in await client.until(b"one")
        assert b"200" in await client.until(b"two")


async def test_request_byte_by_byte_is_the_same_request() -> None:
    async with serving(echo) as client:
        for byte in b"POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n":
            await client.send(bytes([byte]))
        await client.until(b"abc")


async def test_head_has_the_headers_and_no_body() -> None:
    async with serving(greet) as client:
        await client.send(GET.replace(b"GET", b"HEAD") + GET)
        head = await client.until(b"\r\n\r\n")
        assert b"content-length: 5" in head
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_continue_is_said_when_the_body_is_wanted_and_not_before() -> None:
    asked = trio.Event()

    async def application(scope: Any, receive: Receive, send: Send) -> None:
        await asked.wait()
        await echo(scope, receive, send)

    async with serving(application) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
        asked.set()
        await client.until(b"100")
        await client.send(b"hi")
        assert b"200 OK" in await client.until(b"hi")


async def test_connection_whose_request_was_not_read_is_closed_behind_the_answer() -> None:
    async with serving(greet) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 100)
        assert b"connection: close" in (await client.until(b"hello")).lower()
        await client.send(b"x" * 1000)
        assert await client.rest() == b""


async def test_rest_of_a_request_that_has_come_already_does_not_end_the_connection() -> None:
    async with serving(greet) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 3\r\n\r\nabc")
        assert b"close" not in await client.until(b"hello")
        await client.send(GET)
        await client.until(b"hello")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
        b"GET * HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_a_problem_and_an_end(garbage: bytes) -> None:
    async with serving(greet) as client:
        await client.send(garbage)
        answered = await client.rest()
        assert answered.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
        assert b'"code":"malformed"' in answered


async def test_headers_beyond_the_limit_get_431() -> None:
    async with serving(greet) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * HEAD_BYTES_MAX)
        assert (await client.rest()).startswith(b"HTTP/1.1 431")


async def test_headers_that_trickle_in_are_given_up(autojump_clock: Any) -> None:
    async with serving(greet, head_s=10) as client:
        began = trio.current_time()
        answered = b""
        for byte in GET:
            await client.send(bytes([byte]))
            with trio.move_on_after(1):
                answered = await client.until(b"request_timeout")
                break
        assert b"408" in answered
        assert trio.current_time() - began <= 12


async def test_body_that_trickles_in_is_given_up(autojump_clock: Any) -> None:
    async def application(scope: Any, receive: Receive, send: Send) -> None:
        with pytest.raises(Exception, match="took too long"):
            await echo(scope, receive, send)
        await answer(send, b"slow")

    async with serving(application, body_s=30) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 100\r\n\r\n")
        with trio.move_on_after(28):
            while True:
                await client.send(b"x")
                await trio.sleep(1)
        await client.until(b"slow")


async def test_connection_without_a_request_ends_in_silence(autojump_clock: Any) -> None:
    async with serving(greet, head_s=10, idle_s=60) as client:
        assert await client.rest() == b""
        assert trio.current_time() == pytest.approx(10, abs=1)
    async with serving(greet, head_s=10, idle_s=60) as client:
        began = trio.current_time()
        await client.send(GET)
        await client.until(b"hello")
        assert await client.rest() == b""
        assert trio.current_time() - began == pytest.approx(60, abs=1)


async def test_client_that_takes_nothing_of_its_answer_is_given_up(autojump_clock: Any) -> None:
    async def application(scope: Any, receive: Receive, send: Send) -> None:
        await answer(send, b"x" * 16_000_000)

    async with serving(application, write_s=30) as client:
        began = trio.current_time()
        await client.send(GET)
        await client.ended.wait()
        assert trio.current_time() - began == pytest.approx(30, abs=1)


async def test_application_hears_that_its_client_has_hung_up() -> None:
    heard = trio.Event()

    async def application(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        heard.set()
        await answer(send)

    async with serving(application) as client:
        await client.send(GET)
        await client.stream.send_eof()
        await heard.wait()


async def test_stop_ends_what_is_idle_and_lets_the_rest_be_answered() -> None:
    asked, go = trio.Event(), trio.Event()

    async def application(scope: Any, receive: Receive, send: Send) -> None:
        asked.set()
        await go.wait()
        await answer(send)

    async with serving(greet) as idle, serving(application) as busy:
        await idle.send(GET)
        await idle.until(b"hello")
        await busy.send(GET)
        await asked.wait()
        idle.connection.dismiss()
        busy.connection.dismiss()
        assert await idle.rest() == b""
        go.set()
        assert b"connection: close" in (await busy.rest()).lower()


async def test_application_that_fails_is_answered_for_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def application(scope: Any, receive: Receive, send: Send) -> None:
        raise ValueError("a mistake of ours")

    async with serving(application) as client:
        await client.send(GET)
        answered = await client.rest()
        assert answered.startswith(b"HTTP/1.1 500")
        assert b"mistake of ours" not in answered
    assert "a mistake of ours" in caplog.text
