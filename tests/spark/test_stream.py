"""The stream reader as Spark calls it, over a log of which only the ends matter: no JVM, no bytes."""

import json
import pickle
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from tests.spark.fake_log import FakeLog

from headrace.spark import stream
from headrace.spark.access import DataLoss, TopicNotFound
from headrace.spark.options import source_options
from headrace.spark.source import TaskPartition
from headrace.spark.stream import StreamReader, batch_of
from headrace.spark.stream_offsets import Offsets, TopicOffsets

ALL = ReadAllAvailable()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    log = FakeLog()
    log.add("orders", (0, 100), (0, 50))
    monkeypatch.setattr(stream, "opened", lambda where: log)
    return log


def reader(**options: str) -> StreamReader:
    given = {"path": "/data", "subscribe": "orders", "startingOffsets": "earliest"} | options
    found = source_options(CaseInsensitiveDict({name: text for name, text in given.items() if text}), streaming=True)
    return StreamReader(found, ("value",))


def at(log: FakeLog, *next: int, topic: str = "orders") -> dict[str, Any]:
    """The offsets of a query that stands there."""
    return Offsets({topic: TopicOffsets(log.infos[topic].id, dict(enumerate(next)))}).to_json()


def tasks(one: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    found = one.partitions(start, end)
    assert all(isinstance(part, TaskPartition) for part in found)
    pickle.dumps(found)
    return [(part.task.topic, part.task.partition, part.task.start, part.task.end) for part in found]


# -- the first offsets ----------------------------------------------------------------------------------------------


def test_initial_offsets_are_the_same_though_the_log_grows_between_the_two_calls(log: FakeLog) -> None:
    one = reader(startingOffsets="latest")
    with pytest.warns(UserWarning, match="nobody keeps where that is"):
        first = one.initialOffset()
    log.grow("orders", (0, 200), (0, 80))
    assert one.initialOffset() == first == at(log, 100, 50)


@pytest.mark.parametrize("start", ["latest", '{"orders":{"0":-1,"1":0}}'])
def test_start_that_moves_and_that_nobody_keeps_is_warned_about(log: FakeLog, start: str) -> None:
    with pytest.warns(UserWarning, match="cursor"):
        reader(startingOffsets=start).initialOffset()
    with pytest.warns(UserWarning, match="cursor"):
        reader(startingTimestamp="10000").initialOffset()


@pytest.mark.parametrize("start", ["earliest", '{"orders":{"0":7,"1":-2}}'])
def test_start_that_stays_is_not(log: FakeLog, start: str) -> None:
    reader(startingOffsets=start).initialOffset()


def test_batch_that_ends_before_it_starts_is_an_error_whatever_was_said_of_losses(log: FakeLog) -> None:
    """How batch 0 looks after a crash, when `latest` has moved: Spark by itself would read nothing and go on."""
    for loss in ("true", "false"):
        with pytest.raises(DataLoss, match="ends at 100, before its start 200"):
            reader(failOnDataLoss=loss).partitions(at(log, 200, 50), at(log, 100, 50))


@pytest.mark.parametrize("loss", ["true", "false"])
@pytest.mark.parametrize("grown", [100, 130, 200])
def test_first_batch_is_run_again_from_where_it_began_though_nobody_kept_it(
    log: FakeLog, grown: int, loss: str
) -> None:
    """Its end says where that was: `latest` is later by then, before, at or behind the end that was logged."""
    failed, again = (reader(startingOffsets="latest", failOnDataLoss=loss) for _ in range(2))
    with pytest.warns(UserWarning, match="cursor"):
        start = failed.initialOffset()
    log.grow("orders", (0, 130), (0, 50))
    end = failed.latestOffset(start, ALL)
    assert tasks(failed, start, end) == [("orders", 0, 100, 130)]
    log.grow("orders", (0, max(grown, 130)), (0, 60))
    with pytest.warns(UserWarning, match="cursor"):
        moved = again.initialOffset()
    assert moved != start
    assert tasks(again, moved, end) == [("orders", 0, 100, 130)]
    # And then as ever: from the end of the first batch, of which nothing is read again.
    next = again.latestOffset(end, ALL)
    assert next == at(log, max(grown, 130), 60)
    assert ("orders", 1, 50, 60) in tasks(again, end, next)


def test_first_batch_from_earliest_does_not_pass_over_what_retention_took_before_its_second_run(log: FakeLog) -> None:
    failed = reader()
    end = failed.latestOffset(failed.initialOffset(), ALL)
    log.grow("orders", (30, 120), (0, 50))
    again = reader()
    with pytest.raises(DataLoss, match=r"offsets 0 to 99 of partition 0 .* and it has 30 to 119"):
        again.partitions(again.initialOffset(), end)
    again = reader(failOnDataLoss="false")
    assert tasks(again, again.initialOffset(), end) == [("orders", 0, 30, 100), ("orders", 1, 0, 50)]


def test_first_batch_that_was_empty_is_empty_again_and_what_came_since_is_in_the_second(log: FakeLog) -> None:
    failed, again = (reader(startingOffsets="latest") for _ in range(2))
    with pytest.warns(UserWarning, match="cursor"):
        start = failed.initialOffset()
    end = failed.latestOffset(start, ALL)
    log.grow("orders", (0, 103), (0, 50))
    with pytest.warns(UserWarning, match="cursor"):
        assert again.partitions(again.initialOffset(), end) == []
    assert tasks(again, end, again.latestOffset(end, ALL)) == [("orders", 0, 100, 103)]


def test_nothing_new_after_the_first_batch_is_the_same_text_and_no_batch(log: FakeLog) -> None:
    one = reader()
    end = one.latestOffset(one.initialOffset(), ALL)
    assert set(end) == {"began", "topics", "v"}
    assert json.dumps(one.latestOffset(end, ALL)) == json.dumps(end)
    # Of a query over two sources, one may have nothing new.
    assert one.partitions(end, end) == []


def test_end_of_a_first_batch_may_be_given_as_a_start(log: FakeLog) -> None:
    one = reader()
    end = one.latestOffset(one.initialOffset(), ALL)
    assert reader(startingOffsets=json.dumps(end)).initialOffset() == at(log, 100, 50)


def test_first_batch_that_is_run_again_from_a_start_that_stays_is_run(log: FakeLog) -> None:
    one = reader(startingOffsets="earliest")
    assert tasks(one, one.initialOffset(), at(log, 9, 0)) == [("orders", 0, 0, 9)]


def test_first_batch_with_nothing_in_it_is_no_error(log: FakeLog) -> None:
    """Of a query over two topics, one may have nothing new."""
    one = reader(startingOffsets="latest")
    with pytest.warns(UserWarning, match="cursor"):
        start = one.initialOffset()
    assert one.partitions(start, one.latestOffset(start, ALL)) == []


# -- how far a batch goes -------------------------------------------------------------------------------------------


def test_ends_are_the_watermarks(log: FakeLog) -> None:
    assert reader().latestOffset(at(log, 0, 0), ALL) == at(log, 100, 50)


def test_nothing_new_is_the_same_text(log: FakeLog) -> None:
    start = at(log, 100, 50)
    assert json.dumps(reader().latestOffset(start, ALL)) == json.dumps(start)


def test_limit_of_rows_is_dealt_out(log: FakeLog) -> None:
    one = reader(maxOffsetsPerTrigger="30")
    assert one.getDefaultReadLimit() == ReadMaxRows(30)
    assert one.latestOffset(at(log, 0, 0), ReadMaxRows(30)) == at(log, 20, 10)
    assert one.latestOffset(at(log, 99, 0), ReadMaxRows(2)) == at(log, 100, 1)


def test_limit_of_bytes_is_dealt_out(log: FakeLog) -> None:
    one = reader(maxBytesPerTrigger="3000")
    assert one.getDefaultReadLimit() == ReadMaxBytes(3000)
    assert one.latestOffset(at(log, 0, 0), ReadMaxBytes(3000)) == at(log, 20, 10)


def test_both_limits_hold(log: FakeLog) -> None:
    one = reader(maxBytesPerTrigger="1500", maxOffsetsPerTrigger="30")
    assert one.latestOffset(at(log, 0, 0), one.getDefaultReadLimit()) == at(log, 10, 5)
    one = reader(maxBytesPerTrigger="3000", maxOffsetsPerTrigger="15")
    assert one.latestOffset(at(log, 0, 0), one.getDefaultReadLimit()) == at(log, 10, 5)


def test_trigger_that_wants_all_gets_all(log: FakeLog) -> None:
    assert reader(maxOffsetsPerTrigger="30", minOffsetsPerTrigger="5").latestOffset(at(log, 0, 0), ALL) == at(
        log, 100, 50
    )


def test_batch_waits_for_enough_records_but_not_for_ever(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(stream.time, "monotonic", lambda: now[0])
    one = reader(minOffsetsPerTrigger="100", maxTriggerDelay="60s")
    assert one.getDefaultReadLimit() == ReadMinRows(100)
    # The first batch waits for nobody.
    assert one.latestOffset(at(log, 90, 50), ReadMinRows(100)) == at(log, 100, 50)
    log.grow("orders", (0, 150), (0, 50))
    now[0] += 59
    assert one.latestOffset(at(log, 100, 50), ReadMinRows(100)) == at(log, 100, 50)
    log.grow("orders", (0, 150), (0, 100))
    assert one.latestOffset(at(log, 100, 50), ReadMinRows(100)) == at(log, 150, 100)
    log.grow("orders", (0, 151), (0, 100))
    assert one.latestOffset(at(log, 150, 100), ReadMinRows(100)) == at(log, 150, 100)
    now[0] += 60
    assert one.latestOffset(at(log, 150, 100), ReadMinRows(100)) == at(log, 151, 100)


def test_run_over_what_is_there_stops_at_what_was_there(log: FakeLog) -> None:
    one = reader(maxOffsetsPerTrigger="100", minOffsetsPerTrigger="90")
    one.prepareForTriggerAvailableNow()
    log.grow("orders", (0, 1000), (0, 1000), (0, 1000))
    place, batches = at(log, 0, 0), []
    while (next := one.latestOffset(place, one.getDefaultReadLimit())) != place:
        place = next
        batches.append(next)
    assert place == at(log, 100, 50)
    assert len(batches) == 2


def test_run_over_what_is_there_ends_at_once_where_nothing_is(log: FakeLog) -> None:
    one = reader(subscribe="", subscribePattern="new.*")
    one.prepareForTriggerAvailableNow()
    log.add("new", (0, 5))
    assert one.latestOffset(Offsets().to_json(), ALL) == Offsets().to_json()


def test_progress_is_reported_against_the_newest(log: FakeLog) -> None:
    assert reader(maxOffsetsPerTrigger="1").reportLatestOffset() == at(log, 100, 50)


# -- what changes underneath ----------------------------------------------------------------------------------------


def test_partition_that_was_added_is_read_from_its_beginning(log: FakeLog) -> None:
    one = reader()
    start = at(log, 100, 50)
    log.grow("orders", (0, 100), (0, 50), (0, 7), (0, 0))
    end = one.latestOffset(start, ALL)
    assert end == at(log, 100, 50, 7)
    assert tasks(one, start, end) == [("orders", 2, 0, 7)]


def test_topic_that_a_pattern_finds_later_is_read_from_its_beginning(log: FakeLog) -> None:
    one = reader(subscribe="", subscribePattern="ord.*")
    start = at(log, 100, 50)
    log.add("ordinary", (0, 3))
    assert tasks(one, start, one.latestOffset(start, ALL)) == [("ordinary", 0, 0, 3)]


def test_topic_that_was_created_again_is_an_error(log: FakeLog) -> None:
    start = at(log, 10, 10)
    log.add("orders", (0, 500), (0, 500))
    with pytest.raises(DataLoss, match="deleted and created again"):
        reader().latestOffset(start, ALL)


def test_topic_that_was_created_again_is_read_anew_where_losses_are_allowed(log: FakeLog) -> None:
    start = at(log, 10, 10)
    log.add("orders", (0, 5), (0, 6))
    one = reader(failOnDataLoss="false")
    end = one.latestOffset(start, ALL)
    assert end == at(log, 5, 6)
    assert tasks(one, start, end) == [("orders", 0, 0, 5), ("orders", 1, 0, 6)]


def test_batch_of_a_topic_that_is_another_now_is_an_error_or_nothing(log: FakeLog) -> None:
    start, end = at(log, 0, 0), at(log, 10, 10)
    log.add("orders", (0, 500), (0, 500))
    with pytest.raises(DataLoss, match="gone with it"):
        reader().partitions(start, end)
    assert reader(failOnDataLoss="false").partitions(start, end) == []


def test_topic_that_is_gone_is_an_error_or_no_news(log: FakeLog) -> None:
    start = at(log, 10, 10)
    del log.infos["orders"]
    with pytest.raises(TopicNotFound):
        reader().latestOffset(start, ALL)
    one = reader(failOnDataLoss="false")
    assert one.latestOffset(start, ALL) == Offsets().to_json()
    assert one.reportLatestOffset() is None


def test_retention_that_overtakes_is_an_error_or_a_gap(log: FakeLog) -> None:
    start = at(log, 10, 10)
    log.grow("orders", (30, 100), (0, 50))
    with pytest.raises(DataLoss, match="has offsets 30 to 99, and this query would go on at 10"):
        reader().latestOffset(start, ALL)
    one = reader(failOnDataLoss="false", maxBytesPerTrigger="100000")
    end = one.latestOffset(start, ReadMaxBytes(100000))
    assert tasks(one, start, end) == [("orders", 0, 30, 100), ("orders", 1, 10, 50)]


def test_retention_that_overtakes_between_the_end_and_the_plan(log: FakeLog) -> None:
    start, end = at(log, 10, 10), at(log, 100, 50)
    log.grow("orders", (30, 100), (50, 50))
    with pytest.raises(DataLoss, match=r"offsets 10 to 99 of partition 0 .* were to be read, and it has 30 to 99"):
        reader().partitions(start, end)
    assert tasks(reader(failOnDataLoss="false"), start, end) == [("orders", 0, 30, 100)]


def test_log_that_ends_before_the_query_stands_is_an_error_and_never_read_backwards(log: FakeLog) -> None:
    start = at(log, 90, 50)
    log.grow("orders", (0, 80), (0, 50))
    with pytest.raises(DataLoss, match="would go on at 90"):
        reader().latestOffset(start, ALL)
    assert reader(failOnDataLoss="false").latestOffset(start, ALL) == start


def test_subscription_that_leads_elsewhere_is_an_error(log: FakeLog) -> None:
    log.add("mail", (0, 5))
    with pytest.raises(DataLoss, match="leads there no more"):
        reader(subscribe="mail").latestOffset(at(log, 10, 10), ALL)


# -- a batch --------------------------------------------------------------------------------------------------------


def test_batch_is_exactly_what_lies_between(log: FakeLog) -> None:
    assert tasks(reader(), at(log, 10, 50), at(log, 30, 50)) == [("orders", 0, 10, 30)]
    assert reader().partitions(at(log, 10, 50), at(log, 10, 50)) == []


def test_tasks_are_cut(log: FakeLog) -> None:
    found = tasks(reader(minPartitions="4"), at(log, 0, 50), at(log, 100, 50))
    assert len(found) >= 4
    assert sum(end - start for _, _, start, end in found) == 100
    assert all(
        end - start <= 7
        for _, _, start, end in tasks(reader(maxRecordsPerPartition="7"), at(log, 0, 0), at(log, 90, 9))
    )


def test_partition_that_spark_makes_of_nothing_reads_nothing(log: FakeLog) -> None:
    from pyspark.sql.datasource import InputPartition

    assert list(reader().read(InputPartition(None))) == []


def test_reader_travels_to_executors(log: FakeLog) -> None:
    pickle.loads(pickle.dumps(reader(cursor="", tags="eu")))  # noqa: S301


def test_nothing_lies_between_two_equal_places() -> None:
    place = Offsets({"a": TopicOffsets(uuid4(), {0: 7})})
    assert batch_of(place, place) == {}
    assert batch_of(Offsets(), place) == {("a", 0): (0, 7)}
