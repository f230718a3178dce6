"""A data directory as the next start of its broker will leave it: over what its segments hold lies what only the commit
journal does. Driver over real files, for reading only.

After a loss of power the newest bytes of a segment may be in the journal alone (K4), until a broker, or `headrace log
repair`, has put them back. A reader that finds what cannot be looks here before it calls it corrupt. The journal is
read once; what a broker writes into it afterwards is in the segments, too. Neighbours: journal.py has the entries.
"""

from collections.abc import Sequence
from pathlib import Path

from headrace.core_log.format import SEGMENT_HEAD_SIZE, maybe_segment_head
from headrace.core_log.journal import entries
from headrace.core_log.segment import stem_of
from headrace.core_log.spec import folder_of
from headrace.core_log.storage.readonly import ReadOnlyFile, ReadOnlyStorage

# Where bytes begin in a file, and what they are.
Piece = tuple[int, bytes]


class MendedFile(ReadOnlyFile):
    __slots__ = ("_pieces",)

    def __init__(self, path: str, number: int, pieces: Sequence[Piece]) -> None:
        super().__init__(path, number)
        self._pieces = pieces

    def read(self, position: int, length: int) -> bytes:
        found = bytearray(super().read(position, length))
        for start, data in self._pieces:
            first, end = max(start, position), min(start + len(data), position + length)
            if first < end:
                # Between the end of a file that is too short and a piece nothing was ever written.
                found += bytes(max(end - position - len(found), 0))
                found[first - position : end - position] = data[first - start : end - start]
        return bytes(found)

    def size(self) -> int:
        return max([super().size(), *(start + len(data) for start, data in self._pieces)])


class MendedStorage(ReadOnlyStorage):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # By path and salt, since a segment's file is used again.
        self._pieces: dict[tuple[str, int], list[Piece]] = {}
        for entry in entries(self):
            path = f"{stem_of(folder_of(entry.stream_id, entry.partition), entry.segment_base)}.log"
            self._pieces.setdefault((path, entry.segment_salt), []).append((entry.position, bytes(entry.data)))

    def open(self, path: str, *, create: bool = False) -> ReadOnlyFile:
        file = super().open(path, create=create)
        head = maybe_segment_head(file.read(0, SEGMENT_HEAD_SIZE)) if path.endswith(".log") else None
        pieces = None if head is None else self._pieces.get((file.path, head.salt))
        return file if pieces is None else self._opened(path, lambda path, number: MendedFile(path, number, pieces))

    def holds(self, folder: str) -> bool:
        """Whether the journal has something for a partition's folder."""
        return any(path.startswith(f"{folder}/") for path, _ in self._pieces)
