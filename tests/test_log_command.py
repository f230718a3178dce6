"""`headrace log` as people and scripts use it: what it prints, where, and its exit status."""

import base64
import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from headrace.cli import commands
from headrace.core_log.directory import LogDirectory
from headrace.core_log.errors import DirectoryInUse, StorageError
from headrace.core_log.inspection import streams
from headrace.core_log.log import PartitionLog
from headrace.core_log.storage.disk import DiskStorage
from headrace.core_log.storage.readonly import ReadOnlyStorage

from .core_log.directories import NOW_US, SMALL, add_stream, append, commit, filled_directory, open_directory


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(commands, ["log", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def lines(*arguments: object) -> list[dict[str, object]]:
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


@pytest.fixture
def filled(tmp_path: Path) -> LogDirectory:
    directory = filled_directory(DiskStorage(tmp_path))
    directory.close_now()
    return directory


@pytest.fixture
def single(tmp_path: Path) -> PartitionLog:
    """One record of plain text, one of other bytes and control characters; committed, not closed."""
    directory = open_directory(DiskStorage(tmp_path))
    (log,) = add_stream(directory, "na\x1bme", SMALL).partitions
    log.append([b"k\n"], [b""], ["héllo\x9b".encode()], timestamp_us=NOW_US, tags=("a\x07",))
    log.append([b"\xff"], [b"pr\x1bop"], [b"\x00\xfe"], timestamp_us=-(1 << 62), headers=[((b"h", b"\x80"),)])
    commit(log)
    return log


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# -- ls ---------------------------------------------------------------------------------------------------------


def test_ls_has_one_line_for_each_partition_with_its_offsets(tmp_path: Path, filled: LogDirectory) -> None:
    logs = {(str(one.spec.id), log.partition): log for one in filled.streams.values() for log in one.partitions}
    rows = lines("ls", tmp_path)
    assert len(rows) == 3
    for row in rows:
        log = logs[(str(row["id"]), int(str(row["partition"])))]
        assert (row["log_start"], row["watermark"]) == (log.log_start, log.high_watermark)
        assert (row["segments"], row["epoch"]) == (len(log.segments), 1)
        assert row["bytes"] == sum((tmp_path / segment.path).stat().st_size for segment in log.segments)
    assert {(row["stream"], row["vhost"], row["kind"]) for row in rows} == {
        ("orders", "/", "topic"),
        ("orders", "shop", "queue"),
    }


def test_ls_shows_segments_when_asked(tmp_path: Path, filled: LogDirectory) -> None:
    rows = lines("ls", tmp_path, "--segments", "--stream", "queue:orders")
    assert [(row["base_offset"], row["end_offset"], row["sealed"]) for row in rows] == [(0, 5, False)]


def test_ls_is_a_table_for_people(tmp_path: Path, filled: LogDirectory) -> None:
    shown = run("ls", tmp_path).stdout
    for text in ("stream", "watermark", "shop|orders", *(str(one) for one in filled.streams)):
        assert text in shown


def test_ls_tells_of_a_stream_that_cannot_be_read_and_shows_the_others(tmp_path: Path, filled: LogDirectory) -> None:
    bad = next(iter(filled.streams))
    (tmp_path / "streams" / str(bad) / "stream.json").write_text("{")
    result = run("ls", tmp_path, "--json")
    assert result.exit_code == 1
    assert f"problem: streams/{bad}/stream.json: " in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_data_directory_is_the_configured_one_when_none_is_given(
    tmp_path: Path, filled: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NODE__DATA", str(tmp_path))
    assert len(lines("ls")) == 3


@pytest.mark.parametrize("command", ["ls", "dump", "verify"])
def test_path_that_is_no_data_directory_is_refused_and_not_created(tmp_path: Path, command: str) -> None:
    with pytest.raises(StorageError, match="there is no such directory"):
        run(command, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(StorageError, match="not a data directory"):
        run(command, tmp_path)


def test_unknown_stream_is_a_usage_error_that_names_the_known_ones(tmp_path: Path, filled: LogDirectory) -> None:
    result = run("verify", tmp_path, "--stream", "odrers")
    assert result.exit_code == 2
    assert "no stream 'odrers' here; there are: orders, shop|orders" in result.stderr


def test_unknown_partition_is_a_usage_error(tmp_path: Path, filled: LogDirectory) -> None:
    result = run("dump", tmp_path, "--stream", "topic:orders", "--partition", 2)
    assert result.exit_code == 2
    assert "from 0 to 1" in result.stderr


# -- dump -------------------------------------------------------------------------------------------------------


def test_dump_gives_every_record_as_a_json_line(tmp_path: Path, filled: LogDirectory) -> None:
    rows = lines("dump", tmp_path, "--stream", "topic:orders", "--partition", 1)
    log = next(one for one in filled.streams.values() if one.spec.kind == "topic").partitions[1]
    assert [row["offset"] for row in rows] == list(range(log.high_watermark))
    assert rows[3] == {
        "stream": "orders",
        "partition": 1,
        "offset": 3,
        "timestamp_us": NOW_US + 3,
        "key": "key.3",
        "value": "value 3 ".ljust(40, "."),
        "protocol": "amqp",
        "persistent": True,
        "tags": ["eu", "vip"],
    }


def test_bytes_that_are_not_utf_8_are_base64_with_a_marker(tmp_path: Path, single: PartitionLog) -> None:
    first, second = lines("dump", tmp_path)
    assert first["value"] == "héllo\x9b"
    assert second["key"] == {"base64": base64.b64encode(b"\xff").decode()}
    assert second["headers"] == [["h", {"base64": base64.b64encode(b"\x80").decode()}]]


def test_no_control_character_is_printed(tmp_path: Path, single: PartitionLog) -> None:
    for arguments in (("dump",), ("dump", "--json"), ("dump", "--batches"), ("ls",), ("ls", "--json")):
        shown = run(*arguments, tmp_path).stdout
        assert shown.replace("\n", "").isprintable(), arguments


def test_text_lines_quote_texts_and_mark_other_bytes(tmp_path: Path, single: PartitionLog) -> None:
    first, second = run("dump", tmp_path).stdout.splitlines()
    assert first.startswith("na\\x1bme/0 offset=0 timestamp_us=2023-11-14T22:13:20.000000Z ")
    assert 'key="k\\n"' in first
    assert "value=base64:AP4=" in second
    # A time that no calendar has stays a number.
    assert f"timestamp_us={-(1 << 62)}" in second


def test_dump_takes_a_range_of_offsets(tmp_path: Path, filled: LogDirectory) -> None:
    rows = lines("dump", tmp_path, "--stream", "topic:orders", "--partition", 0, "--from", 4, "--to", 9)
    assert [row["offset"] for row in rows] == [4, 5, 6, 7, 8]
    assert run("dump", tmp_path, "--from", 9, "--to", 4).exit_code == 2
    assert run("dump", tmp_path, "--from", -1).exit_code == 2


def test_dump_of_batches_gives_their_headers(tmp_path: Path, filled: LogDirectory) -> None:
    rows = lines("dump", tmp_path, "--batches", "--stream", "topic:orders", "--partition", 0)
    log = next(one for one in filled.streams.values() if one.spec.kind == "topic").partitions[0]
    headers = [
        (os.path.basename(one.path), at, header.base_offset) for one in log.segments for at, header in one.headers()
    ]
    assert [(row["file"], row["position"], row["offset"]) for row in rows] == headers
    assert {"producer": "70" * 16, "producer_epoch": 1, "first_sequence": 7}.items() <= rows[4].items()


def test_dump_shows_a_gap_and_why(tmp_path: Path, single: PartitionLog) -> None:
    open_directory(DiskStorage(tmp_path), seed=2).close_now()
    gap = lines("dump", tmp_path)[-1]
    assert (gap["offset"], gap["gap"]) == (2, "unclean_start")
    assert lines("dump", tmp_path, "--batches")[-1]["gap"] == "unclean_start"


def test_e7_dump_shows_where_an_election_by_force_lost_records_and_verify_finds_nothing_wrong(
    tmp_path: Path, single: PartitionLog
) -> None:
    single.begin_stint(7, 3)
    end = int(single.end)
    single.pass_over_lost(end + 1000)
    commit(single)
    single.note_watermark()
    gap = lines("dump", tmp_path)[-1]
    assert (gap["offset"], gap["next_offset"], gap["gap"]) == (end, end + 1000, "unclean_election")
    header = lines("dump", tmp_path, "--batches")[-1]
    assert (header["offset"], header["epoch"], header["gap"]) == (end, 7, "unclean_election")
    assert run("verify", tmp_path).exit_code == 0


def test_dump_tells_damage_on_stderr_and_goes_on(tmp_path: Path, filled: LogDirectory) -> None:
    log = next(one for one in filled.streams.values() if one.spec.kind == "topic").partitions[0]
    position, header = list(log.segments[0].headers())[1]
    flip(tmp_path / log.segments[0].path, position + 200)
    result = run("dump", tmp_path, "--stream", "topic:orders", "--partition", 0, "--json")
    assert result.exit_code == 1
    assert f"{log.segments[0].path}: a batch fails its hash" in result.stderr
    shown = {json.loads(line)["offset"] for line in result.stdout.splitlines()}
    assert shown == set(range(log.high_watermark)) - set(range(header.base_offset, header.next_offset))


# -- verify -----------------------------------------------------------------------------------------------------


def test_verify_of_a_whole_directory_says_what_was_checked(tmp_path: Path, filled: LogDirectory) -> None:
    result = run("verify", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.endswith(": 0 problems, 0 notes\n")
    assert result.stdout.startswith("3 partitions, ")


def test_verify_of_a_flipped_bit_says_where_and_exits_1(tmp_path: Path, filled: LogDirectory) -> None:
    log = next(one for one in filled.streams.values() if one.spec.kind == "queue").partitions[0]
    path = log.segments[0].path
    flip(tmp_path / path, 64 + 150)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    first, last = result.stdout.splitlines()
    assert first == (f"problem: {path}: a batch fails its hash; offsets 0 to 4 cannot be read (byte 64, offset 0)")
    assert last.endswith(": 1 problem, 0 notes")
    found, summary = lines("verify", tmp_path)
    assert (found["level"], found["path"], found["position"]) == ("problem", path, 64)
    assert summary["problems"] == 1


def test_partition_whose_folder_is_gone_is_a_problem(tmp_path: Path, filled: LogDirectory) -> None:
    log = next(one for one in filled.streams.values() if one.spec.kind == "topic").partitions[1]
    shutil.rmtree(tmp_path / log.folder)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert f"problem: {log.folder}: the partition's folder is gone\n" in result.stdout
    assert run("repair", tmp_path, "--yes").exit_code == 1


def test_stream_deleted_while_we_look_is_no_problem(tmp_path: Path, filled: LogDirectory) -> None:
    storage = ReadOnlyStorage(tmp_path)
    gone = next(iter(filled.streams))
    specs = streams(storage)
    shutil.rmtree(tmp_path / "streams" / str(gone))
    with patch("headrace.commands.log.streams", return_value=specs):
        assert run("verify", tmp_path).exit_code == 0


def test_verify_of_another_stream_does_not_look_at_the_damaged_one(tmp_path: Path, filled: LogDirectory) -> None:
    log = next(one for one in filled.streams.values() if one.spec.kind == "topic").partitions[0]
    flip(tmp_path / log.segments[1].path, 10)
    assert run("verify", tmp_path, "--stream", "shop|orders").exit_code == 0
    assert run("verify", tmp_path, "--stream", "topic:orders", "--partition", 1).exit_code == 0
    assert run("verify", tmp_path, "--stream", str(log.stream_id)).exit_code == 1


def test_torn_tail_is_a_note_and_no_failure(tmp_path: Path, single: PartitionLog) -> None:
    append(single, 3)
    single.seal()
    os.truncate(tmp_path / single.segments[0].path, single.segments[0].end_position - 5)
    result = run("verify", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.startswith("note: ")
    assert "torn tail" in result.stdout


def test_reading_works_while_a_broker_holds_the_lock(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    storage.lock()
    filled_directory(storage)
    assert run("verify", tmp_path).exit_code == 0
    assert len(lines("ls", tmp_path)) == 3
    storage.unlock()


# -- repair -----------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path, filled: LogDirectory) -> PartitionLog:
    """The queue's only batch fails its hash."""
    log = next(one for one in filled.streams.values() if one.spec.kind == "queue").partitions[0]
    flip(tmp_path / log.segments[0].path, 64 + 150)
    return log


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_repair_says_what_it_would_give_up_and_changes_nothing(tmp_path: Path, damaged: PartitionLog) -> None:
    before = everything(tmp_path)
    result = run("repair", tmp_path)
    assert result.exit_code == 1
    path = damaged.segments[0].path
    assert result.stdout.splitlines() == [
        "shop|orders/0: offsets 0 to 4 would be given up: a batch fails its hash",
        f"shop|orders/0: {path} would be written anew; the damaged file would be kept as {Path(path).name}.damaged",
    ]
    assert everything(tmp_path) == before


def test_repair_with_yes_does_it_and_the_broker_opens_the_directory(tmp_path: Path, damaged: PartitionLog) -> None:
    result = run("repair", tmp_path, "--yes")
    assert result.exit_code == 0
    assert result.stdout.startswith("shop|orders/0: offsets 0 to 4 given up: a batch fails its hash\n")
    assert run("verify", tmp_path).exit_code == 0
    assert lines("dump", tmp_path, "--stream", "queue:orders") == [
        {"stream": "orders", "partition": 0, "offset": 0, "next_offset": 5, "gap": "repaired"}
    ]
    assert (tmp_path / f"{damaged.segments[0].path}.damaged").exists()
    (line,) = (tmp_path / damaged.folder / "repairs").read_text().splitlines()
    assert json.loads(line)["given_up"] == [{"first_offset": 0, "next_offset": 5, "why": "a batch fails its hash"}]
    directory = open_directory(DiskStorage(tmp_path), clean=True, seed=2)
    assert directory.streams[damaged.stream_id].partitions[0].high_watermark == 5
    assert run("repair", tmp_path).exit_code == 0


def test_repair_leaves_other_streams_alone(tmp_path: Path, damaged: PartitionLog) -> None:
    assert run("repair", tmp_path, "--stream", "topic:orders", "--yes").exit_code == 0
    assert run("verify", tmp_path).exit_code == 1


def test_repair_as_json(tmp_path: Path, damaged: PartitionLog) -> None:
    (would,) = lines("repair", tmp_path)
    (did,) = lines("repair", tmp_path, "--yes")
    assert (would["done"], did["done"]) == (False, True)
    assert (
        would["given_up"] == did["given_up"] == [{"first_offset": 0, "next_offset": 5, "why": "a batch fails its hash"}]
    )


def test_repair_refuses_while_a_broker_runs(tmp_path: Path, damaged: PartitionLog) -> None:
    broker = DiskStorage(tmp_path)
    broker.lock()
    before = everything(tmp_path)
    for arguments in ((), ("--yes",)):
        with pytest.raises(DirectoryInUse, match="in use by process"):
            run("repair", tmp_path, *arguments)
    assert everything(tmp_path) == before
    broker.unlock()


def test_repair_does_not_create_a_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        run("repair", tmp_path / "nowhere", "--yes")
    with pytest.raises(StorageError):
        run("repair", tmp_path, "--yes")
    assert list(tmp_path.iterdir()) == []


def test_repair_tells_of_a_stream_that_it_cannot_help(tmp_path: Path, filled: LogDirectory) -> None:
    bad = next(iter(filled.streams))
    (tmp_path / "streams" / str(bad) / "stream.json").write_text("{")
    result = run("repair", tmp_path, "--yes")
    assert result.exit_code == 1
    assert result.stderr.strip().endswith("this cannot be repaired")


async def test_repair_takes_from_the_journal_what_was_committed_there(tmp_path: Path) -> None:
    directory = open_directory(DiskStorage(tmp_path))
    logs = add_stream(directory, "many", SMALL, partitions=4).partitions
    for _ in range(2):
        for log in logs:
            append(log, 3)
        await directory.committer.commit(logs)
    for log in logs:
        log.note_watermark()
    assert directory.committer.journalled_count >= 1
    segment = logs[0].segments[0]
    (_, _), (position, header) = segment.headers()
    data = bytearray((tmp_path / segment.path).read_bytes())
    data[position : position + header.size] = bytes(header.size)
    (tmp_path / segment.path).write_bytes(data)
    assert run("repair", tmp_path).exit_code == 0
    assert run("repair", tmp_path, "--yes").exit_code == 0
    assert len(lines("dump", tmp_path, "--partition", 0)) == 6
    assert not list(tmp_path.rglob("*.damaged"))
    assert (tmp_path / segment.path).read_bytes()[position : position + 4] == b"HRb1"


# -- as a process -----------------------------------------------------------------------------------------------


def headrace(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "headrace", "log", *map(str, arguments)]


def test_errors_are_one_line_with_the_directory(tmp_path: Path) -> None:
    done = subprocess.run(headrace("verify", tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (74, "")
    assert done.stderr.startswith("headrace: no folder 'streams' in it")
    assert str(tmp_path) in done.stderr


def test_reader_that_goes_away_ends_the_dump_without_a_trace(tmp_path: Path, filled: LogDirectory) -> None:
    with subprocess.Popen(headrace("dump", tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def on_a_terminal(command: list[str]) -> tuple[str, str]:
    """stdout, and what a terminal on stderr was given."""
    main, side = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=side, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(side)
        assert process.stdout is not None
        shown = b""
        # A terminal whose other side is closed answers with an error, not with an end.
        with suppress(OSError):
            while piece := os.read(main, 4096):
                shown += piece
        text = process.stdout.read().decode()
    os.close(main)
    return text, shown.decode()


def test_progress_is_shown_on_stderr_and_only_on_a_terminal(tmp_path: Path, filled: LogDirectory) -> None:
    out, err = on_a_terminal(headrace("verify", tmp_path))
    assert "verify" in err
    assert out.endswith("0 problems, 0 notes\n")
    quiet = subprocess.run(headrace("verify", tmp_path), capture_output=True, text=True)
    assert (quiet.stdout, quiet.stderr) == (out, "")
