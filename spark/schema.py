"""The columns that Spark sees, and their records as Arrow in exactly that shape. Driver: reads through decode.py.

Without a choice they are Kafka's, and its headers when asked for; `columns` and a schema of the user choose among all.
One more than the decoder has: `tag`, the first of a record's tags, a plain string that can be grouped and filtered by.
All may be null, for Spark refuses Arrow that declares less than its own schema. Neighbours: decode.py has the rest.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.spark import decode
from headrace.spark.options import InvalidOption, SourceOptions
from headrace.spark.plan import Task

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

TAG = "tag"


def names() -> tuple[str, ...]:
    return (*decode.FIELDS, TAG)


def chosen(columns: Sequence[str] | None, *, include_headers: bool) -> tuple[str, ...]:
    """Raises InvalidOption for one that there is not, or twice."""
    if columns is None:
        return (*decode.KAFKA_COLUMNS, "headers") if include_headers else decode.KAFKA_COLUMNS
    unknown = [name for name in columns if name not in names()]
    if unknown:
        raise InvalidOption(f"'columns': there is no {', '.join(unknown)}; there are {', '.join(names())}")
    if len(set(columns)) != len(columns):
        raise InvalidOption(f"'columns' has one twice: {', '.join(columns)}")
    return tuple(columns)


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, pa.string() if name == TAG else decode.FIELDS[name]) for name in columns])


def spark_schema(columns: Sequence[str]) -> "StructType":
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(arrow_schema(columns))


def columns_of(schema: "StructType", options: SourceOptions) -> tuple[str, ...]:
    """Those of the schema that Spark hands over: ours, or one that the user gave. Raises InvalidOption."""
    columns = chosen(schema.fieldNames(), include_headers=False)
    if options.columns is not None and columns != options.columns:
        raise InvalidOption("'columns' and a schema were given, and they differ: leave one of the two out")
    ours = spark_schema(columns)
    wrong = [
        f"{name} is {mine.dataType.simpleString()}, not {theirs.dataType.simpleString()}"
        for name, mine, theirs in zip(columns, ours, schema, strict=True)
        if mine.dataType != theirs.dataType or not theirs.nullable
    ]
    if wrong:
        raise InvalidOption(f"the schema does not fit: {'; '.join(wrong)}; all may be null")
    return columns


def read(
    task: Task,
    *,
    columns: Sequence[str],
    tags: str | None = None,
    check_contiguous: bool = True,
    since_us: int | None = None,
    until_us: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """As the decoder reads, in these columns."""
    stored = tuple(dict.fromkeys("tags" if name == TAG else name for name in columns))
    batches = decode.read(
        task,
        columns=stored,
        tags=tags,
        check_contiguous=check_contiguous,
        since_us=since_us,
        until_us=until_us,
    )
    if TAG not in columns:
        return batches
    return (_with_tag(batch, columns) for batch in batches)


def _with_tag(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    arrays = [_first(batch.column("tags")) if name == TAG else batch.column(name) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _first(lists: pa.ListArray) -> pa.Array:
    ends = lists.offsets.to_numpy()
    empty = ends[1:] == ends[:-1]
    return lists.values.take(pa.array(ends[:-1], mask=empty))
