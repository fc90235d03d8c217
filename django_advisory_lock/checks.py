"""System checks. Their ids stay for good, and each has a place in docs/checks.md."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.checks import Error as CheckError
from django.core.checks import Warning as CheckWarning
from django.core.exceptions import ImproperlyConfigured
from django.db import ProgrammingError, connections, transaction
from psycopg.errors import UndefinedColumn, UndefinedTable

from . import conf, doctor, sessions
from .doctor.project import aliases_with_other_atomic_requests
from .exceptions import LockUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from django.core.checks import CheckMessage

SETTINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "ADVISORY_LOCK_DATABASE": ("E001", conf.get_database),
    "ADVISORY_LOCK_NAMESPACE": ("E004", conf.namespace_source),
    "ADVISORY_LOCK_SESSION_POOLER": ("E005", conf.session_pooler_aliases),
    "ADVISORY_LOCK_SLOW_WAIT": ("E006", conf.get_slow_wait),
}
# What the doctor finds at a glance, and what the system check calls it.
FINDINGS: dict[doctor.FindingId, str] = {
    "exclusion": "W006",
    "standby": "W007",
    "pooler": "W008",
    "server": "W009",
    "lock_table": "W010",
    "connections": "W011",
    "idle_session_timeout": "W012",
}


def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """Look at the settings of this library, without a connection."""
    wrong = dict(_wrong_settings())
    messages: list[CheckMessage] = [*wrong.values(), *_misspelt_settings()]
    if "ADVISORY_LOCK_DATABASE" not in wrong:
        messages += _check_alias(conf.get_database())
    if "ADVISORY_LOCK_SESSION_POOLER" not in wrong:
        messages += _check_session_poolers()
    return messages


def _wrong_settings() -> Iterator[tuple[str, CheckMessage]]:
    for name, (number, read) in SETTINGS.items():
        text = _complaint(read)
        if text:
            yield name, CheckError(text, **_names(number, "Correct the setting, or take it out."))


def _complaint(read: Callable[[], Any]) -> str:
    try:
        read()
    except ImproperlyConfigured as error:
        return str(error)
    return ""


def _misspelt_settings() -> Iterator[CheckMessage]:
    for name in dir(settings):
        if name.startswith("ADVISORY_LOCK") and name not in SETTINGS:
            for meant in get_close_matches(name, SETTINGS, n=1, cutoff=0.85):
                yield CheckWarning(
                    f"{name} is no setting of django_advisory_lock, so it does nothing.",
                    **_names("W005", f"Write {meant}, if that is meant."),
                )


def _check_alias(alias: str) -> Iterator[CheckMessage]:
    """Look at the alias that locks live on."""
    is_chosen = hasattr(settings, "ADVISORY_LOCK_DATABASE")
    if alias not in connections:
        known = ", ".join(sorted(connections))
        text = f"ADVISORY_LOCK_DATABASE is {alias!r}, which DATABASES does not have."
        yield CheckError(text, **_names("E001", f"Name one of its aliases: {known}."))
        return
    try:
        sessions.connection_for(alias)
    except LockUnsupported as error:
        if connections[alias].vendor == "postgresql":
            yield CheckError(str(error), **_names("E003", "Use a backend that connects through psycopg 3."))
        elif is_chosen:
            yield CheckError(str(error), **_names("E002", "Name an alias of a PostgreSQL server."))
        else:
            hint = "Let ADVISORY_LOCK_DATABASE name an alias of a PostgreSQL server, or always name one in using=."
            yield CheckWarning(str(error), **_names("W002", hint))
        return
    for other in aliases_with_other_atomic_requests(alias):
        yield CheckWarning(
            f"ATOMIC_REQUESTS is on for {other!r}, and locks live on {alias!r}. In a view a lock without a scope raises"
            " TransactionManagementError, for it would be freed before the request commits.",
            **_names("W004", f'In views name {other!r} in using=, or say scope="session".'),
        )


def _check_session_poolers() -> Iterator[CheckMessage]:
    for alias in sorted(conf.session_pooler_aliases() - set(connections)):
        yield CheckWarning(
            f"ADVISORY_LOCK_SESSION_POOLER names {alias!r}, which DATABASES does not have.",
            **_names("W003", f"Name aliases of DATABASES: {', '.join(sorted(connections))}."),
        )


def check_database(*, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask the database that locks live on, if it is among these, what the doctor sees at a glance."""
    try:
        alias = conf.get_database()
        findings = doctor.diagnose_quickly(alias) if alias in (databases or ()) and alias in connections else []
    except ImproperlyConfigured:  # said by check_settings()
        return []
    return [
        CheckWarning(
            f"Advisory locks on {alias!r}: {finding.found} {finding.meaning}",
            **_names(FINDINGS[finding.id], finding.advice),
        )
        for finding in findings
    ]


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
    hint = "See whether its scheduler runs, and what its last error says. Delete rows of work that is no more."
    return [
        CheckWarning(
            f"The periodic work {run.name!r} on {alias!r} has not succeeded for three of its intervals"
            f" ({run.min_interval}). Last success: {run.last_succeeded_at or 'never'}; outcome of the last run:"
            f" {run.last_outcome}.",
            obj=run,
            **_names("W001", hint),
        )
        for run in runs
    ]


def _names(number: str, hint: str) -> dict[str, Any]:
    """Return what every message has: its id, and a hint that leads to its place in the documentation."""
    return {"id": f"django_advisory_lock.{number}", "hint": f"{hint} See docs/checks.md#{number.lower()}."}
