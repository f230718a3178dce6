"""The archive: sealed segments as they are, sent once, read alone or where retention got to."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import headrace
from headrace.commands.log import log as log_command
from headrace.core_log.errors import CorruptLog
from headrace.core_log.log import PartitionLog
from headrace.spark.access import DataLoss, TopicNotFound, open_access
from headrace.spark.archive import archive
from headrace.spark.decode import read
from headrace.spark.plan import plan

from .directories import Written, commit


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "data")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "archive").as_uri()


def offsets(**where: str) -> list[int]:
    return headrace.read("t", columns=["offset"], **where).read_all()["offset"].to_pylist()  # type: ignore[no-any-return]


def retire(written: Written, log: PartitionLog, segments: int) -> int:
    """Retention takes so many segments, for good."""
    log.delete_before(log.segments[segments].base_offset)
    commit(log)
    log.recycle(1 << 60)
    written.fill(log, 1)
    return int(log.log_start)


def test_sealed_segments_are_archived_as_they_are_and_the_growing_one_is_not(written: Written, uri: str) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    report = archive(written.path, uri)
    sealed = log.segments[:-1]
    assert (report.sent, report.known) == (len(sealed), 0)
    folder = Path(uri.removeprefix("file://")) / log.folder
    for segment in sealed:
        data = (folder / f"{segment.base_offset:020d}.log").read_bytes()
        assert data == (written.folder / segment.path).read_bytes()[: len(data)]
        assert len(data) == segment.end_position or segment.end_position < 0
    assert offsets(archive=uri) == list(range(log.segments[-1].base_offset))


def test_archiving_again_sends_what_is_new_and_what_was_not_finished(written: Written, uri: str) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    first = archive(written.path, uri)
    assert archive(written.path, uri).sent == 0
    folder = Path(uri.removeprefix("file://")) / log.folder
    # The power went between a segment and its entry, and in the middle of another.
    entries = sorted(folder.glob("*.json"))
    entries[0].unlink()
    entries[-1].unlink()
    (folder / f"{int(entries[-1].name[:20]):020d}.log").write_bytes(b"half")
    report = archive(written.path, uri)
    assert (report.sent, report.known) == (2, first.sent - 2)
    assert offsets(archive=uri) == list(range(log.segments[-1].base_offset))


def test_damaged_segment_is_not_archived(written: Written, uri: str) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    with written.segment_paths(log)[1].open("r+b") as file:
        file.seek(3000)
        file.write(b"?")
    with pytest.raises(CorruptLog):
        archive(written.path, uri)
    folder = Path(uri.removeprefix("file://")) / log.folder
    assert len(list(folder.glob("*.json"))) == 1


def test_reader_finds_in_the_archive_what_retention_took(written: Written, uri: str) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    archive(written.path, uri)
    start = retire(written, log, 3)
    assert start > 0
    assert offsets(path=written.path) == list(range(start, 510))
    assert offsets(path=written.path, archive=uri) == list(range(510))
    access = open_access(path=written.path, archive=uri)
    assert access.topic("t").partitions[0].start == 0
    assert access.offset_at("t", 0, 1_000_000 + 20) == 20
    assert access.offset_at("t", 0, 1_000_000 + 500) == 500


def test_segment_that_goes_while_it_is_read_is_taken_from_the_archive(written: Written, uri: str) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    archive(written.path, uri)
    tasks = plan(open_access(path=written.path, archive=uri), {("t", 0): (0, 500)})
    retire(written, log, 3)
    found = [row["offset"] for task in tasks for batch in read(task) for row in batch.to_pylist()]
    assert found == list(range(500))


def test_topic_that_is_gone_is_still_in_the_archive_and_a_new_one_of_its_name_is_another(
    written: Written, uri: str
) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    archive(written.path, uri)
    end = int(log.segments[-1].base_offset)
    stream = written.directory.streams.pop(written.id_of(log))
    (written.folder / f"streams/{stream.spec.id}").rename(written.folder / f"trash/{stream.spec.id}.1")
    assert offsets(path=written.path, archive=uri) == list(range(end))
    (again,) = written.topic()
    written.fill(again, 2)
    assert offsets(path=written.path, archive=uri) == list(range(20))


def test_hole_in_the_archive_is_a_loss_and_is_not_passed_over(written: Written, uri: str) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    archive(written.path, uri)
    folder = Path(uri.removeprefix("file://")) / log.folder
    sorted(folder.glob("*.json"))[1].unlink()
    with pytest.raises(DataLoss):
        offsets(archive=uri)
    start = retire(written, log, 3)
    third = int(sorted(folder.glob("*.json"))[1].name[:20])
    assert offsets(path=written.path, archive=uri)[0] == third < start


def test_archive_knows_no_other_names(written: Written, uri: str) -> None:
    written.topic()
    archive(written.path, uri)
    with pytest.raises(TopicNotFound):
        open_access(archive=uri).topic("../t")


def test_command_says_what_it_sent(written: Written, uri: str) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    done = CliRunner().invoke(log_command, ["archive", written.path, "--to", uri, "--topic", "t", "--json"])
    assert done.exit_code == 0, done.output
    sent = [json.loads(line) for line in done.output.splitlines()]
    assert [one["first_offset"] for one in sent] == [segment.base_offset for segment in log.segments[:-1]]
    again = CliRunner().invoke(log_command, ["archive", written.path, "--to", uri])
    assert again.output == f"0 segments sent, 0 bytes; {len(sent)} were there already\n"
