"""Option strings of the source as values. Format; its neighbours source.py and stream.py act on them.

Names and rules are those of Spark's Kafka source, so that a query is moved by changing its format and its address.
Our own are `path`, `url`, `archive`, `access`, `tokenName`, `columns`, `tags`, `pushFilters`, `cursor` and
`maxBytesPerTrigger`.
A name that is not known is refused, with the one that was probably meant: an option that is passed over in silence (a
start that is not heeded, a limit that does not hold) costs more than an error. Options travel in plans and logs, so
none of them holds a secret: a token has a name, and its value is found on each machine.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from headrace.filtering.expression import ExpressionError, parse
from headrace.spark.access import ACCESS_KINDS
from headrace.spark.stream_offsets import InvalidOffsets, Offsets

EARLIEST: Final = -2
LATEST: Final = -1

WHERE = ("path", "url", "archive", "access", "tokenName")
SUBSCRIPTIONS = ("subscribe", "subscribePattern", "assign")
COMMON = (
    *WHERE,
    *SUBSCRIPTIONS,
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
    "columns",
    "tags",
)
BATCH = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp", "pushFilters")
STREAM = (
    "cursor",
    "kafka.group.id",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "maxTriggerDelay",
)
# What people would write who have used another source, and what to write here.
INSTEAD = {
    "kafka.bootstrap.servers": "give the broker's HTTP door as 'url', or its data directory as 'path'",
    "topic": "the topics to read are named by 'subscribe'",
    "topics": "the topics to read are named by 'subscribe'",
    "token": "options are shown in plans and logs: give the name of a token as 'tokenName'",
    "password": "options are shown in plans and logs: give the name of a token as 'tokenName'",
    "user": "options are shown in plans and logs: give the name of a token as 'tokenName'",
}
TRIGGER_DELAY_MS: Final = 15 * 60_000
_MILLISECONDS = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


class InvalidOption(ValueError):
    """An option that there is not, or that cannot be read. Says its name, what was expected and what came."""


# -- values ---------------------------------------------------------------------------------------------------------

Position: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Where:
    """As spark/access.py opens it."""

    path: str | None = None
    url: str | None = None
    archive: str | None = None
    access: str = "auto"
    token_name: str | None = None


@dataclass(frozen=True, slots=True)
class Topics:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Names that match it as a whole."""

    text: str


@dataclass(frozen=True, slots=True)
class Partitions:
    numbers: Mapping[str, tuple[int, ...]]


Subscription: TypeAlias = Topics | Pattern | Partitions


@dataclass(frozen=True, slots=True)
class Everywhere:
    """EARLIEST or LATEST, in every partition."""

    offset: int


@dataclass(frozen=True, slots=True)
class Given:
    """An offset for each partition; EARLIEST and LATEST may be among them."""

    offsets: Mapping[Position, int]


@dataclass(frozen=True, slots=True)
class Kept:
    """Offsets of a query, as its progress shows them: with the ids of the topics."""

    offsets: Offsets


@dataclass(frozen=True, slots=True)
class Since:
    """The first record at or after a time; in each partition its own, or one for all."""

    timestamp_us: int | None
    by_partition: Mapping[Position, int]


Edge: TypeAlias = Everywhere | Given | Kept | Since


@dataclass(frozen=True, slots=True)
class SourceOptions:
    where: Where
    subscription: Subscription
    start: Edge
    end: Edge
    # Where no record is at or after the start's time: is that an error, or the end?
    no_match_is_latest: bool = False
    fail_on_data_loss: bool = True
    min_partitions: int | None = None
    max_records: int | None = None
    include_headers: bool = False
    columns: tuple[str, ...] | None = None
    tags: str | None = None
    push_filters: bool = False
    cursor: str | None = None
    group: str | None = None
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_bytes: int | None = None
    max_trigger_delay_ms: int = TRIGGER_DELAY_MS


# -- reading --------------------------------------------------------------------------------------------------------


def check_names(options: Mapping[str, str], known: tuple[str, ...] = (*COMMON, *BATCH, *STREAM)) -> None:
    """Raises InvalidOption for a name that is none of these; Spark hands them over in lower case."""
    lower = {name.lower(): name for name in known}
    for name in options:
        if name.lower() in lower:
            continue
        if hint := INSTEAD.get(name.lower()):
            raise InvalidOption(f"unknown option {name!r}: {hint}")
        near = difflib.get_close_matches(name.lower(), lower, n=1)
        told = f"did you mean {lower[near[0]]!r}?" if near else f"there are {', '.join(sorted(known))}"
        raise InvalidOption(f"unknown option {name!r}: {told}")


def source_options(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """`options` must find a name however it is written, as Spark's do. Raises InvalidOption."""
    check_names(options)
    for name in BATCH if streaming else STREAM:
        if name in options:
            raise InvalidOption(f"{name!r} is an option of {'batch reads' if streaming else 'streams'} only")
    found = SourceOptions(
        where=where(options),
        subscription=_subscription(options),
        start=_start(options, streaming=streaming),
        end=_end(options),
        no_match_is_latest=_choice(options, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
        fail_on_data_loss=_boolean(options, "failOnDataLoss", True),
        min_partitions=_count(options, "minPartitions"),
        max_records=_count(options, "maxRecordsPerPartition"),
        include_headers=_boolean(options, "includeHeaders", False),
        columns=columns(options),
        tags=_tags(options),
        push_filters=_boolean(options, "pushFilters", False),
        cursor=_name(options, "cursor"),
        group=_name(options, "kafka.group.id"),
        max_offsets=_count(options, "maxOffsetsPerTrigger"),
        min_offsets=_count(options, "minOffsetsPerTrigger"),
        max_bytes=_count(options, "maxBytesPerTrigger"),
        max_trigger_delay_ms=_duration_ms(options, "maxTriggerDelay", TRIGGER_DELAY_MS),
    )
    _check_together(found, streaming=streaming)
    return found


def _check_together(found: SourceOptions, *, streaming: bool) -> None:
    if found.columns is not None and found.include_headers and "headers" not in found.columns:
        raise InvalidOption("'includeHeaders' is true, but 'columns' has no headers: leave one of the two out")
    if found.min_offsets is not None and found.max_offsets is not None and found.min_offsets > found.max_offsets:
        raise InvalidOption("'minOffsetsPerTrigger' is larger than 'maxOffsetsPerTrigger': no batch could be both")
    if found.cursor is not None and found.where.url is None:
        raise InvalidOption("'cursor' is kept by the broker: give its HTTP door as 'url' too")
    if not streaming:
        if found.start == Everywhere(LATEST) or (
            isinstance(found.start, Given) and LATEST in found.start.offsets.values()
        ):
            raise InvalidOption("'startingOffsets': a batch read cannot start at latest (-1): it would read nothing")
        if found.end == Everywhere(EARLIEST) or (
            isinstance(found.end, Given) and EARLIEST in found.end.offsets.values()
        ):
            raise InvalidOption("'endingOffsets': a batch read cannot end at earliest (-2): it would read nothing")


def where(options: Mapping[str, str]) -> Where:
    """Raises InvalidOption; a secret in an address is one."""
    url = _name(options, "url")
    if url is not None and "@" in url.partition("://")[2].partition("/")[0]:
        raise InvalidOption("'url' holds a user or password, which plans and logs would show: use 'tokenName'")
    found = Where(
        path=_name(options, "path"),
        url=url,
        archive=_name(options, "archive"),
        access=_choice(options, "access", ACCESS_KINDS),
        token_name=_name(options, "tokenName"),
    )
    if found.path is None and found.url is None and found.archive is None:
        raise InvalidOption("say where to read from: 'url' (a broker), 'path' (its data directory) or 'archive'")
    needed = {"local": found.path, "http": found.url, "archive": found.archive}
    if found.access in needed and needed[found.access] is None:
        what = {"local": "path", "http": "url", "archive": "archive"}[found.access]
        raise InvalidOption(f"'access' is {found.access}, which needs {what!r}")
    return found


def columns(options: Mapping[str, str]) -> tuple[str, ...] | None:
    """Their names as they were written; schema.py knows which there are."""
    text = options.get("columns")
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise InvalidOption(f"'columns' is a list of names with commas between them, not {text!r}")
    return names


def _subscription(options: Mapping[str, str]) -> Subscription:
    given = [name for name in SUBSCRIPTIONS if name in options]
    if len(given) != 1:
        what = "none is" if not given else f"{' and '.join(given)} are"
        raise InvalidOption(f"one of 'subscribe', 'subscribePattern' and 'assign' must be given, and {what}")
    name, text = given[0], options[given[0]]
    match name:
        case "subscribe":
            names = tuple(dict.fromkeys(one.strip() for one in text.split(",")))
            if not all(names):
                raise InvalidOption(f"'subscribe' is a list of topics with commas between them, not {text!r}")
            return Topics(names)
        case "subscribePattern":
            try:
                re.compile(text)
            except re.error as error:
                raise InvalidOption(f"'subscribePattern' is no regular expression: {error}") from None
            return Pattern(text)
        case _:
            expected = 'partitions by topic, like {"orders":[0,1]}'
            numbers: dict[str, tuple[int, ...]] = {}
            for topic, listed in _object(name, text, expected).items():
                if not isinstance(listed, list) or not listed or not all(_is_offset(one, 0) for one in listed):
                    raise _wrong(name, expected, text)
                numbers[topic] = tuple(sorted(set(listed)))
            if not numbers:
                raise _wrong(name, expected, text)
            return Partitions(numbers)


def _start(options: Mapping[str, str], *, streaming: bool) -> Edge:
    if "startingTimestamp" in options:
        return Since(_timestamp_us(options, "startingTimestamp"), {})
    if "startingOffsetsByTimestamp" in options:
        return Since(None, _timestamps(options, "startingOffsetsByTimestamp"))
    return _offsets(options, "startingOffsets", LATEST if streaming else EARLIEST)


def _end(options: Mapping[str, str]) -> Edge:
    if "endingTimestamp" in options:
        return Since(_timestamp_us(options, "endingTimestamp"), {})
    if "endingOffsetsByTimestamp" in options:
        return Since(None, _timestamps(options, "endingOffsetsByTimestamp"))
    return _offsets(options, "endingOffsets", LATEST)


def _offsets(options: Mapping[str, str], name: str, default: int) -> Edge:
    text = options.get(name)
    match text if text is None else text.strip().lower():
        case None:
            return Everywhere(default)
        case "earliest":
            return Everywhere(EARLIEST)
        case "latest":
            return Everywhere(LATEST)
    assert text is not None
    expected = 'earliest, latest, or offsets by topic and partition, like {"orders":{"0":23,"1":-2}}'
    document = _object(name, text, expected)
    if isinstance(document.get("v"), int):
        try:
            # Taken from a checkpoint, it may also say where that query began.
            return Kept(Offsets(Offsets.from_json(document).topics))
        except InvalidOffsets as error:
            raise InvalidOption(f"{name!r}: {error}") from None
    return Given(_by_partition(name, text, document, EARLIEST, expected))


def _timestamps(options: Mapping[str, str], name: str) -> dict[Position, int]:
    expected = 'milliseconds since 1970 by topic and partition, like {"orders":{"0":1700000000000}}'
    text = options[name]
    found = _by_partition(name, text, _object(name, text, expected), 0, expected)
    return {position: milliseconds * 1000 for position, milliseconds in found.items()}


def _timestamp_us(options: Mapping[str, str], name: str) -> int:
    text = options[name].strip()
    if not text.isascii() or not text.isdigit():
        raise _wrong(name, "milliseconds since 1970", text)
    return int(text) * 1000


def _by_partition(name: str, text: str, document: dict[str, Any], least: int, expected: str) -> dict[Position, int]:
    found: dict[Position, int] = {}
    for topic, by_number in document.items():
        if not isinstance(by_number, dict):
            raise _wrong(name, expected, text)
        for number, value in by_number.items():
            if not (number.isascii() and number.isdigit()) or not _is_offset(value, least):
                raise _wrong(name, expected, text)
            found[topic, int(number)] = value
    if not found:
        raise _wrong(name, expected, text)
    return found


def _is_offset(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _object(name: str, text: str, expected: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        raise _wrong(name, expected, text) from None
    if not isinstance(document, dict):
        raise _wrong(name, expected, text)
    return document


def _wrong(name: str, expected: str, text: str) -> InvalidOption:
    return InvalidOption(f"{name!r} is {expected}; not {text!r}")


def _tags(options: Mapping[str, str]) -> str | None:
    text = options.get("tags")
    if text is None:
        return None
    try:
        return parse(text).canonical
    except ExpressionError as error:
        raise InvalidOption(f"'tags': {error}") from None


def _name(options: Mapping[str, str], name: str) -> str | None:
    text = options.get(name)
    if text is not None and not text.strip():
        raise InvalidOption(f"{name!r} is empty")
    return text


_Choice = TypeVar("_Choice", bound=str)


def _choice(options: Mapping[str, str], name: str, choices: tuple[_Choice, ...]) -> _Choice:
    """The first is the default."""
    text = options.get(name, choices[0]).strip().lower()
    for choice in choices:
        if text == choice:
            return choice
    raise _wrong(name, f"one of {', '.join(choices)}", text)


def _boolean(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name)
    match text if text is None else text.strip().lower():
        case None:
            return default
        case "true":
            return True
        case "false":
            return False
    raise _wrong(name, "true or false", str(text))


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise _wrong(name, "a whole number from 1 on", text)
    return int(text)


def _duration_ms(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or (found[2] or "ms") not in _MILLISECONDS:
        raise _wrong(name, "a duration like 30s, 15m or 1h", text)
    return int(int(found[1]) * _MILLISECONDS[found[2] or "ms"])
