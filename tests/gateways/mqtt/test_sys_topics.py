"""$SYS: what the broker says of itself is true, found by its own filters only, and told when it changes."""

import math
from itertools import takewhile
from pathlib import Path

import pytest

from headrace import __version__
from headrace.gateways.mqtt.packets import Disconnect, Publish, RetainHandling, Subscription, Will
from headrace.gateways.mqtt.reasons import ReasonCode, Version
from headrace.gateways.mqtt.sys_topics import Figures, SysTopics
from headrace.gateways.mqtt.tally import Tally

from .conftest import MqttBroker
from .wire import Open, Wire


class Vhost:
    def __init__(self) -> None:
        self.tally = Tally()
        self.figures = Figures(0, 0, 0)
        self.topics = SysTopics("headrace version 1", self.tally, lambda: self.figures, 1000.0)

    def found(self, topic_filter: str, now: float = 1000.0) -> dict[str, str]:
        return {one.topic.decode(): one.payload.decode() for one in self.topics.matching(topic_filter, now)}

    def changed(self, now: float) -> dict[str, str]:
        return {one.topic.decode(): one.payload.decode() for one in self.topics.changed(now)}


def test_new_subscription_gets_what_is_true_now() -> None:
    vhost = Vhost()
    vhost.tally.published, vhost.tally.delivered, vhost.tally.clients_max = 3, 9, 4
    vhost.figures = Figures(connected=2, sessions=5, retained=7)
    found = vhost.found("$SYS/#", 1062.9)
    assert found["$SYS/broker/version"] == "headrace version 1"
    assert found["$SYS/broker/uptime"] == "62 seconds"
    assert [found[f"$SYS/broker/clients/{name}"] for name in ("connected", "disconnected", "total", "maximum")] == [
        "2",
        "3",
        "5",
        "4",
    ]
    assert found["$SYS/broker/publish/messages/received"] == "3"
    assert found["$SYS/broker/publish/messages/sent"] == "9"
    assert found["$SYS/broker/retained messages/count"] == "7"


@pytest.mark.parametrize(
    ("topic_filter", "count"),
    [
        ("$SYS/broker/version", 1),
        ("$SYS/broker/clients/+", 4),
        ("$SYS/+/uptime", 1),
        ("$SYS/broker/load/connections/+", 3),
        ("$SYS/nothing/#", 0),
        ("$SYS", 0),
        ("#", 0),
        ("+/broker/version", 0),
        ("$SYSTEM/#", 0),
    ],
)
def test_only_filters_of_their_own_find_them(topic_filter: str, count: int) -> None:
    assert len(Vhost().found(topic_filter)) == count


def test_figures_of_a_moment_ago_are_good_enough_and_older_ones_are_not() -> None:
    vhost = Vhost()
    assert vhost.found("$SYS/broker/bytes/sent") == {"$SYS/broker/bytes/sent": "0"}
    vhost.tally.bytes_sent = 5
    assert vhost.found("$SYS/broker/bytes/sent", 1000.5) == {"$SYS/broker/bytes/sent": "0"}
    assert vhost.found("$SYS/broker/bytes/sent", 1001.5) == {"$SYS/broker/bytes/sent": "5"}


def test_everything_is_told_at_first_and_then_what_changed() -> None:
    vhost = Vhost()
    assert set(vhost.changed(1000.0)) == set(vhost.found("$SYS/#"))
    vhost.tally.subscriptions = 1
    assert vhost.changed(1010.0) == {"$SYS/broker/uptime": "10 seconds", "$SYS/broker/subscriptions/count": "1"}
    # A subscription in between takes nothing away from the others.
    vhost.tally.subscriptions = 2
    vhost.found("$SYS/#", 1015.0)
    assert "$SYS/broker/subscriptions/count" in vhost.changed(1020.0)


def test_load_is_per_minute_and_forgets() -> None:
    vhost = Vhost()
    now = 1000.0
    for _ in range(6 * 90):
        now += 10
        vhost.tally.published += 20
        vhost.topics.changed(now)
    loads = [
        float(
            vhost.found(f"$SYS/broker/load/publish/received/{one}min", now)[
                f"$SYS/broker/load/publish/received/{one}min"
            ]
        )
        for one in (1, 5, 15)
    ]
    assert loads == [pytest.approx(120, rel=0.01)] * 3
    for _ in range(6):
        now += 10
        vhost.topics.changed(now)
    key = "$SYS/broker/load/publish/received/1min"
    assert float(vhost.found(key, now)[key]) == pytest.approx(120 / math.e, rel=0.01)


def test_clock_that_stands_still_divides_by_nothing() -> None:
    vhost = Vhost()
    vhost.tally.connections = 5
    assert vhost.changed(1000.0)["$SYS/broker/load/connections/1min"] == "0.00"


# -- over the wire -----------------------------------------------------------------------------------------------------

CONFIG = """
[mqtt]
sys_period_s = 1
[[vhosts]]
name = "shop"
[[vhosts]]
name = "quiet"
[[users]]
name = "ann"
password = "secret"
[[users]]
name = "narrow"
password = "secret"
[[topic_permissions]]
user = "narrow"
vhost = "shop"
exchange = "amq.topic"
write = ".*"
read = '^\\$SYS\\.broker\\.version$'
""" + "".join(
    f"""
[[permissions]]
user = "{user}"
vhost = "{vhost}"
configure = ".*"
write = ".*"
read = ".*"
"""
    for user in ("ann", "narrow")
    for vhost in ("shop", "quiet")
)


def told(client: Wire, topic: str, payload: bytes) -> Publish:
    """Waits until a topic has a value, as it is told again and again."""
    while True:
        found = client.expect(Publish)
        if (found.topic, found.payload) == (topic, payload):
            return found


def values(client: Wire, topic_filter: str = "$SYS/#") -> dict[str, str]:
    client.subscribe(topic_filter)
    found = takewhile(lambda one: one.retain, [one for one in client.seen_all() if isinstance(one, Publish)])
    client.unsubscribe(topic_filter)
    client.seen_all()
    return {one.topic: one.payload.decode() for one in found}


def test_subscription_is_answered_with_retained_values(client: Open, name: str) -> None:
    one = client(name)
    found = values(one)
    assert found["$SYS/broker/version"] == f"headrace version {__version__}"
    assert int(found["$SYS/broker/clients/connected"]) >= 1
    assert found["$SYS/broker/uptime"].endswith(" seconds")


def test_changes_are_told_as_they_come_and_not_as_retained(client: Open) -> None:
    watching = client(user="shop:ann", password=b"secret")
    watching.subscribe("$SYS/broker/clients/connected")
    other = client(user="shop:ann", password=b"secret")
    assert not told(watching, "$SYS/broker/clients/connected", b"2").retain
    watching.subscribe("$SYS/broker/subscriptions/count")
    told(watching, "$SYS/broker/subscriptions/count", b"2")
    other.subscribe("a", "b")
    told(watching, "$SYS/broker/subscriptions/count", b"4")
    other.unsubscribe("a")
    other.disconnect()
    told(watching, "$SYS/broker/subscriptions/count", b"2")


def test_retain_as_published_and_identifiers_hold_for_them_too(client: Open) -> None:
    one = client()
    wanted = Subscription("$SYS/broker/uptime", retain_as_published=True, retain_handling=RetainHandling.DO_NOT_SEND)
    one.subscribe(wanted, subscription_identifiers=(7,))
    found = one.expect(Publish)
    assert found.retain
    assert found.properties.subscription_identifiers == (7,)


def test_wildcards_at_the_first_level_do_not_find_them(client: Open) -> None:
    """[MQTT-4.7.2-1]"""
    one, other = client(), client()
    one.subscribe("#", "+/broker/uptime")
    other.subscribe("$SYS/broker/uptime")
    other.take(2)
    one.expect_nothing()


@pytest.mark.parametrize("version", Version)
def test_clients_may_not_publish_there(client: Open, version: Version) -> None:
    one = client(version=version)
    if version is Version.V5:
        assert one.publish("$SYS/broker/version", b"mine", 1) is ReasonCode.NOT_AUTHORIZED
        return
    one.send(Publish("$SYS/broker/version", b"mine"))
    one.expect_end()


def test_will_may_not_either(wire: Open) -> None:
    assert wire().connect(will=Will("$SYS/broker/version", b"mine")).reason is ReasonCode.NOT_AUTHORIZED


def test_neither_may_amqp(broker: MqttBroker, client: Open) -> None:
    one = client()
    one.subscribe("$SYS/broker/forged", "$SYS/#", "after")
    channel = broker.connect().channel()
    channel.basic_publish("amq.topic", "$SYS.broker.forged", b"mine")
    channel.basic_publish("amq.topic", "after", b"x")
    while (found := one.expect(Publish)).topic != "after":
        assert found.topic != "$SYS/broker/forged"
    late = client()
    assert "$SYS/broker/forged" not in values(late)


def test_group_cannot_share_what_is_not_in_the_log(client: Open) -> None:
    assert client().subscribe("$share/group/$SYS/#").reasons == (ReasonCode.TOPIC_FILTER_INVALID,)


def test_topic_permission_says_who_may_read_them(client: Open) -> None:
    one = client(user="shop:narrow", password=b"secret")
    assert one.subscribe("$SYS/broker/version", "$SYS/#", "$SYS/broker/uptime").reasons == (
        ReasonCode.SUCCESS,
        ReasonCode.NOT_AUTHORIZED,
        ReasonCode.NOT_AUTHORIZED,
    )


def test_figures_are_those_of_the_vhost(client: Open) -> None:
    """Nobody learns what goes on elsewhere."""
    client()
    one = client(user="quiet:ann", password=b"secret")
    one.publish("a", b"x", 1)
    one.publish("b", b"x", 1, retain=True)
    one.subscribe("b")
    one.take()
    found = values(one)
    assert found["$SYS/broker/clients/connected"] == "1"
    assert found["$SYS/broker/publish/messages/received"] == "2"
    # The message above; those of $SYS come after.
    assert found["$SYS/broker/publish/messages/sent"] == "1"
    assert found["$SYS/broker/retained messages/count"] == "1"
    assert found["$SYS/broker/subscriptions/count"] == "2"


def test_deliveries_are_counted_once_each_however_they_go(tmp_path: Path) -> None:
    """Pushed, fed from the log to one that slept, sent again, expired, too large."""
    with MqttBroker(tmp_path, config="[mqtt]\nsys_period_s = 1\n") as broker:
        pushed, publisher, asleep = broker.wire(), broker.wire(), broker.wire()
        pushed.connect("pushed")
        publisher.connect("publisher")
        asleep.connect("asleep", clean_start=False, session_expiry_interval=1000)
        for client, qos in ((pushed, 0), (asleep, 1)):
            client.subscribe("count/#", qos=qos)
        asleep.disconnect()
        for number in range(10):
            publisher.publish("count/x", b"%d" % number, 1)
        publisher.publish("count/large", bytes(1000), 1)
        pushed.take(11)
        awake = broker.wire()
        awake.connect("asleep", clean_start=False, session_expiry_interval=1000, maximum_packet_size=500)
        awake.take(10)
        awake.ping()
        watching = broker.wire()
        watching.connect("watching")
        found = values(watching)
        assert found["$SYS/broker/publish/messages/received"] == "11"
        assert found["$SYS/broker/publish/messages/sent"] == "21"
        assert found["$SYS/broker/publish/messages/dropped"] == "1"
        assert found["$SYS/broker/clients/total"] == "4"
        assert found["$SYS/broker/clients/maximum"] == "4"
        watching.subscribe("$SYS/broker/clients/connected", "$SYS/broker/clients/disconnected")
        awake.send(Disconnect())
        told(watching, "$SYS/broker/clients/disconnected", b"1")
        for client in (pushed, publisher, awake, watching):
            client.close()


def test_octets_are_counted(client: Open) -> None:
    one = client(user="shop:ann", password=b"secret")
    before = values(one, "$SYS/broker/bytes/+")
    one.publish("octets", bytes(100_000), 1)
    one.subscribe("$SYS/broker/bytes/received")
    least = int(before["$SYS/broker/bytes/received"]) + 100_000
    while int(one.expect(Publish).payload) < least:
        pass


def test_period_of_nought_turns_them_off(tmp_path: Path) -> None:
    with MqttBroker(tmp_path, config="[mqtt]\nsys_period_s = 0\n") as broker, broker.wire() as one:
        one.connect()
        assert values(one) == {}
