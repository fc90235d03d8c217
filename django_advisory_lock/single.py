"""The take of one lock, with as little around it as a free lock, or a hot one, needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import OperationalError

from . import pg_locks, sql, transactions
from .outcomes import LOCK_NOT_AVAILABLE, sqlstate
from .taking import Attempt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .inspection import KeyLock


class Take(Attempt):
    """The guarded take of one lock."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.numbers, self.bound = self.session.place(self.keys[0])

    def _take(self) -> None:
        if self.options.waits_at_once and not self.in_transaction and not self.for_task:
            self._wait()
        else:
            super()._take()

    def _try(self) -> bool:
        (key,) = self.keys
        with self.session.mutex:
            uncertain = self.session.uncertain(self.keys)
            if any(len(hold.keys) > 1 for hold in uncertain):
                self._renew_notes(self.keys)
                uncertain = []
            if uncertain:
                row = self._send(sql.try_lock_unless_held, *self.bound, *key.pg_locks)
                for hold in uncertain:
                    if pg_locks.MODES[hold.shared] in row[-1]:
                        hold.marker = transactions.transaction_marker(self.connection)
                    else:
                        self.session.drop(hold)
                if not row[-1]:
                    return self._granted(row)
            if self.session.refuses(self.keys, self.options.shared, self.owner):
                return False
            # A session that holds the key exclusively is granted the shared lock too, but before PostgreSQL 18 its try
            # fails while somebody waits; its wait cannot wait.
            nested = self.options.shared and self.session.covers(key)
            return self._granted(self._send(sql.wait_lock if nested else sql.try_lock, *self.bound))

    def _wait(self) -> None:
        """Wait with nothing around it, so that a busy lock costs what bare SQL costs."""
        with self.session.mutex:
            if self.session.held or self.owner.holds:
                self._refuse_endless_wait()
            try:
                self._require_granted(self._send(sql.wait_lock, *self.bound))
            except OperationalError as error:
                if sqlstate(error) != LOCK_NOT_AVAILABLE:
                    raise
                # The session has a lock_timeout of its own, which is not this lock's.
                if not self._came_late(self._read_locks()):
                    self._wait_for()

    def _send_wait(self, milliseconds: int) -> Sequence[Any]:
        return self._send(sql.wait_lock_for, str(milliseconds), *self.bound)

    def _form(self) -> tuple[object, ...]:
        return self.numbers, self.options.shared

    def _came_late(self, locks: list[KeyLock]) -> bool:
        # A mode that is held already never waits, so a row of ours is this lock.
        for lock in locks:
            if lock.own and lock.granted and lock.shared is self.options.shared and lock.pid is not None:
                self._keep(lock.pid)
                return True
        return False
