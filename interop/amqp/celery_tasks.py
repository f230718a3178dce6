"""The tasks that a Celery worker runs here, and the application that callers and worker share. Driver: Celery."""

import time
from typing import Any

from celery import Celery, Task, shared_task


def make_app(broker_url: str, backend: str, *, quorum: bool) -> Celery:
    """With quorum queues Celery leaves an ETA to kombu's delayed delivery, and does not hold it in the worker."""
    app = Celery("interop", broker=broker_url, backend=backend)
    settings: dict[str, Any] = {
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # Celery's default is to send tasks without asking whether they have arrived.
        "broker_transport_options": {"confirm_publish": True},
        "worker_send_task_events": True,
        "task_send_sent_event": True,
        # A task that was running when its broker died is run again.
        "task_acks_late": True,
        "worker_cancel_long_running_tasks_on_connection_loss": True,
    }
    if quorum:
        settings |= {
            "task_default_queue": "celery.quorum",
            "task_default_queue_type": "quorum",
            "task_default_exchange_type": "topic",
        }
    app.conf.update(settings)
    return app


@shared_task(name="add")
def add(x: int, y: int) -> int:
    return x + y


@shared_task(name="total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@shared_task(name="third_time", bind=True, max_retries=5)
def third_time(self: Task) -> int:
    """Fails twice, and asks to be tried again a little later."""
    if self.request.retries < 2:
        raise self.retry(countdown=1)
    return int(self.request.retries)


@shared_task(name="now")
def now() -> float:
    return time.time()


@shared_task(name="refuse")
def refuse() -> None:
    raise ValueError("no")
