"""What the metadata refuses, and how its store can fail. Values.

Refusals are definite: nothing was changed, and the connection lives. A door maps each to its own wire.
"""

from headrace.core_log.errors import Refused, StorageError


class Invalid(Refused):
    """A name, pattern, argument or setting that no version of the metadata could hold. Says which and why."""


class NotFound(Refused):
    """The vhost, user, exchange, queue, binding or policy that the change names is not there (any more)."""


class AlreadyExists(Refused):
    """Another one of that name was made first; look at the new snapshot and compare."""


class Changed(Refused):
    """The change was decided on a state that has passed."""


class InUse(Refused):
    """A conditional delete whose condition does not hold."""


class LimitReached(Refused):
    """The vhost holds as many as its limit allows."""


class Unreachable(Refused):
    """The metadata store cannot be asked now. What is there goes on; what would change it waits or is refused."""


class MetadataLost(StorageError):
    """Somebody else moved the metadata: the compare-and-set failed. This writer must step down."""


class MetadataRegressed(StorageError):
    """The store is older than what this node has already acted on, as after restoring a backup of one file."""

    def __init__(self, path: str, found: int, expected: int) -> None:
        super().__init__(
            f"{path} holds metadata version {found}, but this node has already acted on version {expected}: "
            "the file was replaced by an older one. Put the newer file back, or accept the loss explicitly "
            "by recovering the metadata"
        )
        self.path = path
        self.found = found
        self.expected = expected


class OutcomeUnknown(StorageError):
    """The controller was lost while it committed this: it may count or not. Look at the metadata, then decide anew."""
