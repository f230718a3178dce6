"""`headrace log`: look into a data directory, check it, mend it, without a broker. Driver.

ls, dump and verify write nothing, take no lock and stop at the watermark, so they may run beside a broker; repair
takes the directory's lock. What records hold is shown as text where it is UTF-8, else as base64; nothing is decoded,
unpickled or interpreted, and no control character reaches a terminal. Neighbours: core_log/inspection.py and
core_log/repair.py do the work, docs/log.md explains the output.
"""

import json
import os
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headrace.config import load_config
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog, StorageError, UnknownFormat
from headrace.core_log.format import CODEC_LZ4, FLAG_COMPACTED, FLAG_GAP, BatchHeader
from headrace.core_log.inspection import (
    Damage,
    Finding,
    Level,
    Partition,
    Tally,
    batches,
    decode_whole,
    is_named,
    partition_of,
    read_journal,
    streams,
    verify,
)
from headrace.core_log.journal import replay
from headrace.core_log.record import (
    PERSISTENT,
    PRIORITY_MASK,
    PRIORITY_SHIFT,
    PROTOCOL_MASK,
    QOS_MASK,
    QOS_SHIFT,
    RELOCATED,
    RETAIN,
    TOMBSTONE,
    Gap,
    Protocol,
    Record,
)
from headrace.core_log.repair import Plan, carry_out, plan
from headrace.core_log.spec import SPEC, StreamSpec, folder_of
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.readonly import ReadOnlyStorage
from headrace.redaction import printable

Json = dict[str, object]
# Wide enough for a table with a uuid when nobody is looking.
PIPE_WIDTH = 200


@click.group("log")
def log() -> None:
    """Look into a data directory, check it, mend it, without a broker.

    DATA is the broker's data directory; without it, the configured one (HEADRACE_NODE__DATA, else ./headrace-data).
    """


data_argument = click.argument("data", required=False, type=click.Path(path_type=Path))
stream_option = click.option(
    "--stream", metavar="NAME|UUID", help="Only this stream; also queue:NAME, exchange:NAME, VHOST|NAME."
)
partition_option = click.option("--partition", type=click.IntRange(0), metavar="N", help="Only this partition.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


def configured(data: Path | None) -> Path:
    return load_config(None, os.environ, {}).node.data if data is None else data


@contextmanager
def about(data: Path) -> Iterator[None]:
    """Errors of the storage name files relative to the data directory; say which one it is."""
    try:
        yield
    except StorageError as error:
        error.add_note(f"data directory {data.absolute()}")
        raise


class Chosen(NamedTuple):
    """The partitions asked for, and what cannot be read at all: it belongs to every answer."""

    partitions: list[Partition]
    unreadable: list[Finding]


def chosen(storage: Storage, stream: str | None = None, number: int | None = None) -> Chosen:
    found = streams(storage)
    named = [one for one in found if stream is None or one.id == stream or is_named(one.spec, stream)]
    if stream is not None and not named:
        known = ", ".join(sorted({shown(one.spec) for one in found if one.spec is not None})) or "none"
        raise click.BadParameter(f"no stream {printable(stream)!r} here; there are: {known}", param_hint="--stream")
    specs = [one.spec for one in named if one.spec is not None]
    counts = [spec.partition_count for spec in specs]
    if number is not None and specs and number >= max(counts):
        raise click.BadParameter(f"partitions are counted from 0 to {max(counts) - 1} here", param_hint="--partition")
    journal = read_journal(storage)
    partitions = []
    unreadable = [one.problem for one in named if one.problem is not None]
    for spec in specs:
        for one in range(spec.partition_count) if number is None else [number] * (number < spec.partition_count):
            try:
                partitions.append(partition_of(storage, spec, one, journal))
            except FileNotFoundError:
                # A stream may be deleted while we look; then its stream.json is gone too.
                if storage.exists(f"{folder_of(spec.id)}/{SPEC}"):
                    what = "the partition's folder is gone"
                    unreadable.append(Finding(Level.PROBLEM, folder_of(spec.id, one), None, None, what))
    return Chosen(partitions, unreadable)


def shown(spec: StreamSpec) -> str:
    """A stream's name for people."""
    return printable(spec.name if spec.vhost == "/" else f"{spec.vhost}|{spec.name}")


# -- ls ---------------------------------------------------------------------------------------------------------


@log.command("ls")
@data_argument
@stream_option
@click.option("--segments", is_flag=True, help="One line for each segment instead of each partition.")
@json_option
def ls(data: Path | None, stream: str | None, segments: bool, as_json: bool) -> None:
    """Streams, partitions and segments, how far they reach and how large they are."""
    data = configured(data)
    rows: list[Json] = []
    with about(data):
        found, unreadable = chosen(ReadOnlyStorage(data), stream)
        for partition in found:
            rows += segment_rows(partition) if segments else [partition_row(partition)]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    else:
        show_table(rows, segments=segments)
    for problem in unreadable:
        click.echo(finding_line(problem), err=True)
    if unreadable:
        sys.exit(1)


def stream_fields(partition: Partition) -> Json:
    spec = partition.spec
    return {
        "stream": spec.name,
        "vhost": spec.vhost,
        "kind": spec.kind,
        "id": str(spec.id),
        "partition": partition.number,
    }


def partition_row(partition: Partition) -> Json:
    checkpoint = partition.checkpoint
    sizes = partition.sizes
    return stream_fields(partition) | {
        "log_start": partition.log_start,
        "watermark": None if checkpoint is None else checkpoint.offset,
        "epoch": None if checkpoint is None else checkpoint.epoch,
        "segments": len(sizes),
        "bytes": sum(one.size for one in sizes),
    }


def segment_rows(partition: Partition) -> list[Json]:
    checkpoint = partition.checkpoint
    end = None if checkpoint is None else checkpoint.offset
    return [
        stream_fields(partition)
        | {
            "base_offset": one.base_offset,
            "end_offset": end if one.end_offset is None else one.end_offset,
            "sealed": one.end_offset is not None,
            "bytes": one.size,
        }
        for one in partition.sizes
    ]


def show_table(rows: list[Json], *, segments: bool) -> None:
    table = Table()
    table.add_column("stream", overflow="fold")
    table.add_column("kind", no_wrap=True)
    numbers = ("base_offset", "end_offset", "sealed") if segments else ("log_start", "watermark", "epoch", "segments")
    for name in ("partition", *numbers, "bytes"):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    table.add_column("id", no_wrap=True)
    for row in rows:
        vhost, name = row["vhost"], row["stream"]
        cells = [row[field] for field in ("kind", "partition", *numbers, "bytes", "id")]
        stream = str(name) if vhost == "/" else f"{vhost}|{name}"
        table.add_row(Text(printable(stream)), *(Text(cell_text(cell)) for cell in cells))
    output().print(table)


def cell_text(cell: object) -> str:
    match cell:
        case None:
            return "unknown"
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case _:
            return printable(str(cell))


def output() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


# -- dump -------------------------------------------------------------------------------------------------------


@log.command("dump")
@data_argument
@stream_option
@partition_option
@click.option("--from", "start", type=click.IntRange(0), default=0, metavar="OFFSET", help="First offset.")
@click.option("--to", "end", type=click.IntRange(0), metavar="OFFSET", help="Stop before this offset.")
@click.option("--batches/--records", "whole", default=False, help="Headers of batches, or records (the default).")
@json_option
def dump(
    data: Path | None,
    stream: str | None,
    partition: int | None,
    start: int,
    end: int | None,
    whole: bool,
    as_json: bool,
) -> None:
    """Records, or the headers of batches, up to the watermark. What is damaged is told on stderr and passed."""
    data = configured(data)
    if end is not None and end < start:
        raise click.BadParameter(f"ends at {end}, before it begins at {start}", param_hint="--to")
    rows_of = batch_rows if whole else record_rows
    damaged = False
    with about(data):
        found, unreadable = chosen(ReadOnlyStorage(data), stream, partition)
        for row in chain(unreadable, *(rows_of(one, start, end) for one in found)):
            if isinstance(row, Finding):
                damaged = True
                click.echo(finding_line(row), err=True)
            else:
                sys.stdout.write((json.dumps(row) if as_json else row_line(row)) + "\n")
    if damaged:
        sys.exit(1)


def place_fields(partition: Partition) -> Json:
    return {"stream": partition.spec.name, "partition": partition.number}


def damage_finding(damage: Damage) -> Finding:
    what = f"{damage.what}; offsets {damage.offset} to {damage.next_offset - 1} cannot be read"
    return Finding(Level.PROBLEM, damage.path, damage.position, damage.offset, what)


def batch_rows(partition: Partition, start: int, end: int | None) -> Iterator[Json | Finding]:
    for segment, item in batches(partition, start, end):
        if isinstance(item, Damage):
            yield damage_finding(item)
            continue
        header = item.header
        yield place_fields(partition) | {
            "file": os.path.basename(segment.path),
            "position": item.position,
            "size": header.size,
            "offset": header.base_offset,
            "next_offset": header.next_offset,
            "records": header.record_count,
            "epoch": header.leader_epoch,
            "leader": header.leader_id,
            "durable_offset": header.durable_offset,
            "codec": "lz4" if header.codec == CODEC_LZ4 else "none",
            "plain_size": header.fixed_size + header.blob_size,
            "summary_bits": 8 * header.summary_size,
            "hash": f"{header.hash:016x}",
            **batch_kind(header),
        }


def batch_kind(header: BatchHeader) -> Json:
    if header.flags & FLAG_GAP:
        return {"gap": gap_name(header.gap)}
    kind: Json = {"first_timestamp_us": header.first_timestamp, "max_timestamp_us": header.max_timestamp}
    if header.flags & FLAG_COMPACTED:
        kind["compacted"] = True
    if header.producer is not None:
        kind["producer"] = header.producer.id.hex()
        kind["producer_epoch"] = header.producer.epoch
        kind["first_sequence"] = header.producer.first_sequence
    return kind


def gap_name(gap: int) -> str:
    return Gap(gap).name.lower() if gap in set(Gap) else str(gap)


def record_rows(partition: Partition, start: int, end: int | None) -> Iterator[Json | Finding]:
    for segment, item in batches(partition, start, end):
        if isinstance(item, Damage):
            yield damage_finding(item)
            continue
        header = item.header
        try:
            batch = decode_whole(partition, segment, item)
        except (CorruptLog, UnknownFormat) as error:
            yield Finding(Level.PROBLEM, segment.path, item.position, header.base_offset, str(error))
            continue
        if batch.gap is not None:
            gap = {"offset": header.base_offset, "next_offset": header.next_offset, "gap": gap_name(header.gap)}
            yield place_fields(partition) | gap
        last = batch.count if end is None else batch.index_of(end)
        for index in range(batch.index_of(max(start, partition.log_start)), last):
            yield place_fields(partition) | record_fields(batch.record(index))


def record_fields(record: Record) -> Json:
    """A record as JSON; whatever is absent or at its default is left out, but for key and value."""
    attributes = record.attributes
    fields: Json = {
        "offset": record.offset,
        "timestamp_us": record.timestamp_us,
        "key": bytes_field(record.key),
        "value": bytes_field(record.value),
    }
    protocol = attributes & PROTOCOL_MASK
    optional: Json = {
        "properties": bytes_field(record.properties),
        "protocol": Protocol(protocol).name.lower() if protocol in set(Protocol) else protocol,
        "persistent": bool(attributes & PERSISTENT),
        "priority": (attributes & PRIORITY_MASK) >> PRIORITY_SHIFT,
        "qos": (attributes & QOS_MASK) >> QOS_SHIFT,
        "retain": bool(attributes & RETAIN),
        "relocated": bool(attributes & RELOCATED),
        "tombstone": bool(attributes & TOMBSTONE),
        "expiry_us": record.expiry_us,
        "origin": record.origin,
        "tags": list(record.tags),
        "routes": list(record.route_set),
        "headers": [[bytes_field(name), bytes_field(value)] for name, value in record.headers],
    }
    if protocol == Protocol.NEUTRAL:
        del optional["protocol"]
    return fields | {name: value for name, value in optional.items() if value}


def bytes_field(data: bytes) -> object:
    """Text where the bytes are UTF-8, else {"base64": ...}: a string in the output is always the bytes themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(data).decode()}


def row_line(row: Json) -> str:
    """The same fields for people: name=value, text in quotes with escapes, other bytes as base64:..."""
    place = f"{printable(str(row['stream']))}/{row['partition']}"
    return " ".join((place, *(f"{name}={field_text(name, row[name])}" for name in row if name not in STREAM_PLACE)))


STREAM_PLACE = ("stream", "partition")
# Words of our own, which need no quotes.
PLAIN_WORDS = ("file", "codec", "hash", "gap", "producer", "protocol")


def field_text(name: str, value: object) -> str:
    match value:
        case {"base64": text}:
            return f"base64:{text}"
        case str() if name not in PLAIN_WORDS:
            return json.dumps(value, ensure_ascii=False) if value.isprintable() else json.dumps(value)
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("_us"):
            return time_text(value)
        case list():
            return f"[{', '.join(field_text(name, one) for one in value)}]"
        case _:
            return printable(str(value))


def time_text(microseconds: int) -> str:
    try:
        seconds, rest = divmod(microseconds, 1_000_000)
        moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)
    except (OverflowError, ValueError, OSError):
        # A producer may have sent any number; then the number it is.
        return str(microseconds)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


# -- verify -----------------------------------------------------------------------------------------------------


@log.command("verify")
@data_argument
@stream_option
@partition_option
@json_option
def verify_command(data: Path | None, stream: str | None, partition: int | None, as_json: bool) -> None:
    """Check every hash and everything else that must hold. Exit status 1 when a problem was found."""
    data = configured(data)
    tally = Tally()
    problems = notes = 0
    with about(data):
        storage = ReadOnlyStorage(data)
        for finding in verify_all(storage, stream, partition, tally):
            problems += finding.level is Level.PROBLEM
            notes += finding.level is Level.NOTE
            click.echo(json.dumps(finding_fields(finding)) if as_json else finding_line(finding))
    if as_json:
        counts = {"partitions": tally.partitions, "segments": tally.segments, "batches": tally.batches}
        sizes = {"records": tally.records, "bytes": tally.bytes}
        click.echo(json.dumps({"checked": counts | sizes, "problems": problems, "notes": notes}))
    else:
        click.echo(
            f"{count(tally.partitions, 'partition')}, {count(tally.segments, 'segment')}, "
            f"{count(tally.batches, 'batch', 'batches')}, {count(tally.records, 'record')}, {tally.bytes:,} bytes: "
            f"{count(problems, 'problem')}, {count(notes, 'note')}"
        )
    if problems:
        sys.exit(1)


def count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def verify_all(storage: Storage, stream: str | None, number: int | None, tally: Tally) -> Iterator[Finding]:
    found, unreadable = chosen(storage, stream, number)
    yield from unreadable
    with Bar("verify", sum(size.size for one in found for size in one.sizes)) as bar:
        for partition in found:
            yield from verify(partition, tally, bar.advance)


class Bar:
    """A progress bar on stderr, or nothing where stderr is no terminal."""

    def __init__(self, title: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
            redirect_stdout=False,
        )
        self._task = self._progress.add_task(title, total=total)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, size: int) -> None:
        self._progress.advance(self._task, size)


def finding_fields(finding: Finding) -> Json:
    return finding._asdict() | {"level": finding.level.value}


def finding_line(finding: Finding) -> str:
    where = []
    if finding.position is not None:
        where.append(f"byte {finding.position}")
    if finding.offset is not None:
        where.append(f"offset {finding.offset}")
    place = f" ({', '.join(where)})" if where else ""
    return f"{finding.level.value}: {printable(f'{finding.path}: {finding.what}')}{place}"


# -- repair -----------------------------------------------------------------------------------------------------


@log.command("repair")
@data_argument
@stream_option
@partition_option
@click.option("--yes", is_flag=True, help="Do it; without this, only say what would be done.")
@json_option
def repair_command(data: Path | None, stream: str | None, partition: int | None, yes: bool, as_json: bool) -> None:
    """Make damaged partitions whole again, and say what is given up for it.

    Every whole batch is kept; offsets that cannot be read become a typed gap. Damaged files are kept beside the new
    ones as *.damaged, and each repair is a line of the partition's file `repairs`. Without --yes nothing is changed,
    and the exit status is 1 if there is something to repair. No broker may be running on the directory.
    """
    data = configured(data)
    unmended = False
    with about(data), locked(data) as env:
        if yes:
            # What was committed and only the journal holds comes back first, as at a start after a crash.
            replay(env.storage, lambda stream_id, number: known_folder(env.storage, stream_id, number))
        found, unreadable = chosen(env.storage, stream, partition)
        for problem in unreadable:
            unmended = True
            click.echo(f"{finding_line(problem)}; this cannot be repaired", err=True)
        with Bar("repair", sum(size.size for one in found for size in one.sizes)) as bar:
            for one in found:
                made = plan(one)
                if not made.is_empty:
                    if yes:
                        carry_out(env, made)
                    for line in [json.dumps(plan_fields(made, yes))] if as_json else plan_lines(made, yes):
                        click.echo(line)
                    unmended |= not yes
                bar.advance(sum(size.size for size in one.sizes))
    if unmended:
        sys.exit(1)


@contextmanager
def locked(data: Path) -> Iterator[Env]:
    """The directory as a broker has it, for as long as nobody else has."""
    # A path that is not there is an error here, where the broker would create it.
    streams(ReadOnlyStorage(data))
    from headrace.core_log.real import real_env

    env = real_env(data)
    env.storage.lock()
    try:
        yield env
    finally:
        env.storage.unlock()


def known_folder(storage: Storage, stream_id: UUID, partition: int) -> str | None:
    folder = folder_of(stream_id, partition)
    return folder if storage.exists(folder) else None


def plan_fields(made: Plan, done: bool) -> Json:
    return place_fields(made.partition) | {
        "id": str(made.partition.spec.id),
        "done": done,
        "given_up": [one._asdict() for one in made.given_up],
        "routes_lost": [pair for segment in made.segments for pair in segment.routes_lost],
        "written_anew": [os.path.basename(made.partition.path(one.base_offset)) for one in made.segments],
        "watermark": made.watermark,
        "removed": [os.path.basename(path) for path in made.removed],
    }


def plan_lines(made: Plan, done: bool) -> Iterator[str]:
    would = "" if done else "would be "
    place = f"{shown(made.partition.spec)}/{made.partition.number}"
    for one in made.given_up:
        last = one.next_offset - 1
        yield f"{place}: offsets {one.first_offset} to {last} {would}given up: {printable(one.why)}"
    for segment in made.segments:
        path = made.partition.path(segment.base_offset)
        for first, following in segment.routes_lost:
            yield f"{place}: offsets {first} to {following - 1} {would}kept without their route, which is lost"
        kept = f"; the damaged file {would}kept as {os.path.basename(path)}.damaged" if segment.exists else ""
        yield f"{place}: {path} {would}written anew{kept}"
    if made.watermark is not None:
        yield f"{place}: the watermark {would}written anew: {made.watermark}"
    for path in made.removed:
        yield f"{place}: {path} {would}removed, to be rebuilt from the log"


@log.command("archive")
@data_argument
@click.option("--to", "uri", required=True, metavar="URI", help="A path, or s3://bucket/path and the like.")
@click.option("--topic", "topics", multiple=True, metavar="NAME", help="Only this one; may be given several times.")
@json_option
def archive_command(data: Path | None, uri: str, topics: tuple[str, ...], as_json: bool) -> None:
    """Send sealed segments to an archive, as they are.

    What is there already is left alone, so it may be run again and again, also beside a broker. `headrace.read` and
    Spark read the archive, alone or for what retention took.
    """
    # pyarrow comes with an extra, and no other command needs it.
    try:
        from headrace.spark.archive import Entry, archive
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}: pip install 'headrace[arrow]'") from None

    def tell(topic: str, entry: Entry) -> None:
        row: Json = {
            "stream": topic,
            "partition": entry.partition,
            "first_offset": entry.base_offset,
            "next_offset": entry.next_offset,
            "bytes": entry.size,
        }
        click.echo(json.dumps(row) if as_json else row_line(row))

    data = configured(data)
    with about(data):
        done = archive(str(data), uri, topics or None, progress=tell)
    if not as_json:
        sent = f"{count(done.sent, 'segment')} sent, {done.sent_bytes:,} bytes"
        click.echo(f"{sent}; {done.known} were there already" + (f"; {done.gone} went before" if done.gone else ""))
