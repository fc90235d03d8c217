"""Transactions, as Django and the server see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections
from psycopg.pq import TransactionStatus

if TYPE_CHECKING:
    import psycopg
    from django.db.backends.base.base import BaseDatabaseWrapper

    RawConnection = psycopg.Connection[Any]

# Looked up once: an enumeration is slow at that, and these are asked for with every lock.
_ACTIVE, _FAILED = TransactionStatus.ACTIVE, TransactionStatus.INERROR
_SOUND = TransactionStatus.INTRANS
_NO_TRANSACTION = (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether what is written now is committed later; the `atomic()` of a `TestCase` does not count."""
    if connection.in_atomic_block:
        blocks = getattr(connection, "atomic_blocks", [])
        return not blocks or not all(getattr(block, "_from_testcase", False) for block in blocks)
    return connection.connection is not None and (not connection.autocommit or not is_idle(connection.connection))


def other_alias_in_transaction(using: str | None) -> str | None:
    """Return an alias of this thread, other than the lock's own if it has one, that is inside a transaction."""
    if using is None or len(connections.settings) > 1:
        for connection in connections.all(initialized_only=True):
            if connection.alias != using and in_transaction(connection):
                return connection.alias
    return None


def in_server_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether the next statement is part of a transaction, whoever began it."""
    raw: RawConnection = connection.connection
    if raw.pgconn.transaction_status == _ACTIVE:
        # A statement of another thread is under way: only after it the status tells of a transaction.
        with raw.lock:
            pass
    return not raw.autocommit or not is_idle(raw)


def is_idle(raw: Any) -> bool:
    """Whether no transaction is open. Connections of other engines have no such status and count as idle."""
    pgconn = getattr(raw, "pgconn", None)
    return pgconn is None or pgconn.transaction_status in _NO_TRANSACTION


def can_commit(raw: RawConnection) -> bool:
    """Whether a transaction is open that has not failed, and no other thread's statement is under way."""
    return raw.pgconn.transaction_status == _SOUND


def is_failed(raw: RawConnection) -> bool:
    """Whether the transaction has failed, so that the server answers nothing until it is rolled back."""
    return raw.pgconn.transaction_status == _FAILED


def transaction_marker(connection: BaseDatabaseWrapper) -> object:
    """Return an object that another one replaces when the transaction, or a savepoint of it, comes to an end.

    Django replaces `run_on_commit` at commit, rollback, rollback to a savepoint and close. With autocommit switched
    off a commit keeps it, so that there nothing can be told without asking the server: the marker is never the same
    twice.
    """
    if connection.in_atomic_block and connection.commit_on_exit:
        return getattr(connection, "run_on_commit", object())
    return object()
