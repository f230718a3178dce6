"""Option strings: Kafka's names and rules, and a clear word for everything else."""

import re
from uuid import uuid4

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from headrace.spark.options import (
    EARLIEST,
    LATEST,
    Everywhere,
    Given,
    InvalidOption,
    Kept,
    Partitions,
    Pattern,
    Since,
    SourceOptions,
    Topics,
    source_options,
)
from headrace.spark.stream_offsets import Offsets, TopicOffsets


def read(*, streaming: bool = False, **options: str) -> SourceOptions:
    given = {"path": "/data", "subscribe": "orders"} | {name.replace("__", "."): text for name, text in options.items()}
    return source_options(
        CaseInsensitiveDict({name: text for name, text in given.items() if text}), streaming=streaming
    )


def refused(*, streaming: bool = False, **options: str) -> str:
    with pytest.raises(InvalidOption) as told:
        read(streaming=streaming, **options)
    return str(told.value)


def test_batch_reads_from_earliest_to_latest_unless_told() -> None:
    found = read()
    assert (found.start, found.end) == (Everywhere(EARLIEST), Everywhere(LATEST))
    assert found.fail_on_data_loss


def test_stream_starts_at_latest_unless_told() -> None:
    assert read(streaming=True).start == Everywhere(LATEST)


def test_names_are_found_however_they_are_written() -> None:
    assert read(STARTINGOFFSETS="earliest", FailOnDataLoss="FALSE").fail_on_data_loss is False


@pytest.mark.parametrize(
    ("name", "meant"),
    [("startingOffset", "startingOffsets"), ("maxOffsetPerTrigger", "maxOffsetsPerTrigger"), ("tag", "tags")],
)
def test_unknown_option_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    assert refused(**{name: "1"}) == f"unknown option {name.lower()!r}: did you mean {meant!r}?"


def test_option_like_no_other_is_refused_with_all_there_are() -> None:
    assert "there are access, archive, assign" in refused(zzzzzz="1")


@pytest.mark.parametrize(
    ("name", "hint"), [("kafka__bootstrap__servers", "'url'"), ("token", "'tokenName'"), ("password", "'tokenName'")]
)
def test_what_other_sources_want_is_told_what_to_write_here(name: str, hint: str) -> None:
    assert hint in refused(**{name: "x"})


def test_secret_in_an_address_is_refused_and_not_repeated() -> None:
    told = refused(url="http://ann:hunter2@broker:15672")
    assert "tokenName" in told
    assert "hunter2" not in told


def test_exactly_one_subscription() -> None:
    assert "none is" in refused(subscribe="")
    assert "subscribe and assign are" in refused(assign='{"orders":[0]}')


def test_subscriptions() -> None:
    assert read(subscribe=" a, b ,a").subscription == Topics(("a", "b"))
    assert read(subscribe="", subscribePattern="ord.*").subscription == Pattern("ord.*")
    assert read(subscribe="", assign='{"a":[1,0,1]}').subscription == Partitions({"a": (0, 1)})


@pytest.mark.parametrize("text", ["{", "[]", '{"a":0}', '{"a":[]}', '{"a":["0"]}', '{"a":[-1]}', '{"a":[true]}', "{}"])
def test_assignment_that_is_none_is_refused(text: str) -> None:
    assert "'assign' is partitions by topic" in refused(subscribe="", assign=text)


def test_pattern_that_is_none_is_refused() -> None:
    assert "no regular expression" in refused(subscribe="", subscribePattern="(")


def test_offsets_by_partition() -> None:
    found = read(startingOffsets='{"a":{"0":23,"1":-2}}', endingOffsets='{"a":{"0":50,"1":-1}}')
    assert found.start == Given({("a", 0): 23, ("a", 1): EARLIEST})
    assert found.end == Given({("a", 0): 50, ("a", 1): LATEST})


def test_offsets_of_a_progress_report_can_be_given_as_a_start() -> None:
    id = uuid4()
    found = read(startingOffsets=f'{{"topics":{{"a":{{"0":7,"id":"{id}"}}}},"v":1}}')
    assert found.start == Kept(Offsets({"a": TopicOffsets(id, {0: 7})}))
    assert "version 1 were expected" in refused(startingOffsets='{"topics":{},"v":2}')


@pytest.mark.parametrize(
    "text", ["", "newest", "{}", '{"a":{}}', '{"a":{"0":-3}}', '{"a":{"x":1}}', '{"a":{"0":1.5}}', '{"a":7}', "7"]
)
def test_offsets_that_are_none_are_refused(text: str) -> None:
    if text:
        assert "'startingOffsets' is earliest, latest, or offsets" in refused(startingOffsets=text)


def test_batch_may_not_start_at_latest_nor_end_at_earliest() -> None:
    for text in ("latest", '{"a":{"0":-1}}'):
        assert "cannot start at latest" in refused(startingOffsets=text)
        read(startingOffsets=text, streaming=True)
    for text in ("earliest", '{"a":{"0":-2}}'):
        assert "cannot end at earliest" in refused(endingOffsets=text)


def test_times_are_milliseconds_and_come_before_offsets() -> None:
    both = {"startingOffsetsByTimestamp": '{"a":{"0":5}}', "startingOffsets": "earliest"}
    assert read(**both).start == Since(None, {("a", 0): 5000})
    assert read(startingTimestamp="7", **both).start == Since(7000, {})
    assert read(endingTimestamp="9", endingOffsetsByTimestamp='{"a":{"0":5}}').end == Since(9000, {})
    assert read(startingOffsetsByTimestampStrategy="latest").no_match_is_latest
    assert "milliseconds since 1970" in refused(startingTimestamp="2024-01-01")


def test_options_of_the_other_kind_are_refused() -> None:
    assert "batch reads only" in refused(streaming=True, endingOffsets="latest")
    assert "streams only" in refused(maxOffsetsPerTrigger="10")


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "٣"])
def test_counts_are_whole_numbers_from_1_on(text: str) -> None:
    for name in ("minPartitions", "maxRecordsPerPartition"):
        assert "a whole number from 1 on" in refused(**{name: text})


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("500", 500), ("30s", 30_000), ("15m", 900_000), ("2min", 120_000), ("1h", 3_600_000)]
)
def test_durations_are_written_as_sparks_are(text: str, milliseconds: int) -> None:
    assert read(streaming=True, maxTriggerDelay=text).max_trigger_delay_ms == milliseconds


def test_duration_that_is_none_is_refused() -> None:
    assert "a duration like" in refused(streaming=True, maxTriggerDelay="soon")


def test_tag_expression_is_checked_before_anything_is_read() -> None:
    assert read(tags="eu && !test").tags is not None
    assert re.search(r"'tags': .*column \d", refused(tags="eu &&"))


def test_what_cannot_be_together_is_refused() -> None:
    assert "'url'" in refused(streaming=True, cursor="job")
    assert "no batch could be both" in refused(streaming=True, minOffsetsPerTrigger="9", maxOffsetsPerTrigger="8")
    assert "'columns' has no headers" in refused(includeHeaders="true", columns="value")
    assert "needs 'url'" in refused(access="http")
    assert "one of auto, local, http, archive" in refused(access="ftp")
    assert "where to read from" in refused(path="")
