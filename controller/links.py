"""Messages over a link to the controller, and a link within one process: the controller's own node has that. Driver."""

from typing import Protocol

import trio

from headrace.controller.messages import FRAME_KIND, Message, decode, encode
from headrace.core_log.peer.errors import PeerGone

_WAITING_MAX = 1000


class Link(Protocol):
    """What is needed of core_log/peer/link.py's PeerLink."""

    async def send(self, kind: int, *parts: bytes | memoryview) -> None: ...

    async def receive(self) -> tuple[int, bytes]: ...

    async def aclose(self) -> None: ...


async def send(link: Link, message: Message) -> None:
    """Raises PeerGone."""
    await link.send(FRAME_KIND, encode(message))


async def receive(link: Link) -> Message:
    """Raises PeerGone, UnknownMessage."""
    return decode(*await link.receive())


class LocalLink:
    """One end of a link within this process."""

    def __init__(
        self, put: trio.MemorySendChannel[tuple[int, bytes]], get: trio.MemoryReceiveChannel[tuple[int, bytes]]
    ) -> None:
        self._put = put
        self._get = get

    async def send(self, kind: int, *parts: bytes | memoryview) -> None:
        try:
            await self._put.send((kind, b"".join(parts)))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerGone("the link within this process has ended") from error

    async def receive(self) -> tuple[int, bytes]:
        try:
            return await self._get.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise PeerGone("the link within this process has ended") from error

    async def aclose(self) -> None:
        self._put.close()
        self._get.close()


def local_links() -> tuple[LocalLink, LocalLink]:
    here_put, there_get = trio.open_memory_channel[tuple[int, bytes]](_WAITING_MAX)
    there_put, here_get = trio.open_memory_channel[tuple[int, bytes]](_WAITING_MAX)
    return LocalLink(here_put, here_get), LocalLink(there_put, there_get)
