"""Who holds a key and who waits for it, as the server tells it.

The rows come from `pg_locks` and `pg_stat_activity`, of this database only:
https://www.postgresql.org/docs/current/view-pg-locks.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import sql

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .keys import LockKey


@dataclass(frozen=True, slots=True)
class KeyLock:
    """One row of `pg_locks`: a session that holds a key, or waits for it.

    `pid` is None for a prepared transaction, `state` and `seconds_in_state` for a session that this role may not look
    into.
    """

    pid: int | None
    own: bool
    shared: bool
    granted: bool
    application_name: str
    state: str | None
    seconds_in_state: float | None

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


def read_key_locks(cursor: Any, key: LockKey) -> list[KeyLock]:
    """Ask the server who holds a key and who waits for it, holders first. One query."""
    cursor.execute(sql.KEY_LOCKS, key.pg_locks)
    return [
        KeyLock(pid, bool(own), mode == sql.MODES[True], granted, application_name or "", state, seconds)
        for pid, own, mode, granted, application_name, state, seconds in cursor.fetchall()
    ]


def describe_holders(locks: Iterable[KeyLock], *, shared: bool) -> str:
    """Say who stands in the way of a lock: its holders, or an exclusive request queued ahead of a shared one."""
    holders, queued = [], []
    for lock in locks:
        if lock.granted and not (shared and lock.shared):
            holders.append(f"another thread or task of this process ({lock})" if lock.own else str(lock))
        elif not lock.granted and not lock.own and shared and not lock.shared:
            queued.append(str(lock))
    if holders:
        return f"held by {'; '.join(holders)}"
    if queued:
        return f"an exclusive request is queued ahead: {'; '.join(queued)}"
    return "holder unknown"
