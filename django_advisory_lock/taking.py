"""The guarded take, and the one look after any failed wait.

After every failure of a statement that may have waited, the server may have granted the lock all the same. So no error
is trusted: the lock is looked for, and freed, or kept where only the time was up.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from typing import TYPE_CHECKING, Any

from django.db import OperationalError

from . import conf, outcomes, pg_locks, sessions, transactions
from .exceptions import LockNotAcquired, PoolerDetected
from .holds import Hold
from .inspection import KeyLock, read_key_locks
from .notices import names, warn_caller
from .options import resolve_scope
from .outcomes import LOCK_NOT_AVAILABLE, sqlstate
from .savepoints import waiting_savepoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .exceptions import LockTimeout
    from .keys import LockKey
    from .options import Options
    from .owners import Owner

    Statement = Callable[..., str]

MAX_LOCK_TIMEOUT = 2**31 - 1  # milliseconds, the range of PostgreSQL's setting


class Attempt:
    """One attempt to take what a subclass asks for: one lock, several, or one of several."""

    def __init__(
        self,
        keys: tuple[LockKey, ...],
        options: Options,
        owner: Owner,
        hand_over: Callable[[Hold], None],
        connection: BaseDatabaseWrapper,
        cursor: Any,
        task_began: float | None,
    ) -> None:
        self.started = time.monotonic() if task_began is None else task_began
        # A task waits by itself, between the tries: what shares its thread must go on meanwhile.
        self.for_task = task_began is not None
        self.keys = keys
        self.options = options
        self.owner = owner
        self.hand_over = hand_over
        self.connection = connection
        self.cursor = cursor
        self.in_transaction = transactions.in_server_transaction(connection)
        self.scope = resolve_scope(keys[0], options, connection, self.in_transaction, self.for_task)
        self.session = sessions.attach(connection)
        self.hold: Hold | None = None
        # In a transaction that has failed already nothing is sent, or nothing done.
        self.is_hopeless = self.in_transaction and (
            connection.needs_rollback or transactions.is_failed(connection.connection)
        )
        self.is_sent = False

    def run(self) -> None:
        """Make the attempt: hand the lock over, or raise; what is only tried for may be busy."""
        raw = self.connection.connection
        if self.session.is_pooled and self.scope == "session":
            # Whoever closes the connection meanwhile must not hand a lock to the pool's next borrower.
            self.session.mark_for_discard(raw)
        try:
            if self.session.abandoned or self.session.doubts:
                self.session.settle(self.connection)
            if not self.in_transaction or transactions.is_idle(raw):
                self.session.enter_transaction(None)
            self._take()
        except (LockNotAcquired, PoolerDetected):
            raise  # said after a look at the server, or where nothing was taken
        except BaseException as error:
            if not self.is_hopeless:
                self._clean_up()
            ours = outcomes.of_database_error(self._facts(), error)
            if ours is None:
                raise
            raise ours from error
        finally:
            if self.session.is_pooled:
                self.session.unmark()

    # The ways to the lock

    def _take(self) -> None:
        options = self.options
        if self.for_task:
            self._try_for_task()
        elif self._try() or options.tries_only:
            return
        elif options.timeout == 0:
            raise self._timed_out()
        elif options.poll_interval is None:
            self._wait_for()
        else:
            self._poll(options.poll_interval)

    def _try_for_task(self) -> None:
        if not self._try() and not self.options.tries_only:
            remaining = self._remaining()
            if remaining is not None and remaining <= 0:
                raise self._timed_out()

    def _wait_for(self) -> None:
        """Wait in the server's queue with the timeout of this lock alone."""
        remaining = self._remaining()
        # 0 switches the server's timeout off, so a time that is up still waits for a millisecond.
        milliseconds = 0 if remaining is None else max(math.ceil(min(remaining * 1000, MAX_LOCK_TIMEOUT)), 1)
        with self.session.mutex:
            self._refuse_endless_wait()
            try:
                with self._savepoint():
                    row = self._send_wait(milliseconds)
            except OperationalError as error:
                if sqlstate(error) != LOCK_NOT_AVAILABLE or remaining is None:
                    raise
                locks = self._read_locks()
                if not self._came_late(locks):
                    raise self._timed_out(locks) from error
            else:
                self._require_granted(row)

    def _poll(self, interval: float) -> None:
        """Try and sleep in turn, so that no snapshot stays open in between. The last try is at the deadline."""
        while not self._try():
            self._refuse_endless_wait()
            remaining = self._remaining()
            if remaining is not None and remaining <= 0:
                raise self._timed_out()
            pause = interval * random.uniform(0.5, 1.5)  # noqa: S311 - so that many pollers spread
            time.sleep(pause if remaining is None else min(pause, remaining))

    # What a subclass asks for

    def _try(self) -> bool:
        """Try once, as another process would see it: an owner that shares the session counts as one."""
        raise NotImplementedError

    def _send_wait(self, milliseconds: int) -> Sequence[Any]:
        """Send the statement that waits so long, 0 for ever."""
        raise NotImplementedError

    def _form(self) -> tuple[object, ...]:
        """Return what tells one statement of a kind from another."""
        raise NotImplementedError

    def _came_late(self, locks: list[KeyLock]) -> bool:
        """Whether what was waited for came after all; what else came is given back."""
        raise NotImplementedError

    def _taken_keys(self) -> tuple[LockKey, ...]:
        """Return the keys of what was taken."""
        return self.keys

    # What the server says

    def _send(self, statement: Statement, *params: object) -> Sequence[Any]:
        """Send a taking statement, guarded: it has to reach the session that the connection was opened with."""
        # A transaction lock needs no guard: in every pool mode a transaction has one server session.
        for_transaction = self.scope == "transaction"
        guard = None if for_transaction else self.session.guard
        text = statement(*self._form(), for_transaction, self.in_transaction, guard)
        if self.connection.execute_wrappers:
            with self.connection.execute_wrapper(self._note_sent):
                self.cursor.execute(text, params or None)
        else:
            self.is_sent = True
            self.cursor.execute(text, params or None)
        row: Sequence[Any] | None = self.cursor.fetchone()
        if row is not None and row[0] is not None:
            return row
        if guard is None:
            raise outcomes.not_granted(self._facts())
        if self.connection.alias not in conf.session_pooler_aliases():
            raise outcomes.pooler_detected(self._facts())
        self.session.guard = None
        return self._send(statement, *params)

    def _note_sent(self, execute: Callable[..., Any], *args: Any) -> Any:
        """Run as the innermost wrapper: the others may have sent nothing."""
        self.is_sent = True
        return execute(*args)

    def _require_granted(self, row: Sequence[Any]) -> None:
        if not self._granted(row):
            raise outcomes.not_granted(self._facts())

    def _granted(self, row: Sequence[Any]) -> bool:
        if not row[0]:
            return False
        if self.in_transaction:
            _, pid, isolation, start = row[:4]
            self.session.enter_transaction(start)
            self._keep(pid)
            self._warn_of_snapshot(isolation)
        else:
            self._keep(row[1] if self.session.guard is None else self.session.guard)
        return True

    def _keep(self, pid: int) -> None:
        if self.scope == "transaction":
            # The server frees a transaction lock once, however often it was taken.
            self.hold = self.session.transaction_hold(self._taken_keys(), self.options.shared, self.owner)
            if self.hold is not None:
                self.hand_over(self.hold)
                return
        self.hold = Hold(
            self.session,
            self.connection,
            self.owner,
            self._taken_keys(),
            self.options.shared,
            self.scope,
            pid,
            self.in_transaction,
        )
        self.session.note(self.hold, self.owner)
        self.hand_over(self.hold)

    def _warn_of_snapshot(self, isolation: str) -> None:
        if isolation in ("repeatable read", "serializable") and transactions.in_transaction(self.connection):
            warn_caller(
                f"The lock {names(self.keys)} was taken inside a {isolation.upper()} transaction, which goes on reading"
                f" its snapshot from before the wait. Take the lock before the transaction begins."
            )

    def _renew_notes(self, keys: tuple[LockKey, ...]) -> None:
        """Find out which transaction locks on some keys are still there, where a rollback may have ended them."""
        uncertain = self.session.uncertain(keys)
        if uncertain:
            # All keys of each: where one was held before, its row says nothing of the others.
            asked = tuple(dict.fromkeys(key for hold in uncertain for key in hold.keys))
            self.cursor.execute(pg_locks.OWN_MODES, pg_locks.arrays(asked))
            there = {(asked[position - 1], mode) for position, mode in self.cursor.fetchall()}
            for hold in uncertain:
                if all((key, pg_locks.MODES[hold.shared]) in there for key in hold.keys):
                    hold.marker = transactions.transaction_marker(self.connection)
                else:
                    self.session.drop(hold)

    # What can go wrong

    def _refuse_endless_wait(self) -> None:
        """Raise LockDeadlock where this process itself stands in the way, and waiting would keep it there."""
        where = "by another thread or task that shares this database session"
        if not self.session.refuses(self.keys, self.options.shared, self.owner):
            where = "by the caller itself on another session of this alias"
            if not any(self._conflicts_elsewhere(hold) for hold in self.owner.on(self.keys)):
                return
        raise outcomes.endless_wait(self._facts(), where)

    def _conflicts_elsewhere(self, hold: Hold) -> bool:
        raw = hold.session.raw()
        return (
            hold.session is not self.session
            and hold.is_certain
            and hold.session.process == self.session.process
            and hold.using == self.connection.alias
            and not (hold.shared and self.options.shared)
            and raw is not None
            and not raw.closed
        )

    def _clean_up(self) -> None:
        """Free what a failed statement may have been granted. A session that cannot be asked is closed."""
        raw, session = self.connection.connection, self.session
        with session.mutex:
            if self.is_sent and self._doubt():
                if raw is not None and transactions.is_failed(raw) and not session.is_pinned:
                    sessions.end(self.connection, session)
                session.settle(self.connection)
            if raw is not None and transactions.is_failed(raw) and self.connection.in_atomic_block:
                # Our error is none of the database's: caught, it would let the block end as if all were well.
                self.connection.set_rollback(True)
            sessions.close_if_dead(self.connection)

    def _doubt(self) -> bool:
        """Note the session locks that a failed statement may have left on the server; tell whether there may be any."""
        if self.scope == "transaction":
            return False
        self.session.doubt(self.keys, self.options.shared, self.session.guard if self.hold is None else self.hold.pid)
        if self.hold is not None:
            self.session.drop(self.hold)
        return True

    def _read_locks(self) -> list[KeyLock]:
        return read_key_locks(self.cursor, self.keys)

    def _timed_out(self, locks: list[KeyLock] | None = None) -> LockTimeout:
        if locks is None:
            locks = self._read_locks()
        shared = self.options.shared
        if not self.session.refuses(self.keys, shared, self.owner):  # then what is held here is the caller's own
            locks = [lock for lock in locks if not lock.own]
        return outcomes.timed_out(self._facts(), self.keys, self.options.timeout or 0, locks, shared=shared)

    def _facts(self) -> outcomes.Facts:
        return {"key": self.keys[0], "using": self.connection.alias, "waited": time.monotonic() - self.started}

    def _remaining(self) -> float | None:
        timeout = self.options.timeout
        return None if timeout is None else self.started + timeout - time.monotonic()

    def _savepoint(self) -> AbstractContextManager[None]:
        return waiting_savepoint(self.connection, self.cursor) if self.in_transaction else contextlib.nullcontext()
