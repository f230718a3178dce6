"""A stream whose first offsets are kept beside its checkpoint. Driver of pyspark: files, the JVM's file systems.

    orders = stream_topic(spark, "orders", url="http://127.0.0.1:15672", checkpoint="/checkpoints/orders")
    orders.writeStream.option("checkpointLocation", "/checkpoints/orders")...

Spark does not tell a source where the checkpoint is, and does not keep where a query began (stream.py tells what comes
of that). So it is found out here, once: the first call writes it into a file of the checkpoint, every later one reads
it, and the query gets offsets instead of `latest`. The file is made if it is not there and never changed; a checkpoint
that is deleted takes it along. On a local disk it is a file; any other place is reached as Spark reaches it.
Neighbours: source_edges.py finds the offsets; a `cursor` keeps them in the broker instead.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from headrace.spark.options import InvalidOption, source_options
from headrace.spark.source import opened
from headrace.spark.source_edges import initial_offsets
from headrace.spark.stream_offsets import InvalidOffsets, Offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "headrace"


def stream_topic(
    spark: "SparkSession",
    topics: str | Sequence[str] | None = None,
    *,
    checkpoint: str | os.PathLike[str],
    url: str | None = None,
    path: str | None = None,
    options: dict[str, str] | None = None,
) -> "DataFrame":
    """The stream of these topics, which starts where it started the first time it was asked for with this checkpoint.

    `options` are the source's other ones; `subscribePattern` and `assign` among them may stand for `topics`, and
    `startingOffsets` and its kin say where a new query starts (`latest` unless given).
    """
    from pyspark.sql.datasource import CaseInsensitiveDict

    given = CaseInsensitiveDict(options or {})
    for name, value in (("subscribe", _joined(topics)), ("url", url), ("path", path)):
        if value is not None:
            if name in given:
                raise InvalidOption(f"{name!r} is given twice")
            given[name] = value
    if "cursor" in given:
        raise InvalidOption(
            "'cursor' keeps the start in the broker, stream_topic beside the checkpoint: take one of them"
        )
    asked = source_options(given, streaming=True)
    file = f"{os.fspath(checkpoint).rstrip('/')}/{FOLDER}/start-{_mark(asked.subscription)}.json"
    found = _kept(spark, file, lambda: initial_offsets(opened(asked.where), asked))
    for name in (
        "startingOffsets",
        "startingOffsetsByTimestamp",
        "startingTimestamp",
        "startingOffsetsByTimestampStrategy",
    ):
        given.pop(name, None)
    return (
        spark.readStream.format("headrace")
        .options(**given)
        .option("startingOffsets", json.dumps(found.to_json()))
        .load()
    )


def _joined(topics: str | Sequence[str] | None) -> str | None:
    return topics if topics is None or isinstance(topics, str) else ",".join(topics)


def _mark(subscription: object) -> str:
    """Two streams of one query have one checkpoint, and each its own start."""
    return hashlib.sha256(repr(subscription).encode()).hexdigest()[:16]


def _kept(spark: "SparkSession", file: str, begin: Any) -> Offsets:
    place = _local(file)
    store = _Hadoop(spark, file) if place is None else _Local(place)
    text = store.read()
    if text is None:
        store.create(json.dumps(begin().to_json()))
        # Whoever was first has decided it.
        text = store.read()
        if text is None:
            raise OSError(f"{file} was written, and cannot be read")
    try:
        return Offsets.from_json(json.loads(text))
    except (ValueError, InvalidOffsets) as error:
        raise InvalidOffsets(f"{file} does not hold where the query began: {error}") from None


def _local(file: str) -> Path | None:
    parts = urlsplit(file)
    if not parts.scheme:
        return Path(file)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


class _Local:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str | None:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None

    def create(self, text: str) -> None:
        """Whole or not at all, and never over one that is there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}")
        with draft.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, self._path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _Hadoop:
    """A file where only the JVM gets: HDFS, S3 and whatever else Spark has been given a file system for."""

    def __init__(self, spark: "SparkSession", file: str) -> None:
        jvm = getattr(spark, "_jvm", None)
        if jvm is None:
            raise InvalidOption(
                f"{file} is reached through the JVM, which a Spark Connect session has not: use a 'cursor'"
            )
        self._jvm = jvm
        self._file = jvm.org.apache.hadoop.fs.Path(file)
        self._files = self._file.getFileSystem(spark._jsc.hadoopConfiguration())

    def read(self) -> str | None:
        if not self._files.exists(self._file):
            return None
        stream = self._files.open(self._file)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
        finally:
            stream.close()

    def create(self, text: str) -> None:
        draft = self._jvm.org.apache.hadoop.fs.Path(
            self._file.getParent(), f".{self._file.getName()}.{uuid.uuid4().hex}"
        )
        stream = self._files.create(draft, False)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        if not self._files.exists(self._file):
            self._files.rename(draft, self._file)
        if self._files.exists(draft):
            self._files.delete(draft, False)
