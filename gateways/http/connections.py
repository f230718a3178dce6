"""Connections of the other doors over HTTP: list them, close one. Driver; gateways/connected.py knows the doors.

Everybody sees their own. Those of others are for users with the tag monitoring to see, and administrator to close.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

from msgspec import Meta

from headrace.controller.errors import NotFound
from headrace.gateways.delivery.access import Tag
from headrace.gateways.http.operations import Answer, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code

PATH = "/api/v1/connections"
LIMIT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Connected:
    id: str
    protocol: str
    user: str
    vhost: str
    host: str
    port: int
    tls: bool
    # What it calls itself: AMQP's connection_name, MQTT's client identifier.
    name: str = ""
    channel_count: int = 0


class Connections(Protocol):
    def list(self) -> Iterable[Connected]:
        """Those who have logged in."""

    def close(self, wanted: Connected, reason: str) -> bool:
        """False: it is gone already."""


class ConnectionOut(Answer, frozen=True, kw_only=True):
    id: Annotated[str, Meta(description="good while it is open")]
    protocol: str
    user: str
    vhost: str
    host: str
    port: int
    tls: bool
    name: Annotated[str, Meta(description="what it calls itself: AMQP's connection_name, MQTT's client identifier")]
    channels: int


class ConnectionList(Answer, frozen=True, kw_only=True):
    connections: list[ConnectionOut]
    more: Annotated[bool, Meta(description="there are more than the limit")]


class ListQuery(Parameters, frozen=True, kw_only=True):
    after: Annotated[str, Meta(description="those whose id comes behind this one")] = ""
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 1000


class ConnectionPath(Parameters, frozen=True, kw_only=True):
    connection: Annotated[str, Meta(min_length=1)]


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


async def list_connections(call: Call[Parameters, ListQuery, None]) -> Reply:
    sees_all = call.visitor.has(Tag.MONITORING)
    seen = [one for one in call.door.open_connections.list() if sees_all or one.user == call.visitor.name]
    behind = sorted((one for one in seen if one.id > call.query.after), key=lambda one: one.id)
    shown = [
        ConnectionOut(
            id=one.id,
            protocol=one.protocol,
            user=_text(one.user),
            vhost=_text(one.vhost),
            host=one.host,
            port=one.port,
            tls=one.tls,
            name=_text(one.name),
            channels=one.channel_count,
        )
        for one in behind[: call.query.limit]
    ]
    return Reply(ConnectionList(connections=shown, more=len(behind) > len(shown)))


async def close_connection(call: Call[ConnectionPath, Parameters, None]) -> Reply:
    wanted = call.path.connection
    found = next((one for one in call.door.open_connections.list() if one.id == wanted), None)
    # Of others' connections those who may not close them do not hear.
    if found is None or (found.user != call.visitor.name and not call.visitor.has(Tag.ADMINISTRATOR)):
        raise NotFound(f"no connection '{wanted}'")
    if not call.door.open_connections.close(found, f"closed by user '{call.visitor.name}'"):
        raise NotFound(f"no connection '{wanted}'")
    return Reply(status=204)


def operations() -> list[Operation]:
    return [
        Operation(
            "GET",
            PATH,
            list_connections,
            "List connections of AMQP and MQTT clients",
            "The caller's own; with the tag monitoring, everybody's.",
            query=ListQuery,
            answers={200: ConnectionList},
        ),
        Operation(
            "DELETE",
            f"{PATH}/{{connection}}",
            close_connection,
            "Close a connection",
            "One of the caller's own; with the tag administrator, anybody's.",
            parameters=ConnectionPath,
            answers={204: None},
            problems=(Code.NOT_FOUND,),
        ),
    ]
