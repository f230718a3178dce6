"""PostgreSQL as a metadata store: what is particular to a server that others use too, and that may go away.

What it has in common with the other stores is shown in test_store.py.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy.exc import IntegrityError
from tests.postgres_server import PostgresServer

from headrace.controller.changes import PutPermission, PutUser, PutVhost
from headrace.controller.entities import Permission, User, Version, Vhost
from headrace.controller.errors import Invalid, Unreachable
from headrace.controller.postgres_store import PostgresStore, parse
from headrace.controller.store import Committed, Lease, Lost, NotCommitted, Unknown
from headrace.core_log.errors import UnknownFormat

VHOST = PutVhost(Vhost("/"))
SECRET = "canary-91d3"


def opened(url: str) -> PostgresStore:
    return PostgresStore(url, new_uuid=uuid4)


class Proxy:
    """Between a store and its server. `cut` is asked of every piece that the store sends: True = it is passed on and
    its answer is not, False = nor is it; either way the connection is over."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut: Callable[[bytes], bool | None] = lambda data: None
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._sockets += [client, server]
            answer_is_lost = threading.Event()
            for ends in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pass_on, args=(*ends, answer_is_lost))
                self._threads.append(thread)
                thread.start()

    def _pass_on(
        self, source: socket.socket, target: socket.socket, is_sent: bool, answer_is_lost: threading.Event
    ) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                cut = self.cut(data) if is_sent else None
                if cut is False or (not is_sent and answer_is_lost.is_set()):
                    break
                if cut:
                    answer_is_lost.set()
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


@contextmanager
def through_a_proxy(postgres: PostgresServer) -> Iterator[tuple[PostgresStore, Proxy]]:
    url = postgres.emptied()
    proxy = Proxy(postgres.port)
    store = opened(url.replace(str(postgres.port), str(proxy.port)))
    try:
        yield store, proxy
    finally:
        store.close()
        proxy.close()


def once(mark: bytes, passes: bool) -> Callable[[bytes], bool | None]:
    """Cut when the store sends this, the first time."""
    left = [True]

    def cut(data: bytes) -> bool | None:
        return passes if mark in data and left and left.pop() else None

    return cut


@pytest.mark.parametrize("passes", [True, False])
def test_commit_whose_answer_is_lost_is_unknown_until_it_is_asked_for(postgres: PostgresServer, passes: bool) -> None:
    with through_a_proxy(postgres) as (store, proxy):
        proxy.cut = once(b"COMMIT", passes)
        txn = uuid4()
        assert store.commit(Version(0), [VHOST], txn) == Unknown()
        assert store.resolve(Version(0), txn) == (Committed(Version(1)) if passes else NotCommitted())


def test_commit_that_breaks_before_its_end_has_not_happened(postgres: PostgresServer) -> None:
    with through_a_proxy(postgres) as (store, proxy):
        proxy.cut = once(b"metadata_log", False)
        with pytest.raises(Unreachable):
            store.commit(Version(0), [VHOST], uuid4())
        assert store.snapshot().version == 0
        assert store.commit(Version(0), [VHOST], uuid4()) == Committed(Version(1))


def test_lease_whose_answer_is_lost_can_be_looked_up(postgres: PostgresServer) -> None:
    with through_a_proxy(postgres) as (store, proxy):
        seen = store.observe()
        proxy.cut = once(b"COMMIT", True)
        with pytest.raises(Unreachable):
            store.acquire(seen, 4, 9, uuid4())
        assert store.observe().ballot == (1, 9)


def test_server_that_is_away_is_unreachable_and_found_again() -> None:
    server = PostgresServer()
    try:
        server.start()
        store = opened(server.url("postgres"))
        store.commit(Version(0), [VHOST], uuid4())
        server.stop("immediate")
        for call in (store.snapshot, store.observe, lambda: store.commit(Version(1), [VHOST], uuid4())):
            with pytest.raises(Unreachable, match="cannot be reached"):
                call()
        server.start()
        assert store.snapshot().version == 1
        store.close()
        server.stop("immediate")
    finally:
        server.remove()


def test_of_two_stores_that_wait_for_each_other_one_is_lost(postgres: PostgresServer) -> None:
    url = postgres.emptied()
    one, two = opened(url), opened(url)
    assert one.commit(Version(0), [VHOST], uuid4()) == Committed(Version(1))
    assert two.commit(Version(0), [VHOST], uuid4()) == Lost()
    lease = one.acquire(one.observe(), 1, 1, uuid4())
    assert isinstance(lease, Lease)
    assert two.renew(lease) != Lost(), "a lease is whoever names it: incarnations tell nodes apart"
    one.close()
    two.close()


def test_statement_that_waits_too_long_is_ended_by_the_server(postgres: PostgresServer) -> None:
    url = postgres.emptied()
    store = PostgresStore(url, new_uuid=uuid4, statement_timeout_s=0.2)
    with psycopg.connect(url) as other:
        other.execute("UPDATE cluster SET lease_token = lease_token")
        with pytest.raises(Unreachable, match="timeout"):
            store.commit(Version(0), [VHOST], uuid4())
    assert store.commit(Version(0), [VHOST], uuid4()) == Committed(Version(1))
    store.close()


def test_database_of_others_is_refused_and_kept(postgres: PostgresServer) -> None:
    url = postgres.emptied()
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("CREATE TABLE theirs (x int)")
    with pytest.raises(UnknownFormat, match="not a metadata store"):
        opened(url)


def test_our_own_mistake_is_loud_shows_no_secret_and_changes_nothing(postgres: PostgresServer) -> None:
    store = opened(postgres.emptied())
    unlawful = [PutUser(User("ann", SECRET)), PutPermission(Permission("ann", SECRET, SECRET, "", ""))]
    with pytest.raises(IntegrityError) as mistake:
        store.commit(Version(0), unlawful, uuid4())
    assert SECRET not in str(mistake.value) + repr(mistake.value) + repr(mistake.value.__cause__)
    assert store.snapshot().version == 0
    store.close()


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://host/db", f"sqlite:///{SECRET}"])
def test_url_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse(url)
    assert SECRET not in str(refused.value)


def test_password_in_the_url_is_never_shown() -> None:
    with pytest.raises(Unreachable) as refused:
        opened(f"postgresql://ann:{SECRET}@127.0.0.1:1/db")
    assert SECRET not in str(refused.value)


def test_a_server_that_waits_for_no_standby_is_a_risk(postgres: PostgresServer) -> None:
    store = opened(postgres.emptied())
    try:
        assert "synchronous_standby_names is empty" in store.risk()
        with psycopg.connect(postgres.url(), autocommit=True) as admin:
            # Of this server, and so of no other test at the same time; nothing is committed meanwhile.
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'another'")
            try:
                admin.execute("SELECT pg_reload_conf()")
                while store.risk():
                    pass
            finally:
                admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
                admin.execute("SELECT pg_reload_conf()")
                while not store.risk():
                    pass
    finally:
        store.close()
