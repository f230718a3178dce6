"""Topic names and filters: what is well formed, and one meaning of matching in three places."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.filtering import topics as tries
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode, Version
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.topics import (
    SharedFilter,
    TopicNames,
    check_topic_filter,
    check_topic_name,
    filter_matches,
    is_shared,
    parse_filter,
)

from .strategies import FILTER, SHARED, TOPIC

V5 = Version.V5

# From section 4.7 of the standards, and what follows from it.
MATCHES = [
    ("sport/tennis/player1/#", "sport/tennis/player1", True),
    ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
    ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
    ("sport/tennis/player1/#", "sport/tennis/player10", False),
    ("sport/#", "sport", True),
    ("#", "sport", True),
    ("#", "/", True),
    ("#", "$SYS/x", False),
    ("sport/tennis/+", "sport/tennis/player1", True),
    ("sport/tennis/+", "sport/tennis/player1/ranking", False),
    ("sport/+", "sport", False),
    ("sport/+", "sport/", True),
    ("+", "finance", True),
    ("+/+", "/finance", True),
    ("/+", "/finance", True),
    ("+", "/finance", False),
    ("+/monitor/Clients", "$SYS/monitor/Clients", False),
    ("$SYS/#", "$SYS/monitor/Clients", True),
    ("$SYS/#", "$SYS", True),
    ("$SYS/monitor/+", "$SYS/monitor/Clients", True),
    ("+/#", "$SYS", False),
    ("a/#", "a//", True),
    ("a/+/b", "a//b", True),
    ("a/$b", "a/$b", True),
    ("a/+", "a/$b", True),
    ("ACCOUNTS", "Accounts", False),
    ("a", "a/", False),
    ("a/", "a", False),
]


@pytest.mark.parametrize(("topic_filter", "topic", "expected"), MATCHES)
def test_filter_matches_as_the_standard_says(topic_filter: str, topic: str, expected: bool) -> None:
    assert filter_matches(topic_filter, topic) is expected


@settings(max_examples=500)
@given(FILTER, TOPIC)
def test_one_meaning_here_in_the_trie_and_over_routing_keys(topic_filter: str, topic: str) -> None:
    expected = filter_matches(topic_filter, topic)
    own: tries.TopicTrie[int] = tries.TopicTrie(tries.MQTT)
    own.add(tries.MQTT.pattern(topic_filter), 1)
    assert bool(own.match(topic)) is expected
    # Over AMQP's trie too, but for the one rule that AMQP does not know.
    keys = RoutingKeys()
    routed: tries.TopicTrie[int] = tries.TopicTrie(tries.AMQP)
    routed.add(tries.AMQP.pattern(keys.binding_key(topic_filter)), 1)
    hidden = topic.startswith("$") and topic_filter[0] in "+#"
    assert (bool(routed.match(keys.key_of(topic.encode()).decode())) and not hidden) is expected


@given(FILTER)
def test_a_filter_without_wildcards_matches_itself_alone(topic_filter: str) -> None:
    if not set("+#") & set(topic_filter):
        assert filter_matches(topic_filter, topic_filter)
        assert not filter_matches(topic_filter, topic_filter + "x")


@given(st.text(st.sampled_from("a/+#$"), max_size=6))
def test_what_is_well_formed_here_is_well_formed_in_the_trie(text: str) -> None:
    try:
        check_topic_filter(text, V5)
    except MqttError as error:
        assert error.code is ReasonCode.TOPIC_FILTER_INVALID
        with pytest.raises(tries.InvalidTopicFilter):
            tries.MQTT.pattern(text)
    else:
        tries.MQTT.pattern(text)


@given(FILTER)
def test_lawful_filters_pass(text: str) -> None:
    assert check_topic_filter(text, V5) is None
    assert parse_filter(text) == (None, text)
    assert not is_shared(text)


@given(SHARED)
def test_shared_filters_fall_into_two(text: str) -> None:
    shared = check_topic_filter(text, V5)
    assert shared is not None and f"$share/{shared.group}/{shared.filter}" == text
    assert parse_filter(text) == (shared.group, shared.filter)
    assert is_shared(text)


@pytest.mark.parametrize("text", ["$share/", "$share//a", "$share/g", "$share/g/", "$share/+/a", "$share/a#/a"])
def test_ill_formed_shared_filter_is_refused(text: str) -> None:
    with pytest.raises(MqttError) as caught:
        check_topic_filter(text, V5)
    assert caught.value.code is ReasonCode.TOPIC_FILTER_INVALID


@pytest.mark.parametrize("text", ["$share", "$sharexyz/a", "$SHARE/g/a", "a/$share/g"])
def test_only_the_first_level_makes_a_filter_shared(text: str) -> None:
    assert check_topic_filter(text, V5) is None
    assert not is_shared(text)


def test_filter_of_a_share_may_begin_with_a_separator() -> None:
    assert check_topic_filter("$share/g//a", V5) == SharedFilter("g", "/a")


@given(TOPIC)
def test_lawful_names_pass(topic: str) -> None:
    check_topic_name(topic, V5)


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ("", ReasonCode.PROTOCOL_ERROR),
        ("a/+", ReasonCode.TOPIC_NAME_INVALID),
        ("#", ReasonCode.TOPIC_NAME_INVALID),
        ("a#b", ReasonCode.TOPIC_NAME_INVALID),
    ],
)
def test_unlawful_name_is_refused(topic: str, code: ReasonCode) -> None:
    with pytest.raises(MqttError) as caught:
        check_topic_name(topic, V5)
    assert caught.value.code is code


def test_names_that_were_checked_are_kept_as_one_object() -> None:
    names = TopicNames()
    first = names.check(b"a/b", V5)
    assert names.check(bytes(bytearray(b"a/b")), V5) is first
    with pytest.raises(MqttError):
        names.check(b"a/+", V5)
    assert b"a/+" not in names.known
