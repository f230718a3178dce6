"""Who makes a request, and what they may do. Value over the metadata's rights; the login itself is in app.py.

Rights are RabbitMQ's: configure, write and read, by the name of the exchange, queue or topic, in a vhost that the user
may enter. What somebody may not do is refused in the same words whether the thing exists or not.
"""

from dataclasses import dataclass

from headrace.gateways.delivery.access import Access, Operation, Tag
from headrace.gateways.http.problems import Code, Problem


@dataclass(frozen=True, slots=True)
class Visitor:
    # Empty: somebody who did not log in, where that is not needed.
    name: str
    access: Access
    # The request was made on the broker's own machine.
    is_local: bool = False

    def may_enter(self, vhost: str) -> bool:
        return self.access.may_enter(self.name, vhost)

    def may(self, operation: Operation, vhost: str, name: str) -> bool:
        """On the exchange, queue or topic `name`; the empty name is the default exchange."""
        return self.may_enter(vhost) and self.access.may(self.name, vhost, operation, name)

    def has(self, tag: Tag) -> bool:
        return self.access.has(self.name, tag)

    def require(self, operation: Operation, vhost: str, name: str) -> None:
        if not self.may(operation, vhost, name):
            what = f"{operation} access to '{name or 'amq.default'}' in vhost '{vhost}'"
            raise Problem(Code.FORBIDDEN, f"{what} refused for user '{self.name}'")

    def require_vhost(self, vhost: str) -> None:
        if not self.may_enter(vhost):
            raise Problem(Code.FORBIDDEN, f"access to vhost '{vhost}' refused for user '{self.name}'")

    def require_tag(self, tag: Tag) -> None:
        if not self.has(tag):
            raise Problem(Code.FORBIDDEN, f"user '{self.name}' needs the tag '{tag}'")
