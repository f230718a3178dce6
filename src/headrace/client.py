"""The HTTP API of a broker, for the command line: one connection, JSON there and back. Driver: http.client.

Nothing but the standard library: the commands of a broker should not bring an HTTP stack of their own. A request that
finds its connection closed by an idle server is made again, once, if nothing was sent twice by that: only GET is.
Neighbours: commands/* say what to ask for, gateways/http/ answers.
"""

import http.client
import json
import socket
import ssl
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

from headrace.exits import Answered, BrokerAway, NotAllowed, TryLater

DEFAULT_URL = "http://127.0.0.1:15672"
TIMEOUT_S = 30.0

Query = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password: str

    @property
    def header(self) -> str:
        return f"Basic {b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


class Client:
    def __init__(
        self, url: str = DEFAULT_URL, login: Login | None = None, *, ca_file: Path | None = None, version: str = ""
    ) -> None:
        """Raises ValueError for a URL that is none, or that holds a password for everybody to see."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected http://host:port or https://host:port")
        if parts.username is not None or parts.password is not None:
            raise ValueError("no user or password in the URL: others can see it; use --user and HEADRACE_PASSWORD")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path.rstrip("/")
        self._headers = {"accept": "application/json", "user-agent": f"headrace-cli/{version}"}
        if login is not None:
            self._headers["authorization"] = login.header
        default_port = 15671 if parts.scheme == "https" else 15672
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port or default_port, timeout=TIMEOUT_S, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port or default_port, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    def get(self, path: str, query: Query | None = None, *, wait_s: float = 0) -> Any:
        """`wait_s`: how long the broker was asked to wait before it answers."""
        return self.request("GET", path, query=query, wait_s=wait_s)

    def request(
        self, method: str, path: str, *, query: Query | None = None, body: object = None, wait_s: float = 0
    ) -> Any:
        """What the broker answers, None if that is nothing. Raises BrokerAway and Answered."""
        target = self._prefix + path
        if pairs := [(name, _text(value)) for name, value in (query or {}).items() if value is not None]:
            target += f"?{urlencode(pairs)}"
        headers = dict(self._headers)
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        self._set_timeout(TIMEOUT_S + wait_s)
        try:
            response, content = self._exchange(method, target, data, headers)
        except ssl.SSLError as error:
            raise BrokerAway(f"{self.url}: TLS fails: {error.reason or error}") from error
        except TimeoutError as error:
            raise BrokerAway(f"{self.url}: no answer within {TIMEOUT_S + wait_s:.0f} seconds") from error
        except OSError as error:
            what = error.strerror or str(error)
            raise BrokerAway(
                f"no broker answers at {self.url}: {what}; is it running, and its HTTP door open?"
            ) from error
        except http.client.HTTPException as error:
            raise BrokerAway(f"{self.url}: what answers there speaks no HTTP ({type(error).__name__})") from error
        return self._answer(response, content)

    def _set_timeout(self, seconds: float) -> None:
        self._connection.timeout = seconds
        if self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)

    def _exchange(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        was_open = self._connection.sock is not None
        try:
            return self._exchange_once(method, target, data, headers)
        except (http.client.RemoteDisconnected, ConnectionError):
            self._connection.close()
            if not was_open or method != "GET":
                raise
        return self._exchange_once(method, target, data, headers)

    def _exchange_once(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            self._connection.request(method, target, data, dict(headers))
            response = self._connection.getresponse()
            return response, response.read()
        except BaseException:
            # What is left of the exchange must not be taken for the answer to the next one.
            self._connection.close()
            raise

    def _answer(self, response: http.client.HTTPResponse, content: bytes) -> Any:
        kind = (response.getheader("content-type") or "").partition(";")[0].strip()
        if response.status < 400 and not content:
            return None
        try:
            found = json.loads(content) if kind.endswith("json") else None
        except ValueError:
            found = None
        if response.status < 400 and found is not None:
            return found
        if response.status >= 400 and isinstance(found, dict) and "code" in found:
            raise _problem(response.status, found)
        raise BrokerAway(
            f"{self.url}: what answers there is no Headrace broker (HTTP {response.status}, {kind or '?'})"
        )


def _problem(status: int, document: Mapping[str, Any]) -> Answered:
    text = str(document.get("detail") or document.get("title") or document["code"])
    family = Answered
    if status in (401, 403):
        family = NotAllowed
    elif status in (429, 503, 507):
        family = TryLater
    return family(status, str(document["code"]), text)


def _text(value: str | int | float | bool | None) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def path(*segments: str | int) -> str:
    """A path below the API's version; each segment may hold any character, a slash too."""
    return "/api/v1/" + "/".join(quote(str(one), safe="") for one in segments)


def is_loopback_url(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    for family, prefix in ((socket.AF_INET, b"\x7f"), (socket.AF_INET6, b"\0" * 15 + b"\x01")):
        try:
            return socket.inet_pton(family, host).startswith(prefix)
        except OSError:
            continue
    return False
