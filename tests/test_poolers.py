"""Behind a real PgBouncer, in every pool mode: what is refused, what works, and what a swapped session costs.

In transaction mode a server session belongs to a client for one transaction, in session mode for as long as the client
stays connected, in statement mode for one statement.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from django.core.management import BaseCommand, call_command
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, override_settings

from django_advisory_lock import (
    AdvisoryLockCommandMixin,
    LockKey,
    LockLost,
    LockTimeout,
    PoolerDetected,
    advisory_lock,
    lock_key,
    try_advisory_lock,
)
from tests.bouncer import Bouncer, bouncer
from tests.support import LIMIT, OtherSession, Thread, backend_pid, output, spawn, statements, value, wait_until
from tests.testapp.models import Account

ROUNDS = 12
PAUSE = 0.002  # seconds between reading and writing, so that those who are not kept apart do collide


@pytest.fixture(scope="module")
def transaction_bouncer(django_db_setup: None) -> Iterator[Bouncer]:
    with bouncer("transaction") as running:
        yield running


@pytest.fixture(scope="module")
def session_bouncer(django_db_setup: None) -> Iterator[Bouncer]:
    with bouncer("session") as running:
        yield running


@pytest.fixture
def pooled(transaction_bouncer: Bouncer, other: OtherSession) -> Iterator[str]:
    """An alias behind a pooler in transaction mode."""
    with watched(transaction_bouncer), transaction_bouncer.alias("pooled_by_transaction") as alias:
        yield alias


@pytest.fixture
def kept(session_bouncer: Bouncer, other: OtherSession) -> Iterator[str]:
    """An alias behind a pooler in session mode, which the settings name."""
    with watched(session_bouncer), session_bouncer.alias("pooled_by_session") as alias, trusting(alias):
        yield alias


@contextlib.contextmanager
def watched(running: Bouncer) -> Iterator[None]:
    """Print what the pooler logs meanwhile; pytest shows it where the test fails."""
    before = len(running.log)
    try:
        yield
    finally:
        print(running.log[before:])  # noqa: T201


def trusting(alias: str) -> Any:
    return override_settings(ADVISORY_LOCK_SESSION_POOLER=[alias])


def untouched(other: OtherSession, key: LockKey) -> bool:
    """Whether no session holds the key or waits for it."""
    return other.holders(key) == other.waiters(key) == 0


class Work(AdvisoryLockCommandMixin, BaseCommand):
    def handle(self, *args: Any, **options: Any) -> None:
        raise AssertionError("ran without its lock")


def by_command(name: str, alias: str) -> None:
    command = Work()
    command.lock_key, command.lock_using = name, alias
    call_command(command)


def inside_atomic(name: str, alias: str) -> None:
    with transaction.atomic(using=alias):
        advisory_lock(name, using=alias, scope="session").acquire()


def by_block(name: str, alias: str) -> None:
    with advisory_lock(name, using=alias):
        raise AssertionError("entered")


def by_try_block(name: str, alias: str) -> None:
    with try_advisory_lock(name, using=alias):
        raise AssertionError("entered")


REFUSED: dict[str, Callable[[str, str], object]] = {
    "block": by_block,
    "try block": by_try_block,
    "by hand": lambda name, alias: advisory_lock(name, using=alias).acquire(),
    "try by hand": lambda name, alias: try_advisory_lock(name, using=alias).acquire(),
    "timeout": lambda name, alias: advisory_lock(name, using=alias, timeout=5).acquire(),
    "one try": lambda name, alias: advisory_lock(name, using=alias, timeout=0).acquire(),
    "polling": lambda name, alias: advisory_lock(name, using=alias, timeout=5, poll_interval=0.05).acquire(),
    "shared": lambda name, alias: advisory_lock(name, using=alias, shared=True).acquire(),
    "shared try": lambda name, alias: try_advisory_lock(name, using=alias, shared=True).acquire(),
    "shared, timeout": lambda name, alias: advisory_lock(name, using=alias, shared=True, timeout=5).acquire(),
    "decorator": lambda name, alias: advisory_lock(name, using=alias)(lambda: pytest.fail("called"))(),
    "try decorator": lambda name, alias: try_advisory_lock(name, using=alias)(lambda: pytest.fail("called"))(),
    "session scope": lambda name, alias: advisory_lock(name, using=alias, scope="session").acquire(),
    "inside atomic": inside_atomic,
    "command": by_command,
}


class TestRefused:
    """Case 37: in transaction mode a session lock would exclude nobody, so it is not taken."""

    @pytest.mark.parametrize("way", REFUSED)
    def test_every_kind_of_session_lock(self, way: str, pooled: str, name: str, other: OtherSession) -> None:
        with pytest.raises(PoolerDetected, match="connection pooler") as caught:
            REFUSED[way](name, pooled)
        assert (caught.value.key, caught.value.using) == (lock_key(name), pooled)
        assert untouched(other, lock_key(name))
        with transaction.atomic(using=pooled), advisory_lock(name, using=pooled) as lock:
            assert lock.is_held(), "the alias cannot be used any more"

    @pytest.mark.parametrize("way", REFUSED)
    def test_a_busy_one_is_not_waited_for(self, way: str, pooled: str, name: str, other: OtherSession) -> None:
        """Nor is it called busy, when it could not be held either way."""
        other.take(lock_key(name))
        with pytest.raises(PoolerDetected):
            REFUSED[way](name, pooled)
        assert other.waiters(lock_key(name)) == 0
        other.drop(lock_key(name))

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_pair(self, shared: bool, pooled: str, other: OtherSession) -> None:
        key = LockKey.pair(-7, time.monotonic_ns() % 2**31)
        for lock in (advisory_lock(key, using=pooled, shared=shared), try_advisory_lock(key, using=pooled)):
            with statements(1, pooled), pytest.raises(PoolerDetected):
                lock.acquire()
        assert untouched(other, key)

    @pytest.mark.parametrize("options", [{"server_side_binding": True}, {"prepare_threshold": 0}], ids=str)
    def test_however_the_values_travel(
        self, options: dict[str, Any], transaction_bouncer: Bouncer, name: str, other: OtherSession
    ) -> None:
        with transaction_bouncer.alias(options=options) as alias:
            for way in REFUSED.values():
                with pytest.raises(PoolerDetected):
                    way(name, alias)
            with transaction.atomic(using=alias), advisory_lock(name, using=alias, timeout=5) as lock:
                assert lock.is_held()
        assert untouched(other, lock_key(name))

    def test_the_transaction_around_it_goes_on(self, pooled: str, name: str, other: OtherSession) -> None:
        with transaction.atomic(using=pooled):
            account = Account.objects.using(pooled).create(name=name)
            with statements(1, pooled), pytest.raises(PoolerDetected):
                advisory_lock(name, using=pooled, scope="session").acquire()
            Account.objects.using(pooled).filter(pk=account.pk).update(balance=1)
        assert Account.objects.get(name=name).balance == 1
        account.delete()

    def test_again_and_again_from_many_threads(self, pooled: str, name: str, other: OtherSession) -> None:
        def refused() -> int:
            count = 0
            for _ in range(ROUNDS):
                with pytest.raises(PoolerDetected):
                    advisory_lock(name, using=pooled).acquire()
                count += 1
            return count

        threads = [Thread(refused) for _ in range(4)]
        assert [thread.result() for thread in threads] == [ROUNDS] * 4
        assert untouched(other, lock_key(name))

    def test_in_a_test_case(self, pooled: str, name: str, other: OtherSession) -> None:
        """The `atomic()` around a test does not hide what production would say."""

        class Inner(TestCase):
            databases = {"default", pooled}  # noqa: RUF012

            def runTest(self) -> None:  # noqa: N802
                with pytest.raises(PoolerDetected):
                    advisory_lock(name, using=pooled).acquire()
                with transaction.atomic(using=pooled), advisory_lock(name, using=pooled) as lock:
                    assert lock.is_held()

        result = Inner().run()
        assert result is not None
        assert result.wasSuccessful(), result.failures + result.errors

    def test_what_it_says(self, pooled: str, name: str, other: OtherSession) -> None:
        with pytest.raises(PoolerDetected) as caught:
            advisory_lock(name, using=pooled).acquire()
        for way_out in ("atomic()", "ADVISORY_LOCK_DATABASE", "ADVISORY_LOCK_SESSION_POOLER"):
            assert way_out in str(caught.value)

    def test_what_happens_to_those_who_do_not_look(
        self, transaction_bouncer: Bouncer, name: str, other: OtherSession
    ) -> None:
        """The negative control: bare SQL lets two clients in, and leaves the lock behind."""
        key = lock_key(name)
        take, drop = "SELECT pg_try_advisory_lock(%s)", "SELECT pg_advisory_unlock(%s)"
        with transaction_bouncer.connect() as first, transaction_bouncer.connect() as second:
            assert first.execute(take, key.args).fetchone() == (True,)
            with occupied(transaction_bouncer, second, other.holder(key)) as pid:
                assert second.execute(take, key.args).fetchone() == (True,), "two are in"
                assert first.execute(drop, key.args).fetchone() == (False,), "and it was released elsewhere"
        assert other.holder(key) == pid, "both clients have gone, the lock has not"
        other.kill(pid)
        other.wait_until_free(key)


@contextlib.contextmanager
def occupied(running: Bouncer, client: psycopg.Connection[Any], pid: int) -> Iterator[int]:
    """Let a client have a server session for the length of a block, in a transaction."""
    ballast = []
    try:
        while True:
            client.execute("BEGIN")
            row = client.execute("SELECT pg_backend_pid()").fetchone()
            assert row is not None
            if row[0] == pid:
                break
            # Another one was at hand: somebody else has to keep it busy.
            blocker = running.connect()
            ballast.append(blocker)
            client.execute("COMMIT")
            blocker.execute("BEGIN; SELECT 1")
            assert len(ballast) < 5, "the pool has more sessions than was thought"
        for blocker in ballast:
            blocker.execute("COMMIT")
        yield pid
    finally:
        for blocker in ballast:
            blocker.close()
        if not client.closed:
            client.execute("ROLLBACK")


# A worker in a process of its own: it says that it is ready, and goes on when it is told to.
COUNT = f"""
import contextlib, sys, time
from django.db import transaction
from django_advisory_lock import advisory_lock
from tests.testapp.models import Account

name, kind = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for _ in range({ROUNDS}):
    with contextlib.ExitStack() as stack:
        if kind == "session":
            stack.enter_context(advisory_lock(name))
        stack.enter_context(transaction.atomic())
        if kind == "transaction":
            stack.enter_context(advisory_lock(name))
        balance = Account.objects.get(name=name).balance
        time.sleep({PAUSE})
        Account.objects.filter(name=name).update(balance=balance + 1)
"""


class TestTransactionLocks:
    """Case 37: what works in every pool mode."""

    @pytest.fixture
    def account(self, name: str, other: OtherSession) -> Iterator[Account]:
        account = Account.objects.create(name=name)
        yield account
        account.delete()

    def test_held_and_freed(self, pooled: str, name: str, other: OtherSession) -> None:
        with transaction.atomic(using=pooled):
            with statements(1, pooled), advisory_lock(name, using=pooled) as lock:
                assert lock.scope == "transaction"
            assert other.holder(lock.key) == backend_pid(pooled)
            assert lock.is_held()
        assert untouched(other, lock.key)
        assert not lock.is_held()

    def test_threads_count(self, pooled: str, account: Account, name: str) -> None:
        def count(locked: bool) -> None:
            for _ in range(ROUNDS):
                with transaction.atomic(using=pooled), contextlib.ExitStack() as stack:
                    if locked:
                        stack.enter_context(advisory_lock(name, using=pooled))
                    balance = Account.objects.using(pooled).get(pk=account.pk).balance
                    time.sleep(PAUSE)
                    Account.objects.using(pooled).filter(pk=account.pk).update(balance=balance + 1)

        def balance_after(locked: bool) -> int:
            Account.objects.filter(pk=account.pk).update(balance=0)
            for thread in [Thread(partial(count, locked)) for _ in range(4)]:
                thread.result()
            return int(Account.objects.get(pk=account.pk).balance)

        assert balance_after(locked=True) == 4 * ROUNDS
        assert balance_after(locked=False) < 4 * ROUNDS, "the negative control loses nothing either"

    def count_in_processes(self, running: Bouncer, account: Account, *kinds: tuple[str, bool]) -> int:
        """Return the balance after workers that lock in these ways, each directly or through the pooler."""
        Account.objects.filter(pk=account.pk).update(balance=0)
        workers = [
            spawn(COUNT, account.name, kind, **(running.environment if through else {})) for kind, through in kinds
        ]
        for worker in workers:
            assert worker.stdout is not None
            if worker.stdout.readline() != "ready\n":
                output(worker)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            output(worker)
        return int(Account.objects.get(pk=account.pk).balance)

    def test_processes_count(self, transaction_bouncer: Bouncer, account: Account) -> None:
        count = partial(self.count_in_processes, transaction_bouncer, account)
        assert count(*[("transaction", True)] * 3) == 3 * ROUNDS
        assert count(*[("nothing", True)] * 3) < 3 * ROUNDS, "the negative control loses nothing either"

    @pytest.mark.parametrize("direct", ["transaction", "session"])
    def test_one_process_goes_directly(self, direct: str, transaction_bouncer: Bouncer, account: Account) -> None:
        """Both scopes are one lock: a direct session lock keeps the transaction locks behind the pooler out."""
        count = partial(self.count_in_processes, transaction_bouncer, account)
        assert count((direct, False), ("transaction", True), ("transaction", True)) == 3 * ROUNDS

    def test_a_try(self, pooled: str, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        with transaction.atomic(using=pooled):
            assert not try_advisory_lock(name, using=pooled).acquire().acquired
            other.drop(lock_key(name))
            assert try_advisory_lock(name, using=pooled).acquire().acquired
            assert not other.is_free(lock_key(name))
        assert untouched(other, lock_key(name))

    @pytest.mark.parametrize("options", [{}, {"poll_interval": 0.02}], ids=str)
    def test_a_timeout_names_the_holder(
        self, options: dict[str, Any], pooled: str, name: str, other: OtherSession
    ) -> None:
        """Case 9: and the transaction goes on."""
        other.take(lock_key(name))
        with transaction.atomic(using=pooled):
            account = Account.objects.using(pooled).create(name=name)
            with pytest.raises(LockTimeout, match=rf"pid {other.pid} \(other-session\)"):
                advisory_lock(name, using=pooled, timeout=0.05, **options).acquire()
            other.drop(lock_key(name))
            with advisory_lock(name, using=pooled, timeout=5, **options) as lock:
                assert lock.is_held()
        account.delete()

    def test_a_holder_behind_the_pooler_is_named_too(self, pooled: str, name: str, other: OtherSession) -> None:
        with transaction.atomic(using=pooled), advisory_lock(name, using=pooled):
            holder = backend_pid(pooled)
            with pytest.raises(LockTimeout, match=f"pid {holder}"):
                Thread(lambda: advisory_lock(name, timeout=0).acquire()).result()

    def test_a_wait_ends_with_the_commit_of_another_client(self, pooled: str, name: str, other: OtherSession) -> None:
        def wait() -> bool:
            with transaction.atomic(using=pooled), advisory_lock(name, using=pooled) as lock:
                return lock.is_held()

        with transaction.atomic(using=pooled), advisory_lock(name, using=pooled):
            waiting = Thread(wait)
            other.wait_for_waiters(lock_key(name))
        assert waiting.result() is True

    def test_a_savepoint(self, pooled: str, name: str, other: OtherSession) -> None:
        """Case 16."""
        with transaction.atomic(using=pooled):
            with pytest.raises(KeyError), transaction.atomic(using=pooled):
                lock = advisory_lock(name, using=pooled).acquire()
                assert not other.is_free(lock.key)
                raise KeyError
            assert not lock.is_held()
            assert other.is_free(lock.key)
            assert advisory_lock(name, using=pooled).acquire().is_held()
            assert not other.is_free(lock.key)
        assert untouched(other, lock.key)

    def test_shared(self, pooled: str, name: str, other: OtherSession) -> None:
        def share() -> bool:
            with transaction.atomic(using=pooled):
                return try_advisory_lock(name, using=pooled, shared=True).acquire().acquired

        def exclude() -> bool:
            with transaction.atomic(using=pooled):
                return try_advisory_lock(name, using=pooled).acquire().acquired

        with transaction.atomic(using=pooled), advisory_lock(name, using=pooled, shared=True):
            assert Thread(share).result() is True
            assert Thread(exclude).result() is False
        assert Thread(exclude).result() is True

    @pytest.fixture
    def stranger(self, transaction_bouncer: Bouncer, name: str, other: OtherSession) -> Iterator[Callable[[int], None]]:
        """A client that is lent a server session, and takes the key on it for a transaction of its own."""
        with transaction_bouncer.connect() as client, contextlib.ExitStack() as stack:

            def take(pid: int) -> None:
                stack.enter_context(occupied(transaction_bouncer, client, pid))
                client.execute("SELECT pg_advisory_xact_lock(%s)", lock_key(name).args)
                assert other.holder(lock_key(name)) == pid

            yield take

    @pytest.mark.parametrize("asked", ["at rest", "in the next transaction", "by another thread"])
    def test_a_server_session_that_now_serves_another_client(
        self, asked: str, stranger: Callable[[int], None], pooled: str, name: str, other: OtherSession
    ) -> None:
        """The same key on the same server session, and still it is not this lock."""
        with transaction.atomic(using=pooled):
            lock = advisory_lock(name, using=pooled).acquire()
            pid = other.holder(lock.key)
        stranger(pid)
        if asked == "by another thread":
            held = Thread(lock.is_held).result()
        else:
            with transaction.atomic(using=pooled) if asked == "in the next transaction" else contextlib.nullcontext():
                assert backend_pid(pooled) != pid
                held = lock.is_held()
        assert held is False, "it is another client's"

    def test_a_block_whose_transaction_ended_inside_it(
        self, stranger: Callable[[int], None], pooled: str, name: str, other: OtherSession
    ) -> None:
        """The next holder is lent the same server session, and its lock is not taken for this one's."""
        connection = connections[pooled]
        connection.ensure_connection()
        connection.set_autocommit(False)
        try:
            with pytest.raises(LockLost), advisory_lock(name, using=pooled) as lock:
                pid = other.holder(lock.key)
                connection.commit()
                stranger(pid)
                assert backend_pid(pooled) != pid
        finally:
            connection.rollback()
            connection.set_autocommit(True)

    def test_the_timeout_leaks_to_nobody(self, name: str, other: OtherSession) -> None:
        """Case 11: one server session, and the next client finds its `lock_timeout` as it was."""
        key = lock_key(name)
        with bouncer("transaction", default_pool_size=1) as narrow, narrow.alias() as alias, narrow.connect() as client:

            def seen_by_the_next() -> Any:
                return client.execute("SELECT current_setting('lock_timeout'), pg_backend_pid()").fetchone()

            before, pid = seen_by_the_next()
            other.take(key)
            for own in (None, "7s"):
                with transaction.atomic(using=alias):
                    if own:
                        value("SELECT set_config('lock_timeout', %s, true)", [own], alias)
                    with pytest.raises(LockTimeout):
                        advisory_lock(name, using=alias, timeout=0.02).acquire()
                    assert value("SHOW lock_timeout", alias=alias) == own or before
                assert seen_by_the_next() == (before, pid)
            with pytest.raises(LockTimeout), transaction.atomic(using=alias):
                advisory_lock(name, using=alias, timeout=0.02).acquire()
            assert seen_by_the_next() == (before, pid)
            with pytest.raises(PoolerDetected):
                advisory_lock(name, using=alias, timeout=0.02).acquire()
            other.drop(key)
            with transaction.atomic(using=alias), advisory_lock(name, using=alias, timeout=9):
                assert value("SHOW lock_timeout", alias=alias) == before
            assert seen_by_the_next() == (before, pid)

    def test_a_transaction_that_the_pooler_ends(self, name: str, other: OtherSession) -> None:
        """Nothing that was written under the lock is committed."""
        with bouncer("transaction", idle_transaction_timeout=1) as hasty, hasty.alias() as alias:
            with pytest.raises((LockLost, DatabaseError)), transaction.atomic(using=alias):
                Account.objects.using(alias).create(name=name)
                with advisory_lock(name, using=alias) as lock:
                    other.wait_until_free(lock.key)
                    assert not lock.is_held()
            assert not Account.objects.filter(name=name).exists()
            with transaction.atomic(using=alias), advisory_lock(name, using=alias) as lock:
                assert lock.is_held()

    def test_a_pooler_that_reconnects_or_pauses_waits_for_the_commit(
        self, transaction_bouncer: Bouncer, pooled: str, name: str, other: OtherSession
    ) -> None:
        with transaction.atomic(using=pooled), advisory_lock(name, using=pooled) as lock:
            pid = backend_pid(pooled)
            transaction_bouncer.command("RECONNECT")
            pausing = Thread(lambda: transaction_bouncer.command(f"PAUSE {transaction_bouncer.database}"))
            wait_until(lambda: is_paused(transaction_bouncer), "the pooler pauses")
            assert lock.is_held()
            assert backend_pid(pooled) == pid
        pausing.result()
        transaction_bouncer.command(f"RESUME {transaction_bouncer.database}")
        assert untouched(other, lock.key)
        assert backend_pid(pooled) != pid

    def test_its_session_is_killed(self, pooled: str, name: str, other: OtherSession) -> None:
        """Case 4: nothing is committed, and the alias works again."""
        with pytest.raises((LockLost, DatabaseError)), transaction.atomic(using=pooled):
            Account.objects.using(pooled).create(name=name)
            with advisory_lock(name, using=pooled) as lock:
                other.kill(backend_pid(pooled))
                other.take(lock.key)
                assert not lock.is_held()
                lock.check()
        assert not Account.objects.filter(name=name).exists()
        other.drop(lock.key)
        with transaction.atomic(using=pooled), advisory_lock(name, using=pooled) as lock:
            assert lock.is_held()


def is_paused(running: Bouncer) -> bool:
    return any(row["paused"] for row in running.command("SHOW DATABASES") if row["name"] == running.database)


class TestWaysOut:
    """The work goes through the pooler, the lock does not."""

    def test_a_direct_alias_for_the_locks(self, pooled: str, name: str, other: OtherSession) -> None:
        """Case 36's kind: one lock has one home, whichever alias the work is on."""
        with override_settings(ADVISORY_LOCK_DATABASE="same"):
            with advisory_lock(name) as lock:
                assert lock.using == "same"
                assert other.holder(lock.key) == backend_pid("same")
                with transaction.atomic(using=pooled):
                    account = Account.objects.using(pooled).create(name=name)
                assert lock.is_held()
        assert untouched(other, lock.key)
        account.delete()

    @pytest.mark.parametrize("by_setting", [False, True])
    def test_not_beside_a_transaction_on_the_other_alias(
        self, by_setting: bool, pooled: str, name: str, other: OtherSession
    ) -> None:
        """Case 13's kind: it would be freed before that transaction commits."""
        lock = advisory_lock(name) if by_setting else advisory_lock(name, using="same")
        with override_settings(ADVISORY_LOCK_DATABASE="same"), transaction.atomic(using=pooled):
            value("SELECT 1", alias=pooled)
            with pytest.raises(TransactionManagementError, match=pooled):
                lock.acquire()
            assert untouched(other, lock_key(name))
            with advisory_lock(name, using="same", scope="session") as held:
                assert held.is_held()
            with advisory_lock(name, using=pooled) as held:
                assert held.scope == "transaction"

    @pytest.mark.parametrize("setting", [None, "same"])
    def test_no_router_is_asked(self, setting: str | None, name: str, other: OtherSession) -> None:
        """Case 36: neither where the lock is taken, nor for the key of a row that was read elsewhere."""

        class Router:
            def db_for_read(self, model: object, **hints: object) -> str:
                raise AssertionError("asked")

            db_for_write = allow_relation = db_for_read

        account = Account(pk=1, name=name)
        account._state.db = "other"
        settings = {"ADVISORY_LOCK_DATABASE": setting} if setting else {}
        with override_settings(DATABASE_ROUTERS=[Router()], **settings):
            for key in (name, account):
                with advisory_lock(key) as lock:
                    assert lock.using == (setting or "default")
                    assert other.holder(lock.key) == backend_pid(lock.using)

    def test_an_alias_outside_a_transaction_is_no_hindrance(self, pooled: str, name: str, other: OtherSession) -> None:
        value("SELECT 1", alias=pooled)
        with advisory_lock(name, using="same") as lock:
            assert lock.is_held()

    def test_a_direct_alias_and_one_behind_the_pooler_exclude_each_other(
        self, pooled: str, name: str, other: OtherSession
    ) -> None:
        with advisory_lock(name):
            with transaction.atomic(using=pooled):
                assert not try_advisory_lock(name, using=pooled).acquire().acquired
        with transaction.atomic(using=pooled), advisory_lock(name, using=pooled):
            assert not Thread(lambda: try_advisory_lock(name).acquire().acquired).result()


class TestSessionMode:
    def test_without_the_setting_it_is_refused(self, session_bouncer: Bouncer, name: str, other: OtherSession) -> None:
        """Nothing tells this mode from the other before it is too late, so it has to be said."""
        with session_bouncer.alias() as alias:
            for way in REFUSED.values():
                with pytest.raises(PoolerDetected):
                    way(name, alias)
            with trusting("default"), pytest.raises(PoolerDetected):
                advisory_lock(name, using=alias).acquire()
            with transaction.atomic(using=alias), advisory_lock(name, using=alias) as lock:
                assert lock.is_held()
            with trusting(alias), advisory_lock(name, using=alias) as lock:
                assert lock.is_held()
        assert untouched(other, lock_key(name))

    @pytest.mark.parametrize(
        "options",
        [{}, {"timeout": 5}, {"timeout": 0}, {"timeout": 5, "poll_interval": 0.05}, {"shared": True}],
        ids=str,
    )
    def test_held_and_freed(self, options: dict[str, Any], kept: str, name: str, other: OtherSession) -> None:
        with advisory_lock(name, using=kept, **options) as lock:
            assert (lock.scope, lock.is_held()) == ("session", True)
            assert other.holder(lock.key) == backend_pid(kept)
            assert not other.is_free(lock.key)
            with advisory_lock(name, using=kept, **options):
                pass
            assert lock.is_held()
        assert untouched(other, lock.key)
        assert not lock.is_held()

    def test_tries_and_pairs(self, kept: str, name: str, other: OtherSession) -> None:
        key = LockKey.pair(-7, time.monotonic_ns() % 2**31)
        for lock in (try_advisory_lock(name, using=kept), try_advisory_lock(key, using=kept)):
            with lock as held:
                assert held
                assert not other.is_free(held.key)
            assert other.take(held.key)
            assert lock.acquire().acquired is False
            other.drop(held.key)

    def test_session_scope_inside_atomic(self, kept: str, name: str, other: OtherSession) -> None:
        with transaction.atomic(using=kept):
            with advisory_lock(name, using=kept, scope="session") as lock:
                assert not other.is_free(lock.key)
                account = Account.objects.using(kept).create(name=name)
            assert other.is_free(lock.key)
        account.delete()

    @pytest.mark.parametrize(
        "options", [{}, {"server_side_binding": True, "prepare_threshold": 0}], ids=["plain", "prepared"]
    )
    def test_what_it_costs(
        self, options: dict[str, Any], session_bouncer: Bouncer, name: str, other: OtherSession
    ) -> None:
        """The first take of a connection finds the pooler, which costs a statement once."""
        with session_bouncer.alias(options=options) as alias, trusting(alias):
            with statements(3, alias), advisory_lock(name, using=alias):
                pass
            for options in ({}, {"timeout": 5}, {"timeout": 5, "poll_interval": 0.1}, {"shared": True}):
                with statements(2, alias), advisory_lock(name, using=alias, **options):
                    pass
            with statements(2, alias), try_advisory_lock(name, using=alias) as lock:
                assert lock

    def test_threads_take_turns(self, kept: str, name: str, other: OtherSession) -> None:
        inside, most, free = 0, 0, threading.Lock()

        def work(locked: bool) -> None:
            nonlocal inside, most
            for _ in range(ROUNDS):
                with contextlib.ExitStack() as stack:
                    if locked:
                        stack.enter_context(advisory_lock(name, using=kept))
                    with free:
                        inside += 1
                        most = max(most, inside)
                    time.sleep(PAUSE)
                    with free:
                        inside -= 1

        for locked, at_most in ((True, 1), (False, 4)):
            most = 0
            for thread in [Thread(partial(work, locked)) for _ in range(4)]:
                thread.result()
            assert (most == 1) is (at_most == 1), "the negative control collides, the locked ones do not"

    def test_a_timeout_names_the_holder(self, kept: str, name: str, other: OtherSession) -> None:
        """Case 11: and the session keeps its own `lock_timeout`."""
        other.take(lock_key(name))
        value("SELECT set_config('lock_timeout', '7s', false)", alias=kept)
        with pytest.raises(LockTimeout, match=rf"pid {other.pid} \(other-session\)"):
            advisory_lock(name, using=kept, timeout=0.05).acquire()
        assert value("SHOW lock_timeout", alias=kept) == "7s"
        other.drop(lock_key(name))

    def test_nothing_is_left_for_the_next_client(self, name: str, other: OtherSession) -> None:
        """Case 2's kind: one server session, lent from client to client."""
        key = lock_key(name)
        with bouncer("session", default_pool_size=1) as narrow, narrow.alias() as alias, trusting(alias):
            for timeout in (None, 5):
                with advisory_lock(name, using=alias, timeout=timeout):
                    expected = (backend_pid(alias), other.one("SHOW lock_timeout"))
                connections[alias].close()
                with narrow.connect() as client:
                    seen = client.execute("SELECT pg_backend_pid(), current_setting('lock_timeout')").fetchone()
                    assert seen == expected
                    assert untouched(other, key)

    def test_a_client_that_leaves_while_it_holds(self, name: str, other: OtherSession) -> None:
        """PgBouncer's `DISCARD ALL` frees the lock before the session is lent again; the holder is told."""
        with bouncer("session", default_pool_size=1) as narrow, narrow.alias() as alias, trusting(alias):
            with pytest.raises(LockLost), advisory_lock(name, using=alias) as lock:
                pid = backend_pid(alias)
                connections[alias].close()
                assert not lock.is_held()
                other.wait_until_free(lock.key)
                with narrow.connect() as client:
                    assert client.execute("SELECT pg_backend_pid()").fetchone() == (pid,)
            with advisory_lock(name, using=alias) as lock:
                assert lock.is_held()

    def test_a_pooler_that_resets_nothing(self, name: str, other: OtherSession) -> None:
        """Without its `DISCARD ALL` a client that leaves hands its lock to the next one; no setting of ours helps."""
        key = lock_key(name)
        with bouncer("session", default_pool_size=1, server_reset_query="") as careless:
            for _ in range(2):
                with careless.connect() as client:
                    assert client.execute("SELECT pg_try_advisory_lock(%s)", key.args).fetchone() == (True,)
            assert other.holders(key) == 1
        other.wait_until_free(key)

    def test_a_process_that_is_killed_while_it_holds(
        self, session_bouncer: Bouncer, name: str, other: OtherSession
    ) -> None:
        code = (
            "import sys\nfrom django.test import override_settings\nfrom django_advisory_lock import advisory_lock\n"
            f"with override_settings(ADVISORY_LOCK_SESSION_POOLER=['default']), advisory_lock('{name}'):\n"
            "    print('held', flush=True)\n    sys.stdin.readline()"
        )
        process = spawn(code, **session_bouncer.environment)
        assert process.stdout is not None
        if process.stdout.readline() != "held\n":
            output(process)
        assert other.holders(lock_key(name)) == 1
        process.kill()
        process.communicate()
        other.wait_until_free(lock_key(name))

    def test_a_process_that_is_interrupted_while_it_waits(
        self, session_bouncer: Bouncer, name: str, other: OtherSession
    ) -> None:
        """Case 67: the pooler passes the cancel on, and nobody waits any more."""
        code = (
            "from django.test import override_settings\nfrom django_advisory_lock import advisory_lock\n"
            f"with override_settings(ADVISORY_LOCK_SESSION_POOLER=['default']), advisory_lock('{name}'):\n"
            "    raise SystemExit('entered')"
        )
        other.take(lock_key(name))
        process = spawn(code, **session_bouncer.environment)
        other.wait_for_waiters(lock_key(name))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
        assert "KeyboardInterrupt" in errors
        wait_until(lambda: other.waiters(lock_key(name)) == 0, "nobody waits")
        other.drop(lock_key(name))

    def test_the_pool_of_django_in_front_of_it(self, session_bouncer: Bouncer, name: str, other: OtherSession) -> None:
        """Case 2: two pools in a row, and a connection that is closed while it holds reaches neither."""
        options = {"pool": {"min_size": 1, "max_size": 1, "timeout": 5}}
        with session_bouncer.alias(options=options, CONN_MAX_AGE=0) as alias, trusting(alias):
            with advisory_lock(name, using=alias):
                pid = backend_pid(alias)
            connections[alias].close()
            with pytest.raises(LockLost), advisory_lock(name, using=alias) as lock:
                assert backend_pid(alias) == pid
                connections[alias].close()
                other.wait_until_free(lock.key)
                assert Thread(lambda: try_advisory_lock(name, using=alias).acquire().release()).result() is None
            assert untouched(other, lock.key)

    def test_whoever_is_connected_has_a_server_session(self, name: str, other: OtherSession) -> None:
        """A client that waits for a place in the pool does not wait for the lock yet, so no timeout of ours ends it."""
        with bouncer("session", default_pool_size=1, query_wait_timeout=1) as narrow, narrow.alias() as alias:
            with trusting(alias), advisory_lock(name, using=alias) as lock:
                waiting = Thread(lambda: advisory_lock(name, using=alias, timeout=0.1).acquire())
                with pytest.raises(OperationalError, match="query_wait_timeout"):
                    waiting.result()
                assert lock.is_held()


class TestLostBehindASessionPooler:
    """Case 4 and 5(c): the session goes while the lock is held; never a clean release."""

    def kill_server_session(self, running: Bouncer, alias: str, other: OtherSession) -> None:
        other.kill(backend_pid(alias))

    def drop_by_command(self, running: Bouncer, alias: str, other: OtherSession) -> None:
        running.command(f"KILL {running.database}")
        running.command(f"RESUME {running.database}")

    def crash(self, running: Bouncer, alias: str, other: OtherSession) -> None:
        running.kill()
        running.start()

    @pytest.mark.parametrize("end", [kill_server_session, drop_by_command, crash])
    @pytest.mark.parametrize("asked", [False, True])
    def test_while_it_is_held(
        self, end: Any, asked: bool, session_bouncer: Bouncer, kept: str, name: str, other: OtherSession,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        key, result = lock_key(name), None
        with pytest.raises(LockLost) as caught, advisory_lock(name, using=kept) as lock:
            end(self, session_bouncer, kept, other)
            other.wait_until_free(key)
            other.take(key)
            if asked:
                assert not lock.is_held()
                assert lock.lost.is_set()
            result = "done"
        assert (caught.value.key, result) == (key, "done")
        assert lock.lost.is_set()
        assert len([record for record in caplog.records if name in record.getMessage()]) == 1
        assert other.holder(key) == other.pid, "the next holder's lock is not touched"
        other.drop(key)
        with advisory_lock(name, using=kept) as lock:
            assert lock.is_held()

    @pytest.mark.parametrize("end", [kill_server_session, drop_by_command, crash])
    def test_an_error_of_the_body_stays(
        self, end: Any, session_bouncer: Bouncer, kept: str, name: str, other: OtherSession
    ) -> None:
        with pytest.raises(KeyError), advisory_lock(name, using=kept) as lock:
            end(self, session_bouncer, kept, other)
            raise KeyError
        assert lock.lost.is_set()
        other.wait_until_free(lock.key)

    @pytest.mark.parametrize("end", [drop_by_command, crash])
    @pytest.mark.parametrize("timeout", [None, 15])
    def test_while_it_is_waited_for(
        self, end: Any, timeout: float | None, session_bouncer: Bouncer, kept: str, name: str, other: OtherSession
    ) -> None:
        """The database's own error, no lock that nobody knows of, and the same thread can lock again."""
        key, ended, seen = lock_key(name), threading.Event(), []

        def wait() -> bool:
            try:
                advisory_lock(name, using=kept, timeout=timeout).acquire()
            except OperationalError as error:
                seen.append(error)
            ended.wait(20)
            with advisory_lock(name, using=kept) as lock:
                return lock.is_held()

        other.take(key)
        waiting = Thread(wait)
        other.wait_for_waiters(key)
        end(self, session_bouncer, kept, other)
        wait_until(lambda: seen, "the wait has failed")
        other.drop(key)
        # A server session without a client ends when its wait does.
        wait_until(lambda: untouched(other, key), "free")
        ended.set()
        assert waiting.result() is True

    def test_a_reconnect_leaves_the_holder_alone(
        self, session_bouncer: Bouncer, kept: str, name: str, other: OtherSession
    ) -> None:
        with advisory_lock(name, using=kept) as lock:
            pid = backend_pid(kept)
            session_bouncer.command("RECONNECT")
            pausing = Thread(lambda: session_bouncer.command(f"PAUSE {session_bouncer.database}"))
            wait_until(lambda: is_paused(session_bouncer), "the pooler pauses")
            assert lock.is_held()
            assert backend_pid(kept) == pid
        assert untouched(other, lock.key)
        connections[kept].close()
        pausing.result()
        session_bouncer.command(f"RESUME {session_bouncer.database}")
        assert backend_pid(kept) != pid


class TestLostInTransactionMode:
    def test_the_pooler_is_killed_while_a_transaction_lock_is_held(self, name: str, other: OtherSession) -> None:
        with bouncer("transaction") as running, running.alias() as alias:
            # Django connects anew at the end of the transaction, and there is nothing to connect to.
            with pytest.raises(OperationalError), transaction.atomic(using=alias):
                with pytest.raises(LockLost), advisory_lock(name, using=alias) as lock:
                    running.kill()
                    lock.check()
            other.wait_until_free(lock.key)
            with pytest.raises(OperationalError), transaction.atomic(using=alias):
                advisory_lock(name, using=alias).acquire()
            running.start()
            with transaction.atomic(using=alias), advisory_lock(name, using=alias) as lock:
                assert lock.is_held()

    def test_the_pooler_is_killed_while_a_transaction_lock_is_waited_for(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        with bouncer("transaction") as running, running.alias() as alias:

            def wait() -> None:
                with transaction.atomic(using=alias):
                    advisory_lock(name, using=alias, timeout=15).acquire()

            other.take(key)
            waiting = Thread(wait)
            other.wait_for_waiters(key)
            running.kill()
            with pytest.raises(OperationalError):
                waiting.result()
            other.drop(key)
            wait_until(lambda: untouched(other, key), "free")

    def test_the_pooler_drops_its_sessions(self, name: str, other: OtherSession) -> None:
        with bouncer("transaction") as running, running.alias() as alias:
            with pytest.raises(DatabaseError), transaction.atomic(using=alias):
                Account.objects.using(alias).create(name=name)
                with advisory_lock(name, using=alias) as lock:
                    running.command(f"KILL {running.database}")
                    running.command(f"RESUME {running.database}")
            other.wait_until_free(lock.key)
            assert not Account.objects.filter(name=name).exists()
            with transaction.atomic(using=alias), advisory_lock(name, using=alias) as lock:
                assert lock.is_held()


class TestMisnamedPooler:
    """The settings name a pooler in session mode, and it is in transaction mode: each use may meet another session."""

    @pytest.fixture
    def running(self, other: OtherSession) -> Iterator[Bouncer]:
        with bouncer("transaction", default_pool_size=2) as running, watched(running):
            yield running

    @pytest.fixture
    def alias(self, running: Bouncer) -> Iterator[str]:
        with running.alias("misnamed") as alias, trusting(alias):
            yield alias

    @pytest.fixture
    def client(self, running: Bouncer) -> Iterator[psycopg.Connection[Any]]:
        with running.connect() as client:
            yield client

    def test_a_release_that_lands_elsewhere(
        self, running: Bouncer, alias: str, client: psycopg.Connection[Any], name: str, other: OtherSession
    ) -> None:
        with pytest.raises(LockLost, match="does not hold it") as caught, advisory_lock(name, using=alias) as lock:
            stack = contextlib.ExitStack()
            stack.enter_context(occupied(running, client, other.holder(lock.key)))
        assert caught.value.using == alias
        stack.close()
        pid = other.holder(lock.key)
        other.kill(pid)
        other.wait_until_free(lock.key)

    def test_a_release_beside_a_strangers_shared_lock(
        self, running: Bouncer, alias: str, client: psycopg.Connection[Any], name: str, other: OtherSession
    ) -> None:
        """The unlock reaches a session that holds the same key for somebody else, and frees nothing."""
        stack = contextlib.ExitStack()
        with pytest.raises(LockLost), advisory_lock(name, using=alias, shared=True) as lock:
            pid = other.holder(lock.key)
            stack.enter_context(occupied(running, client, pid))
            with running.connect() as stranger:
                stranger.execute("SELECT pg_advisory_lock_shared(%s)", lock.key.args)
            assert other.holders(lock.key) == 2
        assert other.holders(lock.key) == 2, "the stranger's was freed"
        stack.close()
        self.end_holders(lock.key, other)

    def end_holders(self, key: LockKey, other: OtherSession) -> None:
        def left() -> bool:
            if other.holders(key):
                other.kill(other.holder(key))
            return other.holders(key) == 0

        wait_until(left, "free")

    @pytest.mark.parametrize("way", ["released", "dropped", "released in a failed transaction"])
    def test_a_strangers_lock_after_the_own_session_ended(
        self, way: str, running: Bouncer, alias: str, client: psycopg.Connection[Any], name: str, other: OtherSession
    ) -> None:
        """The server session is killed, a stranger takes the key on another one, and that is where the next goes."""
        key = lock_key(name)
        lock = advisory_lock(name, using=alias).acquire()
        other.kill(other.holder(key))
        client.execute("SELECT pg_advisory_lock(%s)", key.args)
        stranger = other.holder(key)
        if way == "released":
            with pytest.raises(LockLost):
                lock.release()
        elif way == "dropped":
            with pytest.warns(ResourceWarning):
                del lock
                gc.collect()
        else:
            with pytest.raises(DatabaseError), transaction.atomic(using=alias):
                with contextlib.suppress(DatabaseError):
                    value("SELECT 1/0", alias=alias)
                lock.release()
                raise DatabaseError
        with advisory_lock(name, "another", using=alias):
            pass
        assert other.holders(key) == 1, "the stranger's was freed"
        other.kill(stranger)
        other.wait_until_free(key)

    def test_it_is_asked_where_it_was_taken(
        self, running: Bouncer, alias: str, client: psycopg.Connection[Any], name: str, other: OtherSession
    ) -> None:
        """`is_held()` speaks of the session that the lock was taken on, whichever one answers."""
        with advisory_lock(name, using=alias) as lock:
            pid = other.holder(lock.key)
            with occupied(running, client, pid):
                assert backend_pid(alias) != pid
                assert lock.is_held()
            other.kill(pid)
            assert not lock.is_held()
            with pytest.raises(LockLost):
                lock.release()


class TestStatementMode:
    """Case 37: no transactions here, so no lock of either scope: each is refused, and nothing is taken."""

    @pytest.fixture
    def alias(self, other: OtherSession) -> Iterator[str]:
        with bouncer("statement") as running, watched(running), running.alias("pooled_by_statement") as alias:
            yield alias

    def test_session_locks(self, alias: str, name: str, other: OtherSession) -> None:
        for way, take in REFUSED.items():
            with pytest.raises(DatabaseError if way == "inside atomic" else PoolerDetected):
                take(name, alias)
            assert untouched(other, lock_key(name))
            assert value("SELECT 1", alias=alias) == 1, "the alias cannot be used any more"

    @pytest.mark.parametrize("scope", ["auto", "transaction"])
    def test_transaction_locks(self, scope: Any, alias: str, name: str, other: OtherSession) -> None:
        with pytest.raises(DatabaseError, match="statement pooling"), transaction.atomic(using=alias):
            advisory_lock(name, using=alias, scope=scope).acquire()
        assert untouched(other, lock_key(name))
        assert value("SELECT 1", alias=alias) == 1
