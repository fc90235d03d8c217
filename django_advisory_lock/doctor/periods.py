"""Whether periodic work has fallen silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.apps import apps
from psycopg.errors import UndefinedColumn, UndefinedTable

from .findings import Finding

if TYPE_CHECKING:
    from .visits import Session

SHOWN = 10


def probe_periodic(session: Session, alias: str) -> Finding | None:
    """Ask for periodic work that has not succeeded for three of its intervals."""
    if not apps.is_installed("django_advisory_lock"):
        return None
    from ..models import PeriodicRun  # noqa: PLC0415 - only where the app is installed

    silent = PeriodicRun.objects.using(alias).silent().values_list("name")
    try:
        # Not sql_with_params(), which speaks the language of the alias "default".
        names = [name for (name,) in session.rows(*silent.query.get_compiler(alias).as_sql())]
    except (UndefinedTable, UndefinedColumn):
        return Finding(
            "periodic",
            "note",
            "The table of periodic work is not there, or not up to date.",
            "Work with an interval, of periodic_lock and lock_min_interval, fails here.",
            "Run manage.py migrate, unless such work is on another database.",
        )
    if not names:
        return Finding("periodic", "ok", "No periodic work is silent.")
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return Finding(
        "periodic",
        "warning",
        f"Periodic work has not succeeded for three of its intervals: {', '.join(map(repr, names[:SHOWN]))}{more}.",
        "It fails each time, or nobody starts it, or a holder of its lock stands still.",
        "See the list of periodic runs in the admin, and whether the scheduler runs. Delete rows of work that is gone.",
    )
