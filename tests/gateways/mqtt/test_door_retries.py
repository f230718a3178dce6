"""A failure PUBACK or PUBREC in a shared subscription under a retry policy: it comes back, then it is dead."""

import pytest
from tests.running_broker import eventually

from headrace.gateways.mqtt.packets import Puback, Publish, Pubrec
from headrace.gateways.mqtt.reasons import ReasonCode

from .conftest import MqttBroker
from .wire import Open

CONFIG = """
[[policies]]
name = 'again'
pattern = '^.share/.*/retried'
definition = { retry-max = 1, retry-backoff = 'fixed', retry-delay-ms = 20 }
"""


@pytest.mark.parametrize("kind", [Puback, Pubrec])
@pytest.mark.parametrize("expiry", [0, 300])
def test_message_refused_under_a_policy_comes_back_and_then_is_dead(
    broker: MqttBroker, client: Open, name: str, kind: type[Puback | Pubrec], expiry: int
) -> None:
    qos = 1 if kind is Puback else 2
    member, writer = client(name, session_expiry_interval=expiry), client()
    shared = f"$share/{name}/{name}/retried"
    member.subscribe(shared, qos=qos)
    writer.publish(f"{name}/retried", b"bad", qos)
    first = member.expect(Publish)
    member.send(kind(first.packet_id, ReasonCode.UNSPECIFIED_ERROR))
    again = member.expect(Publish)
    told = dict(again.properties.user_properties)
    assert (again.payload, again.topic) == (b"bad", f"{name}/retried")
    assert (told["x-attempt"], told["x-reason"]) == ("2", "rejected")
    member.send(kind(again.packet_id, ReasonCode.UNSPECIFIED_ERROR))
    queue = shared if expiry else f"{shared} (passing)"
    with broker.connect() as connection:

        def is_buried() -> bool:
            channel = connection.channel()
            try:
                return bool(channel.queue_declare(f"{queue}.dlq", passive=True).method.message_count)
            except Exception as error:
                assert "NOT_FOUND" in str(error)
                return False

        eventually(is_buried)
