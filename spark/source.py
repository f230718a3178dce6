"""The format `headrace` of Spark: its schema, its batch reader, and who streams and writes. Driver of pyspark.

    spark.read.format("headrace").option("url", "http://127.0.0.1:15672").option("subscribe", "orders").load()

Spark makes one of these for each query, on the driver, and readers in several processes: so making them asks nobody,
and what they know is in the options. Readers travel to executors with that, and hold names of tokens, never tokens.
Neighbours: options.py reads the options, source_edges.py finds the offsets, plan.py the tasks; stream.py streams,
sink.py writes; pyspark_headrace lets Spark find it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition

from headrace.spark import schema as columns
from headrace.spark.access import Access, open_access
from headrace.spark.options import InvalidOption, Position, SourceOptions, Where, check_names, source_options
from headrace.spark.options import columns as columns_option
from headrace.spark.plan import Task, plan
from headrace.spark.source_edges import batch_ranges
from headrace.spark.source_filters import Bounds, bounds
from headrace.spark.worker import keep_modules

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from headrace.spark.sink import BatchWriter, StreamWriter
    from headrace.spark.stream import StreamReader
    from headrace.spark.table_reader import TableReader


class HeadraceSource(DataSource):  # type: ignore[misc]
    """What `.format("headrace")` names."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> "StructType":
        if "view" in self.options:
            from headrace.spark.table_reader import spark_schema

            return spark_schema(self.options)
        # Whether it will be read as a batch or as a stream is not known here: each of them looks at the rest.
        check_names(self.options)
        keep_modules()
        wants_headers = self.options.get("includeHeaders", "false").strip().lower() == "true"
        return columns.spark_schema(columns.chosen(columns_option(self.options), include_headers=wants_headers))

    def reader(self, schema: "StructType") -> "BatchReader | TableReader":
        if "view" in self.options:
            from headrace.spark.table_reader import TableReader, spark_schema, view_options

            if schema != spark_schema(self.options):
                raise InvalidOption("a view has columns of its own: leave the schema out, and select")
            return TableReader(view_options(self.options))
        options = source_options(self.options, streaming=False)
        return BatchReader(options, columns.columns_of(schema, options))

    def streamReader(self, schema: "StructType") -> "StreamReader":
        from headrace.spark.stream import StreamReader

        if "view" in self.options:
            raise InvalidOption("a 'view' is read as a batch: it is what the broker says now")
        options = source_options(self.options, streaming=True)
        return StreamReader(options, columns.columns_of(schema, options))

    def writer(self, schema: "StructType", overwrite: bool) -> "BatchWriter":
        from headrace.spark.sink import BatchWriter, checked
        from headrace.spark.sink_messages import sink_options

        return BatchWriter(checked(schema, sink_options(self.options, streaming=False), overwrite))

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "StreamWriter":
        from headrace.spark.sink import StreamWriter, checked
        from headrace.spark.sink_messages import sink_options

        return StreamWriter(checked(schema, sink_options(self.options, streaming=True), overwrite))


class TaskPartition(InputPartition):  # type: ignore[misc]
    """A task on its way to an executor."""

    def __init__(self, task: Task) -> None:
        self.task = task


class BatchReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._bounds = Bounds(tags=options.tags)
        if options.push_filters:
            self.pushFilters = _Pushed(self)

    def push(self, filters: Iterable[Filter]) -> None:
        self._bounds = bounds(filters, self._options.tags)

    def partitions(self) -> list[InputPartition]:
        options = self._options
        access = opened(options.where)
        keep_modules()
        ranges, ids = batch_ranges(access, options)
        wanted = self._bounds.within(ranges)
        if self._bounds.since_us is not None:
            wanted = _since(access, wanted, self._bounds.since_us)
        return [TaskPartition(task) for task in tasks_of(access, wanted, ids, options)]

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        # Where there are no tasks, Spark makes a partition of its own.
        if not isinstance(partition, TaskPartition):
            return iter(())
        # Where it is planned nobody decodes.
        from headrace.spark import decode

        keep_modules("pyarrow.compute")
        return decode.read(
            partition.task,
            columns=self._columns,
            tags=self._bounds.tags,
            check_contiguous=self._options.fail_on_data_loss,
            since_us=self._bounds.since_us,
            until_us=self._bounds.until_us,
        )


class _Pushed:
    """`pushFilters` of a reader, for Spark to call while its switch for that is on.

    Only where the option asks for it: Spark (4.3) keeps what was planned for a filter with the DataFrame that was
    loaded, and takes it for every other use of that DataFrame too, in the same query or later, which then lacks rows
    without a word. With the switch off (its default) Spark refuses a reader whose class overrides the
    method, and no reader is told how the switch stands. So the class does not, and its objects do: Spark looks for the
    function behind the method, and finds its own. All filters are handed back: it looks at each row again.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        self._reader.push(filters)
        return filters


def opened(where: Where) -> Access:
    return open_access(
        path=where.path, url=where.url, archive=where.archive, access=where.access, token_name=where.token_name
    )


def tasks_of(
    access: Access, ranges: Mapping[Position, tuple[int, int]], ids: Mapping[str, UUID], options: SourceOptions
) -> list[Task]:
    """As plan.py cuts them; and where it finds too few places for `minPartitions`, at offsets instead."""
    most, least = options.max_records, options.min_partitions
    tasks = plan(access, ranges, ids=ids, min_partitions=least, max_records=most)
    if least is None or len(tasks) >= least:
        return tasks
    each = max(sum(end - start for start, end in ranges.values()) // least, 1)
    return plan(access, ranges, ids=ids, max_records=each if most is None else min(each, most))


def _since(access: Access, ranges: dict[Any, tuple[int, int]], since_us: int) -> dict[Any, tuple[int, int]]:
    """Without what lies before the first record of this time."""
    found = {}
    for (topic, partition), (start, end) in ranges.items():
        first = access.offset_at(topic, partition, since_us)
        if first is not None and first < end:
            found[topic, partition] = (max(start, first), end)
    return found
