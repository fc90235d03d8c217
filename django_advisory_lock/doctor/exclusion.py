"""Whether two sessions really exclude each other: tried with real locks on keys that nobody else has."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg.errors import LockNotAvailable

from .. import pg_locks, sql
from ..keys import LockKey
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .visits import Session

WAIT = 10  # milliseconds until a wait has to end without the lock


class Step(NamedTuple):
    """What one of two sessions does, and the answer that it has to get."""

    who: int
    action: str
    shared: bool = False
    answer: bool | None = True


SHARED = True

# An exclusive lock keeps both modes out, is seen, is waited for, and is gone after its unlock.
EXCLUSIVE_SESSION_LOCK = (
    Step(0, "try"),
    Step(0, "look"),
    Step(1, "try", answer=False),
    Step(1, "try", SHARED, answer=False),
    Step(1, "wait", answer=False),
    Step(0, "unlock"),
    Step(1, "look", answer=False),
    Step(1, "try"),
    Step(1, "unlock"),
)
SHARED_SESSION_LOCK = (
    Step(0, "try", SHARED),
    Step(1, "try", SHARED),
    Step(1, "unlock", SHARED),
    Step(1, "try", answer=False),
    Step(0, "unlock", SHARED),
    Step(1, "try"),
    Step(1, "unlock"),
)
TRANSACTION_LOCK = (
    Step(0, "begin", answer=None),
    Step(0, "try for a transaction"),
    Step(0, "look for a transaction"),
    Step(1, "try for a transaction", answer=False),
    Step(1, "wait for a transaction", answer=False),
    Step(0, "commit", answer=None),
    Step(1, "look for a transaction", answer=False),
    Step(1, "try for a transaction"),
)
SHARED_TRANSACTION_LOCK = (
    Step(0, "begin", answer=None),
    Step(0, "try for a transaction", SHARED),
    Step(1, "try for a transaction", SHARED),
    Step(1, "try for a transaction", answer=False),
    Step(0, "commit", answer=None),
    Step(1, "try for a transaction"),
)
# A session lock outlives a COMMIT. Not through a pooler, which may lend the session to another one there.
LASTING_SESSION_LOCK = (
    Step(0, "begin", answer=None),
    Step(0, "try"),
    Step(0, "commit", answer=None),
    Step(1, "try", answer=False),
    Step(0, "unlock"),
)
# Through a pooler: both stay in a transaction, and so on their server sessions.
BEGIN = (Step(0, "begin", answer=None), Step(1, "begin", answer=None))
COMMIT = (Step(0, "commit", answer=None), Step(1, "commit", answer=None))

QUICK = (Step(0, "try"), Step(1, "try", answer=False), Step(0, "unlock"))
QUICK_POOLED = (
    Step(0, "begin", answer=None),
    Step(0, "try for a transaction"),
    Step(1, "try for a transaction", answer=False),
    Step(0, "commit", answer=None),
)

FAULTS = {
    ("try", True): "a key that nobody holds was not given to the session that tried",
    ("try", False): "a key that one session holds was given to a second one",
    ("wait", False): "a session that had to wait for a key was given it while another one held it",
    ("unlock", True): "the unlock of a lock that was held freed nothing",
    ("look", True): "a lock that was given is not in pg_locks",
    ("look", False): "a lock that was freed is still in pg_locks",
}


class Fault(Exception):
    """The server did what no server with advisory locks does."""


def probe_exclusion(pair: tuple[Session, Session], *, session_locks: bool, is_pooled: bool) -> Finding:
    """Try all kinds of locks between two sessions. What is left of them is freed when the sessions are closed."""
    try:
        for key in (LockKey((secrets.randbits(62),)), LockKey.pair(secrets.randbits(31), secrets.randbits(31))):
            _run(pair, key, (*TRANSACTION_LOCK, *SHARED_TRANSACTION_LOCK))
            if session_locks:
                script = (*EXCLUSIVE_SESSION_LOCK, *SHARED_SESSION_LOCK)
                _run(pair, key, (*BEGIN, *script, *COMMIT) if is_pooled else (*script, *LASTING_SESSION_LOCK))
    except Fault as fault:
        return _failed(fault)
    kinds = "session and transaction locks" if session_locks else "transaction locks"
    return Finding("exclusion", "ok", f"Two sessions exclude each other: {kinds}, exclusive and shared.")


def probe_exclusion_quickly(pair: tuple[Session, Session], *, is_pooled: bool) -> Finding:
    """Try one lock between two sessions, with three statements, or four."""
    try:
        _run(pair, LockKey((secrets.randbits(62),)), QUICK_POOLED if is_pooled else QUICK)
    except Fault as fault:
        return _failed(fault)
    return Finding("exclusion", "ok", "Two sessions exclude each other.")


def _failed(fault: Fault) -> Finding:
    return Finding(
        "exclusion",
        "error",
        f"Two sessions do not exclude each other: {fault}.",
        "Locks here keep nobody out: the server, or something in front of it, has the functions and does not lock.",
        "Let ADVISORY_LOCK_DATABASE name a database on a PostgreSQL server. Look for functions of the same names in the"
        " schemas of search_path before pg_catalog.",
    )


def _run(pair: tuple[Session, Session], key: LockKey, script: Iterable[Step]) -> None:
    for step in script:
        kind, _, for_transaction = step.action.partition(" for a ")
        answer = ACTIONS[kind](pair[step.who], key, step.shared, bool(for_transaction))
        if answer is not step.answer:
            # One that has ended meanwhile holds nothing: that raises the error of the connection, and is no fault.
            pair[1 - step.who].one("SELECT 1")
            mode = f"{'shared' if step.shared else 'exclusive'} {'transaction' if for_transaction else 'session'} lock"
            raise Fault(f"{FAULTS[kind, bool(step.answer)]} ({mode}, answer {answer!r})")


def _try(session: Session, key: LockKey, shared: bool, for_transaction: bool) -> Any:
    return session.one(sql.try_lock(key.args, shared, for_transaction, False, None))


def _wait(session: Session, key: LockKey, shared: bool, for_transaction: bool) -> Any:
    statement = sql.wait_lock_for(key.args, shared, for_transaction, False, None)
    try:
        with session.raw.transaction():
            session.rows(statement, (str(WAIT),))
    except LockNotAvailable:
        return False
    return True


def _unlock(session: Session, key: LockKey, shared: bool, for_transaction: bool) -> Any:
    return session.one(sql.unlock(key.args, shared, None))


def _look(session: Session, key: LockKey, shared: bool, for_transaction: bool) -> bool:
    return bool(session.rows(pg_locks.KEY_LOCKS, pg_locks.arrays([key])))


ACTIONS: dict[str, Callable[[Session, LockKey, bool, bool], Any]] = {
    "begin": lambda session, *_: session.one("BEGIN"),
    "commit": lambda session, *_: session.one("COMMIT"),
    "try": _try,
    "wait": _wait,
    "unlock": _unlock,
    "look": _look,
}
