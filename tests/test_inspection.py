"""Who holds a key and who waits for it, as `pg_locks` tells it."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_advisory_lock import LockKey, LockTimeout, LockUnsupported, advisory_lock, lock_key, model_key
from django_advisory_lock.ending import Outcome, end_session, start_of
from django_advisory_lock.inspection import (
    KeyLock,
    all_locks,
    describe_holders,
    held_locks,
    holders_of,
    read_key_locks,
    waiting_locks,
)
from django_advisory_lock.testing import assert_no_locks
from tests.server import Watcher, new_server
from tests.support import OtherSession, Thread, extra_alias, statements, value
from tests.testapp.models import Account


def read(key: LockKey) -> list[KeyLock]:
    with connection.cursor() as cursor:
        return read_key_locks(cursor, [key])


@pytest.mark.parametrize("key", [-1, 2**63 - 1, LockKey.pair(-1, 5)], ids=repr)
def test_the_holder_is_found(key: int | LockKey, other: OtherSession) -> None:
    """Case 57: also where the numbers are negative, and in this database only."""
    key = lock_key(key)
    elsewhere = OtherSession("other")
    elsewhere.take(key)
    assert read(key) == []
    other.take(key)
    (lock,) = read(key)
    assert (lock.pid, lock.own, lock.shared, lock.granted) == (other.pid, False, False, True)
    assert (lock.application_name, lock.state) == ("other-session", "idle")
    assert lock.seconds_in_state is not None
    elsewhere.close()


def test_holders_come_before_those_who_wait(name: str, other: OtherSession) -> None:
    key = lock_key(name)
    other.take(key, shared=True)

    def wait() -> None:
        with advisory_lock(name):
            pass

    waiting = Thread(wait)
    other.wait_for_waiters(key)
    assert [(lock.granted, lock.shared) for lock in read(key)] == [(True, True), (False, False)]
    other.drop(key, shared=True)
    waiting.result()


def test_the_own_session(name: str, other: OtherSession) -> None:
    with advisory_lock(name):
        (lock,) = read(lock_key(name))
        assert lock.own


def test_what_a_role_may_not_see(name: str, other: OtherSession) -> None:
    """A holder that belongs to somebody else: its pid, no state, and no error."""
    other.raw.execute(f'CREATE ROLE "{name}"')
    other.take(lock_key(name))
    try:
        with transaction.atomic():
            value(f"SELECT set_config('role', '{name}', true)")
            (lock,) = read(lock_key(name))
            with pytest.raises(LockTimeout, match=rf"held by pid {other.pid} \(other-session\)\."):
                advisory_lock(name, timeout=0).acquire()
        assert (lock.pid, lock.state, lock.seconds_in_state) == (other.pid, None, None)
    finally:
        other.raw.execute(f'DROP ROLE "{name}"')


class TestAll:
    """What those who run it see: all locks of the database, with their names."""

    def test_held_and_waiting(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)
        waiting = Thread(lambda: advisory_lock(name).acquire().release())
        other.wait_for_waiters(key)
        (holder,) = [lock for lock in held_locks(names=[name]) if lock.key == key]
        (waiter,) = [lock for lock in waiting_locks(names=[name]) if lock.key == key]
        assert (holder.key.name, holder.is_named, holder.mode) == (name, True, "ExclusiveLock")
        assert (holder.pid, holder.application_name, holder.state) == (other.pid, "other-session", "idle")
        assert (holder.waiting_since, holder.seconds_waiting, holder.blocked_by) == (None, None, ())
        assert waiter.blocked_by == (other.pid,)
        assert waiter.query_start is not None
        assert waiter.backend_start is not None
        assert waiter.backend_start <= waiter.query_start
        assert waiter.waiting_since is not None
        assert waiter.seconds_waiting is not None
        assert waiter.seconds_waiting >= 0
        assert not waiter.granted
        (again,) = holders_of(name)
        assert again == replace(holder, seconds_in_state=again.seconds_in_state)
        other.drop(key)
        waiting.result()

    def test_one_query(self, name: str, other: OtherSession) -> None:
        with CaptureQueriesContext(connection) as captured:
            all_locks()
        assert len([query for query in captured.captured_queries if "pg_locks" in query["sql"]]) == 1
        with statements(1):
            holders_of(name)

    def test_of_this_database_alone(self, name: str, other: OtherSession) -> None:
        elsewhere = OtherSession("other")
        elsewhere.take(lock_key(name))
        assert held_locks() == holders_of(name) == []
        (lock,) = held_locks("other")
        assert (lock.key.args, lock.pid) == (lock_key(name).args, elsewhere.pid)
        assert [lock.key for lock in holders_of(name, using="other")] == [lock_key(name)]
        elsewhere.close()

    def test_a_row_of_a_model(self, other: OtherSession) -> None:
        """It stands for the same row, whether or not somebody has named its key."""
        key = model_key(Account, pk=42)
        other.take(key)
        named = LockKey(key.args, "the account")
        for (lock,) in (held_locks(), held_locks(names=[named]), holders_of(key), holders_of(named)):
            assert (lock.key, lock.model, lock.object_pk) == (key, "testapp.account", 42)
        assert lock.key.name == "the account"

    def test_the_locks_of_an_extension(self, name: str, other: OtherSession) -> None:
        """TimescaleDB and Citus take advisory locks whose form no function of PostgreSQL has; these stand for them."""
        other.take(LockKey.pair(7, 8))
        schema = name.replace("-", "_")
        other.raw.execute(f"CREATE SCHEMA {schema}")
        try:
            columns = "locktype, database, classid, objid, {}, pid, mode, granted, waitstart"
            other.raw.execute(
                f"CREATE VIEW {schema}.pg_locks AS SELECT {columns.format('objsubid')} FROM pg_catalog.pg_locks"
                f" WHERE locktype <> 'advisory' UNION ALL SELECT {columns.format('29749::int2')}"
                f" FROM pg_catalog.pg_locks WHERE locktype = 'advisory'"
            )
            with extra_alias("extended", {"options": f"-c search_path={schema},pg_catalog"}) as alias:
                assert all_locks(alias) == []
                assert_no_locks(alias)
                (lock,) = holders_of(LockKey.pair(7, 8))
                assert end_session(other.pid, start_of(lock), alias, timeout=5) is Outcome.GONE
        finally:
            other.raw.execute(f"DROP SCHEMA {schema} CASCADE")

    def test_a_queue(self, name: str, other: OtherSession) -> None:
        """Who waits longest comes first, and blocks those behind."""
        key = lock_key(name)
        other.take(key, shared=True)
        first = Thread(lambda: advisory_lock(name).acquire().release())
        other.wait_for_waiters(key)
        second = Thread(lambda: advisory_lock(name, shared=True).acquire().release())
        other.wait_for_waiters(key, 2)
        exclusive, shared = waiting_locks()
        assert (exclusive.mode, shared.mode) == ("ExclusiveLock", "ShareLock")
        assert (exclusive.blocked_by, shared.blocked_by) == ((other.pid,), (exclusive.pid,))
        other.drop(key, shared=True)
        first.result()
        second.result()

    def test_what_a_role_may_not_see(self, name: str, other: OtherSession) -> None:
        other.raw.execute(f'CREATE ROLE "{name}"')
        other.take(lock_key(name))
        try:
            with transaction.atomic():
                value(f"SELECT set_config('role', '{name}', true)")
                (lock,) = held_locks()
            assert (lock.pid, lock.application_name) == (other.pid, "other-session")
            hidden = (lock.state, lock.seconds_in_state, lock.client, lock.query_start, lock.backend_start)
            assert hidden == (None,) * 5
        finally:
            other.raw.execute(f'DROP ROLE "{name}"')

    def test_a_prepared_transaction(self, name: str) -> None:
        """It has no pid, and blocks all the same: pg_blocking_pids() calls it 0."""
        with new_server(max_prepared_transactions="2") as server, server.alias("two_phase"):
            with contextlib.closing(Watcher(server)) as session:
                session.raw.execute("BEGIN")
                session.raw.execute("SELECT pg_advisory_xact_lock(%s)", lock_key(name).args)
                session.raw.execute("PREPARE TRANSACTION 'one'")
                waiting = Thread(lambda: advisory_lock(name, using="two_phase").acquire().release())
                session.wait_for_waiters(lock_key(name))
                (holder,), (waiter,) = held_locks("two_phase"), waiting_locks("two_phase")
                assert (holder.pid, holder.own, str(holder)) == (None, False, "a prepared transaction")
                assert waiter.blocked_by == (0,)
                session.raw.execute("ROLLBACK PREPARED 'one'")
                waiting.result()

    def test_another_engine(self) -> None:
        for ask in (held_locks, waiting_locks, all_locks):
            with pytest.raises(LockUnsupported):
                ask("sqlite")
        with pytest.raises(LockUnsupported):
            holders_of("x", using="sqlite")

    def test_the_database_of_the_settings(self, name: str, other: OtherSession) -> None:
        with override_settings(ADVISORY_LOCK_DATABASE="other"), advisory_lock(name):
            assert [lock.key for lock in (*held_locks(names=[name]), *holders_of(name))] == [lock_key(name)] * 2
        other.take(lock_key(name))
        with override_settings(ADVISORY_LOCK_DATABASE="other"):
            assert held_locks() == holders_of(name) == []


KEY = LockKey((1,))
ROW = KeyLock(
    KEY, 7, own=False, shared=False, granted=True, application_name="cron", state="idle", seconds_in_state=2.04
)


@pytest.mark.parametrize(
    ("locks", "shared", "text"),
    [
        ([], False, "holder unknown"),
        ([ROW], False, "held by pid 7 (cron), idle for 2.0 s"),
        ([KeyLock(KEY, 7, False, False, True, "", "active", None)], True, "held by pid 7, active"),
        (
            [KeyLock(KEY, 7, True, False, True, "", None, None)],
            False,
            "held by another thread or task of this process (pid 7)",
        ),
        ([KeyLock(KEY, None, False, False, True, "", None, None)], False, "held by a prepared transaction"),
        ([KeyLock(KEY, 7, False, True, True, "", None, None), ROW], True, "held by pid 7 (cron), idle for 2.0 s"),
        ([KeyLock(KEY, 7, False, True, True, "", None, None)], True, "holder unknown"),
        ([KeyLock(KEY, 8, False, False, False, "", None, None)], True, "an exclusive request is queued ahead: pid 8"),
        ([KeyLock(KEY, 8, False, False, False, "", None, None)], False, "holder unknown"),
    ],
    ids=str,
)
def test_in_words(locks: list[KeyLock], shared: bool, text: str) -> None:
    """Case 62."""
    assert describe_holders(locks, shared=shared) == text
