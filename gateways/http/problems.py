"""What the HTTP door answers when it cannot do what was asked: problem documents (RFC 9457). Values.

`code` is what programs look at: it keeps its meaning for ever, while `detail` is for people and may be reworded.
`problem_of` is the one table from the families of core_log/errors.py and controller/errors.py to this wire.
Neighbours: every file of this door raises Problem; app.py answers with it.
"""

from collections.abc import Mapping
from enum import Enum

import msgspec

from headrace.controller.errors import AlreadyExists, Changed, InUse, Invalid, LimitReached, NotFound
from headrace.core_log.errors import (
    DiskFull,
    HeadraceError,
    OffsetOutOfRange,
    Refused,
    SequenceRefused,
    StorageError,
)
from headrace.gateways.delivery.consumer_groups import Fenced, GroupInUse, NotHeld, OffsetBehind, UnknownMember
from headrace.gateways.delivery.staging import QueueFull

MEDIA_TYPE = "application/problem+json"
# Where the codes are explained; a document's `type` points into it.
PATH = "/api/v1/problems"


class Code(Enum):
    """(code, status, title)"""

    MALFORMED = ("malformed", 400, "The request cannot be read")
    INVALID_PARAMETER = ("invalid_parameter", 400, "A parameter of the path or the query is not lawful")
    UNAUTHORIZED = ("unauthorized", 401, "A user name and a password are needed, and must be right")
    FORBIDDEN = ("forbidden", 403, "This user may not do this")
    PLAINTEXT_REFUSED = ("plaintext_refused", 403, "Passwords from other machines need TLS")
    CROSS_ORIGIN = ("cross_origin", 403, "Pages of other sites may not call this")
    NOT_FOUND = ("not_found", 404, "There is no such thing")
    UNKNOWN_MEMBER = ("unknown_member", 404, "The group has no such member (any more): join again")
    METHOD_NOT_ALLOWED = ("method_not_allowed", 405, "This path does not know the method")
    REQUEST_TIMEOUT = ("request_timeout", 408, "The request took too long to arrive")
    ALREADY_EXISTS = ("already_exists", 409, "Another one of this name is there already")
    IN_USE = ("in_use", 409, "It is in use")
    LIMIT_REACHED = ("limit_reached", 409, "There are as many as the limit allows")
    SEQUENCE_REFUSED = ("sequence_refused", 409, "This sequence number cannot be taken")
    NOT_HELD = ("not_held", 409, "This member does not hold the partition (any more)")
    FENCED = ("fenced", 409, "The generation is over for the partition: it changed hands or was reset")
    OFFSET_BEHIND = ("offset_behind", 409, "More than that is committed already")
    ALREADY_FIRED = ("already_fired", 409, "It has been delivered already")
    ALREADY_CANCELLED = ("already_cancelled", 409, "It has been cancelled already")
    REFUSED = ("refused", 409, "It cannot be done as things are")
    PRECONDITION_FAILED = ("precondition_failed", 412, "It has changed meanwhile")
    BODY_TOO_LARGE = ("body_too_large", 413, "The body is larger than the limit")
    UNSUPPORTED_MEDIA_TYPE = ("unsupported_media_type", 415, "The body must be JSON")
    RANGE_NOT_SATISFIABLE = ("range_not_satisfiable", 416, "There are no such bytes, or none that are committed")
    INVALID = ("invalid", 422, "The body can be read, but what it says is not lawful")
    TOO_MANY_FAILURES = ("too_many_failures", 429, "Too many logins have failed from this address")
    QUEUE_FULL = ("queue_full", 429, "A queue takes no more")
    HEADERS_TOO_LARGE = ("headers_too_large", 431, "The headers are larger than the limit")
    INTERNAL_ERROR = ("internal_error", 500, "The broker has made a mistake")
    ALARM = ("alarm", 503, "Publishers have to wait: memory is low")
    TOO_FEW_REPLICAS = ("too_few_replicas", 503, "Too few replicas are in sync to commit anything")
    NO_LEADER = ("no_leader", 503, "The node that leads this vhost cannot be reached")
    STORAGE_FAILED = ("storage_failed", 503, "The disk or what is on it cannot be relied on")
    STOPPING = ("stopping", 503, "The broker is stopping")
    DISK_FULL = ("disk_full", 507, "There is no space left on the disk")

    @property
    def code(self) -> str:
        return self.value[0]

    @property
    def status(self) -> int:
        return self.value[1]

    @property
    def title(self) -> str:
        return self.value[2]


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong, as RFC 9457 writes it, and `code` for programs."""

    type: str
    title: str
    status: int
    code: str
    detail: str = ""
    # Of a batch: the index of the message that was refused.
    index: int | None = None


class Problem(Exception):
    """Ends a request with a problem document."""

    def __init__(
        self, code: Code, detail: str = "", *, headers: Mapping[str, str] | None = None, index: int | None = None
    ) -> None:
        super().__init__(detail or code.title)
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})
        self.index = index

    def at(self, index: int) -> "Problem":
        """The same, about one message of a batch."""
        self.index = index
        return self

    def document(self) -> ProblemDocument:
        # Names from clients may hold octets that are no UTF-8; JSON must.
        detail = self.detail.encode("utf-8", "backslashreplace").decode()
        return ProblemDocument(
            type=f"{PATH}#{self.code.code}",
            title=self.code.title,
            status=self.code.status,
            code=self.code.code,
            detail=detail,
            index=self.index,
        )


def unauthorized(detail: str = "") -> Problem:
    """The same words for whoever is not known and whoever has the wrong password."""
    return Problem(Code.UNAUTHORIZED, detail, headers={"www-authenticate": 'Basic realm="headrace", charset="UTF-8"'})


# The first family that fits decides: from special to general.
_CODE_OF_FAMILY: tuple[tuple[type[HeadraceError], Code], ...] = (
    (Invalid, Code.INVALID),
    (NotFound, Code.NOT_FOUND),
    (AlreadyExists, Code.ALREADY_EXISTS),
    (Changed, Code.PRECONDITION_FAILED),
    (InUse, Code.IN_USE),
    (LimitReached, Code.LIMIT_REACHED),
    (OffsetOutOfRange, Code.INVALID_PARAMETER),
    (SequenceRefused, Code.SEQUENCE_REFUSED),
    (UnknownMember, Code.UNKNOWN_MEMBER),
    (NotHeld, Code.NOT_HELD),
    (Fenced, Code.FENCED),
    (OffsetBehind, Code.OFFSET_BEHIND),
    (GroupInUse, Code.IN_USE),
    (QueueFull, Code.QUEUE_FULL),
    (Refused, Code.REFUSED),
    (DiskFull, Code.DISK_FULL),
    (StorageError, Code.STORAGE_FAILED),
)


def problem_of(error: HeadraceError) -> Problem:
    """The problem that a caller gets for an error of ours."""
    for family, code in _CODE_OF_FAMILY:
        if isinstance(error, family):
            return Problem(code, str(error))
    return Problem(Code.INTERNAL_ERROR)
