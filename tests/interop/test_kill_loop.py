"""A short sample of the kill -9 loop; `make interop` runs it for a minute."""

from interop.amqp import kill_loop


def test_nothing_confirmed_is_lost_when_the_broker_is_killed_under_load() -> None:
    report = kill_loop.run(seconds=4, seed=kill_loop.any_seed(), kills_min=2)
    assert report.problems == [], report.line()
