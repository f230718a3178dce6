"""From options to offsets: what is there, what is not any more, what never was."""

from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from tests.spark.fake_log import FakeLog

from headrace.spark.access import DataLoss, TopicNotFound
from headrace.spark.options import InvalidOption, source_options
from headrace.spark.source_edges import batch_ranges, initial_offsets
from headrace.spark.stream_offsets import Offsets, TopicOffsets


@pytest.fixture
def log() -> FakeLog:
    log = FakeLog()
    log.add("orders", (10, 100), (0, 50))
    log.add("queue:mail", (0, 5))
    return log


def options(*, streaming: bool = False, **more: str) -> Any:
    given = {"path": "/data", "subscribe": "orders"} | more
    return source_options(
        CaseInsensitiveDict({name: text for name, text in given.items() if text}), streaming=streaming
    )


def ranges(log: FakeLog, **more: str) -> Any:
    return batch_ranges(log, options(**more))[0]


def test_all_of_a_topic(log: FakeLog) -> None:
    assert ranges(log) == {("orders", 0): (10, 100), ("orders", 1): (0, 50)}


def test_name_is_the_one_that_leads_there_whatever_else_there_is(log: FakeLog) -> None:
    assert ranges(log, subscribe="mail") == {("queue:mail", 0): (0, 5)}
    assert ranges(log, subscribe="mail", startingOffsets='{"mail":{"0":2}}') == {("queue:mail", 0): (2, 5)}


def test_pattern_matches_whole_names(log: FakeLog) -> None:
    log.add("orders2", (0, 1))
    assert set(ranges(log, subscribe="", subscribePattern="orders")) == {("orders", 0), ("orders", 1)}
    assert set(ranges(log, subscribe="", subscribePattern="orders.?")) == {("orders", 0), ("orders", 1), ("orders2", 0)}
    assert ranges(log, subscribe="", subscribePattern="nothing") == {}


def test_assigned_partitions_only(log: FakeLog) -> None:
    assert ranges(log, subscribe="", assign='{"orders":[1]}') == {("orders", 1): (0, 50)}
    with pytest.raises(TopicNotFound, match="none of number 7"):
        ranges(log, subscribe="", assign='{"orders":[1,7]}')


def test_topic_that_is_not_there_is_an_error(log: FakeLog) -> None:
    with pytest.raises(TopicNotFound):
        ranges(log, subscribe="order")


def test_minus_2_is_earliest_and_minus_1_is_latest(log: FakeLog) -> None:
    found = ranges(log, startingOffsets='{"orders":{"0":-2,"1":7}}', endingOffsets='{"orders":{"0":20,"1":-1}}')
    assert found == {("orders", 0): (10, 20), ("orders", 1): (7, 50)}


def test_every_partition_must_be_named_and_no_other(log: FakeLog) -> None:
    with pytest.raises(InvalidOption, match=r"must name every partition .*lacks orders-1"):
        ranges(log, startingOffsets='{"orders":{"0":20}}')
    with pytest.raises(InvalidOption, match="names orders-2, which"):
        ranges(log, startingOffsets='{"orders":{"0":20,"1":0,"2":0}}')


def test_start_behind_an_end_is_a_mistake_of_whoever_gave_both(log: FakeLog) -> None:
    with pytest.raises(InvalidOption, match="starts at 30 and ends before, at 20"):
        ranges(log, startingOffsets='{"orders":{"0":30,"1":0}}', endingOffsets='{"orders":{"0":20,"1":0}}')


def test_start_that_retention_took_is_an_error_or_the_first_there_is(log: FakeLog) -> None:
    with pytest.raises(DataLoss, match="says 3 for partition 0 of 'orders', which has offsets 10 to 100"):
        ranges(log, startingOffsets='{"orders":{"0":3,"1":0}}')
    found = ranges(log, startingOffsets='{"orders":{"0":3,"1":0}}', failOnDataLoss="false")
    assert found["orders", 0] == (10, 100)


def test_nobody_reads_above_the_watermark(log: FakeLog) -> None:
    with pytest.raises(DataLoss, match="says 101"):
        ranges(log, endingOffsets='{"orders":{"0":101,"1":50}}')
    assert ranges(log, endingOffsets='{"orders":{"0":101,"1":50}}', failOnDataLoss="false")["orders", 0] == (10, 100)


def test_times_are_the_first_record_at_or_after(log: FakeLog) -> None:
    assert ranges(log, startingTimestamp="20001", endingTimestamp="40000") == {
        ("orders", 0): (21, 40),
        ("orders", 1): (21, 40),
    }


def test_start_after_the_last_record_is_an_error_or_the_end(log: FakeLog) -> None:
    with pytest.raises(InvalidOption, match=r"no record of partition 1 .* at or after the starting time 60000"):
        ranges(log, startingTimestamp="60000")
    found = ranges(log, startingTimestamp="60000", startingOffsetsByTimestampStrategy="latest")
    assert found == {("orders", 0): (60, 100), ("orders", 1): (50, 50)}


def test_end_after_the_last_record_is_the_end(log: FakeLog) -> None:
    assert ranges(log, endingTimestamp="60000") == {("orders", 0): (10, 60), ("orders", 1): (0, 50)}


def test_time_of_each_partition(log: FakeLog) -> None:
    found = ranges(log, startingOffsetsByTimestamp='{"orders":{"0":30000,"1":40000}}')
    assert found == {("orders", 0): (30, 100), ("orders", 1): (40, 50)}
    with pytest.raises(
        InvalidOption, match="'startingOffsetsByTimestamp' must name every partition; it lacks orders-1"
    ):
        ranges(log, startingOffsetsByTimestamp='{"orders":{"0":30000}}')


def test_stream_begins_with_the_ids_of_its_topics(log: FakeLog) -> None:
    found = initial_offsets(log, options(streaming=True))
    assert found == Offsets({"orders": TopicOffsets(log.infos["orders"].id, {0: 100, 1: 50})})


def test_offsets_that_were_kept_are_taken_as_they_are(log: FakeLog) -> None:
    """Even where the topic has grown since: what is not in them is read from its beginning."""
    id = log.infos["orders"].id
    text = f'{{"topics":{{"orders":{{"0":70,"id":"{id}"}}}},"v":1}}'
    assert initial_offsets(log, options(streaming=True, startingOffsets=text)).topics["orders"].next == {0: 70}


def test_batch_from_kept_offsets_notices_that_the_topic_is_another(log: FakeLog) -> None:
    text = f'{{"topics":{{"orders":{{"0":70,"1":0,"id":"{uuid4()}"}}}},"v":1}}'
    with pytest.raises(DataLoss, match="deleted and created again"):
        ranges(log, startingOffsets=text)
