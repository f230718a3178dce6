"""What the tests of Spark share: one small session for all of a process, since most of the time is its start."""

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Time that is spent on plans of a few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.adaptive.enabled": "false",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    folder = tmp_path_factory.mktemp("spark")
    # Workers have the environment that the JVM was started with; what is told later they find in files.
    (folder / "tokens").mkdir()
    (folder / "tokens" / "test").write_text("guest:guest")
    os.environ["HEADRACE_TOKENS"] = str(folder / "tokens")
    places = {"spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder / "local")}
    logging.getLogger("py4j").setLevel(logging.WARNING)
    made = session("headrace-tests", master="local[2]", settings=SETTINGS | places)
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()
