"""A machine without Java and Node gets both, and one that has them is left alone."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "interop" / "runtimes.py"
SPARKS_ARGUMENT = "--add-modules=jdk.incubator.vector"


def provide(home: Path, path: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(home)],
        env={**os.environ, "PATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def answer(bin_folder: Path, *command: str, **environ: str) -> str:
    """What a command prints on a machine that has nothing but it."""
    path = f"{bin_folder}:{bin_folder.parent / 'nothing'}"
    shell = ["/bin/sh", "-c", '"$@"', "sh", *command]
    done = subprocess.run(
        shell, env={"PATH": path, **environ}, check=True, stdout=-1, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runtimes") / "home with spaces"
    provide(home, path="")
    return home / "bin"


def test_java_runs_though_it_is_asked_for_the_module_it_lacks(bin_folder: Path) -> None:
    assert 'version "' in answer(bin_folder, "java", SPARKS_ARGUMENT, "-version")


def test_java_gets_every_other_argument_as_it_was(bin_folder: Path) -> None:
    shown = answer(bin_folder, "java", "-Da.b=two words", SPARKS_ARGUMENT, "-XshowSettings:properties", "-version")
    assert "a.b = two words" in shown


def test_spark_starts_the_java_that_was_provided(bin_folder: Path) -> None:
    jars = Path(importlib.util.find_spec("pyspark").origin).parent / "jars"
    launch = ["-cp", f"{jars}/*", "org.apache.spark.launcher.Main", "org.apache.spark.deploy.SparkSubmit", "--version"]
    words = answer(bin_folder, "java", *launch, SPARK_HOME=str(jars.parent), SPARK_SCALA_VERSION="2.13").split("\0")
    assert f"\n{bin_folder}/java" in words
    assert SPARKS_ARGUMENT in words


def test_node_and_npm_run(bin_folder: Path) -> None:
    assert answer(bin_folder, "node", "-p", "1 + 1") == "2\n"
    assert answer(bin_folder, "npm", "--version")


def test_what_is_there_is_left_alone(bin_folder: Path, tmp_path: Path) -> None:
    assert provide(tmp_path / "none", path=str(bin_folder)) == ""
    assert not (tmp_path / "none").exists()


def test_java_that_is_too_old_is_replaced(bin_folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "java").write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    (old / "java").chmod(0o755)
    told = provide(tmp_path / "new", path=f"{old}:{bin_folder}")
    assert "no Java 17 or later" in told
    assert sorted(path.name for path in (tmp_path / "new" / "bin").iterdir()) == ["java"]
