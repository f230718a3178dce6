"""The house itself: the wheel holds every room, and every source file says where we are."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("core_log", "filtering", "delay", "controller", "gateways", "spark")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
# What pure code must not import: time, chance, files and sockets are handed in.
HANDED_IN = "from random import Random"  # the type alone
OUTSIDE = {"asyncio", "os", "random", "secrets", "select", "socket", "ssl", "subprocess", "threading", "time", "trio"}


def texts(*suffixes: str) -> list[Path]:
    """The files of the repository that end so; what tools leave behind and the links to the rooms are not looked at."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(ROOT):
        kept = [name for name in subfolders if name == ".ci" or not name.startswith((".", "_", "node_modules"))]
        subfolders[:] = sorted(set(kept) - {"headrace-data", "dist", "build", "results"})
        found += [Path(folder) / name for name in sorted(names) if name.endswith(suffixes)]
    return found


def docstring(source: Path) -> str:
    return ast.get_docstring(ast.parse((ROOT / source).read_text())) or ""


def imported(source: Path) -> set[str]:
    """Top-level names of what a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and ast.unparse(node) != HANDED_IN:
            names.add((node.module or "").partition(".")[0])
    return names


SOURCES = sorted(
    source.relative_to(ROOT)
    for top in (*ROOMS, "src/headrace", "tests", "bench", "interop")
    for source in (ROOT / top).rglob("*.py")
    if not source.is_symlink()
)


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_linked_under_the_one_import_name(room: str) -> None:
    link = ROOT / "src" / "headrace" / room
    assert link.is_symlink()
    assert link.resolve() == (ROOT / room).resolve()


def test_built_wheel_holds_every_source_file_of_every_room(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"headrace/{source.relative_to(ROOT)}" for room in ROOMS for source in (ROOT / room).rglob("*.py")}
    assert expected - packed == set()
    assert "headrace/cli.py" in packed
    assert "pyspark_headrace/__init__.py" in packed
    assert not [name for name in packed if name.startswith(("tests/", "interop/", "core_log/"))]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_source_file_opens_with_a_docstring(source: Path) -> None:
    assert docstring(source)


@pytest.mark.parametrize(
    "source", [s for s in SOURCES if s.parts[0] in ROOMS and not re.search(r"\bdriver\b", docstring(s), re.I)], ids=str
)
def test_file_that_does_not_call_itself_a_driver_imports_nothing_of_the_outside(source: Path) -> None:
    assert imported(source) & OUTSIDE == set()


@pytest.mark.parametrize("source", [s for s in SOURCES if s.parts[0] == "controller"], ids=str)
def test_controller_knows_of_the_log_only_ids_errors_and_the_words_of_replication_and_links(source: Path) -> None:
    used = set(re.findall(r"headrace\.core_log[.\w]*", (ROOT / source).read_text()))
    words = {"headrace.core_log.replication.assignment", "headrace.core_log.replication.messages"}
    links = {"headrace.core_log.peer.errors", "headrace.core_log.peer.frames"}
    assert used <= {"headrace.core_log.ids", "headrace.core_log.errors", "headrace.core_log.env"} | words | links


@pytest.mark.parametrize("room", (*ROOMS, "interop", "bench"))
def test_room_has_a_page_and_stands_in_the_table_of_rooms(room: str) -> None:
    assert (ROOT / room / "README.md").is_file()
    assert f"[{room}/]({room})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decision_says_context_choice_cost_and_evidence(page: Path) -> None:
    number = int(page.name[:4])
    headings = re.findall(r"^#+ .+$", page.read_text(), re.MULTILINE)
    assert headings[0].startswith(f"# {number}. ")
    assert headings[1:] == ["## Context", "## Choice", "## Cost", "## Evidence"]


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("page", texts(".md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    # Put together here, so that this file does not find itself.
    forbidden = [f"/{folder}/" for folder in ("work", "root", "home", "Users")]
    found = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in texts(".py", ".md", ".toml", ".svg", ".c", ".txt", ".json", "Makefile", "run")
        for place in forbidden
        if place in path.read_text(errors="replace")
    ]
    assert found == []


@pytest.mark.parametrize(
    "target", ["serve", "test", "lint", "interop", "bench", "sim", "mutants", "crash", "fuzz", "chaos", "security"]
)
def test_make_knows_its_targets(target: str) -> None:
    done = subprocess.run(["make", "-n", "-C", str(ROOT), target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
