"""A Python process of Spark's between one task and the next. Driver: the garbage collector.

Spark keeps its Python processes for further tasks and plans, and after each of them its daemon has the collector go
through all that a process holds (pyspark/daemon.py). Nearly all of that are modules, which stay as long as it lives.
"""

import gc
import importlib
import sys
from functools import cache

_DAEMON = "pyspark.daemon"


@cache
def keep_modules(*needed: str) -> None:
    """Once in a process of Spark's daemon: the collector passes over what is there now. In any other it does nothing.

    `needed` are modules that it will load later on, for some of its tasks: so they are loaded now.
    That takes 25 ms of CPU away from each task, where one that finds nothing in 64 MiB needs 4 for itself: reading 1 %
    by tag costs a third less (bench/spark.py).
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == _DAEMON:
        for name in needed:
            importlib.import_module(name)
        gc.freeze()
