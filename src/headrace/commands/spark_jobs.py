"""`headrace spark archive`, lag, traffic, dlq, delays, replay, audit: the jobs of spark/jobs. Driver: click, Spark.

People get a table and, where they would rather look, a chart in a file; with --json a program gets one object a line.
How far a job is stands on stderr while somebody looks. Neighbours: spark.py registers them, spark/jobs/ does the work.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.client import DEFAULT_URL, is_loopback_url
from headrace.commands.asking import table
from headrace.redaction import printable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOOK_S = 0.5
GUEST = "guest"


class Job:
    """What every job has: where the log is, a session, how results are shown."""

    def __init__(self, where: Mapping[str, str], *, master: str | None, as_json: bool) -> None:
        self.where = where
        self.as_json = as_json
        self._master = master

    @contextmanager
    def session(self) -> Iterator["SparkSession"]:
        from headrace.spark.java import NoJava
        from headrace.spark.session import session

        settings = {"spark.ui.showConsoleProgress": "false", "spark.sql.session.timeZone": "UTC"}
        try:
            spark = session("headrace", master=self._master, settings=settings)
        except NoJava as error:
            raise click.ClickException(str(error)) from None
        spark.sparkContext.setLogLevel("ERROR")
        try:
            with _watched(spark):
                yield spark
        finally:
            spark.stop()

    def show(self, rows: "DataFrame", *, limit: int | None = None) -> list[Any]:
        """Prints it, and returns all rows."""
        found: list[Any] = rows.collect()
        shown = found if limit is None else found[:limit]
        if self.as_json:
            for row in shown:
                click.echo(json.dumps({name: _plain(value) for name, value in row.asDict(recursive=True).items()}))
        else:
            named = [{name: _plain(value) for name, value in row.asDict(recursive=True).items()} for row in shown]
            table(named, {name: name for name in rows.columns})
            if len(shown) < len(found):
                click.echo(f"and {len(found) - len(shown)} more rows", err=True)
        return found


def on_log(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say where the log is; the command gets a Job."""

    @wraps(command)
    def run(
        url: str, path: str | None, archive_of: str | None, token: str | None, master: str, as_json: bool, **rest: Any
    ) -> None:
        where = {"url": url} if path is None else {"path": path}
        if archive_of is not None:
            where["archive"] = archive_of
        if token is not None:
            where["tokenName"] = token
        elif path is None and is_loopback_url(url) and "HEADRACE_USER" not in os.environ:
            # As every command that asks a broker of this machine. Workers have the environment of this process.
            os.environ.update(HEADRACE_USER=GUEST, HEADRACE_PASSWORD=os.environ.get("HEADRACE_PASSWORD", GUEST))
        from headrace.core_log.errors import HeadraceError

        try:
            command(Job(where, master=master, as_json=as_json), **rest)
        except (HeadraceError, ValueError) as error:
            raise click.ClickException(printable(str(error))) from None

    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object a line."),
        click.option("--master", default="local[*]", show_default=True, help="Spark's master."),
        click.option("--token", help="Name of a login that each machine knows (docs/spark.md); else HEADRACE_USER."),
        click.option("--segments", "archive_of", help="Archive of segments (headrace log archive), for what is gone."),
        click.option("--path", help="Read a data directory instead of asking a broker."),
        click.option(
            "--url", default=DEFAULT_URL, show_default=True, envvar="HEADRACE_URL", help="Broker's HTTP door."
        ),
    ):
        run = option(run)
    return run


def html_option(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help=f"Write {what} into this file.")


_SINCE = click.option("--since", type=click.DateTime(), help="Only what came since then (UTC).")
_UNTIL = click.option("--until", type=click.DateTime(), help="Only what came before then (UTC).")


@click.command("traffic")
@click.argument("topics", nargs=-1, required=True)
@click.option(
    "--by",
    type=click.Choice(["tag", "partition", "key", "size", "silent"]),
    default="tag",
    show_default=True,
    help="By tag and minute, by partition, by key, by size; or keys that fell silent.",
)
@click.option("--bytes", "with_bytes", is_flag=True, help="Also the bytes of their values, which costs more reading.")
@click.option("--silent-minutes", default=60, show_default=True, help="With --by silent: not heard of for so long.")
@click.option("--limit", default=50, show_default=True, help="Rows to show.")
@_SINCE
@_UNTIL
@html_option("a chart of traffic by tag and minute")
@on_log
def traffic(
    job: Job,
    topics: Sequence[str],
    by: Any,
    with_bytes: bool,
    silent_minutes: int,
    limit: int,
    since: datetime | None,
    until: datetime | None,
    html: Path | None,
) -> None:
    """Messages of topics by tag and minute, partition, key or size."""
    from headrace.spark.jobs import chart
    from headrace.spark.jobs.traffic import traffic as run

    if html is not None and by != "tag":
        raise click.UsageError("--html goes with --by tag")
    with job.session() as spark:
        rows = run(
            spark,
            job.where,
            topics,
            by=by,
            with_bytes=with_bytes,
            since=since,
            until=until,
            silent_minutes=silent_minutes,
        )
        found = job.show(rows, limit=limit)
        if html is not None:
            series: dict[str, dict[datetime, float]] = {}
            for row in found:
                points = series.setdefault(row.tag or "(no tag)", {})
                points[row.minute] = points.get(row.minute, 0) + row.messages
            _save(html, f"Traffic of {', '.join(topics)}", [chart.bars(series), chart.table(rows.columns, found)])


@click.command("lag")
@click.argument("group", required=False)
@click.option("--samples", default=1, show_default=True, type=click.IntRange(1), help="Look so often.")
@click.option("--every", default=5.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between two looks.")
@html_option("a chart of lag over time")
@on_log
def lag(job: Job, group: str | None, samples: int, every: float, html: Path | None) -> None:
    """How far consumer groups are behind: records, bytes, seconds."""
    from headrace.spark.jobs import chart
    from headrace.spark.jobs.lag import lag as run

    _needs_broker(job)
    with job.session() as spark, _counted("looks", samples) as count:
        rows = run(spark, job.where, group, samples=samples, every_s=every, sampled=count)
        found = job.show(rows)
        if html is not None:
            series: dict[str, dict[datetime, float]] = {}
            for row in found:
                points = series.setdefault(f"{row.group}: {row.topic}", {})
                points[row.time] = points.get(row.time, 0) + row.lag
            seconds: dict[str, dict[datetime, float]] = {}
            for row in found:
                behind = seconds.setdefault(f"{row.group}: {row.topic}", {})
                behind[row.time] = max(behind.get(row.time, 0.0), row.seconds_behind or 0.0)
            parts = [chart.lines(series, unit="messages"), chart.lines(seconds, unit="seconds")]
            _save(html, "Lag of consumer groups", [*parts, chart.table(rows.columns, found)])


@click.command("dlq")
@click.argument("queue")
@on_log
def dlq(job: Job, queue: str) -> None:
    """Dead letters of a queue by origin, reason and error, with samples and their ids."""
    from headrace.spark.jobs.dlq import dlq as run

    _needs_broker(job)
    with job.session() as spark:
        rows = run(spark, job.where, queue)
        job.show(rows if job.as_json else rows.drop("ids"))


@click.command("delays")
@click.argument("name", required=False)
@html_option("a calendar")
@on_log
def delays(job: Job, name: str | None, html: Path | None) -> None:
    """Pending delayed messages by day and hour."""
    from headrace.spark.jobs import chart
    from headrace.spark.jobs.delays import delays as run

    _needs_broker(job)
    with job.session() as spark:
        rows = run(spark, job.where, name)
        found = job.show(rows)
        if html is not None:
            days: dict[date, float] = {}
            for row in found:
                days[row.date] = days.get(row.date, 0) + row.messages
            _save(html, "Delayed messages by day", [chart.calendar(days), chart.table(rows.columns, found)])


@click.command("archive")
@click.argument("topics", nargs=-1, required=True)
@click.option("--out", required=True, help="Folder or URI of the archive.")
@click.option("--checkpoint", help="Where its progress is kept; beside the archive unless given.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "delta"]),
    default="parquet",
    show_default=True,
    help="Delta needs the package deltalake.",
)
@click.option("--join/--no-join", "joins", default=True, show_default=True, help="Join small files afterwards.")
@click.option("--batch", default=1_000_000, show_default=True, type=click.IntRange(1), help="Records of one batch.")
@on_log
def archive(
    job: Job, topics: Sequence[str], out: str, checkpoint: str | None, kind: Any, joins: bool, batch: int
) -> None:
    """Topics as Parquet (or Delta) by topic, date and hour: what came since the last run, each record once."""
    from pyspark.sql import functions as F

    from headrace.spark.jobs.archive import NoDelta
    from headrace.spark.jobs.archive import archive as run

    try:
        with job.session() as spark:
            rows = run(
                spark, job.where, topics, out, checkpoint=checkpoint, format=kind, joins=joins, offsets_per_batch=batch
            )
            found = rows.groupBy("topic").agg(
                F.count("*").alias("messages"), F.min("timestamp").alias("first"), F.max("timestamp").alias("last")
            )
            job.show(found.orderBy("topic"))
    except NoDelta as error:
        raise click.ClickException(str(error)) from None


@click.command("replay")
@click.argument("topics", nargs=-1)
@click.option("--from-archive", help="Rows of an archive (headrace spark archive) instead of topics.")
@click.option("--from-view", help="Rows of a view, like dead-letters:orders.dlq, instead of topics.")
@click.option("--where", "condition", help='Only rows for which this SQL holds, like "offset >= 100".')
@click.option("--to", required=True, help="Topic, exchange:name or queue:name that gets them.")
@click.option("--job", "job_id", required=True, help="Name under which it counts as done: repeated, it does nothing.")
@click.option("--rate", type=click.IntRange(1), help="Messages a second at most.")
@click.option("--dry-run", is_flag=True, help="Only say what would be replayed.")
@_SINCE
@_UNTIL
@on_log
def replay(
    job: Job,
    topics: Sequence[str],
    from_archive: str | None,
    from_view: str | None,
    condition: str | None,
    to: str,
    job_id: str,
    rate: int | None,
    dry_run: bool,
    since: datetime | None,
    until: datetime | None,
) -> None:
    """Records of topics, an archive or a view once more, into another topic; each once."""
    from headrace.spark.jobs.inputs import read_log, read_view
    from headrace.spark.jobs.replay import replay as run

    if sum((bool(topics), from_archive is not None, from_view is not None)) != 1:
        raise click.UsageError("say what to replay: topics, --from-archive or --from-view")
    if not topics and (since is not None or until is not None):
        raise click.UsageError("--since and --until are for topics: use --where")
    _needs_broker(job)
    with job.session() as spark, _counted("portions", None) as count:
        if from_archive is not None:
            rows = spark.read.parquet(from_archive)
        elif from_view is not None:
            rows = read_view(spark, job.where, from_view)
        else:
            columns = ("topic", "partition", "offset", "timestamp", "key", "value", "headers", "tags")
            rows = read_log(spark, job.where, topics, columns, since=since, until=until)
        if condition is not None:
            rows = rows.where(condition)
        job.show(run(rows, job.where, to, job_id=job_id, rate=rate, dry_run=dry_run, sent=count))


@click.command("audit")
@click.argument("topics", nargs=-1, required=True)
@click.option("--archive", "archived", help="Also compare with this archive (headrace spark archive).")
@click.option("--key", help="Instead: the story of one key through these topics.")
@on_log
def audit(job: Job, topics: Sequence[str], archived: str | None, key: str | None) -> None:
    """Gaps, duplicates and checksums of topics. Exit status 1 when the archive differs."""
    from headrace.spark.jobs.audit import audit as run
    from headrace.spark.jobs.audit import story

    if key is not None and archived is not None:
        raise click.UsageError("--key and --archive are two different questions")
    with job.session() as spark:
        if key is not None:
            job.show(story(spark, job.where, topics, key))
            return
        other = None if archived is None else spark.read.parquet(archived)
        found = job.show(run(spark, job.where, topics, archive=other))
    wrong = ("duplicates", "archive_duplicates", "absent", "differs")
    if any((row.asDict().get(name) or 0) > 0 for row in found for name in wrong):
        sys.exit(1)


# -- showing ----------------------------------------------------------------------------------------------------------


def _needs_broker(job: Job) -> None:
    if "url" not in job.where:
        raise click.UsageError("this asks a broker: give --url, not --path")


def _plain(value: Any) -> Any:
    match value:
        case bytes() | bytearray():
            return bytes(value).decode("utf-8", "backslashreplace")
        case datetime():
            return value.replace(tzinfo=UTC).isoformat() if value.tzinfo is None else value.isoformat()
        case date():
            return value.isoformat()
        case dict():
            return {str(name): _plain(one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case _:
            return value


def _save(path: Path, title: str, parts: Sequence[str]) -> None:
    from headrace.spark.jobs.chart import page

    path.write_text(page(title, parts), encoding="utf-8")
    click.echo(f"written: {path}", err=True)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@contextmanager
def _watched(spark: "SparkSession") -> Iterator[None]:
    """Tasks of Spark's, as they are done, while somebody looks."""
    if not sys.stderr.isatty():
        yield
        return
    ending = threading.Event()
    with _progress() as progress:
        line = progress.add_task("tasks", total=None)

        def follow() -> None:
            tracker = spark.sparkContext.statusTracker()
            while not ending.wait(LOOK_S):
                stages = [tracker.getStageInfo(one) for one in tracker.getActiveStageIds()]
                known = [one for one in stages if one is not None]
                if known:
                    done, total = sum(one.numCompletedTasks for one in known), sum(one.numTasks for one in known)
                    progress.update(line, completed=done, total=total)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()


@contextmanager
def _counted(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Tells how many of them are done, a line each, where somebody looks."""

    def tell(done: int, of: int | None = total) -> None:
        if sys.stderr.isatty() and of is not None and of > 1:
            click.echo(f"{what}: {done} of {of}", err=True)

    yield tell
