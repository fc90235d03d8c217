"""What users write: both verbs, as `with` blocks, by hand and as decorators."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils.connection import ConnectionDoesNotExist

from django_advisory_lock import (
    AdvisoryLock,
    AdvisoryLockError,
    LockHandle,
    LockKey,
    LockTimeout,
    LockUnsupported,
    TryAdvisoryLock,
    advisory_lock,
    lock_key,
    try_advisory_lock,
)
from tests.support import OtherSession, Thread, backend_pid, statements
from tests.testapp.models import Account

MakeLock = Callable[..., "AdvisoryLock | TryAdvisoryLock[None]"]
both = pytest.mark.parametrize("make", [advisory_lock, try_advisory_lock])


class TestBlocks:
    @both
    def test_held_in_the_body_and_free_after_it(self, make: MakeLock, name: str, other: OtherSession) -> None:
        with make(name) as lock:
            assert lock
            assert lock.acquired is True
            assert lock.is_held()
            assert (lock.key, lock.using, lock.scope) == (lock_key(name), "default", "session")
            assert not other.is_free(lock.key)
        assert other.is_free(lock.key)
        assert lock.acquired is True
        assert not lock.is_held()
        assert not lock.lost.is_set()

    @both
    def test_an_error_of_the_body_frees_the_lock_and_stays_itself(
        self, make: MakeLock, name: str, other: OtherSession
    ) -> None:
        error = KeyError("mine")
        with pytest.raises(KeyError) as caught, make(name) as lock:
            assert lock
            raise error
        assert caught.value is error
        assert not getattr(error, "__notes__", [])
        assert other.is_free(lock_key(name))

    def test_a_busy_try_is_false_at_once_and_sends_nothing_more(self, name: str, other: OtherSession) -> None:
        """Case 5a, 23."""
        other.take(lock_key(name))
        with statements(1), try_advisory_lock(name) as lock:
            assert not lock
            assert lock.acquired is False
            assert lock.scope == "auto"
        with statements(0):
            lock.release()
        assert not lock.is_held()
        assert other.holders(lock_key(name)) == 1

    def test_a_wait_ends_when_the_holder_is_done(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))

        def wait() -> float:
            with advisory_lock(name) as lock:
                return lock.waited

        waiting = Thread(wait)
        other.wait_for_waiters(lock_key(name))
        other.drop(lock_key(name))
        assert waiting.result() > 0

    def test_a_lock_object_may_be_nested_in_itself(self, name: str, other: OtherSession) -> None:
        """Case 6."""
        lock = advisory_lock(name)
        with lock as outer:
            with lock as inner:
                assert inner is not outer
            assert not inner.is_held() or outer.is_held()
            assert not other.is_free(lock_key(name))
            with pytest.raises(KeyError), lock:
                raise KeyError
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))

    def test_two_lock_objects_of_one_key_nest_alike(self, name: str, other: OtherSession) -> None:
        """Case 6."""
        with advisory_lock(name):
            with try_advisory_lock(name) as inner:
                assert inner
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))

    def test_a_body_that_never_looked_at_a_failed_try_is_warned_about(
        self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Case 23."""
        other.take(lock_key(name))
        with pytest.warns(RuntimeWarning, match="as lock") as caught, try_advisory_lock(name):
            pass
        assert caught[0].filename == __file__
        with pytest.raises(KeyError), try_advisory_lock(name):
            raise KeyError
        assert [record.levelname for record in caplog.records if record.levelname == "ERROR"] == ["ERROR"] * 2

    def test_a_body_that_looked_is_not_warned_about(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        with try_advisory_lock(name) as lock:
            assert not lock.is_held()
        with try_advisory_lock(name) as lock:
            assert not lock.acquired

    def test_a_shared_lock_excludes_exclusive_ones_only(self, name: str, other: OtherSession) -> None:
        """Case 19."""
        key = lock_key(name)
        with advisory_lock(name, shared=True):
            assert other.take(key, shared=True)
            assert other.drop(key, shared=True)
            assert not other.take(key)
        assert other.is_free(key)

    def test_both_modes_nest_and_each_frees_its_own(self, name: str, other: OtherSession) -> None:
        """Case 19."""
        key = lock_key(name)
        with advisory_lock(name):
            with advisory_lock(name, shared=True):
                assert not other.take(key, shared=True)
            assert not other.take(key, shared=True)
        assert other.is_free(key)
        with advisory_lock(name, shared=True):
            with advisory_lock(name):
                assert not other.take(key, shared=True)
            assert other.take(key, shared=True)
            assert other.drop(key, shared=True)
        assert other.is_free(key)

    @pytest.mark.parametrize(
        "key", [0, -1, 2**63 - 1, -(2**63), LockKey.pair(-(2**31), 2**31 - 1), LockKey.pair(0, 8), 8], ids=repr
    )
    @pytest.mark.parametrize("alias", ["default", "binding", "prepared"])
    def test_every_form_of_key(self, key: int | LockKey, alias: str, other: OtherSession) -> None:
        """Case 46."""
        with advisory_lock(key, using=alias, timeout=5) as lock:
            assert lock.is_held()
            assert not other.is_free(lock.key)
        with transaction.atomic(using=alias), advisory_lock(key, using=alias, shared=True, timeout=5) as lock:
            assert lock.is_held()
            assert not other.is_free(lock.key)
        assert other.is_free(lock.key)

    def test_a_model_instance_is_a_key(self, other: OtherSession) -> None:
        with advisory_lock(Account(pk=42)) as lock:
            assert lock.key.args[1] == 42

    def test_one_lock_object_shared_by_many_threads(self, name: str, other: OtherSession) -> None:
        shared = try_advisory_lock(name)
        inside, done = threading.Event(), threading.Event()

        def hold() -> bool:
            with shared as lock:
                inside.set()
                assert done.wait(10)
                return bool(lock)

        holder = Thread(hold)
        assert inside.wait(10)
        with shared as lock:
            assert not lock
        done.set()
        assert holder.result() is True
        with shared as lock:
            assert lock

    def test_generators_may_end_their_blocks_in_any_order(self, name: str, other: OtherSession) -> None:
        shared = advisory_lock(name)

        def hold() -> Iterator[LockHandle]:
            with shared as lock:
                yield lock

        with override_settings(ADVISORY_LOCK_NAMESPACE="a"):
            first = hold()
            a = next(first).key
        with override_settings(ADVISORY_LOCK_NAMESPACE="b"):
            second = hold()
            b = next(second).key
        first.close()  # type: ignore[attr-defined]
        assert other.is_free(a)
        assert not other.is_free(b)
        second.close()  # type: ignore[attr-defined]
        assert other.is_free(b)

    def test_a_block_is_left_by_whoever_entered_it(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name)
        lock.__enter__()
        with pytest.raises(AdvisoryLockError, match="entered"):
            Thread(lambda: lock.__exit__(None, None, None)).result()
        assert not other.is_free(lock_key(name))
        lock.__exit__(None, None, None)
        assert other.is_free(lock_key(name))


class TestByHand:
    def test_release_frees_once(self, name: str, other: OtherSession) -> None:
        """Case 5b."""
        with statements(2):
            lock = advisory_lock(name).acquire()
            lock.release()
        with statements(0):
            lock.release()
        assert other.is_free(lock_key(name))
        assert repr(lock) == f"<LockHandle {name!r} on 'default': over>"
        with advisory_lock(name) as lock:
            assert repr(lock) == f"<LockHandle {name!r} on 'default': acquired>"

    def test_a_handle_is_a_context_manager(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name).acquire() as lock:
            assert isinstance(lock, LockHandle)
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))

    def test_release_inside_the_block(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            lock.release()
            assert other.is_free(lock_key(name))
        with transaction.atomic(), advisory_lock(name, scope="session") as lock:
            lock.release()
            assert other.is_free(lock_key(name))

    def test_a_handle_that_is_over_guards_no_block(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name).acquire()
        with lock:
            pass
        with pytest.raises(AdvisoryLockError, match="acquire the lock again"), lock:
            pytest.fail("ran without the lock")

    def test_a_busy_try_by_hand_is_false(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        lock = try_advisory_lock(name).acquire()
        assert not lock
        assert "not acquired" in repr(lock)


class TestDecorators:
    def test_runs_and_returns(self, name: str, other: OtherSession) -> None:
        @advisory_lock(name)
        def held(x: int, *, y: int = 0) -> tuple[int, bool]:
            """Say whether the lock is held."""
            return x + y, not other.is_free(lock_key(name))

        assert held(1, y=2) == (3, True)
        assert (held.__name__, held.__doc__) == ("held", "Say whether the lock is held.")
        assert other.is_free(lock_key(name))

    def test_a_try_returns_its_default_when_busy(self, name: str, other: OtherSession) -> None:
        """Case 23."""
        calls = []

        @try_advisory_lock(name, default="skipped")
        def work() -> None:
            calls.append(1)

        assert work() is None
        other.take(lock_key(name))
        assert work() == "skipped"
        assert calls == [1]

    def test_a_wait_raises_when_time_is_up(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))

        @advisory_lock(name, timeout=0)
        def work() -> None:
            pytest.fail("ran without the lock")

        with pytest.raises(LockTimeout):
            work()

    def test_a_key_made_from_the_arguments(self, name: str, other: OtherSession) -> None:
        @try_advisory_lock(lambda account, **_: (name, account))
        def sync(account: int, full: bool = False) -> bool:
            return not other.is_free(lock_key(name, account))

        assert sync(7, full=True) is True
        other.take(lock_key(name, 7))
        assert sync(7) is None
        assert sync(8) is True

    def test_a_method(self, name: str, other: OtherSession) -> None:
        class Sync:
            @advisory_lock(lambda self, pk: (self.name, pk))
            def run(self, pk: int) -> bool:
                return not other.is_free(lock_key(name, pk))

            def __init__(self) -> None:
                self.name = name

            @staticmethod
            @advisory_lock(name)
            def static() -> bool:
                return not other.is_free(lock_key(name))

        assert Sync().run(3) is True
        assert Sync.static() is True

    def test_a_partial(self, name: str, other: OtherSession) -> None:
        def held(x: int) -> tuple[int, bool]:
            return x, not other.is_free(lock_key(name))

        assert advisory_lock(name)(functools.partial(held, 1))() == (1, True)

    def test_one_decorated_function_in_many_threads(self, name: str, other: OtherSession) -> None:
        counter = {"inside": 0, "runs": 0}
        most = []

        def count() -> None:
            counter["inside"] += 1
            most.append(counter["inside"])
            time.sleep(0.001)
            counter["inside"] -= 1
            counter["runs"] += 1

        def in_threads(function: Callable[[], None]) -> int:
            most.clear()
            barrier = threading.Barrier(6)

            def run() -> None:
                barrier.wait(10)
                for _ in range(10):
                    function()

            threads = [Thread(run) for _ in range(6)]
            for thread in threads:
                thread.result()
            return max(most)

        assert in_threads(advisory_lock(name)(count)) == 1
        assert counter == {"inside": 0, "runs": 60}
        assert in_threads(count) > 1, "the negative control does not collide either"

    def test_a_recursive_function_nests(self, name: str, other: OtherSession) -> None:
        @advisory_lock(name, timeout=0)
        def count_down(n: int) -> int:
            return count_down(n - 1) if n else 0

        assert count_down(3) == 0
        assert other.is_free(lock_key(name))

    @both
    @pytest.mark.parametrize("kind", ["generator", "async generator", "class", "classmethod", "staticmethod"])
    def test_what_would_run_without_the_lock_is_refused(self, make: MakeLock, kind: str) -> None:
        """Case 88, 95."""

        def generator() -> Iterator[int]:
            yield 1

        async def async_generator() -> AsyncIterator[int]:
            yield 1

        function = {
            "generator": functools.partial(generator),
            "async generator": async_generator,
            "class": Account,
            "classmethod": classmethod(lambda cls: None),
            "staticmethod": staticmethod(lambda: None),
        }[kind]
        with pytest.raises(TypeError, match=kind.rsplit(maxsplit=1)[-1]):
            make("x")(function)  # type: ignore[arg-type,call-overload]

    def test_a_task_object_is_refused(self) -> None:
        class Task:
            def __call__(self) -> None: ...

            def delay(self) -> None: ...

        for task in (Task(), functools.partialmethod(lambda self: None)):
            with pytest.raises(TypeError, match="below @task"):
                advisory_lock("x")(task)  # type: ignore[arg-type]

    @both
    def test_a_call_that_only_begins_the_work_is_refused(self, make: MakeLock, name: str, other: OtherSession) -> None:
        """Case 88, 95: as `dispatch()` of an async view, which is no coroutine function itself."""

        async def work() -> None:
            pytest.fail("ran without the lock")

        async def generate() -> AsyncIterator[int]:
            yield 1

        class Later:
            """As a future or a task is."""

            def __await__(self) -> Iterator[None]:
                yield

        begins: tuple[Callable[[], object], ...] = (
            lambda: work(),  # noqa: PLW0108
            lambda: generate(),  # noqa: PLW0108
            lambda: (number for number in range(3)),
            lambda: Later(),  # noqa: PLW0108
        )
        for function in begins:
            with pytest.raises(TypeError, match="runs after it"):
                make(name)(function)()
        assert other.is_free(lock_key(name))

    @both
    def test_a_lock_object_is_no_answer(self, make: MakeLock) -> None:
        with pytest.raises(TypeError, match="holds nothing by itself"):
            bool(make("x"))

    def test_the_bare_decorator_is_refused(self) -> None:
        def work() -> None: ...

        with pytest.raises(TypeError, match="bare @advisory_lock"):
            advisory_lock(work)()  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="decorates functions"):
            advisory_lock(lambda: "x")(1)  # type: ignore[arg-type]

    def test_a_function_as_key_is_no_key_in_a_block(self) -> None:
        for attempt in (lambda: advisory_lock(lambda: "x").__enter__(), try_advisory_lock(lambda: "x").acquire):
            with pytest.raises(TypeError, match="belongs to a decorator"):
                attempt()

    @pytest.mark.parametrize(("key", "error"), [(None, TypeError), ("", ValueError), (1.5, TypeError)])
    def test_a_function_that_returns_no_key(self, key: object, error: type[Exception], other: OtherSession) -> None:
        @try_advisory_lock(lambda: key)  # type: ignore[arg-type,return-value]
        def work() -> None:
            pytest.fail("ran without a lock")

        with statements(0), pytest.raises(error):
            work()

    def test_a_coroutine_function_cannot_make_a_key(self) -> None:
        async def key() -> str:
            return "x"

        with pytest.raises(TypeError, match="coroutine"):
            advisory_lock(key)  # type: ignore[arg-type]


class TestScope:
    def test_inside_atomic_the_lock_is_kept_until_commit(self, name: str, other: OtherSession) -> None:
        """Case 13."""
        with transaction.atomic():
            with advisory_lock(name) as lock:
                assert lock.scope == "transaction"
            lock.release()
            assert lock.is_held()
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))
        assert not lock.is_held()

    def test_what_was_written_is_seen_by_the_next_one(self, name: str, other: OtherSession) -> None:
        """Case 13: nobody reads what is not committed yet, though the block ended before the commit."""
        account = Account.objects.create(name=name)

        def add(times: int, scope: Any) -> None:
            for _ in range(times):
                with transaction.atomic():
                    with advisory_lock(name, scope=scope):
                        balance = Account.objects.get(pk=account.pk).balance
                        Account.objects.filter(pk=account.pk).update(balance=balance + 1)
                    backend_pid()  # something between the block and the commit

        def balance_after(scope: str) -> int:
            Account.objects.filter(pk=account.pk).update(balance=0)
            threads = [Thread(lambda: add(15, scope)) for _ in range(4)]
            for thread in threads:
                thread.result()
            return int(Account.objects.get(pk=account.pk).balance)

        try:
            assert balance_after("auto") == 60
            assert balance_after("session") < 60, "the negative control loses nothing either"
        finally:
            account.delete()

    def test_session_scope_inside_atomic_is_freed_at_the_end_of_the_block(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with advisory_lock(name, scope="session") as lock:
                assert lock.scope == "session"
                assert not other.is_free(lock_key(name))
            assert other.is_free(lock_key(name))

    def test_session_scope_keeps_what_the_body_wrote(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            try:
                with advisory_lock(name, scope="session"):
                    Account.objects.create(name=name)
                    raise KeyError
            except KeyError:
                pass
        assert Account.objects.filter(name=name).delete()[0] == 1

    @both
    def test_transaction_scope_outside_a_transaction_is_refused(
        self, make: MakeLock, name: str, other: OtherSession
    ) -> None:
        with statements(0), pytest.raises(TransactionManagementError, match="atomic"):
            make(name, scope="transaction").acquire()

    def test_autocommit_switched_off_counts_as_a_transaction(self, name: str, other: OtherSession) -> None:
        connection.set_autocommit(False)
        try:
            with advisory_lock(name) as lock:
                assert lock.scope == "transaction"
            assert not other.is_free(lock_key(name))
            connection.commit()
            assert other.is_free(lock_key(name))
        finally:
            connection.rollback()
            connection.set_autocommit(True)

    def test_a_transaction_that_the_server_alone_knows_of(self, name: str, other: OtherSession) -> None:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
            with advisory_lock(name) as lock:
                assert lock.scope == "transaction"
            assert not other.is_free(lock_key(name))
            cursor.execute("COMMIT")
        assert other.is_free(lock_key(name))

    @both
    def test_a_transaction_on_another_alias_is_not_overlooked(
        self, make: MakeLock, name: str, other: OtherSession
    ) -> None:
        with transaction.atomic():
            with statements(0, "same"), pytest.raises(TransactionManagementError, match="using='default'"):
                make(name, using="same").acquire()
            with make(name, using="same", scope="session") as lock:
                assert lock
        with transaction.atomic(using="sqlite"), pytest.raises(TransactionManagementError, match="sqlite"):
            make(name).acquire()

    def test_on_commit_runs_outside_the_transaction(self, name: str, other: OtherSession) -> None:
        scopes = []

        def after_commit() -> None:
            with advisory_lock(name) as lock:
                scopes.append(lock.scope)

        with transaction.atomic():
            transaction.on_commit(after_commit)
        assert scopes == ["session"]

    def test_serializable_transactions_are_warned_about(self, name: str, other: OtherSession) -> None:
        with transaction.atomic(using="serializable"):
            with pytest.warns(RuntimeWarning, match="SERIALIZABLE") as caught:
                advisory_lock(name, using="serializable").acquire()
            assert caught[0].filename == __file__
        with advisory_lock(name, using="serializable"):
            pass  # outside a transaction every statement has a snapshot of its own


class TestStatements:
    """The promise: two statements for a session lock, one for a transaction lock."""

    @pytest.mark.parametrize(
        "options", [{}, {"timeout": 0}, {"timeout": 5}, {"poll_interval": 1}, {"shared": True}], ids=str
    )
    def test_a_session_lock_costs_two(self, options: dict[str, object], name: str, other: OtherSession) -> None:
        with statements(2), advisory_lock(name, **options):  # type: ignore[arg-type]
            pass
        with statements(2), advisory_lock(name, **options).acquire():  # type: ignore[arg-type]
            pass

    @pytest.mark.parametrize("options", [{}, {"timeout": 0}, {"timeout": 5}], ids=str)
    def test_a_transaction_lock_costs_one(self, options: dict[str, object], name: str, other: OtherSession) -> None:
        with transaction.atomic(), statements(1), advisory_lock(name, **options):  # type: ignore[arg-type]
            pass

    def test_a_try_costs_the_same(self, name: str, other: OtherSession) -> None:
        with statements(2), try_advisory_lock(name) as lock:
            assert lock
        with transaction.atomic(), statements(1), try_advisory_lock(name) as lock:
            assert lock

    def test_session_scope_in_a_transaction_costs_two_and_two(self, name: str, other: OtherSession) -> None:
        with transaction.atomic(), statements(4), advisory_lock(name, scope="session"):
            pass

    def test_a_transaction_lock_taken_again_and_again(self, name: str, other: OtherSession) -> None:
        for _ in range(3):
            with transaction.atomic():
                backend_pid()
                with statements(1), advisory_lock(name):
                    pass

    def test_a_lock_taken_often_in_one_transaction_is_noted_once(self, name: str, other: OtherSession) -> None:
        from django_advisory_lock.sessions import attach

        with transaction.atomic():
            locks = [advisory_lock(name).acquire() for _ in range(50)]
            assert len(attach(connections["default"]).on(lock_key(name))) == 1
            assert all(lock.is_held() for lock in locks)

    def test_a_loop_over_transactions_leaves_nothing_in_this_process(self, name: str, other: OtherSession) -> None:
        from django_advisory_lock.sessions import attach

        for number in range(50):
            with transaction.atomic():
                backend_pid()
                advisory_lock(name, number).acquire()
        assert len(attach(connections["default"])._transaction_holds) == 1


class TestBadInput:
    @both
    @pytest.mark.parametrize(
        ("key", "error"),
        [
            ((), ValueError),
            ((None,), ValueError),
            (("",), ValueError),
            (("a", None), ValueError),
            ((1.5,), TypeError),
            ((True,), TypeError),
            ((b"x",), TypeError),
            (([1],), TypeError),
            ((2**63,), ValueError),
            ((1, 2), TypeError),
            ((Account(),), ValueError),
            ((Account,), TypeError),
            (("sync", Account(pk=1)), TypeError),
        ],
        ids=str,
    )
    def test_no_key(self, make: MakeLock, key: tuple[object, ...], error: type[Exception]) -> None:
        """Case 29, 46: where the lock is made, before any SQL."""
        with pytest.raises(error):
            make(*key)

    @pytest.mark.parametrize("option", ["timeout", "poll_interval"])
    @pytest.mark.parametrize(
        ("length", "error"),
        [
            (-1, ValueError),
            (timedelta(seconds=-1), ValueError),
            (float("nan"), ValueError),
            (float("inf"), ValueError),
            (10**400, ValueError),
            ("5", TypeError),
            (True, TypeError),
        ],
        ids=str,
    )
    def test_no_length_of_time(self, option: str, length: object, error: type[Exception]) -> None:
        with pytest.raises(error, match=option):
            advisory_lock("x", **{option: length})  # type: ignore[arg-type]

    def test_polling_without_a_pause(self) -> None:
        with pytest.raises(ValueError, match="poll_interval"):
            advisory_lock("x", poll_interval=0)

    @both
    def test_an_unknown_scope(self, make: MakeLock) -> None:
        with pytest.raises(ValueError, match="'auto', 'session', 'transaction'"):
            make("x", scope="xact")

    @both
    def test_an_unknown_alias(self, make: MakeLock, other: OtherSession) -> None:
        with pytest.raises(ConnectionDoesNotExist, match=r"default, .*sqlite"):
            make("x", using="nowhere").acquire()

    @both
    def test_shared_is_yes_or_no(self, make: MakeLock) -> None:
        with pytest.raises(TypeError, match="shared"):
            make("x", shared="no")

    @both
    def test_a_connection_is_no_alias(self, make: MakeLock) -> None:
        with pytest.raises(TypeError, match="using"):
            make("x", using=connection)

    @both
    def test_another_engine(self, make: MakeLock, other: OtherSession) -> None:
        """Case 41."""
        with (
            CaptureQueriesContext(connections["sqlite"]) as queries,
            pytest.raises(LockUnsupported, match="SQLite") as caught,
        ):
            make("x", using="sqlite").acquire()
        assert not queries.captured_queries
        assert isinstance(caught.value, ImproperlyConfigured)
        assert caught.value.using == "sqlite"

    def test_synchronous_locks_are_not_for_coroutines(self, name: str, other: OtherSession) -> None:
        from django.core.exceptions import SynchronousOnlyOperation

        async def work() -> None:
            with advisory_lock(name):
                pytest.fail("blocked the event loop")

        with pytest.raises(SynchronousOnlyOperation):
            asyncio.run(work())


class TestDatabases:
    def test_the_setting_names_the_alias(self, name: str, other: OtherSession) -> None:
        """Case 36: resolved when used, no router asked."""
        lock = advisory_lock(name)
        with override_settings(ADVISORY_LOCK_DATABASE="other"), lock as handle:
            assert handle.using == "other"
            assert other.is_free(lock_key(name))
        with lock as handle:
            assert handle.using == "default"
        with advisory_lock(name, using="same") as handle:
            assert handle.using == "same"

    def test_two_aliases_of_one_database_exclude_each_other(self, name: str, other: OtherSession) -> None:
        """Case 53: also in one thread; a wait for oneself there ends with its timeout."""
        with advisory_lock(name):
            with try_advisory_lock(name, using="same") as lock:
                assert not lock
            with pytest.raises(LockTimeout):
                advisory_lock(name, using="same", timeout=0.05).acquire()

    def test_two_databases_are_independent(self, name: str, other: OtherSession) -> None:
        """Case 53."""
        with advisory_lock(name), advisory_lock(name, using="other", timeout=0) as lock:
            assert lock

    def test_a_namespace_is_asked_at_each_entry(self, name: str, other: OtherSession) -> None:
        """Case 52: one lock object, a key for each tenant."""
        lock = advisory_lock(name)
        with override_settings(ADVISORY_LOCK_NAMESPACE="tenant-a"), lock as handle:
            tenant_a = handle.key
        with override_settings(ADVISORY_LOCK_NAMESPACE="tenant-b"), lock as handle:
            tenant_b = handle.key
        with lock as handle:
            assert handle.key == lock_key(name)
            assert len({tenant_a, tenant_b, handle.key}) == 3


def test_what_a_lock_looks_like() -> None:
    assert repr(advisory_lock("report", 42)) == "<AdvisoryLock 'report', 42>"
    assert repr(try_advisory_lock("x", using="same")) == "<TryAdvisoryLock 'x' on 'same'>"
