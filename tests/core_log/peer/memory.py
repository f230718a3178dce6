"""Two ends of a link without a socket, for tests of what runs over links. Driver: trio."""

from uuid import UUID

import msgspec
import trio
from trio.testing import MemoryReceiveStream, MemorySendStream, memory_stream_pair

from headrace.core_log.env import Worker
from headrace.core_log.log import RawSlice
from headrace.core_log.peer.errors import PeerGone
from headrace.core_log.peer.frames import Hello, Purpose
from headrace.core_log.peer.link import PeerLink

CLUSTER = UUID(int=0xC1)


def hello_of(
    node: int,
    purpose: Purpose = Purpose.CONTROL,
    *,
    incarnation: int = 1,
    disk: UUID | None = None,
    detail: bytes = b"",
) -> Hello:
    return Hello(CLUSTER, node, incarnation, disk or UUID(int=node + 1), purpose, detail)


class MemoryWire:
    """`closed` is told to the other end, as a reset is."""

    def __init__(self, stream: "trio.StapledStream[MemorySendStream, MemoryReceiveStream]") -> None:
        self._stream = stream

    async def send(self, parts: list[bytes | memoryview]) -> None:
        try:
            await self._stream.send_all(b"".join(parts))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerGone("the other end is closed") from error

    async def send_slice(self, worker: Worker, piece: RawSlice) -> None:
        await self.send([piece.segment.file.read(piece.position, piece.length)])

    async def receive_some(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some())
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerGone("this end is closed") from error

    def close(self) -> None:
        self._stream.send_stream.close()
        self._stream.receive_stream.close()


def memory_pair(caller: Hello, door: Hello) -> tuple[PeerLink, PeerLink]:
    """(the caller's end, the door's end) of a link whose handshake is done."""
    left, right = memory_stream_pair()
    answer = msgspec.structs.replace(door, purpose=caller.purpose)
    return PeerLink(MemoryWire(left), answer), PeerLink(MemoryWire(right), caller)
