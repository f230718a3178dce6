"""What the controller of a cluster and its nodes say to each other, over a link of Purpose.CONTROL. Format; pure.

A frame is one message: msgpack, tagged by its name. A name, or a shape, that this release does not know ends the link
with `UnknownMessage`: to pass over what one does not understand would be to obey half of it.

    node                                        controller
    Register                        ->
                                    <-          Welcome, then Whole ... or Delta ...; or Unwanted
    Beat                           <->          Beat, so often that silence is noticed
    Alter, Copies, Commit, Operate  ->
                                    <-          Delta, then Outcome of each Commit and Operate
                                    <-          Ask, Fence, Order: what replicas promise and obey
    Reported, Obeyed, Outvoted      ->

A new controller connects to each node that it knows of, says Announce, and leaves; the node then connects to it.
"""

from typing import TypeAlias

import msgspec

from headrace.controller.entities import Endpoint, Shard
from headrace.core_log.peer.errors import LinkError
from headrace.core_log.replication.assignment import Assignment, Ballot, Member
from headrace.core_log.replication.messages import AlterIsr, CatchUp, OwnCopy, Report

# The one kind of frame that there is on these links.
FRAME_KIND = 1


class UnknownMessage(LinkError):
    """The other side said something that this release does not know."""


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


class Register(_Message):
    """A node is there, in this life."""

    member: Member
    endpoints: tuple[tuple[str, Endpoint], ...]
    # What it holds is all that it ever confirmed.
    clean: bool
    # What it has applied of the metadata: up to where, the next view id, and the rows of the shards.
    version: int
    # The ballot of the controller that it has that from.
    ballot: Ballot
    next_view: int
    shards: tuple[Shard, ...]
    # What it has of some shards is not simply what its disk held.
    copies: tuple[OwnCopy, ...] = ()


class Copies(_Message):
    """The same as in Register, as it is now."""

    copies: tuple[OwnCopy, ...]


class Welcome(_Message):
    """The controller takes the node in, and says on whose authority it will give orders."""

    ballot: Ballot
    node: int
    # With which version of the metadata its term began: whoever has that one, or a later one, from another controller
    # knows of what the store has forgotten.
    since: int
    database: str
    timeline: int


class Unwanted(_Message):
    """This node is not the controller (any more), or does not take the other one in. Nothing that it was asked and has
    not answered was done, or will be."""

    reason: str
    # Who is, as far as is known; 0: nobody.
    controller: int


class Announce(_Message):
    """A controller has come to power: connect to it."""

    node: int
    ballot: Ballot


class Beat(_Message):
    """Still there. From a node: what it has applied, and which replicas of what it leads are catching up. From the
    controller: which nodes are there, how far the row of each shard is believed, and what all leaders said of replicas
    that are catching up."""

    version: int
    nodes: tuple[int, ...] = ()
    shards: tuple[tuple[int, str], ...] = ()
    catching_up: tuple[CatchUp, ...] = ()


class Whole(_Message):
    """A part of a snapshot (snapshot_form.py). The last one completes it."""

    data: bytes
    is_last: bool


class Delta(_Message):
    """The changes of one version, in the form of the change feed."""

    version: int
    changes: str


class Ask(_Message):
    """Promise this ballot, and report of a shard."""

    ballot: Ballot
    incarnation: int
    shard: int


class Fence(_Message):
    """Give up what lies below this epoch, and report."""

    ballot: Ballot
    incarnation: int
    shard: int
    epoch: int


class Order(_Message):
    """A shard's row."""

    ballot: Ballot
    incarnation: int
    shard: int
    assignment: Assignment


class Reported(_Message):
    """The answer to Ask, or to Fence of that epoch (0: to Ask)."""

    shard: int
    epoch: int
    report: Report


class Obeyed(_Message):
    shard: int
    epoch: int


class Outvoted(_Message):
    """A later controller was promised: the one who is told this steps down."""

    ballot: Ballot


class Alter(_Message):
    """The leader of a shard asks for another in-sync set."""

    shard: int
    request: AlterIsr


class Commit(_Message):
    number: int
    changes: str


class Operate(_Message):
    """What an operator wants: see brain.py for the names and their arguments."""

    number: int
    name: str
    arguments: dict[str, int | str | bool | list[int]]


class Outcome(_Message):
    """Of a Commit or Operate. `version`: it counts, as part of this one. Else `error` names what was raised."""

    number: int
    version: int | None
    error: str = ""
    text: str = ""


Message: TypeAlias = (
    Register
    | Copies
    | Welcome
    | Unwanted
    | Announce
    | Beat
    | Whole
    | Delta
    | Ask
    | Fence
    | Order
    | Reported
    | Obeyed
    | Outvoted
    | Alter
    | Commit
    | Operate
    | Outcome
)

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(kind: int, payload: bytes) -> Message:
    """UnknownMessage for all but a whole message of this release."""
    if kind != FRAME_KIND:
        raise UnknownMessage(f"a frame of kind {kind}, which is none of the controller's")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnknownMessage(f"not a message of the controller's as this release knows them: {error}") from error
