"""The bytes of what a follower and its leader say on a FETCH link. Format; pure.

    1  fetch     follower -> leader   positions of some logs; `wants` asks for one answer
    2  answer    leader -> follower   the row, streams that came, changed or went, what to do with logs; behind the
                                      frame, unframed, the stored batches of each `Granted`, `size` octets each
    3  refusal   leader -> follower   it is not the leader of that stint; nothing was changed
    4  suspect   follower -> leader   a batch came that is not what somebody wrote: the leader looks at its own

Payloads are msgpack; values travel as arrays in the order of their fields.
"""

from enum import IntEnum
from typing import TypeVar
from uuid import UUID

import msgspec

from headrace.core_log.peer.errors import PeerGone
from headrace.core_log.replication.assignment import Copy, RowVersion, Stint
from headrace.core_log.replication.messages import Answer, Begin, Cut, Explain, Fetch, Go, LogId, Suspect
from headrace.core_log.spec import StreamSpec

T = TypeVar("T")


class Kind(IntEnum):
    FETCH = 1
    ANSWER = 2
    REFUSAL = 3
    SUSPECT = 4


class FetchFrame(msgspec.Struct, frozen=True, array_like=True):
    fetch: Fetch
    wants: bool
    # Which state of the leader's streams this one has taken over, as the leader counts them.
    catalog: int = 0
    # All streams that it holds; on the first fetch of a link.
    streams: tuple[UUID, ...] | None = None
    # The `sent_s` of the last answer: a promise was made on it (promises.py).
    promised_s: float | None = None


class Granted(msgspec.Struct, frozen=True, array_like=True):
    """Records of a log, perhaps none; how far it is committed, and where it begins."""

    log: LogId
    high_watermark: int
    log_start: int
    size: int


class AnswerFrame(msgspec.Struct, frozen=True, array_like=True):
    stint: Stint
    version: RowVersion
    isr: tuple[Copy, ...]
    eligible: tuple[Copy, ...]
    granted: tuple[Granted, ...] = ()
    cuts: tuple[Cut, ...] = ()
    begins: tuple[Begin, ...] = ()
    explains: tuple[Explain, ...] = ()
    catalog: int = 0
    specs: tuple[StreamSpec, ...] = ()
    deleted: tuple[UUID, ...] = ()
    # By the leader's own clock, and of meaning to it alone.
    sent_s: float | None = None

    @property
    def answer(self) -> Answer:
        goes = tuple(Go(one.log, one.high_watermark) for one in self.granted)
        logs: tuple[Go | Cut | Begin | Explain, ...] = (*goes, *self.cuts, *self.begins, *self.explains)
        return Answer(self.stint, self.version, self.isr, self.eligible, logs)


class RefusalFrame(msgspec.Struct, frozen=True, array_like=True):
    stint: Stint
    # The one who asks is behind; else the one who was asked.
    is_fenced: bool


_encoder = msgspec.msgpack.Encoder()
_fetches = msgspec.msgpack.Decoder(FetchFrame)
_answers = msgspec.msgpack.Decoder(AnswerFrame)
_refusals = msgspec.msgpack.Decoder(RefusalFrame)
_suspects = msgspec.msgpack.Decoder(Suspect)

encode = _encoder.encode


def decode_fetch(data: bytes) -> FetchFrame:
    """Raises PeerGone for what is none: the link is of no use any more."""
    return _decode(_fetches, data)


def decode_answer(data: bytes) -> AnswerFrame:
    return _decode(_answers, data)


def decode_refusal(data: bytes) -> RefusalFrame:
    return _decode(_refusals, data)


def decode_suspect(data: bytes) -> Suspect:
    return _decode(_suspects, data)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise PeerGone(f"a message of the other side cannot be read: {error}") from error
