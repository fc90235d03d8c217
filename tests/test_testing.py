"""Helpers for the tests of projects."""

from __future__ import annotations

import asyncio
import gc
import threading
import unittest
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import DatabaseError, OperationalError, close_old_connections, connections, transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase, override_settings
from django.utils.connection import ConnectionDoesNotExist

from django_advisory_lock import (
    AdvisoryLockError,
    LockKey,
    LockLost,
    LockTimeout,
    LockUnsupported,
    PoolerDetected,
    advisory_lock,
    lock_key,
    model_key,
    testing,
    try_advisory_lock,
)
from django_advisory_lock.testing import (
    HeldElsewhere,
    assert_lock_free,
    assert_lock_held,
    assert_no_locks,
    hold_lock,
)
from tests.bouncer import bouncer
from tests.support import (
    LIMIT,
    OtherSession,
    Thread,
    backend_pid,
    extra_alias,
    in_child,
    output,
    spawn,
    statements,
    value,
    wait_until,
)
from tests.testapp.models import Account

HELPERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'hold_lock'"


@pytest.fixture(autouse=True)
def _no_helper_left(other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Case 98: whatever happens, nothing is left that would keep a test database from being dropped."""
    monkeypatch.setattr(testing, "GRACE", 0.05)
    yield
    wait_until(lambda: other.one(HELPERS) == 0, "the end of the helpers' sessions")


def run_in(kind: type[SimpleTestCase], function: Callable[[], Any]) -> None:
    """Run a function as the one test of a test case of Django."""

    class Case(kind):  # type: ignore[misc, valid-type]
        available_apps = None

        def test(self) -> None:
            function()

        async def atest(self) -> None:
            await function()

    result = unittest.TestResult()
    unittest.TestSuite([Case("atest" if iscoroutinefunction(function) else "test")]).run(result)
    assert [text for _, text in (*result.errors, *result.failures)] == []
    assert result.testsRun == 1


def failure(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return what an assertion says."""
    with pytest.raises(AssertionError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def enter(held: HeldElsewhere) -> str:
    """Return why a key cannot be held."""
    return failure(held.__enter__)


class TestHoldLock:
    def test_another_session_holds_it(self, name: str, other: OtherSession) -> None:
        with statements(0), hold_lock(name) as held:
            assert held.key == lock_key(name)
            assert held.pid == other.holder(held.key)
        with hold_lock(name) as held:
            assert held.pid != backend_pid()
            assert not try_advisory_lock(name).acquire()
            with pytest.raises(LockTimeout, match=rf"held by pid {held.pid} \(hold_lock\)"):
                advisory_lock(name, timeout=0).acquire()
        with advisory_lock(name, timeout=0):
            pass

    @pytest.mark.parametrize(
        ("parts", "key"),
        [
            ((LockKey.pair(-7, 8),), LockKey.pair(-7, 8)),
            ((-42,), LockKey((-42,))),
            ((("hold", 42),), lock_key("hold", 42)),
            ((Account(pk=42),), model_key(Account, pk=42)),
        ],
        ids=["pair", "int", "tuple", "instance"],
    )
    @pytest.mark.parametrize("shared", [False, True])
    def test_every_key(self, parts: Any, key: LockKey, shared: bool, other: OtherSession) -> None:
        with hold_lock(*parts, shared=shared) as held:
            assert held.key == key
            assert not other.is_free(key)
            assert other.holder(key) == held.pid
        assert other.is_free(key)

    def test_the_namespace_of_its_block(self, name: str, other: OtherSession) -> None:
        held = hold_lock(name)
        with override_settings(ADVISORY_LOCK_NAMESPACE="tenant"), held:
            assert not other.is_free(lock_key(name))
        assert held.key.name == f"tenant/{name}"

    def test_shared(self, name: str) -> None:
        with hold_lock(name, shared=True), hold_lock(name, shared=True):
            assert try_advisory_lock(name, shared=True).acquire().release() is None
            assert not try_advisory_lock(name).acquire()

    def test_busy(self, name: str, other: OtherSession) -> None:
        """At once, and no error that code under test raises too, which a test may be waiting for."""
        other.take(lock_key(name))
        with pytest.raises(AssertionError) as caught:
            hold_lock(name).__enter__()
        assert str(caught.value).startswith(
            f"hold_lock() found {name!r} ({lock_key(name).args[0]}) on 'default' busy:"
            f" held by pid {other.pid} (other-session), idle for "
        )
        assert not isinstance(caught.value, (AdvisoryLockError, DatabaseError))

    def test_busy_with_a_lock_of_the_test_itself(self, name: str) -> None:
        with advisory_lock(name):
            assert ", a session lock of this process." in enter(hold_lock(name))
        with transaction.atomic(), advisory_lock(name, shared=True):
            assert ", a transaction lock of this process." in enter(hold_lock(name))
        with hold_lock(name) as held:
            assert f"held by pid {held.pid} (hold_lock), idle for " in enter(hold_lock(name))

    def test_a_queue_ahead_of_it(self, name: str, other: OtherSession) -> None:
        """A shared lock is not to be had either, where an exclusive one is waited for."""
        with hold_lock(name, shared=True) as held:
            waiting = Thread(lambda: advisory_lock(name).acquire().release())
            held.wait_for_waiters()
            assert "waited for by pid" in enter(hold_lock(name, shared=True))
        waiting.result()

    def test_an_error_in_the_block(self, name: str, other: OtherSession) -> None:
        with pytest.raises(ZeroDivisionError), hold_lock(name):
            1 / 0  # noqa: B018
        assert other.is_free(lock_key(name))

    def test_released_early(self, name: str, other: OtherSession) -> None:
        with hold_lock(name) as held:
            held.release()
            assert other.is_free(held.key)
            held.release()
            wait_until(lambda: other.one(HELPERS) == 0)

    def test_again(self, name: str, other: OtherSession) -> None:
        held = hold_lock(name)
        for _ in range(2):
            with held:
                assert repr(held).endswith(f"held by pid {held.pid}>")
                with pytest.raises(RuntimeError, match="entered already"):
                    held.__enter__()
            assert repr(held).endswith("over>")

    def test_lost_on_the_way(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        """Code under test may have had the key: a test that goes on as if nothing had happened proves nothing."""
        with pytest.raises(
            AssertionError, match=rf"hold_lock\(\) lost '{name}' on the way: its session, pid \d+, ended"
        ):
            with hold_lock(name) as held:
                other.kill(held.pid)
        with pytest.raises(ZeroDivisionError) as caught, hold_lock(name) as held:
            other.kill(held.pid)
            1 / 0  # noqa: B018
        said = f"hold_lock() lost {name!r} on the way: its session, pid {held.pid}, ended."
        assert getattr(caught.value, "__notes__", [said]) == [said]
        assert [record.getMessage() for record in caplog.records] == [
            f"At the end of a block that raised ZeroDivisionError: {said}"
        ]

    def test_unlocked_by_somebody_else(self, name: str, other: OtherSession) -> None:
        held = hold_lock(name).__enter__()
        held._raw.execute("SELECT pg_advisory_unlock_all()")  # type: ignore[union-attr]
        assert "lost" in failure(held.release)

    def test_a_forked_child_leaves_it_alone(self, name: str, other: OtherSession) -> None:
        with hold_lock(name) as held:
            assert in_child(held.release) == "None"
            assert not other.is_free(held.key)
            assert_lock_held(name)

    def test_dropped(self, name: str, other: OtherSession) -> None:
        held = hold_lock(name).__enter__()
        with pytest.warns(ResourceWarning):
            del held
            gc.collect()
        other.wait_until_free(lock_key(name))

    def test_what_cannot_be_a_key(self) -> None:
        with pytest.raises(ValueError, match="at least one part"):
            hold_lock()
        with pytest.raises(TypeError, match="a callable belongs into a decorator"):
            hold_lock(lambda: "x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="shared is True or False"):
            hold_lock("x", shared="yes")  # type: ignore[arg-type]


class TestWaiters:
    def test_how_many(self, name: str) -> None:
        with hold_lock(name) as held:
            waiting = [Thread(lambda: advisory_lock(name, timeout=LIMIT).acquire().release()) for _ in range(2)]
            held.wait_for_waiters(2, timeout=None)
            held.release()
            for thread in waiting:
                thread.result()

    @pytest.mark.parametrize("timeout", [0, 0.02, timedelta(milliseconds=20)], ids=str)
    def test_nobody(self, timeout: Any, name: str) -> None:
        with hold_lock(name) as held:
            assert failure(held.wait_for_waiters, timeout=timeout).startswith(f"1 should wait for {name!r}, and 0 did")

    def test_outside_of_its_block(self, name: str) -> None:
        with pytest.raises(RuntimeError, match="inside its block"):
            hold_lock(name).wait_for_waiters()


class TestWhere:
    """The database that the alias uses now, whatever its settings are; never its connection or its pool."""

    @pytest.mark.parametrize("alias", ["same", "binding", "prepared", "serializable", "persistent", "healthy"])
    def test_aliases(self, alias: str, name: str, other: OtherSession) -> None:
        with statements(0, alias), hold_lock(name, using=alias):
            assert not other.is_free(lock_key(name))
            assert_lock_held(name, using=alias)

    def test_a_pool_without_a_place(self, name: str, other: OtherSession) -> None:
        """Case 98."""
        with connections["pooled"].cursor() as cursor, hold_lock(name, using="pooled"):
            cursor.execute("SELECT 1")
            assert_lock_held(name, using="pooled")
            assert not other.is_free(lock_key(name))
        connections["pooled"].close()

    def test_another_database(self, name: str, other: OtherSession) -> None:
        with hold_lock(name, using="other"):
            assert_lock_held(name, using="other")
            assert_lock_free(name)
            assert_no_locks()
            with override_settings(ADVISORY_LOCK_DATABASE="other"):
                assert_lock_held(name)
                assert "busy" in enter(hold_lock(name))

    def test_a_database_that_is_dropped_afterwards(self, name: str, other: OtherSession) -> None:
        """Case 98: also where its alias was opened with another name."""
        database = f"test_dropped_{uuid.uuid4().hex}"
        other.raw.execute(f"CREATE DATABASE {database}")
        try:
            with extra_alias("dropped"):
                connections["dropped"].settings_dict["NAME"] = database
                for _ in range(5):
                    with hold_lock(name, using="dropped"):
                        assert_lock_held(name, using="dropped")
                        assert_lock_free(name)
                assert_no_locks("dropped")
        finally:
            other.raw.execute(f"DROP DATABASE {database}")

    def test_nowhere(self) -> None:
        with pytest.raises(ConnectionDoesNotExist, match="Name one of its aliases"):
            hold_lock("x", using="nowhere").__enter__()
        with pytest.raises(LockUnsupported, match="need PostgreSQL"):
            assert_lock_free("x", using="sqlite")
        with pytest.raises(TypeError, match="using is the alias of a database or None, not int"):
            assert_no_locks(5)  # type: ignore[arg-type]
        with extra_alias("gone", NAME="test_no_such_database"), pytest.raises(OperationalError, match="does not exist"):
            assert_no_locks("gone")

    def test_behind_a_pooler(self, name: str, other: OtherSession) -> None:
        """Case 37: in transaction mode it is refused; in session mode, where the setting says so, it works."""
        with bouncer("transaction") as running, running.alias() as alias:
            with pytest.raises(PoolerDetected, match="nothing was taken"):
                hold_lock(name, using=alias).__enter__()
            assert_no_locks(alias)
        with bouncer("session") as running, running.alias() as alias:
            with override_settings(ADVISORY_LOCK_SESSION_POOLER=[alias]), hold_lock(name, using=alias) as held:
                assert other.holder(held.key) == held.pid
                held.release()
                assert other.is_free(held.key)


class TestInTestCases:
    def test_contention(self, name: str, other: OtherSession) -> None:
        """Case 96: what is taken twice inside a TestCase is granted twice, for it is one session. This is another."""

        def test() -> None:
            with advisory_lock(name), advisory_lock(name):
                pass
            with hold_lock(name):
                assert not try_advisory_lock(name).acquire()
                with transaction.atomic():
                    assert not try_advisory_lock(name).acquire()
            with transaction.atomic():
                assert try_advisory_lock(name).acquire()

        run_in(TestCase, test)
        assert other.is_free(lock_key(name))

    def test_a_thread(self, name: str) -> None:
        """Case 96: where what is written is committed, and others see it."""

        def test() -> None:
            go, begun = threading.Event(), threading.Event()

            def work() -> None:
                with advisory_lock(name):
                    begun.set()
                    assert go.wait(LIMIT)

            working = Thread(work)
            assert begun.wait(LIMIT)
            assert not try_advisory_lock(name).acquire()
            go.set()
            working.result()
            with hold_lock(name) as held:
                working = Thread(lambda: advisory_lock(name).acquire().release())
                held.wait_for_waiters()
                held.release()
                working.result()
            assert_no_locks()

        run_in(TransactionTestCase, test)

    @pytest.mark.parametrize("kind", [TestCase, TransactionTestCase])
    def test_asynchronous(self, kind: type[TestCase], name: str) -> None:
        async def test() -> None:
            async with hold_lock(name):
                assert not await try_advisory_lock(name).aacquire()
                assert_lock_held(name)
            with hold_lock(name), pytest.raises(LockTimeout):
                await advisory_lock(name, timeout=0).aacquire()
            async with advisory_lock(name):
                assert "a session lock of this process" in failure(assert_no_locks)
            assert_no_locks()
            await sync_to_async(connections.close_all)() if kind is TransactionTestCase else None

        run_in(kind, test)

    def test_an_asynchronous_block_that_raises(self, name: str) -> None:
        async def main() -> None:
            async with hold_lock(name):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            asyncio.run(main())
        assert_lock_free(name)

    @pytest.mark.parametrize("close", [connections.close_all, close_old_connections], ids=["all", "old"])
    def test_a_task_runner_that_closes_connections(self, close: Callable[[], None], name: str) -> None:
        """Case 97: who holds a lock inside a TestCase is told of its loss; the helpers do not mind."""

        def test() -> None:
            with hold_lock(name, "elsewhere"):
                with pytest.raises(LockLost), advisory_lock(name):
                    close()
                with pytest.raises(DatabaseError):
                    value("SELECT 1")
                assert_lock_held(name, "elsewhere")
                assert_lock_free(name)
            assert_no_locks()

        run_in(TestCase, test)

    def test_a_transaction_that_has_failed(self, name: str) -> None:
        def test() -> None:
            lock = advisory_lock(name).acquire()
            with pytest.raises(DatabaseError):
                value("SELECT 1 / 0")
            lock.release()
            assert_lock_held(name)
            with hold_lock(name, "another"):
                assert_lock_held(name, "another")
            # A release that could not be sent; the next lock operation on the session catches up on it.
            left = failure(assert_no_locks)
            assert f"{name!r} ({lock_key(name).args[0]}) is held by pid " in left

        run_in(TestCase, test)

    def test_databases_that_a_test_may_not_use(self) -> None:
        def test() -> None:
            for ask in (hold_lock("x").__enter__, assert_no_locks):
                with pytest.raises(AssertionError, match="not allowed in SimpleTestCase"):
                    ask()

        run_in(SimpleTestCase, test)


class TestHeldAndFree:
    def test_free(self, name: str) -> None:
        with statements(0):
            assert_lock_free(name)
        said = f"{name!r} ({lock_key(name).args[0]}) on 'default' is not held"
        assert failure(assert_lock_held, name) == f"{said}: it is free."
        assert failure(assert_lock_held, name, shared=True) == f"{said} shared: it is free."

    def test_of_another_session(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        assert_lock_held(name)
        assert_lock_held(name, shared=False)
        assert f"is not held shared: held by pid {other.pid} (other-session)" in failure(
            assert_lock_held, name, shared=True
        )
        assert f"on 'default' is not free: held by pid {other.pid} (other-session), idle for " in failure(
            assert_lock_free, name
        )

    def test_shared(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name), shared=True)
        with advisory_lock(name, shared=True):
            assert_lock_held(name, shared=True)
            said = failure(assert_lock_free, name)
            assert f"held shared by pid {other.pid} " in said
            assert f"held shared by pid {backend_pid()}" in said
            assert "is not held exclusively: held shared by " in failure(assert_lock_held, name, shared=False)

    def test_of_the_test_itself(self, name: str) -> None:
        """What counts is what the server says, so a lock of this process counts like any other."""
        with advisory_lock(name):
            assert_lock_held(name)
            assert ", a session lock of this process." in failure(assert_lock_free, name)
        assert_lock_free(name)
        with transaction.atomic():
            with advisory_lock(name):
                pass
            assert_lock_held(name)
            assert ", a transaction lock of this process." in failure(assert_lock_free, name)
        assert_lock_free(name)

    def test_inside_a_test_case(self, name: str) -> None:
        """There a transaction lock lasts until the test is rolled back."""

        def test() -> None:
            with transaction.atomic(), advisory_lock(name):
                pass
            assert_lock_held(name)
            assert ", a transaction lock of this process, until the test is rolled back." in failure(
                assert_lock_free, name
            )
            with advisory_lock(name, scope="session"):
                assert ", a session and a transaction lock of this process." in failure(assert_lock_free, name)

        run_in(TestCase, test)
        assert_lock_free(name)

    def test_a_dedicated_session(self, name: str) -> None:
        with advisory_lock(name, dedicated=True):
            assert_lock_held(name)
            assert ", a session lock of this process" in failure(assert_no_locks)
        assert_no_locks()

    @pytest.mark.parametrize("ask", [assert_lock_free, lambda name: assert_no_locks()], ids=["free", "none"])
    def test_a_session_that_is_just_ending(
        self, ask: Callable[[str], None], name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server notices its end a moment later: it is asked again."""
        monkeypatch.setattr(testing, "GRACE", LIMIT)
        other.take(lock_key(name))
        seen = []

        def end(lock: Any) -> str:
            seen.append(lock.pid)
            other.drop(lock_key(name)) if len(seen) == 1 else None
            return ""

        monkeypatch.setattr(testing, "_whose", end)
        ask(name)
        assert seen == [other.pid]


class TestNoLocks:
    def test_all_are_named(self, name: str, other: OtherSession) -> None:
        assert_no_locks()
        other.take(LockKey.pair(7, 8))
        with hold_lock(name) as held, advisory_lock(name, "own"):
            waiting = Thread(lambda: advisory_lock(name, timeout=LIMIT).acquire().release())
            held.wait_for_waiters()
            head, *lines = failure(assert_no_locks).splitlines()
            held.release()
            waiting.result()
        assert head == "There are advisory locks on 'default':"
        assert len(lines) == 4
        one, own = f"{name!r} ({lock_key(name).args[0]})", f"'{name}:own' ({lock_key(name, 'own').args[0]})"
        assert sorted(line.partition(" is ")[0].strip() for line in lines) == sorted([one, one, own, "'(7, 8)' (7, 8)"])
        waits = lines[-1].partition(" is ")[2]
        assert waits.startswith("waited for by pid ")
        assert_lock_held(LockKey.pair(7, 8))

    def test_what_was_not_released_is_named_too(self, name: str, other: OtherSession) -> None:
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            lock = advisory_lock(name, scope="session").acquire()
            with pytest.raises(DatabaseError):
                value("SELECT 1 / 0")
            lock.release()
            assert f"{name!r} ({lock.key.args[0]}) is held by pid" in failure(assert_no_locks)
            raise ZeroDivisionError
        advisory_lock(name, "next").acquire().release()
        assert_no_locks()

    def test_the_transaction_of_a_test_case(self, name: str, other: OtherSession) -> None:
        """Case 96: what only its rollback frees, a COMMIT would have freed elsewhere."""

        def test() -> None:
            with transaction.atomic(), advisory_lock(name), advisory_lock(name, "shared", shared=True):
                assert "transaction lock" in failure(assert_no_locks)
            assert_lock_held(name)
            assert_no_locks()
            left = advisory_lock(name).acquire()
            assert "a session and a transaction lock" in failure(assert_no_locks)
            left.release()
            assert_no_locks()

        run_in(TestCase, test)
        assert_lock_free(name)

    def test_a_transaction_of_a_thread(self, name: str) -> None:
        go, begun = threading.Event(), threading.Event()

        @transaction.atomic
        def work() -> None:
            with advisory_lock(name):
                begun.set()
                assert go.wait(LIMIT)

        def test() -> None:
            assert "transaction lock of this process" in failure(assert_no_locks)

        working = Thread(work)
        assert begun.wait(LIMIT)
        run_in(TestCase, test)
        go.set()
        working.result()

    def test_locks_of_other_code(self, name: str) -> None:
        """Of a session that this process has opened without the library nothing is known, so it counts."""

        def test() -> None:
            value("SELECT pg_advisory_xact_lock(7, 9)")
            assert "'(7, 9)' (7, 9) is held by pid" in failure(assert_no_locks)

        run_in(TestCase, test)

    def test_a_process(self, name: str, other: OtherSession) -> None:
        process = spawn(
            f"from django_advisory_lock import advisory_lock\nlock = advisory_lock({name!r}).acquire()\n"
            "print('held', flush=True)\ninput()\nlock.release()"
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(AssertionError, match=f"held by pid {other.holder(lock_key(name))}"):
            assert_no_locks()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        output(process)
        assert_no_locks()
