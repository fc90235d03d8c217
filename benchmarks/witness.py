"""Who is inside, seen without any database: what the stress is judged by."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from django.db import connections

from django_advisory_lock import LockKey, LockUnsupported
from tests.support import LIMIT, Thread, parameters

PAUSE = 0.001  # seconds that a body takes, and about what is slept between two tries
HOLDERS = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
 AND (classid::bigint, objid::bigint, objsubid) = (%s, %s, %s)"""


class Witness:
    """Counts who is inside, under a mutex of this process."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._inside = 0
        self.entered = 0
        self.overlaps = 0

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        with self._mutex:
            self.entered += 1
            self._inside += 1
            self.overlaps += self._inside > 1
        try:
            yield
        finally:
            with self._mutex:
                self._inside -= 1


@dataclass
class Outcome:
    """What came of one library in one situation."""

    entered: int = 0
    overlaps: int = 0
    leaked: int = 0  # locks that are there after all blocks have ended, while the sessions are open
    vanished: int = 0  # writes that another has overwritten
    silent: int = 0  # locks that were lost in the body, of which nothing was said
    told: Counter[str] = field(default_factory=Counter)  # what was raised or warned, by its name
    is_refused: bool = False

    @property
    def faults(self) -> int:
        return self.overlaps + self.leaked + self.vanished + self.silent

    def __str__(self) -> str:
        if self.is_refused and not self.entered:
            return "refused"
        named = {
            "two were in": self.overlaps,
            "stranded": self.leaked,
            "writes lost": self.vanished,
            "lost in silence": self.silent,
        }
        faults = [f"**{name}: {count}**" for name, count in named.items() if count]
        told = [f"{name}: {count}" for name, count in sorted(self.told.items())]
        return ", ".join([*faults, *told]) + f" (in {self.entered})" if faults or told else f"right (in {self.entered})"


class Observer:
    """A session that sees what is held, straight on the server."""

    def __init__(self, key: LockKey) -> None:
        self.key = key
        self.raw = psycopg.connect(**parameters(), autocommit=True)

    def holders(self) -> int:
        row = self.raw.execute(HOLDERS, self.key.pg_locks).fetchone()
        return int(row[0]) if row else 0

    def settled(self) -> int:
        """Return how many hold the key once what is just ending has ended."""
        end = time.monotonic() + 0.25
        while (number := self.holders()) and time.monotonic() < end:
            time.sleep(0.02)
        return number

    def kill_holder(self) -> None:
        self.raw.execute(HOLDERS.replace("count(*)", "pg_terminate_backend(pid, 5000)"), self.key.pg_locks).fetchall()


@contextlib.contextmanager
def observing(key: LockKey) -> Iterator[Observer]:
    observer = Observer(key)
    try:
        yield observer
    finally:
        observer.raw.close()


def crowd(
    threads: int, rounds: int, turn: Callable[[Witness], Any], observer: Observer, expected: tuple[type, ...] = ()
) -> Outcome:
    """Have threads take turns, and look what they have left behind while their sessions are still open."""
    witness, outcome = Witness(), Outcome()
    finished = threading.Barrier(threads + 1)

    def work() -> None:
        pause = random.Random(threading.get_ident()).uniform
        for _ in range(rounds):
            take_note(outcome, lambda: turn(witness), expected)
            time.sleep(pause(0, 2 * PAUSE))
        finished.wait(LIMIT)  # all have ended their blocks
        finished.wait(LIMIT)  # it was looked for what is left

    with noting_warnings(outcome):
        started = [Thread(work) for _ in range(threads)]
        finished.wait(LIMIT)
        outcome.leaked = observer.settled()
        finished.wait(LIMIT)
        for thread in started:
            thread.result()
    outcome.entered, outcome.overlaps = witness.entered, witness.overlaps
    return outcome


def take_note(outcome: Outcome, turn: Callable[[], Any], expected: tuple[type, ...] = ()) -> bool:
    """Take one turn, and note what it raised; tell whether it raised anything."""
    try:
        turn()
    except LockUnsupported:
        outcome.is_refused = True
    except Exception as error:
        if not isinstance(error, expected):
            outcome.told[type(error).__name__] += 1
    else:
        return False
    return True


@contextlib.contextmanager
def noting_warnings(outcome: Outcome) -> Iterator[None]:
    """Count the warnings of a block as something that was told; those of threads too."""

    def note(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        outcome.told[category.__name__] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # What sqlalchemy-dlock says at the end of each block of a transaction lock.
        warnings.filterwarnings("ignore", "PostgreSQL transaction level advisory locks")
        warnings.showwarning = note
        yield
        connections.close_all()
