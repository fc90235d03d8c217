"""The troubles that a lock may meet: one function each, which returns None for a library that has no such lock.

Most try and do not wait, since who waits for a lock that was stranded waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Callable

from asgiref.sync import sync_to_async
from django.db import DatabaseError, close_old_connections, connections

from .peers import Form, Peer
from .witness import PAUSE, Observer, Outcome, Witness, crowd, noting_warnings, take_note

TABLE = "benchmark_counter"
Situation = Callable[[Peer, int, int, Observer], "Outcome | None"]


def bounced(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """Behind PgBouncer in transaction mode; the body sends a statement."""

    def turn(witness: Witness) -> None:
        assert peer.attempt is not None
        with peer.attempt(key, "bounced") as acquired:
            if acquired:
                with witness.body():
                    peer.execute("bounced", "SELECT pg_sleep(%s)", [PAUSE])

    return crowd(6, rounds, turn, observer)


def bounced_transaction(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """The same with a lock that lasts until COMMIT."""
    form = peer.transaction
    if form is None:
        return None

    def turn(witness: Witness) -> None:
        with form(key, "bounced"), witness.body():
            peer.execute("bounced", "SELECT pg_sleep(%s)", [PAUSE])

    return crowd(6, rounds, turn, observer)


def pooled(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """On a pool of three connections; a body calls what Django calls after each request."""

    def turn(witness: Witness) -> None:
        assert peer.attempt is not None
        try:
            with peer.attempt(key, "pooled") as acquired:
                if acquired:
                    with witness.body():
                        close_old_connections()
                        time.sleep(PAUSE)
        finally:
            close_old_connections()

    return crowd(6, rounds, turn, observer)


def housekeeping(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """Without a pool; a body calls what Django calls after each request."""
    if not peer.uses_django:
        return None

    def turn(witness: Witness) -> None:
        assert peer.attempt is not None
        with peer.attempt(key, "default") as acquired:
            if acquired:
                with witness.body():
                    close_old_connections()
                    time.sleep(PAUSE)

    return crowd(6, rounds, turn, observer)


def shared_function(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """Eight threads call one decorated function."""
    current: list[Witness] = []

    def work() -> None:
        with current[0].body():
            time.sleep(PAUSE)

    assert peer.decorate is not None
    locked = peer.decorate(key, "default", work)

    def turn(witness: Witness) -> None:
        current[:1] = [witness]
        locked()

    return crowd(8, rounds, turn, observer)


def tasks(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """Eight asyncio tasks in one process."""
    form = peer.aattempt
    if form is None:
        return None
    witness, outcome = Witness(), Outcome()

    async def turn() -> None:
        async with form(key) as acquired:
            if acquired:
                with witness.body():
                    await asyncio.sleep(PAUSE)

    async def task() -> None:
        for _ in range(rounds):
            try:
                await turn()
            except Exception as error:
                outcome.told[type(error).__name__] += 1
            await asyncio.sleep(PAUSE)

    async def all_tasks() -> None:
        await asyncio.gather(*(task() for _ in range(8)))
        outcome.leaked = observer.settled()
        await sync_to_async(connections.close_all)()

    with noting_warnings(outcome):
        asyncio.run(all_tasks())
    outcome.entered, outcome.overlaps = witness.entered, witness.overlaps
    return outcome


def short_timeouts(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """Eight threads wait two milliseconds each for what is held for one."""
    form = peer.timed
    if form is None:
        return None

    def turn(witness: Witness) -> None:
        with form(key, "default", 0.002) as acquired:
            if acquired:
                with witness.body():
                    time.sleep(PAUSE)

    # The shortest pause between two tries of sqlalchemy-dlock is a tenth of a second.
    return crowd(8, 3 * rounds if peer.uses_django else rounds // 3, turn, observer)


# -- Transactions -----------------------------------------------------------------------------------------------------


def increments(peer: Peer, form: Form, key: int, rounds: int, observer: Observer) -> Outcome:
    """Read a number and write it one higher: what is lost was written by two who were in one after the other."""
    observer.raw.execute(f"INSERT INTO {TABLE} VALUES (%s, 0)", [key])
    written: list[int] = []

    def turn(witness: Witness) -> None:
        value = 0
        with form(key, "default") as acquired:
            if acquired:
                with witness.body():
                    value = peer.execute("default", f"SELECT value FROM {TABLE} WHERE key = %s", [key])
                    peer.execute("default", f"UPDATE {TABLE} SET value = %s WHERE key = %s", [value + 1, key])
        if acquired:
            written.append(value + 1)

    outcome = crowd(6, rounds, turn, observer)
    row = observer.raw.execute(f"SELECT value FROM {TABLE} WHERE key = %s", [key]).fetchone()
    outcome.vanished = len(written) - int(row[0] if row else 0)
    return outcome


def inside_atomic(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """The library's usual lock inside a transaction that goes on after its block."""
    assert peer.attempt_in_atomic is not None
    return increments(peer, peer.attempt_in_atomic, key, rounds, observer)


def until_commit(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """Its lock that lasts until COMMIT."""
    return None if peer.transaction is None else increments(peer, peer.transaction, key, rounds, observer)


def failing_body(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """The usual lock inside a transaction, and a statement in its body that fails."""
    form = peer.attempt_in_atomic
    assert form is not None

    def turn(witness: Witness) -> None:
        with form(key, "default") as acquired:
            if acquired:
                with witness.body():
                    time.sleep(PAUSE)
                # From here on the server has rolled back, and freed what lasts until then.
                peer.execute("default", "SELECT 1 / 0")

    alchemy = (_alchemy_error(),) if not peer.uses_django else ()
    return crowd(4, rounds, turn, observer, expected=(DatabaseError, *alchemy))


def _alchemy_error() -> type:
    found: type = importlib.import_module("sqlalchemy.exc").DBAPIError
    return found


# -- Sessions that end ------------------------------------------------------------------------------------------------


def killed(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """The session is ended in the body, which does not notice."""
    return losing(peer, key, rounds, observer, observer.kill_holder)


def killed_and_replaced(peer: Peer, key: int, rounds: int, observer: Observer) -> Outcome | None:
    """The session is ended in the body, and Django opens another one before the block ends."""

    def lose() -> None:
        observer.kill_holder()
        with contextlib.suppress(DatabaseError):
            peer.execute("default", "SELECT 1")
        close_old_connections()
        peer.execute("default", "SELECT 1")

    return losing(peer, key, rounds, observer, lose) if peer.uses_django else None


def losing(peer: Peer, key: int, rounds: int, observer: Observer, lose: Callable[[], None]) -> Outcome:
    outcome, form = Outcome(), peer.attempt
    assert form is not None

    def turn() -> None:
        with form(key, "default") as acquired:
            if acquired:
                outcome.entered += 1
                lose()

    with noting_warnings(outcome):
        for _ in range(max(2, rounds // 6)):
            before, said = outcome.entered, outcome.told.total()
            take_note(outcome, turn)
            outcome.silent += outcome.entered > before and outcome.told.total() == said
            connections.close_all()
    outcome.leaked = observer.settled()
    return outcome


SITUATIONS: dict[str, Situation] = {
    "behind PgBouncer, transaction mode": bounced,
    "the same, a lock until COMMIT": bounced_transaction,
    "Django's pool, `close_old_connections()` in the body": pooled,
    "no pool, `close_old_connections()` in the body": housekeeping,
    "threads that share a decorated function": shared_function,
    "asyncio tasks of one process": tasks,
    "timeouts of 2 ms": short_timeouts,
    "inside `atomic()`, which goes on after the block": inside_atomic,
    "the same, a lock until COMMIT ": until_commit,
    "inside `atomic()`, the body fails": failing_body,
    "the session is killed in the body": killed,
    "the same, and Django connects anew": killed_and_replaced,
}
BOUNCED = (bounced, bounced_transaction)
