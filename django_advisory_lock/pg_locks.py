"""The questions to the server about locks, on the view `pg_locks`; a key has other columns there than in the functions.

Values travel as parameters. See https://www.postgresql.org/docs/current/view-pg-locks.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .keys import LockKey

MODES = {False: "ExclusiveLock", True: "ShareLock"}

# Not from pg_database, nor from the view pg_stat_activity: to read a shared catalog takes a place in the lock table,
# and where that is full the question would fail.
_DATABASE = "(SELECT datid FROM pg_stat_get_activity(pg_backend_pid()))"

KEY_ROWS = f"""\
l.locktype = 'advisory'
 AND l.database = {_DATABASE}
 AND l.classid = CAST(CAST(%s AS bigint) AS oid)
 AND l.objid = CAST(CAST(%s AS bigint) AS oid)
 AND l.objsubid = %s"""

# Keys as three arrays of one length: the first number, the second or 0, and the form.
ARRAYS = "CAST(%s AS bigint[]), CAST(%s AS int[]), CAST(%s AS bool[])"


def arrays(keys: Sequence[LockKey]) -> tuple[str, str, str]:
    """Return keys as the parameters of the statements below, in PostgreSQL's notation for arrays."""
    first = ",".join(str(key.args[0]) for key in keys)
    second = ",".join(str(key.args[-1]) if len(key.args) == 2 else "0" for key in keys)
    is_pair = ",".join("t" if len(key.args) == 2 else "f" for key in keys)
    return f"{{{first}}}", f"{{{second}}}", f"{{{is_pair}}}"


COLUMNS_OF_KEY = """\
CASE WHEN p THEN a ELSE a >> 32 END & 4294967295 AS classid,
 CASE WHEN p THEN CAST(b AS bigint) ELSE a END & 4294967295 AS objid,
 CASE WHEN p THEN 2 ELSE 1 END AS objsubid"""

ROWS_OF_SESSION = f"""\
SELECT CAST(l.classid AS bigint), CAST(l.objid AS bigint), CAST(l.objsubid AS int) FROM pg_locks l
 WHERE l.granted AND l.locktype = 'advisory' AND l.mode = %s
 AND l.database = {_DATABASE}"""

# How many of some keys a server session holds in one mode. Parameters: mode, pid, arrays.
COUNT_HELD = f"""\
WITH held AS MATERIALIZED ({ROWS_OF_SESSION} AND l.pid = %s)
SELECT count(*) FROM (SELECT {COLUMNS_OF_KEY} FROM unnest({ARRAYS}) AS k(a, b, p)) AS asked
WHERE (classid, objid, objsubid) IN (SELECT * FROM held)"""

# The same in one transaction, told by its start: a pooler lends the session to others in between. The start is NULL
# where the role may not see it. Parameters: mode, pid, arrays, pid, start.
COUNT_HELD_IN = f"""\
{COUNT_HELD} AND NOT EXISTS (SELECT FROM pg_stat_get_activity(%s) a
 WHERE CAST(extract(epoch FROM a.xact_start) AS text) <> %s)"""

# Who holds keys and who waits for them, of all sessions of this database. Roles that may not see another session's
# activity get NULLs from PostgreSQL; the lock of a prepared transaction has no pid at all.
_LOCKS = f"""\
SELECT CAST(l.classid AS bigint), CAST(l.objid AS bigint), CAST(l.objsubid AS int),
 l.pid, coalesce(l.pid = pg_backend_pid(), false) AS own, l.mode = '{MODES[True]}' AS shared, l.granted,
 coalesce(a.application_name, '') AS application_name, a.state,
 CAST(extract(epoch FROM clock_timestamp() - a.state_change) AS double precision) AS seconds_in_state"""
# Extensions, such as TimescaleDB and Citus, have advisory locks of other forms for themselves.
_OF_KEYS = f"l.locktype = 'advisory' AND l.objsubid IN (1, 2) AND l.database = {_DATABASE}"
_FROM_LOCKS = f"""\
FROM pg_locks l LEFT JOIN pg_stat_get_activity(NULL) a ON a.pid = l.pid
WHERE {_OF_KEYS}"""
_IN_ASKED = "AND (CAST(l.classid AS bigint), CAST(l.objid AS bigint), CAST(l.objsubid AS int)) IN (SELECT * FROM asked)"
_HOLDERS_FIRST = "ORDER BY l.granted DESC, l.waitstart, l.pid"
_WITH_ASKED = f"WITH asked AS MATERIALIZED (SELECT {COLUMNS_OF_KEY} FROM unnest({ARRAYS}) AS k(a, b, p))"

# Of some keys, for an error that names the holder. Parameters: arrays.
KEY_LOCKS = f"{_WITH_ASKED}\n{_LOCKS}\n{_FROM_LOCKS} {_IN_ASKED}\n{_HOLDERS_FIRST}"


def _microseconds(moment: str) -> str:
    # A number, which is the same in every time zone and DateStyle.
    return f"CAST(extract(epoch FROM {moment}) * 1000000 AS bigint)"


# For people who look into a server. pg_blocking_pids() stops the whole lock manager for a moment, so it is called for
# those alone that wait. Parameters of the second: arrays.
_ALL_COLUMNS = f"""\
{_LOCKS},
 host(a.client_addr) AS client,
 {_microseconds("a.query_start")} AS query_start,
 {_microseconds("l.waitstart")} AS waiting_since,
 CAST(extract(epoch FROM clock_timestamp() - l.waitstart) AS double precision) AS seconds_waiting,
 CASE WHEN l.granted THEN '{{}}' ELSE pg_blocking_pids(l.pid) END AS blocked_by,
 {_microseconds("a.backend_start")} AS backend_start"""
ALL_LOCKS = f"{_ALL_COLUMNS}\n{_FROM_LOCKS}\n{_HOLDERS_FIRST}"
ALL_LOCKS_ON = f"{_WITH_ASKED}\n{_ALL_COLUMNS}\n{_FROM_LOCKS} {_IN_ASKED}\n{_HOLDERS_FIRST}"

# A session is its pid and, as pids come again, its start.
_START = _microseconds("a.backend_start")
OWN_SESSION = f"SELECT a.pid, {_START} FROM pg_stat_get_activity(pg_backend_pid()) a"

# End a session that has an advisory lock in this database, or waits for one, but not the one that is asked. Row:
# whether it ended in time; none: there is no such session. Parameters: milliseconds, pid, start.
END_SESSION = f"""\
SELECT pg_terminate_backend(a.pid, CAST(%s AS bigint)) FROM pg_stat_get_activity(CAST(%s AS int)) a
WHERE {_START} IS NOT DISTINCT FROM CAST(%s AS bigint) AND a.pid <> pg_backend_pid() AND EXISTS (
 SELECT FROM pg_locks l WHERE l.pid = a.pid AND {_OF_KEYS})"""

# The modes in which the session that is asked holds each of some keys. Parameters: arrays. Rows: position, mode.
OWN_MODES = f"""\
WITH asked AS MATERIALIZED (SELECT i, {COLUMNS_OF_KEY} FROM unnest({ARRAYS}) WITH ORDINALITY AS k(a, b, p, i))
SELECT asked.i, l.mode FROM pg_locks l JOIN asked ON (CAST(l.classid AS bigint), CAST(l.objid AS bigint),
 CAST(l.objsubid AS int)) = (asked.classid, asked.objid, asked.objsubid)
WHERE l.granted AND l.locktype = 'advisory' AND l.pid = pg_backend_pid()
 AND l.database = {_DATABASE}"""
