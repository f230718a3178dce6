"""A claim about speed: a figure, the target it must reach, and the verdict. Values: no I/O.

A claim file is `bench/<claim>.py` with a function `claim() -> list[Claim]` that measures once; run.py finds it, calls
it in a process of its own as often as asked, and takes the median of the figures of each name.
"""

import enum
from dataclasses import dataclass


class NotRun(Exception):
    """This claim cannot be measured on this machine; the text says what is missing."""


class Better(enum.Enum):
    """Which side of its target a figure should be on; on the target is always good enough."""

    MORE = "at least"
    LESS = "at most"


class Verdict(enum.Enum):
    MET = "met"
    MISSED = "missed"
    NOT_RUN = "not run"
    NO_TARGET = "no target"
    FAILED = "failed"  # its program broke, so there is nothing to judge


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the result. A figure is a ratio of two things measured in one run, unless the unit says otherwise."""

    name: str
    figure: float | None  # None: not run, and the detail says why
    target: float | None  # None: shown beside the others, promised by nobody
    better: Better = Better.MORE
    unit: str = "x"
    detail: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.figure is None:
            return Verdict.NOT_RUN
        if self.target is None:
            return Verdict.NO_TARGET
        reached = self.figure >= self.target if self.better is Better.MORE else self.figure <= self.target
        return Verdict.MET if reached else Verdict.MISSED
