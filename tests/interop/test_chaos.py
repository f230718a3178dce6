"""A short sample of the chaos over three nodes, which `make chaos` runs for minutes."""

from interop.cluster import chaos


def test_nothing_confirmed_is_lost_when_the_leader_of_three_nodes_is_killed_under_load() -> None:
    report = chaos.run(0, chaos.amqp.any_seed(), kinds=["leader killed"])
    assert report.problems == [], report.line()
