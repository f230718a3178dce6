"""Tags of a record: what one may be, and how a list of them is written. Values; pure.

A tag is text. A dimension is the tag `name=value`: it is stored, hashed and compared like any other. A list is written
`eu,vip,tier=gold`; a tag that holds a comma or a quote, or has space at its ends, stands in double quotes, inside which
a backslash takes the next character as it is. Tags come out sorted and each once, so that records with equal tags share
one entry of their batch, in whichever order a publisher names them.
Neighbours: expression.py asks for tags; core_log/summary.py hashes them; the doors read them off their wires.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from headrace.core_log.errors import Refused

Tags = tuple[str, ...]

TAG_BYTES_MAX: Final = 255
TAG_COUNT_MAX: Final = 64
NO_TAGS: Final[Tags] = ()
# Whoever remembers something for tags does so for small sets only, so that what is kept is bounded in bytes too.
KEPT_COUNT_MAX: Final = 8
KEPT_CHARACTERS_MAX: Final = 256


class InvalidTags(Refused):
    """Tags that cannot be kept. The record was not taken."""


def check_tag(tag: str) -> str:
    """The tag itself; InvalidTags says what is wrong with it."""
    if not tag:
        raise InvalidTags("a tag has at least one character")
    try:
        size = len(tag.encode())
    except UnicodeEncodeError:
        raise InvalidTags(f"the tag {tag!r} is not UTF-8") from None
    if size > TAG_BYTES_MAX:
        raise InvalidTags(f"a tag of {size} bytes is longer than {TAG_BYTES_MAX}")
    if "\0" in tag:
        raise InvalidTags(f"the tag {tag!r} holds a null character")
    return tag


def is_small(tags: Tags) -> bool:
    """Whether something may be remembered for these tags."""
    return len(tags) <= KEPT_COUNT_MAX and sum(map(len, tags)) <= KEPT_CHARACTERS_MAX


def dimension(name: str, value: str) -> str:
    """The tag of a dimension. Its name holds no `=`: where it ends must be plain to see."""
    if not name or not value:
        raise InvalidTags(f"the dimension {name!r} = {value!r} needs a name and a value")
    if "=" in name:
        raise InvalidTags(f"the name of the dimension {name!r} must not hold '='")
    return check_tag(f"{name}={value}")


def collect(tags: Iterable[str]) -> Tags:
    """Each once, sorted and checked."""
    found = sorted(set(map(check_tag, tags)))
    if len(found) > TAG_COUNT_MAX:
        raise InvalidTags(f"{len(found)} tags on one record are more than {TAG_COUNT_MAX}")
    return tuple(found)


def from_dimensions(dimensions: Mapping[str, str]) -> Tags:
    return collect(dimension(name, value) for name, value in dimensions.items())


def from_text(text: str) -> Tags:
    """`a,b` as tags. Space around a tag does not belong to it, and empty places are passed over."""
    if '"' not in text:
        return collect(filter(None, map(str.strip, text.split(","))))
    return collect(_pieces(text))


def to_text(tags: Iterable[str]) -> str:
    """The list that `from_text` reads back."""
    return ",".join(_written(tag) for tag in tags)


def _written(tag: str) -> str:
    if tag == tag.strip() and not any(character in tag for character in ',"'):
        return tag
    escaped = tag.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _pieces(text: str) -> Iterator[str]:
    """The tags of a list in which some are quoted; what is quoted is a tag as it stands, space and all."""
    at = 0
    while at < len(text):
        character = text[at]
        if character.isspace() or character == ",":
            at += 1
            continue
        if character != '"':
            end = text.find(",", at)
            end = len(text) if end < 0 else end
            piece = text[at:end].rstrip()
            if '"' in piece:
                raise InvalidTags(f"the tag {piece!r} holds a quote: write it as {_written(piece)}")
            yield piece
            at = end
            continue
        piece, at = _quoted(text, at)
        yield piece
        while at < len(text) and text[at].isspace():
            at += 1
        if at < len(text) and text[at] != ",":
            raise InvalidTags(f"column {at + 1} of tags {text!r}: expected a comma behind a quoted tag")


def in_quotes(text: str, start: int) -> tuple[str, int] | None:
    """The word in the quotes that begin here, of whichever kind, and the place behind it; None: they are not closed."""
    mark = text[start]
    letters: list[str] = []
    at = start + 1
    while at < len(text):
        character = text[at]
        if character == mark:
            return "".join(letters), at + 1
        if character == "\\":
            at += 1
            if at == len(text):
                break
            character = text[at]
        letters.append(character)
        at += 1
    return None


def _quoted(text: str, at: int) -> tuple[str, int]:
    """The quoted tag that begins here, and the place behind it."""
    found = in_quotes(text, at)
    if found is None:
        raise InvalidTags(f"the quote at column {at + 1} of tags {text!r} is not closed")
    return found
