"""Stored batches onto a plain socket, without passing through Python. Driver: trio, sendfile.

What a follower or a ranged download gets are the bytes of the segment as they are: hashes stand, nothing is decoded.
Where the storage has no descriptor (memory) or the stream is not a bare socket (TLS), the bytes are read and sent.
"""

import os

import trio

from headrace.core_log.log import RawSlice

CHUNK_BYTES = 256 * 1024


async def send_slice(stream: trio.abc.SendStream, piece: RawSlice) -> None:
    """Send every byte of the slice. Raises trio.BrokenResourceError when the peer has gone."""
    descriptor = piece.segment.file.fileno()
    if descriptor < 0 or not isinstance(stream, trio.SocketStream):
        await _read_and_send(stream, piece)
        return
    # The handle may be closed by the storage's cap while this waits for the peer: a copy stays open.
    copy = os.dup(descriptor)
    try:
        await _sendfile(stream.socket, copy, piece.position, piece.length)
    finally:
        os.close(copy)


async def _sendfile(sock: trio.socket.SocketType, descriptor: int, position: int, left: int) -> None:
    await trio.lowlevel.checkpoint()
    while left:
        try:
            sent = os.sendfile(sock.fileno(), descriptor, position, left)
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)
            continue
        except OSError as error:
            raise trio.BrokenResourceError(f"the peer does not take the batches: {error.strerror}") from error
        if not sent:
            raise trio.BrokenResourceError("the segment is shorter than its batches")
        position += sent
        left -= sent


async def _read_and_send(stream: trio.abc.SendStream, piece: RawSlice) -> None:
    end = piece.position + piece.length
    for start in range(piece.position, end, CHUNK_BYTES):
        await stream.send_all(piece.segment.file.read(start, min(CHUNK_BYTES, end - start)))
