"""Who gets a message: plans for topics and tags after any course of subscribing, against each subscription itself."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.record import RecordBatch
from headrace.filtering.expression import parse
from headrace.gateways.mqtt.interest import Interests, Topic
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.session import Interest, Session
from headrace.gateways.mqtt.topics import filter_matches

FILTERS = ["a/#", "a/+", "a/b", "#", "c"]
TOPICS = ["a/b", "a/c", "c", "a/b/c"]
WANTED = ["", "eu", "!eu", "eu && vip", "us || vip"]
TAGS = st.sets(st.sampled_from(["eu", "us", "vip"])).map(lambda tags: tuple(sorted(tags)))


def sessions(count: int) -> list[Session]:
    return [Session(f"client{number}", now_us=lambda: 0) for number in range(count)]


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 2), st.sampled_from(FILTERS), st.sampled_from(WANTED), st.integers(0, 2), TAGS
        ),
        max_size=30,
    )
)
def test_plan_is_what_each_subscription_says(steps: list[tuple[bool, int, str, str, int, tuple[str, ...]]]) -> None:
    interests, clients = Interests(), sessions(3)
    topics = [Topic(name.encode()) for name in TOPICS]
    held: dict[tuple[Session, str], Interest] = {}
    for adds, number, text, wanted, qos, tags in steps:
        session = clients[number]
        if adds:
            held[session, text] = Interest(text, qos, wants=wanted)
            interests.add(session, held[session, text], Version.V5)
        else:
            held.pop((session, text), None)
            interests.remove(session, text)
        for topic in topics:
            expected: dict[Session, int] = {}
            for (owner, _text), one in held.items():
                wants = not one.wants or parse(one.wants).matches(tags)
                if wants and filter_matches(one.filter, topic.text):
                    expected[owner] = max(one.qos, expected.get(owner, 0))
            for _again in range(2):
                found = interests.plan(topic).tagged(tags).deliveries
                assert {one.session: one.qos for one in found} == expected


def test_records_are_cut_where_their_tags_change_only_if_somebody_filters() -> None:
    batch = RecordBatch(0, 1)
    for tag, count in (("eu", 2), ("us", 1), ("eu", 1)):
        batch.add([b"a"] * count, [b""] * count, [b"v"] * count, timestamp_us=1, tags=(tag,))
    (one,) = sessions(1)
    interests = Interests()
    interests.add(one, Interest("a", 0), Version.V5)
    plan = interests.plan(Topic(b"a"))
    assert list(plan.by_tags(batch, 0, 4)) == [(plan, 0, 4)]
    interests.add(one, Interest("a", 0, wants="eu"), Version.V5)
    pieces = [(len(part.deliveries), low, high) for part, low, high in interests.plan(Topic(b"a")).by_tags(batch, 1, 4)]
    assert pieces == [(1, 1, 2), (0, 2, 3), (1, 3, 4)]
