"""One attempt to take a lock in a worker, what is done under it, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from typing_extensions import Self

from django_advisory_lock import LockHandle, LockLost, LockTimeout, PoolerDetected
from tests.soak.witness import Witness

CAN_TELL = sys.version_info >= (3, 11)  # errors have notes: an error of the body tells what else went wrong


class BodyError(Exception):
    """The body of a block raised."""


class Attempt:
    """Notes how it ended, and swallows its errors: they are looked at when all is over."""

    def __init__(
        self, witness: Witness, chance: random.Random, kind: str, route: str, keys: Sequence[str], limit: int
    ) -> None:
        self.witness = witness
        self.chance = chance
        self.facts = {"kind": kind, "route": route, "keys": list(keys), "limit": limit}
        self.route = route
        self.keys = keys
        self.limit = limit
        self.visit = witness.next_visit()
        self.is_in = False
        self.pid: int | None = None
        self.lock: LockHandle | None = None
        self.scope = "session"  # of those that are not told the lock: none of them is in a transaction

    def __enter__(self) -> Self:
        self.started = time.monotonic()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        error = {} if exc is None else describe(exc)
        outcome, now = self._outcome(exc), time.monotonic()
        facts = {**self.facts, **error, "outcome": outcome, "scope": self.scope}
        self.witness.note("end", visit=self.visit, started=self.started, at=now, **facts)
        return isinstance(exc, Exception)

    def _outcome(self, error: BaseException | None) -> str:
        if not self.is_in:
            named = {LockTimeout: "busy", PoolerDetected: "refused", asyncio.CancelledError: "cancelled"}
            return "busy" if error is None else named.get(type(error), "error")
        if error is None:
            return "ok"
        if isinstance(error, LockLost) or (self.lock is not None and self.lock.lost.is_set()):
            return "lost"
        if isinstance(error, (BodyError, asyncio.CancelledError)):
            # What a transaction did is undone then, and whether it held to its end nobody was told.
            kept = self.lock is not None and self.scope == "session" and not hasattr(error, "__notes__")
            return "ok" if kept and CAN_TELL else "undone"
        return "error"

    # Under the lock

    @contextlib.contextmanager
    def inside(self, lock: LockHandle | None) -> Iterator[None]:
        """Be seen by the witness for the length of a block."""
        self.lock, self.is_in = lock, True
        self.scope = self.scope if lock is None else lock.scope
        self.witness.note("in", visit=self.visit, at=time.monotonic(), **self.facts)
        try:
            with contextlib.ExitStack() as stack:
                for key in self.keys:
                    stack.enter_context(self.witness.visit(self.visit, key, self.limit))
                yield
        finally:
            self.witness.note("out", visit=self.visit, at=time.monotonic(), pid=self.pid)

    def body(self, lock: LockHandle | None = None) -> None:
        """Work: mostly for a moment, sometimes longer than an idle session may live."""
        with self.inside(lock):
            if self.chance.random() < 0.8:
                self.pid = self._ask_pid(lock)
            time.sleep(self._pause())
            if self.chance.random() < 0.2:
                with connections[self.route].cursor() as cursor:
                    cursor.execute("SELECT pg_sleep(%s)", [self._pause() / 4])
            self._end_body()

    async def abody(self, lock: LockHandle) -> None:
        """See body()."""
        with self.inside(lock):
            if self.chance.random() < 0.8:
                self.pid = await sync_to_async(self._ask_pid)(lock)
            await asyncio.sleep(self._pause())
            self._end_body()

    def _pause(self) -> float:
        return self.chance.choice((0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.5)) * self.chance.random()

    def _end_body(self) -> None:
        if self.chance.random() < 0.08:
            raise BodyError

    def _ask_pid(self, lock: LockHandle | None) -> int | None:
        """Ask which server session the lock is on."""
        own = None if lock is None else lock._own_connection
        if own is not None:
            return int(own.connection.info.backend_pid) if self.route != "by_session" else None
        with connections[self.route].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            return int(cursor.fetchone()[0])


def describe(error: BaseException) -> dict[str, Any]:
    """Return what the journal keeps of an error."""
    kind = type(error)
    text = "; ".join([str(error), *getattr(error, "__notes__", ())]).replace("\n", " ")
    state = getattr(error, "sqlstate", None)
    cause = error.__cause__
    while cause is not None and state is None:  # Django's error is between one of the library and psycopg's
        state, cause = getattr(cause, "sqlstate", None), cause.__cause__
    if "out of shared memory" in text:  # a connection that failed, or a pooler's, has no code for it
        state = "53200"
    return {"error": f"{kind.__module__}.{kind.__qualname__}", "state": state, "text": text[:300]}
