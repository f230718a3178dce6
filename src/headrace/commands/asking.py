"""What all commands that speak to a broker share: where it is, who asks, how answers are shown. Driver: click, rich.

    @topics.command("list")
    @asks
    def list_topics(broker: Broker) -> None:
        broker.show(broker.get(path("topics")), rows="topics", columns={...})

People get tables; with --json a program gets the broker's own answer: one document, or one a line where there is no end
to them. The password comes from HEADRACE_PASSWORD or is asked for: on a command line everybody could see it (ps).
Whatever came from a client of the broker is shown without control characters. Neighbours: client.py is the wire.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from headrace import __version__
from headrace.client import DEFAULT_URL, Client, Login, Query, is_loopback_url
from headrace.kinds import Milliseconds
from headrace.redaction import printable

GUEST = "guest"
# Wide enough when nobody is looking.
PIPE_WIDTH = 200

Json = dict[str, Any]
# A column's title -> the field of a row, or what to make of the row.
Columns = Mapping[str, str | Callable[[Json], object]]


class Broker:
    """The broker that was asked for, as a command sees it."""

    def __init__(self, client: Client, *, as_json: bool) -> None:
        self.client = client
        self.as_json = as_json

    def get(self, path: str, query: Query | None = None, *, wait_s: float = 0) -> Any:
        return self.client.get(path, query, wait_s=wait_s)

    def request(self, method: str, path: str, *, query: Query | None = None, body: object = None) -> Any:
        return self.client.request(method, path, query=query, body=body)

    def show(self, answer: Any, *, rows: str, columns: Columns) -> None:
        """A list: the document as it is, or a table of what stands under `rows`."""
        if self.as_json:
            self.line(answer)
        else:
            table(answer[rows], columns)

    def describe(self, answer: Json, fields: Columns) -> None:
        """One thing: the document, or a field a line."""
        if self.as_json:
            self.line(answer)
            return
        width = max(map(len, fields), default=0)
        for title, field in fields.items():
            click.echo(f"{title:<{width}}  {shown(picked(answer, field))}")

    def done(self, answer: Any, text: str) -> None:
        """Something was done: what the broker says of it, or a sentence."""
        if self.as_json:
            self.line(answer if answer is not None else {})
        else:
            click.echo(printable(text))

    def line(self, value: object) -> None:
        click.echo(json.dumps(value))


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that speaks to a broker. Stands right above the function, which gets a Broker."""

    @click.option(
        "--url",
        envvar="HEADRACE_URL",
        default=DEFAULT_URL,
        show_default=True,
        help="Where the broker's HTTP door is (HEADRACE_URL).",
    )
    @click.option(
        "--user",
        envvar="HEADRACE_USER",
        default=GUEST,
        show_default=True,
        help="Who asks (HEADRACE_USER). The password comes from HEADRACE_PASSWORD, or is asked for.",
    )
    @click.option(
        "--ca-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="HEADRACE_CA_FILE",
        help="Certificates (PEM) to trust at an https URL, instead of the system's (HEADRACE_CA_FILE).",
    )
    @click.option("--json", "as_json", is_flag=True, help="For programs: what the broker answers, as JSON.")
    @wraps(command)
    def wrapped(url: str, user: str, ca_file: Path | None, as_json: bool, **more: Any) -> None:
        with _client(url, user, ca_file) as client:
            command(Broker(client, as_json=as_json), **more)

    return wrapped


def _client(url: str, user: str, ca_file: Path | None) -> Client:
    try:
        return Client(url, Login(user, _password(url, user)), ca_file=ca_file, version=__version__)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--url") from None


def _password(url: str, user: str) -> str:
    found = os.environ.get("HEADRACE_PASSWORD")
    if found is not None:
        return found
    if user == GUEST and is_loopback_url(url):
        return GUEST
    if not sys.stdin.isatty():
        raise click.UsageError(f"the password of {user!r} is not known: set HEADRACE_PASSWORD")
    password: str = click.prompt(f"password of {user}", hide_input=True, err=True)
    return password


def confirmed(yes: bool, question: str) -> None:
    """Ask before something is gone. Where nobody can be asked, --yes has to be given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("say --yes: nobody can be asked here")
    click.confirm(printable(question), abort=True, err=True)


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, which is told of each step; nothing where stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
        redirect_stdout=False,
    )
    task = bar.add_task(title, total=total)
    with bar:
        yield lambda step: bar.advance(task, step)


# -- showing ----------------------------------------------------------------------------------------------------


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=False)


def table(rows: Sequence[Json], columns: Columns) -> None:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title, field in columns.items():
        numbers = bool(rows) and all(isinstance(picked(row, field), int | None) for row in rows)
        made.add_column(title, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(shown(picked(row, field))) for field in columns.values()))
    console().print(made)


def picked(row: Json, field: str | Callable[[Json], object]) -> object:
    return row.get(field) if isinstance(field, str) else field(row)


def shown(value: object) -> str:
    """A value for people, on one line."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case str():
            return printable(value)
        case list():
            return ", ".join(shown(one) for one in value) or "-"
        case dict():
            return ", ".join(f"{printable(str(name))}={shown(one)}" for name, one in value.items()) or "-"
        case _:
            return printable(str(value))


def size_text(size: int | None) -> str:
    if size is None:
        return "-"
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def milliseconds(text: str, hint: str) -> int:
    """A duration as the configuration reads it: 500ms, 90s, 2h, 30d."""
    kind = Milliseconds(0)
    try:
        found = kind.read(text)
    except ValueError:
        raise click.BadParameter(f"expected {kind.expected}", param_hint=hint) from None
    assert found is not None
    return found


def moment(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """An option's callback: a time, passed on to the broker as it was given."""
    if text is not None and not _is_moment(text):
        told = f"{printable(text)!r} is neither ms since 1970 nor a time of RFC 3339 with its zone"
        raise click.BadParameter(told, context, parameter)
    return text


def _is_moment(text: str) -> bool:
    """As the broker reads times (gateways/delivery/delayed_when.py), which no command loads."""
    if text.isascii() and text.removeprefix("-").isdigit():
        return True
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def pairs(given: Iterable[str], what: str) -> dict[str, str]:
    """`name=value` options."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, not {printable(one)!r}", param_hint=what)
        found[name] = value
    return found
