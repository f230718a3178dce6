"""The decoder: what the broker's own reader reads, in the columns that were asked for, and no more."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core_log.compaction import compact
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, PRIORITY_SHIFT, Protocol
from headrace.gateways.amqp import properties as amqp
from headrace.gateways.amqp.fields import encode_table
from headrace.gateways.mqtt.properties import Properties, encode_blob
from headrace.spark.access import DataLoss, open_access
from headrace.spark.decode import read
from headrace.spark.fields import FIELDS, KAFKA_COLUMNS, schema
from headrace.spark.plan import Task, plan

from .directories import Written, commit


def tasks_of(written: Written, topic: str = "t", partition: int = 0, **how: Any) -> list[Task]:
    access = open_access(path=written.path)
    ends = access.topic(topic).partitions[partition]
    return plan(access, {(topic, partition): (ends.start, ends.high_watermark)}, **how)


def rows(tasks: list[Task], **how: Any) -> list[dict[str, Any]]:
    return [row for task in tasks for batch in read(task, **how) for row in batch.to_pylist()]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "data")


def brokers_own(log: PartitionLog) -> list[tuple[Any, ...]]:
    found = []
    for batch, first, last in log.runs():
        for record in (batch.record(index) for index in range(first, last)):
            found.append(
                (
                    record.offset,
                    record.key,
                    record.value,
                    record.timestamp_us,
                    list(record.tags),
                    [(name.decode(errors="replace"), value) for name, value in record.headers],
                )
            )
    return found


TAGS = st.lists(st.sampled_from(["eu", "us", "vip", "test"]), unique=True, max_size=3).map(tuple)
HEADERS = st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=20)), max_size=3).map(tuple)


@st.composite
def appends(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 5))
    return {
        "keys": draw(st.lists(st.binary(max_size=10), min_size=count, max_size=count)),
        "values": draw(st.lists(st.binary(max_size=300), min_size=count, max_size=count)),
        "timestamp_us": draw(st.integers(0, 2**50)),
        "tags": draw(TAGS),
        "headers": draw(st.none() | st.lists(HEADERS, min_size=count, max_size=count)),
        "commit": draw(st.booleans()),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(appends(), max_size=12),
    st.sampled_from(["none", "lz4"]),
    st.integers(1, 2000),
    st.integers(1, 4000),
    st.data(),
)
def test_decoder_reads_what_the_brokers_own_reader_reads(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[dict[str, Any]],
    compression: str,
    output_bytes: int,
    task_bytes: int,
    data: st.DataObject,
) -> None:
    written = Written(tmp_path_factory.mktemp("log"))
    (log,) = written.topic(compression=compression, segment_bytes_max=2000)
    for one in drawn:
        log.append(
            one["keys"],
            [b""] * len(one["values"]),
            one["values"],
            timestamp_us=one["timestamp_us"],
            tags=one["tags"],
            headers=one["headers"],
        )
        if one["commit"]:
            written.add(log, b"committed")
    written.add(log, b"last")
    log.note_watermark()
    expected = brokers_own(log)
    how = {"columns": ("offset", "key", "value", "timestamp", "tags", "headers"), "batch_bytes": output_bytes}
    found = rows(tasks_of(written, bytes_each=task_bytes), **how)
    assert [shape(row) for row in found] == expected
    # Tags: the same as whoever looks at each record.
    wanted = rows(tasks_of(written), tags="eu && !test", **how)
    assert [shape(row) for row in wanted] == [one for one in expected if "eu" in one[4] and "test" not in one[4]]
    # Times and offsets.
    low = data.draw(st.integers(0, len(expected)))
    high = data.draw(st.integers(low, len(expected)))
    since = data.draw(st.integers(0, 2**50))
    part = plan(open_access(path=written.path), {("t", 0): (low, high)})
    recent = rows(part, since_us=since, **how)
    assert [shape(row) for row in recent] == [one for one in expected[low:high] if one[3] >= since]
    older = rows(part, until_us=since, **how)
    assert [shape(row) for row in older] == [one for one in expected[low:high] if one[3] < since]


def shape(row: dict[str, Any]) -> tuple[Any, ...]:
    time = row["timestamp"]
    microseconds = round(time.replace(microsecond=0).timestamp()) * 1_000_000 + time.microsecond
    headers = [(pair["key"], pair["value"]) for pair in row["headers"]]
    return row["offset"], row["key"], row["value"], microseconds, row["tags"], headers


@pytest.mark.parametrize("columns", [(name,) for name in FIELDS] + [KAFKA_COLUMNS, ("tags", "offset"), tuple(FIELDS)])
def test_columns_are_those_asked_for_and_of_the_declared_types(written: Written, columns: tuple[str, ...]) -> None:
    (log,) = written.topic()
    written.fill(log, 3, tags=("a",))
    (task,) = tasks_of(written)
    (batch,) = read(task, columns=columns)
    assert batch.schema == schema(columns)
    batch.validate(full=True)
    assert batch.num_rows == 30
    assert batch.to_pylist() == [{name: row[name] for name in columns} for row in rows([task], columns=tuple(FIELDS))]


def test_no_columns_at_all_still_count(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 3)
    assert sum(batch.num_rows for task in tasks_of(written) for batch in read(task, columns=())) == 30


def test_kafkas_columns_hold_what_kafka_readers_expect(written: Written) -> None:
    (log,) = written.topic("orders", partitions=1)
    written.add(log, b"v", keys=[b"key"], timestamp_us=1_700_000_000_000_001, headers=[((b"h", b"\xff"),)])
    log.note_watermark()
    (row,) = rows(tasks_of(written, "orders"), columns=(*KAFKA_COLUMNS, "headers"))
    assert row.pop("timestamp").isoformat() == "2023-11-14T22:13:20.000001+00:00"
    assert row == {
        "key": b"key",
        "value": b"v",
        "topic": "orders",
        "partition": 0,
        "offset": 0,
        "timestampType": 1,
        "headers": [{"key": "h", "value": b"\xff"}],
    }


def test_unknown_columns_and_expressions_are_refused(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 1)
    (task,) = tasks_of(written)
    with pytest.raises(ValueError, match="no column colour"):
        list(read(task, columns=("colour",)))
    with pytest.raises(ValueError, match="twice"):
        list(read(task, columns=("key", "key")))
    with pytest.raises(Exception, match="column 3"):
        list(read(task, tags="a &"))


def test_small_batches_come_out_joined_and_large_ones_as_they_lie(written: Written) -> None:
    (log,) = written.topic(segment_bytes_max=10**7)
    written.fill(log, 100, each=1, size=100)
    (task,) = tasks_of(written)
    assert len(list(read(task))) == 1
    assert len(list(read(task, batch_bytes=1000))) > 5


def test_gap_of_an_unclean_start_is_no_loss(written: Written) -> None:
    (log,) = written.topic(offsets_reserved=100)
    written.fill(log, 2)
    again = Written(written.folder)
    (stream,) = again.directory.streams.values()
    (reopened,) = stream.partitions
    assert reopened.end > 20, "a crash leaves a gap"
    again.fill(reopened, 1)
    found = [row["offset"] for row in rows(tasks_of(again), columns=("offset",))]
    assert found == [*range(20), *range(int(reopened.end) - 10, int(reopened.end))]


def test_e7_gap_of_an_election_by_force_is_data_loss_and_says_so(written: Written) -> None:
    (log,) = written.topic(offsets_reserved=100)
    written.fill(log, 2)
    log.begin_stint(7, 3)
    log.pass_over_lost(120)
    written.fill(log, 1)
    tasks = tasks_of(written)
    lost = "election by force .unclean_election. in epoch 7 lost .* offsets 20 to 119 of partition 0 of 't'"
    with pytest.raises(DataLoss, match=lost):
        rows(tasks, columns=("offset",))
    found = [row["offset"] for row in rows(tasks, columns=("offset",), check_contiguous=False)]
    assert found == [*range(20), *range(120, 130)]
    behind = [replace(task, start=120) for task in tasks if task.end > 120]
    assert [row["offset"] for row in rows(behind, columns=("offset",))] == [*range(120, 130)]


def test_task_whose_slices_do_not_cover_it_is_data_loss(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    (task,) = tasks_of(written)
    assert len(task.slices) > 1
    with pytest.raises(DataLoss, match="are not there"):
        list(read(replace(task, slices=task.slices[1:])))
    with pytest.raises(DataLoss, match="are not there"):
        list(read(replace(task, slices=task.slices[:-1])))


def test_rewritten_segment_is_read_at_its_new_places(written: Written) -> None:
    (log,) = written.topic(cleanup="compact")
    written.fill(log, 50, keys=[b"%d" % number for number in range(10)])
    tasks = tasks_of(written, bytes_each=1)
    expected = rows(tasks, columns=("offset",))
    assert trio.run(compact, written.directory.env, log)
    found = rows(tasks, columns=("offset",))
    assert 0 < len(found) < len(expected)
    assert [row["offset"] for row in found] == [
        record.offset for batch, first, last in log.runs() for record in list(batch.records())[first:last]
    ]
    # Such holes are a loss where nobody compacts.
    with pytest.raises(DataLoss, match="records are gone"):
        rows([replace(task, is_compacted=False) for task in tasks], columns=("offset",))


def test_properties_and_keys_of_the_protocols_are_columns(written: Written) -> None:
    (log,) = written.topic("x", kind="exchange")
    table = encode_table({"a": "text", "n": 5, "t": {"deep": [1, True]}})
    sent = amqp.encode(
        amqp.Properties(content_type="text/plain", headers_bytes=table, message_id="m1", timestamp=1_700_000_000)
    )
    attributes = Protocol.AMQP | PERSISTENT | 7 << PRIORITY_SHIFT
    notes = ((b"x-reason", b"rejected"), (b"attempts", b"1 rejected"))
    written.add(log, b"1", keys=[b"a.b"], properties=[sent], attributes=attributes, headers=[notes])
    blob = encode_blob(Properties(content_type="c", correlation_data=b"\x00", user_properties=(("u", "1"), ("u", "2"))))
    written.add(log, b"2", keys=[b"v1%2E0.b"], properties=[blob], attributes=Protocol.MQTT_5 | 1 << 5 | 1 << 7)
    written.add(log, b"3", keys=[b"plain"])
    log.note_watermark()
    one, two, three = rows(tasks_of(written, "exchange:x"), columns=tuple(FIELDS))
    assert [row["protocol"] for row in (one, two, three)] == ["amqp", "mqtt", "http"]
    assert [row["routing_key"] for row in (one, two, three)] == ["a.b", "v1%2E0.b", None]
    assert (one["priority"], one["persistent"], one["mqtt"], three["amqp"], three["mqtt"]) == (
        7,
        True,
        None,
        None,
        None,
    )
    assert (one["amqp"]["content_type"], one["amqp"]["message_id"]) == ("text/plain", "m1")
    assert one["amqp"]["timestamp"].timestamp() == 1_700_000_000
    assert [(pair["key"], pair["value"]) for pair in one["headers"]] == [
        ("a", b"text"),
        ("n", b"5"),
        ("t", b'{"deep":[1,true]}'),
        ("x-reason", b"rejected"),
    ]
    assert (two["mqtt"]["topic"], two["mqtt"]["qos"], two["mqtt"]["retain"]) == ("v1.0/b", 1, True)
    assert two["mqtt"]["correlation_data"] == b"\x00"
    assert [pair["value"] for pair in two["mqtt"]["user_properties"]] == ["1", "2"]
    assert [pair["value"] for pair in two["headers"]] == [b"1", b"2"]


def test_headers_of_a_task_that_begins_within_a_batch_are_those_of_its_own_records(written: Written) -> None:
    (log,) = written.topic()
    sent = amqp.encode(amqp.Properties(headers_bytes=encode_table({"a": "text"})))
    log.append_columns(
        [b"k"] * 2,
        [b"", sent],
        [b"1", b"2"],
        timestamps=[1, 2],
        expiries=[0, 0],
        attributes=[Protocol.NEUTRAL, Protocol.AMQP],
        origins=[0, 0],
        tags=[(), ()],
    )
    commit(log)
    log.note_watermark()
    (task,) = tasks_of(written)
    (row,) = rows([replace(task, start=1)], columns=("value", "headers"))
    assert row == {"value": b"2", "headers": [{"key": "a", "value": b"text"}]}


def test_reading_needs_neither_trio_nor_pyspark_nor_pandas(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 2, tags=("eu",))
    columns = ["value", "headers", "tag", "tags", "protocol", "persistent", "expiry", "timestamp"]
    program = (
        "import sys, headrace\n"
        "assert 'pyarrow' not in sys.modules\n"
        f"assert headrace.read('t', path={written.path!r}).read_all().num_rows == 20\n"
        f"some = headrace.read('t', path={written.path!r}, columns={columns}, tags='eu', start=5)\n"
        "assert some.read_all().num_rows == 15\n"
        "assert not {'trio', 'pyspark', 'pandas', 'headrace.gateways'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
