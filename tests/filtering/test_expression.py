"""Tag expressions: the language by table, against a naive evaluator, errors by column, bounds; batches in three steps,
and forged hash collisions that let nothing through.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.tag_expressions import check

from headrace.core_log import format as log_format
from headrace.core_log.record import RecordBatch
from headrace.core_log.summary import summarise, tag_hash
from headrace.filtering.expression import (
    DEPTH_MAX,
    RUNS_FEW,
    TERMS_MAX,
    TEXT_CHARACTERS_MAX,
    Expression,
    ExpressionError,
    any_of,
    both,
    parse,
    quoted,
)


@pytest.mark.parametrize(
    ("text", "matching", "other"),
    [
        ("eu", [("eu",), ("eu", "vip")], [(), ("EU",), ("us",), ("eu=1",)]),
        ("!eu", [(), ("us",)], [("eu",), ("eu", "us")]),
        ("eu || us", [("eu",), ("us",)], [(), ("vip",)]),
        ("eu && vip", [("eu", "vip")], [("eu",), ("vip",), ()]),
        ("eu || (vip && !test)", [("eu",), ("vip",), ("eu", "test", "vip")], [("test", "vip"), ()]),
        ("eu || vip && test", [("eu",), ("test", "vip")], [("vip",), ("test",)]),
        ("!eu && us", [("us",)], [("eu", "us"), ()]),
        ("!(eu || us)", [(), ("vip",)], [("eu",), ("us",)]),
        ("!(eu && us)", [(), ("eu",)], [("eu", "us")]),
        ("!!eu", [("eu",)], [()]),
        ("tier = gold", [("tier=gold",)], [("gold",), ("tier",), ()]),
        ("tier != gold", [(), ("tier=silver",)], [("tier=gold",)]),
        ("region in (eu, us) && tier = gold", [("region=us", "tier=gold")], [("region=eu",), ("tier=gold",)]),
        ("!region in (eu,us)", [(), ("region=asia",)], [("region=eu",), ("region=us",)]),
        ("region IN (eu)", [("region=eu",)], [()]),
        ('"region=eu"', [("region=eu",)], [()]),
        ("in", [("in",)], [()]),
        ("in in (in)", [("in=in",)], [("in",)]),
        ('"a b" || "c&&d" || \'"\'', [("a b",), ("c&&d",), ('"',)], [("a",), ("c",)]),
        (r'"back\\slash and \"quote\""', [('back\\slash and "quote"',)], [()]),
        ("größe = \u6253", [("größe=\u6253",)], [()]),
        ("a-b.c/d:e+f*g#h@i$", [("a-b.c/d:e+f*g#h@i$",)], [()]),
        ("\u00a0eu\t||\nus", [("eu",), ("us",)], [()]),
        ("path = 'a=b'", [("path=a=b",)], [("path=a",)]),
    ],
)
def test_expression_matches(text: str, matching: list[tuple[str, ...]], other: list[tuple[str, ...]]) -> None:
    expression = parse(text)
    assert [tags for tags in matching + other if expression.matches(tags)] == matching


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 1, "expected a tag, found the end"),
        ("eu &&", 6, "expected a tag, found the end"),
        ("eu vip", 4, r"expected && or \|\|, found 'vip'"),
        ("eu & vip", 4, "write &&"),
        ("eu | vip", 4, r"write \|\|"),
        ("(eu || vip", 11, r"a \) for the \( at column 1, found the end"),
        ("eu)", 3, r"found '\)'"),
        ("()", 2, r"expected a tag, ! or \(, found '\)'"),
        ("tier =", 7, "a value, found the end"),
        ("= gold", 1, "found '='"),
        ("tier = = gold", 8, "a value, found '='"),
        ("region in eu", 11, r"\( and a list of values"),
        ("region in ()", 12, "a value"),
        ("region in (eu us)", 15, r"expected , or \)"),
        ("region in (eu,", 15, "found the end"),
        ('eu || "vip', 7, "a quote that is not closed"),
        ("eu || 'vip\\", 7, "a quote that is not closed"),
        ("eu\\", 3, "a backslash stands in quotes only"),
        ("eu || ''", 7, "at least one character"),
        ("eu || 'a=b' = c", 7, "must not hold '='"),
        ("a == b", 4, "a value, found '='"),
        ("größe && ", 10, "found the end"),
        ("eu || " + "x" * 256, 7, "longer than 255"),
        ("eu || \udc80", 7, "not UTF-8"),
    ],
)
def test_mistake_is_named_with_its_column(text: str, column: int, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason) as caught:
        parse(text)
    assert caught.value.column == column
    assert str(caught.value).startswith(f"filter expression, column {column}: ")


def test_bounds_hold_at_the_limit_and_not_one_past_it() -> None:
    parse(" " * (TEXT_CHARACTERS_MAX - 1) + "a")
    with pytest.raises(ExpressionError, match="at most"):
        parse(" " * TEXT_CHARACTERS_MAX + "a")
    parse("(" * DEPTH_MAX + "a" + ")" * DEPTH_MAX)
    for opening in ("(", "!", "!("):
        with pytest.raises(ExpressionError, match=f"more than {DEPTH_MAX}") as caught:
            parse(opening * TERMS_MAX)
        assert caught.value.column == DEPTH_MAX + 1
    parse("||".join(f"t{number}" for number in range(TERMS_MAX)))
    with pytest.raises(ExpressionError, match=f"more than {TERMS_MAX} terms"):
        parse("||".join(f"t{number}" for number in range(TERMS_MAX + 1)))
    with pytest.raises(ExpressionError, match=f"more than {TERMS_MAX} terms"):
        parse(f"a in ({','.join(map(str, range(TERMS_MAX + 1)))})")
    with pytest.raises(ExpressionError, match="1 to 256"):
        any_of([])


# -- against a naive evaluator ------------------------------------------------------------------------------------

NAMES = ["a", "b", "c d", "é", '"', "&&", "in", "x=y", "("]
TREES = st.recursive(
    st.one_of(
        st.tuples(st.just("tag"), st.sampled_from(NAMES)),
        st.tuples(st.sampled_from(["=", "!="]), st.sampled_from(["a", "c d"]), st.sampled_from(NAMES)),
        st.tuples(st.just("in"), st.just("a"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)),
    ),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)
TAG_SETS = st.lists(
    st.sampled_from([*NAMES, *(f"{name}={value}" for name in ("a", "c d") for value in NAMES)]), max_size=5
).map(lambda tags: tuple(sorted(set(tags))))


def written(tree: tuple) -> str:  # type: ignore[type-arg]
    match tree:
        case ("tag", name):
            return quoted(name)
        case ("=" | "!=" as sign, name, value):
            return f"{quoted(name)}{sign} {quoted(value)}"
        case ("in", name, values):
            return f"{quoted(name)} in ({','.join(map(quoted, values))})"
        case ("not", inner):
            return f"!({written(inner)})"
        case (word, parts):
            return {"and": "&&", "or": "||"}[word].join(f" ({written(part)}) " for part in parts)
    raise AssertionError(tree)


def naive(tree: tuple, tags: tuple[str, ...]) -> bool:  # type: ignore[type-arg]
    match tree:
        case ("tag", name):
            return name in tags
        case ("=", name, value):
            return f"{name}={value}" in tags
        case ("!=", name, value):
            return f"{name}={value}" not in tags
        case ("in", name, values):
            return any(f"{name}={value}" in tags for value in values)
        case ("not", inner):
            return not naive(inner, tags)
        case ("and", parts):
            return all(naive(part, tags) for part in parts)
        case ("or", parts):
            return any(naive(part, tags) for part in parts)
    raise AssertionError(tree)


@given(TREES, st.lists(TAG_SETS, min_size=1, max_size=5))
def test_parsed_expression_says_what_a_naive_evaluator_says(tree: tuple, sets: list[tuple[str, ...]]) -> None:  # type: ignore[type-arg]
    expression = parse(written(tree))
    assert [expression.matches(tags) for tags in sets] == [naive(tree, tags) for tags in sets]
    again = parse(expression.canonical)
    assert again == expression
    assert again.canonical == expression.canonical
    assert [again.matches(tags) for tags in sets] == [naive(tree, tags) for tags in sets]


def batch_of(sets: list[tuple[str, ...]]) -> RecordBatch:
    batch = RecordBatch(0, 1)
    for number, tags in enumerate(sets):
        batch.add([b"key"], [b""], [b"%d" % number], timestamp_us=number, tags=tags)
    return batch


@given(TREES, st.lists(TAG_SETS, min_size=1, max_size=3 * RUNS_FEW), st.data())
def test_batch_is_asked_with_the_same_answer_as_each_of_its_records(
    tree: tuple,  # type: ignore[type-arg]
    sets: list[tuple[str, ...]],
    data: st.DataObject,
) -> None:
    expression = parse(written(tree))
    batch = batch_of(sets)
    first = data.draw(st.integers(0, len(sets)))
    last = data.draw(st.integers(first, len(sets)))
    wanted = [index for index in range(first, last) if naive(tree, sets[index])]
    assert expression.select(batch, first, last) == wanted
    spans = expression.spans(batch, first, last)
    assert all(high < low for (_, high), (low, _) in itertools.pairwise(spans))
    columns = columns_of(batch)
    if any(naive(tree, tags) for tags in sets):
        assert expression.may_match(summary_of(batch))
        assert expression.may_hold(columns.tag_hashes, columns.tag_sets)


def encoded(batch: RecordBatch) -> tuple[bytes, log_format.BatchHeader]:
    buffers = log_format.stamp(log_format.encode(batch), salt=1, base_offset=0, leader_epoch=1, durable_offset=0)
    data = b"".join(buffers)
    header = log_format.maybe_header(data, 0, 1)
    assert header is not None
    return data, header


def columns_of(batch: RecordBatch) -> log_format.Columns:
    return log_format.decode_columns(*encoded(batch)[:1], 0, encoded(batch)[1], blobs=False)


def summary_of(batch: RecordBatch) -> bytes:
    return log_format.encode(batch).summary


def test_summary_and_hashes_pass_over_what_cannot_match() -> None:
    batch = batch_of([("eu", "vip"), ("us",)])
    columns = columns_of(batch)
    for text, by_summary, by_hash in (
        ("asia", False, False),
        ("eu && asia", False, False),
        ("eu && us", True, False),
        ("eu && vip", True, True),
        ("!eu", True, True),
        ("asia || us", True, True),
    ):
        expression = parse(text)
        assert expression.may_match(summary_of(batch)) is by_summary
        assert expression.may_hold(columns.tag_hashes, columns.tag_sets) is by_hash
    assert parse("asia").may_match(b"")


@pytest.mark.parametrize("forged", [lambda tag: 42, lambda tag: len(tag), lambda tag: tag_hash(tag) & 1])
def test_colliding_hashes_let_no_record_through(monkeypatch: pytest.MonkeyPatch, forged) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(log_format, "tag_hash", forged)
    sets = [("eu",), ("us",), ("eu", "us"), (), ("aa", "bb")]
    batch = batch_of(sets)
    data, header = encoded(batch)
    read = log_format.decode(data, 0, header)
    for text in ("eu", "us", "!eu", "eu && us", "aa || us", "!us && !eu"):
        honest = parse(text)
        deceived = Expression(honest.root, hash_of=forged)
        assert deceived.may_match(log_format.encode(batch).summary)
        wanted = [index for index, tags in enumerate(sets) if honest.matches(tags)]
        assert deceived.select(read, 0, len(sets)) == wanted
        columns = log_format.decode_columns(data, 0, header, blobs=False)
        assert deceived.may_hold(columns.tag_hashes, columns.tag_sets) >= bool(wanted)
    # The lie is real: by hashes alone every tag would pass for this one.
    assert Expression(parse("zz").root, hash_of=lambda tag: 42).may_hold([42], [(0,)])


def test_texts_that_mean_the_same_are_one_filter() -> None:
    assert parse("eu||vip") == parse("(vip) || eu || eu")
    assert hash(parse("!(a || b)")) == hash(parse("!b && !a"))
    assert parse("region in (eu, us)") == parse('"region=us" || region = eu')
    assert parse("a") != parse("!a")


def test_answers_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.filtering.expression.KNOWN_MAX", 8)
    expression = Expression(parse("t3").root)
    assert [number for number in range(100) if expression.matches((f"t{number}",))] == [3]
    assert len(expression._known) <= 8
    large = tuple(sorted({"t3", *(f"{number:0>60}" for number in range(20))}))
    assert expression.matches(large)
    assert large not in expression._known


def test_any_of_and_both_build_what_parse_would() -> None:
    assert any_of(["x", "y"]) == parse("x || y")
    assert any_of(["x"], or_without="v") == parse("x || !v")
    assert both(parse("a || b"), parse("c")) == parse("(a || b) && c")


def test_summary_of_other_tags_is_passed_over_nearly_always() -> None:
    summary = summarise({tag_hash(f"tag {number}") for number in range(100)})
    passed = sum(not parse(f"other{number}").may_match(summary) for number in range(500))
    assert passed > 450


@given(st.binary(max_size=200))
def test_any_octets_parse_or_are_refused(data: bytes) -> None:
    check(data)
