"""Health of a node, for load balancers and those who restart what has died: alive, and ready for clients. Driver: pure
answers from the broker's state. Asked without a login, so nothing is told but yes, no and which alarm."""

from headrace.gateways.http.operations import Answer, Call, Operation, Parameters, Reply

PATH = "/api/v1/health"


class Health(Answer, frozen=True, kw_only=True):
    """`status` is `ok`, or `degraded` while publishers have to wait, or `stopping`."""

    status: str
    # Alarms that are up: memory, disk.
    alarms: list[str]


async def get_health(call: Call[Parameters, Parameters, None]) -> Reply:
    return Reply(_health(call))


async def get_live(call: Call[Parameters, Parameters, None]) -> Reply:
    """An answer at all is the answer: the loop turns."""
    return Reply(_health(call))


async def get_ready(call: Call[Parameters, Parameters, None]) -> Reply:
    health = _health(call)
    return Reply(health, status=200 if health.status == "ok" else 503)


def _health(call: Call[Parameters, Parameters, None]) -> Health:
    alarms = sorted(alarm.value for alarm in call.door.alarms.active)
    status = "degraded" if alarms else "ok"
    if call.door.stopping.is_set():
        status = "stopping"
    return Health(status=status, alarms=alarms)


def operations() -> list[Operation]:
    return [
        Operation(
            "GET",
            PATH,
            get_health,
            "How the node is",
            "Always 200 while the node can answer; `status` says the rest.",
            answers={200: Health},
            login=False,
        ),
        Operation(
            "GET",
            f"{PATH}/live",
            get_live,
            "Whether the node is alive",
            "No answer, or none in time: restart it.",
            answers={200: Health},
            login=False,
        ),
        Operation(
            "GET",
            f"{PATH}/ready",
            get_ready,
            "Whether the node should be sent clients",
            "503 while an alarm makes publishers wait, and while the node stops.",
            answers={200: Health, 503: Health},
            login=False,
        ),
    ]
