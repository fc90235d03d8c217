"""The one table of this app: when periodic work was last started, and how that went. No row is ever a lock.

`HeldLock` has no table: it gives the admin's page of locks a place, permissions, and entries in the admin's log.
"""

from __future__ import annotations

import os
import socket
from datetime import datetime, timedelta
from datetime import timezone as fixed
from typing import TYPE_CHECKING, Any

from django.db import connections, models
from django.db.models import F, Func, Q
from django.db.models.functions import Abs, Now
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    from typing_extensions import Self

UTC = fixed.utc
SILENT_AFTER = 3  # intervals without a success


def _seconds(duration: Any) -> Func:
    """Return a length of time in seconds. A day has 24 hours, also where the clocks are put forward or back."""
    return Func(duration, function="EXTRACT", template="EXTRACT(EPOCH FROM %(expressions)s)", output_field=FLOAT)


FLOAT: models.FloatField[float, float] = models.FloatField()


class PeriodicRunQuerySet(models.QuerySet["PeriodicRun"]):
    def with_age(self) -> Self:
        """Add `age`, the seconds since the last start by the database's clock."""
        runs: Self = self.annotate(age=_seconds(Now() - F("last_started_at")))
        return runs

    def silent(self) -> Self:
        """Return what has not succeeded for three of its intervals."""
        limit = SILENT_AFTER * _seconds(F("min_interval"))
        # Abs, for what lies in the future was noted before the clock was set back, and nothing starts until then.
        success = Abs(_seconds(Now() - F("last_succeeded_at")))
        runs = self.annotate(limit=limit, start=Abs(_seconds(Now() - F("last_started_at"))), success=success)
        never = Q(last_succeeded_at=None) & (Q(start__gt=F("limit")) | Q(run_count__gt=SILENT_AFTER))
        silent: Self = runs.filter(never | Q(success__gt=F("limit")))
        return silent

    def start(self, key: str, name: str, interval: timedelta, *, required: timedelta) -> int | None:
        """Note a start, unless the last one is not as long ago as required; return the number of the run, or None."""
        host = socket.gethostname()[:255]
        with connections[self.db].cursor() as cursor:
            cursor.execute(START, [key, name, host, os.getpid(), interval, required.total_seconds()])
            row = cursor.fetchone()
        number: int | None = row and row[0]
        return number

    def finish(self, key: str, number: int, error: str | None) -> None:
        """Note the end of a run, unless the next one has started meanwhile."""
        outcome = PeriodicRun.Outcome.SUCCEEDED if error is None else PeriodicRun.Outcome.FAILED
        values: dict[str, Any] = {"last_finished_at": Now(), "last_outcome": outcome, "last_error": error or ""}
        if error is None:
            values["last_succeeded_at"] = Now()
        self.filter(key=key, run_count=number).update(**values)


# One statement, so that of two that start at once, whatever lock they hold, one is too late. The clock is read once the
# row is locked: a statement that had to wait for it starts later than it was sent.
START = """
INSERT INTO django_advisory_lock_periodicrun AS run
    (key, name, last_started_at, last_outcome, last_error, last_host, last_pid, min_interval, run_count)
VALUES (%s, %s, clock_timestamp(), 'started', '', %s, %s, %s, 1)
ON CONFLICT (key) DO UPDATE SET
    name = EXCLUDED.name, last_started_at = clock_timestamp(), last_outcome = EXCLUDED.last_outcome,
    last_error = '', last_host = EXCLUDED.last_host, last_pid = EXCLUDED.last_pid,
    min_interval = EXCLUDED.min_interval, run_count = run.run_count + 1
WHERE run.last_started_at IS NULL
   OR EXTRACT(EPOCH FROM clock_timestamp() - run.last_started_at) >= %s
RETURNING run_count
"""


class PeriodicRun(models.Model):
    """What is known of one piece of periodic work: one row for each key."""

    class Outcome(models.TextChoices):
        STARTED = "started", _("started, not finished")
        SUCCEEDED = "succeeded", _("succeeded")
        FAILED = "failed", _("failed")

    key = models.CharField(_("key"), max_length=50, unique=True, editable=False)
    name = models.TextField(_("name"))
    last_started_at = models.DateTimeField(_("last started at"), null=True, blank=True)
    last_finished_at = models.DateTimeField(_("last finished at"), null=True, blank=True)
    last_succeeded_at = models.DateTimeField(_("last succeeded at"), null=True, blank=True)
    last_outcome = models.CharField(_("last outcome"), max_length=20, choices=Outcome, blank=True)
    last_error = models.TextField(_("last error"), blank=True)
    last_host = models.CharField(_("last host"), max_length=255, blank=True)
    last_pid = models.PositiveIntegerField(_("last pid"), null=True, blank=True)
    min_interval = models.DurationField(_("minimum interval"))
    run_count = models.PositiveBigIntegerField(_("number of runs"), default=0)

    objects = PeriodicRunQuerySet.as_manager()

    class Meta:
        ordering = ("name",)
        verbose_name = _("periodic run")
        verbose_name_plural = _("periodic runs")

    def __str__(self) -> str:
        return self.name

    @property
    def is_started(self) -> bool:
        """Whether the last run has not finished: it still runs, or was killed. The lock tells which."""
        return self.last_outcome == str(PeriodicRun.Outcome.STARTED)

    @property
    def duration(self) -> timedelta | None:
        """How long the last run took, or None where it has not finished, or was not begun."""
        if self.last_started_at is None or self.last_finished_at is None:
            return None
        length = _in_utc(self.last_finished_at) - _in_utc(self.last_started_at)
        return length if length >= timedelta(0) else None


class NothingManager(models.Manager["HeldLock"]):
    """Finds nothing, and asks no table, which is not there: `dumpdata` asks every model."""

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        nothing: models.QuerySet[HeldLock] = super().get_queryset().none()
        return nothing


class HeldLock(models.Model):
    """A database session with advisory locks, as the admin's log names it. What is held is in `inspection`."""

    pid = models.IntegerField(_("process"), primary_key=True)
    session = models.TextField(_("session"), blank=True)

    objects = NothingManager()

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = (("end_session", "Can end a session that holds or waits for an advisory lock"),)
        verbose_name = _("advisory lock")
        verbose_name_plural = _("advisory locks")

    def __str__(self) -> str:
        return self.session


def _in_utc(moment: datetime) -> datetime:
    """Return a moment in UTC: two in one time zone, or in none, are an hour off where the clocks changed in between."""
    aware = timezone.make_aware(moment, timezone.get_default_timezone()) if timezone.is_naive(moment) else moment
    return aware.astimezone(UTC)
