"""`headrace serve`: a node under the operating system's signals. Driver.

stdout gets exactly one line, once every open door accepts connections: `ready amqp=127.0.0.1:5672 ...`. All else
goes to stderr through logs.py. SIGTERM and SIGINT drain and exit 0; a second one exits at once with 128 + its number;
SIGHUP reads the configuration again. Neighbours: node.py does the work, config.py declares the flags.
"""

import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import trio

from headrace import __version__
from headrace.config import Config, load_config
from headrace.controller.errors import MetadataRegressed
from headrace.core_log.env import Env
from headrace.core_log.errors import StorageError
from headrace.core_log.real import real_env
from headrace.exits import causes
from headrace.kinds import Address
from headrace.logs import configure_logging
from headrace.node import Reload, run_node
from headrace.settings import ConfigError, changes, settings_of

_log = logging.getLogger(__name__)
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def _serve(config: Path | None, recover_metadata: bool, **flags: str | None) -> None:
    overrides = {parameter.replace("__", "."): text for parameter, text in flags.items() if text is not None}
    load = partial(load_config, config, os.environ, overrides)
    loaded = load()
    configure_logging(loaded.log.level, loaded.log.format)
    os.umask(0o077)  # what is kept here are other people's messages: for this user's eyes only
    try:
        trio.run(_run, loaded, load, recover_metadata)
    except* StorageError as group:
        for error in causes(group):  # files are named relative to the data directory
            error.add_note(f"data directory {loaded.node.data.absolute()}")
            if isinstance(error, MetadataRegressed):
                error.add_note("headrace serve --recover-metadata, once")
        raise


serve = click.Command(
    "serve",
    callback=_serve,
    help="Run a broker node until it is told to stop.",
    params=[
        click.Option(
            ["--config"], type=click.Path(path_type=Path), help="TOML file; every key is in docs/configuration.md"
        ),
        click.Option(
            ["--recover-metadata"],
            is_flag=True,
            help="Go on with a meta.sqlite that is older than the log; streams that it does not know become topics.",
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


async def _run(config: Config, load: Callable[[], Config], recover_metadata: bool) -> None:
    stop = trio.Event()
    reload = Reload()
    _log.info("starting", extra={"version": __version__, "data": config.node.data, "pid": os.getpid()})
    with trio.open_signal_receiver(*_STOPPING, signal.SIGHUP) as signals:
        async with trio.open_nursery() as outer:
            outer.start_soon(_obey, signals, stop, _Reloader(config, load, reload), outer)
            async with trio.open_nursery() as running:
                start = _starter(config, stop, reload, recover_metadata)
                bound: Mapping[str, Address] = await running.start(start)
                if not stop.is_set():
                    print(" ".join(("ready", *(f"{name}={address}" for name, address in bound.items()))), flush=True)
            outer.cancel_scope.cancel()


def _starter(
    config: Config, stop: trio.Event, reload: Reload, recover_metadata: bool
) -> Callable[..., Awaitable[None]]:
    env = _env(config)
    if not config.cluster.is_wanted:
        return partial(run_node, config, env, stop=stop, reload=reload, recover_metadata=recover_metadata)
    # Not loaded by a node alone: it needs PostgreSQL's driver.
    from headrace.cluster_node import run_cluster_node

    return partial(run_cluster_node, config, env, stop=stop, reload=reload)


def _env(config: Config) -> Env:
    try:
        return real_env(config.node.data, handles_max=config.storage.handles_max)
    except OSError as error:
        raise StorageError(f"cannot be created: {error.strerror}") from error


async def _obey(signals: AsyncIterator[int], stop: trio.Event, reloader: "_Reloader", nursery: trio.Nursery) -> None:
    async for number in signals:
        if number == signal.SIGHUP:
            # Beside this loop: a reload may wait for a disk, and a stop must not wait for it.
            nursery.start_soon(reloader.reload)
            continue
        # Not through trio: the second signal must also end a process whose loop is stuck.
        for stopping in _STOPPING:
            signal.signal(stopping, _exit_at_once)
        _log.info("stopping; a second signal exits at once", extra={"signal": signal.Signals(number).name})
        stop.set()


def _exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


class _Reloader:
    """Reads the configuration again, one reload after the other. Says what takes effect and what waits."""

    def __init__(self, config: Config, load: Callable[[], Config], node: Reload) -> None:
        self._config = config
        self._load = load
        self._node = node
        self._lock = trio.Lock()

    async def reload(self) -> None:
        async with self._lock:
            try:
                new = self._load()
            except ConfigError as error:
                self._refuse(error.problems)
                return
            if problems := await self._node.apply(new):
                self._refuse(problems)
                return
            configure_logging(new.log.level, new.log.format)
            for change in changes(Config, self._config, new):
                effect = "in effect" if change.live else "needs a restart"
                told = {"setting": change.name, "was": change.was, "now": change.now, "effect": effect}
                _log.info("setting changed", extra=told)
            self._config = new
            _log.info("configuration read again")

    def _refuse(self, problems: Sequence[str]) -> None:
        for problem in problems:
            _log.error("configuration refused, the old one stays", extra={"problem": problem})
