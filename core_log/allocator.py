"""What was freed goes back to the operating system. Driver: the C library.

Whoever moves millions of records through memory leaves an allocator full of holes, which it keeps for itself: 100 MB
and more of 300 after two million (bench/delay.py). glibc can be told to let go; others are left alone.
"""

import ctypes
import ctypes.util
from collections.abc import Callable
from functools import cache


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    name = ctypes.util.find_library("c")
    return getattr(ctypes.CDLL(name), "malloc_trim", None) if name is not None else None


def trim() -> bool:
    """Give back what is free; True if there was something. Takes milliseconds and does not hold the interpreter."""
    call = _malloc_trim()
    return call is not None and bool(call(0))
