"""Several locks at once: all or nothing, each once, in one order for everybody."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, OperationalError, connection, connections, transaction

from django_advisory_lock import (
    LockDeadlock,
    LockHandle,
    LockKey,
    LockLost,
    LockNotAcquired,
    LockTableFull,
    LockTimeout,
    PoolerDetected,
    advisory_lock,
    advisory_lock_all,
    lock_key,
    model_key,
    try_advisory_lock,
)
from django_advisory_lock.sessions import attach
from tests.support import OtherSession, Thread, backend_pid, output, spawn, statements, value, wait_until
from tests.test_interrupts import raises, strike_at_every_line
from tests.test_taking import wrapped
from tests.testapp.models import Account, Token

MINE = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()
 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""


def mine(alias: str = "default") -> int:
    """Return how many locks this thread's session holds."""
    return int(value(MINE, alias=alias))


@pytest.fixture
def keys(name: str) -> list[LockKey]:
    """Three keys, in the order that everybody takes them in."""
    return sorted(lock_key(name, number) for number in range(3))


@pytest.fixture
def second(other: OtherSession) -> Iterator[OtherSession]:
    """A look from outside while the other session waits."""
    session = OtherSession()
    yield session
    session.close()


class TestKeys:
    @pytest.mark.parametrize("alias", ["default", "binding", "prepared"])
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("inside", [False, True])
    def test_every_form(self, alias: str, shared: bool, inside: bool, name: str, other: OtherSession) -> None:
        account, token = Account(pk=4711), Token(pk=uuid.uuid4())
        forms: dict[Any, LockKey] = {
            name: lock_key(name),
            (name, 42): lock_key(name, 42),
            (name, "é"): lock_key(name, "é"),
            account: model_key(account),
            token: model_key(token),
            LockKey((-1,)): LockKey((-1,)),
            LockKey((-(2**63),)): LockKey((-(2**63),)),
            LockKey((2**63 - 1,)): LockKey((2**63 - 1,)),
            LockKey.pair(-1, -1): LockKey.pair(-1, -1),
            LockKey.pair(-(2**31), 2**31 - 1): LockKey.pair(-(2**31), 2**31 - 1),
            LockKey.pair(0, 8): LockKey.pair(0, 8),
            LockKey((8,)): LockKey((8,)),
        }
        with connections[alias].cursor():
            pass
        if inside:
            with transaction.atomic(using=alias), advisory_lock_all(*forms, using=alias, shared=shared) as lock:
                assert lock.scope == "transaction"
                self.check(lock, list(forms.values()), shared, alias, other)
        else:
            with advisory_lock_all(*forms, using=alias, shared=shared) as lock:
                assert lock.scope == "session"
                self.check(lock, list(forms.values()), shared, alias, other)
        assert all(other.is_free(key) for key in forms.values())

    def check(self, lock: LockHandle, keys: list[LockKey], shared: bool, alias: str, other: OtherSession) -> None:
        assert lock
        assert lock.keys == tuple(sorted(keys))
        assert lock.is_held()
        assert mine(alias) == len(keys)
        for key in keys:
            assert not other.take(key)
            assert other.take(key, shared=True) is shared
            assert not shared or other.drop(key, shared=True)

    @pytest.mark.parametrize("inside", [False, True])
    def test_ten_thousand_at_once(self, inside: bool, other: OtherSession) -> None:
        """In one statement, and all free afterwards: some three quarters of a lock table of the usual size."""
        if int(other.one("SHOW max_locks_per_transaction")) * int(other.one("SHOW max_connections")) < 6_400:
            pytest.skip("NOT TESTED: the lock table of this server is too small for 10,000 locks.")
        start = random.randrange(2**30)
        many = [LockKey((-start - number,)) for number in range(5_000)]
        many += [LockKey.pair(start, number) for number in range(5_000)]
        random.shuffle(many)
        if inside:
            with transaction.atomic(), statements(3):
                lock = advisory_lock_all(*many).acquire()
        else:
            with statements(1):
                lock = advisory_lock_all(*many).acquire()
            assert mine() == 10_000
            assert lock.is_held()
            with statements(1):
                lock.release()
        assert mine() == 0

    def test_duplicates_and_two_names_for_one_key(self, name: str, other: OtherSession) -> None:
        """Case 21: each once, so that one release frees it."""
        key = lock_key(name)
        with advisory_lock_all(name, name, key, (name,), LockKey(key.args, "by another name")) as lock:
            assert lock.keys == (key,)
            assert not other.is_free(key)
        assert other.is_free(key)
        with advisory_lock_all((name, 1), (name, "1"), (name, 2)) as lock:
            assert lock.keys == tuple(sorted([lock_key(name, 1), lock_key(name, 2)]))
            assert mine() == 2
        assert mine() == 0

    def test_the_order_of_the_arguments_does_not_count(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 21."""
        sent: list[Any] = []

        def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            sent.append(params)
            return execute(sql, params, many, context)

        for order in itertools.permutations(keys):
            with connection.execute_wrapper(note), advisory_lock_all(*order) as lock:
                assert lock.keys == tuple(keys)
        assert len(set(sent)) == 1

    @pytest.mark.parametrize(
        ("bad", "error", "words"),
        [
            ((5,), TypeError, r"LockKey\(\(5,\)\)"),
            (("x", 0), TypeError, "bare number"),
            ((True,), TypeError, "bool"),
            ((None,), ValueError, "None"),
            (("x", None), ValueError, "None"),
            ((), ValueError, "at least one"),
            (("",), ValueError, "Empty"),
            (((),), ValueError, "at least one part"),
            ((["a", "b"],), TypeError, "list"),
            ((("a", ["b"]),), TypeError, "list"),
            ((("a", ("b",)),), TypeError, "tuple"),
            (({"a"},), TypeError, "set"),
            (((1, 2),), TypeError, "pair"),
            ((1.5,), TypeError, "float"),
            ((b"x",), TypeError, "bytes"),
            ((Account,), TypeError, "model_key"),
            (("x", lambda: "y"), TypeError, "callable|function"),
            ((("x", 2**63),), None, ""),
            (((2**63,),), ValueError, "range"),
        ],
    )
    def test_bad_input_is_refused_where_the_lock_is_made(
        self, bad: tuple[Any, ...], error: type[Exception] | None, words: str
    ) -> None:
        """Case 29."""
        if error is None:
            assert advisory_lock_all(*bad)._source
            return
        with pytest.raises(error, match=words):
            advisory_lock_all(*bad)

    def test_an_unsaved_instance_is_refused(self) -> None:
        """Case 29."""
        with pytest.raises(ValueError, match="save"):
            advisory_lock_all("x", Account())

    def test_bad_options_are_refused(self) -> None:
        for options in ({"timeout": -1}, {"timeout": float("nan")}, {"scope": "block"}):
            with pytest.raises(ValueError, match=r"timeout|scope"):
                advisory_lock_all("x", **options)
        with pytest.raises(TypeError):
            advisory_lock_all("x", using=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="holds nothing"):
            bool(advisory_lock_all("x"))


class TestUse:
    def test_a_decorator_with_fixed_keys(self, keys: list[LockKey], other: OtherSession) -> None:
        @advisory_lock_all(*keys)
        def work(number: int) -> int:
            assert not any(other.is_free(key) for key in keys)
            return number + 1

        assert work(1) == 2
        assert mine() == 0

    @pytest.mark.parametrize("kind", [list, tuple, set, iter])
    def test_a_decorator_with_a_function_that_returns_the_keys(
        self, kind: Callable[[Any], Any], name: str, other: OtherSession
    ) -> None:
        @advisory_lock_all(lambda source, target: kind([(name, source), (name, target)]))
        def transfer(source: int, target: int) -> int:
            return mine()

        assert transfer(1, target=2) == 2
        assert transfer(2, target=2) == 1
        assert mine() == 0

    @pytest.mark.parametrize(
        ("returned", "error"),
        [
            (None, TypeError),
            ("text", TypeError),
            (lock_key("x"), TypeError),
            (5, TypeError),
            ([5], TypeError),
            (b"bytes", TypeError),
            ([None], ValueError),
            ([], ValueError),
            ([["x"]], TypeError),
            (Account(pk=1), TypeError),
        ],
        ids=repr,
    )
    def test_a_function_that_returns_something_else(
        self, returned: Any, error: type[Exception], other: OtherSession
    ) -> None:
        @advisory_lock_all(lambda: returned)
        def work() -> None:
            pytest.fail("ran without a lock")

        with pytest.raises(error):
            work()

    def test_a_function_is_not_for_a_block(self, other: OtherSession) -> None:
        with pytest.raises(TypeError, match="decorator"), advisory_lock_all(lambda: ["x"]):
            pytest.fail("got in")

    def test_by_hand(self, keys: list[LockKey], other: OtherSession) -> None:
        lock = advisory_lock_all(*keys).acquire()
        assert lock.is_held()
        lock.check()
        lock.release()
        with statements(0):
            lock.release()
        assert not lock.is_held()
        with pytest.raises(LockLost):
            lock.check()

    def test_one_object_serves_many_entries(self, keys: list[LockKey], other: OtherSession) -> None:
        lock = advisory_lock_all(*keys)
        with lock as outer, lock as inner:
            assert outer is not inner
            assert mine() == 3
        assert mine() == 0

    def test_a_dropped_handle(self, keys: list[LockKey], other: OtherSession) -> None:
        with pytest.warns(ResourceWarning, match="dropped"):
            advisory_lock_all(*keys).acquire()
        with advisory_lock_all(*keys, timeout=0):
            pass
        assert mine() == 0

    @pytest.mark.parametrize("inside", [False, True])
    def test_nothing_happened_to_the_session(self, inside: bool, keys: list[LockKey], other: OtherSession) -> None:
        """Case 3: the connection is pinned as for one lock."""
        with advisory_lock_all(*keys):
            assert connection.close_at is None
            assert attach(connection).is_pinned
        assert not attach(connection).is_pinned

    def test_asynchronously(self, keys: list[LockKey], other: OtherSession) -> None:
        @advisory_lock_all(lambda: keys)
        async def decorated() -> None:
            assert not any(other.is_free(key) for key in keys)

        async def main() -> None:
            async with advisory_lock_all(*keys) as lock:
                assert await lock.ais_held()
                assert not any(other.is_free(key) for key in keys)
            assert all(other.is_free(key) for key in keys)
            await decorated()
            lock = await advisory_lock_all(*keys).aacquire()
            await lock.arelease()
            other.take(keys[1])
            with pytest.raises(LockTimeout):
                await advisory_lock_all(*keys, timeout=0.05).aacquire()
            assert other.is_free(keys[0])
            task = asyncio.create_task(advisory_lock_all(*keys).aacquire())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            other.drop(keys[1])
            assert all(other.is_free(key) for key in keys)
            await sync_to_async(connections.close_all)()

        asyncio.run(main())

    def test_tasks_exclude_each_other_whatever_their_order(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 89."""
        inside: list[int] = []
        most: list[int] = []

        async def work(number: int, order: list[LockKey]) -> None:
            async with advisory_lock_all(*order, timeout=15):
                inside.append(number)
                most.append(len(inside))
                await asyncio.sleep(0.002)
                inside.remove(number)

        async def main() -> None:
            orders = [keys[:2], keys[1:], keys[::-1], [keys[1]], [keys[2], keys[1]]]
            await asyncio.gather(*(work(number, order) for number, order in enumerate(orders)))
            await sync_to_async(connections.close_all)()

        asyncio.run(main())
        assert max(most) == 1
        assert len(most) == 5


class TestCost:
    def test_a_free_one(self, keys: list[LockKey], other: OtherSession) -> None:
        with statements(1):
            lock = advisory_lock_all(*keys).acquire()
        with statements(1):
            lock.release()
        with statements(1):
            lock = advisory_lock_all(*keys, timeout=5).acquire()
        lock.release()

    def test_in_a_transaction(self, keys: list[LockKey], other: OtherSession) -> None:
        """A savepoint around the try; a session lock gives back by itself and has one around its body."""
        with transaction.atomic():
            with statements(3), advisory_lock_all(*keys):
                pass
        with transaction.atomic():
            with statements(4), advisory_lock_all(*keys, scope="session"):
                pass

    @pytest.mark.parametrize(
        ("inside", "scope", "count"), [(False, "auto", 2), (True, "session", 4), (True, "auto", 6)]
    )
    def test_a_wait(
        self, inside: bool, scope: Any, count: int, keys: list[LockKey], other: OtherSession, second: OtherSession
    ) -> None:
        def wait() -> int:
            with statements(count):
                lock = advisory_lock_all(*keys, scope=scope).acquire()
            held = mine()
            lock.release()
            return held

        def work() -> int:
            if not inside:
                return wait()
            with transaction.atomic():
                return wait()

        other.take(keys[1])
        waiting = Thread(work)
        second.wait_for_waiters(keys[1])
        other.drop(keys[1])
        assert waiting.result() == 3

    def test_a_failed_attempt_leaves_no_savepoint_in_the_transaction(
        self, keys: list[LockKey], other: OtherSession
    ) -> None:
        """Thousands of them would each cost the server memory until the transaction ends."""
        other.take(keys[2])
        with transaction.atomic():
            with pytest.raises(LockTimeout):
                advisory_lock_all(*keys, timeout=0).acquire()
            with pytest.raises(DatabaseError, match="does not exist"), transaction.atomic():
                connection.cursor().execute("RELEASE SAVEPOINT advisory_lock_wait")

    def test_a_busy_one(self, keys: list[LockKey], other: OtherSession) -> None:
        """The try, who holds it; with a timeout the wait in between."""
        other.take(keys[2])
        with statements(2), pytest.raises(LockTimeout):
            advisory_lock_all(*keys, timeout=0).acquire()
        with statements(3), pytest.raises(LockTimeout):
            advisory_lock_all(*keys, timeout=0.01).acquire()


@pytest.mark.parametrize("busy", [0, 1, 2])
class TestBusy:
    @pytest.mark.parametrize("timeout", [0, 0.03])
    @pytest.mark.parametrize("scope", ["auto", "session"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_it_takes_nothing(
        self, busy: int, timeout: float, scope: Any, inside: bool, keys: list[LockKey], other: OtherSession
    ) -> None:
        """Case 9, 21: and the error names the busy key, its holder, and how long it was waited for."""
        other.take(keys[busy])
        start = time.monotonic()

        def attempt() -> None:
            with pytest.raises(LockTimeout, match=r"one of 3") as caught:
                advisory_lock_all(*keys, timeout=timeout, scope=scope).acquire()
            assert caught.value.key == keys[busy]
            assert keys[busy].name in str(caught.value)
            assert f"pid {other.pid} (other-session)" in str(caught.value)
            assert mine() == 0

        if inside:
            with transaction.atomic():
                account = Account.objects.create(name="busy")
                attempt()
                account.balance = 1
                account.save()
            assert Account.objects.get(pk=account.pk).balance == 1
            account.delete()
        else:
            attempt()
        assert time.monotonic() - start >= timeout
        assert all(other.is_free(key) for key in keys if key != keys[busy])
        other.drop(keys[busy])

    def test_what_was_held_before_stays(self, busy: int, keys: list[LockKey], other: OtherSession) -> None:
        """Nested holds count right: the inner release frees nothing, the outer all of it."""
        mine_before = [key for key in keys if key != keys[busy]]
        other.take(keys[busy])
        for outer_key in mine_before:
            with advisory_lock(outer_key) as outer:
                for timeout in (0, 0.02):
                    with pytest.raises(LockTimeout):
                        advisory_lock_all(*keys, timeout=timeout).acquire()
                assert outer.is_held()
                assert mine() == 1
                with advisory_lock(outer_key):
                    pass
                assert not other.is_free(outer_key)
            assert mine() == 0
            assert other.is_free(outer_key)

    def test_what_the_transaction_held_before_stays(self, busy: int, keys: list[LockKey], other: OtherSession) -> None:
        other.take(keys[busy])
        kept = keys[busy - 1]
        with transaction.atomic():
            with advisory_lock(kept) as outer:
                for timeout in (0, 0.02):
                    with pytest.raises(LockTimeout):
                        advisory_lock_all(*keys, timeout=timeout).acquire()
                assert outer.is_held()
            assert mine() == 1
            with pytest.raises(LockTimeout):
                advisory_lock_all(*keys, timeout=0.02, scope="session").acquire()
            assert mine() == 1
        assert mine() == 0

    def test_another_owner_on_the_same_session(self, busy: int, keys: list[LockKey], other: OtherSession) -> None:
        """Threads that share a connection: refused as by another process, and a wait would never end."""
        connection.inc_thread_sharing()
        shared = connections["default"]

        def attempt() -> None:
            connections["default"] = shared
            with pytest.raises(LockTimeout, match="another thread or task of this process"):
                advisory_lock_all(*keys, timeout=0).acquire()
            with pytest.raises(LockDeadlock, match="another thread or task"):
                advisory_lock_all(*keys).acquire()
            del connections["default"]

        try:
            with advisory_lock(keys[busy]):
                Thread(attempt).result()
                assert mine() == 1
            with advisory_lock(keys[busy], shared=True), pytest.raises(LockTimeout):
                other.take(keys[busy - 1])
                advisory_lock_all(*keys, timeout=0).acquire()
            assert mine() == 0
        finally:
            connection.dec_thread_sharing()


class TestWaiting:
    def test_one_deadline_for_all(self, name: str, other: OtherSession) -> None:
        """Ten keys that become free one after the other do not add up to ten times the timeout."""
        keys = sorted(lock_key(name, number) for number in range(10))
        for key in keys:
            other.take(key)
        stop = threading.Event()

        def free_slowly() -> None:
            for key in keys:
                if stop.wait(0.35):
                    break
                other.drop(key)
            for key in keys:
                while other.holders(key):
                    other.drop(key)

        freeing = Thread(free_slowly)
        start = time.monotonic()
        with pytest.raises(LockTimeout):
            advisory_lock_all(*keys, timeout=1).acquire()
        assert 1 <= time.monotonic() - start < 3
        stop.set()
        freeing.result()
        assert mine() == 0

    def test_ten_that_come_in_time(self, name: str, other: OtherSession, second: OtherSession) -> None:
        keys = sorted(lock_key(name, number) for number in range(10))
        for key in keys:
            other.take(key)

        def wait() -> int:
            with advisory_lock_all(*keys, timeout=15):
                return mine()

        waiting = Thread(wait)
        for key in keys:
            second.wait_for_waiters(key)
            other.drop(key)
        assert waiting.result() == 10

    @pytest.mark.parametrize("own", ["0", "7s"])
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("alias", ["default", "binding"])
    def test_lock_timeout_is_given_back(
        self, own: str, inside: bool, alias: str, keys: list[LockKey], other: OtherSession, second: OtherSession
    ) -> None:
        """Case 11."""

        def take() -> None:
            for scope in ("auto", "session"):
                with pytest.raises(LockTimeout):
                    advisory_lock_all(*keys, timeout=0.02, using=alias, scope=scope).acquire()
                assert value("SHOW lock_timeout", alias=alias) == own
            waited.set()
            with advisory_lock_all(*keys, timeout=15, using=alias):
                assert value("SHOW lock_timeout", alias=alias) == own

        def work() -> None:
            value("SELECT set_config('lock_timeout', %s, false)", [own], alias)
            if inside:
                with transaction.atomic(using=alias):
                    take()
            else:
                take()
            assert value("SHOW lock_timeout", alias=alias) == own

        waited = threading.Event()
        other.take(keys[1])
        waiting = Thread(work)
        wait_until(lambda: waited.is_set() or not waiting.is_alive())
        if waiting.is_alive():
            wait_until(lambda: second.waiters(keys[1]) or not waiting.is_alive())
        other.drop(keys[1])
        waiting.result()

    def test_no_timeout_overrides_the_session_s_own(
        self, keys: list[LockKey], other: OtherSession, second: OtherSession
    ) -> None:
        def wait() -> int:
            value("SELECT set_config('lock_timeout', '20ms', false)")
            with advisory_lock_all(*keys):
                return mine()

        other.take(keys[1])
        waiting = Thread(wait)
        second.wait_for_waiters(keys[1])
        waits_long = (
            "SELECT now() - min(query_start) > '60ms' FROM pg_stat_activity"
            " WHERE wait_event = 'advisory' AND datname = current_database()"
        )
        wait_until(lambda: second.one(waits_long))
        assert second.waiters(keys[1]) == 1
        other.drop(keys[1])
        assert waiting.result() == 3

    def test_shared_ones_together(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 19."""
        barrier = threading.Barrier(3)

        def read() -> None:
            with advisory_lock_all(*keys, shared=True, timeout=15):
                barrier.wait(15)

        for thread in [Thread(read) for _ in range(3)]:
            thread.result()
        with advisory_lock_all(*keys, shared=True), advisory_lock_all(*keys, shared=True, timeout=0):
            assert other.take(keys[0], shared=True)
            with pytest.raises(LockTimeout) as caught:
                advisory_lock_all(*keys, timeout=0.02).acquire()
            assert caught.value.key == keys[0]
            other.drop(keys[0], shared=True)
        assert mine() == 0

    def test_both_modes_nested(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 19: each release is of its own mode."""
        notices: list[str | None] = []
        connection.ensure_connection()
        connection.connection.add_notice_handler(lambda diag: notices.append(diag.message_primary))
        with advisory_lock_all(*keys):
            with advisory_lock_all(*keys[:2], shared=True):
                assert mine() == 5
            assert mine() == 3
        with advisory_lock_all(*keys, shared=True):
            with advisory_lock_all(*keys[1:]):
                assert mine() == 5
        assert mine() == 0
        assert notices == []

    def test_shared_inside_ones_own_exclusive_lock_while_others_wait(
        self, keys: list[LockKey], other: OtherSession, second: OtherSession
    ) -> None:
        """Before PostgreSQL 18 a try answers no there, although the lock is there for the asking."""
        with advisory_lock(keys[1]):
            waiting = Thread(lambda: other.wait(keys[1]))
            second.wait_for_waiters(keys[1])
            with advisory_lock_all(*keys, shared=True, timeout=0) as lock:
                assert lock.is_held()
            with transaction.atomic(), advisory_lock_all(*keys, shared=True, timeout=0) as lock:
                assert lock.is_held()
            with advisory_lock_all(keys[1], keys[1], shared=True, timeout=0):
                assert mine() == 2
            second.take(keys[2])
            for inside in (False, True):
                with transaction.atomic() if inside else nullcontext(), pytest.raises(LockTimeout) as caught:
                    advisory_lock_all(*keys, shared=True, timeout=0).acquire()
                assert caught.value.key == keys[2]
                assert mine() == 1
            second.drop(keys[2])
        waiting.result()
        other.drop(keys[1])


class TestScope:
    def test_in_a_transaction_until_its_end(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 13."""
        with transaction.atomic():
            with advisory_lock_all(*keys):
                pass
            assert not any(other.is_free(key) for key in keys)
        assert all(other.is_free(key) for key in keys)

    def test_session_scope_in_a_transaction(self, keys: list[LockKey], other: OtherSession) -> None:
        with transaction.atomic():
            with advisory_lock_all(*keys, scope="session") as lock:
                assert lock.is_held()
                assert mine() == 3
            assert mine() == 0

    def test_transaction_scope_outside_one(self, keys: list[LockKey], other: OtherSession) -> None:
        with pytest.raises(transaction.TransactionManagementError):
            advisory_lock_all(*keys, scope="transaction").acquire()

    def test_a_database_error_in_the_body(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 8."""
        with pytest.raises(DatabaseError, match="division"), transaction.atomic():
            with advisory_lock_all(*keys, scope="session"):
                value("SELECT 1/0")
        assert all(other.is_free(key) for key in keys)

    @pytest.mark.parametrize("nested", [1, 3])
    def test_a_savepoint_that_is_rolled_back(self, nested: int, keys: list[LockKey], other: OtherSession) -> None:
        """Case 16: the notes are stale then, and found out by the next take, of all keys or of some."""
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                lock = advisory_lock_all(*keys).acquire()
                raise ZeroDivisionError
            assert not lock.is_held()
            assert other.take(keys[0])
            with pytest.raises(LockTimeout, match=str(other.pid)):
                advisory_lock_all(*keys, timeout=0).acquire()
            other.drop(keys[0])
            again = advisory_lock_all(*keys[:nested]).acquire()
            assert again.is_held()
            assert mine() == nested
            assert not lock.is_held() or nested == 3
        assert mine() == 0

    @pytest.mark.parametrize("again", [1, 2])
    def test_a_row_of_one_key_says_nothing_of_the_others(
        self, again: int, keys: list[LockKey], other: OtherSession
    ) -> None:
        """Case 16: the row of the first is that of an older lock; the second is gone, and free for others."""
        with transaction.atomic(), advisory_lock(keys[0]):
            savepoint = transaction.savepoint()
            with pytest.raises(LockLost), advisory_lock_all(*keys[:2]) as lock:
                transaction.savepoint_rollback(savepoint)
                assert not lock.is_held()
                if again == 2:
                    advisory_lock_all(*keys[:2]).acquire()
                else:
                    advisory_lock(keys[0]).acquire()
                    assert other.is_free(keys[1])

    def test_stale_notes_of_some_beside_others_that_stand(self, keys: list[LockKey], other: OtherSession) -> None:
        with transaction.atomic():
            first = advisory_lock(keys[0]).acquire()
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                advisory_lock_all(*keys[1:]).acquire()
                raise ZeroDivisionError
            with advisory_lock_all(*keys):
                assert mine() == 3
            with advisory_lock_all(*keys, scope="session", timeout=0):
                assert mine() == 3
            assert mine() == 3
            assert first.is_held()
        assert mine() == 0

    def test_a_block_that_outlives_its_savepoint(self, keys: list[LockKey], other: OtherSession) -> None:
        with transaction.atomic():
            savepoint = transaction.atomic()
            savepoint.__enter__()
            block = advisory_lock_all(*keys)
            lock = block.__enter__()
            savepoint.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
            with pytest.raises(LockLost, match=keys[0].name):
                block.__exit__(None, None, None)
            assert lock.lost.is_set()
            assert mine() == 0

    def test_the_same_transaction_nests(self, keys: list[LockKey], other: OtherSession) -> None:
        with transaction.atomic():
            with advisory_lock_all(*keys), advisory_lock_all(*keys[1:]), advisory_lock(keys[0]):
                assert mine() == 3
            with advisory_lock_all(*keys, scope="session"):
                assert mine() == 3
            assert mine() == 3
        assert mine() == 0


class TestFailures:
    """After any outcome the server holds what we say it holds."""

    @pytest.mark.parametrize("scope", ["auto", "session"])
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("nested", [False, True])
    def test_a_deadlock(
        self,
        scope: Any,
        inside: bool,
        nested: bool,
        keys: list[LockKey],
        other: OtherSession,
        second: OtherSession,
    ) -> None:
        """Case 21: a session that knows no order: one typed error, all given back, the other one proceeds."""
        other.take(keys[2])
        other.raw.execute("SET deadlock_timeout = '1min'")  # so that the victim is ours

        def cross() -> None:
            second.wait_for_waiters(keys[2])
            other.wait(keys[0])

        def attempt() -> None:
            crossing = Thread(cross)
            with pytest.raises(LockDeadlock, match="deadlock") as caught:
                advisory_lock_all(*keys, scope=scope).acquire()
            assert isinstance(caught.value.__cause__, OperationalError)
            if not (nested and inside and scope == "auto"):
                crossing.result()
            assert mine() == (1 if nested else 0)

        def in_transaction() -> None:
            if not inside:
                attempt()
                return
            with transaction.atomic():
                account = Account.objects.create(name="deadlock")
                attempt()
                assert Account.objects.filter(pk=account.pk).exists()
                account.delete()

        if nested:
            with advisory_lock(keys[1]) as outer:
                in_transaction()
                assert outer.is_held()
                assert not second.is_free(keys[1])
        else:
            in_transaction()
        assert mine() == 0
        wait_until(lambda: second.holder(keys[0]) == other.pid)
        other.drop(keys[0])
        other.drop(keys[2])

    @pytest.mark.parametrize("timeout", [None, 15])
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("how", ["cancelled", "statement_timeout", "killed"])
    def test_a_wait_that_is_ended(
        self,
        timeout: float | None,
        inside: bool,
        how: str,
        keys: list[LockKey],
        other: OtherSession,
        second: OtherSession,
    ) -> None:
        """Case 4, 32: what was taken before the busy key is given back, and the alias works again."""
        other.take(keys[2])
        pids: list[int] = []

        def attempt() -> None:
            pids.append(backend_pid())
            if how == "statement_timeout":
                value("SELECT set_config('statement_timeout', '150ms', false)")
            with pytest.raises(OperationalError if how == "killed" else LockNotAcquired) as caught:
                advisory_lock_all(*keys, timeout=timeout).acquire()
            assert not isinstance(caught.value, LockTimeout)
            if how != "killed":
                assert mine() == 0
                assert backend_pid() == pids[0]

        def work() -> None:
            if not inside:
                attempt()
            elif how != "killed":
                with transaction.atomic():
                    attempt()
            else:
                with pytest.raises(DatabaseError), transaction.atomic():
                    attempt()
                    backend_pid()
            value("SELECT set_config('statement_timeout', '0', false)")
            with advisory_lock_all(*keys[:2], timeout=0):
                assert mine() == 2
            assert (backend_pid() == pids[0]) is (how != "killed")

        waiting = Thread(work)
        if how != "statement_timeout":
            second.wait_for_waiters(keys[2])
            (second.cancel if how == "cancelled" else second.kill)(pids[0])
        waiting.result()
        other.drop(keys[2])

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, RuntimeError])
    @pytest.mark.parametrize("at", ["try", "wait"])
    @pytest.mark.parametrize("scope", ["auto", "session"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_an_interrupt_beside_the_grant(
        self,
        interrupt: type[BaseException],
        at: str,
        scope: Any,
        inside: bool,
        keys: list[LockKey],
        other: OtherSession,
    ) -> None:
        """Case 67b."""

        def raise_it(sql: str) -> None:
            if "pg_try" in sql and at == "wait":
                other.drop(keys[1])
            elif "pg_" in sql:
                raise interrupt

        def take() -> None:
            with wrapped(after=raise_it), advisory_lock_all(*keys, scope=scope):
                pytest.fail("got in")

        if at == "wait":
            other.take(keys[1])
        if inside:
            with pytest.raises(interrupt), transaction.atomic():
                take()
        else:
            with pytest.raises(interrupt):
                take()
        assert mine() == 0
        assert all(other.is_free(key) for key in keys)
        with advisory_lock_all(*keys):
            assert mine() == 3

    def test_an_interrupt_in_a_nested_take(self, keys: list[LockKey], other: OtherSession) -> None:
        """Whether they were granted a second time nobody can tell: the last release frees the locks for certain."""

        def raise_it(sql: str) -> None:
            raise KeyboardInterrupt

        for moment in ("before", "after"):
            with advisory_lock_all(*keys[:2]) as outer:
                with pytest.raises(KeyboardInterrupt), wrapped(**{moment: raise_it}):
                    advisory_lock_all(*keys[1:]).acquire()
                assert outer.is_held()
                assert mine() == 2
                assert other.is_free(keys[2])
                with advisory_lock_all(*keys):
                    assert mine() == 3
                assert outer.is_held()
            assert mine() == 0
        assert all(other.is_free(key) for key in keys)

    @pytest.mark.parametrize("at", ["pg_try_advisory", "set_config"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_a_full_lock_table(self, at: str, inside: bool, keys: list[LockKey], other: OtherSession) -> None:
        """The server says 53200 and names the setting; made here by an error of that code, with the server's hint."""

        def full(sql: str) -> None:
            if at in sql:
                with connection.wrap_database_errors:
                    connection.connection.execute(
                        "DO $$ BEGIN RAISE SQLSTATE '53200' USING"
                        " HINT = 'You might need to increase \"max_locks_per_transaction\".'; END $$"
                    )

        def take() -> None:
            with pytest.raises(LockTableFull, match="new connections fail too"), wrapped(before=full):
                advisory_lock_all(*keys).acquire()

        other.take(keys[2])
        if inside:
            with transaction.atomic():
                take()
                assert mine() == 0
        else:
            take()
            assert mine() == 0
        assert other.is_free(keys[0])
        other.drop(keys[2])

    @pytest.mark.parametrize("timeout", [0.001, 0.003])
    @pytest.mark.parametrize("inside", [False, True])
    def test_a_timeout_beside_the_grant(
        self, timeout: float, inside: bool, keys: list[LockKey], other: OtherSession
    ) -> None:
        """Five threads hammer overlapping keys: what was reported as busy is not kept, and nobody is inside beside."""
        end = time.monotonic() + 1.5
        holders: dict[LockKey, list[int]] = {key: [] for key in keys}
        counts = {"got": 0, "busy": 0}

        def attempt(some: list[LockKey]) -> None:
            try:
                with advisory_lock_all(*some, timeout=timeout, scope="session"):
                    for key in some:
                        holders[key].append(1)
                        assert len(holders[key]) == 1
                    counts["got"] += 1
                    for key in some:
                        holders[key].pop()
            except LockTimeout:
                counts["busy"] += 1
                assert mine() == 0, "reported as busy, and kept"

        def hammer(some: list[LockKey]) -> None:
            while time.monotonic() < end:
                if inside:
                    with transaction.atomic():
                        attempt(some)
                else:
                    attempt(some)

        orders = [keys, keys[::-1], keys[:2], keys[1:], keys[::2]]
        for thread in [Thread(partial(hammer, order)) for order in orders]:
            thread.result()
        assert counts["got"]
        assert counts["busy"]

    @pytest.mark.parametrize("gone", [0, 1, 2])
    def test_one_of_many_is_gone(self, gone: int, keys: list[LockKey], other: OtherSession) -> None:
        """Somebody unlocked it by hand: the block says so at its end, and frees the others."""
        with pytest.raises(LockLost, match=keys[0].name):
            with advisory_lock_all(*keys) as lock:
                value("SELECT pg_advisory_unlock(%s)", keys[gone].args)
                assert not lock.is_held()
                with pytest.raises(LockLost):
                    lock.check()
        assert lock.lost.is_set()
        assert mine() == 0

    def test_a_session_that_is_killed_in_the_body(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 4, 32."""
        with pytest.raises(LockLost):
            with advisory_lock_all(*keys) as lock:
                other.kill(backend_pid())
                assert not lock.is_held()
                assert all(other.is_free(key) for key in keys)
        assert backend_pid()
        with pytest.raises(ZeroDivisionError):
            with advisory_lock_all(*keys):
                other.kill(backend_pid())
                raise ZeroDivisionError
        with pytest.raises(LockLost), advisory_lock_all(*keys):
            connection.close()

    def test_behind_a_pooler_nothing_is_taken(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 37: the try and the wait are both guarded."""
        connection.ensure_connection()
        session = attach(connections["default"])
        right, session.guard = session.guard, other.pid
        for timeout in (None, 0, 5):
            with statements(1), pytest.raises(PoolerDetected):
                advisory_lock_all(*keys, timeout=timeout).acquire()
        with pytest.raises(PoolerDetected), transaction.atomic():
            advisory_lock_all(*keys, scope="session").acquire()
        assert mine() == 0
        with transaction.atomic(), advisory_lock_all(*keys) as lock:
            assert lock.is_held()

        def switch(sql: str) -> None:
            if "pg_try" in sql:
                session.guard = other.pid

        other.take(keys[2])
        for inside in (False, True):
            session.guard = right
            with pytest.raises(PoolerDetected), wrapped(after=switch):
                if inside:
                    with transaction.atomic():
                        advisory_lock_all(*keys, timeout=5, scope="session").acquire()
                else:
                    advisory_lock_all(*keys, timeout=5).acquire()
            assert mine() == 0
        other.drop(keys[2])
        connection.close()

    def test_a_pooled_connection(self, keys: list[LockKey], other: OtherSession) -> None:
        """Case 2: closed while it holds them it is discarded, and what fails leaves nothing to its next borrower."""
        with pytest.raises(LockLost), advisory_lock_all(*keys, using="pooled"):
            connections["pooled"].close()
        assert mine("pooled") == 0
        wait_until(lambda: other.take(keys[1]), "end of the session")
        for timeout in (0, 0.02):
            with pytest.raises(LockTimeout):
                advisory_lock_all(*keys, timeout=timeout, using="pooled").acquire()
        pid = backend_pid("pooled")
        connections["pooled"].close()
        assert backend_pid("pooled") == pid
        assert mine("pooled") == 0
        connections["pooled"].close()
        other.drop(keys[1])


class TestOrder:
    """Case 21: opposite orders never deadlock."""

    def test_threads(self, name: str, other: OtherSession) -> None:
        keys = [lock_key(name, number) for number in range(6)]
        inside: dict[LockKey, int] = dict.fromkeys(keys, 0)
        totals: dict[LockKey, int] = dict.fromkeys(keys, 0)

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(15):
                some = chance.sample(keys, chance.randrange(2, 6))
                with advisory_lock_all(*some, timeout=None if seed % 2 else 60):
                    for key in some:
                        inside[key] += 1
                        assert inside[key] == 1
                    before = {key: totals[key] for key in some}
                    value("SELECT pg_sleep(0.001)")
                    for key in some:
                        totals[key] = before[key] + 1
                        inside[key] -= 1

        for thread in [Thread(partial(work, seed)) for seed in range(5)]:
            thread.result()
        assert sum(totals.values()) == sum(
            len(some)
            for seed in range(5)
            for chance in [random.Random(seed)]
            for some in [chance.sample(keys, chance.randrange(2, 6)) for _ in range(15)]
        )

    def test_transactions(self, name: str, other: OtherSession) -> None:
        keys = [lock_key(name, number) for number in range(4)]
        account = Account.objects.create(name=name)

        def work(order: list[LockKey]) -> None:
            for _ in range(10):
                with transaction.atomic(), advisory_lock_all(*order):
                    mine_now = Account.objects.get(pk=account.pk)
                    mine_now.balance += 1
                    mine_now.save()

        orders = [keys, keys[::-1], [*keys[2:], *keys[:2]], keys[1:]]
        for thread in [Thread(partial(work, order)) for order in orders]:
            thread.result()
        account.refresh_from_db()
        assert account.balance == 40
        account.delete()

    def test_processes(self, name: str, other: OtherSession) -> None:
        code = (
            "import sys\nfrom django_advisory_lock import advisory_lock_all\n"
            f"keys = [('{name}', 1), ('{name}', 2), ('{name}', 3)]\n"
            "if sys.argv[1] == 'backwards': keys.reverse()\n"
            "for _ in range(100):\n    with advisory_lock_all(*keys): pass\n"
            "print('done')"
        )
        processes = [spawn(code, way) for way in ("forwards", "backwards", "forwards")]
        assert [output(process) for process in processes] == ["done\n"] * 3

    def test_without_it_they_deadlock(self, keys: list[LockKey], other: OtherSession) -> None:
        """The negative control: nested by hand in opposite orders, one gets a typed error and the other proceeds."""
        barrier = threading.Barrier(2)

        def work(first: LockKey, then: LockKey) -> str:
            value("SELECT set_config('deadlock_timeout', '50ms', false)")
            try:
                with advisory_lock(first):
                    barrier.wait(15)
                    with advisory_lock(then):
                        return "proceeded"
            except LockDeadlock:
                assert mine() == 0
                return "deadlock"

        threads = [Thread(lambda: work(keys[0], keys[1])), Thread(lambda: work(keys[1], keys[0]))]
        assert sorted(thread.result() for thread in threads) == ["deadlock", "proceeded"]

    def test_one_try_beside_many(self, keys: list[LockKey], other: OtherSession) -> None:
        with advisory_lock_all(*keys), try_advisory_lock(keys[2], using="same") as lock:
            assert not lock


def block(keys: list[LockKey]) -> None:
    with advisory_lock_all(*keys):
        pass


def block_in_a_transaction(keys: list[LockKey]) -> None:
    with transaction.atomic(), advisory_lock_all(*keys):
        pass


def session_scope_in_a_transaction(keys: list[LockKey]) -> None:
    with transaction.atomic(), advisory_lock_all(*keys, scope="session"):
        pass


def nested(keys: list[LockKey]) -> None:
    with advisory_lock_all(*keys[1:]), advisory_lock_all(*keys):
        pass


def by_hand(keys: list[LockKey]) -> None:
    advisory_lock_all(*keys).acquire().release()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("function", [block, block_in_a_transaction, session_scope_in_a_transaction, nested, by_hand])
def test_an_interrupt_at_every_line(
    function: Callable[[list[LockKey]], None], busy: bool, keys: list[LockKey], other: OtherSession
) -> None:
    """Case 67: all are free at once; or, where the handle was the caller's to release, with the next lock operation."""

    def free(sql: str) -> None:
        if "pg_try_advisory" in sql and other.holders(keys[0]) and other.holder(keys[0]) == other.pid:
            other.drop(keys[0])

    def run() -> None:
        if busy:
            other.take(keys[0])
        try:
            with wrapped(after=free):
                function(keys)
        finally:
            free("pg_try_advisory")

    strike_at_every_line(raises(KeyboardInterrupt), run, keys, other)
