"""`headrace serve`: a node under the operating system's signals. Driver.

stdout gets exactly one line, once every open door accepts connections: `ready amqp=127.0.0.1:5672 ...`. All else
goes to stderr through logs.py. SIGTERM and SIGINT drain and exit 0; a second one exits at once with 128 + its number;
SIGHUP reads the configuration again. Neighbours: node.py does the work, config.py declares the flags.
"""

import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import trio

from headrace import __version__
from headrace.config import Config, load_config
from headrace.core_log.env import Env
from headrace.core_log.errors import StorageError
from headrace.core_log.real import real_env
from headrace.exits import causes
from headrace.kinds import Address
from headrace.logs import configure_logging
from headrace.node import run_node
from headrace.settings import ConfigError, changes, settings_of

_log = logging.getLogger(__name__)
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def _serve(config: Path | None, **flags: str | None) -> None:
    overrides = {parameter.replace("__", "."): text for parameter, text in flags.items() if text is not None}
    load = partial(load_config, config, os.environ, overrides)
    loaded = load()
    configure_logging(loaded.log.level, loaded.log.format)
    os.umask(0o077)  # what is kept here are other people's messages: for this user's eyes only
    try:
        trio.run(_run, loaded, load)
    except* StorageError as group:
        for error in causes(group):  # files are named relative to the data directory
            error.add_note(f"data directory {loaded.node.data.absolute()}")
        raise


serve = click.Command(
    "serve",
    callback=_serve,
    help="Run a broker node until it is told to stop.",
    params=[
        click.Option(
            ["--config"], type=click.Path(path_type=Path), help="TOML file; every key is in docs/configuration.md"
        ),
        *(
            click.Option(
                [one.flag, one.name.replace(".", "__")],
                metavar=one.key.upper() if one.section != "doors" else "HOST:PORT",
                help=f"{one.doc}  [default: {one.kind.show(one.default)}]",
            )
            for one in settings_of(Config)
            if one.flag is not None
        ),
    ],
)


async def _run(config: Config, load: Callable[[], Config]) -> None:
    stop = trio.Event()
    _log.info("starting", extra={"version": __version__, "data": config.node.data, "pid": os.getpid()})
    with trio.open_signal_receiver(*_STOPPING, signal.SIGHUP) as signals:
        async with trio.open_nursery() as outer:
            outer.start_soon(_obey, signals, stop, config, load)
            async with trio.open_nursery() as running:
                start = partial(run_node, config, _env(config), stop=stop)
                bound: Mapping[str, Address] = await running.start(start)
                if not stop.is_set():
                    print(" ".join(("ready", *(f"{name}={address}" for name, address in bound.items()))), flush=True)
            outer.cancel_scope.cancel()


def _env(config: Config) -> Env:
    try:
        return real_env(config.node.data, handles_max=config.storage.handles_max)
    except OSError as error:
        raise StorageError(f"cannot be created: {error.strerror}") from error


async def _obey(signals: AsyncIterator[int], stop: trio.Event, config: Config, load: Callable[[], Config]) -> None:
    async for number in signals:
        if number == signal.SIGHUP:
            config = _reload(config, load)
            continue
        # Not through trio: the second signal must also end a process whose loop is stuck.
        for stopping in _STOPPING:
            signal.signal(stopping, _exit_at_once)
        _log.info("stopping; a second signal exits at once", extra={"signal": signal.Signals(number).name})
        stop.set()


def _exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _reload(config: Config, load: Callable[[], Config]) -> Config:
    """The new configuration, or the old one when the new one has problems. Says what takes effect and what waits."""
    try:
        new = load()
    except ConfigError as error:
        for problem in error.problems:
            _log.error("configuration refused, the old one stays", extra={"problem": problem})
        return config
    configure_logging(new.log.level, new.log.format)
    for change in changes(Config, config, new):
        effect = "in effect" if change.live else "needs a restart"
        _log.info(
            "setting changed", extra={"setting": change.name, "was": change.was, "now": change.now, "effect": effect}
        )
    _log.info("configuration read again")
    return new
