"""The witness: who is in, by means that have nothing to do with the locks under test.

A visit is from when a lock was taken until just before it is released. Each is told to three: to files that flock()
guards, to a table with an exclusion constraint on another server, and to a journal with the moments by one clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from tests.soak.plan import Plan

# Whoever is in alone has all slots, of a shared lock any one, of a semaphore one of so many.
CREATE = """
CREATE TABLE {table} (visit text NOT NULL, worker text NOT NULL, key int8range NOT NULL, slots int4range NOT NULL,
    EXCLUDE USING gist (key WITH &&, slots WITH &&))
"""
INSERT = "INSERT INTO {table} VALUES (%s, %s, int8range(hashtext(%s), hashtext(%s), '[]'), int4range(%s, %s))"
CONFLICTS = (psycopg.errors.ExclusionViolation, psycopg.errors.DeadlockDetected)


class Witness:
    """What one process tells. Usable from all of its threads."""

    def __init__(self, plan: Plan, worker: str) -> None:
        self.plan = plan
        self.worker = worker
        self.end = math.inf
        self.directory = Path(plan.directory)
        self._journal = os.open(self.directory / f"{worker}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = itertools.count(1)
        self._local = threading.local()
        self._connections: list[psycopg.Connection[Any]] = []

    def note(self, event: str, **facts: Any) -> None:
        """Append to the journal. What was written survives the process."""
        os.write(self._journal, json.dumps({"event": event, "worker": self.worker, **facts}).encode() + b"\n")

    def next_visit(self) -> str:
        return f"{self.worker}/{next(self._numbers)}"

    @contextlib.contextmanager
    def visit(self, visit: str, key: str, limit: int) -> Iterator[None]:
        """Be in for the length of a block. `limit` is how many may be in at once, 0 for any number that share."""
        before = time.monotonic()
        with contextlib.ExitStack() as stack:
            slot = self._claim_file(stack, key, limit)
            if slot is None:
                self._note_conflict(visit, key, "file", before)
            if not self._insert(stack, visit, key, limit, slot or 0):
                self._note_conflict(visit, key, "row", before)
            yield

    def _note_conflict(self, visit: str, key: str, seen_by: str, before: float) -> None:
        self.note("conflict", visit=visit, key=key, seen_by=seen_by, before=before, after=time.monotonic())

    def _claim_file(self, stack: contextlib.ExitStack, key: str, limit: int) -> int | None:
        """Lock a file of the key, and return the number of its slot; None where others have them all."""
        mode = fcntl.LOCK_EX if limit else fcntl.LOCK_SH
        for slot in range(max(limit, 1)):
            file = os.open(self.directory / f"{key}.{slot}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            else:
                stack.callback(os.close, file)
                return slot
        return None

    def _insert(self, stack: contextlib.ExitStack, visit: str, key: str, limit: int, slot: int) -> bool:
        lowest = slot if limit else random.randrange(1 << 30)
        highest = None if limit == 1 else lowest + 1
        raw = self._connection()
        try:
            raw.execute(INSERT.format(table=self.plan.table), (visit, self.worker, key, key, lowest, highest))
        except CONFLICTS:
            return False
        delete = f"DELETE FROM {self.plan.table} WHERE visit = %s AND key @> hashtext(%s)::bigint"
        stack.callback(raw.execute, delete, (visit, key))
        return True

    def _connection(self) -> psycopg.Connection[Any]:
        raw: psycopg.Connection[Any] | None = getattr(self._local, "raw", None)
        if raw is None:
            raw = self._local.raw = psycopg.connect(**self.plan.witness, autocommit=True, application_name="witness")
            self._connections.append(raw)
        return raw

    def close(self) -> None:
        for raw in self._connections:
            raw.close()
