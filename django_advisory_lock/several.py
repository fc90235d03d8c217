"""Several locks at once, all or nothing, in one order for everybody, so that two who want the same never deadlock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import pg_locks, sql
from .savepoints import release_waiting_savepoint
from .taking import Attempt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .exceptions import LockTimeout
    from .inspection import KeyLock


class _Busy(Exception):
    """One of the keys was busy, and what was taken before it is undone."""


class TakeAll(Attempt):
    """The guarded take of several locks with one statement."""

    def _form(self) -> tuple[object, ...]:
        return (self.options.shared,)

    def _try(self) -> bool:
        with self.session.mutex:
            self._renew_notes(self.keys)
            if self.session.refuses(self.keys, self.options.shared, self.owner):
                return False
            if self.scope == "session":
                return self._granted(self._send_try())
            try:
                with self._savepoint():
                    row = self._send_try()
                    if not row[0]:
                        raise _Busy
            except _Busy:
                release_waiting_savepoint(self.cursor)
                return False
            return self._granted(row)

    def _send_try(self) -> Sequence[Any]:
        """Send the try; first for shared locks on keys that the session holds exclusively, as for a single one."""
        covered = [key for key in self.keys if self.options.shared and self.session.covers(key)]
        others = [key for key in self.keys if key not in covered] if covered else self.keys
        row: Sequence[Any] = (True,)
        if covered:
            row = self._send(sql.wait_all_for, 0, 0, *pg_locks.arrays(covered))
        if others:
            row = self._send(sql.try_all, *pg_locks.arrays(others))
        if covered and not row[0] and self.scope == "session":
            self.cursor.execute(sql.unlock_all(True, self.session.guard), pg_locks.arrays(covered))
        return row

    def _send_wait(self, milliseconds: int) -> Sequence[Any]:
        return self._send(sql.wait_all_for, milliseconds, milliseconds, *pg_locks.arrays(self.keys))

    def _came_late(self, locks: list[KeyLock]) -> bool:
        # All came or none: what came is given back.
        if self._doubt():
            self.session.settle(self.connection)
        return False

    def _timed_out(self, locks: list[KeyLock] | None = None) -> LockTimeout:
        # Whoever queues behind the caller's own exclusive lock is not in the caller's way.
        locks = self._read_locks() if locks is None else locks
        return super()._timed_out([lock for lock in locks if lock.granted or not self.session.covers(lock.key)])
