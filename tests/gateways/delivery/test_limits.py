"""Connections and channels are counted on and off, and refused at their limits in RabbitMQ's words."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.controller.entities import User, UserLimits, Version, Vhost, VhostLimits
from headrace.controller.snapshot import load
from headrace.core_log.ids import ViewId
from headrace.gateways.delivery.limits import SPARE_MIN, Limits, LimitsConfig, Member

NOTHING = load(UUID(int=1), Version(0), ViewId(1))
ELSEWHERE = "192.0.2.7"
NO_LIMITS = LimitsConfig(
    connections_max=None, connections_per_user_max=None, connections_per_address_max=None, queues_per_vhost_max=None
)


def member(user: str = "ann", vhost: str = "/", address: str = ELSEWHERE) -> Member:
    return Member(user, vhost, address, loopback=address == "127.0.0.1")


def limits(**config: int | None) -> Limits:
    values = {field: config.get(field) for field in LimitsConfig.__slots__}
    return Limits(NOTHING, LimitsConfig(**values))


def test_node_refuses_one_more_connection_than_its_limit_and_takes_it_when_another_left() -> None:
    counted = limits(connections_max=2)
    assert counted.enter(member("ann")) is None
    assert counted.enter(member("bob")) is None
    assert counted.enter(member("eve")) == "connection refused: node connection limit (2) is reached"
    counted.leave(member("ann"))
    assert counted.enter(member("eve")) is None
    assert counted.refused_count == 1


def test_user_has_a_limit_of_its_own() -> None:
    counted = limits(connections_per_user_max=1)
    assert counted.enter(member("ann")) is None
    refusal = "connection refused for user 'ann': user connection limit (1) is reached"
    assert counted.enter(member("ann", address="198.51.100.1")) == refusal
    assert counted.enter(member("bob")) is None


def test_address_has_a_limit_of_its_own() -> None:
    counted = limits(connections_per_address_max=1)
    assert counted.enter(member("ann")) is None
    refusal = f"connection refused for address '{ELSEWHERE}': address connection limit (1) is reached"
    assert counted.enter(member("bob")) == refusal
    assert counted.enter(member("bob", address="198.51.100.1")) is None


def test_loopback_is_spared_by_limits_per_user_and_address() -> None:
    counted = limits(connections_per_address_max=1, connections_per_user_max=1, channels_per_user_max=1)
    local = member(address="127.0.0.1")
    for _ in range(50):
        assert counted.accept("127.0.0.1", loopback=True)
        assert counted.enter(local) is None
        assert counted.open_channel(local) is None


@pytest.mark.parametrize("address", ["127.0.0.1", ELSEWHERE])
def test_limits_in_the_metadata_hold_for_everybody_and_win_over_the_configuration(address: str) -> None:
    snapshot = load(
        UUID(int=1),
        Version(1),
        ViewId(1),
        vhosts=[Vhost("/"), Vhost("shop")],
        users=[User("ann")],
        vhost_limits=[VhostLimits("shop", connections_max=1)],
        user_limits=[UserLimits("ann", connections_max=2, channels_max=1)],
    )
    counted = Limits(NOTHING, LimitsConfig(connections_per_user_max=1))
    counted.update(snapshot)
    assert counted.enter(member("ann", "shop", address)) is None
    assert counted.enter(member("bob", "shop", address)) == (
        "access to vhost 'shop' refused for user 'bob': connection limit (1) is reached"
    )
    assert counted.enter(member("ann", "/", address)) is None
    assert counted.enter(member("ann", "/", address)) == (
        "connection refused for user 'ann': user connection limit (2) is reached"
    )
    assert counted.open_channel(member("ann", "/", address)) is None
    assert counted.open_channel(member("ann", "/", address)) == (
        "number of channels opened for user 'ann' has reached the maximum allowed user limit of (1)"
    )
    counted.close_channel(member("ann", "/", address))
    assert counted.open_channel(member("ann", "/", address)) is None


def test_vhost_with_a_limit_of_zero_lets_nobody_in() -> None:
    snapshot = load(UUID(int=1), Version(1), ViewId(1), vhosts=[Vhost("shop")], vhost_limits=[VhostLimits("shop", 0)])
    assert Limits(snapshot).enter(member(vhost="shop")) is not None


def test_sockets_are_heard_somewhat_beyond_the_limits_and_no_further() -> None:
    counted = limits(connections_max=10)
    heard = sum(counted.accept(f"192.0.2.{number}", loopback=False) for number in range(100))
    assert heard == 10 + SPARE_MIN
    assert counted.dropped_count == 100 - heard
    counted.close("192.0.2.0")
    assert counted.accept("192.0.2.99", loopback=False)


def test_one_address_cannot_take_all_sockets() -> None:
    counted = limits(connections_max=1000, connections_per_address_max=100)
    assert sum(counted.accept(ELSEWHERE, loopback=False) for _ in range(1000)) == 125
    assert counted.accept("198.51.100.1", loopback=False)


def test_no_limit_is_no_limit() -> None:
    counted = Limits(NOTHING, NO_LIMITS)
    for _ in range(20_000):
        assert counted.accept(ELSEWHERE, loopback=False)
        assert counted.enter(member()) is None
        assert counted.open_channel(member()) is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.booleans())))
def test_whoever_leaves_is_forgotten(events: list[tuple[str, str, bool]]) -> None:
    counted = limits(connections_max=3)
    inside: list[Member] = []
    for user, vhost, leaves in events:
        if leaves and inside:
            counted.leave(inside.pop())
        elif counted.enter(member(user, vhost)) is None:
            inside.append(member(user, vhost))
        assert counted.member_count == len(inside) <= 3
    for one in inside:
        counted.leave(one)
    assert not counted._by_user and not counted._by_vhost and not counted._by_address


def test_queues_of_a_vhost_are_limited_by_the_metadata_else_by_the_configuration() -> None:
    snapshot = load(
        UUID(int=1), Version(1), ViewId(1), vhosts=[Vhost("shop")], vhost_limits=[VhostLimits("shop", queues_max=3)]
    )
    counted = Limits(snapshot, LimitsConfig(queues_per_vhost_max=7))
    assert (counted.queues_max("shop"), counted.queues_max("/")) == (3, 7)
