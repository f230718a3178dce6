"""The real Env: clock, ids, threads and files of this machine."""

import subprocess
import sys
import threading
from pathlib import Path

import trio
import trio.testing

from headrace.core_log.real import SystemClock, SystemIds, ThreadWorker, real_env


def test_env_can_be_imported_without_trio() -> None:
    code = "import sys, headrace.core_log.env; sys.exit('trio' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_clock_goes_forward_over_a_sleep() -> None:
    clock = SystemClock()
    before, wall_before = clock.monotonic(), clock.wall_us()
    await clock.sleep(0.001)
    assert clock.monotonic() >= before + 0.001
    # After 2001 and in microseconds, whatever the machine believes the date to be.
    assert wall_before > 10**15


def test_ids_differ_and_salts_are_64_bits_but_never_zero() -> None:
    ids = SystemIds()
    assert len({ids.uuid() for _ in range(100)}) == 100
    salts = {ids.salt() for _ in range(100)}
    assert len(salts) == 100
    assert all(0 < salt < 2**64 for salt in salts)
    assert max(salts) >= 2**56


def test_nonces_differ_and_are_printable_without_a_comma() -> None:
    nonces = {SystemIds().nonce() for _ in range(100)}
    assert len(nonces) == 100
    # Six bits a character, 128 of them or more.
    assert all(
        len(nonce) * 6 >= 128 and nonce.isascii() and nonce.isprintable() and "," not in nonce for nonce in nonces
    )


async def test_worker_runs_the_call_in_another_thread_and_hands_back_result_and_error() -> None:
    worker = ThreadWorker()
    assert await worker.run(threading.get_ident) != threading.get_ident()
    try:
        await worker.run(lambda: 1 // 0)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("the error was swallowed")


async def test_worker_runs_no_more_calls_at_once_than_it_may() -> None:
    worker = ThreadWorker(threads_max=2)
    together = threading.Barrier(2)
    running = most = 0
    lock = threading.Lock()

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(worker.run, call)
    assert most == 2


async def test_one_thread_does_all_that_comes_one_after_the_other_however_many_wait() -> None:
    worker = ThreadWorker()
    together = threading.Barrier(4)
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(worker.run, together.wait)
    assert len({await worker.run(threading.get_ident) for _ in range(20)}) == 1


async def test_calls_that_had_to_wait_are_run_in_the_order_they_came() -> None:
    worker = ThreadWorker(threads_max=1)
    go_on = threading.Event()
    order: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, go_on.wait)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(5):
            nursery.start_soon(worker.run, lambda number=number: order.append(number))  # type: ignore[misc]
            await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert order == [0, 1, 2, 3, 4]


async def test_call_that_has_begun_is_finished_even_when_cancelled() -> None:
    worker = ThreadWorker()
    begun, go_on = threading.Event(), threading.Event()
    finished = []

    def call() -> None:
        begun.set()
        go_on.wait()
        finished.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, call)
        await trio.to_thread.run_sync(begun.wait)
        nursery.cancel_scope.cancel()
        go_on.set()
    assert finished == [True]


def test_real_env_has_its_files_in_the_data_directory(tmp_path: Path) -> None:
    env = real_env(tmp_path / "data", handles_max=2)
    env.storage.replace_file("a", b"here")
    assert (tmp_path / "data" / "a").read_bytes() == b"here"
    assert env.random.random() != real_env(tmp_path / "data").random.random()
