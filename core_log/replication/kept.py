"""The file `kept` of a shard: what its replica has promised, and the row it acted on. Format over a storage file.

JSON, so that an operator can read it. Replaced as a whole, and synced before anything that follows from it is sent.
"""

import msgspec

from headrace.core_log.errors import UnknownFormat
from headrace.core_log.replication.replica import Kept
from headrace.core_log.storage.contract import Storage

PATH = "kept"
FORMAT = 1


class _File(msgspec.Struct, frozen=True):
    kept: Kept
    format: int = FORMAT


def read_kept(storage: Storage) -> Kept | None:
    """None: this disk has never been a replica of the shard. Raises UnknownFormat for what cannot be read."""
    if not storage.exists(PATH):
        return None
    try:
        found = msgspec.json.decode(storage.read_file(PATH), type=_File)
    except (msgspec.DecodeError, ValueError) as error:
        raise UnknownFormat(f"{PATH}: {error}") from error
    if found.format != FORMAT:
        raise UnknownFormat(f"{PATH}: format {found.format} is not known to this release")
    return found.kept


def write_kept(storage: Storage, kept: Kept) -> None:
    storage.replace_file(PATH, msgspec.json.format(msgspec.json.encode(_File(kept))) + b"\n")
