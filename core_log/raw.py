"""Stored batches to a peer as they are: from the page cache into the socket, without a copy of ours. Driver: trio, os.

A plain TCP stream gets them by sendfile; any other stream (TLS), and a storage without descriptors, by reading and
sending. The worker does whatever may wait for the disk; only the wait for the socket is the loop's. One sender at a
time, as with send_all. Whoever is cancelled or meets an error here has sent any part of it and must close the stream.
Neighbours: log.py (`read_raw`) says which bytes; the receiver checks salts and hashes, as every reader does.
"""

import os
from errno import EINVAL, ENOSYS, ENOTCONN, EOPNOTSUPP

import trio

from headrace.core_log.env import Worker
from headrace.core_log.errors import StorageError
from headrace.core_log.log import RawSlice
from headrace.core_log.storage.contract import File

COPY_BYTES = 256 * 1024
# How many bytes of the file prove that a descriptor is its own: a batch's magic, size and salt.
_PROOF_BYTES = 16


async def send_raw(worker: Worker, stream: trio.abc.SendStream, piece: RawSlice) -> None:
    """Send the slice's bytes. Raises trio's BrokenResourceError when the peer is gone, StorageError for the disk."""
    file = piece.segment.file
    sent = 0
    if isinstance(stream, trio.SocketStream):
        descriptor = await worker.run(lambda: own_descriptor(file, piece.position))
        if descriptor is not None:
            try:
                sent = await _send_file(worker, stream, descriptor, piece)
            finally:
                os.close(descriptor)
    while sent < piece.length:
        at, size = piece.position + sent, min(COPY_BYTES, piece.length - sent)
        data = await worker.run(lambda at=at, size=size: file.read(at, size))  # type: ignore[misc]
        if not data:
            raise _too_short(piece)
        await stream.send_all(data)
        sent += len(data)


def own_descriptor(file: File, position: int) -> int | None:
    """A descriptor of our own for the file, or None where there is none to be had.

    The storage may close its descriptor, and the system give its number away, between the two calls; so what it reads
    is compared.
    """
    number = file.fileno()
    if number < 0:
        return None
    try:
        copy = os.dup(number)
    except OSError:
        return None
    try:
        if os.pread(copy, _PROOF_BYTES, position) == file.read(position, _PROOF_BYTES):
            return copy
    except OSError:
        pass
    os.close(copy)
    return None


async def _send_file(worker: Worker, stream: trio.SocketStream, descriptor: int, piece: RawSlice) -> int:
    """Send as much as the system can; returns how much that was (less than all where sendfile is not known)."""
    socket = stream.socket
    if socket.fileno() < 0:
        raise trio.ClosedResourceError("this stream is closed")
    # The worker has a descriptor of its own: closed meanwhile, the number could be somebody else's connection by now.
    out = os.dup(socket.fileno())
    sent = 0
    try:
        while sent < piece.length:
            at, size = piece.position + sent, piece.length - sent
            try:
                step = await worker.run(lambda at=at, size=size: os.sendfile(out, descriptor, at, size))  # type: ignore[misc]
            except BlockingIOError:
                # It may have been closed while the worker was at it.
                if socket.fileno() < 0:
                    raise trio.ClosedResourceError("this stream is closed") from None
                await trio.lowlevel.wait_writable(socket)
                continue
            except OSError as error:
                if error.errno in (EINVAL, ENOSYS, EOPNOTSUPP):
                    return sent
                if isinstance(error, ConnectionError) or error.errno == ENOTCONN:
                    raise trio.BrokenResourceError(f"sending failed: {error}") from error
                raise StorageError(f"{piece.segment.path}: {error.strerror or error}") from error
            if socket.fileno() < 0:
                raise trio.ClosedResourceError("this stream was closed while a slice was sent")
            if step == 0:
                raise _too_short(piece)
            sent += step
    finally:
        os.close(out)
    return sent


def _too_short(piece: RawSlice) -> StorageError:
    return StorageError(f"{piece.segment.path}: ends before byte {piece.position + piece.length}")
