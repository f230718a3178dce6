"""A Spark session on this machine's Java and this very Python. Driver: the environment, processes.

    from headrace.spark.session import session
    spark = session()
    spark.read.format("headrace").option("url", "http://127.0.0.1:15672").option("subscribe", "orders").load()

Nobody needs it: any session of Spark finds the source. It spares people the two mistakes that cost the first hour, a
Java that is not there and workers on another Python, and turns on what Spark has off: filters that reach the source,
and less work for each row that comes from Python (docs/spark.md: 100 B values cost a fifth less with the two of them).
"""

import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from headrace.spark.java import Java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Off by default in Spark; a reader that is given filters skips what they leave out.
FILTER_SWITCH = "spark.sql.python.filterPushdown.enabled"
# Between the JVM and its Python processes: Unix sockets in place of TCP.
SOCKET_SWITCH = "spark.python.unix.domain.socket.enabled"
SETTINGS = {FILTER_SWITCH: "true"} | ({SOCKET_SWITCH: "true"} if hasattr(socket, "AF_UNIX") else {})
# Arrow's Java looks at the bounds of each value, and whether it is null (which Spark has just asked), before it hands
# it over. Iceberg's readers for Spark turn both off too.
ENVIRONMENT = {"ARROW_ENABLE_UNSAFE_MEMORY_ACCESS": "true", "ARROW_ENABLE_NULL_CHECK_FOR_GET": "false"}


def prepare(environ: MutableMapping[str, str] = os.environ) -> Java:
    """JAVA_HOME, PYSPARK_PYTHON and Arrow's checks, before Spark starts. What is set and works stays. Raises NoJava."""
    java = find_java(environ)
    environ["JAVA_HOME"] = str(java.home)
    # Else workers are `python3` from PATH, which is another one than that of a virtual environment.
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in ENVIRONMENT.items():
        environ.setdefault(name, value)
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
    # The executors of a cluster have an environment of their own.
    of_executors = {f"spark.executorEnv.{name}": os.environ[name] for name in ENVIRONMENT}
    for key, value in {**SETTINGS, **of_executors, **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
