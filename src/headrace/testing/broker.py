"""A node in a thread of this process, with real doors on loopback and its data in a temporary folder. Driver.

    with EmbeddedBroker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.amqp_url()))
        broker.clock.advance(days=3)

The test has its own thread to itself, so clients that block can be used; the broker has its own loop. Nothing of the
process is changed: not its signals, umask, logging or collector of garbage.
"""

import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import trio
import trio.testing

from headrace.config import Config, load_config
from headrace.core_log.env import Worker
from headrace.core_log.real import ThreadWorker, real_env
from headrace.kinds import Address
from headrace.node import Delivery, run_node
from headrace.testing.clock import VirtualClock

T = TypeVar("T")

HOST = "127.0.0.1"
DOORS = ("amqp", "mqtt", "ws", "http")
START_SECONDS_MAX = 60.0
# What a broker of a test does otherwise: the memory is the test's too, and nobody waits for clients of a test that is
# over.
SETTINGS = {
    "node.drain_seconds": "0",
    "alarms.memory_share": "0",
    "alarms.refuse_share": "0",
    "alarms.disk_free_share": "0",
    "alarms.disk_free_bytes": "0",
}
# Its threads never end, and a job knows whose it is: so one serves all brokers of a process.
_THREADS = ThreadWorker()


class EmbeddedBroker:
    def __init__(
        self,
        *,
        data: Path | None = None,
        config: str = "",
        settings: Mapping[str, str] | None = None,
        doors: Sequence[str] = DOORS,
        frozen: bool = False,
    ) -> None:
        """`data`: where it keeps everything; else a temporary folder that goes with it. `config` is the text of a TOML
        file, `settings` are single ones over it (`{"mqtt.inflight_max": "10"}`). `frozen`: see VirtualClock."""
        self.clock = VirtualClock(frozen=frozen)
        # Of every open door, by its name; each start takes the same.
        self.ports: dict[str, int] = {}
        self.host = HOST
        self._temporary = tempfile.TemporaryDirectory(prefix="headrace-") if data is None else None
        self.data = Path(self._temporary.name) / "data" if self._temporary is not None else Path(data or "")
        self._config = config
        self._settings = dict(settings or {})
        self._doors = tuple(doors)
        self._running: _Running | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Returns when every door accepts connections; raises what keeps the broker from that."""
        if self._running is not None:
            raise RuntimeError("the broker runs already")
        doors = {f"doors.{name}": f"{HOST}:{self.ports.get(name, 0)}" for name in self._doors}
        closed = {f"doors.{name}": "off" for name in DOORS if name not in self._doors}
        overrides = {**SETTINGS, **doors, **closed, "node.data": str(self.data), **self._settings}
        running = _Running(self.clock)
        try:
            with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
                path = None
                if self._config:
                    path = Path(folder) / "headrace.toml"
                    path.write_text(self._config)
                self.ports = running.start(partial(load_config, path, {}, overrides))
        except BaseException:
            if not self.ports:
                # It never ran, so nobody will close it.
                self._remove_data()
            raise
        self._running = running

    def stop(self) -> None:
        """A clean stop. Raises what went wrong with the broker, now or before."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def kill(self) -> None:
        """What a crash leaves behind is left behind: nothing more is written, nobody is told."""
        running, self._running = self._running, None
        if running is not None:
            running.kill()

    def restart(self) -> None:
        """A clean stop, and a start on the same data and ports."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop, and remove the temporary folder."""
        try:
            self.stop()
        finally:
            self._remove_data()

    def _remove_data(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def amqp_port(self) -> int:
        return self.ports["amqp"]

    @property
    def mqtt_port(self) -> int:
        return self.ports["mqtt"]

    def amqp_url(self, *, user: str = "guest", password: str = "guest", vhost: str = "/") -> str:
        """Without heartbeats: a client that waits for its test sends none."""
        login = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"amqp://{login}@{HOST}:{self.amqp_port}/{quote(vhost, safe='')}?heartbeat=0"

    def http_url(self, path: str = "/") -> str:
        return f"http://{HOST}:{self.ports['http']}{path}"


class _CountedWorker:
    """Knows whether threads are at work."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._count = self._calls = 0
        self._idle = trio.Event()

    async def run(self, call: Callable[[], T]) -> T:
        self._count += 1
        self._calls += 1
        try:
            return await self._worker.run(call)
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()
                self._idle = trio.Event()

    async def wait_idle(self) -> int:
        """Returns how many calls there were so far."""
        while self._count or trio.testing.active_thread_count():
            # The database has threads of its own.
            self._calls += not self._count
            await (self._idle.wait() if self._count else trio.testing.wait_all_threads_completed())
            await trio.testing.wait_all_tasks_blocked()
        return self._calls


class _Running:
    """One run of the node, from start to stop or kill."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._ready: Future[dict[str, int]] = Future()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken
        self._stop: trio.Event
        self._scope: trio.CancelScope

    def start(self, load: Callable[[], Config]) -> dict[str, int]:
        self._thread = threading.Thread(target=self._run, args=(load,), name="headrace-broker", daemon=True)
        self._thread.start()
        return self._ready.result(START_SECONDS_MAX)

    def stop(self) -> None:
        self._end(lambda: self._stop.set())

    def kill(self) -> None:
        self._end(lambda: self._scope.cancel())

    def _end(self, how: Callable[[], None]) -> None:
        assert self._thread is not None
        self._clock.call = None
        # One that has ended by itself says why below.
        with suppress(trio.RunFinishedError):
            trio.from_thread.run_sync(how, trio_token=self._token)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, load: Callable[[], Config]) -> None:
        try:
            trio.run(self._main, load)
        except BaseException as error:
            if self._ready.done():
                self._error = error
            else:
                self._ready.set_exception(error)

    async def _main(self, load: Callable[[], Config]) -> None:
        config = load()
        clock = self._clock
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        real = real_env(config.node.data, handles_max=config.storage.handles_max)
        worker = _CountedWorker(_THREADS)
        env = replace(real, clock=clock, worker=worker)
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                node = partial(run_node, config, env, stop=self._stop, tune_process=False, opened=self._opened)
                bound: Mapping[str, Address] = await nursery.start(node)
                clock.threads_idle = worker.wait_idle
                clock.call = self._call
                self._ready.set_result({name: address.port for name, address in bound.items()})
        clock.call = clock.threads_idle = clock.parked_due_us = None

    def _opened(self, delivery: Delivery) -> None:
        assert delivery.broker is not None
        delays = delivery.broker.delayed.delays

        async def parked_due_us() -> int | None:
            if not delays.count():
                return None
            page = await delays.list(limit=1)
            while not page.records and page.cursor is not None:
                page = await delays.list(limit=1, after=page.cursor)
            return page.records[0].due_us if page.records else None

        self._clock.parked_due_us = parked_due_us

    def _call(self, what: Callable[[], Awaitable[None]]) -> None:
        trio.from_thread.run(what, trio_token=self._token)
