"""Whose fault it is, and what happens next. Values.

Three families; each door maps them to its wire in one table. Anything else is our own mistake and is loud.
"""


class HeadraceError(Exception):
    """Root of the three families; never raised itself."""


class PeerError(HeadraceError):
    """The other side broke the protocol; `code` is the wire's own. Closes the channel or connection."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Refused(HeadraceError):
    """A lawful request that cannot be granted now. The connection lives."""


class OffsetOutOfRange(Refused):
    """A read below the log start or above what may be seen. Says both ends."""

    def __init__(self, asked: int, first: int, end: int) -> None:
        super().__init__(f"offset {asked} is outside {first}..{end}")
        self.asked = asked
        self.first = first
        self.end = end


class SequenceRefused(Refused):
    """An idempotent publish below the window, with a gap (internal producers), or from a fenced epoch."""


class NotLed(Refused):
    """This replica follows another node's: its records come from there, and from nobody here."""


class DamagedBatch(Refused):
    """What was handed in to be stored is not what somebody encoded. The log is as it was."""


class StorageError(HeadraceError):
    """Disk or data. The partition stops serving; nothing in doubt is acknowledged."""


class CorruptLog(StorageError):
    """Bytes that were once committed no longer read back. Never cut silently."""

    def __init__(self, path: str, position: int, offset: int, what: str) -> None:
        super().__init__(f"{path}: {what} at byte {position}, offset {offset}")
        self.path = path
        self.position = position
        self.offset = offset
        self.what = what


class DiskFull(StorageError):
    """No space left for what was to be written; nothing of it counts."""


class Poisoned(StorageError):
    """A sync failed once, so nothing written to this directory can be trusted until it is opened again."""


class DirectoryInUse(StorageError):
    """Another broker holds the lock of this data directory."""


class UnknownFormat(StorageError):
    """A file of a version or kind that this release does not know. Loud, and nothing is touched."""
