"""Views of the broker (tables.py) as DataFrames. Driver: the batch reader that Spark is given.

    spark.read.format("headrace").option("url", url).option("view", "queue:orders").load()

One task reads all of a view, page by page: what it shows is small beside the log. Neighbours: source.py decides.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from headrace.spark.access_http import Door
from headrace.spark.options import InvalidOption, check_names, where
from headrace.spark.tables import View, arrow_schema, parse_view, read_view

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

OPTIONS = ("view", "url", "tokenName")


@dataclass(frozen=True, slots=True)
class ViewOptions:
    view: View
    url: str
    token_name: str | None


def view_options(options: Mapping[str, str]) -> ViewOptions:
    """Raises InvalidOption."""
    check_names(options, OPTIONS)
    if "url" not in options:
        raise InvalidOption("a view is read from a broker: give its HTTP door as 'url'")
    found = where(options)
    assert found.url is not None
    try:
        return ViewOptions(parse_view(options["view"]), found.url, found.token_name)
    except ValueError as error:
        raise InvalidOption(f"'view': {error}") from None


def spark_schema(options: Mapping[str, str]) -> "StructType":
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(arrow_schema(view_options(options).view))


class TableReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: ViewOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        return read_view(Door(self._options.url, self._options.token_name), self._options.view)
