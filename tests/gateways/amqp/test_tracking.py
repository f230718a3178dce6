"""What is known of a relayed connection when its leader is lost."""

from hypothesis import given
from hypothesis import strategies as st
from pamqp import base, commands

from headrace.gateways.amqp.frames import _with_content, encode_ack, encode_deliver_run, encode_method
from headrace.gateways.amqp.methods import Method, decode_method, encode_payload, make
from headrace.gateways.amqp.tracking import Tracker
from headrace.gateways.relay.opening import ResumedChannel

FRAME_MAX = 4096


class Talk:
    """A conversation with a leader that answers as it should."""

    def __init__(self) -> None:
        self.tracker = Tracker(frame_max=FRAME_MAX)
        self.said: list[tuple[bool, bytes]] = []

    def client(self, channel: int, kind: type[base.Frame], **values: object) -> None:
        self.up(encode_method(channel, make(kind, **values)))

    def leader(self, channel: int, kind: type[base.Frame], **values: object) -> None:
        self.down(encode_method(channel, make(kind, **values)))

    def call(self, channel: int, asked: type[base.Frame], answer: type[base.Frame], **values: object) -> None:
        self.client(channel, asked, **values)
        self.leader(channel, answer)

    def up(self, data: bytes) -> None:
        self.said.append((True, data))
        assert self.tracker.from_client(data) == data

    def down(self, data: bytes) -> None:
        self.said.append((False, data))
        assert self.tracker.from_leader(data) == data

    def open(self, channel: int = 1) -> None:
        self.call(channel, commands.Channel.Open, commands.Channel.OpenOk)

    def publish(self, channel: int = 1, count: int = 1) -> None:
        payload = encode_payload(make(commands.Basic.Publish, routing_key="q"))
        self.up(_with_content(channel, payload, b"\0\0", b"body", FRAME_MAX) * count)

    def deliver(self, channel: int = 1, first: int = 1, count: int = 1) -> None:
        same = [b""] * count
        self.down(
            encode_deliver_run(channel, b"c", first, [False] * count, same, same, [b"\0\0"] * count, same, FRAME_MAX)
        )

    def channel(self, number: int = 1) -> ResumedChannel:
        (found,) = [one for one in self.tracker.recover().resumed.channels if one.number == number]
        return found

    def closed(self) -> list[tuple[int, str]]:
        """Channels that the loss of the leader closes, and why."""
        data = self.tracker.recover().to_client
        found = []
        while data:
            size = int.from_bytes(data[3:7], "big")
            method = decode_method(data[7 : 7 + size])
            if isinstance(method, commands.Channel.Close):
                assert method.reply_code == 506
                found.append((int.from_bytes(data[1:3], "big"), str(method.reply_text)))
            data = data[8 + size :]
        return found

    def again(self) -> list[str]:
        """What is asked of the next leader again."""
        return [type(method).__name__ for method in methods(self.tracker.recover().to_leader)]

    def topology(self) -> list[Method]:
        return [decode_method(payload) for payload in self.tracker.recover().resumed.topology]


def methods(data: bytes) -> list[Method]:
    found = []
    while data:
        size = int.from_bytes(data[3:7], "big")
        found.append(decode_method(data[7 : 7 + size]))
        data = data[8 + size :]
    return found


def test_a_channel_is_known_with_its_mode_prefetch_and_next_tag() -> None:
    talk = Talk()
    talk.open()
    talk.call(1, commands.Confirm.Select, commands.Confirm.SelectOk)
    talk.call(1, commands.Basic.Qos, commands.Basic.QosOk, prefetch_count=7)
    talk.call(1, commands.Basic.Qos, commands.Basic.QosOk, prefetch_count=9, global_=True)
    talk.call(1, commands.Channel.Flow, commands.Channel.FlowOk, active=False)
    talk.publish(count=3)
    talk.down(encode_ack(1, 3, True))
    talk.deliver(first=5, count=40)
    one = talk.channel()
    assert (one.confirming, one.published, one.consumer_prefetch, one.channel_prefetch) == (True, 3, 7, 9)
    assert (one.next_tag, one.flowing, one.transactional) == (45, False, False)
    assert talk.closed() == []


def test_consumers_have_the_tag_they_were_given_and_the_prefetch_they_came_with() -> None:
    talk = Talk()
    talk.open()
    talk.client(1, commands.Queue.Declare, queue="", exclusive=True)
    talk.leader(1, commands.Queue.DeclareOk, queue="amq.gen-1")
    talk.call(1, commands.Basic.Qos, commands.Basic.QosOk, prefetch_count=2)
    talk.client(1, commands.Basic.Consume, queue="")
    talk.leader(1, commands.Basic.ConsumeOk, consumer_tag="given")
    talk.call(1, commands.Basic.Qos, commands.Basic.QosOk, prefetch_count=3)
    talk.client(1, commands.Basic.Consume, queue="other", consumer_tag="own", nowait=True)
    consumers = talk.channel().consumers
    told = [decode_method(one.consume) for one in consumers]
    assert [(one.queue, one.consumer_tag, one.nowait) for one in told] == [  # type: ignore[attr-defined]
        ("amq.gen-1", "given", True),
        ("other", "own", True),
    ]
    assert [one.prefetch for one in consumers] == [2, 3]
    talk.call(1, commands.Basic.Cancel, commands.Basic.CancelOk, consumer_tag="own")
    talk.leader(1, commands.Basic.Cancel, consumer_tag="given", nowait=True)
    assert talk.channel().consumers == []


def test_only_what_no_other_node_knows_is_declared_and_bound_again() -> None:
    talk = Talk()
    talk.open()
    for queue, durable in (("kept", True), ("gone", False)):
        talk.client(1, commands.Queue.Declare, queue=queue, durable=durable)
        talk.leader(1, commands.Queue.DeclareOk, queue=queue)
        for key in ("a", "b"):
            talk.call(1, commands.Queue.Bind, commands.Queue.BindOk, queue=queue, exchange="amq.topic", routing_key=key)
    talk.call(1, commands.Exchange.Declare, commands.Exchange.DeclareOk, exchange="e", exchange_type="fanout")
    talk.call(1, commands.Exchange.Bind, commands.Exchange.BindOk, destination="e", source="amq.topic")
    values = {"queue": "gone", "exchange": "amq.topic", "routing_key": "a"}
    talk.call(1, commands.Queue.Unbind, commands.Queue.UnbindOk, **values)
    names = [type(one).name for one in talk.topology()]
    assert names == ["Exchange.Declare", "Queue.Declare", "Queue.Bind", "Exchange.Bind"]
    talk.call(1, commands.Queue.Delete, commands.Queue.DeleteOk, queue="gone")
    talk.call(1, commands.Exchange.Delete, commands.Exchange.DeleteOk, exchange="e")
    assert talk.topology() == []


def test_unconfirmed_publishes_close_their_channel_and_no_other() -> None:
    talk = Talk()
    talk.open(1)
    talk.open(2)
    talk.call(1, commands.Confirm.Select, commands.Confirm.SelectOk)
    talk.publish(1, count=5)
    talk.publish(2, count=5)
    talk.down(encode_ack(1, 2, True))
    ((number, text),) = talk.closed()
    assert number == 1
    assert "outcome of 3 publishes is unknown" in text
    resumed = talk.tracker.recover().resumed
    assert [one.number for one in resumed.channels] == [2]
    assert resumed.closing == [1]
    talk.client(1, commands.Channel.CloseOk)
    assert talk.tracker.recover().resumed.closing == []


def test_publishes_sent_before_confirm_select_was_answered_count() -> None:
    talk = Talk()
    talk.open()
    talk.client(1, commands.Confirm.Select)
    talk.publish()
    assert [number for number, _text in talk.closed()] == [1]


def test_a_transaction_is_under_way_until_its_commit_is_answered() -> None:
    talk = Talk()
    talk.open()
    talk.call(1, commands.Tx.Select, commands.Tx.SelectOk)
    talk.publish()
    talk.client(1, commands.Tx.Commit)
    talk.publish()
    talk.leader(1, commands.Tx.CommitOk)
    ((_number, text),) = talk.closed()
    assert "rolled back" in text


def test_a_transaction_that_is_committed_or_being_rolled_back_goes_on() -> None:
    talk = Talk()
    talk.open()
    talk.call(1, commands.Tx.Select, commands.Tx.SelectOk)
    talk.publish()
    talk.call(1, commands.Tx.Commit, commands.Tx.CommitOk)
    assert talk.channel().transactional
    talk.up(encode_ack(1, 1, False))
    talk.client(1, commands.Tx.Rollback)
    assert talk.closed() == []
    assert talk.again() == ["Rollback"]


def test_an_acknowledgement_in_a_transaction_is_part_of_it() -> None:
    talk = Talk()
    talk.open()
    talk.call(1, commands.Tx.Select, commands.Tx.SelectOk)
    talk.up(encode_ack(1, 1, False))
    assert [number for number, _text in talk.closed()] == [1]


def test_methods_in_flight_are_asked_again_if_they_may_be() -> None:
    talk = Talk()
    for number in (1, 2, 3):
        talk.open(number)
    talk.client(1, commands.Queue.Declare, queue="q", durable=True)
    talk.client(1, commands.Queue.Bind, exchange="amq.topic", routing_key="a")
    talk.client(2, commands.Queue.Purge, queue="q")
    talk.client(3, commands.Channel.Close)
    talk.client(4, commands.Channel.Open)
    recovery = talk.tracker.recover()
    assert [type(one).name for one in methods(recovery.to_leader)] == [
        "Queue.Declare",
        "Queue.Bind",
        "Channel.Close",
        "Channel.Open",
    ]
    assert [one.number for one in recovery.resumed.channels] == [1]
    assert recovery.resumed.closing == [2]
    talk.leader(3, commands.Channel.CloseOk)
    talk.leader(4, commands.Channel.OpenOk)
    assert [one.number for one in talk.tracker.recover().resumed.channels] == [1, 4]


def test_the_end_of_a_connection_is_known_whoever_wants_it() -> None:
    talk = Talk()
    talk.client(0, commands.Connection.Close, reply_code=200)
    assert talk.tracker.client_closes
    assert not talk.tracker.leader_closes
    talk.leader(0, commands.Connection.CloseOk)
    assert talk.tracker.leader_closes


def test_a_client_that_was_told_blocked_is_told_otherwise() -> None:
    talk = Talk()
    talk.leader(0, commands.Connection.Blocked, reason="memory")
    (method,) = methods(talk.tracker.recover().to_client)
    assert isinstance(method, commands.Connection.Unblocked)
    assert talk.tracker.recover().to_client == b""


steps = st.lists(
    st.sampled_from(["open", "select", "publish", "confirm", "deliver", "declare", "consume", "ack", "close", "tx"]),
    max_size=25,
)


@given(steps, st.lists(st.integers(1, 40), min_size=1))
def test_the_state_is_the_same_however_the_octets_are_split(script: list[str], sizes: list[int]) -> None:
    talk = Talk()
    published = tag = 0
    for step in script:
        match step:
            case "open":
                talk.open()
            case "select":
                talk.call(1, commands.Confirm.Select, commands.Confirm.SelectOk)
            case "publish":
                talk.publish(count=3)
                published += 3
            case "confirm":
                talk.down(encode_ack(1, published, True))
            case "deliver":
                talk.deliver(first=tag + 1, count=20)
                tag += 20
            case "declare":
                talk.client(1, commands.Queue.Declare, queue="")
                talk.leader(1, commands.Queue.DeclareOk, queue="amq.gen")
            case "consume":
                talk.call(1, commands.Basic.Consume, commands.Basic.ConsumeOk, queue="")
            case "ack":
                talk.up(encode_ack(1, 1, False) * 3)
            case "tx":
                talk.call(1, commands.Tx.Select, commands.Tx.SelectOk)
            case "close":
                talk.call(1, commands.Channel.Close, commands.Channel.CloseOk)
    split = Tracker(frame_max=FRAME_MAX)
    turn = 0
    for is_up, data in talk.said:
        take = split.from_client if is_up else split.from_leader
        handed = b""
        rest = data
        while rest:
            size = sizes[turn % len(sizes)]
            turn += 1
            handed += take(rest[:size])
            rest = rest[size:]
        assert handed == data
    assert split.recover() == talk.tracker.recover()
