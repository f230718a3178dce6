"""A sample of the mistakes that tests of the suite tell; `make mutants` plants all of them."""

from tests.simulation.directed import DIRECTED, ROOT, outcome


def test_a_test_fails_under_its_mistake_and_only_then() -> None:
    (mistake,) = (one for one in DIRECTED if one.name.startswith("MUT23"))
    assert outcome(mistake, planted=False) is None
    assert outcome(mistake, planted=True) is not None


def test_every_mistake_has_a_name_of_its_own_and_a_test_that_is_there() -> None:
    assert len({one.name for one in DIRECTED}) == len(DIRECTED)
    for one in DIRECTED:
        path, _, function = one.test.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), one.test
