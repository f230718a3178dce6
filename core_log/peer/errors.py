"""Why there is no link to a peer. Values."""

from headrace.core_log.errors import HeadraceError


class LinkError(HeadraceError):
    """There is no link, or no longer one; nothing is known of what was said last."""


class PeerUnreachable(LinkError):
    """Nobody answered there, or not in time."""


class PeerRefused(LinkError):
    """Somebody answered who is not the peer that was meant, or does not take us for one: trying again is in vain until
    somebody changes a setting."""


class PeerGone(LinkError):
    """The link ended: closed, reset, or the other side broke the protocol."""
