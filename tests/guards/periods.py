"""What is noted of periodic work, and a clock that tests put forward."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import F

from django_advisory_lock import LockKey, lock_key
from django_advisory_lock.models import PeriodicRun

ALIASES = ("default", "other")


class Runs:
    """The rows of one test."""

    def get(self, *key: Any, using: str = "default") -> PeriodicRun:
        row: PeriodicRun = PeriodicRun.objects.using(using).get(key=self._text(*key))
        return row

    def count(self, *key: Any, using: str = "default") -> int:
        """Return how often something was started."""
        row = PeriodicRun.objects.using(using).filter(key=self._text(*key)).first()
        return row.run_count if row else 0

    def outcome(self, *key: Any) -> str:
        return str(self.get(*key).last_outcome)

    def let_pass(self, seconds: float, *key: Any, using: str = "default") -> None:
        """Make the last start of something as much longer ago."""
        rows = PeriodicRun.objects.using(using).filter(key=self._text(*key))
        assert rows.update(last_started_at=F("last_started_at") - timedelta(seconds=seconds)) == 1

    def _text(self, *key: Any) -> str:
        found: LockKey = lock_key(*key)
        return ",".join(map(str, found.args))

    def forget(self) -> None:
        for alias in ALIASES:
            PeriodicRun.objects.using(alias).all().delete()
