"""The columns that Spark sees. Driver of pyspark's types.

Without a choice they are Kafka's, and its headers when asked for; `columns` and a schema of the user choose among all.
All may be null, for Spark refuses Arrow that declares less than its own schema. Neighbours: fields.py has them all.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.spark.fields import FIELDS, KAFKA_COLUMNS
from headrace.spark.fields import schema as arrow_schema
from headrace.spark.options import InvalidOption, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def chosen(columns: Sequence[str] | None, *, include_headers: bool) -> tuple[str, ...]:
    """Raises InvalidOption for one that there is not, or twice."""
    if columns is None:
        return (*KAFKA_COLUMNS, "headers") if include_headers else KAFKA_COLUMNS
    unknown = [name for name in columns if name not in FIELDS]
    if unknown:
        raise InvalidOption(f"'columns': there is no {', '.join(unknown)}; there are {', '.join(FIELDS)}")
    if len(set(columns)) != len(columns):
        raise InvalidOption(f"'columns' has one twice: {', '.join(columns)}")
    return tuple(columns)


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
