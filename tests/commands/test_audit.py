"""`headrace audit` on a real broker."""

from .conftest import Headrace


def test_who_did_what_is_told(headrace: Headrace, name: str) -> None:
    headrace.ok("topics", "create", name)
    for _ in range(3):
        headrace.ok("groups", "reset", name, "--topic", name, "--to", "first", "--yes")
    told = headrace.lines("audit", "--kind", "group-reset", "--limit", 2)
    assert [(one["user"], one["about"]["group"]) for one in told] == [("guest", name)] * 2
    shown = headrace.ok("audit", "--limit", 1)
    for text in ("time", "group-reset", "guest", name):
        assert text in shown
    assert headrace.lines("audit", "--kind", "nothing") == []
