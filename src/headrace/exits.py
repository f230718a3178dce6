"""What ends the process, in one line, and with which status. Values: no I/O.

The statuses are those of sysexits.h where it has one; docs/configuration.md has the same table.
"""

import os

from headrace.core_log.errors import CorruptLog, DirectoryInUse, DiskFull, HeadraceError, StorageError, UnknownFormat
from headrace.settings import ConfigError


class DoorNotOpened(HeadraceError):
    """A door could not listen where it was told to."""


class BrokerAway(HeadraceError):
    """A command asked a broker, and none answers there, or what answers is none."""


class Answered(HeadraceError):
    """A broker did not do what a command asked it for. `status` is HTTP's, `code` that of the problem document."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class NotAllowed(Answered):
    """The login failed, or the user lacks a right."""


class TryLater(Answered):
    """The broker cannot do it now: an alarm, a full disk, a stop."""


# The first that fits gives the status. What fits none is our own mistake, and is shown whole.
EXIT_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (ConfigError, os.EX_CONFIG),
    (DoorNotOpened, os.EX_UNAVAILABLE),
    (BrokerAway, os.EX_UNAVAILABLE),
    (NotAllowed, os.EX_NOPERM),
    (TryLater, os.EX_TEMPFAIL),
    (DirectoryInUse, os.EX_TEMPFAIL),
    (CorruptLog, os.EX_DATAERR),
    (UnknownFormat, os.EX_PROTOCOL),
    (DiskFull, os.EX_CANTCREAT),
    (StorageError, os.EX_IOERR),
    (HeadraceError, 1),
)
EXPECTED = tuple(family for family, _ in EXIT_STATUSES)


def exit_status(error: BaseException) -> int:
    return next((status for family, status in EXIT_STATUSES if isinstance(error, family)), os.EX_SOFTWARE)


def causes(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The single errors that a group holds, however deep nurseries have nested it."""
    nested = (causes(e) if isinstance(e, BaseExceptionGroup) else [e] for e in group.exceptions)
    return [cause for inner in nested for cause in inner]


def report(error: BaseException) -> list[str]:
    """The error in as many lines as it has problems, each with what was noted on its way up."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return [f"{line}{notes}" for line in str(error).splitlines()]
