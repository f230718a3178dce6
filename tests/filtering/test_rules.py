"""Rules that give tags: patterns over topics and keys, captures, mistakes, bounds."""

import pytest

from headrace.filtering.rules import RULES_MAX, InvalidRule, TagRules
from headrace.filtering.tags import TAG_COUNT_MAX


@pytest.mark.parametrize(
    ("pattern", "tags", "key", "expected"),
    [
        ("fleet/{region}/#", "region={region}", "fleet.eu.truck.1", ("region=eu",)),
        ("fleet/{region}/#", "region={region},mobile", "fleet.eu", ("mobile", "region=eu")),
        ("fleet.{region}.#", "region={region}", "fleet.eu.truck", ("region=eu",)),
        ("fleet/{region}/#", "region={region}", "fleet", ()),
        ("fleet/{region}/#", "region={region}", "trains.eu", ()),
        ("fleet/{region}/#", "region={region}", "fleet..x", ()),
        ("{a}/+/{b}", "{a}-{b}", "x.y.z", ("x-z",)),
        ("{a}/+/{b}", "{a}-{b}", "x.y.z.w", ()),
        ("a.*.{last}", "{last}", "a.b.c", ("c",)),
        ("#", "any", "", ("any",)),
        ("sensors/v1.0/{id}", "id={id}", "sensors.v1%2E0.a%2Eb%25", ("id=a.b%",)),
        ("sensors.{id}", "id={id}", "sensors.a%2Eb", ("id=a%2Eb",)),
        ("{id}", '"a, {id}"', "x", ("a, x",)),
        ("{id}", "id={id}", "x" * 300, ()),
        ("+", "one level", "x", ("one level",)),
    ],
)
def test_rule_gives_tags(pattern: str, tags: str, key: str, expected: tuple[str, ...]) -> None:
    assert TagRules({pattern: tags}).tags_of(key) == expected


def test_rules_that_match_are_put_together() -> None:
    rules = TagRules({"fleet/#": "mobile", "fleet/{region}/#": "region={region},mobile", "plant/#": "fixed"})
    assert rules.tags_of("fleet.eu.1") == ("mobile", "region=eu")


@pytest.mark.parametrize(
    ("pattern", "tags", "reason"),
    [
        ("", "a", "1 to 1024"),
        ("a/#/b", "a", "# stands last"),
        ("a/x{b}/c", "a", "whole level"),
        ("a/{b}/{b}", "{b}", "one name twice"),
        ("a/{b}", "{c}", "nothing is captured as c"),
        ("a/{b}", "", "no tags"),
        ("a/{b}", '"', "not closed"),
        ("{1}", "a", "whole level"),
    ],
)
def test_rule_that_cannot_be_understood_is_refused(pattern: str, tags: str, reason: str) -> None:
    with pytest.raises(InvalidRule, match=reason):
        TagRules({pattern: tags})


def test_rules_are_bounded_in_number_and_in_what_they_give() -> None:
    rules = {f"#.{number}".replace("#.", "*."): "x" for number in range(RULES_MAX)}
    TagRules(rules)
    with pytest.raises(InvalidRule, match="more than"):
        TagRules({**rules, "one.more": "x"})
    many = {f"{{a}}/{'+/' * place}#": ",".join(f"{place}-{n}" for n in range(60)) for place in range(3)}
    assert len(TagRules(many).tags_of("a.b.c.d.e")) == TAG_COUNT_MAX
