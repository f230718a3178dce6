"""Publishes of many connections in one turn: few appends, each client's order, and each hears of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.core_log.errors import DiskFull, HeadraceError
from headrace.gateways.mqtt.cutter import PublishRun
from headrace.gateways.mqtt.intake import Intake
from headrace.gateways.mqtt.reasons import Version


@dataclass(eq=False)
class Device:
    """A publisher, and what it heard."""

    origin: int
    version: Version = Version.V3_1_1
    gathering: int = -1
    acknowledged: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    errors: list[HeadraceError] = field(default_factory=list)

    def appended(self, run: PublishRun) -> None:
        self.acknowledged += run.packet_ids

    def turned_away(self, run: PublishRun, refused: Sequence[int]) -> PublishRun:
        self.refused += [run.packet_ids[place] for place in refused]
        return PublishRun(run.first_byte, packet_ids=[one for one in run.packet_ids if one not in self.refused])

    def append_failed(self, error: HeadraceError) -> None:
        self.errors.append(error)


@dataclass
class Appended:
    payloads: list[bytes]
    qos: int
    version: Version
    origin: int | Sequence[int]


class Log:
    """Where the intake appends: a log that keeps what was asked of it, and is committed when the test says so."""

    def __init__(self) -> None:
        self.appends: list[Appended] = []
        self.waiting: list[tuple[int, Callable[[], None]]] = []
        self.ends: list[Callable[[], None]] = []
        self.refuses: list[int] = []
        self.error: HeadraceError | None = None
        self.intake = Intake(self.append, lambda end, done: self.waiting.append((end, done)), self.ends.append)

    def append(
        self,
        topics: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        *,
        qos: int,
        retain: bool,
        version: Version,
        origin: int | Sequence[int],
        refused: list[int],
    ) -> int | None:
        if self.error is not None:
            raise self.error
        assert len(topics) == len(blobs) == len(payloads)
        self.appends.append(Appended([*payloads], qos, version, origin))
        refused += self.refuses
        return sum(len(one.payloads) for one in self.appends)

    def end_turn(self) -> None:
        ends, self.ends[:] = [*self.ends], []
        for end in ends:
            end()

    def commit(self) -> None:
        waiting, self.waiting = self.waiting, []
        for _end, done in waiting:
            done()


def messages(*payloads: bytes, qos: int = 1, first_id: int = 1) -> PublishRun:
    count = len(payloads)
    ids = [*range(first_id, first_id + count)] if qos else []
    return PublishRun(0x30 | qos << 1, [b"t"] * count, [b""] * count, [*payloads], ids)


def test_what_many_publish_in_a_turn_is_one_append_and_each_hears_of_its_own_once_it_is_committed() -> None:
    log = Log()
    one, two = Device(1), Device(2)
    log.intake.put(one, messages(b"a", b"b"))
    log.intake.put(two, messages(b"c", first_id=9))
    assert log.appends == [] and len(log.ends) == 1
    log.end_turn()
    assert log.appends == [Appended([b"a", b"b", b"c"], 1, Version.V3_1_1, [1, 1, 2])]
    assert (one.acknowledged, two.acknowledged) == ([], [])
    log.commit()
    assert (one.acknowledged, two.acknowledged) == ([1, 2], [9])


def test_what_one_publishes_alone_has_one_origin_and_the_columns_of_its_read() -> None:
    log = Log()
    log.intake.put(Device(7), messages(b"a", b"b", qos=0))
    log.end_turn()
    assert log.appends == [Appended([b"a", b"b"], 0, Version.V3_1_1, 7)]
    assert log.waiting == []


def test_messages_of_one_client_keep_their_order_whatever_their_qos() -> None:
    log = Log()
    one, two = Device(1), Device(2)
    log.intake.put(one, messages(b"a", qos=1))
    log.intake.put(two, messages(b"b", qos=0))
    log.intake.put(one, messages(b"c", qos=0))
    log.intake.put(one, messages(b"d", qos=1))
    log.end_turn()
    order = [payload for one_append in log.appends for payload in one_append.payloads if payload != b"b"]
    assert order == [b"a", b"c", b"d"]


def test_clients_that_differ_in_version_or_qos_do_not_split_each_others_appends() -> None:
    log = Log()
    devices = [Device(number, Version.V5 if number % 2 else Version.V3_1_1) for number in range(6)]
    for device in devices:
        log.intake.put(device, messages(b"%d" % device.origin))
    log.end_turn()
    assert [one.payloads for one in log.appends] == [[b"0", b"2", b"4"], [b"1", b"3", b"5"]]


def test_whoever_must_stand_behind_them_in_the_log_has_them_appended_first() -> None:
    log = Log()
    log.intake.put(Device(1), messages(b"a"))
    log.intake.flush()
    assert [one.payloads for one in log.appends] == [[b"a"]]
    log.intake.put(Device(1), messages(b"b"))
    log.end_turn()
    assert [one.payloads for one in log.appends] == [[b"a"], [b"b"]]


def test_what_a_full_queue_refuses_is_told_to_whom_it_was_of() -> None:
    log = Log()
    one, two, three = Device(1), Device(2), Device(3)
    for device in (one, two, three):
        log.intake.put(device, messages(b"x", b"y", first_id=10))
    log.refuses = [1, 4, 5]
    log.end_turn()
    log.commit()
    assert [device.refused for device in (one, two, three)] == [[11], [], [10, 11]]
    assert [device.acknowledged for device in (one, two, three)] == [[10], [10, 11], []]


def test_when_the_log_takes_nothing_everybody_hears_of_it() -> None:
    log = Log()
    log.error = DiskFull("no space left")
    one, two = Device(1), Device(2)
    log.intake.put(one, messages(b"a"))
    log.intake.put(two, messages(b"b"))
    log.end_turn()
    log.commit()
    assert one.errors == two.errors == [log.error]
    assert (one.acknowledged, two.acknowledged) == ([], [])
