"""What the settings of the project say, without a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections

from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator


def probe_project(alias: str) -> Iterator[Finding]:
    """Judge the settings of an alias."""
    settings = connections[alias].settings_dict
    yield from _probe_pool(settings)
    yield _probe_conn_max_age(settings)
    yield _probe_autocommit(settings)
    yield _probe_atomic_requests(alias)
    yield _probe_hosts(settings)


def _probe_pool(settings: dict[str, Any]) -> Iterator[Finding]:
    pool = settings["OPTIONS"].get("pool")
    if not pool:
        yield Finding("pool", "ok", "Django's pool is not used.")
    elif settings["CONN_MAX_AGE"] != 0:
        yield Finding(
            "pool",
            "error",
            f"The pool option stands beside CONN_MAX_AGE = {settings['CONN_MAX_AGE']!r}.",
            "Django refuses to connect.",
            "Set CONN_MAX_AGE to 0, or take the pool out.",
        )
    else:
        size = _pool_size(pool)
        yield Finding(
            "pool",
            "note",
            f"Django's pool lends each process {size} connections at most.",
            "Whoever holds a lock or waits for one keeps a connection of the pool meanwhile. One that is closed while"
            " it holds a lock is discarded.",
            "Let fewer wait than there are connections: try_advisory_lock, or short timeouts. dedicated=True takes none"
            " from the pool.",
        )


def _pool_size(pool: Any) -> Any:
    """Return the most connections of a pool, as psycopg_pool counts them."""
    options = {} if pool is True else pool
    return options.get("max_size") or options.get("min_size", 4)


def _probe_conn_max_age(settings: dict[str, Any]) -> Finding:
    age, checked = settings["CONN_MAX_AGE"], settings["CONN_HEALTH_CHECKS"]
    if age == 0:
        return Finding("conn_max_age", "ok", "CONN_MAX_AGE is 0: a connection ends with its request.")
    found = "without an end" if age is None else f"for {age} seconds"
    if checked:
        return Finding("conn_max_age", "ok", f"Connections are kept {found}, and looked at before they are used again.")
    return Finding(
        "conn_max_age",
        "note",
        f"Connections are kept {found}, without CONN_HEALTH_CHECKS.",
        "After a restart or a failover of the server, the first lock on each old connection fails with"
        " OperationalError.",
        "Set CONN_HEALTH_CHECKS to True. A connection that holds a session lock is kept in any case.",
    )


def _probe_autocommit(settings: dict[str, Any]) -> Finding:
    if settings["AUTOCOMMIT"]:
        return Finding("autocommit", "ok", "AUTOCOMMIT is on.")
    return Finding(
        "autocommit",
        "warning",
        "AUTOCOMMIT is off.",
        "Every statement begins a transaction, so each lock lasts until the COMMIT or ROLLBACK that somebody sends, not"
        " until its block ends.",
        'Leave AUTOCOMMIT on and use atomic(); or say scope="session", or dedicated=True, where locks are to end with'
        " their block.",
    )


def aliases_with_other_atomic_requests(alias: str) -> list[str]:
    """Return the other aliases whose ATOMIC_REQUESTS make a lock without a scope impossible in views."""
    if connections[alias].settings_dict["ATOMIC_REQUESTS"]:
        return []
    return sorted(other for other in connections if connections[other].settings_dict["ATOMIC_REQUESTS"])


def _probe_atomic_requests(alias: str) -> Finding:
    others = aliases_with_other_atomic_requests(alias)
    if others:
        return Finding(
            "atomic_requests",
            "warning",
            f"ATOMIC_REQUESTS is on for {', '.join(map(repr, others))}, and not for {alias!r}.",
            "In a view a lock there would be freed before the request commits: it raises TransactionManagementError.",
            f'In views name {others[0]!r} in using=, or say scope="session".',
        )
    if connections[alias].settings_dict["ATOMIC_REQUESTS"]:
        return Finding(
            "atomic_requests",
            "note",
            "ATOMIC_REQUESTS is on.",
            "A lock that is taken in a view lasts until the request commits, not until its block ends.",
            "Where a view does slow work after the block, mark it with non_atomic_requests.",
        )
    return Finding("atomic_requests", "ok", "ATOMIC_REQUESTS is off.")


def _probe_hosts(settings: dict[str, Any]) -> Finding:
    options = settings["OPTIONS"]
    hosts = settings["HOST"] or options.get("host") or ""
    if "," not in hosts:
        return Finding("hosts", "ok", "The alias names no more than one host.")
    if options.get("target_session_attrs") in ("read-write", "primary"):
        return Finding("hosts", "ok", "Of several hosts, the primary is meant.")
    return Finding(
        "hosts",
        "warning",
        f"There are several hosts ({hosts}), and nothing says that the primary is meant.",
        "A connection may lead to a standby, where a lock excludes nobody on the primary.",
        'Set OPTIONS = {"target_session_attrs": "read-write"}.',
    )
