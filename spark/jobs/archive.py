"""Topics as Parquet by topic, date and hour, each record once; small files joined. Driver of pyspark and pyarrow.fs.

    out/topic=orders/date=2026-01-31/hour=13/00000000000000000007-0003.parquet      batch 7 of the archive
    out/_batches/00000000000000000007                                               its files are complete
    out/_joins/<name>.json                                                          files that are being joined

Anything that reads Parquet reads it (names that begin with `_` are passed over). The stream has Spark's checkpoint, so
a batch has the same records whenever it runs. Batch n is written aside, its files are moved to names that begin with n,
then `_batches/n` is written. What a crash leaves of a batch is taken away when the batch runs again, before any of it
is written: each record is there once. Joining writes the new file aside, then a note of what it takes the place of,
then moves it in and deletes the others; whatever a crash leaves of that is finished by the next run. While that
happens, a reader may see records twice: join when nobody reads, or read again.

Delta (`format="delta"`) is written by the package deltalake, without a jar: its log knows the last batch of each
archive, and readers see whole batches only. Neighbours: stream_start.py keeps where it began, audit.py compares.
"""

import importlib
import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from headrace.spark.jobs.inputs import Where
from headrace.spark.stream_start import stream_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_log = logging.getLogger(__name__)

Format = Literal["parquet", "delta"]
COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers", "tags", "protocol")
PARTITIONED_BY = ("topic", "date", "hour")
BATCHES, JOINS, ASIDE = "_batches", "_joins", "_aside"
# Files smaller than this are joined, where there are this many of them.
SMALL_BYTES = 32 * 1024 * 1024
SMALL_COUNT = 4
OFFSETS_PER_BATCH = 1_000_000


def archive(
    spark: "SparkSession",
    where: Where,
    topics: Sequence[str],
    out: str,
    *,
    checkpoint: str | None = None,
    format: Format = "parquet",
    joins: bool = True,
    offsets_per_batch: int = OFFSETS_PER_BATCH,
    small_bytes: int = SMALL_BYTES,
) -> "DataFrame":
    """Everything that came since the last run, up to now; returns the whole archive.

    `checkpoint` is beside the archive unless given, and belongs to it: without it the archive would begin again.
    """
    if format == "delta":
        deltalake()
    folder = checkpoint or f"{out.rstrip('/')}/_checkpoint"
    options = {name: text for name, text in where.items() if name not in ("url", "path")} | {
        "columns": ",".join(COLUMNS),
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(offsets_per_batch),
    }
    rows = stream_topic(spark, topics, checkpoint=folder, url=where.get("url"), path=where.get("path"), options=options)
    schema = _dated(rows).schema
    writer = _Delta(spark, out, schema) if format == "delta" else _Parquet(spark, out, schema)
    writer.recover()
    query = (
        rows.writeStream.foreachBatch(writer.write)
        .option("checkpointLocation", folder)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()
    if joins:
        writer.join(small_bytes)
    return writer.table()


def _dated(rows: "DataFrame") -> "DataFrame":
    """With the day and the hour of each record, in UTC."""
    from pyspark.sql import functions as F

    utc = F.to_utc_timestamp("timestamp", F.current_timezone())
    return rows.withColumn("date", F.to_date(utc)).withColumn("hour", F.hour(utc))


class _Parquet:
    def __init__(self, spark: "SparkSession", out: str, schema: "StructType") -> None:
        from pyarrow import fs

        self._spark = spark
        self._schema = schema
        self._out = out.rstrip("/")
        if "://" in out:
            self._files, self._root = fs.FileSystem.from_uri(self._out)
        else:
            self._files, self._root = fs.LocalFileSystem(), str(Path(self._out).absolute())

    def write(self, rows: "DataFrame", batch: int) -> None:
        number = f"{batch:020d}"
        if self._exists(f"{BATCHES}/{number}"):
            # Spark had not noted it yet when it ended.
            return
        for path in self._listed():
            if PurePosixPath(path).name.startswith(f"{number}-"):
                self._files.delete_file(path)
        aside = f"{ASIDE}/{number}"
        self._remove(aside)
        _dated(rows).write.partitionBy(*PARTITIONED_BY).parquet(f"{self._out}/{aside}")
        for index, path in enumerate(sorted(self._listed(aside))):
            place = PurePosixPath(path).relative_to(f"{self._root}/{aside}").parent
            self._files.create_dir(f"{self._root}/{place}", recursive=True)
            self._files.move(path, f"{self._root}/{place}/{number}-{index:04d}.parquet")
        self._put(f"{BATCHES}/{number}", b"")
        self._remove(aside)

    def recover(self) -> None:
        """Finish what a run that ended in the middle has begun to join."""
        for info in self._infos(JOINS):
            with self._files.open_input_stream(info.path) as file:
                note = json.loads(file.read())
            self._replace(note)
            self._files.delete_file(info.path)

    def join(self, small_bytes: int) -> None:
        import pyarrow.parquet as pq

        folders: dict[str, list[Any]] = {}
        for info in self._infos(""):
            if info.path.endswith(".parquet") and not _is_internal(info.path, self._root) and info.size < small_bytes:
                folders.setdefault(str(PurePosixPath(info.path).parent), []).append(info)
        for folder, small in folders.items():
            if len(small) < SMALL_COUNT:
                continue
            old = sorted(one.path for one in small)
            name = uuid.uuid4().hex
            made = f"{self._root}/{ASIDE}/{name}.parquet"
            self._files.create_dir(f"{self._root}/{ASIDE}", recursive=True)
            writer: Any = None
            try:
                for path in old:
                    with pq.ParquetFile(self._files.open_input_file(path)) as file:
                        if writer is None:
                            writer = pq.ParquetWriter(made, file.schema_arrow, filesystem=self._files)
                        for part in file.iter_batches():
                            writer.write_batch(part)
            finally:
                if writer is not None:
                    writer.close()
            last = PurePosixPath(old[-1]).name.partition("-")[0].removeprefix("joined")
            note = {"made": made, "place": f"{folder}/joined{last}-{name}.parquet", "old": old}
            self._put(f"{JOINS}/{name}.json", json.dumps(note).encode())
            self._replace(note)
            self._files.delete_file(f"{self._root}/{JOINS}/{name}.json")
            _log.info("%d files of %s are one", len(old), folder)

    def table(self) -> "DataFrame":
        # With its schema: Spark would take a topic called 2026 for a number, and no files for a mistake.
        if not any(True for _ in self._listed()):
            return self._spark.createDataFrame([], self._schema)
        return self._spark.read.schema(self._schema).parquet(self._out)

    def _replace(self, note: dict[str, Any]) -> None:
        if self._is_file(note["made"]):
            self._files.move(note["made"], note["place"])
        for path in note["old"]:
            if self._is_file(path):
                self._files.delete_file(path)

    def _put(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        path = f"{self._root}/{name}"
        self._files.create_dir(str(PurePosixPath(path).parent), recursive=True)
        self._files.create_dir(f"{self._root}/{ASIDE}", recursive=True)
        draft = f"{self._root}/{ASIDE}/{uuid.uuid4().hex}"
        with self._files.open_output_stream(draft) as file:
            file.write(data)
        self._files.move(draft, path)

    def _listed(self, folder: str = "") -> Iterator[str]:
        """Files of records below a folder; without one, those that are the archive's."""
        for info in self._infos(folder):
            if info.path.endswith(".parquet") and (folder or not _is_internal(info.path, self._root)):
                yield info.path

    def _infos(self, folder: str) -> list[Any]:
        from pyarrow import fs

        where = f"{self._root}/{folder}".rstrip("/")
        found = self._files.get_file_info(fs.FileSelector(where, allow_not_found=True, recursive=True))
        return [one for one in found if one.type == fs.FileType.File]

    def _exists(self, name: str) -> bool:
        return self._is_file(f"{self._root}/{name}")

    def _is_file(self, path: str) -> bool:
        from pyarrow import fs

        return bool(self._files.get_file_info(path).type == fs.FileType.File)

    def _remove(self, folder: str) -> None:
        from pyarrow import fs

        path = f"{self._root}/{folder}"
        if self._files.get_file_info(path).type == fs.FileType.Directory:
            self._files.delete_dir(path)


def _is_internal(path: str, root: str) -> bool:
    return any(one.startswith("_") for one in PurePosixPath(path).relative_to(root).parts)


# -- Delta ----------------------------------------------------------------------------------------------------------


class NoDelta(Exception):
    """The package deltalake is not installed."""


def deltalake() -> Any:
    try:
        return importlib.import_module("deltalake")
    except ImportError:
        raise NoDelta("format=delta needs the package deltalake: pip install deltalake") from None


class _Delta:
    """The same three things for a Delta table. A batch is held in memory once: offsets_per_batch bounds it."""

    _APP = "headrace-archive"

    def __init__(self, spark: "SparkSession", out: str, schema: "StructType") -> None:
        self._spark = spark
        self._schema = schema
        self._out = out.rstrip("/")

    def recover(self) -> None:
        """Delta's own log does."""

    def write(self, rows: "DataFrame", batch: int) -> None:
        lake = deltalake()
        if lake.DeltaTable.is_deltatable(self._out):
            done = lake.DeltaTable(self._out).transaction_version(self._APP)
            if done is not None and done >= batch:
                return
        properties = lake.CommitProperties(app_transactions=[lake.Transaction(app_id=self._APP, version=batch)])
        lake.write_deltalake(
            self._out,
            _dated(rows).toArrow(),
            mode="append",
            partition_by=list(PARTITIONED_BY),
            commit_properties=properties,
        )

    def join(self, small_bytes: int) -> None:
        lake = deltalake()
        if lake.DeltaTable.is_deltatable(self._out):
            lake.DeltaTable(self._out).optimize.compact(target_size=small_bytes)

    def table(self) -> "DataFrame":
        lake = deltalake()
        if not lake.DeltaTable.is_deltatable(self._out):
            return self._spark.createDataFrame([], self._schema)
        return self._spark.createDataFrame(lake.DeltaTable(self._out).to_pyarrow_table())
