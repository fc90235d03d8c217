"""Every statement that takes or frees a lock, of names from a closed set and numbers; all else travels as parameters.

By default Django has psycopg make text of parameters too, before it sends them. For the numbers of one key that is done
here, and kept: each parameter costs some 5 % of a lock. Where the server binds parameters it gets them, so that one
statement that it prepares serves all keys.

The functions are described in "Advisory Lock Functions",
https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from .pg_locks import ARRAYS, COLUMNS_OF_KEY, KEY_ROWS, ROWS_OF_SESSION

if TYPE_CHECKING:
    # Those of a key, or what stands for them where they travel as parameters.
    Numbers = tuple[int | str, ...]

# Without the casts a number out of range is UndefinedFunction. CAST, not "::", which binds closer than the minus sign
# that client-side binding puts before a negative number.
_TYPES = {1: "bigint", 2: "int"}

PLACES = {1: ("%s",), 2: ("%s", "%s")}

# How many statements of a kind are kept as text: those of hot keys, a few for each session of the process.
_KEPT = 1024

# The start of a transaction tells it from the others of its session; as a number it looks the same in every time zone.
_TRANSACTION_COLUMNS = (
    ", current_setting('transaction_isolation'), CAST(extract(epoch FROM transaction_timestamp()) AS text)"
)


def _function(verb: str, shared: bool, for_transaction: bool = False) -> str:
    return f"pg_{verb}advisory{'_xact' if for_transaction else ''}_lock{'_shared' if shared else ''}"


def _unlock_function(shared: bool) -> str:
    return f"pg_advisory_unlock{'_shared' if shared else ''}"


def _arguments(numbers: Numbers) -> str:
    return ", ".join(f"CAST({number} AS {_TYPES[len(numbers)]})" for number in numbers)


def _call(verb: str, numbers: Numbers, shared: bool, for_transaction: bool) -> str:
    return f"{_function(verb, shared, for_transaction)}({_arguments(numbers)})"


def _misrouted(guard: int) -> str:
    """Whether a pooler gave this statement another server session than its connection was opened with.

    The pid is a number that libpq got from the server.
    """
    return f"pg_backend_pid() <> {guard:d}"


def _guarded(guard: int | None, expression: str) -> str:
    return expression if guard is None else f"CASE WHEN {_misrouted(guard)} THEN NULL ELSE {expression} END"


def _columns(guard: int | None, in_transaction: bool) -> str:
    if in_transaction:
        return f", pg_backend_pid(){_TRANSACTION_COLUMNS}"
    return "" if guard is not None else ", pg_backend_pid()"


@lru_cache(_KEPT)
def try_lock(numbers: Numbers, shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Take the lock if it is free. Row: taken (NULL: misrouted, nothing taken).

    Where there is no guard the pid follows, and in a transaction the pid, its isolation level and its start.
    """
    call = _call("try_", numbers, shared, for_transaction)
    return f"SELECT {_guarded(guard, call)}{_columns(guard, in_transaction)}"


@lru_cache(_KEPT)
def try_lock_unless_held(
    numbers: Numbers, shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None
) -> str:
    """Take the lock if it is free, unless this session holds the key already. Parameters: the key's row.

    Row: as `try_lock`, and a last column: the modes in which the session held the key; if any, nothing was tried.
    """
    call = f"CASE WHEN cardinality(note.held) > 0 THEN false ELSE {_call('try_', numbers, shared, for_transaction)} END"
    # OFFSET 0 keeps the planner from pulling the look down to where it would see the lock just taken.
    return (
        f"SELECT {_guarded(guard, call)}{_columns(guard, in_transaction)}, note.held"
        f" FROM (SELECT ARRAY(SELECT l.mode FROM pg_locks l WHERE l.granted AND l.pid = pg_backend_pid()"
        f" AND {KEY_ROWS}) AS held OFFSET 0) AS note"
    )


@lru_cache(_KEPT)
def wait_lock(numbers: Numbers, shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Wait for the lock in the server's queue. Row: as `try_lock`."""
    call = f"{_call('', numbers, shared, for_transaction)} IS NOT NULL"
    return f"SELECT {_guarded(guard, call)}{_columns(guard, in_transaction)}"


@lru_cache(_KEPT)
def wait_lock_for(
    numbers: Numbers, shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None
) -> str:
    """Wait for the lock with a `lock_timeout` of its own. Parameters: milliseconds as text.

    Row: as `try_lock`; no row at all: misrouted, nothing taken. The session's own `lock_timeout` is read before
    (OFFSET 0 keeps that first) and given back after the wait; on an error the server itself undoes the setting.
    """
    call = _call("", numbers, shared, for_transaction)
    misrouted = "" if guard is None else f"WHEN {_misrouted(guard)} THEN false "
    return (
        f"SELECT set_config('lock_timeout', own.lock_timeout, true) IS NOT NULL{_columns(guard, in_transaction)}"
        f" FROM (SELECT current_setting('lock_timeout') AS lock_timeout OFFSET 0) AS own"
        f" WHERE CASE {misrouted}WHEN set_config('lock_timeout', %s, true) IS NOT NULL THEN {call} IS NOT NULL END"
    )


@lru_cache(_KEPT)
def unlock(numbers: Numbers, shared: bool, guard: int | None) -> str:
    """Release one session lock. NULL: misrouted, nothing released."""
    return f"SELECT {_guarded(guard, f'{_unlock_function(shared)}({_arguments(numbers)})')}"


# Several keys at once.


def _call_either(function: str, a: str, b: str, is_pair: str) -> str:
    return f"CASE WHEN {is_pair} THEN {function}(CAST({a} AS int), {b}) ELSE {function}({a}) END"


def _routed(guard: int | None) -> str:
    return "true" if guard is None else f"pg_backend_pid() = {guard:d}"


@lru_cache(_KEPT)
def try_all(shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Try for keys in their order, up to the first that is busy. Parameters: arrays. Row: as `try_lock`.

    Session locks are given back unless all were got; transaction locks are for a savepoint to undo.
    """
    take = _call_either(_function("try_", shared, for_transaction), "a[i + 1]", "b[i + 1]", "p[i + 1]")
    back = _call_either(_unlock_function(shared), "a[i]", "b[i]", "p[i]")
    returned = "0" if for_transaction else "CASE WHEN got.n < cardinality(a) THEN got.n ELSE 0 END"
    return (
        f"WITH RECURSIVE asked(a, b, p) AS MATERIALIZED (SELECT {ARRAYS}), taken(i, ok) AS ("
        f"SELECT 0, {_routed(guard)} UNION ALL SELECT i + 1, {take} FROM taken, asked WHERE ok AND i < cardinality(a)),"
        f" got AS MATERIALIZED (SELECT CAST(count(*) FILTER (WHERE ok) - 1 AS int) AS n FROM taken),"
        f" returned AS MATERIALIZED (SELECT count({back}) AS n FROM got, asked, generate_series(1, {returned}) AS i)"
        f" SELECT CASE WHEN got.n >= 0 THEN got.n = cardinality(a) END{_columns(guard, in_transaction)}"
        f" FROM got, asked, returned WHERE returned.n >= 0"
    )


@lru_cache(_KEPT)
def wait_all_for(shared: bool, for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Wait for keys in their order, all within one time. Parameters: milliseconds (0: no limit) twice, arrays.

    `lock_timeout` counts for each wait, so it is armed anew for each key with what is left. Row: as `wait_lock_for`.
    """
    call = _call_either(_function("", shared, for_transaction), "a", "b", "p")
    gone = "1000 * extract(epoch FROM clock_timestamp() - statement_timestamp())"
    left = f"CAST(CAST(greatest(1, ceil(%s - {gone})) AS bigint) AS text)"
    armed = f"set_config('lock_timeout', CASE WHEN %s = 0 THEN '0' ELSE {left} END, true)"
    return (
        f"WITH own AS MATERIALIZED (SELECT current_setting('lock_timeout') AS lock_timeout), taken AS MATERIALIZED ("
        f"SELECT bool_and(CASE WHEN {armed} IS NOT NULL THEN {call} IS NOT NULL END) AS ok"
        f" FROM own, unnest({ARRAYS}) AS k(a, b, p) WHERE {_routed(guard)})"
        f" SELECT set_config('lock_timeout', own.lock_timeout, true) IS NOT NULL AND taken.ok"
        f"{_columns(guard, in_transaction)} FROM taken, own WHERE taken.ok IS NOT NULL"
    )


@lru_cache(_KEPT)
def unlock_all(shared: bool, guard: int | None) -> str:
    """Release session locks. Parameters: arrays. Row: the positions of keys that were not held; NULL: misrouted."""
    call = _call_either(_unlock_function(shared), "a", "b", "p")
    failed = f"ARRAY(SELECT i FROM unnest({ARRAYS}) WITH ORDINALITY AS k(a, b, p, i) WHERE {call} IS NOT TRUE)"
    return f"SELECT {_guarded(guard, failed)}"


@lru_cache(_KEPT)
def free_all(shared: bool, guard: int | None) -> str:
    """Release those session locks that are there. Parameters: mode, arrays. Row: how many were, 0 where misrouted.

    The look first: an unlock without a lock leaves a WARNING in the server's log.
    """
    call = _call_either(_unlock_function(shared), "a", "b", "p")
    return (
        f"WITH mine AS MATERIALIZED ({ROWS_OF_SESSION} AND l.pid = pg_backend_pid()), asked AS MATERIALIZED ("
        f"SELECT a, b, p, {COLUMNS_OF_KEY} FROM unnest({ARRAYS}) AS k(a, b, p) WHERE {_routed(guard)})"
        f" SELECT count({call}) FROM asked WHERE (classid, objid, objsubid) IN (SELECT * FROM mine)"
    )


# Semaphores: slots are keys of one number, and so is the gate that those who take one go through.


def _first_free(for_transaction: bool, source: str) -> str:
    take = f"{_function('try_', False, for_transaction)}(a[i + 1])"
    return (
        f"taken(i, ok) AS (SELECT 0, false FROM {source} UNION ALL"
        f" SELECT i + 1, {take} FROM taken, asked WHERE NOT ok AND i < cardinality(a)),"
        f" slot AS MATERIALIZED (SELECT max(i) FILTER (WHERE ok) AS i FROM taken)"
    )


@lru_cache(_KEPT)
def try_slot(for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Take the first free slot, unless somebody waits at the gate. Parameters: gate, slots as array, gate.

    Row: as `try_lock`, and a last column: the position of the slot.
    """
    knock = _guarded(guard, "pg_try_advisory_lock_shared(CAST(%s AS bigint))")
    return (
        f"WITH RECURSIVE gate AS MATERIALIZED (SELECT {knock} AS is_open),"
        f" asked(a) AS MATERIALIZED (SELECT CAST(%s AS bigint[])),"
        f" {_first_free(for_transaction, 'gate WHERE is_open')},"
        f" shut AS MATERIALIZED ("
        f"SELECT CASE WHEN is_open THEN pg_advisory_unlock_shared(CAST(%s AS bigint)) END AS done FROM gate, slot)"
        f" SELECT CASE WHEN is_open IS NULL THEN NULL ELSE slot.i IS NOT NULL END{_columns(guard, in_transaction)},"
        f" slot.i FROM gate, slot, shut"
    )


@lru_cache(_KEPT)
def take_slot_at_gate(for_transaction: bool, in_transaction: bool, guard: int | None) -> str:
    """Take the first free slot, and with it free the gate that this session holds. Parameters: slots, gate.

    Row: as `try_slot`.
    """
    unlock = "CASE WHEN slot.i IS NOT NULL THEN pg_advisory_unlock(CAST(%s AS bigint)) END"
    return (
        f"WITH RECURSIVE asked(a) AS MATERIALIZED (SELECT CAST(%s AS bigint[])),"
        f" gate AS MATERIALIZED (SELECT {_routed(guard)} AS is_ours),"
        f" {_first_free(for_transaction, 'gate WHERE is_ours')},"
        f" shut AS MATERIALIZED (SELECT {unlock} AS done FROM slot)"
        f" SELECT CASE WHEN is_ours THEN slot.i IS NOT NULL END{_columns(guard, in_transaction)}, slot.i"
        f" FROM gate, slot, shut"
    )
