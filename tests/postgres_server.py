"""A real PostgreSQL for tests, on loopback, in a temporary folder. Driver.

Debian's or whichever `initdb` is found; else the one that the package pgserver brings. PostgreSQL refuses to run as
root, so it runs as an unprivileged user then.
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psycopg
from interop.ports import free_ports

# No password: it listens on loopback only, for as long as a test lasts.
_SETTINGS = {"fsync": "off", "max_connections": "40", "shared_buffers": "16MB", "autovacuum": "off"}


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


class PostgresServer:
    def __init__(self) -> None:
        found = programs()
        if found is None:
            raise RuntimeError("no initdb: install Debian's postgresql, or the package pgserver")
        self._programs = found
        # Not below pytest's own: only root may enter there.
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user is not None and not _exists(self._user):
            self._user = "nobody"
        (self.port,) = free_ports(1)
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._run(
            "initdb", "-D", str(self._folder / "data"), "-U", "headrace", "-A", "trust", "-E", "UTF8", "--no-sync"
        )

    def start(self) -> None:
        settings = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' {settings}"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-l", log, "-w", "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        """`immediate` is a crash."""
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-w", "-m", mode, "stop")

    def remove(self) -> None:
        shutil.rmtree(self._folder)

    def emptied(self) -> str:
        """The URL of a database with nothing in it. There is one: whoever had it before is done with it."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        return self.url("postgres")

    def url(self, database: str) -> str:
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
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout}")


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
