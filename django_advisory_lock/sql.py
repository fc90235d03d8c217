"""Every statement the library sends: text from a closed set of names; values travel as parameters.

The functions are described in "Advisory Lock Functions",
https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS
"""

from __future__ import annotations

from functools import lru_cache

# Without the casts a number out of range is UndefinedFunction. CAST, not "::", which binds closer than the minus sign
# that client-side binding puts before a negative number.
_ARGUMENTS = {1: "CAST(%s AS bigint)", 2: "CAST(%s AS int), CAST(%s AS int)"}

# How many statements are kept as text: a few for each session of the process.
_KEPT = 4096

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


def _misrouted(guard: int) -> str:
    """Whether a pooler gave this statement another server session than its connection was opened with.

    The pid is a number that libpq got from the server. As part of the text it is the same for the whole session, and it
    costs nothing, where each parameter costs some 5 % of a lock.
    """
    return f"pg_backend_pid() <> {guard:d}"


def _guarded(guard: int | None, expression: str) -> str:
    return expression if guard is None else f"CASE WHEN {_misrouted(guard)} THEN NULL ELSE {expression} END"


def _columns(guard: int | None, in_transaction: bool) -> str:
    if in_transaction:
        return f", pg_backend_pid(){_TRANSACTION_COLUMNS}"
    return "" if guard is not None else ", pg_backend_pid()"


@lru_cache(_KEPT)
def try_lock(arity: int, shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Take the lock if it is free. Parameters: key. Row: taken (NULL: misrouted, nothing taken).

    Where there is no guard the pid follows, and in a transaction the pid, its isolation level and its start.
    """
    call = _call("try_", arity, shared, for_transaction)
    return f"SELECT {_guarded(guard, call)}{_columns(guard, in_transaction)}"


@lru_cache(_KEPT)
def try_lock_unless_held(
    arity: int, shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None
) -> str:
    """Take the lock if it is free, unless this session holds the key already. Parameters: key, the key's row.

    Row: as `try_lock`, and a last column: the modes in which the session held the key; if any, nothing was tried.
    """
    call = f"CASE WHEN cardinality(note.held) > 0 THEN false ELSE {_call('try_', arity, shared, for_transaction)} END"
    # OFFSET 0 keeps the planner from pulling the look down to where it would see the lock just taken.
    return (
        f"SELECT {_guarded(guard, call)}{_columns(guard, in_transaction)}, note.held"
        f" FROM (SELECT ARRAY(SELECT l.mode FROM pg_locks l WHERE l.granted AND l.pid = pg_backend_pid()"
        f" AND {_KEY_ROWS}) AS held OFFSET 0) AS note"
    )


@lru_cache(_KEPT)
def wait_lock(arity: int, shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Wait for the lock in the server's queue. Parameters and row as `try_lock`."""
    call = f"{_call('', arity, shared, for_transaction)} IS NOT NULL"
    return f"SELECT {_guarded(guard, call)}{_columns(guard, in_transaction)}"


@lru_cache(_KEPT)
def wait_lock_for(arity: int, shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Wait for the lock with a `lock_timeout` of its own. Parameters: milliseconds as text, key.

    Row: as `try_lock`; no row at all: misrouted, nothing taken. The session's own `lock_timeout` is read before
    (OFFSET 0 keeps that first) and given back after the wait; on an error the server itself undoes the setting.
    """
    call = _call("", arity, shared, for_transaction)
    misrouted = "" if guard is None else f"WHEN {_misrouted(guard)} THEN false "
    return (
        f"SELECT set_config('lock_timeout', own.lock_timeout, true) IS NOT NULL{_columns(guard, in_transaction)}"
        f" FROM (SELECT current_setting('lock_timeout') AS lock_timeout OFFSET 0) AS own"
        f" WHERE CASE {misrouted}WHEN set_config('lock_timeout', %s, true) IS NOT NULL THEN {call} IS NOT NULL END"
    )


@lru_cache(_KEPT)
def unlock(arity: int, shared: bool, guard: int | None) -> str:
    """Release one session lock. Parameters: key. NULL: misrouted, nothing released."""
    call = f"pg_advisory_unlock{'_shared' if shared else ''}({_ARGUMENTS[arity]})"
    return f"SELECT {_guarded(guard, call)}"


# Whether a server session holds a key in one mode. Parameters: pid, mode, key's row.
IS_HELD = f"SELECT EXISTS (SELECT FROM pg_locks l WHERE l.granted AND l.pid = %s AND l.mode = %s AND {_KEY_ROWS})"

# The same in one transaction, told by its start: a pooler lends the session to others in between. The start is NULL
# where the role may not see it. Parameters: pid, mode, key's row, start.
IS_HELD_IN = f"""\
SELECT EXISTS (SELECT FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.granted AND l.pid = %s AND l.mode = %s AND {_KEY_ROWS}
 AND (a.xact_start IS NULL OR CAST(extract(epoch FROM a.xact_start) AS text) = CAST(%s AS text)))"""

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
