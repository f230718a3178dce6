"""Topics and routing keys: every topic comes back from its key, and every key has a topic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.topics import check_topic_name

NAMES = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0+#"), min_size=1, max_size=12
) | st.text(st.sampled_from("a/.*%2E5$"), min_size=1, max_size=8)
KEYS = st.binary(max_size=20) | st.lists(
    st.sampled_from(
        [b".", b"/", b"+", b"#", b"*", b"%", b"%2E", b"%2e", b"%25", b"%23", b"\0", b"\xff", b"a", b"\xc3\xa9"]
    ),
    max_size=6,
).map(b"".join)


@pytest.mark.parametrize(
    ("topic", "key"),
    [
        ("a/b/c", "a.b.c"),
        ("a//b", "a..b"),
        ("/", "."),
        ("/a/", ".a."),
        ("v1.0/x", "v1%2E0.x"),
        ("a/*", "a.%2A"),
        ("50%/x", "50%25.x"),
        ("%2E", "%252E"),
        ("é", "é"),
        ("$SYS/a", "$SYS.a"),
    ],
)
def test_topic_and_key_of_the_table(topic: str, key: str) -> None:
    keys = RoutingKeys()
    assert keys.key_of(topic.encode()).decode() == key
    assert keys.topic_of(key.encode()).decode() == topic


@given(NAMES)
def test_every_topic_comes_back_from_its_key(topic: str) -> None:
    keys = RoutingKeys()
    key = keys.key_of(topic.encode())
    assert keys.topic_of(key).decode() == topic
    assert key.count(b".") == topic.count("/")
    assert not set(b"*#") & set(key)


@given(KEYS)
def test_every_key_has_a_topic_that_mqtt_can_name(key: bytes) -> None:
    keys = RoutingKeys()
    topic = keys.topic_of(key)
    check_topic_name(topic.decode(), Version.V5)
    assert b"\0" not in topic
    assert topic.count(b"/") == key.count(b".")
    # A topic that stands for a foreign key is a topic like any other from then on.
    assert keys.topic_of(keys.key_of(topic)) == topic


@pytest.mark.parametrize(
    ("key", "topic"),
    [
        (b"", b"%"),
        (b"a/b", b"a%2Fb"),
        (b"a+.b", b"a%2B/b"),
        (b"#", b"%23"),
        (b"*", b"*"),
        (b"a\0", b"a%00"),
        (b"\xff.a", b"%FF/a"),
        (b"%", b"%"),
        (b"%2e", b"%2e"),
        (b"%23", b"%23"),
        (b"100%.x", b"100%/x"),
    ],
)
def test_key_that_no_topic_has(key: bytes, topic: bytes) -> None:
    assert RoutingKeys().topic_of(key) == topic


@pytest.mark.parametrize(
    ("topic_filter", "key"),
    [("a/+/#", "a.*.#"), ("+", "*"), ("#", "#"), ("/#", ".#"), ("v1.0/+", "v1%2E0.*"), ("a/*/%", "a.%2A.%25")],
)
def test_binding_key_of_a_filter(topic_filter: str, key: str) -> None:
    assert RoutingKeys().binding_key(topic_filter) == key


def test_rabbitmq_mapping_is_an_option() -> None:
    keys = RoutingKeys(lossy=True)
    assert keys.key_of(b"a.b/c") == b"a.b.c"
    assert keys.topic_of(b"a.b.c") == b"a/b/c"
    assert keys.binding_key("v1.0/+/#") == "v1.0.*.#"
    assert keys.topic_of(b"50%25.x") == b"50%25/x"


@given(KEYS)
def test_rabbitmq_mapping_is_total_too(key: bytes) -> None:
    check_topic_name(RoutingKeys(lossy=True).topic_of(key).decode(), Version.V5)


@given(st.lists(NAMES.map(str.encode), max_size=10))
def test_columns_are_mapped_as_single_topics_are(topics: list[bytes]) -> None:
    keys = RoutingKeys(count_max=3, bytes_max=4)
    assert keys.keys_of(topics) == [RoutingKeys().key_of(topic) for topic in topics]
    assert keys.topics_of(keys.keys_of(topics)) == topics


def test_equal_topics_of_a_column_have_one_key_object() -> None:
    first, second = RoutingKeys().keys_of([b"a/b", bytes(bytearray(b"a/b"))])
    assert first is second
