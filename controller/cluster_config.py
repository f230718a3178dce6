"""How a cluster is cut, and how long its nodes wait for each other. Value.

Renewing twice over, with a statement of the database that takes its whole time in between, fits below the time after
which a controller stops by itself, and that lies below the time after which another may try (Patroni's rule).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    # Of a new cluster: into how many shards the vhosts are divided, on how many nodes each lies, and how many of those
    # must have a record before it is confirmed.
    shards: int = 3
    replicas: int = 3
    min_isr: int = 2
    # The lease: who has seen no renewal for so long may try to be the controller; it is renewed, and looked at, so
    # often; who could not renew it for so long stops being the controller.
    lease_ttl_s: float = 10.0
    renew_s: float = 2.0
    self_deadline_s: float = 6.0
    # Between a node and the controller: how often each says that it is there, and how long that is believed.
    heartbeat_s: float = 1.0
    session_s: float = 9.0
    # How long a new controller waits for nodes that it has not heard of, before it takes them for dead.
    grace_s: float = 5.0
    # How long a change of the metadata waits for a controller, and a controller for its database.
    commit_s: float = 15.0
    # How long a node that should lead has been there before leadership comes back to it.
    balance_s: float = 300.0
    # How long a node has been away before what it held is copied elsewhere.
    lost_s: float = 900.0
    # How long a node that starts waits for a controller before it goes on with the metadata that it kept.
    start_s: float = 10.0
    # So many view ids are reserved at once.
    views: int = 4096

    def __post_init__(self) -> None:
        if not 1 <= self.min_isr <= self.replicas:
            raise ValueError(f"{self.min_isr} in sync of {self.replicas} replicas")
        if not self.renew_s < self.self_deadline_s < self.lease_ttl_s:
            raise ValueError("a lease is renewed before its holder stops, and that before another may try")
        if not self.heartbeat_s < self.session_s:
            raise ValueError("a session outlives a heartbeat")


DEFAULT_CONFIG = ClusterConfig()
