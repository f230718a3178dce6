"""The command answers quickly and plainly, and turns errors into one line and a status."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from headrace import __version__, cli
from headrace.core_log.errors import CorruptLog, DirectoryInUse, DiskFull, Poisoned, Refused, UnknownFormat
from headrace.exits import Answered, BrokerAway, DoorNotOpened, NotAllowed, TryLater, exit_status
from headrace.settings import ConfigError

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
CLI_PAGE = PAGE.with_name("cli.md")


def run(*arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *python, "-m", "headrace", *arguments], capture_output=True, text=True)


def test_version_is_printed() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"headrace, version {__version__}\n")


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(cli.commands, ["--help"])
    assert shown.exit_code == 0
    for name in cli.COMMANDS:
        assert name in shown.output


def every_command(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_is_on_its_page_with_each_of_its_own_options() -> None:
    page = CLI_PAGE.read_text()
    common = {"--url", "--user", "--ca-file", "--json", "--help"}
    for name, command in every_command(cli.commands):
        assert f"`headrace {name}" in page, name
        if name == "serve" or name.startswith("log "):
            continue  # docs/configuration.md and docs/log.md have theirs
        options = {option for one in command.params if isinstance(one, click.Option) for option in one.opts}
        for option in options - common:
            assert f"`{option}" in page, f"{name} {option}"


def test_every_command_and_option_says_what_it_is_for() -> None:
    for name, command in every_command(cli.commands):
        assert command.help, name
        for one in command.params:
            assert not isinstance(one, click.Option) or one.help, f"{name} {one.opts}"


def test_shells_complete_commands_and_their_options() -> None:
    script = "import sys; sys.argv[0] = 'headrace'; from headrace.cli import main; main()"

    def completed(words: str) -> list[str]:
        asked = {"_HEADRACE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | asked)
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("headrace top") == ["topics"]
    assert completed("headrace topics gr") == ["grow"]
    assert "--retention-bytes" in completed("headrace topics create --ret")


def test_unknown_command_is_a_usage_error() -> None:
    done = run("srve")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'srve'" in done.stderr


def test_python_without_assertions_is_refused() -> None:
    done = run("serve", python=("-O",))
    assert done.returncode == 2
    assert done.stderr == "headrace: refuses to run under python -O: its assertions guard the data\n"


def test_command_line_loads_nothing_heavy_before_a_command_asks_for_it() -> None:
    script = "import sys, headrace.cli; print(sorted({'trio', 'numpy', 'rich', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


def test_command_that_asks_a_broker_loads_nothing_of_the_broker() -> None:
    modules = {target.partition(":")[0] for target in cli.COMMANDS.values()}
    asking = sorted(modules - {f"headrace.commands.{name}" for name in ("doctor", "log", "serve")})
    heavy = "{'trio', 'numpy', 'msgspec', 'sqlalchemy', 'starlette'}"
    script = f"import sys, {', '.join(asking)}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError(["x"]), 78),
        (DoorNotOpened("x"), 69),
        (BrokerAway("x"), 69),
        (NotAllowed(403, "forbidden", "x"), 77),
        (TryLater(503, "alarm", "x"), 75),
        (Answered(404, "not_found", "x"), 1),
        (DirectoryInUse("x"), 75),
        (CorruptLog("f", 1, 2, "bad hash"), 65),
        (UnknownFormat("x"), 76),
        (DiskFull("x"), 73),
        (Poisoned("x"), 74),
        (Refused("x"), 1),
        (ValueError("x"), 70),
    ],
)
def test_each_family_of_errors_has_its_own_status(error: Exception, status: int) -> None:
    assert exit_status(error) == status
    assert status == 1 or f"\n| {status} |" in PAGE.read_text()


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (DirectoryInUse("taken"), os.EX_TEMPFAIL, "headrace: taken\n"),
        (ExceptionGroup("n", [ExceptionGroup("m", [DiskFull("full")])]), os.EX_CANTCREAT, "headrace: full\n"),
        (ConfigError(["one", "two"]), os.EX_CONFIG, "headrace: one\nheadrace: two\n"),
        (Refused("a\x1b[2J password=c4n4ry"), 1, "headrace: a\\x1b[2J password=***\n"),
    ],
)
def test_expected_error_is_one_line_without_a_traceback(
    error: Exception, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "commands", fail)
    monkeypatch.setattr(cli, "configure_logging", lambda level, format: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (status, line)


def test_unexpected_error_is_loud_and_still_hides_secrets() -> None:
    script = (
        "from headrace import cli\ndef fail(): raise RuntimeError('amqp://u:c4n4ry@h')\ncli.commands = fail\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == os.EX_SOFTWARE
    assert "RuntimeError: amqp://***@h" in done.stderr
