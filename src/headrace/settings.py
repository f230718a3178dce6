"""How settings are declared, and how a file, the environment and flags become one frozen value. Driver: reads one file.

A section is a frozen dataclass whose fields are made by `setting`; the root (config.py) is a frozen dataclass whose
fields are made by `section` (one table, `[storage]`), `tables` (a list of tables, `[[nodes]]`) or `parsed` (tables that
a room reads by its own rules). That is the whole registry: a room's section joins by one line in the root.

    later wins:  defaults  <  TOML file  <  environment HEADRACE_<SECTION>__<KEY>  <  flags

Every value that was given is checked, also one that a later layer replaces, and all problems are reported together.
Neighbours: kinds.py reads one value; config.py lists our sections.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.kinds import Kind
from headrace.redaction import printable, redacted

ENVIRONMENT_PREFIX = "HEADRACE_"
# What the commands that speak to a broker take from the environment; no setting of a node.
CLIENT_VARIABLES = frozenset(("HEADRACE_URL", "HEADRACE_USER", "HEADRACE_PASSWORD", "HEADRACE_CA_FILE"))
# Logins of those who read the log, as HEADRACE_TOKENS and HEADRACE_TOKEN_<NAME>.
TOKENS_PREFIX = "HEADRACE_TOKEN"
_REQUIRED: Any = dataclasses.MISSING
_Root = TypeVar("_Root")


class ConfigError(Exception):
    """What is wrong with the configuration: every problem, one line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of one section."""

    section: str
    key: str
    kind: Kind
    default: object
    doc: str
    flag: str | None
    live: bool

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        return f"{ENVIRONMENT_PREFIX}{self.section}__{self.key}".upper()


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two configurations; `live` when a reload takes it up at once."""

    name: str
    was: str
    now: str
    live: bool


def setting(kind: Kind, doc: str, default: Any = _REQUIRED, *, flag: str | None = None, live: bool = False) -> Any:
    """A key: what it holds, what it is for, its default (none: it must be given), its flag of `headrace serve`, and
    whether a reload takes it up at once."""
    return dataclasses.field(default=default, kw_only=True, metadata={"declared": (kind, doc, flag, live)})


def section(of: type) -> Any:
    """A table of the root, all of whose keys have defaults."""
    return dataclasses.field(default_factory=of, kw_only=True, metadata={"section": of})


def tables(of: type) -> Any:
    """A list of tables of the root: empty unless the file has some."""
    return dataclasses.field(default=(), kw_only=True, metadata={"tables": of})


def parsed(names: tuple[str, ...], by: Callable[[Mapping[str, object]], object]) -> Any:
    """Tables that `by` makes one value of; it raises ValueError, with the name of the field first. Keys that a section
    of the same name declares are the section's, the rest is the parser's. Without a file, `by` gets nothing."""
    return dataclasses.field(default_factory=lambda: by({}), kw_only=True, metadata={"parsed": (names, by)})


def settings_of(root: type) -> Iterator[Setting]:
    """Every key of every section, in the order of declaration; the keys of lists of tables are not among them."""
    for name, table in _sections(root).items():
        yield from _declared(name, table).values()


def load(root: type[_Root], path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str]) -> _Root:
    """The root, from the file, the environment and the overrides (by name: `doors.amqp`), or ConfigError."""
    problems: list[str] = []
    values: dict[str, dict[str, object]] = {name: {} for name in _sections(root)}
    whole: dict[str, object] = {}
    if path is not None:
        _take_file(root, path, values, whole, problems)
    _take_environment(root, environ, values, problems)
    _take_overrides(root, overrides, values, problems)
    if problems:
        raise ConfigError(problems)
    return root(**{name: of(**values[name]) for name, of in _sections(root).items()}, **whole)


def changes(root: type[_Root], old: _Root, new: _Root) -> Iterator[Change]:
    """What differs, as text and without secrets; a list of tables is told by its length only, and what a room parses
    by that room."""
    for one in settings_of(root):
        before, after = (getattr(getattr(config, one.section), one.key) for config in (old, new))
        if before != after:
            was, now = (str(redacted(one.key, one.kind.show(value))) for value in (before, after))
            yield Change(one.name, was, now, one.live)
    for name in _lists(root):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield Change(name, f"{len(before)} tables", f"{len(after)} tables", live=False)


def _sections(root: Any) -> dict[str, Any]:
    return {f.name: f.metadata["section"] for f in dataclasses.fields(root) if "section" in f.metadata}


def _lists(root: Any) -> dict[str, Any]:
    return {f.name: f.metadata["tables"] for f in dataclasses.fields(root) if "tables" in f.metadata}


def _parsed(root: Any) -> dict[str, tuple[tuple[str, ...], Any]]:
    return {f.name: f.metadata["parsed"] for f in dataclasses.fields(root) if "parsed" in f.metadata}


def _declared(section_name: str, table: Any) -> dict[str, Setting]:
    found = {}
    for field in dataclasses.fields(table):
        kind, doc, flag, live = field.metadata["declared"]
        found[field.name] = Setting(section_name, field.name, kind, field.default, doc, flag, live)
    return found


def _take_file(
    root: type, path: Path, values: dict[str, dict[str, object]], whole: dict[str, object], problems: list[str]
) -> None:
    """`values`: by section; `whole`: lists of tables, and what others parse, by field of the root."""
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path}: not TOML: {error}")
        return
    sections, list_tables = _sections(root), _lists(root)
    foreign: dict[str, object] = {name: None for names, _ in _parsed(root).values() for name in names}
    for name, content in document.items():
        where = f"{path}: [{printable(name)}]"
        if name in foreign and not (name in sections and isinstance(content, dict)):
            foreign[name] = content
        elif name in sections:
            if not isinstance(content, dict):
                problems.append(f"{path}: {name}: expected a table [{name}], got {_got(name, content)}")
                continue
            if name in foreign:
                declared = _declared(name, sections[name])
                foreign[name] = {key: value for key, value in content.items() if key not in declared}
                content = {key: value for key, value in content.items() if key in declared}
            values[name] |= _read_table(root, name, sections[name], content, where, problems)
        elif name in list_tables:
            if not isinstance(content, list) or not all(isinstance(table, dict) for table in content):
                problems.append(f"{path}: {name}: expected tables [[{name}]], got {_got(name, content)}")
                continue
            whole[name] = tuple(
                _build(root, name, list_tables[name], table, f"{path}: [[{name}]] number {number}", problems)
                for number, table in enumerate(content, 1)
            )
        else:
            problems.append(f"{where}: unknown section{_nearest(name, {*sections, *list_tables, *foreign})}")
    for field, (names, by) in _parsed(root).items():
        try:
            whole[field] = by({name: foreign[name] for name in names if foreign[name] is not None})
        except ValueError as error:
            problems.append(f"{path}: {error}")


def _build(root: type, name: str, of: Any, table: Mapping[str, object], where: str, problems: list[str]) -> object:
    """One entry of a list of tables; None when it has problems, which stop the load anyway."""
    known_problems = len(problems)
    given = _read_table(root, name, of, table, where, problems)
    missing = [one for key, one in _declared(name, of).items() if one.default is _REQUIRED and key not in table]
    problems.extend(f"{where}: {one.key} is missing: expected {one.kind.expected}" for one in missing)
    return of(**given) if len(problems) == known_problems else None


def _read_table(
    root: type, name: str, of: Any, table: Mapping[str, object], where: str, problems: list[str]
) -> dict[str, object]:
    declared = _declared(name, of)
    given: dict[str, object] = {}
    for key, raw in table.items():
        if key in declared:
            _read(declared[key], raw, f"{where} {key}", given, problems)
        else:
            elsewhere = next((f", did you mean it under [{s.section}]?" for s in settings_of(root) if s.key == key), "")
            problems.append(f"{where}: unknown key {printable(key)}{elsewhere or _nearest(key, declared)}")
    return given


def _take_environment(
    root: type, environ: Mapping[str, str], values: dict[str, dict[str, object]], problems: list[str]
) -> None:
    by_variable = {one.variable: one for one in settings_of(root)}
    only_in_file = {*_lists(root), *(name for names, _ in _parsed(root).values() for name in names)} - {
        *_sections(root)
    }
    given = {name for name in environ if name.startswith(ENVIRONMENT_PREFIX)} - CLIENT_VARIABLES
    given -= {name for name in given if name.startswith(TOKENS_PREFIX)}
    for variable in sorted(given):
        if variable in by_variable:
            one = by_variable[variable]
            _read(one, environ[variable], f"environment: {variable}", values[one.section], problems)
        elif variable.removeprefix(ENVIRONMENT_PREFIX).partition("__")[0].lower() in only_in_file:
            problems.append(f"environment: {printable(variable)}: a list of tables can only be given in the file")
        else:
            nearest = _nearest(variable, by_variable)
            problems.append(f"environment: {printable(variable)}: unknown variable{nearest}")


def _take_overrides(
    root: type, overrides: Mapping[str, str], values: dict[str, dict[str, object]], problems: list[str]
) -> None:
    by_name = {one.name: one for one in settings_of(root)}
    for name, raw in overrides.items():
        one = by_name[name]
        _read(one, raw, f"flag {one.flag or name}", values[one.section], problems)


def _read(one: Setting, raw: object, where: str, given: dict[str, object], problems: list[str]) -> None:
    try:
        given[one.key] = one.kind.read(raw)
    except ValueError:
        problems.append(f"{where}: expected {one.kind.expected}, got {_got(one.key, raw)}")


def _got(key: str, raw: object) -> str:
    return printable(repr(redacted(key, raw)))


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else f"; known here: {', '.join(names)}"
