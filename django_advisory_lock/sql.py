"""Every statement the library sends: constant text from a closed set of names; values travel as parameters.

The functions are described in "Advisory Lock Functions",
https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS
"""

from __future__ import annotations

from functools import cache

# Without the casts a number out of range is UndefinedFunction. CAST, not "::", which binds closer than the minus sign
# that client-side binding puts before a negative number.
_ARGUMENTS = {1: "CAST(%s AS bigint)", 2: "CAST(%s AS int), CAST(%s AS int)"}

# The guard: true where a pooler gave this statement another server session than the connection was opened with.
# A NULL parameter switches it off.
_MISROUTED = "pg_backend_pid() <> CAST(%s AS int)"

# The start of a transaction tells it from the others of its session; as a number it looks the same in every time zone.
_TRANSACTION_COLUMNS = (
    ", current_setting('transaction_isolation'), CAST(extract(epoch FROM transaction_timestamp()) AS text)"
)

_KEY_ROWS = """\
l.locktype = 'advisory'
 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
 AND l.classid = CAST(CAST(%s AS bigint) AS oid)
 AND l.objid = CAST(CAST(%s AS bigint) AS oid)
 AND l.objsubid = %s"""

MODES = {False: "ExclusiveLock", True: "ShareLock"}


def _call(verb: str, arity: int, shared: bool, for_transaction: bool) -> str:
    level = "_xact_lock" if for_transaction else "_lock"
    return f"pg_{verb}advisory{level}{'_shared' if shared else ''}({_ARGUMENTS[arity]})"


@cache
def try_lock(arity: int, shared: bool, for_transaction: bool, in_transaction: bool) -> str:
    """Take the lock if it is free. Parameters: guard, key. Row: pid, taken (NULL: misrouted, nothing taken), …

    In a transaction the row ends with the transaction's isolation level and its start.
    """
    call = _call("try_", arity, shared, for_transaction)
    more = _TRANSACTION_COLUMNS if in_transaction else ""
    return f"SELECT pg_backend_pid(), CASE WHEN {_MISROUTED} THEN NULL ELSE {call} END{more}"


@cache
def try_lock_unless_held(arity: int, shared: bool, for_transaction: bool, in_transaction: bool) -> str:
    """Take the lock if it is free, unless this session holds the key already. Parameters: guard, key, the key's row.

    Row: as `try_lock`, and a last column: whether the session held the key, so that nothing was tried.
    """
    call = _call("try_", arity, shared, for_transaction)
    more = _TRANSACTION_COLUMNS if in_transaction else ""
    # OFFSET 0 keeps the planner from pulling the look down to where it would see the lock just taken.
    return (
        f"SELECT pg_backend_pid(), CASE WHEN {_MISROUTED} THEN NULL WHEN note.held THEN false ELSE {call} END{more},"
        f" note.held FROM (SELECT EXISTS (SELECT FROM pg_locks l WHERE l.granted AND l.pid = pg_backend_pid()"
        f" AND {_KEY_ROWS}) AS held OFFSET 0) AS note"
    )


@cache
def wait_lock(arity: int, shared: bool, for_transaction: bool, in_transaction: bool) -> str:
    """Wait for the lock in the server's queue. Parameters and row as `try_lock`."""
    call = _call("", arity, shared, for_transaction)
    more = _TRANSACTION_COLUMNS if in_transaction else ""
    return f"SELECT pg_backend_pid(), CASE WHEN {_MISROUTED} THEN NULL ELSE {call} IS NOT NULL END{more}"


@cache
def wait_lock_for(arity: int, shared: bool, for_transaction: bool, in_transaction: bool) -> str:
    """Wait for the lock with a `lock_timeout` of its own. Parameters: guard, milliseconds as text, key.

    Row: as `wait_lock`; no row at all: misrouted, nothing taken. The session's own `lock_timeout` is read before
    (OFFSET 0 keeps that first) and given back after the wait; on an error the server itself undoes the setting.
    """
    call = _call("", arity, shared, for_transaction)
    more = _TRANSACTION_COLUMNS if in_transaction else ""
    return (
        f"SELECT pg_backend_pid(), set_config('lock_timeout', own.lock_timeout, true) IS NOT NULL{more}"
        f" FROM (SELECT current_setting('lock_timeout') AS lock_timeout OFFSET 0) AS own"
        f" WHERE CASE WHEN {_MISROUTED} THEN false"
        f" WHEN set_config('lock_timeout', %s, true) IS NOT NULL THEN {call} IS NOT NULL END"
    )


@cache
def unlock(arity: int, shared: bool) -> str:
    """Release one session lock. Parameters: pid of the session that took it, key. NULL: another session."""
    function = f"pg_advisory_unlock{'_shared' if shared else ''}({_ARGUMENTS[arity]})"
    return f"SELECT CASE WHEN {_MISROUTED} THEN NULL ELSE {function} END"


# Whether a server session holds a key in one mode. Parameters: pid, mode, key's row.
IS_HELD = f"SELECT EXISTS (SELECT FROM pg_locks l WHERE l.granted AND l.pid = %s AND l.mode = %s AND {_KEY_ROWS})"

# The same for the session that is asked. Parameters: mode, key's row.
IS_OURS = f"""\
SELECT EXISTS (SELECT FROM pg_locks l WHERE l.granted AND l.pid = pg_backend_pid() AND l.mode = %s AND {_KEY_ROWS})"""

# Who holds a key and who waits for it. Roles that may not see another session's activity get NULLs from PostgreSQL; the
# lock of a prepared transaction has no pid at all. Parameters: key's row.
KEY_LOCKS = f"""\
SELECT l.pid, l.pid = pg_backend_pid(), l.mode, l.granted, a.application_name, a.state,
 CAST(extract(epoch FROM clock_timestamp() - a.state_change) AS double precision)
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE {_KEY_ROWS}
ORDER BY l.granted DESC, l.pid"""
