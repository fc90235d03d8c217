"""What the server says of itself, with two statements: its state, and the settings of this session.

The settings are those that a session of the alias has, so what was set for the role or the database counts. See
https://www.postgresql.org/docs/current/view-pg-settings.html and runtime-config.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .findings import Finding

if TYPE_CHECKING:
    from .visits import Session

NAMES = (
    "max_connections",
    "superuser_reserved_connections",
    "reserved_connections",  # PostgreSQL 16
    "max_prepared_transactions",
    "max_locks_per_transaction",
    "idle_session_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",  # PostgreSQL 17
    "statement_timeout",
    "lock_timeout",
    "default_transaction_isolation",
    "tcp_keepalives_idle",
    "tcp_keepalives_interval",
    "tcp_keepalives_count",
    "client_connection_check_interval",
    "application_name",
)
SETTINGS = "SELECT name, setting, current_setting(name), source FROM pg_settings WHERE name = ANY(%s)"

# A session of another role shows its database and its role to everybody, and nothing of what it is. Those without a
# role are the server's own. SIReadLock: predicate locks have a table of their own.
STATE = """\
SELECT version(), pg_is_in_recovery(), inet_client_addr() IS NOT NULL,
 pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), current_user,
 (SELECT count(*) FROM pg_locks WHERE NOT fastpath AND mode <> 'SIReadLock'),
 count(*), count(*) FILTER (WHERE a.datid = d.oid), count(*) FILTER (WHERE a.usesysid = r.oid),
 d.datconnlimit, r.rolconnlimit, r.rolsuper
FROM pg_stat_get_activity(NULL) a, pg_database d, pg_roles r
WHERE a.datid IS NOT NULL AND a.usesysid IS NOT NULL AND a.leader_pid IS NULL
 AND d.datname = current_database() AND r.rolname = session_user
GROUP BY d.oid, d.datconnlimit, r.oid, r.rolconnlimit, r.rolsuper"""

MORE_ROOM = (
    "See in pg_locks who holds so many, hold fewer keys at once, or raise max_locks_per_transaction (needs a restart)."
)
TABLE_ROOM = 0.5  # of the lock table: more than that is much
FEW, SHARE = 5, 0.1  # connections that should be free

SOURCES = {
    "user": "set for the role",
    "database": "set for the database",
    "database user": "set for the role in this database",
    "client": "set by the client",
    "session": "set in the session",
}


class Setting(NamedTuple):
    """A setting of this session: its number in its unit or its text, how people write it, and where it comes from."""

    value: str
    text: str
    source: str


class State(NamedTuple):
    """What the server knows of itself."""

    version: str
    is_standby: bool
    is_remote: bool
    sees_all: bool
    role: str
    locks: int
    sessions: int
    sessions_of_database: int
    sessions_of_role: int
    limit_of_database: int
    limit_of_role: int
    is_superuser: bool


class Server:
    """The answers to both questions."""

    def __init__(self, session: Session) -> None:
        self.settings = {name: Setting(*rest) for name, *rest in session.rows(SETTINGS, [list(NAMES)])}
        self.state = State(*session.rows(STATE)[0])
        self.isolation = session.raw.isolation_level

    def number(self, name: str) -> int:
        """Return a number among the settings, 0 where this server does not have it."""
        return int(self.settings[name].value) if name in self.settings else 0

    def told(self, name: str) -> str:
        """Say what a setting is, and where it was set."""
        setting = self.settings[name]
        return f"{name} is {setting.text} ({SOURCES.get(setting.source, 'set for the server')})"


def probe_product(server: Server) -> Finding:
    product = " ".join(server.state.version.split()[:2])
    if product.startswith("PostgreSQL "):
        return Finding("server", "ok", f"The server is {product}.")
    return Finding(
        "server",
        "warning",
        f"The server is {server.state.version!r}.",
        "It speaks the protocol of PostgreSQL and is another product. Some of them have the functions and do not lock.",
        "Go by what exclusion says, try it with each new version, or keep locks on a PostgreSQL server.",
    )


def probe_standby(server: Server) -> Finding:
    if server.state.is_standby:
        return Finding(
            "standby",
            "error",
            "The server is a standby.",
            "Locks are not replicated: one that is taken here excludes nobody on the primary.",
            "Let ADVISORY_LOCK_DATABASE name an alias that always leads to the primary, for example with"
            ' OPTIONS = {"target_session_attrs": "read-write"}.',
        )
    return Finding("standby", "ok", "The server is no standby.")


def probe_lock_table(server: Server) -> Finding:
    holders = server.number("max_connections") + server.number("max_prepared_transactions")
    room = server.number("max_locks_per_transaction") * holders
    found = f"The lock table has {server.state.locks:,} entries; {room:,} are sure to fit."
    if server.state.locks < TABLE_ROOM * room:
        return Finding("lock_table", "ok", found)
    return Finding(
        "lock_table",
        "warning",
        found,
        "Where it is full, taking a lock raises LockTableFull, and new connections of all users fail.",
        MORE_ROOM,
    )


def probe_connections(server: Server) -> Finding:
    state, free = server.state, _free_connections(server)
    where, count, limit = min(free, key=lambda each: each[2] - each[1])
    found = f"{max(limit - count, 0)} of the {limit} connections of {where} are free."
    if limit - count >= max(FEW, SHARE * limit):
        return Finding("connections", "ok", found)
    raised = "max_connections" if where == "the server" else f"the CONNECTION LIMIT of {where}"
    return Finding(
        "connections",
        "warning",
        found,
        "Whoever holds a lock or waits for one has a connection, and dedicated=True opens one more."
        + (" This role may use those that are kept for superusers." if state.is_superuser else ""),
        f"Raise {raised}, or let fewer wait: try_advisory_lock, short timeouts, a pool.",
    )


def _free_connections(server: Server) -> list[tuple[str, int, int]]:
    """Return what limits connections: whose they are, how many there are, and how many there may be."""
    state = server.state
    reserved = server.number("superuser_reserved_connections") + server.number("reserved_connections")
    limits = [("the server", state.sessions, server.number("max_connections") - reserved)]
    if state.limit_of_database >= 0 and not state.is_superuser:
        limits.append(("the database", state.sessions_of_database, state.limit_of_database))
    if state.limit_of_role >= 0 and not state.is_superuser:
        limits.append(("the role", state.sessions_of_role, state.limit_of_role))
    return limits


def probe_isolation(server: Server) -> Finding:
    level, where = _isolation(server)
    if level in ("read committed", "read uncommitted"):
        return Finding("isolation", "ok", f"Transactions are {level.upper()}.")
    return Finding(
        "isolation",
        "warning",
        f"Transactions are {level.upper()} ({where}).",
        "A transaction that had to wait for a lock goes on with what it saw before the wait, not with what the holder"
        " has committed.",
        "Use READ COMMITTED where locks are taken inside transactions, or take them before the transaction begins.",
    )


def _isolation(server: Server) -> tuple[str, str]:
    if server.isolation is not None:
        return server.isolation.name.replace("_", " ").lower(), "isolation_level in OPTIONS"
    setting = server.settings["default_transaction_isolation"]
    return setting.text, server.told("default_transaction_isolation")


def probe_role(server: Server) -> Finding:
    if server.state.sees_all:
        return Finding("role", "ok", f"The role {server.state.role!r} sees what all sessions do.")
    return Finding(
        "role",
        "note",
        f"The role {server.state.role!r} sees what sessions of its own do, and not those of other roles.",
        "Of a holder of another role, errors and lists tell the pid and the application_name alone: no state, no time.",
        f"GRANT pg_read_all_stats TO the role, if locks are shared with other roles than {server.state.role!r}.",
    )


def probe_application_name(server: Server) -> Finding:
    name = server.settings["application_name"].text
    if name:
        return Finding("application_name", "ok", f"Sessions call themselves {name!r}.")
    return Finding(
        "application_name",
        "note",
        "Sessions have no application_name.",
        "LockTimeout and the list of locks name a holder by its pid alone.",
        'Set OPTIONS = {"application_name": "…"}, another one for each kind of process.',
    )
