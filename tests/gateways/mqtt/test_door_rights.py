"""Rights that change while clients are connected or away, identifiers of other users' sessions, topics for nobody."""

from collections.abc import Iterator

import pytest

from headrace.gateways.mqtt.packets import Pubcomp, Publish, Pubrec, Pubrel, QoS, Will
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .conftest import MqttBroker
from .wire import Open, Wire

V3, V5 = Version.V3_1_1, Version.V5
both_versions = pytest.mark.parametrize("version", [V3, V5], ids=lambda one: one.name)
GUEST = """
[[users]]
name = "guest"
password = "guest"
tags = ["administrator"]

[[permissions]]
user = "guest"
vhost = "/"
configure = ".*"
write = ".*"
read = ".*"
"""


def config(*, write: str = ".*", read: str = ".*", topics: str = ".*") -> str:
    """What ann may, and of which topics she may read."""
    rights = f'\n[[permissions]]\nuser = "ann"\nvhost = "/"\nconfigure = ""\nwrite = "{write}"\nread = "{read}"\n'
    # A file takes nothing away that it does not name.
    rights += '[[topic_permissions]]\nuser = "ann"\nvhost = "/"\nexchange = "amq.topic"\nwrite = ".*"\n'
    rights += f'read = "{topics}"\n'
    return GUEST + '\n[[users]]\nname = "ann"\npassword = "secret"\n' + rights


CONFIG = config()
ANN = {"user": "ann", "password": b"secret"}
KEPT = {"clean_start": False, "session_expiry_interval": 300}


@pytest.fixture(autouse=True)
def as_it_was(broker: MqttBroker) -> Iterator[None]:
    yield
    if broker.config_path.read_text() != CONFIG:
        broker.reload(CONFIG)


def lasting(version: Version) -> dict[str, object]:
    return {"clean_start": False} if version is V3 else KEPT


# -- rights that change ----------------------------------------------------------------------------------------------


@both_versions
def test_right_to_publish_that_is_taken_away_counts_with_the_next_message(
    broker: MqttBroker, client: Open, name: str, version: Version
) -> None:
    reader, ann = client(), client("", version, **ANN)
    reader.subscribe(name)
    assert ann.publish(name, b"allowed", 1) is ReasonCode.SUCCESS
    assert reader.payloads(1) == [b"allowed"]
    broker.reload(config(write="^$"))
    if version is V3:
        ann.send(Publish(name, b"refused", QoS(1), packet_id=7))
        ann.expect_end()
    else:
        assert [ann.publish(name, b"refused", qos) for qos in (1, 2)] == [ReasonCode.NOT_AUTHORIZED] * 2
    reader.expect_nothing()


def test_qos_2_message_that_was_taken_is_completed_after_the_right_is_gone(
    broker: MqttBroker, client: Open, name: str
) -> None:
    reader, ann = client(), client("", **ANN)
    reader.subscribe(name, qos=2)
    ann.send(Publish(name, b"taken", QoS(2), packet_id=1))
    assert ann.expect(Pubrec).reason is ReasonCode.SUCCESS
    broker.reload(config(write="^$"))
    # The same one again is answered as it was, and another one is refused.
    ann.send(Publish(name, b"another", QoS(2), packet_id=2))
    assert ann.expect(Pubrec).reason is ReasonCode.NOT_AUTHORIZED
    ann.send(Pubrel(1))
    assert ann.expect(Pubcomp).reason is ReasonCode.SUCCESS
    assert reader.payloads(1) == [b"taken"]
    reader.expect_nothing()


@both_versions
@pytest.mark.parametrize("shared", ["", "$share/g/"], ids=["plain", "shared"])
def test_right_to_read_that_is_taken_away_ends_the_connection_and_the_subscription(
    broker: MqttBroker, client: Open, name: str, version: Version, shared: str
) -> None:
    ann = client(name, version, **ANN, **lasting(version))
    ann.subscribe(f"{shared}{name}/closed/#", f"{name}/open", qos=1)
    writer = client()
    writer.publish(f"{name}/closed/a", b"1", 1)
    assert ann.payloads(1) == [b"1"]
    broker.reload(config(topics=f"^{name}.open$"))
    ann.expect_disconnect(ReasonCode.NOT_AUTHORIZED)
    writer.publish(f"{name}/closed/a", b"2", 1)
    again = client(name, version, **ANN, **lasting(version))
    writer.publish(f"{name}/closed/a", b"3", 1)
    writer.publish(f"{name}/open", b"4", 1)
    assert again.payloads(1) == [b"4"]
    again.expect_nothing()
    # What ended does not come back by itself with the right.
    broker.reload(CONFIG)
    writer.publish(f"{name}/closed/a", b"5", 1)
    again.expect_nothing()


def test_right_to_read_that_is_gone_when_a_session_wakes_ends_its_subscription(
    broker: MqttBroker, client: Open, name: str
) -> None:
    writer, ann = client(), client(name, **ANN, **KEPT)
    ann.subscribe(f"{name}/#", qos=1)
    ann.disconnect()
    writer.publish(f"{name}/a", b"while away", 1)
    broker.reload(config(read="^$"))
    again = client(name, **ANN, **KEPT)
    again.expect_nothing()
    assert again.unsubscribe(f"{name}/#").reasons == (ReasonCode.NO_SUBSCRIPTION_EXISTED,)


def test_change_of_rights_that_leaves_a_subscription_allowed_is_not_noticed(
    broker: MqttBroker, client: Open, name: str
) -> None:
    ann = client(name, **ANN)
    ann.subscribe(f"{name}/open", qos=1)
    broker.reload(config(write="^$", topics=f"^{name}.open$"))
    client().publish(f"{name}/open", b"x", 1)
    assert ann.payloads(1) == [b"x"]


# -- client identifiers ----------------------------------------------------------------------------------------------


def refused(one: Wire, client_id: str, **settings: object) -> bool:
    answer = one.connect(client_id, **settings)  # type: ignore[arg-type]
    wanted = ReasonCode.CLIENT_IDENTIFIER_NOT_VALID if one.version is V5 else 2
    if answer.reason == 0:
        return False
    assert answer.reason == wanted
    one.expect_end()
    return True


@pytest.mark.parametrize("client_id", ["+", "#", "*", ".*", "a|x", "x/y", "^", "a$", "\\w+"])
def test_identifier_in_a_topic_permission_stands_for_itself_alone(
    broker: MqttBroker, client: Open, name: str, client_id: str
) -> None:
    broker.reload(config(topics=f"^{name}[.]{{client_id}}([.]|$)"))
    honest, hostile = client(f"{name}-d", **ANN), client(client_id, **ANN)
    assert honest.subscribe(f"{name}/{name}-d/#", qos=1).reasons == (ReasonCode.GRANTED_QOS_1,)
    others = (f"{name}/{name}-d/#", f"{name}/x/y", f"{name}/+/y", f"{name}/#", "#", "x")
    assert set(hostile.subscribe(*others).reasons) == {ReasonCode.NOT_AUTHORIZED}


@both_versions
@pytest.mark.parametrize("clean_start", [True, False])
def test_session_of_another_user_is_neither_resumed_nor_ended_nor_taken_over(
    wire: Open, client: Open, name: str, version: Version, clean_start: bool
) -> None:
    writer, ann = client(), client(name, version, **ANN, **lasting(version))
    ann.subscribe(f"{name}/a", qos=1)
    # Connected: it stays so.
    assert refused(wire(version), name, clean_start=clean_start)
    writer.publish(f"{name}/a", b"1", 1)
    assert ann.payloads(1) == [b"1"]
    ann.disconnect()
    # Asleep: it goes on.
    assert refused(wire(version), name, clean_start=clean_start)
    writer.publish(f"{name}/a", b"2", 1)
    again = wire(version)
    assert again.connect(name, **ANN, **lasting(version)).session_present  # type: ignore[arg-type]
    assert again.payloads(1) == [b"2"]


def test_identifier_is_free_again_when_its_session_has_ended(wire: Open, client: Open, name: str) -> None:
    ann = client(name, **ANN)
    ann.disconnect()
    assert not refused(wire(), name)


def test_take_over_between_users_can_be_allowed(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    told = CONFIG + "\n[mqtt]\ntake_over_between_users = true\n"
    with MqttBroker(tmp_path_factory.mktemp("allowed"), config=told) as broker, broker.wire() as ann:
        ann.connect(name, **ANN, **KEPT)  # type: ignore[arg-type]
        with broker.wire() as one:
            answer = one.connect(name, **KEPT)  # type: ignore[arg-type]
            # It gets the identifier, and nothing of the session.
            assert (answer.reason, answer.session_present) == (ReasonCode.SUCCESS, False)
            ann.expect_disconnect(ReasonCode.SESSION_TAKEN_OVER)
        broker.stop()


# -- passwords -------------------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("user", ["ann", "guest", "nobody"])
@pytest.mark.parametrize("password", [None, b""], ids=["none", "blank"])
def test_user_name_without_a_password_lets_nobody_in(
    wire: Open, version: Version, user: str, password: bytes | None
) -> None:
    one = wire(version)
    answer = one.connect("", user=user, password=password)
    assert answer.reason == (ReasonCode.BAD_USER_NAME_OR_PASSWORD if version is V5 else 4)
    one.expect_end()


# -- topics that are nobody's -----------------------------------------------------------------------------------------

OURS = ["$SYS/broker/version", "$SYS/x", "$share/g/t", "$CONTROL/dynamic-security/v1", "$control/x"]


@pytest.mark.parametrize("topic", OURS)
@pytest.mark.parametrize("retain", [False, True])
def test_nobody_publishes_to_topics_of_the_broker(client: Open, topic: str, retain: bool) -> None:
    one, reader = client(), client()
    reader.subscribe(topic.replace("$share/g/", ""), "#")
    reader.seen_all()
    for qos in (1, 2):
        assert one.publish(topic, b"mine", qos, retain=retain) is ReasonCode.NOT_AUTHORIZED
    one.publish(topic, b"mine", 0, retain=retain)
    assert not [found for found in reader.seen_all() if isinstance(found, Publish) and found.payload == b"mine"]


@pytest.mark.parametrize("topic", OURS)
def test_nobody_publishes_there_by_a_will_or_a_delay(client: Open, wire: Open, topic: str) -> None:
    will = wire()
    assert will.connect("", will=Will(topic, b"mine")).reason is ReasonCode.NOT_AUTHORIZED
    will.expect_end()
    assert client().publish(f"$delayed/1/{topic}", b"mine", 1) is ReasonCode.NOT_AUTHORIZED


def test_another_topic_with_a_dollar_is_one_like_others_but_for_wildcards(client: Open, name: str) -> None:
    one, reader, everything = client(), client(), client()
    everything.subscribe("#", f"+/{name}")
    everything.seen_all()
    reader.subscribe(f"${name}/{name}")
    assert one.publish(f"${name}/{name}", b"x", 1) is ReasonCode.SUCCESS
    assert reader.payloads(1) == [b"x"]
    assert not [found for found in everything.seen_all() if isinstance(found, Publish) and found.payload == b"x"]


# -- levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [127, 128, 129])
def test_topics_and_filters_have_at_most_128_levels(wire: Open, client: Open, name: str, levels: int) -> None:
    deep, wild = name + "/a" * (levels - 1), name + "/+" * (levels - 1)
    one, writer, will = client(), client(), wire()
    fits = levels <= 128
    wanted = (ReasonCode.GRANTED_QOS_1 if fits else ReasonCode.TOPIC_FILTER_INVALID,) * 3
    assert one.subscribe(deep, wild, f"{deep[:-2]}/#", qos=1).reasons == wanted
    # A group is a queue, whose names and keys are AMQP's: they have no place for this one, and the others stand.
    assert one.subscribe(f"$share/g/{wild}", f"$share/g/{name}", qos=1).reasons == (ReasonCode.TOPIC_FILTER_INVALID, 1)
    expected = ReasonCode.SUCCESS if fits else ReasonCode.TOPIC_NAME_INVALID
    assert writer.publish(deep, b"x", 1) is expected
    assert writer.publish(deep, b"x", 2, retain=True) is expected
    assert will.connect("", will=Will(deep, b"x")).reason is expected
    old = client("", V3)
    assert old.subscribe(deep).reasons == ((0,) if fits else (0x80,))
    old.send(Publish(deep, b"x", QoS(1), packet_id=1))
    if not fits:
        old.expect_end()
    else:
        old.seen_all()
