"""What the demo asks of the server."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from django.db import connection, transaction

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from django.db.models import Model

# So begin the names of the demo's processes in the server's lists.
NAME_PREFIX = "shop-demo "

# The advisory locks in this database, but for those of the session that asks.
ADVISORY_LOCKS = """\
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

# The accounts that two runs were at, at the same time. A run that never finished has no end.
DOUBLED_ACCOUNTS = """\
SELECT count(DISTINCT a.subject) FROM shop_run a JOIN shop_run b ON a.subject = b.subject AND a.id < b.id
WHERE a.task = 'sync_accounts' AND b.task = 'sync_accounts' AND a.id > %s
AND tstzrange(a.started_at, a.finished_at) && tstzrange(b.started_at, b.finished_at)"""


def ask(statement: str, *params: object) -> Any:
    """Return the first column of the first row."""
    with connection.cursor() as cursor:
        cursor.execute(statement, params)
        row = cursor.fetchone()
    return row and row[0]


def now() -> datetime:
    moment: datetime = ask("SELECT clock_timestamp()")
    return moment


@contextlib.contextmanager
def held_back(model: type[Model]) -> Iterator[None]:
    """Let nobody write to a table until the block ends, so that everybody who is going to write can be waited for."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {connection.ops.quote_name(model._meta.db_table)} IN EXCLUSIVE MODE")
        yield


def kept_waiting(model: type[Model]) -> int:
    """Return how many sessions wait to write to a table that is held back."""
    table = model._meta.db_table
    return int(
        ask("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = CAST(CAST(%s AS text) AS regclass)", table)
    )


def state_of(name: str) -> str | None:
    """Return the state of the session of a process; None where it has none."""
    state: str | None = ask("SELECT state FROM pg_stat_activity WHERE application_name = %s", NAME_PREFIX + name)
    return state


def has_tried(name: str) -> bool:
    """Tell whether the last thing that the session of a process did was to try for a lock, in vain."""
    return bool(
        ask(
            "SELECT true FROM pg_stat_activity a"
            " WHERE application_name = %s AND state = 'idle' AND query LIKE '%%pg_try_advisory_lock%%'"
            " AND NOT EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'advisory')",
            NAME_PREFIX + name,
        )
    )


def advisory_locks() -> int:
    """Return how many advisory locks there are in this database; the demo's own does not count."""
    return int(ask(ADVISORY_LOCKS))


def end_leftovers() -> int:
    """End the sessions that a demo which was killed has left behind, and return how many there were."""
    return int(
        ask(
            "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND usename = current_user AND starts_with(application_name, %s)",
            NAME_PREFIX,
        )
    )


def doubled_accounts(since: int) -> int:
    """Return how many accounts were in two hands at a time, by the log from one row on."""
    return int(ask(DOUBLED_ACCOUNTS, since))
