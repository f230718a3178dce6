"""The audit: every event is told once, from the newest back, whatever the size of pages and windows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateways.delivery import audit
from headrace.gateways.delivery.audit import Audit, Event

from .test_broker import Machine


async def all_pages(found: Audit, kind: str | None, limit: int) -> list[Event]:
    told: list[Event] = []
    page = await found.page(kind, limit=limit)
    told += page.events
    while page.before is not None:
        page = await found.page(kind, before=page.before, limit=limit)
        assert len(page.events) <= limit
        told += page.events
    return told


@settings(max_examples=20, deadline=None)
@given(kinds=st.lists(st.sampled_from("ab"), max_size=150), limit=st.integers(1, 70))
async def test_pages_hold_every_event_of_a_kind_once_the_newest_first(kinds: list[str], limit: int) -> None:
    async with Machine().start() as running:
        kept = running.broker.audit
        for number, kind in enumerate(kinds):
            kept.note(kind, "ann", {"number": number})
        await running.commit()
        for wanted in ("a", None):
            expected = [number for number, kind in enumerate(kinds) if wanted in (None, kind)]
            told = await all_pages(kept, wanted, limit)
            assert [one.about["number"] for one in told] == expected[::-1]
            assert all(one.who == "ann" for one in told)


async def test_a_page_looks_through_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LOOK_BYTES_MAX", 1)
    async with Machine().start() as running:
        kept = running.broker.audit
        kept.note("rare", "ann", {})
        for _ in range(3 * audit.WINDOW_COUNT):
            kept.note("frequent", "ann", {})
        await running.commit()
        first = await kept.page("rare")
        assert (list(first.events), first.before) == ([], 2 * audit.WINDOW_COUNT + 1)
        assert [one.kind for one in await all_pages(kept, "rare", 1)] == ["rare"]
