"""Savepoints: around a wait for a lock inside a transaction, and around the body of a session lock there."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from django.db import Error
from django.db.transaction import TransactionManagementError

from .transactions import is_failed, transaction_marker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .transactions import RawConnection


@contextlib.contextmanager
def waiting_savepoint(connection: BaseDatabaseWrapper, cursor: Any) -> Iterator[None]:
    """Keep a transaction usable after a failed wait. Not released then: it ends with the transaction."""
    cursor.execute("SAVEPOINT advisory_lock_wait")
    try:
        yield
    except BaseException as error:
        _undo(connection, cursor, error)
        raise
    release_waiting_savepoint(cursor)


def release_waiting_savepoint(cursor: Any) -> None:
    """Release the savepoint; also one that was rolled back to, and would pile up where a transaction tries often."""
    cursor.execute("RELEASE SAVEPOINT advisory_lock_wait")


def _undo(connection: BaseDatabaseWrapper, cursor: Any, error: BaseException) -> None:
    undo = "ROLLBACK TO SAVEPOINT advisory_lock_wait"
    if isinstance(error, Error):
        with contextlib.suppress(Exception):
            cursor.execute(undo)
            return
    # Past Django's cursor where its wrappers, or an interrupt, had a hand in the failure.
    with contextlib.suppress(Exception):
        connection.connection.execute(undo)


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
        self.callbacks = len(connection.run_on_commit)
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
            # As Django does it: what was registered inside is undone too, and locks that were taken there may be gone.
            connection.run_on_commit = connection.run_on_commit[: self.callbacks]
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
