"""Claims: a million subscriptions cost what a thousand do to match, and little memory each. Driver: memory.

Subscriptions are of devices: exact topics of four levels, each with its own last one, and one in ten with a wildcard in
the middle. Matched are exact topics that the cache does not know, in CPU time, and counted are the nodes that a match
looks at; of the million those are spread over all of them. Memory is what the process grows by for the trie, and what
is allocated for whole bindings of a topic exchange and subscriptions of an MQTT session. The cache's answers are timed
beside that.
"""

import gc
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.claim import Better, Claim
from headrace.filtering.topics import AMQP, MQTT, Language, TopicTrie
from headrace.gateways.delivery.routing import ExchangeKind, Router
from headrace.gateways.mqtt.interest import Interests, Topic
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.session import Interest, Session

FEW, MANY = 1_000, 1_000_000
MATCHES = 20_000
ROUNDS = 5
HELD = 50_000


def topic_of(language: Language, number: int) -> str:
    return language.separator.join(("fleet", f"region{number % 50}", f"site{number % 1000}", f"device{number}"))


def filter_of(language: Language, number: int) -> str:
    topic = topic_of(language, number)
    if number % 10:
        return topic
    fleet, region, _site, device = topic.split(language.separator)
    return language.separator.join((fleet, region, language.one, device))


def filled(language: Language, count: int) -> TopicTrie[int]:
    trie: TopicTrie[int] = TopicTrie(language)
    for number in range(count):
        trie.add(language.pattern(filter_of(language, number)), number)
    return trie


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@contextmanager
def traced() -> Iterator[list[int]]:
    """Bytes that were taken and kept inside: what was freed before is not counted as free."""
    size: list[int] = []
    tracemalloc.start()
    yield size
    size.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()


def cost_s(trie: TopicTrie[int], topics: list[str]) -> float:
    """CPU time of one match that the cache does not answer: with none, every one is a search."""
    search = trie._search
    words = [trie._language.words(topic) for topic in topics]
    return best_of(lambda: [search(one) for one in words]) / len(topics)


def best_of(call: Callable[[], object]) -> float:
    spent = []
    for _ in range(ROUNDS):
        before = time.process_time()
        call()
        spent.append(time.process_time() - before)
    return min(spent)


def measure(language: Language) -> list[Claim]:
    few = filled(language, FEW)
    before = resident_bytes()
    many = filled(language, MANY)
    each = (resident_bytes() - before) / MANY
    known = [topic_of(language, number % FEW) for number in range(MATCHES)]
    assert [few.match(topic) for topic in known[:FEW]] == [(number,) for number in range(FEW)]
    visited = []
    for trie in (few, many):
        for topic in known[:FEW]:
            assert trie.match(topic)
        trie.nodes_visited = 0
        trie._cache.clear()
        trie._cached_keys = type(trie._cached_keys)()
        for topic in known[:FEW]:
            trie.match(topic)
        visited.append(trie.nodes_visited / FEW)
    spread = [topic_of(language, number * (MANY // MATCHES) + 1) for number in range(MATCHES)]
    low, high = cost_s(few, known), cost_s(many, spread)
    cached = best_of(lambda: [many.match(topic) for topic in known]) / len(known)
    detail = (
        f"{low * 1e6:.2f} us with {FEW:,} and {high * 1e6:.2f} us with {MANY:,}; {cached * 1e9:.0f} ns from the cache"
    )
    name = language.name
    return [
        Claim(f"{name}: a match among a million beside a thousand", high / low, 3.0, Better.LESS, detail=detail),
        Claim(
            f"{name}: nodes looked at, a million beside a thousand",
            visited[1] / visited[0],
            1.1,
            Better.LESS,
            detail=f"{visited[0]:.1f} and {visited[1]:.1f} nodes a match",
        ),
        Claim(f"{name}: memory of a subscription", each, 1024.0, Better.LESS, "bytes", f"{MANY:,} subscriptions"),
    ]


def bindings() -> Claim:
    router: Router[str] = Router(lambda name: None, name_of=str)
    router.put_exchange("x", ExchangeKind.TOPIC)
    queues = [f"queue{number}" for number in range(FEW)]
    texts = [filter_of(AMQP, number) for number in range(HELD)]
    with traced() as size:
        for number, text in enumerate(texts):
            router.bind_queue("x", queues[number % FEW], text)
    each = size[0] / HELD
    assert router.route("x", [topic_of(AMQP, 1)]).queues == (queues[1],)
    return Claim("memory of a binding", each, 1024.0, Better.LESS, "bytes", f"{HELD:,} on {FEW:,} queues")


def subscriptions() -> Claim:
    interests = Interests()
    sessions = [Session(f"client{number}", now_us=lambda: 0) for number in range(FEW)]
    texts = [filter_of(MQTT, number) for number in range(HELD)]
    with traced() as size:
        for number, text in enumerate(texts):
            interests.add(sessions[number % FEW], Interest(text, 1), Version.V5)
    each = size[0] / HELD
    (delivery,) = interests.plan(Topic(topic_of(MQTT, 1).encode())).deliveries
    assert delivery.session is sessions[1]
    return Claim("memory of an MQTT subscription", each, 1024.0, Better.LESS, "bytes", f"{HELD:,} of {FEW:,} sessions")


def claim() -> list[Claim]:
    found = measure(AMQP)
    gc.collect()
    found += measure(MQTT)
    return [*found, bindings(), subscriptions()]


if __name__ == "__main__":
    for one in claim():
        print(f"{one.name}: {one.figure:,.2f} {one.unit} ({one.verdict.value}); {one.detail}")
