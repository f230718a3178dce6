"""x-death: how a dead-lettered message tells its story. Format; pure.

One entry for each (queue, reason), the newest first: count, exchange, routing-keys, time, queue, reason and the
expiration it had. x-first-death-* are set once, x-last-death-* each time, as in RabbitMQ. A message that comes back to
a queue it died in, with no rejection on the way, is in a cycle and goes no further there.
"""

from collections.abc import Sequence

from headrace.gateways.amqp import properties
from headrace.gateways.amqp.fields import FieldTable, FieldValue, Timestamp
from headrace.gateways.delivery.broker import Death
from headrace.gateways.delivery.queue import Reason


def stamp(props: bytes, death: Death, targets: Sequence[str]) -> bytes | None:
    """Properties with this death added, or None when every target would close a cycle."""
    decoded = properties.decode(props)
    headers = decoded.headers or {}
    deaths = [dict(one) for one in _deaths(headers)]
    found = next((one for one in deaths if one.get("queue") == death.queue and one.get("reason") == death.reason), None)
    time = Timestamp(death.time_us // 1_000_000)
    keys = _keys(death, headers)
    if found is None:
        found = {
            "count": 1,
            "reason": str(death.reason),
            "queue": death.queue,
            "time": time,
            "exchange": death.exchange.decode("utf-8", "surrogateescape"),
            "routing-keys": keys,
        }
        if decoded.expiration is not None:
            found["original-expiration"] = decoded.expiration
    else:
        deaths.remove(found)
        count = found.get("count")
        found["count"] = (count if isinstance(count, int) else 0) + 1
        found["time"] = time
    deaths.insert(0, found)
    if targets and all(_closes_cycle(deaths, target) for target in targets):
        return None
    changes: dict[str, FieldValue] = {"x-death": deaths}
    exchange = death.exchange.decode("utf-8", "surrogateescape")
    for which in ("first", "last"):
        if which == "first" and "x-first-death-queue" in headers:
            continue
        changes[f"x-{which}-death-exchange"] = exchange
        changes[f"x-{which}-death-queue"] = death.queue
        changes[f"x-{which}-death-reason"] = str(death.reason)
    return properties.with_expiration(properties.with_headers(props, changes), None)


def _deaths(headers: FieldTable) -> list[FieldTable]:
    found = headers.get("x-death")
    if not isinstance(found, list):
        return []
    return [one for one in found if isinstance(one, dict)]


def _keys(death: Death, headers: FieldTable) -> list[FieldValue]:
    keys: list[FieldValue] = [death.routing_key.decode("utf-8", "surrogateescape")]
    copies = headers.get("CC")
    if isinstance(copies, list):
        keys += copies
    return keys


def _closes_cycle(deaths: Sequence[FieldTable], target: str) -> bool:
    """The message died in this queue before, and nobody rejected it since."""
    for one in deaths:
        if one.get("reason") == Reason.REJECTED:
            return False
        if one.get("queue") == target:
            return True
    return False
