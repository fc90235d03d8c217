"""A session of its own for a lock: what the body cannot break, and how its loss is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import ref

import psycopg
import pytest
from django.db import (
    DatabaseError,
    DataError,
    OperationalError,
    close_old_connections,
    connection,
    connections,
    transaction,
)
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError
from psycopg import sql

from django_advisory_lock import (
    AdvisoryLockError,
    LockDeadlock,
    LockHandle,
    LockLost,
    LockNotAcquired,
    LockTimeout,
    LockUnsupported,
    PoolerDetected,
    advisory_lock,
    dedicated,
    lock_key,
    try_advisory_lock,
)
from django_advisory_lock.sessions import attach
from tests.proxy import Proxy
from tests.server import new_server
from tests.support import (
    LIMIT,
    OtherSession,
    Thread,
    backend_pid,
    extra_alias,
    in_child,
    output,
    parameters,
    spawn,
    statements,
    value,
    wait_until,
)
from tests.test_interrupts import TimeLimitExceeded, interrupt_at, raises

SETTINGS = ("idle_session_timeout", *dedicated.SERVER)


def session_of(lock: LockHandle) -> Any:
    """Return Django's wrapper of a dedicated session."""
    assert lock._own_connection is not None
    return lock._own_connection


def pid_of(lock: LockHandle) -> int:
    return int(session_of(lock).connection.info.backend_pid)


def ask(lock: LockHandle, statement: str, params: Any = None) -> Any:
    """Return the one value of a statement on the session of a lock."""
    row = session_of(lock).connection.execute(statement, params).fetchone()
    return row[0] if row else None


@contextlib.contextmanager
def opened() -> Iterator[list[Any]]:
    """Collect the dedicated sessions that are opened in a block, each with all that is sent on it."""
    found: list[Any] = []

    def collect(connection: Any, **kwargs: object) -> None:
        if getattr(connection, "is_dedicated", False):
            connection.force_debug_cursor = True
            found.append(connection)

    connection_created.connect(collect)
    try:
        yield found
    finally:
        connection_created.disconnect(collect)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "django_advisory_lock"]


def wait_until_the_watcher_ended() -> None:
    wait_until(lambda: not watchers(), "end of the watcher")


def is_gone(other: OtherSession, pid: int) -> bool:
    return bool(other.one("SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s", [pid]))


def wait_until_gone(other: OtherSession, pid: int) -> None:
    wait_until(lambda: is_gone(other, pid), "end of the session")


@pytest.fixture
def no_watcher(other: OtherSession) -> None:
    gc.collect()
    wait_until_the_watcher_ended()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Keep the garbage collector from ending what was dropped."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class TestSession:
    """Whose session it is, and what is set on it."""

    @pytest.mark.parametrize(
        "alias", ["default", "pooled", "binding", "prepared", "serializable", "persistent", "healthy"]
    )
    @pytest.mark.parametrize("options", [{}, {"timeout": 5}, {"timeout": 0}, {"timeout": 5, "poll_interval": 0.1}])
    def test_a_session_of_its_own(self, alias: str, options: dict[str, Any], name: str, other: OtherSession) -> None:
        with advisory_lock(name, using=alias, dedicated=True, **options) as lock:
            pid = pid_of(lock)
            assert lock.scope == "session"
            assert pid != backend_pid(alias)
            assert other.holder(lock_key(name)) == pid
            assert lock.is_held()
            lock.check()
        assert other.is_free(lock_key(name))
        wait_until_gone(other, pid)
        assert not lock.lost.is_set()

    def test_the_alias_is_not_connected_for_it(self, name: str, other: OtherSession) -> None:
        connection.close()
        with advisory_lock(name, dedicated=True):
            assert connection.connection is None

    def test_never_from_the_pool(self, name: str, other: OtherSession) -> None:
        """Case 33: a pool of one, whose session the body goes on using."""
        with advisory_lock(name, using="pooled", dedicated=True) as lock:
            assert value("SELECT 1", alias="pooled") == 1
            assert getattr(session_of(lock).connection, "_pool", None) is None
            assert session_of(lock).pool is None
        connections["pooled"].close()

    def test_settings(self, name: str, other: OtherSession) -> None:
        with extra_alias("impatient", {"options": "-c idle_session_timeout=500"}) as alias:
            with advisory_lock(name, using=alias, dedicated=True) as lock:
                assert ask(lock, "SELECT current_setting('idle_session_timeout')") == "0"
                sources = "SELECT count(*) FROM pg_settings WHERE name = ANY(%s) AND source = 'session'"
                assert ask(lock, sources, [list(SETTINGS)]) == len(SETTINGS)

    def test_no_timeout_ends_it(self, name: str, other: OtherSession) -> None:
        """Case 31: the plain lock next to it is lost."""
        with extra_alias("impatient", {"options": "-c idle_session_timeout=500"}) as alias:
            with advisory_lock(name, using=alias, dedicated=True) as lock:
                with pytest.raises(LockLost), advisory_lock(name, "plain", using=alias):
                    other.wait_until_free(lock_key(name, "plain"))
                assert lock.is_held()

    def test_the_alias_says_more_than_the_defaults(self, name: str, other: OtherSession) -> None:
        own = {"keepalives_idle": 7, "connect_timeout": 17, "application_name": "mine"}
        with extra_alias("own", {**own, "pool": True, "options": "-c tcp_keepalives_idle=71"}) as alias:
            with advisory_lock(name, using=alias, dedicated=True) as lock:
                options = session_of(lock).settings_dict["OPTIONS"]
                assert "pool" not in options
                assert {**dedicated.CLIENT, **own, "options": options["options"]}.items() <= options.items()
                assert ask(lock, "SELECT current_setting('application_name')") == "mine"
                sources = "SELECT source FROM pg_settings WHERE name = 'tcp_keepalives_idle'"
                assert ask(lock, sources) == "client"

    @pytest.mark.parametrize("variable", [None, "PGCONNECT_TIMEOUT"])
    def test_the_time_to_connect(
        self, variable: str | None, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if variable:
            monkeypatch.setenv(variable, "15")
        with advisory_lock(name, dedicated=True) as lock:
            expected = None if variable else dedicated.CONNECT_TIMEOUT
            assert session_of(lock).settings_dict["OPTIONS"].get("connect_timeout") == expected

    def test_what_the_alias_is_otherwise(self, name: str, other: OtherSession) -> None:
        before = {**connections["serializable"].settings_dict["OPTIONS"]}
        with advisory_lock(name, using="serializable", dedicated=True) as lock:
            assert session_of(lock).connection.isolation_level == psycopg.IsolationLevel.SERIALIZABLE
            assert ask(lock, "SELECT current_setting('TimeZone')") == connections["serializable"].timezone_name
        assert connections["serializable"].settings_dict["OPTIONS"] == before

    def test_an_alias_without_autocommit(self, name: str, other: OtherSession) -> None:
        """The lock is a session lock all the same, and ends with its block."""
        with extra_alias("manual", AUTOCOMMIT=False) as alias:
            with advisory_lock(name, using=alias, dedicated=True) as lock:
                assert lock.scope == "session"
                pid = pid_of(lock)
                assert ask(lock, "SELECT current_setting('idle_session_timeout')") == "0"
            assert other.is_free(lock_key(name))
            wait_until_gone(other, pid)

    def test_signals_and_wrappers_of_django(self, name: str, other: OtherSession) -> None:
        """`connection_created` is sent as for any connection; wrappers stay with the connection they were given to."""

        def refuse(*args: object) -> None:
            raise AssertionError("sent through the wrapper of another connection")

        with opened() as found, connection.execute_wrapper(refuse):
            with advisory_lock(name, dedicated=True) as lock:
                assert lock.is_held()
            assert found == [found[0]]
            assert found[0].alias == "default"

    def test_a_receiver_that_fails(self, name: str, other: OtherSession) -> None:
        pids = []

        def fail(connection: Any, **kwargs: object) -> None:
            if getattr(connection, "is_dedicated", False):
                pids.append(connection.connection.info.backend_pid)
                raise ZeroDivisionError

        connection_created.connect(fail)
        try:
            with pytest.raises(ZeroDivisionError):
                advisory_lock(name, dedicated=True).acquire()
        finally:
            connection_created.disconnect(fail)
        wait_until_gone(other, pids[0])

    @pytest.mark.parametrize("alias", ["sqlite"])
    def test_another_engine(self, alias: str) -> None:
        with pytest.raises(LockUnsupported):
            advisory_lock("x", using=alias, dedicated=True).acquire()

    def test_statements(self, name: str, other: OtherSession) -> None:
        with opened() as found:
            with statements(0), advisory_lock(name, dedicated=True):
                pass
            with statements(0), advisory_lock(name, dedicated=True, timeout=5):
                pass
            with statements(0), try_advisory_lock(name, dedicated=True) as lock:
                assert lock
            with other_holds(other, name), statements(0), try_advisory_lock(name, dedicated=True) as lock:
                assert not lock
            with other_holds(other, name), statements(0), pytest.raises(LockTimeout):
                advisory_lock(name, dedicated=True, timeout=0.01).acquire()
        # The settings and the lock; then the release, or the wait and the question who holds it.
        assert [len(one.queries_log) for one in found] == [3, 3, 3, 2, 4]


@contextlib.contextmanager
def other_holds(other: OtherSession, name: str, shared: bool = False) -> Iterator[None]:
    assert other.take(lock_key(name), shared)
    try:
        yield
    finally:
        assert other.drop(lock_key(name), shared)


def close_connection() -> None:
    connection.close()


class TestBody:
    """Case 1, 3, 8, 32, 97: what the body does to its own connection is nothing to the lock."""

    @pytest.mark.parametrize(
        "housekeeping",
        [close_old_connections, connections.close_all, close_connection, gc.collect],
    )
    def test_housekeeping(self, housekeeping: Callable[[], object], name: str, other: OtherSession) -> None:
        connection.ensure_connection()
        with advisory_lock(name, dedicated=True) as lock:
            housekeeping()
            assert not other.is_free(lock_key(name))
            assert value("SELECT 1") == 1
            lock.check()
        assert other.is_free(lock_key(name))

    def test_a_plain_lock_does_not_survive_it(self, name: str, other: OtherSession) -> None:
        """The negative control."""
        with pytest.raises(LockLost), advisory_lock(name):
            connection.close()
            other.wait_until_free(lock_key(name))

    def test_a_failed_transaction(self, name: str, other: OtherSession) -> None:
        with pytest.raises(DataError), advisory_lock(name, dedicated=True) as lock:
            with transaction.atomic():
                try:
                    value("SELECT 1 / 0")
                finally:
                    assert lock.is_held()
                    assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))

    def test_a_killed_connection(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name, dedicated=True) as lock:
            other.kill(backend_pid())
            with pytest.raises(OperationalError):
                value("SELECT 1")
            connection.close()
            assert lock.is_held()
            assert not lock.lost.is_set()
        assert other.is_free(lock_key(name))

    def test_the_error_of_the_body(self, name: str, other: OtherSession) -> None:
        with pytest.raises(ZeroDivisionError), advisory_lock(name, dedicated=True) as lock:
            pid = pid_of(lock)
            raise ZeroDivisionError
        assert other.is_free(lock_key(name))
        wait_until_gone(other, pid)


class TestTaking:
    @pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": 0.05}, {"timeout": 0.05, "poll_interval": 0.01}])
    def test_busy(self, options: dict[str, Any], name: str, other: OtherSession) -> None:
        """The error names the holder, and no session is left."""
        with other_holds(other, name), opened() as found:
            with pytest.raises(LockTimeout, match=f"pid {other.pid}"):
                advisory_lock(name, dedicated=True, **options).acquire()
            assert found[0].connection.closed

    def test_a_try_that_fails_keeps_no_session(self, name: str, other: OtherSession) -> None:
        with other_holds(other, name), opened() as found:
            with try_advisory_lock(name, dedicated=True) as lock:
                assert not lock
                assert found[0].connection.closed  # before the body, not after it
                assert not lock.is_held()
                assert not lock.lost.is_set()

    def test_it_waits_in_the_queue(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        assert other.take(key)
        thread = Thread(advisory_lock(name, dedicated=True)(lambda: other.is_free(key)))
        other.wait_for_waiters(key)
        other.drop(key)
        assert thread.result() is False
        assert other.is_free(key)

    def test_shared(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        with other_holds(other, name, shared=True):
            with advisory_lock(name, shared=True, dedicated=True) as lock:
                with advisory_lock(name, shared=True, dedicated=True) as another:
                    assert pid_of(lock) != pid_of(another)
                    assert other.holders(key) == 3
                assert not try_advisory_lock(name, dedicated=True).acquire()
        assert other.is_free(key)

    def test_cancelled(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        with other_holds(other, name):
            thread = Thread(lambda: advisory_lock(name, dedicated=True).acquire())
            other.wait_for_waiters(key)
            other.one(
                "SELECT pg_cancel_backend(pid) FROM pg_locks"
                " WHERE locktype = 'advisory' AND NOT granted AND database ="
                " (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            with pytest.raises(LockNotAcquired):
                thread.result()
        assert other.is_free(key)

    def test_a_session_that_is_killed_while_it_waits(self, name: str, other: OtherSession) -> None:
        with other_holds(other, name):
            thread = Thread(lambda: advisory_lock(name, dedicated=True).acquire())
            other.wait_for_waiters(lock_key(name))
            other.one(
                "SELECT pg_terminate_backend(pid) FROM pg_locks"
                " WHERE locktype = 'advisory' AND NOT granted AND database ="
                " (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            with pytest.raises(OperationalError):
                thread.result()

    def test_decorators(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        waits = advisory_lock(name, dedicated=True)(lambda: other.is_free(key))
        tries = try_advisory_lock(name, dedicated=True, default="busy")(lambda: other.is_free(key))
        assert (waits(), tries()) == (False, False)
        with other_holds(other, name):
            assert tries() == "busy"
        assert other.is_free(key)

    def test_by_hand(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name, dedicated=True).acquire()
        pid = pid_of(lock)
        assert lock.is_held()
        lock.release()
        assert other.is_free(lock_key(name))
        wait_until_gone(other, pid)
        lock.release()
        assert not lock.is_held()
        assert not lock.lost.is_set()

    def test_one_object_for_many_threads(self, name: str, other: OtherSession) -> None:
        """And the negative control: without the lock they meet."""
        inside: set[int] = set()
        met = threading.Event()

        def work(lock: Any, barrier: threading.Barrier | None) -> None:
            for number in range(5):
                with lock:
                    inside.add(threading.get_ident())
                    if barrier is not None and not number:
                        barrier.wait(LIMIT)
                    if len(inside) > 1:
                        met.set()
                    time.sleep(0)
                    inside.discard(threading.get_ident())

        for lock, meets in ((advisory_lock(name, dedicated=True), False), (contextlib.nullcontext(), True)):
            barrier = threading.Barrier(4) if meets else None
            for thread in [Thread(partial(work, lock, barrier)) for _ in range(4)]:
                thread.result()
            assert met.is_set() is meets

    def test_dropped(self, name: str, other: OtherSession, no_collector: None) -> None:
        """Its session ends soon, without the garbage collector and without another operation on it."""
        with pytest.warns(ResourceWarning, match="without release"):
            advisory_lock(name, dedicated=True).acquire()
        other.wait_until_free(lock_key(name))

    def test_dropped_without_epoll(
        self, name: str, other: OtherSession, no_watcher: None, no_collector: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dedicated, "EVENTS", 0)
        monkeypatch.setattr(dedicated._watcher, "epoll", None)
        with pytest.warns(ResourceWarning, match="without release"):
            advisory_lock(name, dedicated=True).acquire()
        other.wait_until_free(lock_key(name))


class TestNested:
    @pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False), (True, True)])
    def test_the_same_key(self, outer: bool, inner: bool, name: str, other: OtherSession) -> None:
        """Another session: as the lock of another process, but this one would never be freed."""
        with advisory_lock(name, dedicated=outer):
            waits: list[dict[str, Any]] = [{}, {"timeout": 5}, {"timeout": 5, "poll_interval": 1}]
            for options in waits:
                with pytest.raises(LockDeadlock, match="on another session"):
                    advisory_lock(name, dedicated=inner, **options).acquire()
            assert not try_advisory_lock(name, dedicated=inner).acquire()
            with pytest.raises(LockTimeout):
                advisory_lock(name, dedicated=inner, timeout=0).acquire()
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False), (True, True)])
    def test_another_key(self, outer: bool, inner: bool, name: str, other: OtherSession) -> None:
        with advisory_lock(name, dedicated=outer) as first:
            with advisory_lock(name, "inner", dedicated=inner) as second:
                assert first.is_held()
                assert second.is_held()
            assert other.is_free(lock_key(name, "inner"))
            assert not other.is_free(lock_key(name))

    def test_a_lost_one_is_in_nobodys_way(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost), advisory_lock(name, dedicated=True) as lock:
            other.kill(pid_of(lock))
            assert lock.lost.wait(LIMIT)
            with advisory_lock(name, dedicated=True) as again:
                assert again.is_held()


class TestScope:
    @pytest.mark.parametrize("alias", ["default", "same", "other"])
    def test_inside_a_transaction(self, alias: str, name: str, other: OtherSession) -> None:
        """It would be freed before the commit, of its own alias too."""
        with transaction.atomic(using=alias), opened() as found:
            for lock in (advisory_lock(name, dedicated=True), try_advisory_lock(name, dedicated=True)):
                with pytest.raises(TransactionManagementError, match="before the transaction"):
                    lock.acquire()
            assert value("SELECT 1", alias=alias) == 1
            assert all(one.connection.closed for one in found)

    @pytest.mark.parametrize("alias", ["default", "same"])
    def test_session_scope_inside_a_transaction(self, alias: str, name: str, other: OtherSession) -> None:
        with transaction.atomic(using=alias):
            with advisory_lock(name, scope="session", dedicated=True) as lock:
                assert lock.is_held()
                assert not other.is_free(lock_key(name))
            assert other.is_free(lock_key(name))
            assert not connections[alias].needs_rollback

    def test_a_transaction_inside(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name, dedicated=True) as lock:
            with transaction.atomic():
                assert lock.is_held()
            with contextlib.suppress(ZeroDivisionError), transaction.atomic():
                raise ZeroDivisionError
            assert lock.is_held()

    def test_transaction_scope(self) -> None:
        for verb in (advisory_lock, try_advisory_lock):
            with pytest.raises(ValueError, match="dedicated"):
                verb("x", scope="transaction", dedicated=True)


class TestLost:
    """Case 4, 16, 72: the watcher sees the session end, and asks nobody."""

    @pytest.mark.parametrize("epoll", [True, False])
    def test_noticed(
        self, epoll: bool, name: str, other: OtherSession, no_watcher: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not epoll:
            monkeypatch.setattr(dedicated, "EVENTS", 0)
            monkeypatch.setattr(dedicated._watcher, "epoll", None)
        with opened() as found, pytest.raises(LockLost), advisory_lock(name, dedicated=True) as lock:
            assert not lock.lost.wait(0.2)
            other.kill(pid_of(lock))
            assert lock.lost.wait(LIMIT)
            assert len(found[0].queries_log) == 2
            assert lock.acquired
            assert not lock.is_held()
            with pytest.raises(LockLost):
                lock.check()
            assert len(found[0].queries_log) == 2
        assert other.is_free(lock_key(name))
        assert value("SELECT 1") == 1

    def test_the_error_of_the_body_stays(self, name: str, other: OtherSession) -> None:
        with pytest.raises(ZeroDivisionError) as caught, advisory_lock(name, dedicated=True) as lock:
            other.kill(pid_of(lock))
            assert lock.lost.wait(LIMIT)
            raise ZeroDivisionError
        if sys.version_info >= (3, 11):
            assert "was lost" in caught.value.__notes__[0]

    def test_a_loss_that_the_release_meets_first(
        self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as blind:
            blind.setattr(dedicated, "watch", lambda *args: None)
            lock = advisory_lock(name, dedicated=True).acquire()
        other.kill(pid_of(lock))
        assert not lock.lost.is_set()
        with pytest.raises(LockLost):
            lock.release()
        assert lock.lost.is_set()

    def test_one_whose_handle_has_just_been_dropped(self, name: str, other: OtherSession) -> None:
        """Nobody is left to be told."""
        watcher = dedicated._Watcher()
        raw = psycopg.connect(**parameters())
        watcher.watched[raw.fileno()] = ref(raw), ref(threading.Event())
        number = raw.fileno()
        raw.close()
        assert not watcher._look(number)
        assert not watcher.watched

    def test_nothing_is_asked(self, name: str, other: OtherSession) -> None:
        """The server sees an idle session, whatever is waited for."""
        with advisory_lock(name, dedicated=True) as lock:
            seen = "SELECT (query_start, state_change, state)::text FROM pg_stat_activity WHERE pid = %s"
            wait_until(lambda: "idle" in other.one(seen, [pid_of(lock)]), "an idle session")
            before = other.one(seen, [pid_of(lock)])
            assert not lock.lost.wait(2 * dedicated.IDLE)
            assert other.one(seen, [pid_of(lock)]) == before

    def test_no_false_alarm(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost), advisory_lock(name, dedicated=True) as lock:
            ask(lock, "SELECT 1")
            session_of(lock).connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(name)))
            for number in range(100):
                other.one("SELECT pg_notify(%s, %s)", [name, "x" * 7000])
                if not number % 20:
                    ask(lock, f"SELECT {number}")
            with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
                other.one("SELECT pg_reload_conf()")
            session_of(lock).connection.execute("DO $$ BEGIN RAISE NOTICE '%', repeat('x', 10000000); END $$")
            for thread in [Thread(lambda: [lock.is_held() for _ in range(50)]) for _ in range(4)]:
                assert thread.result() == [True] * 50
            assert not lock.lost.wait(2 * dedicated.BUSY)
            other.kill(pid_of(lock))
            assert lock.lost.wait(LIMIT), "the watcher did not look all the time"

    def test_thousands_of_locks(self, name: str, other: OtherSession, no_watcher: None) -> None:
        """No false alarm, no descriptor left, one watcher."""
        with advisory_lock(name, "first", dedicated=True) as first:
            before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
            for _ in range(1000):
                lock = advisory_lock(name, dedicated=True).acquire()
                assert not lock.lost.is_set()
                lock.release()
                assert not lock.lost.is_set()
            assert len(watchers()) == 1
            assert not first.lost.is_set()
            if before:
                assert len(os.listdir("/proc/self/fd")) <= before + 2
        wait_until_the_watcher_ended()

    def test_one_watcher_for_all(self, name: str, other: OtherSession, no_watcher: None) -> None:
        room = int(other.one("SELECT current_setting('max_connections')")) - int(
            other.one("SELECT count(*) FROM pg_stat_activity")
        )
        count = min(40, room - 20)
        locks = [advisory_lock(name, number, dedicated=True).acquire() for number in range(count)]
        assert len(watchers()) == 1
        for lock in locks[::2]:
            other.one("SELECT pg_terminate_backend(%s)", [pid_of(lock)])
        for lock in locks[::2]:
            assert lock.lost.wait(LIMIT)
            with pytest.raises(LockLost):
                lock.release()
        for lock in locks[1::2]:
            assert not lock.lost.is_set()
            lock.release()
        wait_until_the_watcher_ended()
        with advisory_lock(name, dedicated=True) as lock:  # and a new one begins
            other.kill(pid_of(lock))
            assert lock.lost.wait(LIMIT)
            with contextlib.suppress(LockLost):
                lock.release()

    @pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
    def test_a_watcher_that_does_not_start(
        self, error: BaseException, name: str, other: OtherSession, no_watcher: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is held then, and the next lock is watched."""

        def fail(thread: threading.Thread) -> None:
            raise error

        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", fail)
            with pytest.raises(type(error)):
                advisory_lock(name, dedicated=True).acquire()
        assert other.is_free(lock_key(name))
        with pytest.raises(LockLost), advisory_lock(name, dedicated=True) as lock:
            other.kill(pid_of(lock))
            assert lock.lost.wait(LIMIT)

    def test_threads_that_ask_while_the_owner_releases(self, name: str, other: OtherSession) -> None:
        """psycopg's close() waits for nobody: this crashed the interpreter, or waited for ever, within seconds."""
        current: list[LockHandle] = []
        is_over = threading.Event()

        def keep_asking() -> None:
            while not is_over.is_set():
                for lock in current:
                    if not lock.is_held():
                        time.sleep(0.0005)

        threads = [Thread(keep_asking) for _ in range(4)]
        try:
            for _ in range(40):
                lock = advisory_lock(name, dedicated=True).acquire()
                current[:] = [lock]
                assert lock.is_held()
                lock.release()
                assert not lock.lost.is_set()
        finally:
            is_over.set()
        for thread in threads:
            thread.result()

    def test_no_session_is_opened_by_asking(self, name: str, other: OtherSession) -> None:
        """Whoever asks just as the lock ends finds a closed connection, not a new one."""
        lock = advisory_lock(name, dedicated=True).acquire()
        own = session_of(lock)
        other.kill(pid_of(lock))
        assert lock.lost.wait(LIMIT)
        with pytest.raises(LockLost):
            lock.release()
        with pytest.raises(DatabaseError, match="closed"), own.cursor():
            pass

    def test_churn(self, name: str, other: OtherSession) -> None:
        """Descriptors go from one session to the next at once: every killed one is noticed, and no other one is."""
        end = time.monotonic() + 4

        def churn(number: int) -> tuple[int, int]:
            kept = killed = 0
            killer = OtherSession()
            while time.monotonic() < end:
                lock = advisory_lock(name, number, dedicated=True).acquire()
                if random.random() < 0.5:
                    killer.one("SELECT pg_terminate_backend(%s)", [pid_of(lock)])
                    assert lock.lost.wait(LIMIT), "not noticed"
                    with pytest.raises(LockLost):
                        lock.release()
                    killed += 1
                else:
                    assert not lock.lost.is_set(), "a false alarm"
                    lock.release()
                    assert not lock.lost.is_set(), "a false alarm"
                    kept += 1
            killer.close()
            return kept, killed

        with advisory_lock(name, "quiet", dedicated=True) as quiet:
            threads = [Thread(partial(churn, number)) for number in range(6)]
            for thread in threads:
                kept, killed = thread.result()
                assert kept
                assert killed
            assert not quiet.lost.is_set()


class TestNoConnection:
    def test_no_free_connection(self, name: str, other: OtherSession) -> None:
        """Case 33: an error at once, and none of it stays."""
        role = sql.Identifier(name)
        other.raw.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'lock' CONNECTION LIMIT 1").format(role))
        try:
            with extra_alias("limited", USER=name, PASSWORD="lock") as alias:
                assert value("SELECT 1", alias=alias) == 1
                with pytest.raises(OperationalError, match="too many connections"):
                    advisory_lock(name, using=alias, dedicated=True).acquire()
                assert value("SELECT 1", alias=alias) == 1
                connections[alias].close()
                wait_until(lambda: other.one("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", [name]) == 0)
                with advisory_lock(name, using=alias, dedicated=True) as lock:
                    assert lock.is_held() is True
        finally:
            wait_until(lambda: other.one("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", [name]) == 0)
            other.raw.execute(sql.SQL("DROP ROLE {}").format(role))

    def test_a_port_that_says_nothing(self, name: str, other: OtherSession) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = str(silent.getsockname()[1])
            with extra_alias("silent", {"connect_timeout": 1}, HOST="127.0.0.1", PORT=port) as alias:
                for verb in (advisory_lock, try_advisory_lock):
                    started = time.monotonic()
                    with pytest.raises(OperationalError, match="timeout"):
                        verb(name, using=alias, dedicated=True).acquire()
                    assert time.monotonic() - started < LIMIT

    def test_a_port_that_nobody_listens_on(self, name: str, other: OtherSession) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        with extra_alias("refused", HOST="127.0.0.1", PORT=port) as alias:
            with pytest.raises(OperationalError):
                advisory_lock(name, using=alias, dedicated=True).acquire()

    def test_a_pooler(self, name: str, other: OtherSession) -> None:
        """Case 37: refused and closed. The pooler is made here by the guard's pid."""

        def misroute(connection: Any, **kwargs: object) -> None:
            attach(connection).guard = other.pid

        connection_created.connect(misroute)
        try:
            with opened() as found, pytest.raises(PoolerDetected):
                advisory_lock(name, dedicated=True).acquire()
        finally:
            connection_created.disconnect(misroute)
        assert found[0].connection.closed
        assert other.is_free(lock_key(name))

    def test_no_setting_reaches_the_session_of_a_pooler(
        self, name: str, other: OtherSession, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is lent to others afterwards, unless the pooler keeps one for each client."""
        pid = other.pid
        monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda info: pid))
        own = dedicated.connect(connection)
        idle = "SELECT source FROM pg_settings WHERE name = 'idle_session_timeout'"
        assert own.connection.execute(idle).fetchone()[0] != "session"
        dedicated.close(own)
        settings.ADVISORY_LOCK_SESSION_POOLER = ["default"]
        own = dedicated.connect(connection)
        assert own.connection.execute(idle).fetchone()[0] == "session"
        dedicated.close(own)


class TestOwners:
    def test_only_the_owner_releases(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name, dedicated=True) as lock:
            with pytest.raises(AdvisoryLockError, match="another thread or task"):
                Thread(lock.release).result()
            with pytest.raises(AdvisoryLockError, match="another thread or task"):
                Thread(lambda: lock.__exit__(None, None, None)).result()
            assert Thread(lock.is_held).result() is True
            assert not session_of(lock).connection.closed
        assert other.is_free(lock_key(name))
        assert Thread(lock.is_held).result() is False

    def test_a_thread_that_ends(self, name: str, other: OtherSession) -> None:
        """Its own connections are closed with it; the lock is not its connection's."""
        lock = Thread(advisory_lock(name, dedicated=True).acquire).result()
        assert lock.is_held()
        assert not other.is_free(lock_key(name))
        gc.collect()
        lock.release()  # the owner is gone
        assert other.is_free(lock_key(name))


class TestFork:
    def test_a_child_leaves_the_lock_alone(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name, dedicated=True) as lock:

            def leave() -> object:
                held = lock.is_held()
                lock.release()
                lock.__exit__(None, None, None)
                return held, lock.lost.is_set(), try_advisory_lock(name, dedicated=True).acquire().acquired

            assert in_child(leave) == "(False, False, False)"
            assert lock.is_held()
            assert not other.is_free(lock_key(name))
            other.kill(pid_of(lock))
            assert lock.lost.wait(LIMIT)
            with contextlib.suppress(LockLost):
                lock.release()

    def test_a_child_that_drops_and_collects_it(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name, dedicated=True).acquire()

        def drop() -> bool:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # psycopg's, for any connection that a fork inherits
                lock.__dict__.clear()
                gc.collect()
            return True

        assert in_child(drop) == "True"
        assert lock.is_held()
        lock.release()

    def test_a_child_has_a_watcher_of_its_own(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name, dedicated=True) as lock:

            def lose() -> object:
                own = advisory_lock(name, "child", dedicated=True).acquire()
                count = len(watchers())
                with psycopg.connect(**parameters(), autocommit=True) as raw:
                    raw.execute("SELECT pg_terminate_backend(%s)", [pid_of(own)])
                answer = own.lost.wait(LIMIT), lock.lost.is_set(), count
                with contextlib.suppress(LockLost):
                    own.release()
                return answer

            assert in_child(lose) == "(True, False, 1)"
            assert lock.is_held()
            assert not lock.lost.is_set()

    def test_a_child_that_stays_keeps_no_number_alive(self, name: str, other: OtherSession) -> None:
        """A fork holds the sockets open, so that the kernel forgets none of them: losses are noticed all the same."""
        go, going = os.pipe()
        with advisory_lock(name, "first", dedicated=True) as first:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:  # pragma: no cover - measured in the parent only
                os.close(going)
                os.read(go, 1)
                os._exit(0)
            os.close(go)
            try:
                other.kill(pid_of(first))
                assert first.lost.wait(LIMIT)
                for number in range(5):
                    with contextlib.suppress(LockLost), advisory_lock(name, number, dedicated=True) as lock:
                        assert not lock.lost.wait(2 * dedicated.BUSY)
                        other.kill(pid_of(lock))
                        assert lock.lost.wait(LIMIT)
            finally:
                os.close(going)
                os.waitpid(pid, 0)
            with contextlib.suppress(LockLost):
                first.release()


class TestInterrupts:
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, TimeLimitExceeded])
    @pytest.mark.parametrize("options", [{}, {"timeout": 5}])
    def test_at_every_line(
        self, options: dict[str, Any], interrupt: type[BaseException], name: str, other: OtherSession
    ) -> None:
        """Case 67: free soon after, for a session that nobody has any more is ended; and the next lock is watched."""

        def take_and_release() -> None:
            advisory_lock(name, dedicated=True, **options).acquire().release()

        take_and_release()
        for point in range(1, 1000):
            if interrupt_at(point, raises(interrupt), take_and_release) is None:
                assert point > 100
                break
            mutex: Any = dedicated._watcher.mutex
            while mutex._is_owned():
                # Only a trace function can come between a block and the __exit__ of its mutex, which is written in C.
                mutex.release()
            if not other.is_free(lock_key(name)):
                gc.collect()
                other.wait_until_free(lock_key(name))
        else:
            pytest.fail("never ran to its end")
        with contextlib.suppress(LockLost), advisory_lock(name, dedicated=True) as lock:
            other.kill(pid_of(lock))
            assert lock.lost.wait(LIMIT)


def test_a_watcher_that_was_replaced_ends(name: str, other: OtherSession) -> None:
    with advisory_lock(name, dedicated=True) as lock:
        Thread(dedicated._watcher._run).result()
        assert not lock.lost.is_set()
    assert other.is_free(lock_key(name))


class TestAsync:
    def run(self, work: Callable[[], Any]) -> Any:
        async def limited() -> Any:
            from asgiref.sync import sync_to_async

            try:
                return await asyncio.wait_for(work(), LIMIT)
            finally:
                await sync_to_async(connections.close_all)()

        return asyncio.run(limited())

    def test_a_block(self, name: str, other: OtherSession) -> None:
        async def work() -> int:
            async with advisory_lock(name, dedicated=True) as lock:
                assert await lock.ais_held()
                assert not await asyncio.to_thread(other.is_free, lock_key(name))
                return pid_of(lock)

        pid = self.run(work)
        assert other.is_free(lock_key(name))
        wait_until_gone(other, pid)

    def test_by_hand_and_decorated(self, name: str, other: OtherSession) -> None:
        async def work() -> Any:
            lock = await advisory_lock(name, dedicated=True).aacquire()
            await lock.acheck()
            await lock.arelease()
            with_default = try_advisory_lock(name, dedicated=True, default="busy")

            async def body() -> bool:
                return await asyncio.to_thread(other.is_free, lock_key(name))

            return await with_default(body)()

        assert self.run(work) is False
        assert other.is_free(lock_key(name))

    def test_tasks_wait_and_one_is_cancelled(self, name: str, other: OtherSession) -> None:
        async def hold(inside: asyncio.Event, leave: asyncio.Event) -> None:
            async with advisory_lock(name, dedicated=True):
                inside.set()
                await leave.wait()

        async def work() -> None:
            inside, leave, never = asyncio.Event(), asyncio.Event(), asyncio.Event()
            holder = asyncio.ensure_future(hold(inside, leave))
            await inside.wait()
            waiter = asyncio.ensure_future(hold(never, leave))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiter), 0.3)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert not never.is_set()
            leave.set()
            await holder

        with opened() as found:
            self.run(work)
        assert len(found) == 2
        assert all(one.connection.closed for one in found)

    def test_a_loss(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            async with advisory_lock(name, dedicated=True) as lock:
                await asyncio.to_thread(other.kill, pid_of(lock))
                assert await asyncio.to_thread(lock.lost.wait, LIMIT)

        with pytest.raises(LockLost):
            self.run(work)

    def test_the_loop_goes_on_while_it_connects(self, name: str, other: OtherSession) -> None:
        async def work(alias: str) -> int:
            attempt = asyncio.ensure_future(advisory_lock(name, using=alias, dedicated=True).aacquire())
            rounds = 0
            while not attempt.done():
                await asyncio.sleep(0.01)
                rounds += 1
            with pytest.raises(OperationalError):
                await attempt
            return rounds

        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = str(silent.getsockname()[1])
            with extra_alias("silent", {"connect_timeout": 2}, HOST="127.0.0.1", PORT=port) as alias:
                assert self.run(partial(work, alias)) > 3

    def test_the_transactions_of_other_threads_are_not_the_tasks(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            from asgiref.sync import sync_to_async

            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            await sync_to_async(lambda: connection.set_autocommit(False), thread_sensitive=False)()
            async with advisory_lock(name, dedicated=True):
                assert not await asyncio.to_thread(other.is_free, lock_key(name))
            await sync_to_async(connections.close_all, thread_sensitive=False)()

        self.run(work)
        assert other.is_free(lock_key(name))

    def test_other_tasks_use_the_database_while_it_connects(self, name: str, other: OtherSession) -> None:
        """They share a thread with the lock, which must not wait in it for a server that says nothing."""

        async def work(alias: str) -> bool:
            from asgiref.sync import sync_to_async

            attempt = asyncio.ensure_future(advisory_lock(name, using=alias, dedicated=True).aacquire())
            await asyncio.sleep(0.1)
            assert await sync_to_async(value)("SELECT 1") == 1
            was_connecting = not attempt.done()
            with pytest.raises(OperationalError):
                await attempt
            return was_connecting

        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = str(silent.getsockname()[1])
            with extra_alias("silent", {"connect_timeout": 2}, HOST="127.0.0.1", PORT=port) as alias:
                assert self.run(partial(work, alias)) is True


# -X dev and -W error: a warning at the end would be printed, and a connection that is left open is one.
QUIET = {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error"}


class TestEndOfTheProcess:
    """Whatever is held, and whoever watches: no word, no hang, exit code 0."""

    @pytest.mark.parametrize(
        "code",
        [
            "with advisory_lock(sys.argv[1], dedicated=True): sys.exit(0)",
            "advisory_lock(sys.argv[1], dedicated=True).acquire().release()",
            "lock = advisory_lock(sys.argv[1], dedicated=True).acquire()\nlock.release()\nlock.lost.wait(0.1)",
            "lock = advisory_lock(sys.argv[1], dedicated=True).acquire()\nos._exit(0)",
            "lock = advisory_lock(sys.argv[1], dedicated=True).acquire()\natexit.register(lock.release)",
            """\
def lead():
    with advisory_lock(sys.argv[1], dedicated=True) as lock:
        held.set()
        lock.lost.wait()
held = threading.Event()
threading.Thread(target=lead, daemon=True).start()
assert held.wait(20)
""",
        ],
        ids=["exit in a block", "released", "watcher running", "_exit", "atexit", "daemon thread"],
    )
    def test_quietly(self, code: str, name: str, other: OtherSession) -> None:
        imports = "import atexit, os, sys, threading\nfrom django_advisory_lock import advisory_lock\n"
        process = spawn(imports + code, name, **QUIET)
        out, errors = process.communicate(timeout=3 * LIMIT)
        assert (process.returncode, out, errors) == (0, "", "")
        other.wait_until_free(lock_key(name))

    def test_a_lock_that_is_held(self, name: str, other: OtherSession) -> None:
        code = (
            "import sys\nfrom django_advisory_lock import advisory_lock\n"
            "lock = advisory_lock(sys.argv[1], dedicated=True).acquire()"
        )
        process = spawn(code, name)
        out, errors = process.communicate(timeout=3 * LIMIT)
        assert (process.returncode, out, errors) == (0, "", "")  # in development mode psycopg names what stayed open
        other.wait_until_free(lock_key(name))

    def test_killed(self, name: str, other: OtherSession) -> None:
        """Case 35, 61: the kernel closes the socket, and nothing is left to clean up."""
        code = (
            "import sys\nfrom django_advisory_lock import advisory_lock\n"
            "with advisory_lock(sys.argv[1], dedicated=True):\n print('held', flush=True)\n sys.stdin.read()"
        )
        process = spawn(code, name)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert not other.is_free(lock_key(name))
        process.kill()
        process.communicate()
        other.wait_until_free(lock_key(name))

    def test_multiprocessing(self, name: str, other: OtherSession) -> None:
        code = """\
import multiprocessing, sys, warnings
from django_advisory_lock import advisory_lock, try_advisory_lock
warnings.simplefilter("ignore", DeprecationWarning)
def work(name, answers):
    with try_advisory_lock(name, dedicated=True) as lock:
        first = lock.acquired
    with advisory_lock(name, "child", dedicated=True) as lock:
        answers.put((first, lock.is_held()))
context = multiprocessing.get_context("fork")
answers = context.Queue()
with advisory_lock(sys.argv[1], dedicated=True) as lock:
    child = context.Process(target=work, args=(sys.argv[1], answers))
    child.start()
    print(answers.get(timeout=20))
    child.join(20)
    print(child.exitcode, lock.is_held(), lock.lost.is_set())
"""
        assert output(spawn(code, name)) == "(False, True)\n0 True False\n"


@pytest.fixture
def server() -> Iterator[Any]:
    with new_server() as server:
        yield server


class TestServer:
    """The end of the server, and of the way to it."""

    @pytest.mark.parametrize("mode", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
    def test_a_server_that_stops(self, mode: signal.Signals, server: Any, name: str, other: OtherSession) -> None:
        with server.alias("stopped") as alias:
            with pytest.raises(LockLost), advisory_lock(name, using=alias, dedicated=True) as lock:
                server.stop(mode)
                assert lock.lost.wait(LIMIT)
            server.start()
            with advisory_lock(name, using=alias, dedicated=True) as lock:
                assert lock.is_held()

    def test_a_server_that_is_killed(self, server: Any, name: str, other: OtherSession) -> None:
        with server.alias("killed") as alias:
            with pytest.raises(LockLost), advisory_lock(name, using=alias, dedicated=True) as lock:
                server.kill()
                assert lock.lost.wait(LIMIT)

    def test_a_way_that_is_cut(self, server: Any, name: str, other: OtherSession) -> None:
        """Reset by something on the way: the holder knows at once; keepalives are set for what says nothing."""
        with Proxy(server.socket) as proxy:
            with server.alias("cut", **proxy.settings) as alias:
                with pytest.raises(LockLost), advisory_lock(name, using=alias, dedicated=True) as lock:
                    with socket.socket(fileno=os.dup(session_of(lock).connection.fileno())) as link:
                        idle = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                        timeout = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                    assert (idle, timeout) == (3, 6000)
                    proxy.cut()
                    assert lock.lost.wait(LIMIT)
