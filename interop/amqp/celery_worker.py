"""Celery with real worker processes: tasks, retries, ETAs, groups, chords, control and events. Driver: processes.

Two workers, started as people start them (prefork; mingle, gossip and heartbeats on). The one works on a classic queue
and answers over `rpc://`. The other works on a quorum queue, so that ETAs go through kombu's delayed delivery, and
keeps results in `db+sqlite`: Celery's chords want a backend that can be asked.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from amqp.exceptions import AMQPError
from celery import Celery, chord, group
from celery.exceptions import TaskRevokedError

from interop.amqp.celery_tasks import make_app
from interop.broker import Broker
from interop.client import Driven, Feature, ProgramFailed, python_version

WAIT_SECONDS = 60
STOP_SECONDS_MAX = 20
# A question to all waits so long for answers, however many have come.
ANSWER_SECONDS = 3
ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker, and its application as callers use it."""

    name: str
    app: Celery
    environ: dict[str, str]
    log_path: Path

    def signature(self, task: str, *arguments: Any, **options: Any) -> Any:
        return self.app.signature(task, args=arguments, **options)

    def told(self) -> str:
        return self.log_path.read_text(errors="replace")


@dataclass(frozen=True, slots=True)
class Workshop:
    broker: Broker
    classic: Worker
    quorum: Worker


def celery_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", "interop.amqp.celery_app", *arguments]


def eventually(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not holds():
        if time.monotonic() > until:
            raise ProgramFailed(what())
        time.sleep(0.05)


def start(broker: Broker, folder: Path, kind: str, backend: str) -> tuple[Worker, subprocess.Popen[bytes]]:
    """A worker; it may not be ready yet."""
    environ = {**os.environ, "BROKER_URL": broker.url, "RESULT_BACKEND": backend, "QUEUE_TYPE": kind}
    app = make_app(broker.url, backend, quorum=kind == "quorum")
    name = f"{kind}@interop"
    worker = Worker(name, app, environ, folder / f"{kind}.log")
    command = celery_command("worker", "--concurrency=2", "--loglevel=INFO", f"--hostname={name}", "--events")
    with worker.log_path.open("wb") as log:
        return worker, subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)


@contextmanager
def workshop(broker: Broker) -> Iterator[Workshop]:
    with TemporaryDirectory(prefix="headrace-celery-") as folder, ExitStack() as up:
        path = Path(folder)
        workers: list[Worker] = []
        processes: list[subprocess.Popen[bytes]] = []
        up.callback(end, workers, processes)
        for kind, backend in (("classic", "rpc://"), ("quorum", f"db+sqlite:///{path / 'results.sqlite'}")):
            worker, process = start(broker, path, kind, backend)
            workers.append(worker)
            processes.append(process)
        for worker in workers:
            # Its word, and its deed: from here on there is also something that can be closed.
            eventually(lambda of=worker: f"{of.name} ready." in of.told(), worker.told)
            assert worker.signature("add", 1, 1).delay().get(timeout=WAIT_SECONDS) == 2
        yield Workshop(broker, *workers)


def end(workers: Sequence[Worker], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """All workers at once: each takes its time."""
    for process in processes:
        process.terminate()
    try:
        for process in processes:
            process.wait(STOP_SECONDS_MAX)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for worker in workers:
        leave(worker.app)


def leave(app: Celery) -> None:
    """Closes what a caller holds open; the broker may have been restarted under it."""
    app.pool.force_close_all()
    if app.conf.result_backend == "rpc://":
        with suppress(OSError, AMQPError):
            app.backend.result_consumer.stop()
    app.close()


def results(pending: Sequence[Any]) -> list[Any]:
    return [each.get(timeout=WAIT_SECONDS) for each in pending]


def task(shop: Workshop) -> None:
    for worker in (shop.classic, shop.quorum):
        assert results([worker.signature("add", number, 1).delay() for number in range(20)]) == list(range(1, 21))
        try:
            worker.signature("refuse").delay().get(timeout=WAIT_SECONDS)
        except ValueError as error:
            assert error.args == ("no",)
        else:
            raise AssertionError("an error did not come back")


def retry(shop: Workshop) -> None:
    assert results([worker.signature("third_time").delay() for worker in (shop.classic, shop.quorum)]) == [2, 2]


def eta(shop: Workshop) -> None:
    """Held by the worker on a classic queue, by the broker on a quorum queue; never early."""
    begun = time.time()
    pending = [worker.signature("now").apply_async(countdown=2) for worker in (shop.classic, shop.quorum)]
    assert all(ran >= begun + 2 for ran in results(pending))


def in_group(shop: Workshop) -> None:
    for worker in (shop.classic, shop.quorum):
        job = group([worker.signature("add", number, number) for number in range(10)], app=worker.app)
        assert job().get(timeout=WAIT_SECONDS) == [2 * number for number in range(10)]


def in_chord(shop: Workshop) -> None:
    """The body runs once all of its header have."""
    worker = shop.quorum
    header = [worker.signature("add", number, number) for number in range(10)]
    assert chord(header, app=worker.app)(worker.signature("total")).get(timeout=WAIT_SECONDS) == 90


def revoke(shop: Workshop) -> None:
    """A fanout to all workers; the task is dropped when its time comes."""
    result = shop.classic.signature("now").apply_async(countdown=2)
    result.revoke()
    try:
        result.get(timeout=WAIT_SECONDS)
    except TaskRevokedError:
        return
    raise AssertionError("a revoked task was run")


def inspect(shop: Workshop) -> None:
    """As `celery inspect` and flower ask; both workers answer through the reply exchange."""
    names = [shop.classic.name, shop.quorum.name]
    # Those that are named are waited for no longer than it takes.
    told = shop.classic.app.control.inspect(names, timeout=WAIT_SECONDS).ping()
    assert told == {name: {"ok": "pong"} for name in names}
    queues = shop.classic.app.control.inspect(names, timeout=WAIT_SECONDS).active_queues()
    assert {name: [queue["name"] for queue in each] for name, each in queues.items()} == {
        shop.classic.name: ["celery"],
        shop.quorum.name: ["celery.quorum"],
    }
    command = celery_command("inspect", "ping", f"--timeout={ANSWER_SECONDS}")
    done = subprocess.run(command, cwd=ROOT, env=shop.classic.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes online." in done.stdout


def events(shop: Workshop) -> None:
    """What flower shows: a topic exchange on which workers tell of themselves and of every task."""
    app = shop.classic.app
    kinds: list[str] = []
    wanted = {"worker-heartbeat", "task-sent", "task-received", "task-started", "task-succeeded"}
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": lambda event: kinds.append(event["type"])})
        with receiver.consumer_context() as (listening, _channel, _consumers):
            calling = threading.Thread(target=lambda: shop.classic.signature("add", 1, 2).delay().forget())
            calling.start()
            until = time.monotonic() + WAIT_SECONDS
            while not wanted <= set(kinds) and time.monotonic() < until:
                try:
                    listening.drain_events(timeout=1)
                except TimeoutError:
                    continue
            calling.join()
    assert wanted <= set(kinds), kinds


def restart(shop: Workshop) -> None:
    """The workers come back after kill -9 and run what was waiting, and what came later."""
    worker = shop.quorum
    before = [worker.signature("add", number, 1).apply_async(countdown=1) for number in range(10)]
    lost = worker.told().count("Connection to broker lost")
    shop.broker.restart()
    eventually(lambda: worker.told().count("Connection to broker lost") > lost, worker.told)
    after = [worker.signature("add", number, 1).delay() for number in range(10, 20)]
    assert results([*before, *after]) == list(range(1, 21))


CLIENT = Driven(
    "Celery",
    python_version("celery"),
    {
        Feature.TASK: task,
        Feature.RETRY: retry,
        Feature.ETA: eta,
        Feature.GROUP: in_group,
        Feature.CHORD: in_chord,
        Feature.REVOKE: revoke,
        Feature.INSPECT: inspect,
        Feature.EVENTS: events,
        Feature.RESTART: restart,
    },
    workshop,
)
