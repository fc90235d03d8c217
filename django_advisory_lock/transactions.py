"""Transactions, as Django and the server see them, and a savepoint for what happens under a lock."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from django.db import Error, connections
from django.db.transaction import TransactionManagementError
from psycopg.pq import TransactionStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import psycopg
    from django.db.backends.base.base import BaseDatabaseWrapper

    RawConnection = psycopg.Connection[Any]

# Looked up once: an enumeration is slow at that, and these are asked for with every lock.
_ACTIVE, _FAILED = TransactionStatus.ACTIVE, TransactionStatus.INERROR
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


_savepoint_numbers = itertools.count(1)


class BodySavepoint:
    """A savepoint around the body of a session lock inside a transaction.

    It serves one case: where the body leaves the transaction failed, the server would not hear the unlock. Only then
    is it rolled back. Django's `atomic()` would not do: it also undoes a body whose error is caught further out.
    """

    def __init__(self, connection: BaseDatabaseWrapper, stack: list[object]) -> None:
        self.name = f"advisory_lock_body_{next(_savepoint_numbers)}"
        with connection.cursor() as cursor:
            cursor.execute(f"SAVEPOINT {self.name}")
        self.around = list(connection.savepoint_ids)
        self.marker = transaction_marker(connection)
        self.stack = stack
        stack.append(self)

    def end(self, connection: BaseDatabaseWrapper, raw: RawConnection, *, raised: bool) -> None:
        """Release the savepoint; or, where the transaction has failed, roll back to it and mark the transaction."""
        if self not in self.stack:
            return  # gone with an outer one
        # Blocks left in another order than they were entered: no savepoint of somebody else may go with this one.
        nothing_inside = self.around == connection.savepoint_ids
        failed = is_failed(raw)
        if failed and nothing_inside:
            del self.stack[self.stack.index(self) :]
            self._roll_back(connection, raised)
            return
        is_last = self.stack[-1] is self
        self.stack.remove(self)
        if not failed and nothing_inside and is_last and self.marker is transaction_marker(connection):
            with open_cursor(connection) as cursor:
                cursor.execute(f"RELEASE SAVEPOINT {self.name}")

    def _roll_back(self, connection: BaseDatabaseWrapper, raised: bool) -> None:
        # If this fails too, the transaction stays failed, and the release says so.
        with contextlib.suppress(Error), open_cursor(connection) as cursor:
            cursor.execute(f"ROLLBACK TO SAVEPOINT {self.name}")
        if connection.in_atomic_block:
            connection.set_rollback(True)
        elif not raised:
            raise TransactionManagementError(
                "A database error was caught inside the block of a session lock, and what the block wrote is undone."
                " Roll the transaction back."
            )


def open_cursor(connection: BaseDatabaseWrapper) -> AbstractContextManager[Any]:
    """Return a cursor that sends its statements although Django has marked the transaction for rollback."""
    return _unblocked_cursor(connection) if connection.needs_rollback else connection.cursor()


@contextlib.contextmanager
def _unblocked_cursor(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    connection.needs_rollback = False
    try:
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.needs_rollback = True
