"""The end of a lock: its release, the savepoint around its body, and the question whether it is still there."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING, Any

from django.db import Error, connections
from django.db.transaction import TransactionManagementError

from . import sessions, sql
from .exceptions import LockLost
from .notices import logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .sessions import Hold, RawConnection, Session

_savepoint_numbers = itertools.count(1)


class BodySavepoint:
    """A savepoint around the body of a session lock inside a transaction.

    It serves one case: where the body leaves the transaction failed, the server would not hear the unlock. Only then
    is it rolled back. Django's `atomic()` would not do: it also undoes a body whose error is caught further out.
    """

    def __init__(self, connection: BaseDatabaseWrapper, session: Session) -> None:
        self.name = f"advisory_lock_body_{next(_savepoint_numbers)}"
        with connection.cursor() as cursor:
            cursor.execute(f"SAVEPOINT {self.name}")
        self.around = list(connection.savepoint_ids)
        self.marker = sessions.transaction_marker(connection)
        self.stack = session.savepoints
        self.stack.append(self)

    def end(self, connection: BaseDatabaseWrapper, raw: RawConnection, *, raised: bool) -> None:
        """Release the savepoint; or, where the transaction has failed, roll back to it and mark the transaction."""
        if self not in self.stack:
            return  # gone with an outer one
        # Blocks left in another order than they were entered: no savepoint of somebody else may go with this one.
        nothing_inside = self.around == connection.savepoint_ids
        failed = sessions.is_failed(raw)
        if failed and nothing_inside:
            del self.stack[self.stack.index(self) :]
            self._roll_back(connection, raised)
            return
        is_last = self.stack[-1] is self
        self.stack.remove(self)
        if not failed and nothing_inside and is_last and self.marker is sessions.transaction_marker(connection):
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


def release(hold: Hold, savepoint: BodySavepoint | None = None, *, raised: bool = False) -> None:
    """Release a session lock, or raise LockLost where it turns out to be gone.

    In a failed transaction nothing can be sent: that is logged, and the next lock operation on the session frees the
    lock.
    """
    session, connection = hold.session, connections[hold.using]
    with session.mutex:
        if not hold.noted:
            return  # released inside its block
        raw = _open_raw(hold, connection)
        if raw is None:
            session.disown(hold)
            sessions.close_if_dead(connection)
            raise lost(hold, "its connection was closed, or replaced by another one")
        try:
            try:
                if savepoint is not None:
                    savepoint.end(connection, raw, raised=raised)
            finally:
                answer = _unlock(hold, connection, raw)
        except BaseException as error:
            # Without a hold any more it is the error of the savepoint.
            if not hold.noted or not _unlock_otherwise(hold, connection, raw, error):
                raise
            return
        if answer is not True:
            raise lost(hold, "the server says that this session does not hold it")


def _unlock(hold: Hold, connection: BaseDatabaseWrapper, raw: RawConnection) -> object:
    if sessions.is_failed(raw):
        hold.session.disown(hold)
        logger.error(
            "The lock %r on %r could not be released in a failed transaction. The next lock operation on this"
            " connection frees it.",
            hold.key.name,
            hold.using,
        )
        return True
    with open_cursor(connection) as cursor:
        cursor.execute(sql.unlock(len(hold.key.args), hold.shared), (hold.pid, *hold.key.args))
        answer: object = cursor.fetchone()[0]
    hold.session.drop(hold)
    hold.session.settle(connection)
    return answer


def _unlock_otherwise(hold: Hold, connection: BaseDatabaseWrapper, raw: RawConnection, error: BaseException) -> bool:
    """Free a lock whose unlock failed, past Django's cursor, or else by closing the session. True where all is well."""
    session = hold.session
    session.disown(hold)
    session.settle(connection)
    sessions.close_if_dead(connection)
    if not isinstance(error, Error):
        return False
    if raw.closed:
        raise lost(hold, "its session has ended") from error
    return not session.is_doubtful(hold.key, hold.shared)


def lost(hold: Hold, reason: str) -> LockLost:
    """Log and return the error for a lock that was gone before its end."""
    message = f"The lock {hold.key.name!r} on {hold.using!r} was lost: {reason}. Others may have held it since."
    logger.error("%s", message)
    return LockLost(message, key=hold.key, using=hold.using)


def is_inherited(hold: Hold) -> bool:
    """Whether the lock belongs to the process that this one was forked from."""
    return hold.session.process != os.getpid()


def is_held(hold: Hold) -> bool:
    """Ask the server whether the lock is there now."""
    raw, connection = hold.session.raw(), connections[hold.using]
    if not hold.noted or is_inherited(hold) or raw is None or raw.closed:
        return False
    # Another thread asks over its own connection: any session sees the locks of all.
    if hold.connection() is connection:
        if connection.connection is not raw or (hold.scope == "transaction" and sessions.is_idle(raw)):
            return False
        if sessions.is_failed(raw):
            return hold.scope == "session"
    try:
        with open_cursor(connection) as cursor:
            cursor.execute(sql.IS_HELD, (hold.pid, sql.MODES[hold.shared], *hold.key.pg_locks))
            return bool(cursor.fetchone()[0])
    except Error:
        if raw.closed:
            return False
        raise


def end_transaction_block(hold: Hold) -> None:
    """Raise LockLost where a transaction lock is gone before its block ends. Asks the server only in doubt."""
    raw = _open_raw(hold, connections[hold.using])
    if raw is None or not hold.noted:
        raise lost(hold, "its transaction has ended")
    # In a failed transaction nothing can be asked, and nothing that was written under the lock is committed.
    if not hold.is_certain and not sessions.is_failed(raw) and not is_held(hold):
        hold.session.drop(hold)
        raise lost(hold, "its transaction, or the savepoint that it was taken in, was ended inside the block")


def _open_raw(hold: Hold, connection: BaseDatabaseWrapper) -> RawConnection | None:
    raw = hold.session.raw()
    return None if raw is None or raw.closed or connection.connection is not raw else raw
