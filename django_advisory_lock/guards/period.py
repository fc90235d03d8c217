"""At most one start of a piece of work in each interval, by the database's clock: what `models.PeriodicRun` is for."""

from __future__ import annotations

import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, ProgrammingError
from psycopg.errors import UndefinedTable

from .. import sessions, transactions
from ..notices import logger
from ..options import seconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from ..keys import LockKey
    from ..models import PeriodicRun, PeriodicRunQuerySet

R = TypeVar("R")
LONGEST_ERROR = 10_000  # characters of it that are kept


def read_interval(min_interval: float | timedelta) -> timedelta:
    """Check the shortest time between two starts, in seconds or as a timedelta."""
    interval = seconds(min_interval, "min_interval")
    if not interval:
        raise ValueError("min_interval is more than 0: the seconds, or the timedelta, between two starts.")
    return timedelta(seconds=interval)


class Period:
    """One attempt to run a piece of work whose starts keep an interval: look, take the lock, start, work, finish.

    The first look sends away what comes too soon, without the lock. What holds is `start()`, inside the lock: whoever
    was slower finds out there.
    """

    def __init__(self, name: str, interval: timedelta, key: LockKey, using: str) -> None:
        self.name = name
        self.interval = interval
        self.key = ",".join(map(str, key.args))
        self.using = using
        self.run: PeriodicRun | None = None
        self.number: int | None = None

    def look(self) -> str | None:
        """Return why the work is not to begin now, or None. Sends one statement."""
        if transactions.in_transaction(sessions.connection_for(self.using)):
            raise RuntimeError(
                f"The start of {self.name!r} would not be committed, and not be seen, before the transaction on"
                f" {self.using!r} is: run periodic work outside of atomic()."
            )
        self.run = self._ask(lambda runs: runs.with_age().filter(key=self.key).first())
        age = self._age
        return None if age is None or age >= self.interval.total_seconds() else self.too_soon()

    def too_soon(self) -> str:
        """Say how long the work has to wait yet, as far as the last look told."""
        if self._age is None:
            return "too soon: somebody else was faster"
        left = self.interval - timedelta(seconds=self._age)
        return f"too soon: started {short(self._age)} ago by {self._who}, and may start again in {short(left)}"

    def elsewhere(self) -> str:
        """Say who is at it, as far as the last look told."""
        run = self.run
        if run is None or not run.is_started or self._age is None:
            return "running elsewhere: holder unknown"
        return f"running elsewhere: by {self._who}, for {short(self._age)}"

    def start(self) -> bool:
        """Note the start, unless somebody else was faster; tell whether it may go on. Sends one statement."""
        self.number = self._ask(lambda runs: runs.start(self.key, self.name, self.interval))
        return self.number is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        number = self.number
        if number is not None:
            try:
                self._ask(lambda runs: runs.finish(self.key, number, None if exc is None else describe(exc)))
            except (Error, ImproperlyConfigured) as error:
                logger.error("The end of %r could not be noted: %s", self.name, error)

    @property
    def _age(self) -> float | None:
        return getattr(self.run, "age", None)

    @property
    def _who(self) -> str:
        return "somebody" if self.run is None else f"{self.run.last_host}, pid {self.run.last_pid}"

    def _ask(self, question: Callable[[PeriodicRunQuerySet], R]) -> R:
        if not apps.is_installed("django_advisory_lock"):
            raise ImproperlyConfigured(
                "Periodic work is noted in a table: add 'django_advisory_lock' to INSTALLED_APPS, and run"
                " `manage.py migrate`."
            )
        # Not imported, for the package is there before the apps are loaded.
        model = apps.get_model("django_advisory_lock", "PeriodicRun")
        try:
            return question(model.objects.using(self.using))
        except ProgrammingError as error:
            if not isinstance(error.__cause__, UndefinedTable):
                raise
            raise ImproperlyConfigured(
                f"Periodic work is noted in a table that {self.using!r} does not have: run"
                f" `manage.py migrate django_advisory_lock --database {self.using}`."
            ) from error


def describe(error: BaseException) -> str:
    """Return the text of an error as PostgreSQL takes it."""
    text = (
        "".join(traceback.format_exception_only(type(error), error)).strip().replace("\0", "\N{REPLACEMENT CHARACTER}")
    )
    return text.encode(errors="replace").decode()[:LONGEST_ERROR]


def short(length: float | timedelta) -> str:
    """Return a length of time for people."""
    number = length.total_seconds() if isinstance(length, timedelta) else length
    return f"{number:.1f} s" if number < 60 else str(timedelta(seconds=round(number)))
