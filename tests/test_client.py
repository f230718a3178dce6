"""The client of the HTTP API against whatever may answer: a broker's documents, problems, silence, other servers."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from headrace.client import Client, Login, is_loopback_url, path
from headrace.exits import Answered, BrokerAway, NotAllowed, TryLater


class Server:
    """Answers each request on a connection with the next of its answers; None ends the connection."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self.requests: list[bytes] = []
        self._answers = list(answers)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while self._answers:
            peer, _address = self._socket.accept()
            with peer:
                while self._answers and (request := self._request(peer)):
                    self.requests.append(request)
                    answer = self._answers.pop(0)
                    if answer is None:
                        break
                    peer.sendall(answer)

    def _request(self, peer: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            part = peer.recv(65536)
            if not part:
                return b""
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        sizes = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
        while sizes and len(body) < sizes[0]:
            body += peer.recv(65536)
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        self._thread.join(30)
        self._socket.close()


@contextmanager
def serving(*answers: bytes | None) -> Iterator[Server]:
    server = Server(answers)
    yield server
    server.close()


def answer(body: object, status: int = 200, kind: str = "application/json") -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def problem(status: int, code: str, **more: object) -> bytes:
    return answer({"code": code, "status": status, "title": "It is wrong", **more}, status, "application/problem+json")


def test_answer_is_read_and_the_login_sent_with_each_request() -> None:
    with serving(answer({"a": 1}), answer([2])) as server, Client(server.url, Login("ann", "pässword")) as client:
        assert client.get("/x", {"limit": 3, "force": True, "left": None, "f": "a && b"}) == {"a": 1}
        assert client.request("POST", "/y", body={"b": "ü"}) == [2]
    first, second = server.requests
    assert first.startswith(b"GET /x?limit=3&force=true&f=a+%26%26+b HTTP/1.1\r\n")
    assert b"Basic YW5uOnDDpHNzd29yZA==" in first
    assert b"Basic YW5uOnDDpHNzd29yZA==" in second
    assert json.loads(second.partition(b"\r\n\r\n")[2]) == {"b": "ü"}


def test_empty_answer_is_none() -> None:
    with serving(b"HTTP/1.1 204 No\r\n\r\n") as server, Client(server.url) as client:
        assert client.request("DELETE", "/x") is None


@pytest.mark.parametrize(
    ("status", "family"), [(404, Answered), (409, Answered), (401, NotAllowed), (403, NotAllowed), (503, TryLater)]
)
def test_problem_document_becomes_an_error_of_its_family(status: int, family: type[Answered]) -> None:
    with serving(problem(status, "some_code", detail="what it was")) as server, Client(server.url) as client:
        with pytest.raises(Answered, match=r"^what it was$") as raised:
            client.get("/x")
        assert (type(raised.value), raised.value.status, raised.value.code) == (family, status, "some_code")


def test_problem_without_detail_is_told_by_its_title() -> None:
    with (
        serving(problem(409, "some_code")) as server,
        Client(server.url) as client,
        pytest.raises(Answered, match=r"^It is wrong$"),
    ):
        client.get("/x")


def test_closed_door_is_said_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        Client(f"http://127.0.0.1:{port}") as client,
        pytest.raises(BrokerAway, match=f"no broker answers at .*{port}"),
    ):
        client.get("/x")


@pytest.mark.parametrize(
    ("answered", "text"),
    [
        (answer({}, kind="text/html"), "no Headrace broker"),
        (answer({"error": 1}, 404), "no Headrace broker"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n{", "no Headrace broker"),
        (b"AMQP\x00\x00\x09\x01", "speaks no HTTP"),
        (None, "no broker answers"),
    ],
)
def test_whoever_else_answers_is_no_broker(answered: bytes | None, text: str) -> None:
    with serving(answered) as server, Client(server.url) as client, pytest.raises(BrokerAway, match=text):
        client.get("/x")


def test_get_on_a_connection_that_has_ended_meanwhile_is_made_again() -> None:
    with serving(answer(1), None, answer(2)) as server, Client(server.url) as client:
        assert [client.get("/a"), client.get("/b")] == [1, 2]


def test_publish_on_a_connection_that_has_ended_is_not_made_twice() -> None:
    with serving(answer(1), None) as server, Client(server.url) as client:
        client.get("/a")
        with pytest.raises(BrokerAway):
            client.request("POST", "/b", body={})
    assert len(server.requests) == 2


@pytest.mark.parametrize("url", ["localhost:15672", "ftp://localhost", "http://", "http://ann:secret@localhost"])
def test_url_that_leads_nowhere_or_shows_a_password_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected http://|no user or password in the URL"):
        Client(url)


def test_segments_of_a_path_hold_any_character() -> None:
    assert path("topics", "shop|a/b ü", "partitions", 3) == "/api/v1/topics/shop%7Ca%2Fb%20%C3%BC/partitions/3"


@pytest.mark.parametrize(
    ("url", "is_loopback"),
    [
        ("http://127.0.0.1:15672", True),
        ("http://127.9.9.9", True),
        ("https://[::1]:15671", True),
        ("http://localhost", True),
        ("http://broker.example", False),
        ("http://128.0.0.1", False),
        ("http://[::2]", False),
    ],
)
def test_loopback_is_known_by_its_address(url: str, is_loopback: bool) -> None:
    assert is_loopback_url(url) is is_loopback
