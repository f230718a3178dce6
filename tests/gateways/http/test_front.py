"""Requests to a node that leads nothing: passed on to the leader of the vhost that they name."""

import json
import socket

import httpx
import pytest
import trio
from tests.gateways.relay.town import Town, in_thread, town

from headrace.gateways.http.front import _vhost_in, vhost_of

GUEST = ("guest", "guest")
PATIENCE_S = 60


def client(built: Town, auth: tuple[str, str] | None = GUEST) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{built.ports['http']}", auth=auth, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("path", "query", "vhost"),
    [
        ("topics/orders", b"", "/"),
        ("topics/shop%7Corders/messages", b"", "shop"),
        ("queues/a%2Fb%7Cq", b"vhost=ignored", "a/b"),
        ("queues", b"vhost=shop&after=x", "shop"),
        ("queues", b"", "/"),
        ("exchanges", b"vhost=a%20b", "a b"),
        ("consumer-groups/shop%7Cg/members/1", b"", "shop"),
        ("schedules/shop%7Cnightly", b"", "shop"),
        ("delayed/messages", b"name=x&vhost=shop", "shop"),
        ("redrives/7", b"", "/"),
        ("topics/orders", b"\xff", "/"),
    ],
)
def test_the_vhost_of_a_request_is_the_one_that_it_names(path: str, query: bytes, vhost: str) -> None:
    assert vhost_of(path.split("/"), query) == vhost


@pytest.mark.parametrize(
    ("body", "fields", "vhost"),
    [
        (b'{"name": "t", "vhost": "shop"}', ("vhost",), "shop"),
        (b'{"name": "t"}', ("vhost",), "/"),
        (b'{"queue": "shop|q"}', ("queue",), "shop"),
        (b'{"queue": "q"}', ("queue",), "/"),
        (b'{"queue": 7}', ("queue",), "/"),
        (b"[1]", ("vhost",), "/"),
        (b"{", ("vhost",), "/"),
        (b"\xff", ("vhost",), "/"),
    ],
)
def test_the_vhost_of_a_body_is_the_one_that_it_names(body: bytes, fields: tuple[str, ...], vhost: str) -> None:
    assert _vhost_in(body, fields) == vhost


async def test_topics_are_made_published_to_and_read_through_another_node() -> None:
    async with town() as built:

        def story() -> None:
            with client(built) as http:
                made = http.post("/api/v1/topics", json={"name": "t", "partitions": 1})
                assert made.status_code == 201, made.text
                large = "x" * 300_000
                sent = http.post("/api/v1/topics/t/messages", json=[{"value": large}, {"value": "second"}])
                assert sent.status_code == 200, sent.text
                # Chunked: nobody says how long it is.
                body = json.dumps([{"value": "third"}]).encode()
                chunked = http.post(
                    "/api/v1/topics/t/messages",
                    content=iter([body[:10], body[10:]]),
                    headers={"content-type": "application/json"},
                )
                assert chunked.status_code == 200, chunked.text
                read = http.get("/api/v1/topics/t/partitions/0/messages", params={"offset": "0"})
                assert read.status_code == 200, read.text
                assert [one["value"] for one in read.json()["messages"]] == [large, "second", "third"]
                assert http.head("/api/v1/topics/t").content == b""

        await in_thread(story)
        assert built.http.passed_on_count == 5


async def test_logins_and_mistakes_are_the_leaders_to_judge() -> None:
    async with town() as built:

        def story() -> None:
            with client(built, None) as http:
                assert http.get("/api/v1/topics").status_code == 401
                assert http.get("/api/v1/topics", auth=("guest", "wrong")).status_code == 401
                assert http.get("/api/v1/topics/none", auth=GUEST).json()["code"] == "not_found"
                assert http.post("/api/v1/topics", auth=GUEST, content=b"{").status_code == 400

        await in_thread(story)


async def test_what_is_about_the_node_is_answered_by_it() -> None:
    async with town() as built:

        def story() -> None:
            with client(built) as http:
                for path in ("/metrics", "/api/v1/health", "/api/v1/health/ready", "/api/v1/cluster/nodes"):
                    assert http.get(path).content == b"here"

        await in_thread(story)
        assert built.http.passed_on_count == 0


async def test_a_vhost_that_is_led_here_is_answered_here() -> None:
    async with town() as built:
        built.leader = 1

        def story() -> None:
            with client(built) as http:
                assert http.post("/api/v1/topics", json={"name": "t", "partitions": 1}).status_code == 201
                assert http.get("/api/v1/topics/t").status_code == 200

        await in_thread(story)
        assert built.http.passed_on_count == 0


async def test_without_a_leader_there_is_a_problem_document_that_says_when_to_try_again() -> None:
    async with town() as built:
        built.is_hopeless = True
        assert built.leading is not None
        await built.leading.kill()

        def story() -> None:
            with client(built) as http:
                answer = http.get("/api/v1/topics")
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "1"
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"] == "no_leader"

        await in_thread(story)


async def test_a_long_poll_ends_with_its_client() -> None:
    async with town() as built:

        def begin() -> socket.socket:
            with client(built) as http:
                assert http.post("/api/v1/topics", json={"name": "t", "partitions": 1}).status_code == 201
            sock = socket.create_connection(("127.0.0.1", built.ports["http"]))
            sock.sendall(
                b"GET /api/v1/topics/t/partitions/0/messages?offset=0&wait_ms=50000 HTTP/1.1\r\nhost: localhost\r\n"
                b"authorization: Basic Z3Vlc3Q6Z3Vlc3Q=\r\n\r\n"
            )
            return sock

        sock = await in_thread(begin)
        assert built.leading is not None
        inside = built.leading.service.http
        await built.until(lambda: inside.connections)
        sock.close()
        await built.until(lambda: not inside.connections)


async def test_a_read_is_asked_of_the_next_leader_when_one_is_lost() -> None:
    async with town() as built:
        assert built.leading is not None
        await in_thread(lambda: _make(built))
        inside = built.leading.service.http
        answers: list[int] = []

        async def ask() -> None:
            def poll() -> int:
                with client(built) as http:
                    query = {"offset": "0", "wait_ms": "1000"}
                    return http.get("/api/v1/topics/t/partitions/0/messages", params=query).status_code

            answers.append(await in_thread(poll))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await built.until(lambda: inside.connections)
            await built.leading.kill()
            await built.lead()
        assert answers == [200]


def _make(built: Town) -> None:
    with client(built) as http:
        assert http.post("/api/v1/topics", json={"name": "t", "partitions": 1}).status_code == 201


async def test_publishes_get_a_definite_no_while_too_few_replicas_are_in_sync() -> None:
    async with town() as built:
        await in_thread(lambda: _make(built))
        assert built.leading is not None
        built.leading.service.broker.unwritable = lambda: "shard 0 has 1 replicas in sync, of at least 2"

        def story() -> None:
            with client(built) as http:
                answer = http.post("/api/v1/topics/t/messages", json=[{"value": "x"}])
                assert (answer.status_code, answer.json()["code"]) == (503, "too_few_replicas")
                assert "retry-after" in answer.headers

        await in_thread(story)
