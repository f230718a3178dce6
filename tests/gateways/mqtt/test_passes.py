"""How sessions that are behind go over the log: those that get nowhere wait for a round, the others go on."""

import pytest
from tests.core_log.power.inline import commit, create_logs, open_directory

from headrace.core_log.config import DirectoryConfig
from headrace.core_log.record import QOS_SHIFT
from headrace.core_log.record import Protocol as Vocabulary
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.mqtt.catch_up import FAR_COUNT, CatchUp, Progress, Translated
from headrace.gateways.mqtt.packets import Publish
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.session import Interest, Piece, Session
from headrace.gateways.mqtt.tally import Tally

from .test_session import Link

COUNT = 2 * FAR_COUNT


def no_amqp(blob: bytes) -> Translated:
    raise AssertionError("nothing comes from AMQP here")


class Backlog:
    """COUNT messages with QoS 1, in batches of `together`, far from the tail that is kept in memory."""

    def __init__(self, together: int) -> None:
        storage = MemoryStorage()
        directory = open_directory(storage, config=DirectoryConfig(tail_cache_bytes_max=1))
        (self.log,) = create_logs(directory, 1)
        for first in range(0, COUNT, together):
            self.log.append(
                [b"t"] * together,
                [b""] * together,
                [b"%d" % number for number in range(first, first + together)],
                timestamp_us=1,
                attributes=Vocabulary.MQTT_5 | 1 << QOS_SHIFT,
            )
            commit(directory, self.log)
        self.pass_ = CatchUp(
            self.log,
            storage,
            RoutingKeys(),
            no_amqp,
            lambda delivery, offset, names, blobs, payloads, qos, retain, expiry_us: delivery.session.offer(
                Piece(offset, qos, retain, names, blobs, payloads, expiry_us)
            ),
            Tally(),
        )

    def wake(self, name: str, window: int) -> tuple[Session, Link]:
        session, link = Session(name, now_us=lambda: 0), Link(window)
        session.interests["#"] = Interest("#", 1)
        session.attach(link, self.log.end)
        self.pass_.join(session)
        return session, link


def took(session: Session, link: Link) -> list[Publish]:
    """What came, acknowledged until nothing more comes by itself."""
    found: list[Publish] = []
    while came := link.take():
        found += came
        session.acknowledge([one.packet_id for one in came])
    return found


@pytest.mark.parametrize("window", [20, 5_000])
@pytest.mark.parametrize("together", [100, COUNT])
def test_a_session_that_takes_less_than_a_read_goes_on_where_it_is(together: int, window: int) -> None:
    backlog = Backlog(together)
    session, link = backlog.wake("one", window)
    rounds = 0
    found: list[Publish] = []
    while not session.live:
        rounds += backlog.pass_.feed() is Progress.ROUND
        found += took(session, link)
    assert [int(one.payload) for one in found] == [*range(COUNT)]
    # The one that it began with.
    assert rounds <= 1


def test_one_that_takes_nothing_does_not_hold_up_the_others() -> None:
    backlog = Backlog(1_000)
    stuck, _ = backlog.wake("stuck", 1)
    session, link = backlog.wake("one", 1_000)
    found: list[Publish] = []
    while not session.live:
        assert backlog.pass_.feed() is not Progress.IDLE
        found += took(session, link)
    assert [int(one.payload) for one in found] == [*range(COUNT)]
    assert 0 < stuck.position < COUNT
