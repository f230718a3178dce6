"""Records that wait for another attempt come back to the queue they failed in, and to nobody else. Driver.

What is due is appended to the queue's own log with a route set of that queue alone, in the place of the record that
transfers.py parked: with its time, expiry, properties and origin, and the headers that tell of its attempts. The queue
takes it whatever its limits say, since it was there before. If the queue is gone, or another one has its name, so is
the record, as all that was in it. Neighbours: delayed.py calls, broker.py appends, retry.py has the headers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import TargetPartition
from headrace.delay.fire import DueRun
from headrace.delay.parked import Page
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, encode_duty
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.retry import alike_in_time
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE

if TYPE_CHECKING:
    from headrace.gateways.delivery.broker import Broker


class Returns:
    """The carrier of retries."""

    def __init__(self, broker: "Broker") -> None:
        self.returned_count = self.dropped_count = 0
        self._broker = broker

    def _queue(self, duty: Duty) -> Queue | None:
        host = self._broker.vhosts.get(duty.vhost)
        found = None if host is None else host.queues.get(duty.name)
        return found if found is not None and found.view_id == duty.view else None

    def _log(self, duty: Duty, queue: Queue) -> PartitionLog:
        return self._broker.own_log(queue, duty.vhost) if queue.durable else self._broker.transient_log

    def waiting_count(self, vhost: str, queue: Queue) -> int:
        """How many records of a queue wait for another attempt."""
        return self._broker.delayed.delays.count(encode_duty(_duty(vhost, queue)))

    async def waiting(self, vhost: str, queue: Queue, *, after: str | None = None, limit: int = 100) -> Page:
        """Those records, by when they are due; `after` is the cursor of the page before."""
        return await self._broker.delayed.delays.list(target=encode_duty(_duty(vhost, queue)), after=after, limit=limit)

    def place(self, duty: Duty, key: bytes) -> TargetPartition | None:
        queue = self._queue(duty)
        if queue is None:
            return None
        log = self._log(duty, queue)
        return TargetPartition(log.stream_id, log.partition)

    def fire(self, duty: Duty, run: DueRun, done: Callable[[], None]) -> None:
        queue = self._queue(duty)
        if queue is None or run.producer is None:
            self.dropped_count += len(run)
            done()
            return
        broker, log = self._broker, self._log(duty, queue)
        target = broker.vhosts[duty.vhost].target(
            DEFAULT_EXCHANGE, duty.name.encode("utf-8", "surrogateescape"), [duty.name], tags=run.tags
        )
        before, reached = log.end, 0
        for first, last, timestamp_us, expiry_us in alike_in_time(run.headers, len(run)):
            producer = run.producer._replace(first_sequence=run.producer.first_sequence + first)
            reached = broker.publish_dense(
                target.only((queue,)),
                producer,
                run.keys[first:last],
                run.properties[first:last],
                run.values[first:last],
                # Runs come in the order of their numbers: what is missing before this one was for a queue that is gone.
                settled=max(run.settled, producer.first_sequence),
                attributes=run.attributes,
                expiry_us=expiry_us,
                timestamp_us=timestamp_us,
                headers=None if run.headers is None else run.headers[first:last],
            )
        self.returned_count += int(log.end) - int(before)
        log.when_committed(reached, done)
        broker.on_ready()


def _duty(vhost: str, queue: Queue) -> Duty:
    return Duty(DutyKind.RETRY, vhost, queue.name, queue.view_id)
