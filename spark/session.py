"""A Spark session on this machine's Java and this very Python. Driver: the environment, processes.

    from headrace.spark.session import session
    spark = session()
    spark.read.format("headrace").option("url", "http://127.0.0.1:15672").option("subscribe", "orders").load()

Nobody needs it: any session of Spark finds the source. It spares people the two mistakes that cost the first hour, a
Java that is not there and workers on another Python, and turns on what Spark has off: filters that reach the source.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from headrace.spark.java import Java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Off by default in Spark; a reader that is given filters skips what they leave out.
FILTER_SWITCH = "spark.sql.python.filterPushdown.enabled"


def prepare(environ: MutableMapping[str, str] = os.environ) -> Java:
    """JAVA_HOME and PYSPARK_PYTHON, before Spark starts. What is set and works stays. Raises NoJava."""
    java = find_java(environ)
    environ["JAVA_HOME"] = str(java.home)
    # Else workers are `python3` from PATH, which is another one than that of a virtual environment.
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return java


def session(
    name: str = "headrace", *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> "SparkSession":
    """The session of this process, started if there is none. `settings` are Spark's own, over those set here."""
    prepare()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in {FILTER_SWITCH: "true", **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
