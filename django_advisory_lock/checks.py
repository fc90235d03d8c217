"""System checks. Their ids stay for good, and each has a place in the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.checks import Warning as CheckWarning
from django.db import ProgrammingError, connections, transaction
from psycopg.errors import UndefinedColumn, UndefinedTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.core.checks import CheckMessage


def check_periodic_runs(*, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Warn of periodic work that has not succeeded for three of its intervals."""
    return [warning for alias in databases or () for warning in _silent(alias)]


def _silent(alias: str) -> list[CheckMessage]:
    from .models import PeriodicRun  # noqa: PLC0415 - not before the apps are loaded

    if connections[alias].vendor != "postgresql":
        return []
    try:
        with transaction.atomic(using=alias):
            runs = list(PeriodicRun.objects.using(alias).silent())
    except ProgrammingError as error:
        if isinstance(error.__cause__, (UndefinedTable, UndefinedColumn)):  # `migrate` checks before it migrates
            return []
        raise
    return [
        CheckWarning(
            f"The periodic work {run.name!r} on {alias!r} has not succeeded for three of its intervals"
            f" ({run.min_interval}). Last success: {run.last_succeeded_at or 'never'}; outcome of the last run:"
            f" {run.last_outcome}.",
            hint="See whether its scheduler runs, and what its last error says. Delete rows of work that is no more.",
            obj=run,
            id="django_advisory_lock.W001",
        )
        for run in runs
    ]
