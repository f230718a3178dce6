"""What a SUBSCRIBE asks for besides topics: the user property `x-filter`, a tag expression. Format; pure.

It holds for all subscriptions of its packet. Neighbours: filtering/expression.py reads it, subscriber.py asks here.
"""

from headrace.filtering.expression import ExpressionError, parse
from headrace.gateways.mqtt.properties import Properties

FILTER = "x-filter"


def wanted_by(properties: Properties) -> tuple[str, str]:
    """The expression, empty for none; and why it cannot be, empty if it can."""
    found = [value for name, value in properties.user_properties if name == FILTER]
    if not found:
        return "", ""
    if len(found) > 1:
        return "", f"{FILTER} stands {len(found)} times: put the expressions together with &&"
    try:
        parse(found[0])
    except ExpressionError as error:
        return "", str(error)
    return found[0], ""
