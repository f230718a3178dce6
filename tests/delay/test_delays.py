"""The delay engine as its users meet it: parked records arrive once and in time, and can be found meanwhile."""

from headrace.delay.delays import Outcome
from headrace.delay.parked import made_id

from .house import DAY_US, house


async def test_record_arrives_when_it_is_due_and_not_before(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", in_s=5)
        assert it.delays.count() == 1
        assert await it.values_by(4.9) == []
        assert await it.values_by(0.2) == [b"a"]
        assert it.delays.count() == 0 and it.target.early == []


async def test_record_due_in_days_goes_through_a_bucket(autojump_clock: object) -> None:
    async with house() as it:
        (id,) = await it.park(b"a", in_s=3 * 86400)
        await it.sort()
        assert [(one.name, one.pending) for one in it.delays.buckets()] == [("near", 0), ("day", 1)]
        found = await it.delays.inspect(id)
        assert found is not None and found.value == b"a" and found.target == b"t"
        it.clock.step(3 * DAY_US - 1_000_000)
        assert await it.values_by(0.9) == []
        assert await it.values_by(0.5) == [b"a"]
        assert await it.delays.cancel(id) == Outcome.ALREADY_FIRED
        assert await it.delays.cancel(made_id(999)) == Outcome.UNKNOWN
