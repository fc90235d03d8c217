"""The end of a lock: freed on the right session, or said to be lost; the body's error never hidden."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    OperationalError,
    close_old_connections,
    connection,
    connections,
    transaction,
)
from django.db.transaction import TransactionManagementError

from django_advisory_lock import LockHandle, LockLost, advisory_lock, lock_key, try_advisory_lock
from django_advisory_lock.options import Scope
from tests.support import OtherSession, Thread, backend_pid, statements, value
from tests.test_async import run
from tests.testapp.models import Account, Country

Break = Callable[[OtherSession], None]


def kill(other: OtherSession) -> None:
    other.kill(backend_pid())


def close(other: OtherSession) -> None:
    connection.close()


def replace(other: OtherSession) -> None:
    connection.close()
    backend_pid()


def close_all(other: OtherSession) -> None:
    connections.close_all()


breaks = pytest.mark.parametrize("broken_by", [kill, close, replace, close_all])


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def fail() -> None:
    value("SELECT 1/0")


class TestLoss:
    @breaks
    def test_it_is_reported_at_the_end_of_the_block(
        self, broken_by: Break, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Case 1, 3, 4, 32."""
        result = None
        with pytest.raises(LockLost, match=name) as caught, advisory_lock(name) as lock:
            broken_by(other)
            assert not lock.is_held()
            assert lock.lost.is_set()
            with pytest.raises(LockLost):
                lock.check()
            result = "kept"
        assert result == "kept"
        assert (caught.value.key, caught.value.using) == (lock_key(name), "default")
        assert lock.acquired
        other.wait_until_free(lock_key(name))
        assert backend_pid()  # the alias works again
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert name in caplog.text
        with statements(0):
            lock.release()  # a second call

    @breaks
    def test_it_never_hides_the_error_of_the_body(self, broken_by: Break, name: str, other: OtherSession) -> None:
        """Case 4, 8."""
        error = KeyError("mine")
        with pytest.raises(KeyError) as caught, advisory_lock(name) as lock:
            broken_by(other)
            raise error
        assert caught.value is error
        if sys.version_info >= (3, 11):
            assert len(notes(error)) == 1
            assert "was lost" in notes(error)[0]
        assert lock.lost.is_set()
        other.wait_until_free(lock_key(name))
        assert backend_pid()

    @breaks
    def test_by_hand(self, broken_by: Break, name: str, other: OtherSession) -> None:
        """Case 5c."""
        lock = advisory_lock(name).acquire()
        broken_by(other)
        with pytest.raises(LockLost):
            lock.release()
        assert lock.lost.is_set()
        with statements(0):
            lock.release()

    @pytest.mark.parametrize("is_kept", [False, True])
    def test_of_a_closed_connection_sends_nothing(self, is_kept: bool, name: str, other: OtherSession) -> None:
        """Also where somebody else, such as a pool, has a reference to it."""
        with pytest.raises(LockLost, match="its connection was closed"), advisory_lock(name):
            kept = connection.connection if is_kept else None
            connection.close()
        assert connection.connection is None
        assert is_kept is (kept is not None)

    @pytest.mark.parametrize("is_kept", [False, True])
    def test_of_a_replaced_connection_sends_nothing(self, is_kept: bool, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost, match="its connection was closed"), statements(1):
            lock = advisory_lock(name).acquire()
            kept = connection.connection if is_kept else None
            connection.close()
            connection.connect()
            lock.release()
        assert is_kept is (kept is not None)

    def test_of_a_session_that_was_killed_says_so(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost, match="its session has ended"), advisory_lock(name):
            kill(other)
            with pytest.raises(OperationalError):
                value("SELECT 1")

    def test_no_query_of_the_body_reconnects_unseen(self, name: str, other: OtherSession) -> None:
        """Case 4: the question whether the lock is held does not open a new session under the body."""
        with pytest.raises(LockLost), advisory_lock(name) as lock:
            kill(other)
            assert not lock.is_held()
            with pytest.raises(OperationalError):
                backend_pid()

    def test_unlocked_behind_our_back(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost, match="does not hold it"), advisory_lock(name):
            value("SELECT pg_advisory_unlock_all() IS NULL")

    def test_the_wrong_backend_is_never_unlocked(self, name: str, other: OtherSession) -> None:
        """A pooler in session mode that swaps the server session: the unlock runs only where the lock was taken."""
        with pytest.raises(LockLost), advisory_lock(name) as lock:
            assert lock._hold is not None
            lock._hold.pid = other.pid
        connection.close()

    @pytest.mark.parametrize("broken_by", [kill, close])
    @pytest.mark.parametrize("scope", ["auto", "session"])
    def test_inside_atomic(self, broken_by: Break, scope: Any, name: str, other: OtherSession) -> None:
        with pytest.raises((LockLost, DatabaseError)) as caught, transaction.atomic():
            Account.objects.create(name=name)
            with advisory_lock(name, scope=scope) as lock:
                broken_by(other)
                assert not lock.is_held()
        if scope == "session" or broken_by is close:
            assert isinstance(caught.value, LockLost)
        assert not Account.objects.filter(name=name).exists()
        other.wait_until_free(lock_key(name))

    def test_a_lost_nested_lock_is_reported_by_each_block(self, name: str, other: OtherSession) -> None:
        reported = 0
        with pytest.raises(LockLost), advisory_lock(name):
            try:
                with advisory_lock(name):
                    kill(other)
            except LockLost:
                reported += 1
        assert reported == 1

    def test_the_housekeeping_of_a_task_runner_inside_atomic(self, name: str, other: OtherSession) -> None:
        """Case 97: Django closes the connection all the same there, and that is reported."""
        with pytest.raises(LockLost), transaction.atomic(), advisory_lock(name, scope="session"):
            close_old_connections()
        assert backend_pid()

    def test_a_quiet_holder_that_the_server_throws_out(self, name: str, other: OtherSession) -> None:
        """Case 31: `idle_session_timeout`; the body's result is kept."""
        value("SELECT set_config('idle_session_timeout', '50ms', false)")
        result = None
        with pytest.raises(LockLost), advisory_lock(name):
            other.wait_until_free(lock_key(name))
            result = "kept"
        assert result == "kept"
        assert backend_pid()

    def test_a_transaction_that_ends_is_no_loss(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            lock = advisory_lock(name).acquire()
            with pytest.raises(DatabaseError), transaction.atomic():
                try:
                    fail()
                finally:
                    assert not lock.is_held()
            assert lock.is_held()
        assert not lock.is_held()
        assert not lock.lost.is_set()

    def test_between_two_transactions_nobody_is_asked(self, name: str, other: OtherSession) -> None:
        connection.set_autocommit(False)
        try:
            lock = advisory_lock(name).acquire()
            connection.commit()
            with statements(0):
                assert not lock.is_held()
        finally:
            connection.rollback()
            connection.set_autocommit(True)


class TestBodiesThatFail:
    @pytest.mark.parametrize("mark_only", [False, True])
    def test_a_database_error_in_session_scope_inside_atomic(
        self, mark_only: bool, name: str, other: OtherSession
    ) -> None:
        """Case 8."""
        Country.objects.create(code=name)
        with pytest.raises(IntegrityError) as caught, transaction.atomic():
            with advisory_lock(name, scope="session"):
                if mark_only:
                    transaction.set_rollback(True)
                    raise IntegrityError
                Country.objects.create(code=name)
        assert not notes(caught.value)
        assert other.is_free(lock_key(name))
        Country.objects.filter(code=name).delete()

    def test_it_is_freed_at_the_end_of_the_block_and_not_later(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with pytest.raises(DatabaseError), advisory_lock(name, scope="session"):
                fail()
            assert other.is_free(lock_key(name))
            assert transaction.get_rollback()

    def test_a_database_error_that_the_body_swallowed(self, name: str, other: OtherSession) -> None:
        """Its transaction is rolled back as a whole, as without a lock."""
        with transaction.atomic():
            Account.objects.create(name=name)
            with advisory_lock(name, scope="session"), contextlib.suppress(DatabaseError):
                fail()
            assert other.is_free(lock_key(name))
            with pytest.raises(TransactionManagementError):
                backend_pid()
        assert not Account.objects.filter(name=name).exists()

    def test_set_rollback_in_the_body(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with advisory_lock(name, scope="session") as lock:
                transaction.set_rollback(True)
                assert lock.is_held()
            assert other.is_free(lock_key(name))
            assert transaction.get_rollback()

    def test_an_inner_atomic_that_fails_and_is_caught(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with advisory_lock(name, scope="session") as session, advisory_lock(name, "t") as lock:
                with pytest.raises(DatabaseError), transaction.atomic():
                    fail()
                assert session.is_held()
                assert lock.is_held()
            assert other.is_free(lock_key(name))
            assert not other.is_free(lock_key(name, "t"))

    def test_by_hand_in_a_failed_transaction(
        self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing can be sent there: said in the log, and freed by the next lock operation on the session."""
        key = lock_key(name)
        with pytest.raises(DatabaseError), transaction.atomic():
            lock = advisory_lock(name, scope="session").acquire()
            try:
                fail()
            finally:
                assert lock.is_held()
                with statements(0):
                    lock.release()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert not other.is_free(key)
        with advisory_lock(name, "another"):
            assert other.is_free(key)

    def test_a_transaction_lock_in_a_failed_transaction_counts_as_not_held(
        self, name: str, other: OtherSession
    ) -> None:
        with pytest.raises(DatabaseError), transaction.atomic(), advisory_lock(name) as lock:
            try:
                fail()
            finally:
                assert not lock.is_held()

    def test_autocommit_switched_off(self, name: str, other: OtherSession) -> None:
        connection.set_autocommit(False)
        try:
            with pytest.raises(DatabaseError), advisory_lock(name, scope="session"):
                fail()
            assert other.is_free(lock_key(name))
            with pytest.raises(TransactionManagementError, match="caught inside the block"):
                with advisory_lock(name, scope="session"), contextlib.suppress(DatabaseError):
                    fail()
            assert other.is_free(lock_key(name))
            with advisory_lock(name, scope="session"):
                connection.commit()
                backend_pid()  # another transaction, without our savepoint
            assert other.is_free(lock_key(name))
            assert backend_pid()
        finally:
            connection.rollback()
            connection.set_autocommit(True)


class TestInterleavedBlocks:
    """Blocks that end in another order than they began: no savepoint of one may take that of another along."""

    def test_two_locks(self, name: str, other: OtherSession) -> None:
        first, second = advisory_lock(name, 1, scope="session"), advisory_lock(name, 2, scope="session")
        with transaction.atomic():
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            assert other.is_free(lock_key(name, 1))
            assert not other.is_free(lock_key(name, 2))
            second.__exit__(None, None, None)
            assert other.is_free(lock_key(name, 2))
            assert backend_pid()

    def test_two_locks_around_a_database_error(self, name: str, other: OtherSession) -> None:
        first, second = advisory_lock(name, 1, scope="session"), advisory_lock(name, 2, scope="session")
        with transaction.atomic():
            first.__enter__()
            second.__enter__()
            with pytest.raises(DatabaseError):
                fail()
            first.__exit__(None, None, None)
            second.__exit__(None, None, None)
            assert other.is_free(lock_key(name, 1))
            assert other.is_free(lock_key(name, 2))

    def test_a_block_that_outlives_the_atomic_it_began_in(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name, scope="session")
        with transaction.atomic():
            with transaction.atomic():
                lock.__enter__()
            lock.__exit__(None, None, None)
            assert other.is_free(lock_key(name))
            assert backend_pid()

    def test_a_block_that_ends_inside_a_later_atomic(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name, scope="session")
        with transaction.atomic():
            lock.__enter__()
            with transaction.atomic():
                lock.__exit__(None, None, None)
                assert other.is_free(lock_key(name))
            assert backend_pid()

    def test_a_block_that_fails_inside_a_later_atomic(
        self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        lock = advisory_lock(name, scope="session")
        with transaction.atomic():
            lock.__enter__()
            with pytest.raises(DatabaseError), transaction.atomic():
                try:
                    fail()
                finally:
                    lock.__exit__(None, None, None)
            assert "failed transaction" in caplog.text
            with advisory_lock(name, "another"):
                assert other.is_free(lock_key(name))

    def test_a_savepoint_that_is_gone_already(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SAVEPOINT mine")
            lock = advisory_lock(name, scope="session")
            lock.__enter__()
            with connection.cursor() as cursor:
                cursor.execute("ROLLBACK TO SAVEPOINT mine")
            with pytest.raises(DatabaseError):
                fail()
            lock.__exit__(None, None, None)
            transaction.set_rollback(True)
        with advisory_lock(name, "another"):
            assert other.is_free(lock_key(name))


class TestTransactionsThatGoOn:
    """A lock that was taken outside, and is freed in the middle of a transaction that began under it."""

    def test_by_hand(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name).acquire()
        with transaction.atomic(), pytest.warns(RuntimeWarning, match="freed before the transaction") as caught:
            value("SELECT 1")
            lock.release()
        assert caught[0].filename == __file__
        assert other.is_free(lock_key(name))

    def test_a_block(self, name: str, other: OtherSession) -> None:
        outer, inner = contextlib.ExitStack(), transaction.atomic()
        outer.enter_context(advisory_lock(name))
        with inner, pytest.warns(RuntimeWarning, match="freed before the transaction"):
            value("SELECT 1")
            outer.close()
        assert other.is_free(lock_key(name))

    def test_in_synchronous_code_of_a_task(self, name: str, other: OtherSession) -> None:
        """As every synchronous view is under ASGI."""

        def work() -> None:
            lock = advisory_lock(name).acquire()
            with transaction.atomic(), pytest.warns(RuntimeWarning, match="freed before the transaction"):
                value("SELECT 1")
                lock.release()

        async def main() -> None:
            await sync_to_async(work)()

        run(main)
        assert other.is_free(lock_key(name))

    def test_what_is_meant(self, name: str, other: OtherSession) -> None:
        scopes: tuple[Scope, ...] = ("session", "auto")
        for scope in scopes:
            lock = advisory_lock(name, scope=scope).acquire()
            with contextlib.suppress(KeyError), transaction.atomic():
                value("SELECT 1")
                if scope == "session":
                    lock.release()
                raise KeyError
            lock.release()
            with transaction.atomic():
                lock = advisory_lock(name, scope=scope).acquire()
            lock.release()
            assert other.is_free(lock_key(name))


class TestSavepoints:
    def test_a_rolled_back_savepoint_frees_a_transaction_lock(self, name: str, other: OtherSession) -> None:
        """Case 16."""
        with transaction.atomic():
            with pytest.raises(KeyError), transaction.atomic():
                lock = advisory_lock(name).acquire()
                assert lock.is_held()
                raise KeyError
            assert not lock.is_held()
            assert other.is_free(lock_key(name))
            again = advisory_lock(name).acquire()
            assert again.is_held()
            assert not other.is_free(lock_key(name))
            assert not lock.is_held(), "re-acquiring revives no older handle"
        assert other.is_free(lock_key(name))

    def test_one_that_was_undone_for_a_session_lock(self, name: str, other: OtherSession) -> None:
        """With it went a transaction lock of the body, and what was to be done after the commit."""
        done: list[str] = []
        with transaction.atomic():
            transaction.on_commit(lambda: done.append("before"))
            outer = advisory_lock(name, "outer").acquire()
            with pytest.raises(DataError), advisory_lock(name, scope="session"):
                inner = advisory_lock(name, "inner").acquire()
                transaction.on_commit(lambda: done.append("inside"))
                value("SELECT 1/0")
            transaction.set_rollback(False)  # somebody knows better
            assert outer.is_held()
            assert not inner.is_held()
            assert other.is_free(lock_key(name, "inner"))
            with pytest.raises(LockLost, match="inside the block"), inner:
                pass
            with advisory_lock(name, "inner") as again:
                assert again.is_held()
                assert not other.is_free(lock_key(name, "inner"))
        assert done == ["before"]
        assert other.is_free(lock_key(name, "inner"))

    def test_a_rolled_back_savepoint_keeps_a_session_lock(self, name: str, other: OtherSession) -> None:
        """Case 16."""
        with transaction.atomic():
            with pytest.raises(KeyError), transaction.atomic():
                lock = advisory_lock(name, scope="session").acquire()
                raise KeyError
            assert lock.is_held()
            assert not other.is_free(lock_key(name))
            lock.release()
        assert other.is_free(lock_key(name))

    def test_a_block_whose_savepoint_was_rolled_back_inside_it(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost, match="inside the block"), transaction.atomic():
            sid = connection.savepoint()
            assert sid is not None
            with advisory_lock(name) as lock:
                connection.savepoint_rollback(sid)
        assert lock.lost.is_set()

    def test_a_block_around_a_rolled_back_savepoint_is_not_lost(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with statements(5), advisory_lock(name) as lock:  # the take, the savepoint's three, one question
                with pytest.raises(KeyError), transaction.atomic():
                    raise KeyError
            assert lock.is_held()

    def test_a_block_that_outlives_its_transaction(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name)
        with transaction.atomic():
            lock.__enter__()
        with pytest.raises(LockLost), transaction.atomic():
            lock.__exit__(None, None, None)
        connection.set_autocommit(False)
        try:
            with pytest.raises(LockLost), advisory_lock(name):
                connection.commit()
            with pytest.raises(LockLost), advisory_lock(name):
                connection.commit()
                backend_pid()
            with advisory_lock(name):
                pass
        finally:
            connection.rollback()
            connection.set_autocommit(True)

    def test_retaken_in_another_transaction(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            old = advisory_lock(name).acquire()
        with transaction.atomic():
            backend_pid()
            with statements(1):
                new = try_advisory_lock(name).acquire()
            assert new.is_held()
            assert not old.is_held()

    def test_another_mode_of_the_key_revives_nothing(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name, shared=True, scope="session"), pytest.raises(LockLost), transaction.atomic():
            block = advisory_lock(name)
            with pytest.raises(KeyError), transaction.atomic():
                block.__enter__()
                raise KeyError
            with advisory_lock(name, shared=True):
                pass
            block.__exit__(None, None, None)

    def test_nested_after_a_savepoint_that_has_nothing_to_do_with_it(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            first = advisory_lock(name).acquire()
            with pytest.raises(KeyError), transaction.atomic():
                raise KeyError
            second = try_advisory_lock(name).acquire()
            assert first.is_held()
            assert second.is_held()
        assert other.is_free(lock_key(name))

    def test_busy_elsewhere_after_its_savepoint_was_rolled_back(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        with transaction.atomic():
            with pytest.raises(KeyError), transaction.atomic():
                advisory_lock(name).acquire()
                raise KeyError
            assert other.take(key)
            assert not try_advisory_lock(name).acquire()
        assert other.drop(key)


class TestFailingReleases:
    """A release that fails or is interrupted frees the lock all the same, or ends the session."""

    @contextlib.contextmanager
    def interrupted(self, error: type[BaseException], *, sent: bool) -> Iterator[None]:
        def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            if "unlock" in sql:
                if sent:
                    execute(sql, params, many, context)
                raise error
            return execute(sql, params, many, context)

        with connection.execute_wrapper(wrapper):
            yield

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
    @pytest.mark.parametrize("sent", [False, True])
    @pytest.mark.parametrize("inside", [False, True])
    def test_interrupted(
        self, error: type[BaseException], sent: bool, inside: bool, name: str, other: OtherSession
    ) -> None:
        with transaction.atomic() if inside else contextlib.nullcontext():
            pid = backend_pid()
            with pytest.raises(error), self.interrupted(error, sent=sent), advisory_lock(name, scope="session"):
                pass
            assert other.is_free(lock_key(name))
            assert backend_pid() == pid

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_in_a_decorated_function(self, error: type[BaseException], name: str, other: OtherSession) -> None:
        work = advisory_lock(name)(lambda: None)
        with pytest.raises(error), self.interrupted(error, sent=False):
            work()
        assert other.is_free(lock_key(name))

    def test_an_interrupt_at_the_savepoint_stays_itself(self, name: str, other: OtherSession) -> None:
        def interrupt(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            if sql.startswith("RELEASE SAVEPOINT"):
                raise KeyboardInterrupt
            return execute(sql, params, many, context)

        with transaction.atomic():
            with pytest.raises(KeyboardInterrupt), connection.execute_wrapper(interrupt):
                with advisory_lock(name, scope="session"):
                    pass
            assert other.is_free(lock_key(name))

    def test_before_the_block_began(self, name: str, other: OtherSession) -> None:
        """The lock is there, the savepoint around the body fails."""

        def fail_on_savepoint(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            if sql.startswith("SAVEPOINT advisory_lock_body"):
                raise RuntimeError
            return execute(sql, params, many, context)

        with transaction.atomic(), connection.execute_wrapper(fail_on_savepoint):
            with pytest.raises(RuntimeError):
                advisory_lock(name, scope="session").__enter__()
            assert other.is_free(lock_key(name))

    def test_interrupted_before_the_block_is_looked_up(
        self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from django_advisory_lock.owners import Owner

        lock, block_of = advisory_lock(name), Owner.block_of

        def interrupted_once(owner: Owner, lock: object, frame: int) -> LockHandle | None:
            monkeypatch.setattr(Owner, "block_of", block_of)
            raise KeyboardInterrupt

        monkeypatch.setattr(Owner, "block_of", interrupted_once)
        with pytest.raises(KeyboardInterrupt), lock:
            pass
        assert other.is_free(lock_key(name))
        monkeypatch.setattr(Owner, "block_of", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            lock.__exit__(None, None, None)

    def test_a_wrapper_that_forbids_queries_does_not_hide_the_error_of_the_body(
        self, name: str, other: OtherSession
    ) -> None:
        with pytest.raises(KeyError), self.interrupted(RuntimeError, sent=False), advisory_lock(name):
            raise KeyError
        assert other.is_free(lock_key(name))

    def test_nested(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name):
            with pytest.raises(KeyboardInterrupt), self.interrupted(KeyboardInterrupt, sent=False):
                with advisory_lock(name):
                    pass
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))

    def test_cancelled(self, name: str, other: OtherSession) -> None:
        """The unlock was cut, and made good: the block ends as if nothing had happened."""

        def cancel(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            if "unlock" in sql:
                with connection.wrap_database_errors:
                    connection.connection.execute("DO $$ BEGIN RAISE SQLSTATE '57014'; END $$")
            return execute(sql, params, many, context)

        with connection.execute_wrapper(cancel), advisory_lock(name):
            pass
        assert other.is_free(lock_key(name))

    def test_a_session_that_cannot_be_asked_is_closed(self, name: str, other: OtherSession) -> None:
        def break_and_raise(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            if "unlock" in sql:
                kill(other)
                raise RuntimeError
            return execute(sql, params, many, context)

        with pytest.raises(RuntimeError), connection.execute_wrapper(break_and_raise), advisory_lock(name):
            pass
        other.wait_until_free(lock_key(name))
        assert backend_pid()


def test_a_question_that_fails_is_no_answer(name: str, other: OtherSession) -> None:
    def cancel(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        raise OperationalError("canceling statement due to statement timeout")

    with advisory_lock(name) as lock:
        with pytest.raises(OperationalError), connection.execute_wrapper(cancel):
            lock.is_held()
        assert not lock.lost.is_set()


def test_only_own_locks_are_released(name: str, other: OtherSession) -> None:
    mine = lock_key(name, "mine")
    value("SELECT pg_advisory_lock(%s) IS NULL", mine.args)
    with advisory_lock(name):
        pass
    assert not other.is_free(mine)
    assert value("SELECT pg_advisory_unlock(%s)", mine.args)


def test_no_warning_of_the_server_in_the_usual_course(name: str, other: OtherSession) -> None:
    """Case 5: "you don't own a lock"."""
    notices: list[str | None] = []
    connection.ensure_connection()
    connection.connection.add_notice_handler(lambda diag: notices.append(diag.message_primary))
    other.take(lock_key(name))
    with try_advisory_lock(name) as lock:
        assert not lock
    other.drop(lock_key(name))
    with advisory_lock(name), advisory_lock(name, shared=True), transaction.atomic(), advisory_lock(name) as lock:
        lock.release()
    assert notices == []


def test_a_lock_that_was_never_acquired_is_not_held(name: str, other: OtherSession) -> None:
    other.take(lock_key(name))
    lock: LockHandle = try_advisory_lock(name).acquire()
    with statements(0):
        assert not lock.is_held()
        with pytest.raises(LockLost, match="never acquired"):
            lock.check()
    assert not lock.lost.is_set()


def test_who_asks_in_the_middle_of_a_release_sees_no_loss(name: str, other: OtherSession) -> None:
    """From another thread: the server has freed the lock, and its owner has not noted that yet."""
    asked = []

    def ask(execute: Callable[..., Any], *arguments: Any) -> Any:
        result = execute(*arguments)
        asked.append(Thread(lock.is_held).result())
        return result

    lock = advisory_lock(name).acquire()
    with connection.execute_wrapper(ask):
        lock.release()
    assert asked == [False]
    assert not lock.lost.is_set()
