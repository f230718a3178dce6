"""Stored batches over a real socket are byte for byte what the file holds, however the system lets them through."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from headrace.core_log import raw
from headrace.core_log.config import LogConfig
from headrace.core_log.errors import StorageError
from headrace.core_log.log import PartitionLog, RawSlice
from headrace.core_log.raw import send_raw
from headrace.core_log.real import ThreadWorker
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.disk import DiskStorage
from headrace.core_log.storage.memory import MemoryStorage

from .directories import add_stream, append, commit, open_directory

PATIENCE_S = 30
WORKER = ThreadWorker()


def filled(storage: Storage) -> PartitionLog:
    (log,) = add_stream(open_directory(storage), "raw", LogConfig(compression="none")).partitions
    for _ in range(40):
        append(log, 20, size=5_000)
        commit(log)
    return log


def slice_of(log: PartitionLog, offset: int = 25) -> RawSlice:
    piece = log.read_raw(offset, bytes_max=3_000_000)
    assert piece is not None and piece.length > 2_000_000
    return piece


def stored(piece: RawSlice) -> bytes:
    return piece.segment.file.read(piece.position, piece.length)


def streams(buffer_bytes: int | None = None) -> tuple[trio.SocketStream, trio.SocketStream]:
    """Both ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    if buffer_bytes is not None:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        right.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    for one in (left, right):
        one.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(left)), trio.SocketStream(
        trio.socket.from_stdlib_socket(right)
    )


async def received(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (piece := await stream.receive_some(65536)):
        data += piece
    return bytes(data)


async def sent_through(ours: trio.abc.SendStream, theirs: trio.abc.ReceiveStream, piece: RawSlice) -> bytes:
    """What arrives, with something before and something behind it that must stay in its place."""
    found = b""

    async def receive() -> None:
        nonlocal found
        found = await received(theirs, piece.length + 2 * len(b"mark"))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await ours.send_all(b"mark")
            await send_raw(WORKER, ours, piece)
            await ours.send_all(b"MARK")
    assert found[:4] == b"mark" and found[-4:] == b"MARK"
    return found[4:-4]


@pytest.mark.parametrize("buffer_bytes", [None, 65536])
async def test_slice_goes_through_a_socket_byte_for_byte(tmp_path: Path, buffer_bytes: int | None) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams(buffer_bytes)
    async with ours, theirs:
        assert await sent_through(ours, theirs, piece) == stored(piece)


async def test_small_socket_buffer_means_many_steps_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    steps: list[int] = []
    real = os.sendfile

    def sendfile(*arguments: int) -> int:
        steps.append(real(*arguments))
        return steps[-1]

    monkeypatch.setattr(os, "sendfile", sendfile)
    ours, theirs = streams(65536)
    async with ours, theirs:
        assert await sent_through(ours, theirs, piece) == stored(piece)
    assert len(steps) > 3
    assert sum(steps) == piece.length


async def test_slice_still_goes_when_the_storage_has_closed_its_descriptor(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path, handles_max=1)
    piece = slice_of(filled(storage))
    expected = stored(piece)
    storage.replace_file("other", b"takes the only descriptor")
    storage.open("other").read(0, 1)
    ours, theirs = streams()
    async with ours, theirs:
        assert await sent_through(ours, theirs, piece) == expected


async def test_descriptor_that_now_belongs_to_another_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    (tmp_path / "other").write_bytes(bytes(4_000_000))
    other = os.open(tmp_path / "other", os.O_RDONLY)
    monkeypatch.setattr(type(piece.segment.file), "fileno", lambda file: other)
    ours, theirs = streams()
    async with ours, theirs:
        assert await sent_through(ours, theirs, piece) == stored(piece)
    os.close(other)


async def test_storage_without_descriptors_is_read_and_sent() -> None:
    piece = slice_of(filled(MemoryStorage()))
    ours, theirs = streams()
    async with ours, theirs:
        assert await sent_through(ours, theirs, piece) == stored(piece)


async def test_stream_that_is_no_plain_socket_gets_the_bytes_through_send_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: int) -> int:
        raise AssertionError("sendfile would go around the encryption")

    monkeypatch.setattr(os, "sendfile", never)
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    assert await sent_through(ours, theirs, piece) == stored(piece)


async def test_system_without_sendfile_for_these_files_falls_back_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.sendfile
    calls = 0

    def sendfile(out: int, descriptor: int, offset: int, count: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(out, descriptor, offset, min(count, 1000))

    monkeypatch.setattr(os, "sendfile", sendfile)
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams()
    async with ours, theirs:
        assert await sent_through(ours, theirs, piece) == stored(piece)


async def test_peer_that_is_gone_is_a_broken_resource(tmp_path: Path) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams(65536)
    async with ours:
        await theirs.aclose()
        with trio.fail_after(PATIENCE_S), pytest.raises(trio.BrokenResourceError):
            while True:
                await send_raw(WORKER, ours, piece)


async def test_peer_that_goes_while_the_socket_is_full_is_a_broken_resource(tmp_path: Path) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams(65536)
    with trio.fail_after(PATIENCE_S):
        async with ours, trio.open_nursery() as nursery:

            async def send() -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await send_raw(WORKER, ours, piece)

            nursery.start_soon(send)
            await theirs.receive_some(1)
            # Unread bytes make the close a reset.
            await theirs.aclose()


async def test_own_stream_closed_meanwhile_is_a_closed_resource(tmp_path: Path) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams(65536)
    with trio.fail_after(PATIENCE_S):
        async with theirs, trio.open_nursery() as nursery:

            async def send() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await send_raw(WORKER, ours, piece)

            nursery.start_soon(send)
            await theirs.receive_some(1)
            await trio.testing.wait_all_tasks_blocked()
            await ours.aclose()


async def test_closed_stream_sends_nothing(tmp_path: Path) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams()
    await ours.aclose()
    async with theirs:
        with pytest.raises(trio.ClosedResourceError):
            await send_raw(WORKER, ours, piece)


async def test_number_of_a_closed_connection_that_another_one_has_now_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams()
    others: list[trio.SocketStream] = []
    real = os.sendfile

    def sendfile(out: int, *arguments: int) -> int:
        # While the worker is at it, the stream is closed and its number given to another connection.
        if not others:
            trio.from_thread.run_sync(ours.socket.close, trio_token=token)
            others.extend(trio.from_thread.run_sync(streams, trio_token=token))
        return real(out, *arguments)

    token = trio.lowlevel.current_trio_token()
    monkeypatch.setattr(os, "sendfile", sendfile)
    with trio.fail_after(PATIENCE_S), pytest.raises(trio.ClosedResourceError):
        await send_raw(WORKER, ours, piece)
    monkeypatch.undo()
    async with theirs, others[0], others[1]:
        await others[0].send_all(b"only this")
        assert await others[1].receive_some(100) == b"only this"
        await others[1].send_all(b"and this")
        assert await others[0].receive_some(100) == b"and this"


def fails(number: int) -> Callable[..., int]:
    def sendfile(*arguments: int) -> int:
        raise OSError(number, os.strerror(number))

    return sendfile


async def test_disk_that_cannot_be_read_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams()
    monkeypatch.setattr(os, "sendfile", fails(errno.EIO))
    async with ours, theirs:
        with pytest.raises(StorageError, match=r"\.log: Input/output error"):
            await send_raw(WORKER, ours, piece)


@pytest.mark.parametrize("with_descriptor", [True, False])
async def test_file_that_is_too_short_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_descriptor: bool
) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    piece.segment.file.truncate(piece.position + 1000)
    if not with_descriptor:
        monkeypatch.setattr(raw, "own_descriptor", lambda file, position: None)
    ours, theirs = streams()
    async with ours, theirs:
        with pytest.raises(StorageError, match="ends before byte"):
            await send_raw(WORKER, ours, piece)


async def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    piece = slice_of(filled(DiskStorage(tmp_path)))
    ours, theirs = streams()
    async with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        await sent_through(ours, theirs, piece)
        assert len(os.listdir("/proc/self/fd")) == before
