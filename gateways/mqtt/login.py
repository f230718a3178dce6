"""Who one client is: what CONNECT and AUTH say of it. Driver.

By certificate, by user name and password, as the anonymous user, or by a proof that is made in AUTH packets before
CONNACK, and may be asked for again on an open connection. Neighbours: proving.py knows the proof's steps,
delivery/authentication.py the users; client.py hands packets over and sends what is said last in CONNACK.
"""

from collections.abc import Container

from headrace.gateways.delivery.login import Identity, Refusal
from headrace.gateways.mqtt.cutter import Violation
from headrace.gateways.mqtt.door import Ended, Line
from headrace.gateways.mqtt.packets import Auth, Connect, Disconnect
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.proving import MECHANISM, Proven, Proving
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode, protocol_error


class Login:
    __slots__ = ("_door", "_line", "_proving", "last_word", "method")

    def __init__(self, line: Line) -> None:
        self._line = line
        self._door = line.door
        # How the client proves who it is, if not by sending a password; what is said to it last; a proof under way.
        self.method: str | None = None
        self.last_word: bytes | None = None
        self._proving: Proving | None = None

    async def log_in(self, connect: Connect) -> tuple[str, str]:
        """User and vhost. Raises MqttError with what the client is answered, and Ended."""
        config, connection = self._door.config, self._line.connection
        name, vhost = connect.user_name, config.vhost
        address, loopback = connection.host, connection.is_loopback
        authentication = self._door.authentication
        if connect.properties.authentication_method is not None:
            outcome, vhost = await self._prove(connect.properties)
        elif name is None:
            name = connection.certified_name or config.anonymous_user
            if not name:
                raise MqttError(ReasonCode.BAD_USER_NAME_OR_PASSWORD, "a user name is needed")
            outcome = await authentication.certified(name, address=address, peer_is_loopback=loopback)
        else:
            if not (loopback or connection.tls or config.allow_plaintext_auth):
                text = "a password in clear text from another machine: use TLS, or set mqtt.allow_plaintext_auth"
                raise MqttError(ReasonCode.NOT_AUTHORIZED, text)
            vhost, name = self._placed(name)
            password = (connect.password or b"").decode("utf-8", "replace")
            outcome = await authentication.login(name, password, address=address, peer_is_loopback=loopback)
        if not isinstance(outcome, Identity):
            raise MqttError(ReasonCode.BAD_USER_NAME_OR_PASSWORD, "login refused; the broker's log says why")
        if vhost not in self._door.broker.vhosts or not self._door.access.may_enter(outcome.name, vhost):
            raise MqttError(ReasonCode.NOT_AUTHORIZED, f"access to vhost '{vhost}' refused for user '{outcome.name}'")
        return outcome.name, vhost

    def _placed(self, name: str) -> tuple[str, str]:
        """Vhost and user that a name means, as RabbitMQ has it."""
        return placed(name, self._door.broker.metadata.snapshot.users, self._door.config.vhost)

    async def _prove(self, asked: Properties) -> tuple[Identity | Refusal, str]:
        """[MQTT-4.12] The client proves who it is in AUTH packets before it gets its CONNACK."""
        if asked.authentication_method != MECHANISM:
            text = f"unknown authentication method '{asked.authentication_method}'; there is {MECHANISM}"
            raise MqttError(ReasonCode.BAD_AUTHENTICATION_METHOD, text, "MQTT-4.12.0-1")
        self.method = MECHANISM
        proving, data = self._new_proof(), asked.authentication_data
        while not isinstance(step := proving.take(data), Proven | Refusal):
            self._line.put(Auth(ReasonCode.CONTINUE_AUTHENTICATION, self._auth_properties(step)))
            self._door.turn.end()
            data = await self._next_proof()
        if isinstance(step, Refusal):
            raise MqttError(ReasonCode.NOT_AUTHORIZED, "login refused; the broker's log says why", "MQTT-4.12.0-4")
        self.last_word = step.answer
        return step.identity, proving.vhost

    async def _next_proof(self) -> bytes | None:
        match await self._line.next_event():
            case Auth(ReasonCode.CONTINUE_AUTHENTICATION, properties) if properties.authentication_method == MECHANISM:
                return properties.authentication_data
            case Auth():
                raise protocol_error("AUTH does not go on with what CONNECT began", "MQTT-4.12.0-5")
            case Violation(error):
                raise error
            case Disconnect():
                raise Ended
            case other:
                text = f"{type(other).__name__.upper()} before the login is complete"
                raise protocol_error(text, "MQTT-3.1.2-30")

    def prove_again(self, packet: Auth) -> None:
        """[MQTT-4.12.1] The client proves once more who it is; everything else goes on meanwhile."""
        if self.method is None:
            raise protocol_error("AUTH without an authentication method", "MQTT-4.12.0-7")
        if packet.properties.authentication_method != self.method:
            raise protocol_error("another authentication method than in CONNECT", "MQTT-4.12.1-1")
        begins = packet.reason is ReasonCode.REAUTHENTICATE
        if begins == (self._proving is not None):
            raise protocol_error("AUTH does not go on with what was begun")
        proving = self._proving = self._new_proof() if self._proving is None else self._proving
        step = proving.take(packet.properties.authentication_data)
        if isinstance(step, bytes):
            self._line.put(Auth(ReasonCode.CONTINUE_AUTHENTICATION, self._auth_properties(step)))
            return
        self._proving = None
        if isinstance(step, Refusal) or (step.identity.name, proving.vhost) != (self._line.user, self._line.vhost):
            # [MQTT-4.12.1-2]
            raise MqttError(ReasonCode.NOT_AUTHORIZED, "login refused; the broker's log says why", "MQTT-4.12.1-2")
        self._line.put(Auth(ReasonCode.SUCCESS, self._auth_properties(step.answer)))

    def _new_proof(self) -> Proving:
        connection = self._line.connection
        return Proving(
            self._door.authentication,
            self._door.broker.env.ids.nonce(),
            self._placed,
            address=connection.host,
            peer_is_loopback=connection.is_loopback,
        )

    def _auth_properties(self, data: bytes | None) -> Properties:
        return Properties(authentication_method=self.method, authentication_data=data or None)


def placed(name: str, users: Container[str], vhost: str) -> tuple[str, str]:
    """Vhost and user that a name means, as RabbitMQ has it; `vhost`: where it does not say."""
    if ":" in name and name not in users:
        vhost, _, name = name.partition(":")
    return vhost, name
