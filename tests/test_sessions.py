"""What this process knows of its sessions: pinned and pooled connections, owners, forks, dropped handles."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from functools import partial
from typing import Any

import pytest
from django.conf import LazySettings
from django.db import close_old_connections, connection, connections, transaction
from django.db.backends.postgresql.base import DatabaseWrapper
from django.test import TestCase, TransactionTestCase

from django_advisory_lock import (
    AdvisoryLockError,
    LockDeadlock,
    LockHandle,
    LockLost,
    LockTimeout,
    advisory_lock,
    lock_key,
    owners,
    try_advisory_lock,
)
from django_advisory_lock.holds import _handles
from django_advisory_lock.owners import current_owner
from django_advisory_lock.sessions import attach
from tests.support import OtherSession, Thread, backend_pid, in_child, output, spawn, statements, value, wait_until


def drop(lock: LockHandle) -> None:
    """Do what happens when the handle is collected as garbage."""
    assert lock._hold is not None
    handle = _handles[id(lock._hold)]
    assert handle.__callback__ is not None
    handle.__callback__(handle)


class TestPinning:
    """Case 3: housekeeping does not recycle a connection while a session lock is held on it."""

    @pytest.mark.parametrize("alias", ["default", "persistent", "healthy"])
    def test_close_old_connections(self, alias: str, name: str, other: OtherSession) -> None:
        with advisory_lock(name, using=alias) as lock:
            with advisory_lock(name, "nested", using=alias):
                pass
            close_old_connections()
            assert lock.is_held()
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))
        close_old_connections()
        assert (connections[alias].connection is None) is (alias != "persistent")

    def test_a_connection_is_recycled_as_before_where_it_was_replaced(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost), advisory_lock(name):
            connection.close()
            connection.ensure_connection()
            close_at = connection.close_at
        assert connection.close_at == close_at

    def test_transaction_locks_do_not_pin(self, name: str, other: OtherSession) -> None:
        with transaction.atomic(), advisory_lock(name):
            assert connection.close_at is not None


class TestPool:
    """Case 2, 33, 71: `OPTIONS["pool"]`, where a session outlives its borrower."""

    def test_a_connection_closed_with_a_lock_is_discarded(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost), advisory_lock(name, using="pooled") as lock:
            pid = backend_pid("pooled")
            connections["pooled"].close()
            assert not lock.is_held()
            other.wait_until_free(lock_key(name))
            assert Thread(lambda: backend_pid("pooled")).result() != pid

    def test_by_hand(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name, using="pooled").acquire()
        connections["pooled"].close()

        def borrow() -> bool:
            with try_advisory_lock(name, using="pooled") as borrowed:
                return borrowed.acquired and not other.is_free(lock_key(name))

        other.wait_until_free(lock_key(name))
        assert Thread(borrow).result() is True  # on a session of its own, and truly
        with statements(0, "default"), pytest.raises(LockLost):
            lock.release()

    def test_a_released_connection_is_pooled_again(self, name: str, other: OtherSession) -> None:
        connections["pooled"].close()
        pids = set()
        for _ in range(3):
            with advisory_lock(name, using="pooled"), advisory_lock(name, "nested", using="pooled"):
                pids.add(backend_pid("pooled"))
            connections["pooled"].close()
        assert len(pids) == 1

    def test_a_dropped_handle_never_reaches_the_pool(self, name: str, other: OtherSession) -> None:
        with pytest.warns(ResourceWarning, match="without release"):
            advisory_lock(name, using="pooled").acquire()
            gc.collect()
        pid = backend_pid("pooled")
        connections["pooled"].close()
        other.wait_until_free(lock_key(name))
        assert backend_pid("pooled") != pid
        connections["pooled"].close()

    def test_a_lock_that_another_one_leaves_in_doubt_keeps_the_mark(self, name: str, other: OtherSession) -> None:
        """A connection with a dropped handle stays marked although another lock on it was released."""
        with advisory_lock(name, 1, using="pooled"):
            with pytest.warns(ResourceWarning):
                advisory_lock(name, 2, using="pooled").acquire()
                gc.collect()
        raw = connections["pooled"].connection
        assert raw._expire_at > 0, "freed and settled with the release of the other one"
        assert other.is_free(lock_key(name, 2))
        connections["pooled"].close()

    def test_a_session_that_cannot_be_asked_never_reaches_the_pool(
        self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from django_advisory_lock import sessions

        def deaf(*args: Any) -> None:
            raise RuntimeError

        def interrupted(execute: Any, sql: str, params: Any, many: bool, context: Any) -> None:
            execute(sql, params, many, context)
            raise KeyboardInterrupt

        connections["pooled"].ensure_connection()
        pid = backend_pid("pooled")
        monkeypatch.setattr(sessions, "ask", deaf)
        with pytest.raises(KeyboardInterrupt), connections["pooled"].execute_wrapper(interrupted):
            advisory_lock(name, using="pooled").acquire()
        other.wait_until_free(lock_key(name))
        assert backend_pid("pooled") != pid
        connections["pooled"].close()

    def test_a_dropped_handle_keeps_the_mark_while_others_come_and_go(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name, 1, using="pooled") as first:
            with pytest.warns(ResourceWarning):
                advisory_lock(name, 2, using="pooled").acquire()
                gc.collect()
            hold = first._hold
            assert hold is not None
            hold.session.drop(hold)  # as at the end of a release, before what is in doubt is put right
            assert connections["pooled"].connection._expire_at == 0.0
            hold.session.doubt(first.keys, False, hold.pid)
        connections["pooled"].close()
        other.wait_until_free(lock_key(name, 2))

    def test_a_transaction_lock_of_an_earlier_borrower_is_not_in_the_way(self, name: str, other: OtherSession) -> None:
        """Two sessions that take turns, as a pool lends them: the note of a transaction that is over ends no wait."""
        with transaction.atomic():
            advisory_lock(name).acquire()
        old, connection.connection = connection.connection, None
        with advisory_lock(name) as lock:
            assert lock
        connection.close()
        connection.connection = old

    def test_a_wrapper_that_closes_the_connection(self, name: str, other: OtherSession) -> None:
        """The next borrower gets no session with a lock that was granted meanwhile."""

        def close_and_raise(execute: Any, sql: str, params: Any, many: bool, context: Any) -> None:
            execute(sql, params, many, context)
            connections["pooled"].close()
            raise RuntimeError

        pid = backend_pid("pooled")
        with pytest.raises(RuntimeError), connections["pooled"].execute_wrapper(close_and_raise):
            advisory_lock(name, using="pooled").acquire()
        other.wait_until_free(lock_key(name))
        assert backend_pid("pooled") != pid
        connections["pooled"].close()

    def test_a_holder_needs_no_second_connection(self, name: str, other: OtherSession) -> None:
        """Case 33: one connection in the pool, four threads that lock and query."""

        def work(number: int) -> int:
            with advisory_lock(name, number, using="pooled"):
                return backend_pid("pooled")

        threads = [Thread(partial(work, number)) for number in range(4)]
        for thread in threads:
            assert thread.result()


class TestOwners:
    def test_only_the_owner_releases(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name).acquire()
        with pytest.raises(AdvisoryLockError, match="another thread or task"):
            Thread(lock.release).result()
        assert lock.is_held()
        assert not other.is_free(lock_key(name))
        lock.release()
        assert other.is_free(lock_key(name))

    def test_no_way_out_through_another_thread(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name).acquire() as lock:
            with pytest.raises(AdvisoryLockError, match="another thread or task"):
                Thread(lambda: lock.__exit__(None, None, None)).result()
            assert lock.is_held()
        assert other.is_free(lock_key(name))

    def test_another_thread_may_ask(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            assert Thread(lock.is_held).result() is True
            kill = Thread(lambda: other.kill(backend_pid()))  # another session than the lock's
            kill.result()
            assert Thread(lock.is_held).result() is True
        assert Thread(lock.is_held).result() is False

    def test_threads_that_share_a_connection_exclude_each_other(self, name: str, other: OtherSession) -> None:
        """One session grants itself everything, so it is this process that keeps them apart."""
        shared = connections["default"]
        shared.inc_thread_sharing()

        def in_thread(function: Any) -> Any:
            def run() -> Any:
                own = connections["default"]
                connections["default"] = shared
                try:
                    return function()
                finally:
                    connections["default"] = own

            return Thread(run).result()

        try:
            with advisory_lock(name) as lock:
                with statements(0):
                    assert in_thread(lambda: try_advisory_lock(name).acquire().acquired) is False
                with pytest.raises(LockTimeout, match="another thread or task of this process"):
                    in_thread(lambda: advisory_lock(name, timeout=0).acquire())
                for options in ({}, {"timeout": 5}, {"timeout": 5, "poll_interval": 0.1}):
                    with pytest.raises(LockDeadlock, match="shares this database session"):
                        in_thread(lambda options=options: advisory_lock(name, **options).acquire())
                with pytest.raises(AdvisoryLockError):
                    in_thread(lock.release)
            with advisory_lock(name, shared=True):

                def share() -> bool:
                    with try_advisory_lock(name, shared=True) as lock:
                        return lock.acquired

                assert in_thread(share) is True
                assert in_thread(lambda: try_advisory_lock(name).acquire().acquired) is False
            with transaction.atomic():
                advisory_lock(name).acquire()
                with pytest.raises(KeyError), transaction.atomic():
                    raise KeyError  # now only the server knows whether the lock is still there
                assert in_thread(lambda: try_advisory_lock(name).acquire().acquired) is False
            assert in_thread(lambda: advisory_lock(name).__enter__().__exit__(None, None, None)) is None
        finally:
            shared.dec_thread_sharing()

    def test_a_thread_that_ends_while_it_holds(self, name: str, other: OtherSession) -> None:
        """Its connection is closed with it; the key is free for the next one, on whatever session."""

        def hold() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                advisory_lock(name).acquire()
                gc.collect()

        Thread(hold).result()
        other.wait_until_free(lock_key(name))


class TestDroppedHandles:
    def test_it_warns_and_the_next_operation_frees_the_lock(self, name: str, other: OtherSession) -> None:
        with pytest.warns(ResourceWarning, match=name):
            advisory_lock(name).acquire()
            gc.collect()
        assert not other.is_free(lock_key(name))
        assert connection.close_at is not None, "still pinned"
        with advisory_lock(name, "another"):
            assert other.is_free(lock_key(name))

    def test_housekeeping_frees_it_too(self, name: str, other: OtherSession) -> None:
        with pytest.warns(ResourceWarning):
            advisory_lock(name).acquire()
            gc.collect()
        close_old_connections()
        other.wait_until_free(lock_key(name))

    def test_the_same_key_can_be_taken_at_once(self, name: str, other: OtherSession) -> None:
        with pytest.warns(ResourceWarning):
            advisory_lock(name).acquire()
            gc.collect()
        with advisory_lock(name):
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))

    def test_nested_in_one_that_is_held(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name):
            with pytest.warns(ResourceWarning):
                advisory_lock(name).acquire()
                gc.collect()
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))

    def test_released_ones_say_nothing(self, name: str, other: OtherSession) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            advisory_lock(name).acquire().release()
            with transaction.atomic():
                advisory_lock(name).acquire()
            with pytest.raises(LockLost):
                lost = advisory_lock(name).acquire()
                connection.close()
                lost.release()
            del lost
            gc.collect()


class TestFork:
    """Case: a forked child neither unlocks nor re-enters, and never touches the parent's session."""

    def test_a_child_does_not_re_enter(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            pid = backend_pid()

            def try_it() -> tuple[bool, bool]:
                return try_advisory_lock(name).acquire().acquired, backend_pid() != pid

            assert in_child(try_it) == "(False, True)"
            assert lock.is_held()
            assert backend_pid() == pid

    def test_a_connection_that_never_held_a_lock(self, name: str, other: OtherSession) -> None:
        pid = backend_pid()

        def take() -> tuple[bool, bool]:
            lock = try_advisory_lock(name).acquire()
            return lock.acquired, backend_pid() != pid

        assert in_child(take) == "(True, True)"
        other.wait_until_free(lock_key(name))  # with the child's own session
        assert backend_pid() == pid

    def test_what_a_child_does_first(self, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same in this process: it leaves every open connection to the parent."""
        from django_advisory_lock import sessions

        connections["sqlite"].ensure_connection()
        connection.ensure_connection()
        connections["same"].ensure_connection()
        connections["same"].connection.close()  # a session that died says nothing more, not even its pid
        pools = DatabaseWrapper._connection_pools  # type: ignore[attr-defined]
        monkeypatch.setattr(DatabaseWrapper, "_connection_pools", dict(pools))
        sessions._mark_inherited()
        assert DatabaseWrapper._connection_pools == {}  # type: ignore[attr-defined]
        assert [sessions._inherited.pop() for _ in pools] == list(pools.values())[::-1]
        connections["same"].connection = None
        raw = connection.connection
        marked = [one for one in connections.all(initialized_only=True) if one.connection and one.alias != "sqlite"]
        assert {attach(one).process for one in marked} == {0}
        assert sessions.connection_for("default").connection is None
        assert sessions._inherited.pop() is raw
        connection.connection = raw
        for one in marked:
            attach(one).process = os.getpid()
        monkeypatch.setattr(sessions, "settings", LazySettings())
        sessions._mark_inherited()
        assert attach(connections["default"]).process == os.getpid()

    def test_what_a_child_does_first_while_a_lock_is_held(
        self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from django_advisory_lock import sessions

        monkeypatch.setattr(DatabaseWrapper, "_connection_pools", {})
        with advisory_lock(name) as lock:
            raw = connection.connection
            sessions._mark_inherited()
            assert connection.connection is None
            assert sessions._inherited.pop() is raw
            connection.connection = raw
            for one in connections.all(initialized_only=True):
                if one.connection and one.alias != "sqlite":
                    attach(one).process = os.getpid()
            assert lock.is_held()

    def test_a_child_waits_as_another_process_does(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name):

            def wait() -> str:
                try:
                    advisory_lock(name, timeout=0.05).acquire()
                except LockTimeout:
                    return "timed out"
                return "got in"

            assert in_child(wait) == "'timed out'"

    def test_a_child_does_not_unlock(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name) as lock:

            def leave() -> bool:
                held = lock.is_held()
                lock.release()
                lock._leave(None, current_owner())
                drop(lock)
                return held

            assert in_child(leave) == "False"
            assert not other.is_free(lock_key(name))
            assert lock.is_held()
        assert other.is_free(lock_key(name))

    def test_a_child_takes_locks_of_its_own(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name):

            def take() -> bool:
                with advisory_lock(name, "child") as lock:
                    return lock.is_held()

            assert in_child(take) == "True"

    def test_the_same_in_this_process(self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a child does, step by step, under another pid."""
        from django_advisory_lock import sessions

        lock = advisory_lock(name).acquire()
        raw = connection.connection
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            with statements(0):
                lock.release()
                lock._leave(None, current_owner())
                assert not lock.is_held()
                assert not lock.lost.is_set()
            drop(lock)
            assert not attach(connections["default"]).abandoned
            assert not try_advisory_lock(name).acquire()
            assert connection.connection is not raw
            connection.close()
        assert sessions._inherited.pop() is raw
        connection.connection = raw
        assert lock.is_held()
        lock.release()
        assert other.is_free(lock_key(name))

    def test_multiprocessing(self, name: str, other: OtherSession) -> None:
        code = f"""
import multiprocessing, sys
from django.db import connection
from django_advisory_lock import try_advisory_lock

def child(queue):
    queue.put(try_advisory_lock({name!r}).acquire().acquired)

context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
with try_advisory_lock({name!r}) as lock:
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join()
    print(lock.acquired, queue.get(), lock.is_held(), process.exitcode)
"""
        assert output(spawn(code)) == "True False True 0\n"


class TestInsideTestCase(TestCase):
    """The `atomic()` that TestCase puts around a test does not count: the code under test locks as in production."""

    def test_the_scope_is_that_of_production(self) -> None:
        with advisory_lock("test-in-testcase") as lock:
            assert lock.scope == "session"
        with transaction.atomic(), advisory_lock("test-in-testcase") as lock:
            assert lock.scope == "transaction"
        with pytest.raises(transaction.TransactionManagementError):
            advisory_lock("test-in-testcase", scope="transaction").acquire()

    def test_it_is_freed_after_a_database_error_in_the_body(self) -> None:
        with pytest.raises(Exception, match="division"), advisory_lock("test-in-testcase"):
            value("SELECT 1/0")
        other = OtherSession()
        assert other.is_free(lock_key("test-in-testcase"))
        other.close()

    def test_a_wait_that_fails_leaves_the_transaction_usable(self) -> None:
        other = OtherSession()
        other.take(lock_key("test-in-testcase"))
        for poll_interval in (None, 0.005):
            with pytest.raises(LockTimeout):
                advisory_lock("test-in-testcase", timeout=0.01, poll_interval=poll_interval).acquire()
            assert backend_pid()
        other.close()


class TestInsideTransactionTestCase(TransactionTestCase):
    def test_the_scope_is_that_of_production(self) -> None:
        with advisory_lock("test-in-testcase") as lock:
            assert lock.scope == "session"


class TestDoubts:
    def test_an_interrupt_while_something_is_put_right(
        self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then the session is closed, which frees whatever is left."""
        from django_advisory_lock import sessions

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        with pytest.warns(ResourceWarning):
            advisory_lock(name).acquire()
            gc.collect()
        monkeypatch.setattr(sessions, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            advisory_lock(name, "another").acquire()
        other.wait_until_free(lock_key(name))
        assert backend_pid()

    def test_a_lock_whose_owner_is_gone(self, name: str, other: OtherSession) -> None:
        """A thread that ended while it held on a connection it shared: nobody nests in its lock, nobody inherits it."""
        shared = connections["default"]
        shared.inc_thread_sharing()
        handles = []

        def hold() -> None:
            connections["default"] = shared
            handles.append(advisory_lock(name).acquire())
            del connections["default"]

        try:
            Thread(hold).result()
            gc.collect()
            assert not try_advisory_lock(name).acquire()
            handles[0].release()  # by whoever has the handle and the session
            with advisory_lock(name):
                pass
            assert other.is_free(lock_key(name))
        finally:
            shared.dec_thread_sharing()

    def test_an_alias_whose_connection_was_thrown_away(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name, using="same").acquire()
        raw = connections["same"].connection
        del connections["same"]
        gc.collect()
        with pytest.raises(LockLost):
            lock.release()
        raw.close()
        other.wait_until_free(lock_key(name))

    def test_only_one_alias(self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        from django_advisory_lock.transactions import other_alias_in_transaction

        monkeypatch.setattr(connections, "settings", {"default": {}})
        assert other_alias_in_transaction("default") is None

    def test_a_session_that_the_alias_no_longer_has_is_left_alone(self, other: OtherSession) -> None:
        from django_advisory_lock.sessions import end

        connection.ensure_connection()
        session = attach(connections["default"])
        old, connection.connection = connection.connection, None
        connection.ensure_connection()
        new = connection.connection
        end(connections["default"], session)
        assert not new.closed
        assert not old.closed
        old.close()


class TestMissingInternals:
    """Where an internal of Django or psycopg_pool is gone, the lock still excludes."""

    def test_run_on_commit(self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        class Connection(type(connections["default"])):  # type: ignore[misc]
            run_on_commit = property(doc="gone")

        with transaction.atomic():
            wrapper = connections["default"]
            monkeypatch.setattr(wrapper, "__class__", Connection)
            with advisory_lock(name) as lock, advisory_lock(name):
                assert lock.is_held()
            assert not other.is_free(lock_key(name))
            monkeypatch.undo()

    def test_expire_at(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        connections["pooled"].ensure_connection()
        raw = connections["pooled"].connection
        expire_at = raw.__dict__.pop("_expire_at")
        with advisory_lock(name, using="pooled"):
            assert not other.is_free(lock_key(name))
        assert "psycopg_pool is unknown" in caplog.text
        raw._expire_at = expire_at
        connections["pooled"].close()

    def test_atomic_blocks(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            blocks = connections["default"].__dict__.pop("atomic_blocks")
            with advisory_lock(name) as lock:
                assert lock.scope == "transaction"
            connections["default"].atomic_blocks = blocks

    def test_the_loop_of_asgiref(self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owners, "_asgiref_thread", None)
        with advisory_lock(name), advisory_lock(name):
            assert not other.is_free(lock_key(name))


def test_a_session_belongs_to_its_connection(other: OtherSession) -> None:
    connection.ensure_connection()
    session = attach(connections["default"])
    assert attach(connections["default"]) is session
    connection.close()
    connection.ensure_connection()
    assert attach(connections["default"]) is not session


def test_forgetting_a_lock_twice_is_no_error(name: str, other: OtherSession) -> None:
    """An interrupt may come in the middle of the first time."""
    lock = advisory_lock(name).acquire()
    lock.release()
    assert lock._hold is not None
    lock._hold.session.drop(lock._hold)
    assert not lock._hold.session.has_session_lock(lock.key, False)


def test_many_sessions_come_and_go(name: str, other: OtherSession) -> None:
    from django_advisory_lock import sessions

    def work() -> None:
        with advisory_lock(name):
            pass
        with transaction.atomic():
            advisory_lock(name).acquire()

    before = len(sessions._sessions)
    for _ in range(5):
        Thread(work).result()
    gc.collect()
    assert len(sessions._sessions) <= before


def test_a_lock_in_each_of_many_threads(name: str, other: OtherSession) -> None:
    """Case 98: nothing is left of a thread that ended."""
    barrier = threading.Barrier(8)

    def work(number: int) -> int:
        with advisory_lock(name, number):
            barrier.wait(10)
            return backend_pid()

    threads = [Thread(partial(work, number)) for number in range(8)]
    pids = {thread.result() for thread in threads}
    assert len(pids) == 8
    wait_until(lambda: other.one("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)", [list(pids)]) == 0)
