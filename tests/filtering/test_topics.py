"""The topic trie: both languages by table, all of it against a naive matcher, its cost in nodes, its cache by key."""

import tracemalloc
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.filtering.topics import AMQP, MANY, MQTT, ONE, InvalidTopicFilter, Language, Pattern, TopicTrie, Wildcard


def matches(pattern: Pattern, words: tuple[str, ...]) -> bool:
    """The oracle: what a pattern means, said as plainly as possible."""
    if not pattern:
        return not words
    head, rest = pattern[0], pattern[1:]
    if head is MANY:
        return matches(rest, words) or (bool(words) and matches(pattern, words[1:]))
    return bool(words) and (head is ONE or head == words[0]) and matches(rest, words[1:])


def language_matches(language: Language, pattern: Pattern, key: str) -> bool:
    if language is MQTT and key.startswith("$") and isinstance(pattern[0], Wildcard):
        return False
    return matches(pattern, language.words(key))


def trie_of(language: Language, *texts: str) -> TopicTrie[str]:
    trie: TopicTrie[str] = TopicTrie(language)
    for text in texts:
        trie.add(language.pattern(text), text)
    return trie


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("stock.usd.nyse", ["stock.usd.nyse"], ["stock.usd", "stock.usd.nyse.ibm", "stock", "", "Stock.usd.nyse"]),
        ("*.orange.*", ["quick.orange.rabbit", ".orange."], ["orange", "quick.orange", "a.orange.b.c", "a.b.c"]),
        ("*.*.rabbit", ["quick.orange.rabbit"], ["rabbit", "orange.rabbit"]),
        ("lazy.#", ["lazy", "lazy.pink", "lazy.pink.rabbit", "lazy."], ["", "quick.lazy", "lazyness"]),
        ("#", ["", "a", "a.b", ".", "..", "$SYS.a"], []),
        ("#.#", ["", "a", "a.b"], []),
        ("*", ["a", "*", "#", "$SYS"], ["", "a.b", "."]),
        ("*.#", ["a", "a.b", "."], [""]),
        ("#.*", ["a", "a.b", "."], [""]),
        ("#.*.#", ["a", "a.b.c"], [""]),
        ("#.b", ["b", "a.b", "b.b", "a.a.b"], ["", "b.a"]),
        ("a.#.b", ["a.b", "a.x.b", "a.b.b", "a.x.y.b"], ["a", "b", "a.b.x"]),
        ("a.#.b.#", ["a.b", "a.b.c", "a.x.b.y.z"], ["a", "a.c", "b.a"]),
        ("a.#.#", ["a", "a.b", "a.b.c"], ["", "b"]),
        ("", [""], ["a", "."]),
        (".", ["."], ["", "..", "a."]),
        ("a.", ["a."], ["a", "a.b", "a.."]),
        ("a*.b#", ["a*.b#"], ["ab.b", "a.b", "ax.bx"]),
    ],
)
def test_amqp_pattern_matches_as_in_rabbitmq(pattern: str, matching: list[str], other: list[str]) -> None:
    trie = trie_of(AMQP, pattern)
    assert [key for key in matching + other if trie.match(key)] == matching


@pytest.mark.parametrize(
    ("topic_filter", "matching", "other"),
    [
        ("sport/tennis/player1/#", ["sport/tennis/player1", "sport/tennis/player1/score/wimbledon"], ["sport/tennis"]),
        ("sport/#", ["sport", "sport/", "sport/a"], ["sports", "/sport"]),
        ("#", ["sport", "/", "a/b/c"], ["$SYS", "$SYS/monitor/Clients", "$"]),
        ("sport/tennis/+", ["sport/tennis/player1", "sport/tennis/"], ["sport/tennis", "sport/tennis/p/ranking"]),
        ("sport/+", ["sport/"], ["sport"]),
        ("+", ["finance"], ["/finance", "$SYS"]),
        ("+/+", ["/finance", "/"], ["finance"]),
        ("/+", ["/finance"], ["finance", "a/finance"]),
        ("+/monitor/Clients", ["a/monitor/Clients"], ["$SYS/monitor/Clients"]),
        ("$SYS/#", ["$SYS", "$SYS/monitor"], ["SYS/monitor"]),
        ("$SYS/monitor/+", ["$SYS/monitor/Clients"], ["$SYS/monitor"]),
        ("a/+/b", ["a/$x/b"], []),
        ("a.b", ["a.b"], ["a/b"]),
    ],
)
def test_mqtt_filter_matches_as_section_4_7_says(topic_filter: str, matching: list[str], other: list[str]) -> None:
    trie = trie_of(MQTT, topic_filter)
    assert [topic for topic in matching + other if trie.match(topic)] == matching


@pytest.mark.parametrize(
    "text", ["", "sport/tennis#", "sport/#/ranking", "#/a", "sport+", "a/+b/c", "++", "a\0b", "##"]
)
def test_mqtt_filter_that_the_standard_forbids_is_refused(text: str) -> None:
    with pytest.raises(InvalidTopicFilter, match=r"MQTT-4\.7"):
        MQTT.pattern(text)


def test_all_patterns_of_a_key_are_found_and_each_value_once() -> None:
    trie: TopicTrie[str] = TopicTrie(AMQP)
    for text, value in [("a.b", "exact"), ("a.*", "star"), ("a.#", "hash"), ("#.b", "exact"), ("b.#", "other")]:
        trie.add(AMQP.pattern(text), value)
    assert sorted(trie.match("a.b")) == ["exact", "hash", "star"]


def test_a_pair_added_twice_is_held_once() -> None:
    trie: TopicTrie[str | None] = TopicTrie(AMQP)
    for value in ("one", "two", None):
        assert trie.add(("a",), value)
        assert not trie.add(("a",), value)
    assert len(trie) == 3
    assert trie.match("a") == ("one", "two", None)


@pytest.mark.parametrize("pattern", [("a",), ("a", "b"), ("a", ONE), ("b",), (MANY,), ()], ids=str)
def test_removing_what_is_not_there_changes_nothing(pattern: Pattern) -> None:
    trie = trie_of(AMQP, "a.b.c")
    trie.add(("a", "b"), "x")
    assert not trie.remove(pattern, "y")
    assert len(trie) == 2
    assert trie.match("a.b") == ("x",)


def test_nothing_is_left_of_patterns_that_were_removed() -> None:
    texts = ("a.b.c", "a.b.d", "a.*.c", "a.#", "#.#.b", "", "*")
    trie = trie_of(AMQP, *texts)
    for text in texts:
        assert trie.remove(AMQP.pattern(text), text)
    before = trie.nodes_visited
    assert trie.match("a.b.c") == ()
    assert trie.nodes_visited - before == 1, "only the root is there to be visited"


def visits(trie: TopicTrie[int], key: str) -> int:
    before = trie.nodes_visited
    trie.match(key)
    return trie.nodes_visited - before


def test_cost_of_a_match_does_not_depend_on_the_number_of_exact_subscriptions() -> None:
    costs = []
    for subscriptions in (10, 1_000, 20_000):
        trie: TopicTrie[int] = TopicTrie(MQTT, cached_keys_max=0)
        for number in range(subscriptions):
            trie.add(MQTT.pattern(f"fleet/{number % 7}/device{number}/command"), number)
        trie.add(MQTT.pattern("fleet/+/+/command"), -1)
        trie.add(MQTT.pattern("fleet/#"), -2)
        costs.append(visits(trie, "fleet/3/device3/command"))
        assert len(trie.match("fleet/3/device3/command")) == 3
    # The root, four literal nodes, the three of `+/+/command`, and the `#`.
    assert costs == [9, 9, 9]


def test_hashes_in_a_row_do_not_blow_up() -> None:
    trie: TopicTrie[int] = TopicTrie(AMQP, cached_keys_max=0)
    pattern = AMQP.pattern(".".join(["a", "#"] * 20 + ["b"]))
    trie.add(pattern, 1)
    words = 60
    # A backtracking matcher would try some 10^15 ways before it gives up.
    assert visits(trie, ".".join(["a"] * words)) <= words * (len(pattern) + 1)
    assert trie.match(".".join(["a"] * words + ["b"])) == (1,)


def test_forgetting_by_hashes_in_a_row_does_not_blow_up() -> None:
    trie: TopicTrie[int] = TopicTrie(AMQP)
    key = ".".join(["a"] * 60)
    trie.match(key)
    trie.add(AMQP.pattern(".".join(["#", "a"] * 25 + ["b"])), 1)
    assert trie.cached_keys == (key,)
    trie.add(AMQP.pattern(".".join(["#", "a"] * 25)), 1)
    assert not trie.cached_keys


@pytest.mark.parametrize("topic_filter", ["fleet/{0}/device{0}/command", "a{0}/b{0}/c{0}/d{0}", "devices/{0}/+/set/#"])
def test_a_subscription_takes_less_than_a_kilobyte(topic_filter: str) -> None:
    subscriptions = 5_000
    tracemalloc.start()
    try:
        trie: TopicTrie[int] = TopicTrie(MQTT)
        for number in range(subscriptions):
            trie.add(MQTT.pattern(topic_filter.format(number)), number)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / subscriptions < 1024


def test_an_answer_is_searched_once() -> None:
    trie: TopicTrie[int] = TopicTrie(AMQP)
    trie.add(("a", MANY), 1)
    assert visits(trie, "a.b") > 0
    assert visits(trie, "a.b") == 0


@pytest.mark.parametrize(
    ("language", "pattern", "dropped"),
    [
        (AMQP, "a.b", {"a.b"}),
        (AMQP, "a.*", {"a.b", "a.c"}),
        (AMQP, "#.c", {"a.c", "a.b.c"}),
        (AMQP, "*", {"b"}),
        (AMQP, "#", {"", "a.b", "a.c", "a.b.c", "b"}),
        (AMQP, "x.#", set()),
        (MQTT, "#", {"a/b", "c"}),
        (MQTT, "+/b", {"a/b"}),
        (MQTT, "$SYS/#", {"$SYS/b"}),
    ],
)
def test_a_change_drops_the_cached_keys_it_matches_and_no_others(
    language: Language, pattern: str, dropped: set[str]
) -> None:
    keys = {"", "a.b", "a.c", "a.b.c", "b"} if language is AMQP else {"a/b", "c", "$SYS/b"}
    trie: TopicTrie[int] = TopicTrie(language)
    for change in (trie.add, trie.remove):
        for key in keys:
            trie.match(key)
        change(language.pattern(pattern), 1)
        assert set(trie.cached_keys) == keys - dropped


def test_a_change_that_changes_nothing_drops_nothing() -> None:
    trie: TopicTrie[int] = TopicTrie(AMQP)
    trie.add((MANY,), 1)
    trie.match("a")
    trie.add((MANY,), 1)
    trie.remove((MANY,), 2)
    assert trie.cached_keys == ("a",)


def test_long_keys_are_matched_and_not_kept() -> None:
    trie: TopicTrie[int] = TopicTrie(MQTT)
    trie.add(MQTT.pattern("a/#"), 1)
    for length in (256, 257, 60_000):
        assert trie.match("a/".ljust(length, "x")) == (1,)
    assert [len(key) for key in trie.cached_keys] == [256]


def test_cache_holds_no_more_keys_than_it_may() -> None:
    trie: TopicTrie[int] = TopicTrie(AMQP, cached_keys_max=10)
    for number in range(100):
        trie.match(str(number))
        assert len(trie.cached_keys) <= 10
    trie.add((MANY,), 1)
    assert trie.match("99") == (1,)


@dataclass(frozen=True)
class Step:
    """One call: add, remove or match."""

    verb: str
    pattern: str
    key: str
    value: int


def steps(language: Language) -> st.SearchStrategy[list[Step]]:
    word = st.sampled_from(["a", "b", "", "$s"])
    key = st.lists(word, min_size=1, max_size=5).map(language.separator.join)
    level = st.one_of(word, st.sampled_from([language.one, language.many]))
    levels = st.lists(level, min_size=1, max_size=5)
    if language is MQTT:
        levels = levels.map(lambda found: [*[each for each in found[:-1] if each != "#"], found[-1]])
        key = key.filter(bool)
    pattern = levels.map(language.separator.join)
    if language is MQTT:
        pattern = pattern.filter(bool)
    verb = st.sampled_from(["add", "add", "remove", "match", "match"])
    return st.lists(st.builds(Step, verb, pattern, key, st.integers(0, 3)), max_size=40)


@pytest.mark.parametrize("language", [AMQP, MQTT], ids=["AMQP", "MQTT"])
def test_trie_agrees_with_a_naive_matcher_with_and_without_cache(language: Language) -> None:
    @settings(max_examples=300, deadline=None)
    @given(steps(language))
    def agrees(calls: list[Step]) -> None:
        tries = [TopicTrie[int](language, cached_keys_max=limit) for limit in (0, 3, 1000)]
        pairs: set[tuple[Pattern, int]] = set()
        for call in calls:
            pattern = language.pattern(call.pattern)
            pair = (pattern, call.value)
            if call.verb == "add":
                assert {trie.add(*pair) for trie in tries} == {pair not in pairs}
                pairs.add(pair)
            elif call.verb == "remove":
                assert {trie.remove(*pair) for trie in tries} == {pair in pairs}
                pairs.discard(pair)
            else:
                expected = {value for pattern, value in pairs if language_matches(language, pattern, call.key)}
                plain, *cached = (trie.match(call.key) for trie in tries)
                assert len(plain) == len(expected)
                assert set(plain) == expected
                assert cached == [plain, plain], "the cache changes neither the answer nor its order"
            assert {len(trie) for trie in tries} == {len(pairs)}
        assert len(tries[1].cached_keys) <= 3

    agrees()
