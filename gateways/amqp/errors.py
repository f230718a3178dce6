"""Reply codes and the two kinds of AMQP exception. Values.

A *channel exception* (soft) closes the channel it happened on; a *connection exception* (hard) closes the
connection. The code decides which, except where the standard lets a soft code end the connection (403 at login,
320 by an operator). The text on the wire is `NAME - text`, as RabbitMQ writes it, cut to what a short string holds.
`reply_to` is the one table from the families of core_log/errors.py to this wire.
Neighbours: every other file of this door raises these; connection.py turns them into channel.close, connection.close.
"""

from enum import IntEnum
from typing import Self

from headrace.core_log.errors import DiskFull, HeadraceError, PeerError, Refused, StorageError


class ReplyCode(IntEnum):
    REPLY_SUCCESS = 200
    CONTENT_TOO_LARGE = 311
    NO_ROUTE = 312
    NO_CONSUMERS = 313
    CONNECTION_FORCED = 320
    INVALID_PATH = 402
    ACCESS_REFUSED = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    COMMAND_INVALID = 503
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    RESOURCE_ERROR = 506
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541

    @property
    def hard(self) -> bool:
        """True when the standard closes the connection for it, False when only the channel."""
        return self in _HARD


_HARD = frozenset(code for code in ReplyCode if code >= 500) | {ReplyCode.CONNECTION_FORCED, ReplyCode.INVALID_PATH}

REPLY_TEXT_BYTES_MAX = 255


class AmqpError(PeerError):
    """An AMQP exception. `class_id` and `method_id` name the method that caused it, 0 where none did."""

    hard: bool

    def __init__(self, code: ReplyCode, text: str, class_id: int = 0, method_id: int = 0) -> None:
        super().__init__(code, text)
        self.code: ReplyCode = code
        self.class_id = class_id
        self.method_id = method_id

    @property
    def reply_text(self) -> str:
        """`NAME - text`, at most 255 bytes of UTF-8: a close that cannot be encoded would hide the reason."""
        full = f"{self.code.name} - {self.text}"
        encoded = full.encode("utf-8", "backslashreplace")
        return encoded[:REPLY_TEXT_BYTES_MAX].decode("utf-8", "ignore")

    def during(self, class_id: int, method_id: int) -> Self:
        """The same exception, laid to a method."""
        error = type(self)(self.code, self.text, class_id, method_id)
        error.__cause__ = self.__cause__
        return error

    def __str__(self) -> str:
        return f"{self.code.value} {self.reply_text} ({self.class_id}, {self.method_id})"


class ChannelException(AmqpError):
    """Soft: the channel closes, the connection lives."""

    hard = False


class ConnectionException(AmqpError):
    """Hard: the connection closes."""

    hard = True


def amqp_error(code: ReplyCode, text: str, class_id: int = 0, method_id: int = 0) -> AmqpError:
    """The exception of the kind that the standard gives this code."""
    kind = ConnectionException if code.hard else ChannelException
    return kind(code, text, class_id, method_id)


def resource(kind: str, name: str, vhost: str) -> str:
    """A queue or exchange as RabbitMQ names it in texts: `queue 'q' in vhost '/'`."""
    return f"{kind} '{name}' in vhost '{vhost}'"


# The first family that fits decides: from special to general.
_REPLY_OF_FAMILY: tuple[tuple[type[HeadraceError], ReplyCode], ...] = (
    (DiskFull, ReplyCode.RESOURCE_ERROR),
    (StorageError, ReplyCode.INTERNAL_ERROR),
    (Refused, ReplyCode.PRECONDITION_FAILED),
)


def reply_to(error: HeadraceError, class_id: int, method_id: int) -> AmqpError:
    """The exception a client gets for an error of ours that its method met."""
    if isinstance(error, AmqpError):
        return error if error.class_id else error.during(class_id, method_id)
    for family, code in _REPLY_OF_FAMILY:
        if isinstance(error, family):
            return amqp_error(code, str(error), class_id, method_id)
    return amqp_error(ReplyCode.INTERNAL_ERROR, str(error), class_id, method_id)
