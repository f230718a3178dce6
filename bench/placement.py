"""Claims: the replicas of 100,000 partitions on 50 nodes are even, and the loss of a node moves what it held. Driver.

A simulation of the controller's decisions alone (controller/placement.py): nothing is sent or stored.
"""

import time

from bench.claim import Better, Claim
from headrace.controller.placement import Placement

PARTITIONS = 100_000
NODES = 50
FACTOR = 3
LOST = 17


def unevenness(counts: dict[int, int]) -> float:
    """How far the worst node is from its share, in percent of that."""
    share = sum(counts.values()) / len(counts)
    return 100 * max(abs(count - share) for count in counts.values()) / share


def claim() -> list[Claim]:
    begun = time.perf_counter()
    placement: Placement[int] = Placement(range(NODES))
    placement.place(range(PARTITIONS), FACTOR)
    placed_s = time.perf_counter() - begun
    before = dict(placement.replicas)
    after = Placement((node for node in range(NODES) if node != LOST), before)
    after.repair()
    seconds = time.perf_counter() - begun
    moved = sum(len(set(after.replicas[one]) - set(before[one])) for one in before)
    worst = max(unevenness(counts) for counts in (placement.held, placement.led, after.held, after.led))
    name = f"place {PARTITIONS:,} partitions x {FACTOR} on {NODES} nodes, then lose one"
    return [
        Claim(f"{name}: time", seconds, 30.0, Better.LESS, "s", f"of it {placed_s:.1f} s to place them all"),
        Claim(f"{name}: unevenness", worst, 5.0, Better.LESS, "%", "of replicas and of leaders, before and after"),
        Claim(f"{name}: moved for each replica lost", moved / placement.held[LOST], 1.0, Better.LESS),
    ]
