"""Tags in the headers of a message: `x-tags`, and RabbitMQ's `x-stream-filter-value`. Format; pure.

`x-tags` is text (`eu,vip`), an array of texts, or a table of dimensions (`{"region": "eu", "tier": 1}` is `region=eu`
and `tier=1`). `x-stream-filter-value` becomes two tags: itself with its value, for those who ask for that value, and
itself alone, for those who ask for messages without any (`x-stream-match-unfiltered`).
Neighbours: filtering/tags.py says what a tag may be; publishing.py asks here.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from headrace.filtering.expression import Expression, any_of
from headrace.filtering.tags import NO_TAGS, InvalidTags, Tags, collect, dimension, from_dimensions, from_text
from headrace.gateways.amqp import properties
from headrace.gateways.amqp.fields import FieldTable, FieldValue, type_name

TAGS = "x-tags"
FILTER_VALUE = "x-stream-filter-value"
_OURS = frozenset({TAGS, FILTER_VALUE})
PROPERTY_BYTES_CACHED_MAX = 1024


def tags_of(headers: FieldTable) -> Tags:
    """Raises InvalidTags."""
    tags = _tags(headers.get(TAGS))
    value = headers.get(FILTER_VALUE)
    if value is None:
        return tags
    if not isinstance(value, str):
        raise InvalidTags(f"{FILTER_VALUE} is text, not {type_name(value)}")
    return collect((*tags, FILTER_VALUE, dimension(FILTER_VALUE, value)))


def _tags(value: FieldValue) -> Tags:
    match value:
        case None:
            return NO_TAGS
        case str():
            return from_text(value)
        case Mapping():
            return from_dimensions({name: _text(name, inner) for name, inner in value.items()})
        case list() if all(isinstance(one, str) for one in value):
            return collect(str(one) for one in value)
    raise InvalidTags(f"{TAGS} is text, an array of texts or a table of dimensions, not {type_name(value)}")


def _text(name: str, value: FieldValue) -> str:
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int():
            return str(int(value))
    raise InvalidTags(f"the dimension '{name}' in {TAGS} is text, a whole number or a truth value")


def stream_filter(values: Sequence[str], *, match_unfiltered: bool) -> Expression:
    """What `x-stream-filter` and `x-stream-match-unfiltered` ask for. Raises InvalidTags."""
    return any_of(
        [dimension(FILTER_VALUE, value) for value in values], or_without=FILTER_VALUE if match_unfiltered else None
    )


def tagged_runs(props: Sequence[bytes], first: int, last: int) -> Iterator[tuple[int, int, Tags | None]]:
    """(from, to, tags) of neighbours with equal tags. None: something else in them concerns the broker too."""
    start, tags = first, _only_tags(props[first])
    for index in range(first + 1, last):
        one = props[index]
        if one is props[index - 1]:
            continue
        other = _only_tags(one)
        if other != tags:
            yield start, index, tags
            start, tags = index, other
    yield start, last, tags


def _only_tags(props: bytes) -> Tags | None:
    # Most have other business: the search costs less than to decode them for nothing.
    if b"x-tags" not in props and b"x-stream-filter-value" not in props:
        return None
    return _only_tags_cached(props) if len(props) <= PROPERTY_BYTES_CACHED_MAX else _decoded(props)


def _decoded(props: bytes) -> Tags | None:
    decoded = properties.decode(props)
    if decoded.user_id is not None or decoded.reply_to is not None:
        return None
    headers = decoded.headers or {}
    if any((name.startswith("x-") or "CC" in name) and name not in _OURS for name in headers):
        return None
    try:
        return tags_of(headers)
    except InvalidTags:
        # To be refused where that is done.
        return None


_only_tags_cached = lru_cache(maxsize=4096)(_decoded)
