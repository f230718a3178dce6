"""core_log/README.md says what the code does: magics, structs, sizes, places and the numbers of the summary."""

import re
import struct
from pathlib import Path

import pytest

from headrace.core_log import checkpoint, format, index, journal, key_index, log, producers, record, summary

README = (Path(__file__).parents[2] / "core_log" / "README.md").read_text()

# name in the README -> (magic or None, struct, bytes set aside for it)
PARTS: dict[str, tuple[bytes | None, struct.Struct, int]] = {
    "segment head": (format.SEGMENT_MAGIC, format.SEGMENT_HEAD, format.SEGMENT_HEAD_SIZE),
    "batch header": (format.BATCH_MAGIC, format.HEADER, format.HEADER_SIZE),
    "fixed block's counts": (None, format.FIXED, format.FIXED.size),
    "watermark slot": (checkpoint._MAGIC, checkpoint._SLOT, checkpoint._SLOT_BYTES),
    "index head": (index._OFFSET_MAGIC, index._HEAD, index._HEAD.size),
    "timeindex head": (index._TIME_MAGIC, index._HEAD, index._HEAD.size),
    "key index head": (key_index._MAGIC, key_index._HEAD, key_index._HEAD.size),
    "producers head": (producers._MAGIC, producers._HEAD, producers._HEAD.size),
    "one producer": (None, producers._ENTRY, producers._ENTRY.size),
    "journal head": (journal._HEAD_MAGIC, journal._HEAD, journal._HEAD_SIZE),
    "journal entry": (journal._ENTRY_MAGIC, journal._PREFIX, journal._PREFIX.size),
    "journal entry's place": (None, journal._PLACE, journal._PLACE.size),
}


def rows(header: str) -> list[list[str]]:
    """The cells of the table that begins with this line."""
    table = README.split(header + "\n", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


def test_every_part_is_in_the_table_with_its_magic_size_and_struct() -> None:
    table = {name: cells for name, *cells in rows("| file or part | magic | bytes | struct |")}
    assert table == {
        name: ["-" if magic is None else f"`{magic.decode()}`", str(size), f"`{layout.format}`"]
        for name, (magic, layout, size) in PARTS.items()
    }


def test_batch_header_is_drawn_field_by_field() -> None:
    letters = re.findall(r"\d*[a-zA-Z]", format.HEADER.format.lstrip("<"))
    sizes = [struct.calcsize(f"<{letter}") for letter in letters]
    places = [sum(sizes[:number]) for number in range(len(sizes))]
    expected = [
        (str(place), str(size), name.replace("_", " "))
        for place, size, name in zip(places, sizes, format.BatchHeader._fields, strict=True)
    ]
    assert [tuple(cells[:3]) for cells in rows("| at | bytes | field | meaning |")] == expected


@pytest.mark.parametrize(
    "sentence",
    [
        f"seed {summary.TAG_SEED} for tags",
        f"seed {summary.KEY_SEED} for keys",
        f"sets the {summary.PROBES} bits",
        f"i = 0 to {summary.PROBES - 1}",
        f"More than {summary.ENTRIES_MAX} entries",
        f"from {8 * len(summary.summarise([]))} to {8 * len(summary.summarise(range(summary.ENTRIES_MAX))):,}",
        f"more than {format.ROUTE_IDS_INLINE_MAX} ids",
        f"Size 0x{format._REFERENCE:X}",
        f"sequences remembered for a producer | {producers.WINDOW:,}",
        f"bytes of a tag, of a header's name | {log.TAG_BYTES_MAX:,}",
        f"distinct tag sets, route sets in a batch | {log.DICTIONARY_MAX:,}",
        f"{format.FLAG_FIRST_OF_SEGMENT} first of its segment, {format.FLAG_GAP} gap",
        f"{format.FLAG_COMPACTED} compacted",
        f"{format.CODEC_NONE} none, {format.CODEC_LZ4} lz4",
        ", ".join(f"{gap.value} {gap.name.lower().replace('_', ' ')}" for gap in record.Gap),
    ],
)
def test_numbers_of_the_format_are_those_of_the_code(sentence: str) -> None:
    assert sentence in " ".join(README.split())


def test_attributes_are_those_of_the_code() -> None:
    bits = {
        "persistent": record.PERSISTENT,
        "retain": record.RETAIN,
        "relocated": record.RELOCATED,
        "tombstone": record.TOMBSTONE,
    }
    text = " ".join(README.split())
    for name, bit in bits.items():
        assert f"{bit.bit_length() - 1} {name}" in text
    assert f"{record.QOS_SHIFT}-{record.QOS_MASK.bit_length() - 1} QoS" in text
    assert f"{record.PRIORITY_SHIFT}-{record.PRIORITY_MASK.bit_length() - 1} priority" in text


def test_every_file_of_the_room_is_in_the_last_table() -> None:
    named = set(re.findall(r"`(\w+\.py)`", README.split("## Where to find what")[1]))
    folder = Path(__file__).parents[2] / "core_log"
    assert {path.name for path in folder.glob("*.py")} - named == {"__init__.py"}
