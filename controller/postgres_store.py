"""The metadata of a cluster in PostgreSQL. Driver, synchronous, no trio; needs psycopg (extra `postgres`).

One connection, opened anew when it broke. A statement that takes longer than `statement_timeout_s` is ended by the
server, so that a call comes back while the lease still counts. A transaction that failed before COMMIT was sent has not
happened; one whose COMMIT got no answer may have, and is Unknown. A server that only follows another (read only) is as
good as none.

Which life of the database it is can be told by the timeline of its write-ahead log, which moves with each promotion:
brokers refuse a controller of a lower one. Two primaries of one timeline are outside of what can be noticed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from sqlalchemy import URL, Connection, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, NoSuchModuleError
from sqlalchemy.pool import NullPool, QueuePool

from headrace.controller.errors import Invalid, Unreachable
from headrace.controller.sql_store import AnswerLost, SqlStore
from headrace.controller.store import FEED_VERSIONS_MAX, Generation
from headrace.core_log.errors import DiskFull

STATEMENT_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2
# "headrac": whoever creates or migrates the tables holds it.
_MIGRATING = 0x68656164726163
_DISK_FULL = "53100"
NOT_SYNCHRONOUS = (
    "PostgreSQL waits for no standby (synchronous_standby_names is empty): a failover may forget the newest metadata"
)
_GENERATION = text(
    "SELECT (SELECT system_identifier::text FROM pg_control_system()),"
    " (SELECT timeline_id FROM pg_control_checkpoint()), pg_is_in_recovery()"
)


class PostgresStore(SqlStore):
    def __init__(
        self,
        url: str,
        *,
        new_uuid: Callable[[], UUID],
        statement_timeout_s: float = STATEMENT_TIMEOUT_S,
        feed_versions_max: int = FEED_VERSIONS_MAX,
    ) -> None:
        """Open, or create; migrate. Invalid for a URL that is none, UnknownFormat for what a newer release wrote."""
        parsed = parse(url)
        super().__init__(parsed.render_as_string(hide_password=True), feed_versions_max)
        self._engine = create_engine(
            parsed,
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=0,
            # Parameters hold password hashes; they stay out of every error message and log.
            hide_parameters=True,
            connect_args={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "application_name": "headrace",
                # A connection that says nothing is given up by the kernel in time, too.
                "tcp_user_timeout": int(2000 * statement_timeout_s),
                "keepalives": 1,
                "keepalives_idle": 5,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                # Whoever only follows another server is passed over when the URL names several.
                "target_session_attrs": "read-write",
                "options": " ".join(f"-c {name}={value}" for name, value in _settings(statement_timeout_s).items()),
            },
        )
        try:
            with self._migrating(parsed) as connection:
                self._create(connection, new_uuid)
            with self._transaction() as connection:
                self._generation(connection)
        except BaseException:
            self._engine.dispose()
            raise

    @contextmanager
    def _migrating(self, url: URL) -> Iterator[Connection]:
        """On a connection without a time limit: a migration may take as long as it takes."""
        engine = create_engine(
            url, poolclass=NullPool, hide_parameters=True, connect_args={"connect_timeout": CONNECT_TIMEOUT_S}
        )
        with self._guard(), engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATING})
            yield connection

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._guard(), self._engine.connect() as connection:
            transaction = connection.begin()
            try:
                yield connection
            except BaseException:
                transaction.rollback()
                raise
            try:
                transaction.commit()
            except DBAPIError as error:
                if _is_broken(error):
                    raise AnswerLost(str(error.orig)) from error
                raise

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """The database's errors as ours. A constraint that failed is our own mistake and stays what it is."""
        try:
            yield
        except DisconnectionError as error:
            raise self._unreachable(error) from error
        except DBAPIError as error:
            if _state(error) == _DISK_FULL:
                raise DiskFull(f"{self.name}: no space left for the metadata; nothing was changed") from error
            if _is_broken(error):
                raise self._unreachable(error) from error
            # Its details would show the row, and with it perhaps a password hash.
            raise type(error)(error.statement, None, _Said(_primary(error))) from None

    def _unreachable(self, error: BaseException) -> Unreachable:
        found = getattr(error, "orig", None) or error
        return Unreachable(f"{self.name}: the metadata store cannot be reached: {str(found).strip()}")

    def _generation(self, connection: Connection) -> Generation:
        database, timeline, follows = connection.execute(_GENERATION).one()
        if follows:
            raise Unreachable(f"{self.name}: this server only follows another one, and takes no changes")
        return Generation(database, timeline)

    def risk(self) -> str:
        """Whether a failover to a standby may forget the newest metadata. Details of standbys are not for every user to
        see, the setting is."""
        with self._transaction() as connection:
            named = connection.execute(text("SHOW synchronous_standby_names")).scalar_one()
        return "" if named.strip() else NOT_SYNCHRONOUS

    def close(self) -> None:
        self._engine.dispose()


def _settings(statement_timeout_s: float) -> dict[str, str]:
    """Nothing waits for longer than a lease can bear: not a statement, not a lock, not a transaction of a client that
    has stopped (its lock would hold up every other node)."""
    milliseconds = int(1000 * statement_timeout_s)
    return {
        "statement_timeout": str(milliseconds),
        "lock_timeout": str(milliseconds // 2),
        "idle_in_transaction_session_timeout": str(milliseconds * 5 // 2),
        # Whatever the server's default is: what is committed survives its crash, and is on the synchronous standbys.
        "synchronous_commit": "on",
        "client_encoding": "UTF8",
    }


def parse(url: str) -> URL:
    """A database's URL, for the driver that is used. Never shows the password that may be in it."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise Invalid("the metadata store's URL cannot be read; expected postgresql://user@host/database") from None
    if parsed.get_backend_name() != "postgresql":
        raise Invalid(f"the metadata of a cluster is kept in postgresql://..., not in {parsed.get_backend_name()}")
    try:
        return parsed.set(drivername="postgresql+psycopg") if parsed.drivername == "postgresql" else parsed
    except NoSuchModuleError as error:
        raise Invalid(f"no driver for {parsed.drivername}: install headrace[postgres]") from error


class _Said(Exception):
    """What the server said, without its details."""


def _primary(error: DBAPIError) -> str:
    diagnostics = getattr(error.orig, "diag", None)
    return str(getattr(diagnostics, "message_primary", None) or type(error.orig).__name__)


def _state(error: DBAPIError) -> str:
    """The five letters by which the server says what is wrong; empty when it said nothing."""
    return getattr(error.orig, "sqlstate", None) or ""


# Connection exceptions, shutdown and cancelled statements, read-only servers, lack of resources other than disk.
_AWAY = ("08", "57", "25006", "53", "58", "55P03")


def _is_broken(error: DBAPIError) -> bool:
    """The server cannot serve now, or was not heard of; not a mistake in what was asked."""
    state = _state(error)
    if state:
        return state.startswith(_AWAY)
    return error.connection_invalidated or type(error.orig).__name__ in ("OperationalError", "ConnectionTimeout")
