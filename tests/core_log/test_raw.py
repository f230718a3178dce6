"""Stored batches reach a peer byte for byte, by sendfile and without it."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.log import PartitionLog, RawSlice
from headrace.core_log.raw import send_slice
from headrace.core_log.real import real_env


@asynccontextmanager
async def filled_log(folder: Path, byte_count: int) -> AsyncIterator[PartitionLog]:
    directory = await LogDirectory.open(real_env(folder), DirectoryConfig(), clean=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.run)
        stream = await directory.create_stream("orders", kind="topic", config=LogConfig(compression="none"))
        log = stream.partitions[0]
        for _ in range(byte_count // 65_536):
            log.append([b"k"], [b""], [os.urandom(65_536)], timestamp_us=1)
        directory.committer.urgent(log)
        await directory.committer.flush()
        yield log
        nursery.cancel_scope.cancel()


async def socket_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    left, right = trio.socket.socketpair()
    return trio.SocketStream(left), trio.SocketStream(right)


def everything(log: PartitionLog) -> RawSlice:
    piece = log.read_raw(0, bytes_max=1 << 30)
    assert piece is not None
    assert piece.next_offset == log.high_watermark
    return piece


async def received(stream: trio.abc.ReceiveStream, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        data += await stream.receive_some()
    return bytes(data)


async def test_slice_larger_than_the_sockets_buffers_arrives_byte_for_byte(tmp_path: Path) -> None:
    async with filled_log(tmp_path, 4 * 1024 * 1024) as log:
        piece = everything(log)
        sender, receiver = await socket_pair()
        got = b""

        async def receive() -> None:
            nonlocal got
            got = await received(receiver, piece.length)

        async with sender, receiver, trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await send_slice(sender, piece)
        assert got == piece.segment.file.read(piece.position, piece.length)


async def test_stream_that_is_no_bare_socket_gets_the_same_bytes(tmp_path: Path) -> None:
    async with filled_log(tmp_path, 512 * 1024) as log:
        piece = everything(log)
        sender, receiver = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_slice, sender, piece)
            got = await received(receiver, piece.length)
        assert got == piece.segment.file.read(piece.position, piece.length)


async def test_peer_that_has_gone_is_a_broken_resource(tmp_path: Path) -> None:
    async with filled_log(tmp_path, 4 * 1024 * 1024) as log:
        sender, receiver = await socket_pair()
        await receiver.aclose()
        async with sender:
            with pytest.raises(trio.BrokenResourceError):
                await send_slice(sender, everything(log))
