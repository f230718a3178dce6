"""What a stream is: the file `stream.json` of its folder, and the names of what lies beside it. Format over a storage
file; imports no trio.

The broker (directory.py), `headrace log` and readers without a broker (inspection.py, Spark) find streams by it.
"""

from uuid import UUID

import msgspec

from headrace.core_log.config import LogConfig
from headrace.core_log.errors import UnknownFormat
from headrace.core_log.storage.contract import Storage

STREAMS = "streams"
SPEC = "stream.json"
# Beside the segments of a partition.
CHECKPOINT = "watermark"
EPOCHS = "epochs"
PRODUCERS = "producers"
# Behind the name of a segment that retention took.
REMOVED = ".removed"
FORMAT = 1


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What stream.json says. `kind`: exchange | queue | topic | internal."""

    id: UUID
    name: str
    kind: str
    partition_count: int = 1
    vhost: str = "/"
    created_us: int = 0
    config: LogConfig = LogConfig()
    format: int = FORMAT
    # Of a replicated stream: the epoch in which each partition was created.
    born: tuple[int, ...] = ()

    def born_in(self, partition: int) -> int:
        """0: not known, since an earlier release created it."""
        return self.born[partition] if partition < len(self.born) else 0


def folder_of(stream_id: UUID, partition: int | None = None) -> str:
    folder = f"{STREAMS}/{stream_id}"
    return folder if partition is None else f"{folder}/{partition}"


def read_spec(storage: Storage, stream_id: str) -> StreamSpec:
    """What is known of a stream, without opening it. Raises UnknownFormat for what this release cannot read."""
    path = f"{STREAMS}/{stream_id}/{SPEC}"
    data = storage.read_file(path)
    try:
        spec = msgspec.json.decode(data, type=StreamSpec)
    except (msgspec.DecodeError, ValueError) as error:
        raise UnknownFormat(f"{path}: {error}") from error
    if spec.format != FORMAT:
        raise UnknownFormat(f"{path}: format {spec.format} is not known to this release")
    return spec


def list_streams(storage: Storage) -> list[StreamSpec]:
    if not storage.exists(STREAMS):
        return []
    # A folder without its stream.json was never finished, and nothing in it was ever acknowledged.
    names = [name for name in storage.list(STREAMS) if storage.exists(f"{STREAMS}/{name}/{SPEC}")]
    return [read_spec(storage, name) for name in names]
