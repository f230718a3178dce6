"""Bytes of a file as an answer: from the page cache into the socket where the transport allows. Driver: ASGI.

A plain connection sends them itself (ASGI's zero copy extension; connection.py has it), any other one (TLS), and a
storage without descriptors, gets them read and sent piece by piece. The worker does whatever may wait for the disk.
Neighbours: segments.py answers with it; core_log/raw.py does the same towards a peer.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core_log.env import Worker
from headrace.core_log.errors import StorageError
from headrace.core_log.raw import COPY_BYTES, own_descriptor
from headrace.core_log.storage.contract import File

ZERO_COPY = "http.response.zerocopysend"


@dataclass(frozen=True, slots=True)
class Download:
    file: File
    position: int
    length: int


class DownloadResponse(Response):
    def __init__(self, worker: Worker, download: Download, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(None, status, dict(headers))
        self.headers["content-length"] = str(download.length)
        self._worker = worker
        self._download = download

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        left = 0 if scope["method"] == "HEAD" else self._download.length
        file, position = self._download.file, self._download.position
        if left and ZERO_COPY in scope.get("extensions", {}):
            descriptor = await self._worker.run(lambda: own_descriptor(file, position))
            if descriptor is not None:
                try:
                    await send({"type": ZERO_COPY, "file": descriptor, "offset": position, "count": left})
                finally:
                    os.close(descriptor)
                return
        while left > 0:
            at, size = position, min(COPY_BYTES, left)
            data = await self._worker.run(lambda at=at, size=size: file.read(at, size))  # type: ignore[misc]
            if not data:
                raise StorageError(f"{file.path}: ends before byte {position + left}")
            position += len(data)
            left -= len(data)
            await send({"type": "http.response.body", "body": data, "more_body": left > 0})
        if not self._download.length or scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
