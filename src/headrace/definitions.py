"""What the configuration file defines, held against what the node knows. Machine.

The file's own mistakes are found when it is parsed (controller/config.py); here are those that only show beside the
metadata: a right of a user who is nowhere, a policy of a vhost that is not there. Each is told with its place.
"""

from headrace.controller.config import Definitions
from headrace.controller.metadata import DEFAULT_VHOST, GUEST
from headrace.controller.snapshot import Snapshot


def problems(definitions: Definitions, snapshot: Snapshot) -> list[str]:
    """One line each, beginning with the field; none if the definitions can be taken up."""
    users = {*snapshot.users, *(user.name for user in definitions.users)}
    vhosts = {*snapshot.vhosts, *(vhost.name for vhost in definitions.vhosts)}
    if not snapshot.version:
        # What a fresh store gets anyway.
        users.add(GUEST.name)
        vhosts.add(DEFAULT_VHOST)
    named = [
        *((f"permissions[{at}]", one.user, one.vhost) for at, one in enumerate(definitions.permissions)),
        *((f"topic_permissions[{at}]", one.user, one.vhost) for at, one in enumerate(definitions.topic_permissions)),
        *((f"policies[{at}]", None, one.vhost) for at, one in enumerate(definitions.policies)),
    ]
    found: list[str] = []
    for place, user, vhost in named:
        if user is not None and user not in users:
            found.append(f"{place}.user: no user '{user}'")
        if vhost not in vhosts:
            found.append(f"{place}.vhost: no vhost '{vhost}'")
    found += [
        f"limits.vhosts.{one.vhost}: no such vhost" for one in definitions.vhost_limits if one.vhost not in vhosts
    ]
    found += [f"limits.users.{one.user}: no such user" for one in definitions.user_limits if one.user not in users]
    return found


def has_real_user(snapshot: Snapshot) -> bool:
    """Somebody besides guest, whose password everybody knows."""
    return any(name != GUEST.name for name in snapshot.users)
