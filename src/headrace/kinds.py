"""The kinds of values a setting can have, and how each is read from TOML or from text. Values: no I/O.

A kind's `read` takes what came (a TOML value, or text from a flag or the environment) and returns the setting's
value, or raises ValueError. `expected` says in words what would have been right, range included, so that one
sentence serves every error. Neighbours: settings.py declares settings with these.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000

_SIZE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
}
_DURATION_UNITS_MS = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s?([A-Za-z]*)")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s?(%?)", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,?#@A-Z]+")
_UNLIMITED = "unlimited"
_NONE = "none"


class Kind(Protocol):
    @property
    def expected(self) -> str: ...

    def read(self, raw: object) -> object: ...

    def show(self, value: Any) -> str:
        """A value as a person would write it: `read` of it gives the value back."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a door listens. Port 0 asks for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Text:
    expected: str = "text"
    # The empty text means something too.
    blank: bool = False

    def read(self, raw: object) -> str:
        if not isinstance(raw, str) or not (raw or self.blank):
            raise ValueError
        return raw

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class FilePath:
    """With `maybe`, also `none`."""

    maybe: bool = False

    @property
    def expected(self) -> str:
        return f'a path, or "{_NONE}"' if self.maybe else "a path"

    def read(self, raw: object) -> Path | None:
        if not isinstance(raw, str) or not raw or "\0" in raw:
            raise ValueError
        return None if self.maybe and raw == _NONE else Path(raw)

    def show(self, value: Any) -> str:
        return _NONE if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    names: tuple[str, ...]

    @property
    def expected(self) -> str:
        return " or ".join((", ".join(self.names[:-1]), self.names[-1]))

    def read(self, raw: object) -> str:
        if not isinstance(raw, str) or raw not in self.names:
            raise ValueError
        return raw

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Count:
    at_least: int
    at_most: int
    unlimited: bool = False

    @property
    def expected(self) -> str:
        unlimited = f', or "{_UNLIMITED}"' if self.unlimited else ""
        return f"a whole number from {self.at_least} to {self.at_most}{unlimited}"

    def read(self, raw: object) -> int | None:
        if self.unlimited and raw == _UNLIMITED:
            return None
        if isinstance(raw, str) and re.fullmatch(r"[0-9]{1,20}", raw):
            raw = int(raw)
        # bool is an int to Python; to whoever wrote `handles_max = true` it is a slip.
        if not isinstance(raw, int) or isinstance(raw, bool) or not self.at_least <= raw <= self.at_most:
            raise ValueError
        return raw

    def show(self, value: Any) -> str:
        return _UNLIMITED if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """Yes or no; in the environment the words of TOML."""

    expected: str = "true or false"

    def read(self, raw: object) -> bool:
        if isinstance(raw, str) and raw in ("true", "false"):
            return raw == "true"
        if not isinstance(raw, bool):
            raise ValueError
        return raw

    def show(self, value: Any) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole: 0.6, or 60%."""

    at_least: float
    at_most: float

    @property
    def expected(self) -> str:
        return f"a share such as 0.6 or 60%, from {self.show(self.at_least)} to {self.show(self.at_most)}"

    def read(self, raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError
        found = _SHARE.fullmatch(str(raw).strip())
        if found is None:
            raise ValueError
        share = float(Decimal(found[1]) / (100 if found[2] else 1))
        if not self.at_least <= share <= self.at_most:
            raise ValueError
        return share

    def show(self, value: Any) -> str:
        return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: a plain number, or a number with a unit."""

    at_least: int
    at_most: int | None = None
    unlimited: bool = False

    @property
    def expected(self) -> str:
        return f"a size such as 64MiB, {_range(self, size_text)}"

    def read(self, raw: object) -> int | None:
        return _whole(self, raw, _SIZE_UNITS)

    def show(self, value: Any) -> str:
        return _UNLIMITED if value is None else size_text(value)


@dataclass(frozen=True, slots=True)
class Milliseconds:
    """A duration whose value is in milliseconds; a plain number is taken as such."""

    at_least: int
    at_most: int | None = None
    unlimited: bool = False

    @property
    def expected(self) -> str:
        return f"a duration such as 100ms, {_range(self, duration_text)}"

    def read(self, raw: object) -> int | None:
        return _whole(self, raw, _DURATION_UNITS_MS)

    def show(self, value: Any) -> str:
        return _UNLIMITED if value is None else duration_text(value)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration whose value is in whole seconds; a plain number is taken as such."""

    at_least: int
    at_most: int

    @property
    def expected(self) -> str:
        least, most = (duration_text(seconds * SECOND_MS) for seconds in (self.at_least, self.at_most))
        return f"a duration in whole seconds such as 30s, at least {least} and at most {most}"

    def read(self, raw: object) -> int:
        seconds = _quantity(raw, _DURATION_UNITS_MS, plain=SECOND_MS) / SECOND_MS
        if seconds != int(seconds) or not self.at_least <= seconds <= self.at_most:
            raise ValueError
        return int(seconds)

    def show(self, value: Any) -> str:
        return duration_text(value * SECOND_MS)


@dataclass(frozen=True, slots=True)
class Origins:
    """Where web pages come from, as browsers say it."""

    expected: str = 'origins such as https://app.example:8443 with commas between them, "any", or "none"'

    def read(self, raw: object) -> tuple[str, ...]:
        if not isinstance(raw, str):
            raise ValueError
        origins = () if raw in ("", _NONE) else tuple(part.strip() for part in raw.split(","))
        if not all(origin in ("any", "null") or _ORIGIN.fullmatch(origin) for origin in origins):
            raise ValueError
        return origins

    def show(self, value: Any) -> str:
        return ", ".join(value) or _NONE


@dataclass(frozen=True, slots=True)
class Listen:
    """The address of a door, or `off`."""

    expected: str = 'an address such as "127.0.0.1:5672" or "[::1]:5672" with a port from 0 to 65535, or "off"'

    def read(self, raw: object) -> Address | None:
        if not isinstance(raw, str):
            raise ValueError
        if raw == "off":
            return None
        host, colon, port = raw.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError  # an IPv6 address without its brackets: where it ends and the port begins is a guess
        if not colon or not host or not host.isprintable() or not re.fullmatch(r"[0-9]{1,5}", port):
            raise ValueError
        if int(port) > 65535:
            raise ValueError
        return Address(host, int(port))

    def show(self, value: Any) -> str:
        return "off" if value is None else str(value)


def size_text(count: int) -> str:
    """The shortest exact way to write a number of bytes."""
    for unit, bytes_each in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % bytes_each == 0:
            return f"{count // bytes_each}{unit}"
    return f"{count}B"


def duration_text(value_ms: int) -> str:
    """The shortest exact way to write a number of milliseconds."""
    for unit, unit_ms in reversed(_DURATION_UNITS_MS.items()):
        if value_ms and value_ms % unit_ms == 0:
            return f"{value_ms // unit_ms}{unit}"
    return f"{value_ms}ms"


def _quantity(raw: object, units: dict[str, int], plain: int) -> Decimal:
    """A number, or text of a number and a unit, in the smallest unit. Exact: no binary fractions on the way."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    found = _QUANTITY.fullmatch(str(raw).strip())
    if found is None:
        raise ValueError
    number, unit = found.groups()
    if unit and unit not in units:
        raise ValueError
    return Decimal(number) * (units[unit] if unit else plain)


def _whole(kind: Size | Milliseconds, raw: object, units: dict[str, int]) -> int | None:
    if kind.unlimited and raw == _UNLIMITED:
        return None
    value = _quantity(raw, units, plain=1)
    if value != int(value) or value < kind.at_least or (kind.at_most is not None and value > kind.at_most):
        raise ValueError
    return int(value)


def _range(kind: Size | Milliseconds, text: Callable[[int], str]) -> str:
    upper = "" if kind.at_most is None else f" and at most {text(kind.at_most)}"
    unlimited = f', or "{_UNLIMITED}"' if kind.unlimited else ""
    return f"at least {text(kind.at_least)}{upper}{unlimited}"
