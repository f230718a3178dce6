"""Planted mistakes of the protocol that random walks meet too rarely, each told step by step; and all of them, one
after the other, each within its budget. Driver for tests.

    python -m tests.simulation.partition_stories        every planted mistake: by walks, or by its story

A story is a walk whose steps are chosen: the same replicas, decisions and checks (partition_walk.py). Under its mistake
it ends in a violation; the protocol as it is comes through it.
"""

import sys
from collections.abc import Callable, Sequence
from random import Random

from tests.simulation.partition_walk import (
    LOGS,
    MISTAKES,
    Budget,
    Controller,
    Entry,
    Mistakes,
    Violation,
    Walk,
    first_violation,
    planted,
)

from headrace.core_log.replication.messages import LogId


class Story(Walk):
    """Node 0 leads in epoch 1, and all three are in sync; the first controller is `controllers[0]`."""

    @property
    def reigning(self) -> Controller:
        return self.controllers[-1]

    def write(self, place: int, log_id: LogId = LOGS[0]) -> None:
        """A record of who leads (nothing, if that one does not), synced there."""
        replica = self.nodes[place].replica
        if replica.is_leader:
            log = replica.logs[log_id]
            log.entries.append(Entry(replica.kept.stint, self.value_count))
            self.value_count += 1
            self.sync(log)

    def follow(self, place: int, logs: Sequence[LogId] = LOGS) -> None:
        """It takes over what its leader has of these logs, and tells so."""
        node = self.nodes[place]
        for _ in range(4):
            fetch = node.replica.fetch(logs)
            if fetch is None:
                return
            self.exchange(node, fetch)
            for log in node.replica.logs.values():
                self.sync(log)

    def hear(self, *places: int) -> None:
        """The last order arrives."""
        for place in places:
            self.obey(self.nodes[place], *self.orders[-1])

    def leave_out(self, place: int) -> None:
        """Node 0 asks for an in-sync set without this one, and the store has it; nobody has heard of that yet."""
        self.alter(self.reigning, self.nodes[0].replica.shrink(place))

    def choose(self, *places: int) -> None:
        """The controller elects one of these, the first if it may."""
        self.lead(self.reigning, {place: self.stored.active[place] for place in places}, places)

    def succeed(self, *answering: int) -> None:
        """The next controller comes to power, and these answer it."""
        self.take_over()
        self.ask_all(self.reigning, [self.nodes[place] for place in answering])

    def elect(self, *places: int) -> None:
        """Of these, which are the only ones in reach, one leads by now, if the controller may see to that."""
        before = len(self.orders)
        if self.reigning.mode == "ok":
            self.choose(*places)
        elif self.reigning.mode == "recover":
            self.recover(self.reigning, [self.nodes[place] for place in places])
        if len(self.orders) > before:
            self.hear(*places)


def one_who_fell_behind_is_the_first_to_answer(story: Story) -> None:
    """The store has forgotten that node 2 is not in sync any more."""
    before = story.stored
    story.leave_out(2)
    story.hear(0, 1)
    story.follow(1)
    story.write(0)
    story.follow(1)
    story.acknowledge(story.nodes[0])
    assert story.acked
    story.stored = before
    story.succeed(2)
    story.elect(2)


def those_who_answered_go_on_with_the_controller_before(story: Story) -> None:
    """A row that the store has forgotten is ordered after the sweep."""
    before = story.stored
    story.leave_out(2)
    late = story.orders[-1]
    story.stored = before
    story.succeed(1, 2)
    story.obey(story.nodes[0], *late)
    story.follow(1)
    story.write(0)
    story.follow(1)
    story.acknowledge(story.nodes[0])
    story.elect(2)


def a_zombie_asks_before_the_sweep(story: Story) -> None:
    """A leader of long ago asks for a change of the very row that the store has fallen back to."""
    before = story.stored
    late = story.nodes[0].replica.shrink(1)
    story.choose(1, 2)
    story.hear(1, 2)
    story.follow(2)
    story.write(1)
    story.follow(2)
    story.acknowledge(story.nodes[1])
    assert story.acked
    story.stored = before
    story.take_over()
    story.alter(story.reigning, late)
    story.ask_all(story.reigning, story.nodes[:2])
    story.elect(0, 1)


def an_order_of_the_controller_before_comes_late(story: Story) -> None:
    """It names another leader, and the store has forgotten that election."""
    before = story.stored
    story.choose(1, 2)
    late = story.orders[-1]
    story.stored = before
    story.succeed(1, 2)
    for node in story.nodes[1:]:
        story.obey(node, *late)
    story.follow(2)
    story.write(1)
    story.follow(2)
    story.acknowledge(story.nodes[1])
    story.elect(0)


def a_row_that_only_its_leader_knows(story: Story) -> None:
    """The others answer the sweep, and have never heard of it (C5)."""
    before = story.stored
    story.write(0)
    story.follow(1)
    story.leave_out(2)
    story.hear(0)
    story.acknowledge(story.nodes[0])
    story.stored = before
    story.succeed(1, 2)
    story.elect(2, 1)


def a_forgotten_row_is_taken_over_after_the_sweep(story: Story) -> None:
    """From the old leader, whom the new controller does not reach (C6)."""
    before = story.stored
    story.leave_out(2)
    story.hear(0)
    story.stored = before
    story.succeed(1, 2)
    story.follow(1)
    story.write(0)
    story.follow(1)
    story.acknowledge(story.nodes[0])
    story.elect(2, 1)


def two_lead_in_epochs_of_one_number(story: Story) -> None:
    """The store hands out the same number twice (C7)."""
    before = story.stored
    story.choose(1, 2)
    story.hear(1)
    story.write(1)
    story.stored = before
    story.succeed(0, 2)
    story.elect(2, 0)
    story.write(2)
    story.follow(0)
    story.acknowledge(story.nodes[2])
    assert story.acked
    story.choose(2, 0)
    story.hear(0, 1, 2)
    story.follow(1)


def one_holds_more_of_what_does_not_count(story: Story) -> None:
    """The replica with the most records was not in sync when others acknowledged."""
    before = story.stored
    for _ in range(2):
        story.write(0, LOGS[1])
    story.follow(2)
    story.leave_out(2)
    story.hear(0)
    story.write(0, LOGS[0])
    story.follow(1, LOGS[:1])
    story.acknowledge(story.nodes[0])
    assert story.acked
    story.stored = before
    story.succeed(1, 2)
    story.elect(1, 2)


def one_has_all_of_one_log_and_nothing_of_the_other(story: Story) -> None:
    """It asks to be in sync again, and is the only one left."""
    leader = story.nodes[0]
    story.leave_out(2)
    story.hear(0)
    story.follow(1)
    story.write(0, LOGS[1])
    story.follow(1)
    story.acknowledge(leader)
    assert story.acked
    story.follow(2, LOGS[:1])
    if 2 in leader.replica.caught_up():
        story.alter(story.reigning, leader.replica.expand(2))
        story.hear(0)
    story.elect(2)


STORIES: dict[str, Callable[[Story], None]] = {
    "no_sweep": one_who_fell_behind_is_the_first_to_answer,
    "one_answer_proves": one_who_fell_behind_is_the_first_to_answer,
    "answers_promise_nothing": those_who_answered_go_on_with_the_controller_before,
    "alters_before_the_sweep": a_zombie_asks_before_the_sweep,
    "obeys_old_controllers": an_order_of_the_controller_before_comes_late,
    "counts_under_any_version": a_row_that_only_its_leader_knows,
    "takes_old_stamps": a_forgotten_row_is_taken_over_after_the_sweep,
    "compares_epoch_numbers_only": two_lead_in_epochs_of_one_number,
    "takes_one_log_for_all": one_has_all_of_one_log_and_nothing_of_the_other,
    "the_longest_recovers": one_holds_more_of_what_does_not_count,
}


def tell(story: Callable[[Story], None], mistakes: Mistakes | None = None) -> str | None:
    """What goes wrong in it; None: nothing does."""
    found = Story(Random(0), mistakes or Mistakes(), Budget())
    with planted(found.mistakes):
        try:
            story(found)
        except Violation as violation:
            return str(violation)
    return None


def main() -> int:
    print(f"{'planted in the protocol':34}{'':10}{'by':>6}{'needed':>8}{'budget':>8}  caught as")
    survivors = 0
    for name, (mistakes, _budget, walks, known) in MISTAKES.items():
        if walks:
            by, budget, found = "walks", walks, first_violation(name, walks)
            needed, how = (None, "") if found is None else (found[0] + 1, found[1])
        else:
            story = STORIES[name]
            wrong = tell(story)
            assert wrong is None, f"{story.__name__}, without a mistake: {wrong}"
            violation = tell(story, mistakes)
            by, budget = "story", 1
            needed, how = (None, "") if violation is None else (1, violation)
        survivors += needed is None
        print(f"{name:34}{known:10}{by:>6}{needed or 'alive':>8}{budget:>8}  {how[:90]}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
