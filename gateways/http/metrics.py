"""Metrics of a node for Prometheus, at /metrics. Driver: gathers on the loop, writes the text in a thread.

The number of series is bounded: totals for everything, and lines of their own for the QUEUES_MAX queues that hold most
and the GROUPS_MAX consumer groups that are most behind.
From this machine it may be asked without a login; from elsewhere by users with the tag monitoring. docs/metrics.md
lists every name (a test holds the two together).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from typing import TYPE_CHECKING

import trio
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from headrace.delay.engine import LATENESS_S
from headrace.gateways.delivery.access import Tag
from headrace.gateways.delivery.alarms import Alarm
from headrace.gateways.delivery.queue import Reason
from headrace.gateways.delivery.redrive import State
from headrace.gateways.delivery.transfers import FAILURES
from headrace.gateways.http.operations import Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, unauthorized
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PATH = "/metrics"
QUEUES_MAX = 1000
GROUPS_MAX = 1000
# So many queues are looked at before others on the loop get a turn.
_PER_TURN = 500

_STATES = ("ready", "unacked")
_DEATHS = tuple(reason for reason in Reason if reason is not Reason.REDRIVEN)
_FAILURES = tuple(reason for reason in Reason if reason in FAILURES)


@dataclass(frozen=True, slots=True)
class QueueCounts:
    vhost: str
    name: str
    ready: int
    unacked: int
    consumers: int
    delivered: int
    acked: int
    returned: int
    expired: int
    dropped: int


@dataclass(frozen=True, slots=True)
class GroupCounts:
    vhost: str
    name: str
    members: int
    # By topic.
    lags: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MqttCounts:
    """Of MQTT in one vhost, since the start."""

    vhost: str
    connected: int
    asleep: int
    subscriptions: int
    retained: int
    received: int
    sent: int
    # By reason; all of them, and of those the ones beyond what may wait for a session.
    dropped: int
    oldest: int
    refused: int


@dataclass(slots=True)
class StreamCounts:
    """Of all streams of a kind."""

    streams: int = 0
    byte_count: int = 0
    records: int = 0
    uncommitted: int = 0


async def get_metrics(call: Call[Parameters, Parameters, None]) -> Reply:
    check_visitor(call.visitor)
    return await written(await families_of(call.door))


def check_visitor(visitor: Visitor) -> None:
    """Raises Problem unless they may see the metrics."""
    if not visitor.is_local:
        if not visitor.name:
            raise unauthorized()
        visitor.require_tag(Tag.MONITORING)


async def families_of(door: "HttpDoor") -> list[Metric]:
    """All that a door tells of what it serves."""
    streams, queues = await _streams(door), await _queues(door)
    return [
        *_of_node(door),
        *_of_log(streams),
        *_of_queues(queues),
        *_of_groups(door, await _groups(door)),
        *_of_mqtt(door.mqtt_counts()),
    ]


async def written(families: Sequence[Metric]) -> Reply:
    return Reply(await trio.to_thread.run_sync(_written, families), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _queues(door: "HttpDoor") -> list[QueueCounts]:
    found: list[QueueCounts] = []
    for host in list(door.broker.vhosts.values()):
        for place, queue in enumerate(list(host.queues.values())):
            found.append(
                QueueCounts(
                    host.name,
                    queue.name,
                    queue.ready_count,
                    queue.unacked_count,
                    queue.consumer_count,
                    queue.delivered_count,
                    queue.acked_count,
                    queue.returned_count,
                    queue.expired_count,
                    queue.dropped_count,
                )
            )
            if place % _PER_TURN == 0:
                await trio.lowlevel.checkpoint()
    return found


async def _streams(door: "HttpDoor") -> dict[str, StreamCounts]:
    counts: dict[str, StreamCounts] = {}
    for stream in list(door.broker.directory.streams.values()):
        known = counts.setdefault(stream.spec.kind, StreamCounts())
        known.streams += 1
        for log in stream.partitions:
            known.byte_count += log.byte_count
            known.records += log.end
            known.uncommitted += log.end - log.high_watermark
        # The size of a log that nobody has touched yet is read from its index.
        await trio.lowlevel.checkpoint()
    return counts


async def _groups(door: "HttpDoor") -> list[GroupCounts]:
    found: list[GroupCounts] = []
    for name, group in list(door.groups.groups.items()):
        lags: dict[str, int] = {}
        for one in door.groups.progress(name) if name in door.groups.groups else ():
            place = door.group_topics.maybe_place(one.slot.stream)
            if place is not None:
                lags[place.public_name] = lags.get(place.public_name, 0) + one.lag
        found.append(GroupCounts(name.vhost, name.name, len(group.members), lags))
        await trio.lowlevel.checkpoint()
    return found


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"headrace_{name}", text)
    family.add_metric([], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(f"headrace_{name}", text)
    family.add_metric([], value)
    return family


def _of_node(door: "HttpDoor") -> Iterator[Metric]:
    info = InfoMetricFamily("headrace_build", "Which release this is")
    info.add_metric([], {"version": door.version})
    yield info
    alarms = GaugeMetricFamily("headrace_alarm", "1 while publishers wait because of it", labels=["alarm"])
    for alarm in Alarm:
        alarms.add_metric([alarm.value], float(alarm in door.alarms.active))
    yield alarms
    measured = door.alarms.measured
    if measured is not None:
        yield _gauge("memory_bytes", "Memory of the process", measured.memory_bytes)
        yield _gauge("memory_limit_bytes", "Memory of the machine or the container", measured.memory_bytes_max)
        yield _gauge("disk_free_bytes", "Free space where the data is", measured.disk_free_bytes)
        yield _gauge("disk_bytes", "Size of the disk where the data is", measured.disk_bytes)
    accepted = CounterMetricFamily("headrace_connections_accepted", "Connections taken by a door", labels=["door"])
    for listener in door.listeners:
        accepted.add_metric([listener.name], listener.accepted_count)
    yield accepted
    yield _gauge("connections", "Sockets that are open, of all doors", door.limits.socket_count)
    yield _counter("connections_dropped", "Sockets closed unheard, beyond a limit", door.limits.dropped_count)
    yield _counter("connections_refused", "Connections and channels refused by a limit", door.limits.refused_count)
    broker = door.broker
    yield _counter("unroutable", "Messages that no queue got", broker.unroutable_count)
    transfers = broker.transfers
    for name, text, counts, reasons in (
        ("dead_letters", "Messages moved to a dead-letter exchange or queue", transfers.dead_letters, _DEATHS),
        ("dead_letters_refused", "Dead letters that a full queue did not get", transfers.refused, _DEATHS),
        ("retries", "Failed attempts that are followed by another", transfers.retries, _FAILURES),
        ("retries_exhausted", "Failed attempts that were the last", transfers.exhausted, _FAILURES),
    ):
        family = CounterMetricFamily(f"headrace_{name}", text, labels=["reason"])
        for reason in reasons:
            family.add_metric([reason.value], counts[reason])
        yield family
    yield _counter("dead_letter_cycles", "Dead letters dropped since they went in a circle", broker.dropped_death_count)
    yield _counter("redriven", "Dead letters sent back to a queue", transfers.redriven_count)
    running = sum(one.state is State.RUNNING for one in broker.redrives.list())
    yield _gauge("redrives_running", "Redrives that have not come to their end", running)
    yield from _of_delays(door)
    yield from _of_staging(door)
    yield from _of_leases(door)
    requests = CounterMetricFamily("headrace_http_requests", "Requests that were answered", labels=["status"])
    for status in ("2xx", "4xx", "5xx"):
        requests.add_metric([status], door.answers[status])
    yield requests
    yield _gauge("vhosts", "Virtual hosts", len(broker.vhosts))
    snapshot = broker.metadata.snapshot
    yield _gauge("exchanges", "Durable exchanges", len(snapshot.exchanges))
    yield _gauge("metadata_version", "Version of the metadata", snapshot.version)


def _of_delays(door: "HttpDoor") -> Iterator[Metric]:
    delayed = door.broker.delayed
    delays, counters = delayed.delays, delayed.delays.counters
    yield _gauge("delayed_messages", "Messages that are parked until they are due", delays.count())
    yield _gauge("delayed_bytes", "Bytes of log that hold them", delays.byte_count)
    yield _counter("delayed_parked", "Messages that were parked", counters.parked)
    yield _counter("delayed_fired", "Parked messages that fell due", counters.fired)
    yield _counter("delayed_cancelled", "Parked messages that were cancelled", counters.cancelled)
    yield _counter("delayed_rescheduled", "Parked messages that got another due time", counters.rescheduled)
    yield _counter("delayed_dropped", "Messages whose exchange or queue was gone when due", delayed.dropped_count)
    sums = accumulate(counters.lateness)
    bounds = [*map(str, LATENESS_S), "+Inf"]
    yield HistogramMetricFamily(
        "headrace_delayed_lateness_seconds",
        "How long after its due time a parked message was handed over",
        buckets=list(zip(bounds, sums, strict=True)),
        sum_value=counters.lateness_us / 1e6,
    )
    schedules = GaugeMetricFamily("headrace_schedules", "Schedules", labels=["state"])
    found = door.schedules.list()
    paused = sum(one.definition.paused for one in found)
    schedules.add_metric(["active"], len(found) - paused)
    schedules.add_metric(["paused"], paused)
    yield schedules


def _of_staging(door: "HttpDoor") -> Iterator[Metric]:
    staging = door.staging
    yield _gauge("staged_bytes", "Bytes that wait for a commit", staging.byte_count)
    yield _gauge("stages", "Stages that wait for a commit", staging.stage_count)
    yield _gauge("staging_queries", "Queries whose last batch is remembered", staging.query_count)
    commits = CounterMetricFamily("headrace_staging_commits", "Commits, by what came of them", labels=["outcome"])
    for outcome in ("committed", "repeated"):
        commits.add_metric([outcome], staging.counts[outcome])
    yield commits
    gone = CounterMetricFamily("headrace_stages_gone", "Stages that were never published, by why", labels=["reason"])
    for reason in ("aborted", "expired"):
        gone.add_metric([reason], staging.counts[reason])
    yield gone
    yield _counter("staged_messages", "Messages that were staged", staging.counts["staged"])
    yield _counter("staging_published", "Messages that commits have published", staging.counts["published"])
    yield _counter("staging_dropped", "Messages whose topic went while they were published", staging.counts["dropped"])


def _of_leases(door: "HttpDoor") -> Iterator[Metric]:
    leases = door.read_leases
    yield _gauge("read_leases", "Read leases that count", leases.count)
    yield _gauge("read_leases_overdue", "Partitions for which retention no longer waits", leases.overdue_count)
    events = CounterMetricFamily("headrace_read_lease_events", "What became of read leases", labels=["event"])
    for event in ("granted", "renewed", "released", "expired"):
        events.add_metric([event], leases.counts[event])
    yield events


def _of_log(counts: Mapping[str, StreamCounts]) -> Iterator[Metric]:
    streams = GaugeMetricFamily("headrace_streams", "Streams in the data directory", labels=["kind"])
    size = GaugeMetricFamily("headrace_log_bytes", "Bytes of log, as stored", labels=["kind"])
    records = CounterMetricFamily("headrace_log_records", "Offsets issued", labels=["kind"])
    for kind, found in sorted(counts.items()):
        streams.add_metric([kind], found.streams)
        size.add_metric([kind], found.byte_count)
        records.add_metric([kind], found.records)
    yield streams
    yield size
    yield records
    uncommitted = sum(found.uncommitted for found in counts.values())
    yield _gauge("log_uncommitted_records", "Records that were appended and are not committed yet", uncommitted)


def _of_groups(door: "HttpDoor", groups: Sequence[GroupCounts]) -> Iterator[Metric]:
    yield _gauge("consumer_groups", "Consumer groups, those without members too", len(groups))
    members = GaugeMetricFamily("headrace_consumer_group_members", "Members of a group", labels=["vhost", "group"])
    lag = GaugeMetricFamily(
        "headrace_consumer_group_lag",
        "Messages of a topic that a group has not committed yet",
        labels=["vhost", "group", "topic"],
    )
    for one in nlargest(GROUPS_MAX, groups, key=lambda one: sum(one.lags.values())):
        members.add_metric([one.vhost, one.name], one.members)
        for topic, count in one.lags.items():
            lag.add_metric([one.vhost, one.name, topic], count)
    yield members
    yield lag
    text = "Offsets that retention took before a consumer group had read them"
    yield _counter("consumer_group_lost_offsets", text, door.groups.lost_count)
    retries = door.groups.retries
    for name, text, count in (
        ("retries", "Messages that members failed with and that are tried again", retries.retried_count),
        ("dead_letters", "Messages that members failed with for the last time", retries.dead_count),
        ("returned", "Messages that have come back to their group", retries.returned_count),
        ("retries_dropped", "Failed messages whose group or topic was gone", retries.dropped_count),
    ):
        yield _counter(f"consumer_group_{name}", text, count)


def _of_mqtt(counts: Sequence[MqttCounts]) -> Iterator[Metric]:
    sessions = GaugeMetricFamily("headrace_mqtt_sessions", "MQTT sessions", labels=["vhost", "state"])
    subscriptions = GaugeMetricFamily("headrace_mqtt_subscriptions", "Subscriptions of them", labels=["vhost"])
    retained = GaugeMetricFamily("headrace_mqtt_retained_messages", "Retained messages", labels=["vhost"])
    received = CounterMetricFamily("headrace_mqtt_received", "PUBLISH packets from clients", labels=["vhost"])
    sent = CounterMetricFamily("headrace_mqtt_sent", "PUBLISH packets to clients", labels=["vhost"])
    text = "Messages that a session was to get and never will"
    dropped = CounterMetricFamily("headrace_mqtt_dropped", text, labels=["vhost", "reason"])
    for one in counts:
        sessions.add_metric([one.vhost, "connected"], one.connected)
        sessions.add_metric([one.vhost, "asleep"], one.asleep)
        subscriptions.add_metric([one.vhost], one.subscriptions)
        retained.add_metric([one.vhost], one.retained)
        received.add_metric([one.vhost], one.received)
        sent.add_metric([one.vhost], one.sent)
        dropped.add_metric([one.vhost, "oldest"], one.oldest)
        dropped.add_metric([one.vhost, "refused"], one.refused)
        dropped.add_metric([one.vhost, "other"], one.dropped - one.oldest - one.refused)
    yield from (sessions, subscriptions, retained, received, sent, dropped)


def _of_queues(queues: Sequence[QueueCounts]) -> Iterator[Metric]:
    yield _gauge("queues", "Queues, exclusive ones too", len(queues))
    yield _gauge("consumers", "Consumers of all queues", sum(one.consumers for one in queues))
    total = GaugeMetricFamily("headrace_messages", "Messages in all queues", labels=["state"])
    for state in _STATES:
        total.add_metric([state], sum(getattr(one, state) for one in queues))
    yield total
    shown = nlargest(QUEUES_MAX, queues, key=lambda one: one.ready + one.unacked)
    yield _gauge("queues_unlisted", "Queues without lines of their own", len(queues) - len(shown))
    labels = ["vhost", "queue"]
    messages = GaugeMetricFamily("headrace_queue_messages", "Messages in a queue", labels=[*labels, "state"])
    consumers = GaugeMetricFamily("headrace_queue_consumers", "Consumers of a queue", labels=labels)
    counters = [
        (CounterMetricFamily(f"headrace_queue_{name}", text, labels=labels), name)
        for name, text in (
            ("delivered", "Messages handed to consumers"),
            ("acked", "Messages settled"),
            ("returned", "Messages given back"),
            ("expired", "Messages whose time was over"),
            ("dropped", "Messages beyond a length limit"),
        )
    ]
    for one in shown:
        key = [_text(one.vhost), _text(one.name)]
        for state in _STATES:
            messages.add_metric([*key, state], getattr(one, state))
        consumers.add_metric(key, one.consumers)
        for family, name in counters:
            family.add_metric(key, getattr(one, name))
    yield messages
    yield consumers
    for family, _name in counters:
        yield family


def _text(name: str) -> str:
    """A name as a label: octets that are no UTF-8 are written out."""
    return name.encode("utf-8", "backslashreplace").decode()


class _Gathered(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _written(families: Sequence[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gathered(families))
    return bytes(generate_latest(registry))


def operations() -> list[Operation]:
    return [
        Operation(
            "GET",
            PATH,
            get_metrics,
            "Metrics for Prometheus",
            "From the broker's own machine without a login; from elsewhere the user needs the tag monitoring.",
            media_type="text/plain",
            problems=(Code.UNAUTHORIZED, Code.FORBIDDEN),
            login=False,
        )
    ]
