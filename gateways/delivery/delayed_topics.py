"""Delayed messages of created topics are appended when they are due. Driver.

By name and key, as the topic is then: one that has grown since gives a key its new partition, one of the same name that
was created since takes it. If there is none, the message is dropped and counted. Neighbours: delayed.py calls,
topics.py knows the topics.
"""

import logging
from collections.abc import Callable

from headrace.controller.errors import NotFound
from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import TargetPartition
from headrace.delay.fire import DueRun
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_duty import Duty
from headrace.gateways.delivery.topics import TopicKind, TopicName, Topics

_log = logging.getLogger(__name__)


class DelayedTopics:
    """The carrier of messages for topics."""

    def __init__(self, broker: Broker, topics: Topics) -> None:
        self._broker = broker
        self._topics = topics
        self.appended_count = self.dropped_count = 0

    def place(self, duty: Duty, key: bytes) -> TargetPartition | None:
        try:
            place = self._topics.resolve(TopicName(duty.vhost, TopicKind.TOPIC, duty.name))
        except NotFound:
            return None
        return TargetPartition(place.stream_id, self._topics.partition_for(place, key))

    def fire(self, duty: Duty, run: DueRun, done: Callable[[], None]) -> None:
        log = self._log_of(run.where)
        if log is None or run.producer is None:
            self.dropped_count += len(run)
            _log.warning(
                "delayed messages were dropped: their topic is gone",
                extra={"vhost": duty.vhost, "topic": duty.name, "count": len(run)},
            )
            done()
            return
        before = log.end
        appended = log.append_dense(
            run.producer,
            run.keys,
            run.properties,
            run.values,
            settled=run.settled,
            timestamp_us=self._broker.env.clock.wall_us(),
            attributes=run.attributes,
            tags=run.tags,
            headers=run.headers,
        )
        self.appended_count += log.end - before
        self._broker.directory.committer.urgent(log)
        log.when_committed(int(appended.next_offset), done)

    def _log_of(self, where: TargetPartition | None) -> PartitionLog | None:
        if where is None:
            return None
        logs = self._topics.logs_of(StreamId(where.stream))
        return logs[where.partition] if where.partition < len(logs) else None
