"""What a Python process of Spark's daemon passes over after each task, and that no other process does."""

import gc
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from headrace.spark.worker import keep_modules

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    keep_modules.cache_clear()
    yield
    keep_modules.cache_clear()
    gc.unfreeze()


def run_as(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(module, None))


def test_process_of_the_daemon_keeps_its_modules_and_collects_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, "pyspark.daemon")
    keep_modules()
    assert gc.get_freeze_count() > 1000
    circle: list[object] = []
    circle.append(circle)
    del circle
    assert gc.collect() >= 1


def test_what_came_after_the_first_task_is_not_kept_by_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, "pyspark.daemon")
    keep_modules()
    kept = gc.get_freeze_count()
    later = [[number] for number in range(1000)]
    keep_modules()
    assert gc.get_freeze_count() < kept + len(later)


def test_any_other_process_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    run_as(monkeypatch, "pytest")
    keep_modules()
    keep_modules.cache_clear()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    keep_modules()
    assert gc.get_freeze_count() == before


def test_workers_of_spark_run_in_its_daemon(spark: "SparkSession") -> None:
    def counts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            keep_modules()
            yield pa.RecordBatch.from_pydict({"kept": [gc.get_freeze_count()]})

    (row,) = spark.range(0, 1, 1, 1).mapInArrow(counts, "kept long").collect()
    assert row.kept > 1000
