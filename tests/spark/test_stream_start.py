"""Where a stream began, kept beside its checkpoint: decided once, then the same for ever."""

from pathlib import Path
from typing import Any

import pytest
from tests.spark.fake_log import FakeLog

from headrace.spark import stream_start
from headrace.spark.options import InvalidOption
from headrace.spark.stream_offsets import InvalidOffsets, Offsets
from headrace.spark.stream_start import stream_topic


class Session:
    """What stream_topic asks of a session of Spark: it remembers the options."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}

    @property
    def readStream(self) -> "Session":
        self.given = {}
        return self

    def format(self, name: str) -> "Session":
        assert name == "headrace"
        return self

    def options(self, **options: str) -> "Session":
        self.given |= options
        return self

    def option(self, name: str, value: str) -> "Session":
        self.given[name] = value
        return self

    def load(self) -> dict[str, str]:
        return self.given


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    log = FakeLog()
    log.add("orders", (0, 100))
    log.add("mail", (0, 7))
    monkeypatch.setattr(stream_start, "opened", lambda where: log)
    return log


def start(checkpoint: Path, topics: Any = "orders", **options: str) -> str:
    found: Any = stream_topic(Session(), topics, path="/data", checkpoint=checkpoint, options=options)  # type: ignore[arg-type]
    return str(found["startingOffsets"])


def next_of(text: str) -> dict[str, dict[int, int]]:
    import json

    return {name: dict(topic.next) for name, topic in Offsets.from_json(json.loads(text)).topics.items()}


def test_latest_is_the_latest_of_the_first_time(log: FakeLog, tmp_path: Path) -> None:
    first = start(tmp_path / "checkpoint")
    assert next_of(first) == {"orders": {0: 100}}
    log.grow("orders", (0, 500))
    assert start(tmp_path / "checkpoint") == first
    assert next_of(start(tmp_path / "another")) == {"orders": {0: 500}}


def test_topic_keeps_its_id(log: FakeLog, tmp_path: Path) -> None:
    """So that one created again under its name is noticed."""
    first = start(tmp_path)
    log.add("orders", (0, 500))
    assert start(tmp_path) == first


def test_two_streams_of_a_query_have_a_start_each(log: FakeLog, tmp_path: Path) -> None:
    assert next_of(start(tmp_path)) == {"orders": {0: 100}}
    assert next_of(start(tmp_path, "mail")) == {"mail": {0: 7}}
    assert next_of(start(tmp_path, ["orders", "mail"])) == {"mail": {0: 7}, "orders": {0: 100}}


def test_starting_options_say_where_the_first_one_is(log: FakeLog, tmp_path: Path) -> None:
    assert next_of(start(tmp_path / "a", startingTimestamp="5000")) == {"orders": {0: 5}}
    assert next_of(start(tmp_path / "b", STARTINGOFFSETS="earliest")) == {"orders": {0: 0}}
    # They do not reach the source, for which they would be a second start.
    session = Session()
    stream_topic(
        session, "orders", path="/data", checkpoint=tmp_path / "a", options={"startingTimestamp": "5000", "tags": "eu"}
    )  # type: ignore[arg-type]
    assert set(session.given) == {"subscribe", "path", "startingOffsets", "tags"}


def test_checkpoint_may_be_a_uri_of_a_file(log: FakeLog, tmp_path: Path) -> None:
    first: Any = stream_topic(Session(), "orders", path="/data", checkpoint=f"file://{tmp_path}/with%20space")  # type: ignore[arg-type]
    assert (tmp_path / "with space" / "headrace").is_dir()
    log.grow("orders", (0, 500))
    assert start(tmp_path / "with space") == first["startingOffsets"]


def test_who_comes_second_takes_what_the_first_has_written(log: FakeLog, tmp_path: Path) -> None:
    place = stream_start._Local(tmp_path / "headrace" / "start.json")
    place.create("first")
    place.create("second")
    assert place.read() == "first"
    assert [path.name for path in (tmp_path / "headrace").iterdir()] == ["start.json"]


def test_file_that_holds_something_else_is_an_error(log: FakeLog, tmp_path: Path) -> None:
    start(tmp_path)
    (kept,) = (tmp_path / "headrace").iterdir()
    kept.write_text("{}")
    with pytest.raises(InvalidOffsets, match=r"start-.*\.json does not hold where the query began"):
        start(tmp_path)


def test_what_cannot_be_together_is_refused(log: FakeLog, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="take one of them"):
        start(tmp_path, cursor="job", url="http://x")
    with pytest.raises(InvalidOption, match="'subscribe' is given twice"):
        start(tmp_path, subscribe="mail")
    with pytest.raises(InvalidOption, match="did you mean 'startingOffsets'"):
        start(tmp_path, startingOffset="latest")
