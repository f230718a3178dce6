"""The audit over HTTP: what people did to the broker's messages, and when. Driver; gateways/delivery/audit.py keeps it.

For users with the tag monitoring: it tells of every vhost.
"""

from typing import Annotated, Any

from msgspec import Meta

from headrace.gateways.delivery.access import Tag
from headrace.gateways.http.operations import Answer, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code
from headrace.gateways.http.records import time_text

PATH = "/api/v1/audit"
LIMIT_MAX = 1000


class AuditQuery(Parameters, frozen=True, kw_only=True):
    kind: Annotated[
        str | None, Meta(description="only of this kind: `redrive`, `group-reset`, `group-delete`, ...")
    ] = None
    after: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="the cursor of the page before")] = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 100


class EventOut(Answer, frozen=True, kw_only=True):
    id: Annotated[int, Meta(description="counts up, with gaps perhaps")]
    time: str
    kind: str
    user: str
    about: Annotated[dict[str, Any], Meta(description="what it was about, in words of its kind")]


class EventPage(Answer, frozen=True, kw_only=True):
    events: Annotated[list[EventOut], Meta(description="the newest first; may be few, or none, and not the last")]
    cursor: Annotated[int | None, Meta(description="for `after`; null: this was the last page")]


async def list_events(call: Call[Parameters, AuditQuery, None]) -> Reply:
    call.visitor.require_tag(Tag.MONITORING)
    query, broker = call.query, call.door.broker
    await broker.wait_committed(broker.audit.log, int(broker.audit.log.end))
    page = await broker.audit.page(query.kind, before=query.after, limit=query.limit)
    events = [
        EventOut(id=one.offset, time=time_text(one.time_us), kind=one.kind, user=one.who, about=dict(one.about))
        for one in page.events
    ]
    return Reply(EventPage(events=events, cursor=page.before))


def operations() -> list[Operation]:
    return [
        Operation(
            "GET",
            PATH,
            list_events,
            "Who did what to messages",
            "Redrives and resets of consumer groups, the newest first. Needs the tag monitoring.",
            query=AuditQuery,
            answers={200: EventPage},
            problems=(Code.FORBIDDEN,),
        )
    ]
