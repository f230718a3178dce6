"""The house itself: the wheel holds every room, and every source file says where we are."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("core_log", "filtering", "delay", "controller", "gateways", "spark")


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


@pytest.mark.parametrize(
    "source",
    sorted(
        source.relative_to(ROOT)
        for top in (*ROOMS, "src/headrace", "tests", "bench", "interop")
        for source in (ROOT / top).rglob("*.py")
        if not source.is_symlink()
    ),
    ids=str,
)
def test_source_file_opens_with_a_docstring(source: Path) -> None:
    assert ast.get_docstring(ast.parse((ROOT / source).read_text()))
