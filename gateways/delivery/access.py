"""Who may do what: RabbitMQ's rules over the users and rights of the metadata. Machine.

Permissions are regular expressions over names of exchanges and queues, per user and vhost; without a permission record
in a vhost a user may not even enter it. The default exchange is asked about as `amq.default`. The administrator tag
opens the management door and nothing here. On topic exchanges a topic permission narrows the routing keys; where there
is none, every key is allowed.

`{username}`, `{vhost}` and `{client_id}` in a topic permission stand for the peer's own, as literals. A value that
could mean more than itself refuses the whole pattern: wildcards anywhere (a device called `*` would match its own
binding key, and that key matches everybody's), and in a client id, which the peer chooses freely, also what separates
levels.

Answers are kept, up to a limit, under the user's version, which moves with each change of its rights: an old answer is
never found again. Neighbours: login.py says who somebody is, controller/patterns.py matches in linear time.
"""

from enum import StrEnum

from headrace.controller.errors import Invalid
from headrace.controller.patterns import compile_pattern, literal
from headrace.controller.snapshot import Snapshot

ANSWERS_MAX = 16_384
# An answer about a longer key (MQTT's may have 64 KiB) is worked out each time: what is kept is bounded in bytes too.
KEY_CHARS_MAX = 256
DEFAULT_EXCHANGE_ALIAS = "amq.default"

_WILDCARDS = frozenset("*#+")
_LEVELS = frozenset("./^$")


class Operation(StrEnum):
    CONFIGURE = "configure"
    WRITE = "write"
    READ = "read"


class Tag(StrEnum):
    """The tags that mean something, all of them to the management door but the last, which lets a publisher put
    another's name into user-id."""

    ADMINISTRATOR = "administrator"
    MONITORING = "monitoring"
    POLICYMAKER = "policymaker"
    MANAGEMENT = "management"
    IMPERSONATOR = "impersonator"


_IMPLIED_BY = {
    Tag.MANAGEMENT: {Tag.MANAGEMENT, Tag.POLICYMAKER, Tag.MONITORING, Tag.ADMINISTRATOR},
    Tag.POLICYMAKER: {Tag.POLICYMAKER, Tag.ADMINISTRATOR},
    Tag.MONITORING: {Tag.MONITORING, Tag.ADMINISTRATOR},
    Tag.ADMINISTRATOR: {Tag.ADMINISTRATOR},
    Tag.IMPERSONATOR: {Tag.IMPERSONATOR},
}


class Access:
    """Answers for one snapshot at a time; give each new one to `update`."""

    def __init__(self, snapshot: Snapshot, *, answers_max: int = ANSWERS_MAX) -> None:
        self._snapshot = snapshot
        # Apart, since a publisher of ever new routing keys would push the others out.
        self._answers: dict[tuple[object, ...], bool] = {}
        self._key_answers: dict[tuple[object, ...], bool] = {}
        self._answers_max = answers_max

    def update(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def may_enter(self, user: str, vhost: str) -> bool:
        snapshot = self._snapshot
        return user in snapshot.users and vhost in snapshot.vhosts and (user, vhost) in snapshot.permissions

    def may(self, user: str, vhost: str, operation: Operation, name: str) -> bool:
        """On the exchange or queue `name`; the empty name is the default exchange."""
        found = self._snapshot.users.get(user)
        if found is None:
            return False
        key = (user, found.version, vhost, operation, name)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._keep(self._answers, key, self._decide(user, vhost, operation, name))
        return answer

    def may_use_key(
        self,
        user: str,
        vhost: str,
        exchange: str,
        operation: Operation,
        routing_key: str,
        client_id: str | None = None,
    ) -> bool:
        """On a topic exchange: publish (WRITE) with, or bind (READ) by, this routing key. Asked besides `may`."""
        found = self._snapshot.users.get(user)
        if found is None:
            return False
        if len(routing_key) > KEY_CHARS_MAX:
            return self._decide_key(user, vhost, exchange, operation, routing_key, client_id)
        key = (user, found.version, vhost, exchange, operation, routing_key, client_id)
        answer = self._key_answers.get(key)
        if answer is None:
            decided = self._decide_key(user, vhost, exchange, operation, routing_key, client_id)
            answer = self._keep(self._key_answers, key, decided)
        return answer

    def narrows_keys(self, user: str, vhost: str, exchange: str) -> bool:
        """Whether the user may read (or write) only some keys of a topic exchange."""
        return (user, vhost, exchange) in self._snapshot.topic_permissions

    def has(self, user: str, tag: Tag) -> bool:
        """Whether the user has the tag, or one that includes it."""
        found = self._snapshot.users.get(user)
        return found is not None and not _IMPLIED_BY[tag].isdisjoint(found.tags)

    def _keep(self, answers: dict[tuple[object, ...], bool], key: tuple[object, ...], answer: bool) -> bool:
        if len(answers) >= self._answers_max:
            answers.clear()
        answers[key] = answer
        return answer

    def _decide(self, user: str, vhost: str, operation: Operation, name: str) -> bool:
        right = self._snapshot.permissions.get((user, vhost))
        if right is None:
            return False
        match operation:
            case Operation.CONFIGURE:
                pattern = right.configure
            case Operation.WRITE:
                pattern = right.write
            case Operation.READ:
                pattern = right.read
        return _matches(pattern, name or DEFAULT_EXCHANGE_ALIAS)

    def _decide_key(
        self, user: str, vhost: str, exchange: str, operation: Operation, routing_key: str, client_id: str | None
    ) -> bool:
        right = self._snapshot.topic_permissions.get((user, vhost, exchange))
        if right is None:
            return True
        assert operation is not Operation.CONFIGURE, "nobody configures a routing key"
        pattern = right.write if operation is Operation.WRITE else right.read
        expanded = _expand(pattern, user, vhost, client_id)
        return expanded is not None and _matches(expanded, routing_key)


def _matches(pattern: str, text: str) -> bool:
    try:
        return compile_pattern(pattern).matches(text)
    except (Invalid, UnicodeEncodeError):
        # Grown too long by what was put into it, or a name that is no text: nothing that was granted.
        return False


def _expand(pattern: str, user: str, vhost: str, client_id: str | None) -> str | None:
    """The pattern with the peer's own values as literals, or None if one of them must not be used."""
    for placeholder, value, forbidden in (
        ("{username}", user, _WILDCARDS),
        ("{vhost}", vhost, _WILDCARDS),
        ("{client_id}", client_id, _WILDCARDS | _LEVELS),
    ):
        if placeholder not in pattern:
            continue
        if not value or any(character in forbidden or not character.isprintable() for character in value):
            return None
        # `{` and `}` are escaped too, so a value never brings in another placeholder.
        pattern = pattern.replace(placeholder, literal(value))
    return pattern
