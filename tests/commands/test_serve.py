"""`headrace serve` as a process: one ready line, signals, plain errors, logs on stderr only."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

ECHO = Path(__file__).parent.parent / "echo_door.py"
PATIENCE_S = 60
CANARY = "c4n4ry"


class Broker:
    """A running `headrace serve` with one real door; what it prints is gathered as it comes."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.out = ""
        self.err = ""
        self._news = trio.Condition()
        self._open_ends = 2

    async def gather(self, name: str, stream: trio.abc.ReceiveStream) -> None:
        async for data in stream:
            setattr(self, name, getattr(self, name) + data.decode())
            await self._tell()
        self._open_ends -= 1
        await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def said(self, pattern: str) -> re.Match[str]:
        """Wait for a line on stdout or stderr."""
        with trio.fail_after(PATIENCE_S):
            async with self._news:
                while not (found := re.search(pattern, whole_lines(self.out) + whole_lines(self.err))):
                    assert self._open_ends, f"ended without {pattern!r}: {self.out}{self.err}"
                    await self._news.wait()
        return found

    async def ended(self) -> int:
        with trio.fail_after(PATIENCE_S):
            status = await self.process.wait()
            async with self._news:
                while self._open_ends:
                    await self._news.wait()
        return status

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", int((await self.said(r"amqp=127.0.0.1:(\d+)"))[1]))


def whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


@asynccontextmanager
async def broker(data: Path, *arguments: str, environ: dict[str, str] | None = None) -> AsyncIterator[Broker]:
    command = [sys.executable, str(ECHO), "serve", "--data", str(data), "--amqp", "127.0.0.1:0", *arguments]
    process = await trio.lowlevel.open_process(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **(environ or {})}
    )
    started = Broker(process)
    async with trio.open_nursery() as nursery:
        assert process.stdout is not None and process.stderr is not None
        nursery.start_soon(started.gather, "out", process.stdout)
        nursery.start_soon(started.gather, "err", process.stderr)
        try:
            yield started
        finally:
            if process.poll() is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


def fails(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and stderr of a start that must fail before it is ready."""
    done = subprocess.run(
        [sys.executable, str(ECHO), "serve", "--log-level", "error", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(environ or {})},
        timeout=PATIENCE_S,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


async def test_ready_line_is_the_only_one_on_stdout_and_its_door_accepts(tmp_path: Path) -> None:
    async with broker(tmp_path / "data") as running, await running.connect() as client:
        await client.send_all(b"hello")
        assert await client.receive_some() == b"hello"
        await client.aclose()
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    assert re.fullmatch(r"ready amqp=127\.0\.0\.1:[1-9]\d*\n", running.out)


async def test_real_broker_says_ready_with_the_doors_it_has(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--data", str(tmp_path), "--amqps", "127.0.0.1:0", "--peer", "off"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = await trio.to_thread.run_sync(process.stdout.readline)
        process.send_signal(signal.SIGTERM)
        rest = await trio.to_thread.run_sync(process.stdout.read)
    assert (process.returncode, rest) == (0, "")
    assert re.fullmatch(r"ready( \w+=127\.0\.0\.1:\d+)*\n", line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_first_signal_drains_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    async with broker(tmp_path / "data") as running, await running.connect() as client:
        running.process.send_signal(number)
        await running.said("draining")
        await client.send_all(b"last words")
        assert await client.receive_some() == b"last words"
        await client.aclose()
        assert await running.ended() == 0
    assert (tmp_path / "data" / "clean").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_second_signal_exits_at_once(tmp_path: Path, number: signal.Signals, status: int) -> None:
    async with broker(tmp_path / "data") as running, await running.connect() as client:
        await client.send_all(b"x")
        await client.receive_some()
        running.process.send_signal(signal.SIGTERM)
        await running.said("draining")
        running.process.send_signal(number)
        assert await running.ended() == status
    assert not (tmp_path / "data" / "clean").exists()


async def test_client_that_stays_is_cut_when_the_time_to_drain_is_over(tmp_path: Path) -> None:
    environ = {"HEADRACE_NODE__DRAIN_SECONDS": "0"}
    async with broker(tmp_path / "data", environ=environ) as running, await running.connect() as client:
        await client.send_all(b"x")
        await client.receive_some()
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    assert "still connected" in running.err


async def test_second_broker_on_the_data_directory_gets_one_clear_line(tmp_path: Path) -> None:
    async with broker(tmp_path / "data") as running:
        await running.said("ready")
        status, err = await trio.to_thread.run_sync(fails, "--data", str(tmp_path / "data"), "--amqp", "127.0.0.1:0")
        assert status == os.EX_TEMPFAIL
        assert re.fullmatch(rf"headrace: .*data is in use by process {running.process.pid} .*\n", err)


async def test_taken_port_gets_one_clear_line(tmp_path: Path) -> None:
    async with broker(tmp_path / "one") as running:
        port = (await running.said(r"amqp=127.0.0.1:(\d+)"))[1]
        address = f"127.0.0.1:{port}"
        status, err = await trio.to_thread.run_sync(fails, "--data", str(tmp_path / "two"), "--amqp", address)
    assert status == os.EX_UNAVAILABLE
    assert re.fullmatch(rf"headrace: amqp door: cannot listen on {address}: .*in use\n", err)


def test_bad_configuration_is_told_whole_and_nothing_is_created(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("[storage]\nsegmnt_bytes = 1\n[dors]\n")
    data = tmp_path / "data"
    status, err = fails("--config", str(path), "--data", str(data), "--amqp", "nowhere")
    assert status == os.EX_CONFIG
    first, second, third = err.splitlines()
    assert first == f"headrace: {path}: [storage]: unknown key segmnt_bytes, did you mean segment_bytes?"
    assert second == f"headrace: {path}: [dors]: unknown section, did you mean doors?"
    assert third.startswith("headrace: flag --amqp: expected an address")
    assert not data.exists()


@pytest.mark.parametrize("content", [b"{", b'{"format": 99}'])
def test_data_directory_that_cannot_be_read_gets_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node.json").write_bytes(content)
    status, err = fails("--data", str(tmp_path))
    assert status == (os.EX_PROTOCOL if b"99" in content else os.EX_IOERR)
    assert re.fullmatch(rf"headrace: node\.json: .* \(data directory {tmp_path}\)\n", err)


def test_data_directory_that_is_a_file_gets_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    status, err = fails("--data", str(tmp_path / "data"))
    assert status == os.EX_IOERR
    assert len(err.splitlines()) == 1


async def test_json_logs_are_one_object_a_line(tmp_path: Path) -> None:
    async with broker(tmp_path / "data", "--log-format", "json") as running:
        await running.said("ready")
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    lines = [json.loads(line) for line in running.err.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert "stopped clean" in [line["message"] for line in lines]


async def test_reload_says_what_changed_and_takes_up_what_is_live(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text('[log]\nformat = "human"\n')
    async with broker(tmp_path / "data", "--config", str(path)) as running:
        await running.said("ready")
        path.write_text('[log]\nformat = "json"\n[storage]\nsegment_bytes = "1MiB"\n')
        running.process.send_signal(signal.SIGHUP)
        await running.said("configuration read again")
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    told = [json.loads(line) for line in running.err.splitlines() if line.startswith("{")]
    changed = [line["fields"] for line in told if line["message"] == "setting changed"]
    assert changed == [
        {"setting": "log.format", "was": "human", "now": "json", "effect": "in effect"},
        {"setting": "storage.segment_bytes", "was": "64MiB", "now": "1MiB", "effect": "needs a restart"},
    ]


async def test_reload_of_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("")
    async with broker(tmp_path / "data", "--config", str(path)) as running:
        await running.said("ready")
        path.write_text('[log]\nformat = "json"\nlevl = "debug"\n')
        running.process.send_signal(signal.SIGHUP)
        refused = await running.said(r"ERROR .*configuration refused, the old one stays problem=(.*)")
        assert "did you mean level?" in refused[1]
        async with await running.connect() as client:
            await client.send_all(b"still here")
            assert await client.receive_some() == b"still here"
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    assert not [line for line in running.err.splitlines() if line.startswith("{")]


def test_secret_given_by_mistake_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text(f'[doors]\namqp = "amqp://user:{CANARY}@127.0.0.1:5672"\n')
    status, err = fails("--config", str(path))
    assert status == os.EX_CONFIG
    assert CANARY not in err


async def test_what_is_created_is_for_this_user_only(tmp_path: Path) -> None:
    async with broker(tmp_path / "data") as running:
        await running.said("ready")
    created = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    modes = {path.name: path.stat().st_mode & 0o777 for path in created}
    assert modes == {path.name: 0o700 if path.is_dir() else 0o600 for path in created}
    assert "node.json" in modes
