"""What every node of a cluster answers itself over HTTP, whatever it leads: health, metrics, the cluster. Driver.

Metrics are those of the node's replicas, and of each shard that it serves with the label `shard`. Neighbours: front.py
sends requests here, or to who leads what they are about.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import trio
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from headrace.core_log.replication.status import Role, ShardStatus
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.http import health
from headrace.gateways.http.app import App, about_itself, all_operations
from headrace.gateways.http.cluster import Cluster
from headrace.gateways.http.cluster import operations as cluster_operations
from headrace.gateways.http.config import HttpConfig
from headrace.gateways.http.metrics import PATH as METRICS
from headrace.gateways.http.metrics import check_visitor, families_of, written
from headrace.gateways.http.operations import Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor


class NodeDoor:
    """What the operations below ask of a door: a node's own, without what is a shard's."""

    def __init__(
        self,
        cluster: Cluster,
        access: Access,
        authentication: Authentication,
        alarms: Alarms,
        *,
        metadata_version: Callable[[], int],
        statuses: Callable[[], Sequence[ShardStatus]],
        served: Callable[[], Iterable[tuple[int, "HttpDoor"]]],
        config: HttpConfig,
        version: str,
    ) -> None:
        self.cluster = cluster
        self.access = access
        self.authentication = authentication
        self.alarms = alarms
        self.statuses = statuses
        self.served = served
        self.config = config
        self.version = version
        self.stopping = trio.Event()
        self.answers: Counter[str] = Counter()
        self._metadata_version = metadata_version
        # The operations that come here use nothing but what stands above.
        here = [*health.operations(), *cluster_operations(), *_metrics(), *about_itself()]
        documented = [*all_operations(), *cluster_operations()]
        self.app = App(cast("HttpDoor", self), here, documented)

    @property
    def metadata_version(self) -> int:
        return self._metadata_version()

    def replicas(self) -> list[dict[str, Any]]:
        """The replicas of this node, as plain values."""
        return [
            {
                "shard": one.shard,
                "role": one.role.value,
                "epoch": one.stint.epoch,
                "streams": one.log_count,
                "uncommitted": one.watermark_lag,
                "received_bytes": one.received_bytes,
                "set_aside": one.aside_count,
                "followers": [
                    {
                        "node": follower.node,
                        "in_sync": follower.is_in_sync,
                        "connected": follower.is_connected,
                        "lag": follower.record_lag,
                        "lag_bytes": follower.byte_lag,
                        "behind_s": round(follower.behind_s, 3),
                        "sent_bytes": follower.sent_bytes,
                    }
                    for follower in one.followers
                ],
            }
            for one in self.statuses()
        ]


async def get_node_metrics(call: Call[Parameters, Parameters, None]) -> Reply:
    check_visitor(call.visitor)
    door = cast(NodeDoor, call.door)
    families = {family.name: family for family in of_replicas(door.statuses())}
    for number, served in door.served():
        for family in await families_of(served):
            kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            kept.samples += [_with(sample, {"shard": str(number)}) for sample in family.samples]
    return await written(list(families.values()))


def _with(sample: Sample, labels: Mapping[str, str]) -> Sample:
    return sample._replace(labels={**sample.labels, **labels})


def of_replicas(statuses: Sequence[ShardStatus]) -> Iterator[Metric]:
    def gauge(name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"headrace_replica_{name}", text, labels=labels)

    leads = gauge("leads", "Whether this node leads the shard", ["shard"])
    uncommitted = gauge("uncommitted_records", "Written here and not known to be committed", ["shard"])
    received = gauge("received_bytes", "Taken from leaders since the start", ["shard"])
    damaged = gauge("damaged", "Whether this replica is damaged, and waits to be fetched anew", ["shard"])
    aside = gauge("set_aside", "Damaged replicas of the shard whose files are still kept here", ["shard"])
    in_sync = gauge("follower_in_sync", "Whether a follower of what is led here is in sync", ["shard", "node"])
    lag = gauge("follower_lag_records", "What a follower has not synced yet", ["shard", "node"])
    behind = gauge("follower_behind_seconds", "How long ago a follower had all that there was", ["shard", "node"])
    for one in statuses:
        shard = [str(one.shard)]
        leads.add_metric(shard, one.role is Role.LEADER)
        uncommitted.add_metric(shard, one.watermark_lag)
        received.add_metric(shard, one.received_bytes)
        damaged.add_metric(shard, one.role is Role.DAMAGED)
        aside.add_metric(shard, one.aside_count)
        for follower in one.followers:
            both = [*shard, str(follower.node)]
            in_sync.add_metric(both, follower.is_in_sync)
            lag.add_metric(both, follower.record_lag)
            behind.add_metric(both, follower.behind_s)
    yield from (leads, uncommitted, received, damaged, aside, in_sync, lag, behind)


def _metrics() -> list[Operation]:
    return [
        Operation(
            "GET",
            METRICS,
            get_node_metrics,
            "Metrics of the node and of what it leads",
            answers={200: str},
            media_type="text/plain",
            problems=(Code.FORBIDDEN,),
            login=False,
        )
    ]
