"""The other end of a WebSocket for tests: what looks like a socket to a client, over TCP or TLS."""

import socket
import ssl

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Request

PATIENCE_S = 20


class WsSocket:
    """`events`: everything that came besides data."""

    def __init__(self, sock: socket.socket, *, message_bytes_max: int = 1 << 20, target: str = "/mqtt") -> None:
        self.socket = sock
        self.ws = WSConnection(ConnectionType.CLIENT)
        self.events: list[Event] = []
        self.message_bytes_max = message_bytes_max
        self._came = bytearray()
        sock.sendall(self.ws.send(Request(host="localhost", target=target, subprotocols=["mqtt"])))
        while not self.events:
            self._read()
        accepted = self.events.pop(0)
        assert isinstance(accepted, AcceptConnection), accepted
        assert accepted.subprotocol == "mqtt"
        assert not accepted.extensions

    def _read(self) -> bool:
        data = self.socket.recv(1 << 20)
        if not data:
            return False
        self.ws.receive_data(data)
        for event in self.ws.events():
            if isinstance(event, BytesMessage):
                self._came += event.data
            else:
                self.events.append(event)
        return True

    def sendall(self, data: bytes) -> None:
        step = self.message_bytes_max
        self.send(*(BytesMessage(data=data[at : at + step]) for at in range(0, len(data), step)))

    def send(self, *events: Event) -> None:
        self.socket.sendall(b"".join(self.ws.send(event) for event in events))

    def recv(self, bytes_max: int) -> bytes:
        while not self._came and not self.closed:
            if not self._read():
                return b""
        data = bytes(self._came[:bytes_max])
        del self._came[:bytes_max]
        return data

    def wait_for_event(self) -> Event:
        while not self.events:
            assert self._read(), "the broker has closed the connection"
        return self.events.pop(0)

    @property
    def closed(self) -> bool:
        return any(isinstance(event, CloseConnection) for event in self.events)

    def shutdown(self, how: int) -> None:
        self.socket.shutdown(how)

    def close(self) -> None:
        self.socket.close()


def connect(port: int, context: ssl.SSLContext | None = None, **settings: int) -> WsSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    return WsSocket(plain if context is None else context.wrap_socket(plain, server_hostname="localhost"), **settings)
