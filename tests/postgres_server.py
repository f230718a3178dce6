"""A real PostgreSQL for tests, on loopback, in a temporary folder. Driver."""

import shutil
import tempfile
from pathlib import Path

import psycopg
from interop.ports import free_ports

from headrace.local_postgres import LocalPostgres

_SETTINGS = {"fsync": "off", "max_connections": "40", "shared_buffers": "16MB", "autovacuum": "off"}


class PostgresServer(LocalPostgres):
    def __init__(self) -> None:
        # Not below pytest's own: only root may enter there.
        self._temporary = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
        (port,) = free_ports(1)
        super().__init__(self._temporary, port, _SETTINGS)
        self.create(sync=False)

    def remove(self) -> None:
        shutil.rmtree(self._temporary)

    def emptied(self) -> str:
        """The URL of a database with nothing in it. There is one: whoever had it before is done with it."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        return self.url()
