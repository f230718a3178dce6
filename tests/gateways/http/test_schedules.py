"""Schedules over HTTP: messages that come round by the clock of a zone, over pauses, changes, kills and downtime."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from headrace.testing import EmbeddedBroker

CONFIG = """
[[users]]
name = "other"
password = "may read the heartbeat only"
[[permissions]]
user = "other"
configure = ""
write = ""
read = "^beats$"
"""
SCHEDULES = "/api/v1/schedules"


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    """With the users of CONFIG where a test asks for them: to hash a password takes longer than to start."""
    asked = request.node.get_closest_marker("usefixtures")
    config = CONFIG if asked is not None and "users" in asked.args else ""
    with EmbeddedBroker(doors=("amqp", "http"), config=config) as broker:
        yield broker


@pytest.fixture
def users() -> None:
    """Makes `broker` know them."""


@pytest.fixture
def http(broker: EmbeddedBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url(""), auth=("guest", "guest"), timeout=30) as client:
        yield client


class Reader:
    """A queue behind the exchange `beats`."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.connection = pika.BlockingConnection(pika.URLParameters(broker.amqp_url()))
        self.channel: BlockingChannel = self.connection.channel()
        self.channel.exchange_declare("beats", "fanout", durable=True)
        self.channel.queue_declare("beats", durable=True)
        self.channel.queue_bind("beats", "beats")

    def taken(self) -> list[bytes]:
        bodies = []
        while (found := self.channel.basic_get("beats", auto_ack=True))[2] is not None:
            bodies.append(found[2])
        return bodies

    def close(self) -> None:
        with suppress(AMQPError):
            self.connection.close()


@pytest.fixture
def reader(broker: EmbeddedBroker) -> Iterator[Reader]:
    reader = Reader(broker)
    yield reader
    reader.close()


def definition(cron: str, value: Any = "beat", **other: Any) -> dict[str, Any]:
    return {"cron": cron, "message": {"exchange": "beats", "key": "key", "value": value}, **other}


def put(http: httpx.Client, name: str, cron: str, value: Any = "beat", **other: Any) -> dict[str, Any]:
    answer = http.put(f"{SCHEDULES}/{name}", json=definition(cron, value, **other))
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


def to_the_hour(broker: EmbeddedBroker) -> None:
    """Just after a full hour, so that counts are certain."""
    now = broker.clock.now()
    broker.clock.advance((now.replace(minute=0, second=5, microsecond=0) + timedelta(hours=1) - now).total_seconds())


def test_a_message_comes_round_every_hour(broker: EmbeddedBroker, http: httpx.Client, reader: Reader) -> None:
    to_the_hour(broker)
    made = put(http, "hourly", "0 * * * *", {"kind": "beat"})
    assert datetime.fromisoformat(made["next_run"]) - broker.clock.now() <= timedelta(hours=1)
    broker.clock.advance(hours=5)
    assert reader.taken() == [b'{"kind": "beat"}'.replace(b": ", b":")] * 5
    shown = http.get(f"{SCHEDULES}/hourly").json()
    assert (shown["runs"], shown["missed_runs"], shown["failed_runs"]) == (5, 0, 0)
    assert shown["message"]["properties"]["content_type"] == "application/json"


def test_a_zone_has_its_own_morning(broker: EmbeddedBroker, http: httpx.Client, reader: Reader) -> None:
    made = put(http, "morning", "0 8 * * *", zone="Asia/Tokyo")
    assert datetime.fromisoformat(made["next_run"]).astimezone(ZoneInfo("Asia/Tokyo")).hour == 8
    broker.clock.advance(days=2)
    assert reader.taken() == [b"beat"] * 2


def test_a_paused_schedule_rests_and_makes_up_for_nothing(
    broker: EmbeddedBroker, http: httpx.Client, reader: Reader
) -> None:
    to_the_hour(broker)
    put(http, "hourly", "@hourly", missed="all")
    broker.clock.advance(hours=1)
    assert http.post(f"{SCHEDULES}/hourly/pause").json()["next_run"] is None
    broker.clock.advance(hours=3)
    assert reader.taken() == [b"beat"]
    assert http.post(f"{SCHEDULES}/hourly/resume").json()["next_run"] is not None
    broker.clock.advance(hours=2)
    assert reader.taken() == [b"beat"] * 2


def test_a_changed_schedule_forgets_its_old_times(broker: EmbeddedBroker, http: httpx.Client, reader: Reader) -> None:
    to_the_hour(broker)
    assert http.put(f"{SCHEDULES}/one", json=definition("@hourly", "old")).status_code == 201
    assert http.put(f"{SCHEDULES}/one", json=definition("30 * * * *", "new")).status_code == 200
    broker.clock.advance(hours=2)
    assert reader.taken() == [b"new"] * 2
    assert http.delete(f"{SCHEDULES}/one").status_code == 204
    broker.clock.advance(hours=2)
    assert reader.taken() == []
    assert http.get(f"{SCHEDULES}/one").status_code == 404


def test_it_can_be_run_at_once_beside_its_times(broker: EmbeddedBroker, http: httpx.Client, reader: Reader) -> None:
    put(http, "yearly", "@yearly")
    assert http.post(f"{SCHEDULES}/yearly/run").status_code == 200
    assert reader.taken() == [b"beat"]


def test_runs_beside_its_times_count_too_and_take_none_of_its_own(
    broker: EmbeddedBroker, http: httpx.Client, reader: Reader
) -> None:
    to_the_hour(broker)
    before = put(http, "hourly", "@hourly")
    assert (before["runs"], before["last_run"]) == (0, None)
    for count in (1, 2):
        answer = http.post(f"{SCHEDULES}/hourly/run").json()
        assert (answer["runs"], answer["next_run"]) == (count, before["next_run"])
        assert answer["last_run"] is not None
    broker.clock.advance(3600)
    broker.restart()
    with httpx.Client(base_url=broker.http_url(""), auth=("guest", "guest"), timeout=30) as again:
        assert again.get(f"{SCHEDULES}/hourly").json()["runs"] == 3


def test_a_schedule_may_name_the_queue_it_goes_to(http: httpx.Client, reader: Reader) -> None:
    made = http.put(f"{SCHEDULES}/q", json={"cron": "@yearly", "message": {"queue": "beats", "value": "to it"}}).json()
    assert (made["message"]["exchange"], made["message"]["key"]) == ("", "beats")
    http.post(f"{SCHEDULES}/q/run").raise_for_status()
    assert reader.taken() == [b"to it"]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"value": "x"}, "exchange or queue"),
        ({"exchange": "beats", "queue": "beats"}, "exchange or queue"),
        ({"queue": ""}, "exchange or queue"),
        ({"queue": "beats", "key": "k"}, "key belongs to exchange"),
        ({"exchange": "beats", "headers": {"x-delay": 5}}, "published at its time"),
        ({"exchange": "beats", "headers": {"x-sequence": 5}}, "numbers of their own"),
    ],
)
def test_a_message_that_cannot_be_scheduled_is_refused_with_the_reason(
    http: httpx.Client, reader: Reader, message: dict[str, Any], told: str
) -> None:
    answer = http.put(f"{SCHEDULES}/bad", json={"cron": "@daily", "message": message})
    assert answer.status_code == 422
    assert told in answer.json()["detail"]
    assert "field" not in answer.json()["detail"]


@pytest.mark.parametrize(("missed", "count"), [("skip", 1), ("once", 2), ("all", 6)])
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_runs_missed_while_the_broker_was_down_go_by_the_policy(
    broker: EmbeddedBroker, http: httpx.Client, reader: Reader, missed: str, count: int, how: str
) -> None:
    to_the_hour(broker)
    put(http, "hourly", "@hourly", missed=missed)
    reader.close()
    getattr(broker, how)()
    broker.clock.advance(hours=5.5)
    broker.start()
    broker.clock.advance(hours=1)
    again = Reader(broker)
    assert again.taken() == [b"beat"] * count
    again.close()


def test_kills_between_runs_neither_lose_nor_double_one(
    broker: EmbeddedBroker, http: httpx.Client, reader: Reader
) -> None:
    to_the_hour(broker)
    put(http, "hourly", "@hourly", missed="all")
    reader.close()
    for _ in range(4):
        broker.clock.advance(hours=1)
        broker.kill()
        broker.start()
    broker.clock.advance(seconds=1)
    again = Reader(broker)
    assert again.taken() == [b"beat"] * 4
    again.close()


def test_a_run_without_an_exchange_is_counted_and_the_next_one_tries_again(
    broker: EmbeddedBroker, http: httpx.Client, reader: Reader
) -> None:
    to_the_hour(broker)
    put(http, "hourly", "@hourly")
    reader.channel.exchange_delete("beats")
    broker.clock.advance(hours=1)
    assert http.get(f"{SCHEDULES}/hourly").json()["failed_runs"] == 1
    assert http.post(f"{SCHEDULES}/hourly/run").status_code == 404
    reader.channel.exchange_declare("beats", "fanout", durable=True)
    reader.channel.queue_bind("beats", "beats")
    broker.clock.advance(hours=1)
    assert reader.taken() == [b"beat"]


def test_a_schedule_further_away_than_any_delay_is_kept(http: httpx.Client, reader: Reader) -> None:
    made = put(http, "leap", "0 0 29 2 1")
    assert datetime.fromisoformat(made["next_run"]) > datetime.now(UTC)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"cron": "often"}, 422, "invalid"),
        ({"cron": "0 0 30 2 *"}, 422, "invalid"),
        ({"zone": "Mars/Base"}, 422, "invalid"),
        ({"missed": "maybe"}, 422, "invalid"),
        ({"message": {"exchange": "nobody"}}, 404, "not_found"),
        ({"message": {"exchange": "beats", "value": "%%%", "encoding": "base64"}}, 422, "invalid"),
    ],
)
def test_what_makes_no_sense_is_refused(
    http: httpx.Client, reader: Reader, change: dict[str, Any], status: int, code: str
) -> None:
    answer = http.put(f"{SCHEDULES}/bad", json={**definition("@daily"), **change})
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert http.get(SCHEDULES).json() == {"schedules": []}


@pytest.mark.usefixtures("users")
def test_rights_go_by_the_exchange(broker: EmbeddedBroker, http: httpx.Client, reader: Reader) -> None:
    put(http, "seen", "@daily")
    put(http, "hidden", "@daily", message={"exchange": "amq.fanout"})
    login = ("other", "may read the heartbeat only")
    with httpx.Client(base_url=broker.http_url(""), auth=login, timeout=30) as other:
        assert [one["name"] for one in other.get(SCHEDULES).json()["schedules"]] == ["seen"]
        assert other.get(f"{SCHEDULES}/hidden").status_code == 403
        assert other.put(f"{SCHEDULES}/mine", json=definition("@daily")).status_code == 403
        for verb in ("pause", "resume", "run"):
            assert other.post(f"{SCHEDULES}/seen/{verb}").status_code == 403
        assert other.delete(f"{SCHEDULES}/seen").status_code == 403
