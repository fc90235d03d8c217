"""The order of the examination, and what is said where a question cannot be asked."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psycopg
from django.db import NotSupportedError
from psycopg.errors import OutOfMemory

from . import exclusion, links, poolers, server, timeouts
from .findings import Finding
from .periods import probe_periodic
from .visits import ERRORS, first_session, second_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .findings import FindingId
    from .visits import Session


def examine(alias: str, is_named: bool) -> Iterator[Finding]:
    """Ask the database all there is to ask; `is_named`: `ADVISORY_LOCK_SESSION_POOLER` has the alias."""
    with contextlib.ExitStack() as stack:
        try:
            first = stack.enter_context(first_session(alias))
            is_pooled = poolers.is_pooled(first)
        except ERRORS as error:
            yield _unreachable(error)
            return
        yield Finding("connection", "ok", "The database answers.")
        yield from _ask_server(first, is_pooled)
        yield from _attempt("periodic", lambda: probe_periodic(first, alias))
        try:
            pair = first, stack.enter_context(second_session(alias))
            poolers.is_pooled(pair[1])  # an answer: a pooler may accept a client that it has no session for
        except ERRORS as error:
            yield _alone(error)
            yield _judge_pooler(alias, is_pooled, None, is_named)
            return
        yield Finding("second_session", "ok", "Two sessions can be open at once.")
        yield from _try_both(pair, alias, is_pooled, is_named)


def examine_quickly(alias: str, is_named: bool) -> Iterator[Finding]:
    """Ask the database what the system check reports. Raises one of `ERRORS` where it does not answer."""
    with first_session(alias) as first:
        is_pooled = poolers.is_pooled(first)
        if not (is_pooled and is_named):
            yield _judge_pooler(alias, is_pooled, None, is_named)
        answers = server.Server(first)
        yield server.probe_product(answers)
        yield server.probe_standby(answers)
        yield server.probe_lock_table(answers)
        yield server.probe_connections(answers)
        yield from timeouts.probe_timeouts(answers, (timeouts.IDLE_SESSION,))
        with second_session(alias) as second:
            if is_pooled and is_named:
                yield _judge_pooler(alias, is_pooled, poolers.find_mode((first, second)), is_named)
            yield exclusion.probe_exclusion_quickly((first, second), is_pooled=is_pooled)


def _ask_server(session: Session, is_pooled: bool) -> Iterator[Finding]:
    try:
        answers = server.Server(session)
    except OutOfMemory as error:
        yield Finding(
            "lock_table",
            "error",
            f"The lock table is full: {_first_line(error)}",
            "Taking a lock raises LockTableFull, and new connections of all users fail.",
            server.MORE_ROOM,
        )
    except psycopg.Error as error:
        yield Finding(
            "server",
            "warning",
            f"The server does not tell its state: {_first_line(error)}",
            "Its settings, its room and whether it is a standby are unknown.",
            "Keep locks on a PostgreSQL server, if this is none.",
        )
    else:
        yield server.probe_product(answers)
        yield server.probe_standby(answers)
        yield server.probe_lock_table(answers)
        yield server.probe_connections(answers)
        yield server.probe_isolation(answers)
        yield server.probe_role(answers)
        yield server.probe_application_name(answers)
        yield from timeouts.probe_timeouts(answers)
        if not is_pooled:  # the link is the pooler's then
            yield links.probe_keepalives(answers)
            yield links.probe_connection_check(answers)


def _try_both(pair: tuple[Session, Session], alias: str, is_pooled: bool, is_named: bool) -> Iterator[Finding]:
    mode = None
    if is_pooled:
        try:
            mode = poolers.find_mode(pair)
        except psycopg.Error as error:
            yield _untold("pooler", error)
            return
    yield _judge_pooler(alias, is_pooled, mode, is_named)
    if mode != "statement":
        # Through a pooler session locks are tried where the library takes them; elsewhere it refuses them.
        locks_sessions = not is_pooled or (is_named and mode is None)
        yield from _attempt(
            "exclusion", lambda: exclusion.probe_exclusion(pair, session_locks=locks_sessions, is_pooled=is_pooled)
        )


def _judge_pooler(alias: str, is_pooled: bool, mode: str | None, is_named: bool) -> Finding:
    return poolers.judge_pooler(alias, mode, is_named) if is_pooled else poolers.judge_direct(alias, is_named)


def _attempt(finding_id: FindingId, probe: Callable[[], Finding | None]) -> Iterator[Finding]:
    try:
        finding = probe()
    except psycopg.Error as error:
        finding = _untold(finding_id, error)
    if finding is not None:
        yield finding


def _untold(finding_id: FindingId, error: Exception) -> Finding:
    return Finding(
        finding_id,
        "warning",
        f"This could not be found out: {_first_line(error)}",
        "What was to be tried, and what it tells about locks, is in docs/doctor.md.",
        "See to the error, and ask again.",
    )


def _unreachable(error: Exception) -> Finding:
    if isinstance(error, NotSupportedError):
        return Finding(
            "server",
            "error",
            f"The server is too old: {_first_line(error)}",
            "Django does not use it, so no lock can be taken there.",
            "Upgrade the server.",
        )
    return Finding(
        "connection",
        "error",
        f"The database cannot be asked: {_first_line(error)}",
        "While that lasts, taking a lock there raises the database's own error.",
        "See whether the server runs, can be reached from here, and has connections left. Where it is out of shared"
        " memory its lock table is full: see the runbook.",
    )


def _alone(error: Exception) -> Finding:
    return Finding(
        "second_session",
        "warning",
        f"No second session could be opened: {_first_line(error)}",
        "So nobody tried whether two exclude each other. dedicated=True needs a session more, too.",
        "Let more connections be free, on the server or in its pooler, and ask again.",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
