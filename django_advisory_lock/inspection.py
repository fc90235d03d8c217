"""Who holds a key and who waits for it, as the server tells it.

The rows come from `pg_locks` and `pg_stat_activity`, of this database only:
https://www.postgresql.org/docs/current/view-pg-locks.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import sql

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .keys import LockKey


@dataclass(frozen=True, slots=True)
class KeyLock:
    """One row of `pg_locks`: a session that holds a key, or waits for it.

    `key` is the one that was asked for. `pid` is None for a prepared transaction, `state` and `seconds_in_state` for a
    session that this role may not look into.
    """

    key: LockKey
    pid: int | None
    own: bool
    shared: bool
    granted: bool
    application_name: str
    state: str | None
    seconds_in_state: float | None

    def blocks(self, *, shared: bool) -> bool:
        """Whether this one stands in the way of a lock: its holders, or an exclusive request queued ahead."""
        if self.granted:
            return not (shared and self.shared)
        return shared and not self.shared and not self.own

    def __str__(self) -> str:
        if self.pid is None:
            return "a prepared transaction"
        text = f"pid {self.pid}"
        if self.application_name:
            text += f" ({self.application_name})"
        if self.state is not None:
            text += f", {self.state}"
            if self.seconds_in_state is not None:
                text += f" for {self.seconds_in_state:.1f} s"
        return text


def read_key_locks(cursor: Any, keys: Sequence[LockKey]) -> list[KeyLock]:
    """Ask the server who holds some keys and who waits for them, holders first. One query."""
    cursor.execute(sql.KEY_LOCKS, sql.arrays(keys))
    by_columns = {key.pg_locks: key for key in keys}
    return [
        KeyLock(by_columns[row[:3]], pid, bool(own), mode == sql.MODES[True], granted, name or "", state, seconds)
        for row in cursor.fetchall()
        for pid, own, mode, granted, name, state, seconds in (row[3:],)
    ]


def describe_holders(locks: Iterable[KeyLock], *, shared: bool) -> str:
    """Say who stands in the way of a lock: its holders, or an exclusive request queued ahead of a shared one."""
    blocking = [lock for lock in locks if lock.blocks(shared=shared)]
    mine = "another thread or task of this process"
    holders = [f"{mine} ({lock})" if lock.own else str(lock) for lock in blocking if lock.granted]
    queued = [str(lock) for lock in blocking if not lock.granted]
    if holders:
        return f"held by {'; '.join(holders)}"
    if queued:
        return f"an exclusive request is queued ahead: {'; '.join(queued)}"
    return "holder unknown"
