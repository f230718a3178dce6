"""Lets Spark find the format `headrace` without a register call: it looks for DefaultSource in modules pyspark_*."""

from headrace.spark.source import HeadraceSource as DefaultSource

__all__ = ["DefaultSource"]
