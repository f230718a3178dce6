"""What the controller decides about one shard: is its row to be believed, who leads, who is in sync. Machine; pure.

Each decision is a new row for the one that it was made on; it counts once the store has committed it in place of that
one, and goes to the replicas as an order only then (C1, C2). The caller numbers nothing: versions are stamped here with
the ballot of the controller that decides (C6).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from headrace.core_log.replication.assignment import NOBODY, Assignment, Ballot, Copy, Member, RowVersion
from headrace.core_log.replication.messages import AlterIsr, Report


class Verdict(Enum):
    """What a sweep makes of a row."""

    PROVEN = "enough replicas have answered and none contradicts the row"
    CONTRADICTED = "a replica knows of something later: the store went back in time"
    UNPROVEN = "too few have answered"


class Known(NamedTuple):
    """A row, as far as a replica remembers it."""

    version: RowVersion
    isr: tuple[Copy, ...]
    eligible: tuple[Copy, ...]

    @classmethod
    def told(cls, report: Report) -> "Known":
        return cls(report.version, report.isr, report.eligible)


def answers_needed(row: Assignment) -> int:
    """So many replicas that one of them has seen whatever was acknowledged: two such sets always meet (L5)."""
    return len(row.replicas) - row.min_isr + 1


def judge(row: Assignment, reports: Collection[Report]) -> Verdict:
    """Whether the row that the store holds is the last one that anybody acted on."""
    answers = [one for one in reports if one.member.node in row.replicas and _is_sound(one, row.isr)]
    if any(_contradicts(row, one) for one in answers):
        return Verdict.CONTRADICTED
    return Verdict.PROVEN if len(answers) >= answers_needed(row) else Verdict.UNPROVEN


def _is_sound(report: Report, isr: Collection[Copy]) -> bool:
    """Its word counts: it has not lost what it once knew, or was in sync on the disk that it has now since then."""
    return not report.is_blank or report.member.copy in isr


def _contradicts(row: Assignment, report: Report) -> bool:
    epoch, leader = report.stint
    if epoch > row.epoch or (epoch == row.epoch and leader not in (row.leader, NOBODY) and row.leader != NOBODY):
        return True
    return report.version > row.version or (
        report.version.number == row.version.number and report.version != row.version
    )


def fencing_epoch(row: Assignment, reports: Collection[Report]) -> int:
    """Every replica is asked to give up what lies below it before a recovery; the one elected leads the epoch above."""
    return max([row.epoch, *(one.stint.epoch for one in reports)]) + 1


def recovered(
    row: Assignment, replies: Collection[Report], fence: int, ballot: Ballot, active: Mapping[int, Member]
) -> Assignment | None:
    """The row after a recovery election: of enough replicas that were fenced, one that was in sync by the latest row
    that anybody knows of leads, alone in sync; the others are cut to its lineage and join again. None: too few have
    answered, or none of those is there still, in the life that answered.

    The longest log would not do: a shard has many, and one replica may be ahead in this and behind in that one. Whoever
    was in sync by the latest row has all that was acknowledged, in every log.
    """
    known = max((Known(row.version, row.isr, row.eligible), *map(Known.told, replies)), key=lambda one: one.version.age)
    sound = [one for one in replies if one.member.node in row.replicas and _is_sound(one, known.isr)]
    fit = [
        one
        for one in sound
        if one.member.copy in (*known.isr, *known.eligible)
        and not one.is_corrupt
        and active.get(one.member.node) == one.member
    ]
    if len(sound) < answers_needed(row) or not fit:
        return None
    best = max(fit, key=lambda one: (one.member.copy in known.isr, one.last, one.end, -one.member.node))
    number = max([row.version.number, *(one.version.number for one in replies)]) + 1
    return replace(
        row,
        leader=best.member.node,
        leader_incarnation=best.member.incarnation,
        epoch=fence + 1,
        isr=(best.member.copy,),
        eligible=(),
        version=RowVersion(number, ballot),
    )


def elected(
    row: Assignment, active: Mapping[int, Member], ballot: Ballot, *, prefer: Sequence[int] = ()
) -> Assignment | None:
    """The row with a new leader from the in-sync set, else from those who still hold all that was committed; None:
    nobody of them is there, and the partition waits (E7). `active`: the lives of the nodes that are up."""
    alive = tuple(copy for copy in row.isr if _is_there(copy, active))
    found = alive or tuple(copy for copy in row.eligible if _is_there(copy, active))
    if not found:
        return None
    order = {node: place for place, node in enumerate(dict.fromkeys((*prefer, *row.replicas)))}
    leader = min(found, key=lambda copy: order[copy.node])
    isr = alive or (leader,)
    return replace(
        row,
        leader=leader.node,
        leader_incarnation=active[leader.node].incarnation,
        epoch=row.epoch + 1,
        isr=isr,
        eligible=_eligible(row, isr),
        version=_next(row, ballot),
    )


def altered(row: Assignment, request: AlterIsr, active: Mapping[int, Member], ballot: Ballot) -> Assignment | None:
    """The row after a leader's request; None: it was decided on another row, and the leader is sent this one.

    A request that is refused on the right row moves the version too, so that it can never be granted later: the leader
    forgets it when it gets that order.
    """
    if (
        request.stint != row.stint
        or request.leader_incarnation != row.leader_incarnation
        or request.version != row.version
    ):
        return None
    if _may_be(row, request, active):
        return replace(row, isr=request.isr, eligible=_eligible(row, request.isr), version=_next(row, ballot))
    return replace(row, version=_next(row, ballot))


def _may_be(row: Assignment, request: AlterIsr, active: Mapping[int, Member]) -> bool:
    added = set(request.isr) - set(row.isr)
    joining = request.joining
    allowed = set() if joining is None else {joining.copy}
    return (
        added <= allowed
        and (joining is None or (active.get(joining.node) == joining and joining.node in row.replicas))
        and any(copy.node == row.leader for copy in request.isr)
    )


def without_disk(row: Assignment, node: int, ballot: Ballot) -> Assignment:
    """A node came back without what it held, or not knowing what it holds: it is in sync with nothing (E6)."""
    return replace(
        row,
        leader=NOBODY if row.leader == node else row.leader,
        isr=tuple(copy for copy in row.isr if copy.node != node),
        eligible=tuple(copy for copy in row.eligible if copy.node != node),
        version=_next(row, ballot),
    )


def _is_there(copy: Copy, active: Mapping[int, Member]) -> bool:
    member = active.get(copy.node)
    return member is not None and member.copy == copy


def _eligible(row: Assignment, isr: Sequence[Copy]) -> tuple[Copy, ...]:
    """While too few are in sync the high watermark stands still, so whoever was in sync keeps holding all below it."""
    if len(isr) >= row.min_isr:
        return ()
    return tuple(sorted({*row.eligible, *row.isr} - set(isr)))


def _next(row: Assignment, ballot: Ballot) -> RowVersion:
    return RowVersion(row.version.number + 1, ballot)


def is_orderly(row: Assignment) -> bool:
    """What holds for every row that was ever committed; asserted before it is written."""
    nodes = [copy.node for copy in row.isr]
    return (
        nodes == sorted(set(nodes))
        and set(nodes) <= set(row.replicas)
        and (row.leader == NOBODY or row.leader in nodes)
        and 1 <= row.min_isr <= len(row.replicas)
    )
