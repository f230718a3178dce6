"""The jobs on a small log: what they count is what was published, and what they write is there once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pika
import pytest
from click.testing import CliRunner

from headrace.commands import spark_jobs
from headrace.spark.jobs.archive import NoDelta, archive, deltalake
from headrace.spark.jobs.audit import audit, story
from headrace.spark.jobs.delays import delays
from headrace.spark.jobs.dlq import dlq
from headrace.spark.jobs.inputs import read_log
from headrace.spark.jobs.lag import lag
from headrace.spark.jobs.replay import replay
from headrace.spark.jobs.traffic import traffic
from headrace.testing import EmbeddedBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 120
NOTEBOOK = Path(__file__).parents[2] / "docs" / "spark-notebook.ipynb"


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(doors=("amqp", "http")) as broker:
        with httpx.Client(base_url=broker.http_url(""), auth=("guest", "guest"), timeout=30) as http:
            http.post("/api/v1/topics", json={"name": "orders", "partitions": 2}).raise_for_status()
            http.post("/api/v1/topics", json={"name": "again", "partitions": 1}).raise_for_status()
            http.post("/api/v1/topics", json={"name": "grows", "partitions": 1}).raise_for_status()
            http.post("/api/v1/topics", json={"name": "lake", "partitions": 1}).raise_for_status()
            messages = [
                {
                    "value": f"order {n}",
                    "key": f"k{n % 10}",
                    "partition": n % 2,
                    "tags": ["eu", "vip"] if n % 10 == 0 else ["us"] if n % 2 else [],
                    "headers": {"n": str(n)},
                }
                for n in range(COUNT)
            ]
            http.post("/api/v1/topics/orders/messages", json=messages).raise_for_status()
            offsets = {"offsets": [{"topic": "orders", "partition": 0, "offset": 20}]}
            http.post("/api/v1/consumer-groups/workers/offsets", json=offsets).raise_for_status()
            later = [{"value": "x", "deliver_at": f"2031-05-0{day}T10:30:00Z"} for day in (1, 1, 2)]
            http.post("/api/v1/topics/again/messages", json=later).raise_for_status()
        yield broker


@pytest.fixture(scope="module")
def where(broker: EmbeddedBroker) -> dict[str, str]:
    return {"url": broker.http_url("").rstrip("/"), "tokenName": "test"}


@pytest.fixture
def http(broker: EmbeddedBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url(""), auth=("guest", "guest"), timeout=30) as client:
        yield client


def test_traffic_counts_by_tag_partition_key_and_size(spark: "SparkSession", where: dict[str, str]) -> None:
    by_tag: dict[str | None, int] = {}
    for row in traffic(spark, where, ["orders"], with_bytes=True).collect():
        by_tag[row.tag] = by_tag.get(row.tag, 0) + row.messages
    assert by_tag == {"eu": 12, "vip": 12, "us": 60, None: 48}
    partitions = traffic(spark, where, ["orders"], by="partition").collect()
    assert [(row.partition, row.messages, row.share) for row in sorted(partitions)] == [(0, 60, 0.5), (1, 60, 0.5)]
    keys = traffic(spark, where, ["orders"], by="key").collect()
    assert {(bytes(row.key), row.messages) for row in keys} == {(b"k%d" % n, 12) for n in range(10)}
    sizes = traffic(spark, where, ["orders"], by="size").collect()
    assert [(row.bytes_from, row.messages) for row in sizes] == [(4, 10), (8, 110)]
    assert traffic(spark, where, ["orders"], by="silent").count() == 0


def test_lag_has_records_bytes_and_seconds(spark: "SparkSession", where: dict[str, str]) -> None:
    rows = {row.partition: row for row in lag(spark, where, "workers", samples=2, every_s=0.1).collect()}
    assert (rows[0].committed, rows[0].end_offset, rows[0].lag) == (20, 60, 40)
    assert rows[0].lag_bytes > 0
    assert rows[0].seconds_behind > 0


def test_dead_letters_are_grouped_by_their_error(
    spark: "SparkSession", where: dict[str, str], broker: EmbeddedBroker
) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.amqp_url())) as connection:
        channel = connection.channel()
        channel.queue_declare("dead", durable=True)
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        channel.queue_declare("work", durable=True, arguments=arguments)
        channel.confirm_delivery()
        for number in range(6):
            error = f"no customer {number}" if number % 3 else f"timeout after 0x{number:x} ms"
            properties = pika.BasicProperties(headers={"error": error})
            channel.basic_publish("", "work", b"%d" % number, properties)
        for _ in range(6):
            method, _, _ = channel.basic_get("work")
            assert method is not None
            channel.basic_reject(method.delivery_tag, requeue=False)
        while channel.queue_declare("dead", passive=True).method.message_count < 6:
            connection.process_data_events(0.05)
    found = dlq(spark, where, "dead").collect()
    assert [(row.fingerprint, row.messages, row.reason, row.died_in) for row in found] == [
        ("no customer #", 4, "rejected", "work"),
        ("timeout after # ms", 2, "rejected", "work"),
    ]
    assert len(found[0].ids) == 4
    assert set(found[1].samples) == {"0", "3"}


def test_delays_are_counted_by_day_and_hour(spark: "SparkSession", where: dict[str, str]) -> None:
    found = delays(spark, where).collect()
    assert [(str(row.date), row.hour, row.messages) for row in found] == [("2031-05-01", 10, 2), ("2031-05-02", 10, 1)]


def test_replay_is_there_once_with_its_origin_and_a_dry_run_writes_nothing(
    spark: "SparkSession", where: dict[str, str]
) -> None:
    columns = ("topic", "partition", "offset", "key", "value", "headers", "tags")
    rows = read_log(spark, where, ["orders"], columns).where("offset < 10")
    would = replay(rows, where, "again", job_id="again", dry_run=True).collect()
    assert [(row.partition, row.messages) for row in would] == [(0, 10), (1, 10)]
    portions: list[tuple[int, int]] = []
    for _ in range(2):
        replay(rows, where, "again", job_id="again", rate=12, sent=lambda *told: portions.append(told))
    assert portions == [(1, 2), (2, 2)] * 2
    found = read_log(spark, where, ["again"], ("value", "headers", "tags")).collect()
    origins = set()
    for row in found:
        headers = {one.key: bytes(one.value).decode() for one in row.headers}
        assert bytes(row.value) == f"order {headers['n']}".encode()
        origins.add((headers["x-origin-stream"], headers["x-origin-partition"], headers["x-origin-offset"]))
    assert len(found) == 20
    assert origins == {("orders", str(partition), str(offset)) for partition in (0, 1) for offset in range(10)}


def test_archive_has_each_record_once_over_a_crash_and_is_what_the_log_is(
    spark: "SparkSession", where: dict[str, str], http: httpx.Client, tmp_path: Path
) -> None:
    out = tmp_path / "archive"

    def publish(count: int) -> None:
        messages = [{"value": f"{n}", "key": "k"} for n in range(count)]
        http.post("/api/v1/topics/grows/messages", json=messages).raise_for_status()

    def run(**more: Any) -> int:
        return archive(spark, where, ["grows"], str(out), offsets_per_batch=25, **more).count()

    assert run() == 0
    publish(60)
    assert run(joins=False) == 60
    # A driver that died while the last batch was written: some files are there, and nobody says that it is done.
    last = max(int(one.name) for one in (out / "_batches").iterdir())
    (out / "_batches" / f"{last:020d}").unlink()
    for one in (out / "_checkpoint" / "commits").glob(f"*{last}*"):
        one.unlink()
    publish(30)
    assert run(joins=False) == 90
    files = [one for one in out.rglob("*.parquet") if "_" not in str(one.relative_to(out))[0]]
    assert len(files) >= 4
    joined = archive(spark, where, ["grows"], str(out))
    assert joined.count() == 90
    assert len([one for one in out.rglob("*.parquet") if not str(one.relative_to(out)).startswith("_")]) == 1
    (row,) = audit(spark, where, ["grows"], archive=joined).collect()
    assert (row.first, row.last, row.messages, row.missing, row.duplicates) == (0, 89, 90, 0, 0)
    assert (row.archived, row.archive_duplicates, row.absent, row.differs) == (90, 0, 0, 0)
    lacking = joined.where("offset <> 5").union(joined.where("offset = 7")).withColumn("value", joined["value"])
    (row,) = audit(spark, where, ["grows"], archive=lacking).collect()
    assert (row.absent, row.archive_duplicates) == (1, 1)


def test_join_that_was_interrupted_is_finished(tmp_path: Path, spark: "SparkSession") -> None:
    from pyspark.sql.types import StructType

    from headrace.spark.jobs.archive import _Parquet

    writer = _Parquet(spark, str(tmp_path), StructType())
    folder = tmp_path / "topic=t" / "date=2026-01-01" / "hour=0"
    folder.mkdir(parents=True)
    (tmp_path / "_aside").mkdir()
    (tmp_path / "_joins").mkdir()
    old = [folder / "1-0.parquet", folder / "2-0.parquet"]
    for one in (*old, tmp_path / "_aside" / "new.parquet"):
        one.write_bytes(b"")
    place = folder / "joined2-new.parquet"
    note = {"made": str(tmp_path / "_aside" / "new.parquet"), "place": str(place), "old": [str(one) for one in old]}
    (tmp_path / "_joins" / "new.json").write_text(json.dumps(note))
    old[0].unlink()
    writer.recover()
    writer.recover()
    assert [one.name for one in folder.iterdir()] == [place.name]


def test_delta_has_each_record_once_over_a_crash(
    spark: "SparkSession", where: dict[str, str], http: httpx.Client, tmp_path: Path
) -> None:
    pytest.importorskip("deltalake")
    out = tmp_path / "lake"

    def run(count: int) -> list[tuple[int, bytes]]:
        messages = [{"value": f"{n}", "key": "k"} for n in range(count)]
        http.post("/api/v1/topics/lake/messages", json=messages).raise_for_status()
        rows = archive(spark, where, ["lake"], str(out), format="delta", offsets_per_batch=25)
        return sorted((row.offset, bytes(row.value)) for row in rows.collect())

    assert run(60) == [(offset, b"%d" % offset) for offset in range(60)]
    # A driver that died before Spark noted the last batch, which stands in the table: it is run again.
    commits = out / "_checkpoint" / "commits"
    last = max(int(one.name) for one in commits.iterdir() if one.name.isdigit())
    for one in commits.glob(f"*{last}*"):
        one.unlink()
    assert run(30) == [(offset, b"%d" % (offset % 60)) for offset in range(90)]


def test_delta_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(NoDelta, match="pip install deltalake"):
        deltalake()


def test_story_of_a_key_is_told_in_order(spark: "SparkSession", where: dict[str, str]) -> None:
    found = story(spark, where, ["orders"], "k3").collect()
    assert [bytes(row.value) for row in found] == [b"order %d" % n for n in range(3, COUNT, 10)]


@pytest.fixture
def command(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> Iterator[CliRunner]:
    """Commands in the session of the tests, which goes on afterwards."""

    @contextmanager
    def session(job: spark_jobs.Job) -> "Iterator[SparkSession]":
        yield spark

    monkeypatch.setattr(spark_jobs.Job, "session", session)
    yield CliRunner()


def test_commands_show_rows_and_write_charts(
    command: CliRunner, where: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_USER", "guest")
    place = ["--url", where["url"], "--token", "test"]
    chart = tmp_path / "traffic.html"
    done = command.invoke(spark_jobs.traffic, ["orders", *place, "--json", "--html", str(chart)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(row["messages"] for row in rows if row["tag"] == "us") == 60
    assert "us: 60 messages" in chart.read_text() or chart.read_text().count("us:") > 1
    calendar = tmp_path / "calendar.html"
    done = command.invoke(spark_jobs.delays, [*place, "--html", str(calendar)])
    assert done.exit_code == 0, done.output
    assert "2031-05-01: 2 messages" in calendar.read_text()
    refused = command.invoke(spark_jobs.lag, ["--path", "/nowhere"])
    assert (refused.exit_code, "asks a broker" in refused.output) == (2, True)


def test_notebook_runs(spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    try:
        for source in code:
            exec(compile(source, NOTEBOOK.name, "exec"), names)
        assert names["by_tag"] == {"eu": 20, "us": 40}
        assert names["repeated"] == names["alerts"] == 20
        assert (tmp_path / "traffic.html").is_file()
    finally:
        if "broker" in names:
            names["broker"].__exit__(None, None, None)
