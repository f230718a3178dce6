"""A PostgreSQL of one's own, on loopback: for trying a cluster out, and for tests. Driver: processes.

Debian's or whichever `initdb` is found; else the one that the package pgserver brings. PostgreSQL refuses to run as
root, so it runs as an unprivileged user then, who must be able to enter the folder.
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS_MAX = 60


class NoPostgres(Exception):
    """None is installed here, or it does not start; says what it said."""


def programs() -> Path | None:
    """The folder of initdb and pg_ctl."""
    found = shutil.which("initdb")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    # Found, not imported: its programs are all that is wanted of it.
    package = importlib.util.find_spec("pgserver")
    if package is not None and package.origin is not None:
        candidates.append(Path(package.origin).parent / "pginstall" / "bin")
    return next((folder for folder in candidates if (folder / "initdb").exists()), None)


class LocalPostgres:
    """No password: it listens on loopback only, and whoever can run a program there can read its files too."""

    def __init__(self, folder: Path, port: int, settings: Mapping[str, str] | None = None) -> None:
        found = programs()
        if found is None:
            raise NoPostgres("no initdb here: install PostgreSQL (Debian: postgresql), or the package pgserver")
        self._programs = found
        self._folder = folder.absolute()
        self._settings = dict(settings or {})
        self.port = port
        self._user = _unprivileged() if os.getuid() == 0 else None

    def create(self, *, sync: bool = True) -> None:
        """Make its folder and files, if they are not there."""
        if (self._folder / "data" / "PG_VERSION").exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        where = ("-D", str(self._folder / "data"))
        self._run("initdb", *where, "-U", "headrace", "-A", "trust", "-E", "UTF8", *(() if sync else ("--no-sync",)))

    def start(self) -> None:
        """Returns when it answers."""
        settings = " ".join(f"-c {name}={value}" for name, value in self._settings.items())
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' {settings}"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-l", log, "-w", "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        """`immediate` is a crash."""
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-w", "-m", mode, "stop")

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://headrace@127.0.0.1:{self.port}/{database}"

    def _run(self, program: str, *arguments: str) -> None:
        command: Sequence[str] = [str(self._programs / program), *arguments]
        done = subprocess.run(
            command,
            user=self._user,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # The server that pg_ctl leaves behind must not hold the pipe open.
            timeout=SECONDS_MAX,
            # A Ctrl-C is meant for whoever started it, who then stops it.
            start_new_session=True,
            check=False,
        )
        if done.returncode:
            raise NoPostgres(f"{program}: {done.stdout.strip()}")


def _unprivileged() -> str:
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise NoPostgres("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")
