"""Which streams of a shard were deleted, for replicas that were away meanwhile. Machine over a storage file.

A replica deletes a stream only because its leader names it here, never because the leader does not mention it (E8). A
stream is forgotten once every replica has taken its deletion over. The file `deleted` is JSON: a list of ids.
"""

from collections.abc import Collection, Iterable
from uuid import UUID

import msgspec

from headrace.core_log.errors import UnknownFormat
from headrace.core_log.storage.contract import Storage

PATH = "deleted"


class Deletions:
    def __init__(self, storage: Storage, streams: Collection[UUID], trashed: Iterable[UUID]) -> None:
        """`trashed`: lie in the trash, so that a crash before the file was written loses no deletion."""
        self._storage = storage
        try:
            found = msgspec.json.decode(storage.read_file(PATH), type=list[UUID]) if storage.exists(PATH) else []
        except (msgspec.DecodeError, ValueError) as error:
            raise UnknownFormat(f"{PATH}: {error}") from error
        self.streams = {one for one in (*found, *trashed) if one not in streams}
        self.is_saved = self.streams == set(found)

    def note(self, stream: UUID) -> None:
        self.is_saved = self.is_saved and stream in self.streams
        self.streams.add(stream)

    def forget(self, streams: Iterable[UUID]) -> None:
        """All replicas have heard of these, or one of them came back."""
        gone = self.streams.intersection(streams)
        self.is_saved = self.is_saved and not gone
        self.streams -= gone

    def save(self) -> None:
        """Blocks; no file for nothing."""
        if not self.is_saved:
            self._storage.replace_file(PATH, msgspec.json.encode(sorted(self.streams)) + b"\n")
            self.is_saved = True
