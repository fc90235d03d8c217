"""At most one start of a piece of work in each interval, by the database's clock: what `models.PeriodicRun` is for."""

from __future__ import annotations

import contextlib
import os
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakSet

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, ProgrammingError, connections, transaction
from django.db.transaction import TransactionManagementError
from psycopg.errors import UndefinedTable

from .. import hops, known, sessions, transactions
from ..exceptions import LockTimeout
from ..keys import LockKey, lock_key
from ..notices import logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from ..handles import LockHandle
    from ..holds import Hold
    from ..models import PeriodicRun, PeriodicRunQuerySet

R = TypeVar("R")
SHORTEST, LONGEST = timedelta(microseconds=1), timedelta(days=36500)
LONGEST_ERROR = 10_000  # characters of it that are kept


def read_interval(min_interval: float | timedelta) -> timedelta:
    """Check the shortest time between two starts, in seconds or as a timedelta."""
    number = min_interval.total_seconds() if isinstance(min_interval, timedelta) else min_interval
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"min_interval is a number of seconds or a timedelta, not {type(min_interval).__name__}.")
    if not SHORTEST.total_seconds() <= number <= LONGEST.total_seconds():
        raise ValueError(
            f"min_interval is the time between two starts, in seconds or as a timedelta, from {SHORTEST} to"
            f" {LONGEST.days} days, not {min_interval!r}."
        )
    return timedelta(seconds=number)


class Period:
    """No interval between two starts: any may begin as soon as it has the lock."""

    reason = ""

    def look(self, handle: LockHandle) -> bool:
        """Whether it may begin, before the lock is taken: who comes too soon need not take it."""
        return True

    async def alook(self, make_handle: Callable[[], LockHandle]) -> bool:
        """See `look()`."""
        return True

    def require(self, handle: LockHandle) -> None:
        """Raise LockTimeout where a lock that is only tried for is busy."""

    def start(self) -> bool:
        """Whether it may begin, with the lock: who was slower than another one finds out here."""
        return True

    async def astart(self) -> bool:
        """See `start()`."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Called when the lock is free again, or lost."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See `__exit__()`."""


NO_PERIOD = Period()
_running: WeakSet[Hold] = WeakSet()  # the locks of runs


class NotedPeriod(Period):
    """An interval that one run has to keep, and what is noted of it in the table."""

    handle: LockHandle
    using = ""
    key = ""
    run: PeriodicRun | None = None
    number: int | None = None
    process: int | None = None  # a child that the body forks, and that leaves it, ends nothing

    def __init__(self, interval: timedelta, name: str = "", *, is_ignored: bool = False) -> None:
        self.interval = interval
        self.required = timedelta.min if is_ignored else interval
        self.name = name

    def look(self, handle: LockHandle) -> bool:
        self.handle = handle
        self.using = handle.using
        self.key = ",".join(map(str, handle.key.args))
        self.name = (self.name or handle.key.name).replace("\0", "\N{REPLACEMENT CHARACTER}")
        connection = sessions.connection_for(self.using)
        connection.ensure_connection()  # with AUTOCOMMIT switched off the first statement would begin a transaction
        if transactions.in_transaction(connection):
            raise RuntimeError(
                f"The start of {self.name!r} would not be seen before the transaction on {self.using!r} is committed:"
                f" run periodic work outside of atomic()."
            )
        self.run = self._ask(lambda runs: runs.with_age().filter(key=self.key).first())
        age = self._age
        if age is None or age >= self.required.total_seconds():
            return True
        left = self.required - timedelta(seconds=age)
        when = f"{short(age)} ago" if age >= 0 else f"{short(-age)} ahead of the database's clock"
        self.reason = f"too soon: started {when} by {self._who}, may start again in {short(left)}"
        return False

    async def alook(self, make_handle: Callable[[], LockHandle]) -> bool:
        return await hops.attempt(lambda: self.look(make_handle()))

    def require(self, handle: LockHandle) -> None:
        is_known = self.run is not None and self.run.is_started and self._age is not None
        ago = short(max(self._age or 0, 0))
        # A run that was killed leaves such a row too, and the lock to somebody else.
        who = f"last started by {self._who}, {ago} ago" if is_known else "holder unknown"
        message = f"The lock {handle.key.name!r} on {self.using!r} was not acquired: running elsewhere, {who}."
        raise LockTimeout(message, key=handle.key, using=self.using, waited=handle.waited)

    def start(self) -> bool:
        if self._is_inner():
            self.reason = "running already: this call comes from within the run"
            return False
        self.process = os.getpid()
        self.number = self._ask(lambda runs: runs.start(self.key, self.name, self.interval, required=self.required))
        self.reason = "too soon: another one was faster"
        if self.number is None:
            return False
        _running.add(self._hold)
        return True

    async def astart(self) -> bool:
        return await hops.finish(self.start)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.number is not None and self.process == os.getpid():
            try:
                self._finish(self.number, None if exc is None else describe(exc))
            except (Error, ImproperlyConfigured) as error:
                logger.error("The end of %r could not be noted: %s", self.name, error)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A coroutine that is closed can wait for nothing: its run stays noted as started.
        if hops.can_wait() and not isinstance(exc, GeneratorExit):
            await hops.finish(lambda: self.__exit__(exc_type, exc, traceback))

    def _finish(self, number: int, error: str | None) -> None:
        if transactions.in_transaction(sessions.connection_for(self.using)):
            # The row would stay locked for as long as that goes on, and the next start wait for it.
            raise TransactionManagementError(f"the body has left a transaction open on {self.using!r}.")
        self._ask(lambda runs: runs.finish(self.key, number, error))

    @property
    def _hold(self) -> Hold:
        return cast("Hold", self.handle._hold)

    def _is_inner(self) -> bool:
        """Whether the lock, which its owner may nest in, is that of a run, and not a lock of the caller."""
        return any(hold in _running for hold in self._hold.session.on(self.handle.key))

    @property
    def _age(self) -> float | None:
        return getattr(self.run, "age", None)

    @property
    def _who(self) -> str:
        return "somebody" if self.run is None else f"{self.run.last_host}, process {self.run.last_pid}"

    def _ask(self, question: Callable[[PeriodicRunQuerySet], R]) -> R:
        if not apps.is_installed("django_advisory_lock"):
            raise ImproperlyConfigured(
                "Periodic work is noted in a table: add 'django_advisory_lock' to INSTALLED_APPS, and run"
                " `manage.py migrate`."
            )
        # Not imported, for the package is there before the apps are loaded.
        model = apps.get_model("django_advisory_lock", "PeriodicRun")
        try:
            # Inside the atomic() of a TestCase, which a missing table would break.
            in_test = connections[self.using].in_atomic_block
            with transaction.atomic(using=self.using) if in_test else contextlib.nullcontext():
                return question(model.objects.using(self.using))
        except Error as error:
            sessions.close_if_dead(connections[self.using])  # or the next call would meet the same dead session
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


@known.source
def _noted_runs(using: str | None) -> list[LockKey]:
    """Return the keys of the periodic work that is in the table, where there is one."""
    if using is None or not apps.is_installed("django_advisory_lock"):
        return []
    from ..models import PeriodicRun  # noqa: PLC0415 - not before the apps are loaded

    try:
        with transaction.atomic(using=using):
            rows = list(PeriodicRun.objects.using(using).values_list("key", "name"))
    except ProgrammingError:
        return []  # not there, or of another version, or not for this role
    return [key for key in map(_read_key, rows) if key is not None]


def _read_key(row: tuple[str, str]) -> LockKey | None:
    try:
        key = LockKey(tuple(map(int, row[0].split(","))), row[1])
    except (TypeError, ValueError):
        return None  # nothing that this library has written
    with contextlib.suppress(Exception):  # of a name that is none, or of a namespace that needs a tenant
        usual = lock_key("periodic", row[1])
        return usual if usual == key else key  # called as its code calls it, and as it is asked for
    return key


def short(length: float | timedelta) -> str:
    """Return a length of time for people."""
    number = length.total_seconds() if isinstance(length, timedelta) else length
    return f"{number:.1f} s" if number < 60 else str(timedelta(seconds=round(number)))
