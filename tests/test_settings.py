"""Sections join by one line; what is given wins in order; every problem is told at once, with where and what."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kinds import Choice, Count, Text
from headrace.settings import Change, ConfigError, changes, load, parsed, section, setting, settings_of, tables


@dataclass(frozen=True, slots=True)
class Mill:
    stones: int = setting(Count(1, 9), "how many", 2, flag="--stones")
    speed: str = setting(Choice(("slow", "fast")), "how quick", "slow", live=True)


@dataclass(frozen=True, slots=True)
class Sluice:
    gates: int = setting(Count(1, 9), "how many", 1)
    password: str = setting(Text(), "to open it", "none")


@dataclass(frozen=True, slots=True)
class Miller:
    name: str = setting(Text(), "who")
    stones: int = setting(Count(1, 9), "how many at once", 1)


def parse_law(document: Mapping[str, object]) -> tuple[str, ...]:
    """Of another room: it reads `[[rights]]`, and of `[sluice]` what is no setting."""
    sluice = document.get("sluice", {})
    assert isinstance(sluice, dict)
    for name in sluice:
        if not name.startswith("owner_"):
            raise ValueError(f"sluice.{name}: unknown field")
    rights = document.get("rights", [])
    if not isinstance(rights, list):
        raise ValueError("rights: expected a list of tables")
    return (*sorted(sluice), *(str(one["of"]) for one in rights))


@dataclass(frozen=True, slots=True)
class River:
    mill: Mill = section(Mill)
    sluice: Sluice = section(Sluice)
    millers: tuple[Miller, ...] = tables(Miller)
    law: tuple[str, ...] = parsed(("sluice", "rights"), parse_law)


def river(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **flags: str) -> River:
    path = tmp_path / "river.toml"
    path.write_text(text)
    overrides = {name.replace("__", "."): value for name, value in flags.items()}
    return load(River, path, environ or {}, overrides)


def problems(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        river(tmp_path, text, environ, **flags)
    return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_nothing_given_is_all_defaults() -> None:
    assert load(River, None, {"PATH": "/bin"}, {}) == River()


@given(layers=st.sets(st.sampled_from(["file", "environment", "flag"])))
def test_flags_win_over_environment_over_file_over_defaults(
    layers: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    got = river(
        tmp_path_factory.mktemp("river"),
        "[mill]\nstones = 3" if "file" in layers else "",
        {"HEADRACE_MILL__STONES": "4"} if "environment" in layers else {},
        **({"mill__stones": "5"} if "flag" in layers else {}),
    )
    ranks = {"file": 3, "environment": 4, "flag": 5}
    assert got.mill.stones == max((ranks[layer] for layer in layers), default=2)


def test_list_of_tables_keeps_its_order_and_its_defaults(tmp_path: Path) -> None:
    got = river(tmp_path, '[[millers]]\nname = "a"\n[[millers]]\nname = "b"\nstones = 3')
    assert got.millers == (Miller(name="a"), Miller(name="b", stones=3))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[mil]\nstones = 1", "river.toml: [mil]: unknown section, did you mean mill?"),
        ("[zzzz]", "river.toml: [zzzz]: unknown section; known here: mill, millers, rights, sluice"),
        ("[mill]\nstone = 1", "river.toml: [mill]: unknown key stone, did you mean stones?"),
        ("[mill]\ngates = 1", "river.toml: [mill]: unknown key gates, did you mean it under [sluice]?"),
        ("[mill]\nstones = 0", "river.toml: [mill] stones: expected a whole number from 1 to 9, got 0"),
        ("[mill]\nstones = true", "river.toml: [mill] stones: expected a whole number from 1 to 9, got True"),
        ("[mill]\nspeed = 'full'", "river.toml: [mill] speed: expected slow or fast, got 'full'"),
        ("mill = 3", "river.toml: mill: expected a table [mill], got 3"),
        ("[[mill]]", "river.toml: mill: expected a table [mill], got [{}]"),
        ("[millers]", "river.toml: millers: expected tables [[millers]], got {}"),
        ("[[millers]]\nstones=1", "river.toml: [[millers]] number 1: name is missing: expected text"),
        ("[[millers]]\nname='a'\nston=1", "river.toml: [[millers]] number 1: unknown key ston, did you mean stones?"),
        ("[sluice]\npassword = 5", "river.toml: [sluice] password: expected text, got '***'"),
        ('"a\\nb" = 1', "river.toml: [a\\nb]: unknown section; known here: mill, millers, rights, sluice"),
    ],
)
def test_problem_in_the_file_says_where_and_what_was_expected(tmp_path: Path, text: str, problem: str) -> None:
    assert problems(tmp_path, text) == [problem]


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("HEADRACE_MILL__STONE", "1", "unknown variable, did you mean HEADRACE_MILL__STONES?"),
        ("HEADRACE_MILL_STONES", "1", "unknown variable, did you mean HEADRACE_MILL__STONES?"),
        ("HEADRACE_MILL__STONES", "many", "expected a whole number from 1 to 9, got 'many'"),
        ("HEADRACE_MILL__STONES", "", "expected a whole number from 1 to 9, got ''"),
        ("HEADRACE_MILLERS__NAME", "x", "a list of tables can only be given in the file"),
    ],
)
def test_problem_in_the_environment_names_the_variable(tmp_path: Path, variable: str, value: str, problem: str) -> None:
    assert problems(tmp_path, environ={variable: value}) == [f"environment: {variable}: {problem}"]


def test_all_problems_of_all_layers_are_told_together(tmp_path: Path) -> None:
    told = problems(
        tmp_path,
        "[mill]\nstones = 0\nspee = 1\n[sluce]",
        {"HEADRACE_MILL__STONES": "0", "HEADRACE_X": ""},
        mill__stones="none",
    )
    assert len(told) == 6
    assert told[-1] == "flag --stones: expected a whole number from 1 to 9, got 'none'"


def test_bad_value_is_told_though_a_flag_replaces_it(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "[mill]\nstones = 0", mill__stones="5")) == 1


@pytest.mark.parametrize("content", [b"[mill", b"[mill]\nstones = 1\n[mill]", b"\xff\xfe"])
def test_file_that_is_not_toml_is_refused_with_the_reason(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "river.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"river\.toml: not TOML: .+"):
        load(River, path, {}, {})


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(River, tmp_path / "none.toml", {}, {})


def test_changes_name_what_differs_and_whether_it_is_live_and_hide_secrets() -> None:
    old = River()
    new = River(mill=Mill(speed="fast"), sluice=Sluice(gates=2, password="canary"), millers=(Miller(name="a"),))
    assert list(changes(River, old, new)) == [
        Change("mill.speed", "slow", "fast", live=True),
        Change("sluice.gates", "1", "2", live=False),
        Change("sluice.password", "***", "***", live=False),
        Change("millers", "0 tables", "1 tables", live=False),
    ]
    assert list(changes(River, new, new)) == []


def test_every_setting_knows_its_names() -> None:
    first = next(settings_of(River))
    assert (first.name, first.variable, first.flag) == ("mill.stones", "HEADRACE_MILL__STONES", "--stones")


def test_what_another_room_parses_is_handed_to_it_without_the_settings_beside_it(tmp_path: Path) -> None:
    got = river(tmp_path, '[sluice]\ngates = 3\nowner_ann = "both"\n[[rights]]\nof = "way"\n[[rights]]\nof = "water"\n')
    assert got.sluice.gates == 3
    assert got.law == ("owner_ann", "way", "water")


def test_problem_that_another_room_finds_is_told_with_the_file_and_all_others(tmp_path: Path) -> None:
    assert problems(tmp_path, "rights = 1\n[mill]\nstones = 0\n") == [
        "river.toml: [mill] stones: expected a whole number from 1 to 9, got 0",
        "river.toml: rights: expected a list of tables",
    ]
    assert problems(tmp_path, "[sluice]\ngatess = 2\n") == ["river.toml: sluice.gatess: unknown field"]


def test_what_another_room_parses_stands_in_the_file_only(tmp_path: Path) -> None:
    expected = "environment: HEADRACE_RIGHTS__OF: a list of tables can only be given in the file"
    assert problems(tmp_path, "", {"HEADRACE_RIGHTS__OF": "way"}) == [expected]
