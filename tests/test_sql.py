"""Every statement, as text and as the server takes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction

from django_advisory_lock import LockKey, advisory_lock, lock_key, pg_locks, sql
from tests.support import OtherSession, extra_alias

KEYS = [LockKey((-(2**63),)), LockKey((2**63 - 1,)), LockKey.pair(-(2**31), 2**31 - 1)]
FLAVOURS = list(itertools.product(KEYS, (False, True), (False, True)))
Statement = Callable[["tuple[int, ...]", bool, bool, bool, "int | None"], str]


def run(alias: str, statement: str, *params: object) -> tuple[Any, ...]:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, params)
        row: tuple[Any, ...] = cursor.fetchone()
        return row


@pytest.mark.parametrize("alias", ["default", "binding", "prepared"])
@pytest.mark.parametrize("statement", [sql.try_lock, sql.wait_lock, sql.wait_lock_for, sql.try_lock_unless_held])
@pytest.mark.parametrize(("key", "shared", "for_transaction"), FLAVOURS, ids=str)
def test_taking(
    statement: Statement, key: LockKey, shared: bool, for_transaction: bool, alias: str, other: OtherSession
) -> None:
    """Takes the lock in its mode, and only where the guard is right or switched off."""
    before = ["1000"] if statement is sql.wait_lock_for else []
    after = key.pg_locks if statement is sql.try_lock_unless_held else ()
    guards: list[tuple[str | None, bool]] = [(None, True), ("own", True), ("other", False)]
    for guard, taken in guards:
        with transaction.atomic(using=alias):
            connections[alias].ensure_connection()
            pid = connections[alias].connection.info.backend_pid
            pids = {"own": pid, "other": other.pid, None: None}
            flavour = (key.args, shared, for_transaction, True, pids[guard])
            text = statement.__wrapped__(*flavour)  # type: ignore[attr-defined]
            assert text == statement(*flavour)
            row = run(alias, text, *before, *after)
            assert (row is not None and row[0] is True) is taken
            assert other.take(key, shared=True) is (shared or not taken)
            other.drop(key, shared=True)
            assert other.take(key) is not taken
            other.drop(key)
            if taken:
                assert row[1] == pid
                assert row[2] == "read committed"
                assert float(row[3]) > 1e9
            if taken and not for_transaction:
                (freed,) = run(alias, sql.unlock(key.args, shared, pid))
                assert freed is True
        connections[alias].close()


PREPARED = "SELECT statement FROM pg_prepared_statements WHERE statement LIKE '%advisory%'"


def test_the_server_prepares_one_statement_for_all_keys(name: str, other: OtherSession) -> None:
    """Where it binds parameters itself; each key with a statement of its own would push out those of the ORM."""
    options = {"server_side_binding": True, "prepare_threshold": 1}
    with extra_alias("eager", options) as alias, connections[alias].cursor() as cursor:
        for number in range(20):
            with advisory_lock(name, number, using=alias), advisory_lock(LockKey.pair(number, -1), using=alias):
                assert not other.is_free(lock_key(name, number))
                assert not other.is_free(LockKey.pair(number, -1))
        cursor.execute(PREPARED)
        assert len([text for (text,) in cursor.fetchall() if "pg_prepared_statements" not in text]) == 4


@pytest.mark.parametrize(("key", "shared", "for_transaction"), FLAVOURS, ids=str)
def test_trying_where_the_key_is_held_already(
    key: LockKey, shared: bool, for_transaction: bool, other: OtherSession
) -> None:
    """Says so, and takes nothing."""
    text = sql.try_lock_unless_held(key.args, shared, for_transaction, True, None)
    with transaction.atomic():
        run("default", sql.try_lock(key.args, True, True, False, None))
        row = run("default", text, *key.pg_locks)
        assert (row[0], row[-1]) == (False, ["ShareLock"])
    assert other.is_free(key)


@pytest.mark.parametrize("shared", [False, True])
def test_unlocking(shared: bool, other: OtherSession) -> None:
    """Only on the session that took the lock."""
    key = lock_key(-5)
    taken, pid = run("default", sql.try_lock(key.args, shared, False, False, None))
    assert taken is True
    assert run("default", sql.try_lock(key.args, shared, False, False, pid)) == (True,)
    assert run("default", sql.unlock(key.args, shared, None)) == (True,)
    assert run("default", sql.unlock(key.args, shared, other.pid)) == (None,)
    keys = pg_locks.arrays([key])
    assert run("default", pg_locks.COUNT_HELD, pg_locks.MODES[shared], pid, *keys) == (1,)
    assert run("default", pg_locks.COUNT_HELD, pg_locks.MODES[not shared], pid, *keys) == (0,)
    assert run("default", sql.unlock(key.args, shared, pid)) == (True,)
    assert run("default", pg_locks.COUNT_HELD, pg_locks.MODES[shared], pid, *keys) == (0,)
