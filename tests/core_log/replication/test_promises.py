"""Consumers that must be alone are given records by one leader at a time, whoever is paused or cut off."""

from random import Random

from headrace.core_log.replication.promises import Promises

SECONDS = 6.0


def promises(before_s: float | None = None) -> Promises:
    return Promises(SECONDS, promised_before_s=before_s)


def test_a_leader_without_rivals_needs_no_promise() -> None:
    assert promises().may_dispatch((), 0.0)


def test_a_leader_needs_the_promise_of_each_rival_counted_from_when_it_sent_the_answer() -> None:
    one = promises()
    one.begin_to_lead()
    one.hold(2, 10.0)
    assert not one.may_dispatch((2, 3), 10.0)
    one.hold(3, 11.0)
    assert one.may_dispatch((2, 3), 15.0)
    assert not one.may_dispatch((2, 3), 15.6)
    # An echo of an earlier answer takes nothing back.
    one.hold(2, 14.0)
    one.hold(2, 12.0)
    assert one.may_dispatch((2, 3), 16.0)


def test_promises_of_an_earlier_stint_are_none() -> None:
    one = promises()
    one.begin_to_lead()
    one.hold(2, 10.0)
    one.begin_to_lead()
    assert not one.may_dispatch((2,), 10.0)


def test_one_that_promised_waits_until_that_is_over_or_the_other_follows_it() -> None:
    one = promises()
    one.make(1, 10.0)
    assert not one.may_dispatch((), 15.9)
    assert one.may_dispatch((), 16.1)
    one.make(1, 20.0)
    one.make(2, 21.0)
    one.release(2)
    assert not one.may_dispatch((), 22.0)
    one.release(1)
    assert one.may_dispatch((), 22.0)


def test_one_that_starts_takes_it_that_it_promised_something() -> None:
    one = promises(before_s=100.0)
    one.release(1)
    assert not one.may_dispatch((), 105.9)
    assert one.may_dispatch((), 106.1)


def test_q5_never_two_at_once_under_late_messages_pauses_and_clocks_that_differ() -> None:
    """Random stories: answers and fetches arrive late or never, nodes sleep, and anybody in sync may be elected."""
    both = lonely = 0
    for seed in range(60):
        random = Random(seed)
        rate = [1 + random.uniform(-0.001, 0.001) for _ in range(3)]
        shift = [random.uniform(0, 1e6) for _ in range(3)]
        nodes = [promises() for _ in range(3)]
        # What each node believes: stint and leader; a paused one does not act.
        believes = [(1, 0)] * 3
        nodes[0].begin_to_lead()
        paused_until = [0.0] * 3
        stint, now = (1, 0), 0.0
        # Who is in sync in each stint, and may be elected after it.
        in_sync = {stint: {0, 1, 2}}
        post: list[tuple[float, int, int, str, tuple[int, int], float]] = []
        for _ in range(400):
            now += random.expovariate(5.0)
            clock = [now * rate[node] + shift[node] for node in range(3)]
            awake = [node for node in range(3) if paused_until[node] <= now]
            match random.randrange(12):
                case 0 if awake:
                    paused_until[random.choice(awake)] = now + random.uniform(0, 15)
                case 1 if random.random() < 0.3:
                    # The controller elects; whoever hears of it at once acts on it.
                    leader = random.choice(sorted(in_sync[stint]))
                    isr = {leader, *(node for node in in_sync[stint] if random.random() < 0.5)}
                    stint = (stint[0] + 1, leader)
                    in_sync[stint] = isr
                    for node in awake:
                        if random.random() < 0.7 or node == stint[1]:
                            _order(nodes, believes, node, stint)
                case 2 if stint[1] in awake and believes[stint[1]] == stint:
                    in_sync[stint] |= {node for node in range(3) if believes[node] == stint}
                case 3 if awake:
                    _order(nodes, believes, random.choice(awake), stint)
            for node in awake:
                if believes[node][1] == node:
                    post += [(now + _late(random), node, to, "answer", believes[node], clock[node]) for to in range(3)]
            due, post = [one for one in post if one[0] <= now], [one for one in post if one[0] > now]
            for when, sender, to, what, said, stamp in due:
                if to == sender or paused_until[to] > now:
                    if to != sender and random.random() < 0.8:
                        post.append((when + 1, sender, to, what, said, stamp))
                elif believes[to] == said:
                    if what == "answer":
                        nodes[to].make(sender, clock[to])
                        post.append((now + _late(random), to, sender, "fetch", said, stamp))
                    else:
                        nodes[to].release(sender)
                        nodes[to].hold(sender, stamp)
            leading = [node for node in range(3) if believes[node][1] == node]
            # A paused one that was allowed to when it fell asleep is not asked: it dispatches nothing.
            dispatching = [
                node for node in leading if nodes[node].may_dispatch(in_sync[believes[node]] - {node}, clock[node])
            ]
            assert len(dispatching) <= 1, (seed, now, dispatching, believes)
            both += len(leading) > 1
            lonely += len(dispatching)
    assert both > 500 and lonely > 500, "the stories are worth telling"


def _late(random: Random) -> float:
    return random.choice((0.01, 0.01, 0.1, 2.0, 1e9))


def _order(nodes: list[Promises], believes: list[tuple[int, int]], node: int, stint: tuple[int, int]) -> None:
    if believes[node][0] < stint[0]:
        believes[node] = stint
        if stint[1] == node:
            nodes[node].begin_to_lead()
