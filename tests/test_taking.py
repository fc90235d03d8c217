"""Waiting, and whatever can go wrong while a lock is taken: after any outcome the server holds what we say it holds."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    InternalError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.test import override_settings

from django_advisory_lock import (
    LockDeadlock,
    LockHandle,
    LockKey,
    LockNotAcquired,
    LockTableFull,
    LockTimeout,
    PoolerDetected,
    advisory_lock,
    lock_key,
    try_advisory_lock,
)
from tests.support import OtherSession, Thread, backend_pid, output, spawn, statements, value, wait_until
from tests.testapp.models import Account, Country

Execute = Callable[..., Any]


@contextmanager
def wrapped(before: Callable[[str], None] | None = None, after: Callable[[str], None] | None = None) -> Iterator[None]:
    """Call a function with each statement that goes through Django's cursor, before or after it is executed."""

    def wrapper(execute: Execute, sql: str, params: Any, many: bool, context: Any) -> Any:
        if before:
            before(sql)
        result = execute(sql, params, many, context)
        if after:
            after(sql)
        return result

    with connection.execute_wrapper(wrapper):
        yield


def taken_and_released(name: str, **options: Any) -> bool:
    with advisory_lock(name, **options) as lock:
        return lock.acquired


class TestTimeout:
    @pytest.mark.parametrize("timeout", [0.2, timedelta(milliseconds=200)], ids=str)
    @pytest.mark.parametrize("poll_interval", [None, 0.02])
    def test_it_ends_the_wait(
        self, timeout: float | timedelta, poll_interval: float | None, name: str, other: OtherSession
    ) -> None:
        """Case 73: in time, with all that one needs to know."""
        key = lock_key(name)
        other.take(key)
        start = time.monotonic()
        with pytest.raises(LockTimeout) as caught:
            advisory_lock(name, timeout=timeout, poll_interval=poll_interval).acquire()
        assert 0.2 <= time.monotonic() - start < 5
        error = caught.value
        assert isinstance(error, TimeoutError)
        assert not isinstance(error, DatabaseError)
        assert (error.key, error.using) == (key, "default")
        assert error.waited is not None
        assert error.waited >= 0.2
        for part in (name, str(key.args[0]), f"pid {other.pid} (other-session), idle for", "0.2 s"):
            assert part in str(error)
        assert (error.__cause__ is None) is (poll_interval is not None)

    def test_zero_is_exactly_one_try(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        with statements(2), pytest.raises(LockTimeout):  # the try, and who holds it
            advisory_lock(name, timeout=0).acquire()

    def test_what_a_wait_costs(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        with statements(3), pytest.raises(LockTimeout):
            advisory_lock(name, timeout=0.01).acquire()
        with transaction.atomic(), statements(5), pytest.raises(LockTimeout):
            advisory_lock(name, timeout=0.01).acquire()

    @pytest.mark.parametrize(("inside", "count"), [(False, 2), (True, 4)])
    def test_what_a_wait_that_ends_well_costs(self, inside: bool, count: int, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)

        def wait() -> bool:
            with statements(count):
                lock = advisory_lock(name, timeout=10).acquire()
            lock.release()
            return bool(lock)

        def work() -> bool:
            if not inside:
                return wait()
            with transaction.atomic():
                return wait()

        waiting = Thread(work)
        other.wait_for_waiters(key)
        other.drop(key)
        assert waiting.result() is True

    def test_a_tiny_timeout_is_not_for_ever(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        for timeout in (0.0004, 1e-9):
            with pytest.raises(LockTimeout):
                advisory_lock(name, timeout=timeout).acquire()

    def test_a_huge_timeout_is_no_error(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)
        waiting = Thread(lambda: taken_and_released(name, timeout=10**9))
        other.wait_for_waiters(key)
        other.drop(key)
        assert waiting.result() is True

    @pytest.mark.parametrize("scope", ["auto", "session"])
    def test_inside_atomic_the_transaction_stays_usable(self, scope: Any, name: str, other: OtherSession) -> None:
        """Case 9."""
        other.take(lock_key(name))
        with transaction.atomic():
            account = Account.objects.create(name=name)
            with pytest.raises(LockTimeout):
                advisory_lock(name, timeout=0.05, scope=scope).acquire()
            account.balance = 7
            account.save()
        assert Account.objects.get(name=name).balance == 7
        Account.objects.filter(name=name).delete()

    def test_a_try_in_a_transaction_opens_no_savepoint(self, name: str, other: OtherSession) -> None:
        """Case 9."""
        other.take(lock_key(name))
        with transaction.atomic():
            with statements(1):
                assert not try_advisory_lock(name).acquire()
            with statements(2), pytest.raises(LockTimeout):
                advisory_lock(name, timeout=0).acquire()

    def test_the_holder_may_be_gone_when_it_is_asked_for(self, name: str, other: OtherSession) -> None:
        """Case 62."""
        key = lock_key(name)
        other.take(key)

        def free_before_look(sql: str) -> None:
            if "application_name" in sql:
                other.drop(key)

        with wrapped(before=free_before_look), pytest.raises(LockTimeout, match="holder unknown"):
            advisory_lock(name, timeout=0).acquire()

    def test_an_exclusive_request_ahead_of_a_shared_one_is_named(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key, shared=True)
        waiting = Thread(lambda: taken_and_released(name))
        other.wait_for_waiters(key)
        with pytest.raises(LockTimeout, match="exclusive request is queued ahead: pid"):
            advisory_lock(name, shared=True, timeout=0).acquire()
        other.drop(key, shared=True)
        waiting.result()

    def test_what_the_caller_holds_is_not_in_its_own_way(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name), shared=True)
        with (
            advisory_lock(name, shared=True),
            pytest.raises(LockTimeout, match=f"held by pid {other.pid} .other") as caught,
        ):
            advisory_lock(name, timeout=0).acquire()
        assert "this process" not in str(caught.value)

    def test_shared_inside_ones_own_exclusive_lock_while_others_wait(self, name: str, other: OtherSession) -> None:
        """Before PostgreSQL 18 a try answers no there, although the lock is there for the asking."""
        key = lock_key(name)
        with advisory_lock(name):
            waiting = Thread(lambda: taken_and_released(name))
            other.wait_for_waiters(key)
            with try_advisory_lock(name, shared=True) as lock:
                assert lock
        assert waiting.result() is True

    def test_the_longest_ones(self, name: str, other: OtherSession) -> None:
        """More than PostgreSQL's setting can hold, and more milliseconds than a float can."""
        key = lock_key(name)
        for timeout in (2**31 / 1000, sys.float_info.max):
            other.take(key)
            lock = advisory_lock(name, timeout=timeout)
            waiting = Thread(lambda lock=lock: lock.acquire().release())  # type: ignore[misc]
            wait_until(lambda: other.waiters(key) == 1, "waits")
            other.drop(key)
            waiting.result()


class TestLockTimeoutSetting:
    """Case 11: the session's own `lock_timeout` neither ends our wait nor is it ever changed."""

    @pytest.mark.parametrize("own", ["0", "7s"])
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("busy", [False, True])
    @pytest.mark.parametrize("alias", ["default", "binding"])
    def test_it_is_given_back(
        self, own: str, inside: bool, busy: bool, alias: str, name: str, other: OtherSession
    ) -> None:
        def take() -> None:
            if busy:
                with pytest.raises(LockTimeout):
                    advisory_lock(name, timeout=0.02, using=alias).acquire()
            else:
                advisory_lock(name, timeout=5, using=alias).acquire().release()
            assert value("SHOW lock_timeout", alias=alias) == own

        if busy:
            other.take(lock_key(name))
        value("SELECT set_config('lock_timeout', %s, false)", [own], alias)
        if inside:
            with transaction.atomic(using=alias):
                take()
        else:
            take()
        assert value("SHOW lock_timeout", alias=alias) == own

    def test_it_is_given_back_after_a_wait(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)

        def wait() -> list[str]:
            value("SELECT set_config('lock_timeout', '7s', false)")
            with transaction.atomic(), advisory_lock(name, timeout=10):
                inside = value("SHOW lock_timeout")
            return [inside, value("SHOW lock_timeout")]

        waiting = Thread(wait)
        other.wait_for_waiters(key)
        other.drop(key)
        assert waiting.result() == ["7s", "7s"]

    @pytest.mark.parametrize("inside", [False, True])
    def test_no_timeout_overrides_it(self, inside: bool, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)
        timed_out = threading.Event()

        def wait() -> None:
            value("SELECT set_config('lock_timeout', '30ms', false)")
            with wrapped(before=lambda sql: timed_out.set() if "set_config" in sql else None):
                if inside:
                    with transaction.atomic(), advisory_lock(name):
                        assert value("SHOW lock_timeout") == "30ms"
                else:
                    with advisory_lock(name):
                        assert value("SHOW lock_timeout") == "30ms"

        waiting = Thread(wait)
        assert timed_out.wait(10)  # the session's own timeout has passed, or was never used
        other.wait_for_waiters(key)
        other.drop(key)
        waiting.result()


class TestPolling:
    def test_it_waits_without_a_snapshot(self, name: str, other: OtherSession) -> None:
        """Case 25, 69."""
        key = lock_key(name)
        other.take(key)
        tries = threading.Semaphore(0)

        def wait() -> bool:
            with wrapped(after=lambda sql: tries.release()):
                return taken_and_released(name, poll_interval=0.01)

        waiting = Thread(wait)
        for _ in range(3):
            assert tries.acquire(timeout=10)
        assert other.waiters(key) == 0
        other.drop(key)
        assert waiting.result() is True

    def test_it_does_not_flood_the_server(self, name: str, other: OtherSession) -> None:
        """Case 25: some five tries in the time of five pauses, each once more or less for the jitter."""
        other.take(lock_key(name))
        tries: list[float] = []
        start = time.monotonic()
        with wrapped(after=lambda sql: tries.append(time.monotonic()) if "pg_try" in sql else None):
            with pytest.raises(LockTimeout):
                advisory_lock(name, timeout=0.5, poll_interval=0.1).acquire()
        assert 4 <= len(tries) <= 12
        assert tries[-1] - start >= 0.5, "no last try at the deadline"

    def test_create_index_concurrently_under_the_lock(self, name: str, other: OtherSession) -> None:
        """Case 69: a polling waiter has no snapshot that the index would wait for; one in the server's queue has."""
        key = lock_key(name)
        polled = threading.Event()

        def wait(**options: float) -> bool:
            with wrapped(after=lambda sql: polled.set()):
                return taken_and_released(name, **options)

        def index_under_lock() -> None:
            other.raw.execute("SET deadlock_timeout = '100ms'")
            other.raw.execute("CREATE INDEX CONCURRENTLY test_index ON testapp_account (name)")

        other.take(key)
        polling = Thread(lambda: wait(poll_interval=0.01))
        assert polled.wait(10)
        index_under_lock()
        other.drop(key)
        assert polling.result() is True
        other.raw.execute("DROP INDEX test_index")
        other.take(key)
        queued = Thread(wait)
        other.wait_for_waiters(key)
        try:
            with pytest.raises(Exception, match="deadlock detected"):  # the negative control
                index_under_lock()
        finally:
            other.raw.execute("DROP INDEX IF EXISTS test_index")
            other.drop(key)
        queued.result()


class TestDeadlocks:
    def test_one_that_the_server_finds(self, name: str, other: OtherSession) -> None:
        """Case 21: one typed error, the victim's locks freed, the other one proceeds."""
        one, two = lock_key(name, 1), lock_key(name, 2)
        other.take(two)
        other.raw.execute("SET deadlock_timeout = '1min'")  # so that the victim is ours
        with pytest.raises(LockDeadlock, match="deadlock") as caught, advisory_lock(one):
            crossing = Thread(lambda: other.wait(one))
            watch = OtherSession()
            watch.wait_for_waiters(one)
            watch.close()
            with advisory_lock(two):
                pytest.fail("got in")
        assert isinstance(caught.value.__cause__, OperationalError)
        crossing.result()
        assert other.drop(one)
        assert other.drop(two)

    def test_one_inside_atomic_leaves_the_transaction_usable(self, name: str, other: OtherSession) -> None:
        one, two = lock_key(name, 1), lock_key(name, 2)
        other.take(two)
        other.raw.execute("SET deadlock_timeout = '1min'")
        with transaction.atomic():
            advisory_lock(one).acquire()
            crossing = Thread(lambda: other.wait(one))
            watch = OtherSession()
            watch.wait_for_waiters(one)
            watch.close()
            with pytest.raises(LockDeadlock):
                advisory_lock(two).acquire()
            assert backend_pid()
        crossing.result()
        assert other.drop(one)
        assert other.drop(two)

    def test_two_who_go_from_shared_to_exclusive(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key, shared=True)
        other.raw.execute("SET deadlock_timeout = '1min'")
        with advisory_lock(name, shared=True):
            crossing = Thread(lambda: other.wait(key))
            watch = OtherSession()
            watch.wait_for_waiters(key)
            watch.close()
            with pytest.raises(LockDeadlock):
                advisory_lock(name, timeout=10).acquire()
        crossing.result()
        assert other.drop(key)
        assert other.drop(key, shared=True)

    def test_a_wait_for_oneself_on_a_session_that_was_swapped(self, name: str, other: OtherSession) -> None:
        connection.ensure_connection()
        old = connection.connection
        lock = advisory_lock(name).acquire()
        connection.connection = None  # still open, but no longer Django's
        try:
            with pytest.raises(LockDeadlock, match="the caller itself"):
                advisory_lock(name).acquire()
            with pytest.raises(LockDeadlock, match="the caller itself"):
                advisory_lock(name, timeout=5).acquire()
            assert not try_advisory_lock(name).acquire()
        finally:
            connection.close()
            connection.connection = old
        lock.release()


class TestLateGrants:
    """After a failed wait the lock may be there all the same: kept where only the time was up, freed otherwise."""

    @pytest.mark.parametrize("timeout", [0.001, 0.002])
    @pytest.mark.parametrize("inside", [False, True])
    def test_a_timeout_beside_the_grant(self, timeout: float, inside: bool, name: str, other: OtherSession) -> None:
        """Six threads hammer one key: 55P03 comes although the lock was granted in a good part of the timeouts."""
        end = time.monotonic() + 2
        counts = {"got": 0, "busy": 0}
        inside_now: list[int] = []
        collisions: list[int] = []

        def attempt() -> None:
            try:
                with advisory_lock(name, timeout=timeout, scope="session"):
                    inside_now.append(1)
                    collisions.append(len(inside_now))
                    counts["got"] += 1
                    inside_now.pop()
            except LockTimeout:
                counts["busy"] += 1
                with connection.cursor() as cursor:
                    cursor.execute(
                        "SELECT count(*) FROM pg_locks"
                        " WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()"
                    )
                    assert cursor.fetchone()[0] == 0, "reported as busy, and kept"

        def hammer() -> None:
            while time.monotonic() < end:
                if inside:
                    with transaction.atomic():
                        attempt()
                else:
                    attempt()

        for thread in [Thread(hammer) for _ in range(6)]:
            thread.result()
        assert max(collisions) == 1
        assert counts["got"] > 0
        assert counts["busy"] > 0
        assert other.holders(lock_key(name)) == 0

    @pytest.mark.parametrize("timeout", [5, None])
    def test_a_timeout_beside_the_grant_keeps_the_lock(
        self, timeout: float | None, name: str, other: OtherSession
    ) -> None:
        """The same made certain: the error, by our timeout or the session's own, comes when the lock is there."""
        key = lock_key(name)
        other.take(key)

        def granted_then_timed_out(execute: Execute, sql: str, params: Any, many: bool, context: Any) -> Any:
            if "pg_advisory_lock" in sql:
                other.drop(key)
                execute(sql, params, many, context)
                with connection.wrap_database_errors:
                    connection.connection.execute("DO $$ BEGIN RAISE SQLSTATE '55P03'; END $$")
            return execute(sql, params, many, context)

        with connection.execute_wrapper(granted_then_timed_out), advisory_lock(name, timeout=timeout) as lock:
            assert lock
            assert lock.is_held()
            assert not other.is_free(key)
        assert other.is_free(key)

    def test_an_interrupt_when_the_handle_gets_the_lock(
        self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(LockHandle, "_keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            advisory_lock(name).acquire()
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, RuntimeError])
    @pytest.mark.parametrize("make", [advisory_lock, try_advisory_lock])
    @pytest.mark.parametrize("inside", [False, True])
    def test_an_interrupt_beside_the_grant(
        self, interrupt: type[BaseException], make: Any, inside: bool, name: str, other: OtherSession
    ) -> None:
        """Case 67b."""

        def raise_it(sql: str) -> None:
            if "pg_" in sql:
                raise interrupt

        def take() -> None:
            with wrapped(after=raise_it), make(name, scope="session"):
                pytest.fail("got in")

        with pytest.raises(interrupt):
            if inside:
                with transaction.atomic():
                    take()
            else:
                take()
        assert other.is_free(lock_key(name))
        with make(name) as lock:
            assert lock

    def test_an_interrupt_in_a_nested_take(self, name: str, other: OtherSession) -> None:
        """Whether it was granted a second time nobody can tell: the last release frees the lock for certain."""
        key = lock_key(name)

        def raise_it(sql: str) -> None:
            raise KeyboardInterrupt

        with advisory_lock(name) as outer:
            with pytest.raises(KeyboardInterrupt), wrapped(after=raise_it):
                advisory_lock(name).acquire()
            assert outer.is_held()
            assert not other.is_free(key)
        assert other.is_free(key)
        with advisory_lock(name):
            with pytest.raises(KeyboardInterrupt), wrapped(before=raise_it):
                advisory_lock(name).acquire()
            assert not other.is_free(key)
        assert other.is_free(key)

    def test_a_doubt_leaves_no_warning_on_the_server(self, name: str, other: OtherSession) -> None:
        """Whether there is something to unlock is looked at first."""
        notices: list[str | None] = []
        connection.ensure_connection()
        connection.connection.add_notice_handler(lambda diag: notices.append(diag.message_primary))

        def raise_it(sql: str) -> None:
            raise KeyboardInterrupt

        other.take(lock_key(name))
        with pytest.raises(KeyboardInterrupt), wrapped(after=raise_it):
            try_advisory_lock(name).acquire()
        assert notices == []
        other.drop(lock_key(name))

    @pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("arguments", ["", ", timeout=60", ", poll_interval=0.05"])
    def test_a_process_that_is_stopped_while_it_waits(
        self, signal_number: signal.Signals, arguments: str, name: str, other: OtherSession
    ) -> None:
        """Case 67a: it ends soon, and no waiter is left."""
        key = lock_key(name)
        other.take(key)
        process = spawn(
            "from django_advisory_lock import advisory_lock\n"
            f"print('go', flush=True)\nadvisory_lock('{name}'{arguments}).acquire()",
            # A server learns only where it looks that a client is gone: SIGTERM ends Python without a word.
            PGOPTIONS="-c client_connection_check_interval=100ms",
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "go\n"
            if "poll" not in arguments:
                other.wait_for_waiters(key)
            process.send_signal(signal_number)
            process.communicate(timeout=20)
        finally:
            process.kill()
        assert process.returncode != 0
        wait_until(lambda: other.waiters(key) == 0, "no waiter")

    def test_a_cancelled_wait(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)
        pids: list[int] = []

        def wait() -> None:
            pids.append(backend_pid())
            with pytest.raises(LockNotAcquired, match="cancelled") as caught:
                advisory_lock(name).acquire()
            assert not isinstance(caught.value, LockTimeout)
            assert isinstance(caught.value.__cause__, OperationalError)
            assert backend_pid() == pids[0]

        waiting = Thread(wait)
        other.wait_for_waiters(key)
        other.cancel(pids[0])
        waiting.result()

    def test_a_statement_timeout(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        value("SELECT set_config('statement_timeout', '50ms', false)")
        with pytest.raises(LockNotAcquired, match="statement_timeout"):
            advisory_lock(name).acquire()
        connection.close()

    def test_a_session_that_is_killed_while_it_waits(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)
        pids: list[int] = []

        def wait() -> None:
            pids.append(backend_pid())
            with pytest.raises(OperationalError):
                advisory_lock(name).acquire()
            assert backend_pid() != pids[0]  # the alias works again

        waiting = Thread(wait)
        other.wait_for_waiters(key)
        other.kill(pids[0])
        waiting.result()

    def test_a_session_that_cannot_be_asked_is_closed(self, name: str, other: OtherSession) -> None:
        """The take fails when it was granted, in a transaction that has no savepoint and is failed by then."""
        key = lock_key(name)

        def fail_after(sql: str) -> None:
            if "pg_try" in sql:
                with pytest.raises(Exception, match="division"):
                    connection.connection.execute("SELECT 1/0")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), transaction.atomic():
            with wrapped(after=fail_after):
                advisory_lock(name, scope="session").acquire()
        other.wait_until_free(key)
        assert backend_pid()

    def test_what_was_never_sent_frees_nothing(self, name: str, other: OtherSession) -> None:
        """The application may hold the same key by SQL of its own, as while an older helper is replaced."""

        def forbid(sql: str) -> None:
            raise RuntimeError

        key = lock_key(name)
        value("SELECT pg_advisory_lock(%s) IS NULL", key.args)
        with pytest.raises(RuntimeError), wrapped(before=forbid):
            advisory_lock(name).acquire()
        with transaction.atomic():
            transaction.set_rollback(True)
            with pytest.raises(transaction.TransactionManagementError):
                advisory_lock(name, scope="session").acquire()
        assert not other.is_free(key)
        assert value("SELECT pg_advisory_unlock(%s)", key.args)

    def test_a_try_that_is_cancelled_lets_no_transaction_end_as_if_all_were_well(
        self, name: str, other: OtherSession
    ) -> None:
        def cancel(sql: str) -> None:
            if "pg_try" in sql:
                with connection.wrap_database_errors:
                    connection.connection.execute("DO $$ BEGIN RAISE SQLSTATE '57014'; END $$")

        with advisory_lock(name, "outer") as outer:
            with transaction.atomic():
                Account.objects.create(name=name)
                with pytest.raises(LockNotAcquired), wrapped(before=cancel):
                    advisory_lock(name, timeout=1, poll_interval=0.01).acquire()
                with pytest.raises(transaction.TransactionManagementError):
                    backend_pid()
            with transaction.atomic(), pytest.raises(LockNotAcquired), wrapped(after=cancel):
                try_advisory_lock(name, scope="session").acquire()
            assert outer.is_held(), "a failed try cost another lock its session"
        assert not Account.objects.filter(name=name).exists()
        assert other.is_free(lock_key(name))

    def test_a_signal_handler_that_raises_leaves_no_waiter_behind(self, name: str, other: OtherSession) -> None:
        """psycopg cancels for KeyboardInterrupt only, and a server does not notice that a waiter's client is gone."""

        class TimeLimitExceeded(Exception):
            pass

        def raise_it(*args: object) -> None:
            raise TimeLimitExceeded

        key = lock_key(name)
        other.take(key)
        with connection.cursor() as cursor:
            cursor.execute("SET client_connection_check_interval = 0")  # as servers are delivered
        before = signal.signal(signal.SIGALRM, raise_it)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeLimitExceeded):
                advisory_lock(name).acquire()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        wait_until(lambda: other.waiters(key) == 0, "no waiter")
        assert backend_pid()

    def test_where_django_refuses_to_send_anything_the_session_stays_too(self, name: str, other: OtherSession) -> None:
        Country.objects.create(code=name)
        with advisory_lock(name) as outer, transaction.atomic():
            with pytest.raises(IntegrityError):
                Country.objects.create(code=name)
            with pytest.raises(transaction.TransactionManagementError):
                advisory_lock(name, "another", scope="session").acquire()
            transaction.set_rollback(True)
        assert not outer.lost.is_set()
        Country.objects.filter(code=name).delete()

    def test_in_a_failed_transaction_nothing_is_begun_and_the_session_stays(
        self, name: str, other: OtherSession
    ) -> None:
        with transaction.atomic():
            pid = backend_pid()
            with pytest.raises(InternalError, match="aborted"), transaction.atomic(), connection.cursor() as cursor:
                with pytest.raises(DatabaseError):
                    cursor.execute("SELECT 1/0")
                advisory_lock(name, scope="session").acquire()
            assert backend_pid() == pid

    def test_a_full_lock_table(self, name: str, other: OtherSession) -> None:
        """The server says 53200 and names the setting; made here by an error of that code, with the server's hint."""

        def full(sql: str) -> None:
            with connection.wrap_database_errors:
                connection.connection.execute(
                    "DO $$ BEGIN RAISE SQLSTATE '53200' USING"
                    " HINT = 'You might need to increase \"max_locks_per_transaction\".'; END $$"
                )

        with pytest.raises(LockTableFull, match="new connections fail too"), wrapped(before=full):
            advisory_lock(name).acquire()

        def no_memory(sql: str) -> None:
            with connection.wrap_database_errors:
                connection.connection.execute("DO $$ BEGIN RAISE SQLSTATE '53200'; END $$")

        with pytest.raises(OperationalError), wrapped(before=no_memory):
            advisory_lock(name).acquire()


class TestPooler:
    """A statement that reaches another server session than its connection's own: made here by the guard's pid."""

    @pytest.fixture
    def misrouted(self, other: OtherSession) -> Iterator[None]:
        from django_advisory_lock.sessions import attach

        connection.ensure_connection()
        attach(connections["default"]).guard = other.pid
        yield
        connection.close()

    @pytest.mark.usefixtures("misrouted")
    @pytest.mark.parametrize("timeout", [None, 0, 5])
    def test_a_session_lock_is_refused_and_nothing_is_taken(
        self, timeout: float | None, name: str, other: OtherSession
    ) -> None:
        """Case 37."""
        with statements(1), pytest.raises(PoolerDetected, match="ADVISORY_LOCK_DATABASE") as caught:
            advisory_lock(name, timeout=timeout).acquire()
        assert (caught.value.key, caught.value.using) == (lock_key(name), "default")
        with pytest.raises(PoolerDetected):
            try_advisory_lock(name).acquire()
        assert other.is_free(lock_key(name))

    @pytest.mark.usefixtures("misrouted")
    def test_the_waiting_statement_is_guarded_too(self, name: str, other: OtherSession) -> None:
        """A pooler that switches between the try and the wait."""
        from django_advisory_lock.sessions import attach

        session = attach(connections["default"])
        wrong, session.guard = session.guard, backend_pid()
        other.take(lock_key(name))

        def switch(sql: str) -> None:
            if "pg_try" in sql:
                session.guard = wrong

        for inside in (False, True):
            session.guard = backend_pid()
            with pytest.raises(PoolerDetected), wrapped(after=switch):
                if inside:
                    with transaction.atomic():
                        advisory_lock(name, timeout=5, scope="session").acquire()
                else:
                    advisory_lock(name, timeout=5).acquire()

    @pytest.mark.usefixtures("misrouted")
    def test_a_transaction_lock_works(self, name: str, other: OtherSession) -> None:
        """Case 37."""
        with transaction.atomic(), advisory_lock(name) as lock:
            assert lock.is_held()
            assert not other.is_free(lock.key)
        assert other.is_free(lock.key)

    @pytest.mark.usefixtures("misrouted")
    @override_settings(ADVISORY_LOCK_SESSION_POOLER=["default"])
    def test_a_pooler_in_session_mode_is_not_guarded(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            assert lock.is_held()
            assert not other.is_free(lock.key)
        assert other.is_free(lock.key)


def test_a_slow_wait_is_logged(name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
    key = lock_key(name)
    other.take(key)
    with override_settings(ADVISORY_LOCK_SLOW_WAIT=0):
        waiting = Thread(lambda: taken_and_released(name))
        other.wait_for_waiters(key)
        wait_until(
            lambda: other.one(
                "SELECT now() - min(query_start) > '20ms' FROM pg_stat_activity"
                " WHERE wait_event = 'advisory' AND datname = current_database()"
            )
        )
        other.drop(key)
        waiting.result()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert name in caplog.text


def test_a_busy_lock_is_logged(name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
    other.take(lock_key(name))
    with caplog.at_level("INFO", "django_advisory_lock"):
        assert not try_advisory_lock(name).acquire()
    assert name in caplog.text


def test_an_uncontended_lock_in_another_process(name: str, other: OtherSession) -> None:
    """Case 45: another process derives the same key, and is kept out."""
    other.take(lock_key(name))
    code = f"from django_advisory_lock import *\nprint(bool(try_advisory_lock('{name}').acquire()))"
    assert output(spawn(code, PYTHONHASHSEED="1")) == "False\n"
    other.drop(lock_key(name))
    assert output(spawn(code, PYTHONHASHSEED="2")) == "True\n"


def test_keys_of_both_forms_never_meet(other: OtherSession) -> None:
    with advisory_lock(8), try_advisory_lock(LockKey.pair(0, 8)) as lock:
        assert lock
