"""A short sample of the kill -9 loop over MQTT, which `make interop` runs for a minute."""

from interop.mqtt import kill_loop


def test_nothing_acknowledged_is_lost_and_qos_2_is_never_doubled_when_the_broker_is_killed_under_load() -> None:
    report = kill_loop.run(seconds=4, seed=kill_loop.any_seed(), kills_min=2)
    assert report.problems == [], report.line()
