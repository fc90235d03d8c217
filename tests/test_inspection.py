"""Who holds a key and who waits for it, as `pg_locks` tells it."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_advisory_lock import LockKey, LockTimeout, advisory_lock, lock_key
from django_advisory_lock.inspection import KeyLock, describe_holders, read_key_locks
from tests.support import OtherSession, Thread, value


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
