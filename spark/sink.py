"""DataFrames into the broker: the writers that Spark is given. Driver: HTTP, by access_http.py.

At least once by default, as Spark's Kafka sink: each task publishes its rows, and publishes them again when it is tried
again. With `idempotent` a task only stages them, under (query, batch, partition, attempt); the driver commits exactly
the stages of those attempts that counted, and the broker does nothing when that batch was committed before
(gateways/delivery/staging.py). So each row arrives once, over failed tasks, a driver and a broker that die anywhere: a
batch that is run again may deal its rows out otherwise, but it counts as a whole.

Writers and what tasks return are pickled; both hold the name of a token at most. Neighbours: sink_messages.py makes
messages of rows, source.py is where Spark asks for a writer.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from headrace.core_log.errors import HeadraceError
from headrace.spark.access_http import Door
from headrace.spark.sink_messages import Parcel, SinkOptions, check_columns, parcels

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_log = logging.getLogger(__name__)

# Where Spark tells a task which query and batch it works for.
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):  # type: ignore[misc]
    """What a task has sent."""

    count: int
    # Of an idempotent write: who commits, and what.
    query: str = ""
    batch: int = 0
    stages: tuple[str, ...] = ()


class _Writer:
    """What both kinds of writers do."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def _door(self) -> Door:
        return Door(self.options.url, self.options.token_name)

    def _send(self, rows: "Iterator[pa.RecordBatch]", query: str | None, batch: int) -> Sent:
        door = self._door()
        if query is None:
            count = 0
            for parcel in parcels(rows, self.options.topic):
                path = f"{_path(parcel)}/messages?acks={self.options.acks}"
                door.json("POST", path, body=parcel.messages)
                count += len(parcel.messages)
            return Sent(count)
        context = _context()
        labels = {
            "query": query,
            "batch": batch,
            "partition": context.partitionId(),
            "attempt": context.attemptNumber(),
        }
        stages: list[str] = []
        count = 0
        for parcel in parcels(rows, self.options.topic):
            staged = door.json("POST", f"{_path(parcel)}/stages", body={**labels, "messages": parcel.messages})
            stages.append(staged["id"])
            count += len(parcel.messages)
        return Sent(count, query, batch, tuple(stages))

    def _commit(self, messages: Sequence[Any], batch: int) -> None:
        sent = [one for one in messages if one is not None]
        if not self.options.idempotent or not sent:
            return
        stages = [stage for one in sent for stage in one.stages]
        body = {"query": sent[0].query, "batch": batch, "stages": stages}
        done = self._door().json("POST", "/api/v1/stages/commit", body=body)
        if done["repeated"]:
            _log.warning("batch %d of %s was committed before: nothing was published again", batch, sent[0].query)

    def _abort(self, messages: Sequence[Any]) -> None:
        stages = [stage for one in messages if one is not None for stage in one.stages]
        if stages:
            try:
                self._door().json("POST", "/api/v1/stages/abort", body={"stages": stages})
            except (HeadraceError, ValueError) as error:
                _log.warning("%d stages were not aborted, and go when they expire: %s", len(stages), error)


class BatchWriter(_Writer, DataSourceArrowWriter):  # type: ignore[misc]
    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Sent:
        return self._send(iterator, f"job:{self.options.job_id}" if self.options.idempotent else None, 0)

    def commit(self, messages: Sequence[Any]) -> None:
        self._commit(messages, 0)

    def abort(self, messages: Sequence[Any]) -> None:
        self._abort(messages)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):  # type: ignore[misc]
    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Sent:
        if not self.options.idempotent:
            return self._send(iterator, None, 0)
        context = _context()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise RuntimeError("Spark does not say which query and batch this is: 'idempotent' needs to know")
        return self._send(iterator, query, int(batch))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        self._commit(messages, batchId)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        self._abort(messages)


def checked(schema: "StructType", options: SinkOptions, overwrite: bool) -> SinkOptions:
    """Raises ValueError for rows that cannot be written so."""
    if overwrite:
        raise ValueError("a log is appended to: the mode is append")
    check_columns({field.name: field.dataType.simpleString() for field in schema}, options)
    return options


def _path(parcel: Parcel) -> str:
    return f"/api/v1/topics/{quote(parcel.topic, safe='')}"


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "rows are written by tasks"
    return context
