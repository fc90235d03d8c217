"""Random mixes of everything, step by step against a model of what `pg_locks` should show after each step."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from django.db import connection, connections, transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from django_advisory_lock import (
    AdvisoryLockError,
    LockDeadlock,
    LockHandle,
    LockKey,
    LockLost,
    LockTimeout,
    advisory_lock,
    advisory_lock_all,
    advisory_semaphore,
    try_advisory_lock,
    try_advisory_semaphore,
)
from django_advisory_lock.slots import slot_key, slot_keys
from tests.support import LIMIT, OtherSession

pytestmark = pytest.mark.slow

T = TypeVar("T")

# A range of their own, so that a failure does not disturb other tests.
KEYS = [LockKey((-7_000_001,)), LockKey((7_000_002,)), LockKey.pair(-7, 3)]
SEMAPHORE = LockKey((7_000_009,))
SLOTS = 2
WATCHED = [*KEYS, *slot_keys(SEMAPHORE, SLOTS), slot_key(SEMAPHORE, "gate")]


class Worker(threading.Thread):
    """A thread that does one thing at a time, when it is told to."""

    def __init__(self, session: Session) -> None:
        super().__init__(daemon=True)
        self.session = session
        self.errands: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.results: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self.start()

    def run(self) -> None:
        if self.session.connection is None:
            connection.ensure_connection()
            connection.inc_thread_sharing()
            self.session.connection = connections["default"]
        else:
            connections["default"] = self.session.connection
        while (errand := self.errands.get()) is not None:
            try:
                self.results.put((errand(), None))
            except BaseException as error:
                self.results.put((None, error))
            del errand

    def do(self, function: Callable[[], T]) -> T:
        self.errands.put(function)
        value, error = self.results.get(timeout=LIMIT)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def end(self) -> None:
        self.errands.put(None)
        self.join(LIMIT)
        assert not self.is_alive()


class Lock:
    """What the model knows of one handle: its rows in `pg_locks`, and the transaction blocks that it is inside of."""

    def __init__(
        self, worker: Worker, handle: LockHandle, keys: tuple[LockKey, ...], shared: bool, scope: str, depth: int
    ) -> None:
        self.worker = worker
        self.handle = handle
        self.keys = keys
        self.shared = shared
        self.scope = scope
        self.depth = depth

    def rows(self) -> list[tuple[LockKey, bool]]:
        return [(key, self.shared) for key in self.keys]


class Session:
    """One database session of the model, and what it should hold."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.workers = [Worker(self)]
        self.locks: list[Lock] = []
        self.lost: list[Lock] = []
        self.atomics: list[Any] = []

    @property
    def first(self) -> Worker:
        return self.workers[0]

    def pid(self) -> int:
        return int(self.connection.connection.info.backend_pid)

    def rows(self) -> set[tuple[LockKey, bool]]:
        return {row for lock in self.locks for row in lock.rows()}

    def forget(self, gone: Callable[[Lock], bool]) -> None:
        self.lost += [lock for lock in self.locks if gone(lock)]
        self.locks = [lock for lock in self.locks if not gone(lock)]


MAKE: dict[str, Callable[..., Any]] = {
    "wait": lambda keys, **options: advisory_lock(keys[0], timeout=0, **options),
    "try": lambda keys, **options: try_advisory_lock(keys[0], **options),
    "all": lambda keys, **options: advisory_lock_all(*keys, timeout=0, **options),
    "all with timeout": lambda keys, **options: advisory_lock_all(*keys, timeout=0.004, **options),
}


class Machine(RuleBasedStateMachine):
    """Three sessions: two with a thread each, and one that two threads share."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = [Session(), Session(), Session()]
        for session in self.sessions:
            session.first.do(lambda: None)
        self.sessions[2].workers.append(Worker(self.sessions[2]))
        self.other = OtherSession()

    # What the model expects

    def free_for(self, session: Session, worker: Worker, keys: tuple[LockKey, ...], shared: bool) -> bool:
        """Whether nobody stands in the way: another session, or another thread on this one."""
        others = itertools.chain(*(one.locks for one in self.sessions))
        return not any(
            lock.worker is not worker and not (shared and lock.shared) and not set(lock.keys).isdisjoint(keys)
            for lock in others
        )

    def scope_of(self, session: Session, scope: str) -> str:
        return scope if scope != "auto" else "transaction" if session.atomics else "session"

    def keep(self, session: Session, worker: Worker, handle: LockHandle, shared: bool, scope: str) -> None:
        assert handle._hold is not None
        assert handle.scope == scope
        session.locks.append(Lock(worker, handle, handle._hold.keys, shared, scope, len(session.atomics)))

    @staticmethod
    def attempt(worker: Worker, lock: Any, tries: bool) -> LockHandle | None:
        try:
            return worker.do(lock.acquire)  # type: ignore[no-any-return]
        except (LockTimeout, LockDeadlock):
            if tries:
                raise
            return None

    # The steps

    @rule(
        number=st.integers(0, 2),
        second=st.booleans(),
        how=st.sampled_from(sorted(MAKE)),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        shared=st.booleans(),
        scope=st.sampled_from(["auto", "session"]),
    )
    def take(self, number: int, second: bool, how: str, keys: list[LockKey], shared: bool, scope: Any) -> None:
        session = self.sessions[number]
        worker = session.workers[-1 if second else 0]
        wanted = tuple(sorted(set(keys))) if how.startswith("all") else (keys[0],)
        expected = self.free_for(session, worker, wanted, shared)
        handle = self.attempt(worker, MAKE[how](keys, shared=shared, scope=scope), how == "try")
        assert bool(handle) is expected
        if handle:
            self.keep(session, worker, handle, shared, self.scope_of(session, scope))

    @rule(
        number=st.integers(0, 2),
        second=st.booleans(),
        tries=st.booleans(),
        scope=st.sampled_from(["auto", "session"]),
        timeout=st.sampled_from([0, 0.004]),
    )
    def take_a_slot(self, number: int, second: bool, tries: bool, scope: Any, timeout: float) -> None:
        session = self.sessions[number]
        worker = session.workers[-1 if second else 0]
        slots = slot_keys(SEMAPHORE, SLOTS)
        taken = {key for one in self.sessions for lock in one.locks for key in lock.keys} & set(slots)
        if tries:
            semaphore: Any = try_advisory_semaphore(SEMAPHORE, limit=SLOTS, scope=scope)
        else:
            semaphore = advisory_semaphore(SEMAPHORE, limit=SLOTS, scope=scope, timeout=timeout)
        handle = self.attempt(worker, semaphore, tries)
        assert bool(handle) is (len(taken) < SLOTS)
        if handle:
            self.keep(session, worker, handle, False, self.scope_of(session, scope))
            assert set(session.locks[-1].keys).isdisjoint(taken)

    @precondition(lambda self: any(session.locks for session in self.sessions))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """In any order; a transaction lock stays."""
        session, lock = self.one_of(data, lambda session: session.locks)
        lock.worker.do(lock.handle.release)
        if lock.scope == "session":
            session.locks.remove(lock)

    @precondition(lambda self: any(session.locks for session in self.sessions))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Forget a handle: its lock is freed with the next lock operation on the session."""
        session, lock = self.one_of(data, lambda session: session.locks)
        if lock.scope == "transaction":
            return
        session.locks.remove(lock)
        lock.worker.do(lambda: self.forget(lock))
        lock.worker.do(lambda: try_advisory_lock(-7_000_099, scope="session").acquire().release())

    @staticmethod
    def forget(lock: Lock) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del lock.handle
            gc.collect()

    @precondition(lambda self: len(self.sessions[2].locks) > 0)
    @rule(data=st.data())
    def release_from_another_thread(self, data: st.DataObject) -> None:
        """Refused, and the lock stays."""
        session = self.sessions[2]
        lock = data.draw(st.sampled_from(session.locks))
        (stranger,) = [worker for worker in session.workers if worker is not lock.worker]
        if lock.scope == "session":
            with pytest.raises(AdvisoryLockError, match="another thread"):
                stranger.do(lock.handle.release)

    @precondition(lambda self: any(session.lost for session in self.sessions))
    @rule(data=st.data())
    def release_what_was_lost(self, data: st.DataObject) -> None:
        session, lock = self.one_of(data, lambda session: session.lost)
        session.lost.remove(lock)
        if lock.scope == "session":
            with pytest.raises(LockLost):
                lock.worker.do(lock.handle.release)
            lock.worker.do(lock.handle.release)
        assert not lock.worker.do(lock.handle.is_held) or lock.scope == "transaction"

    @rule(number=st.integers(0, 2))
    def begin(self, number: int) -> None:
        """A transaction, or a savepoint in one."""
        session = self.sessions[number]
        if len(session.atomics) < 3:
            session.atomics.append(session.first.do(self.entered))

    @staticmethod
    def entered() -> Any:
        block = transaction.atomic()
        block.__enter__()
        return block

    @precondition(lambda self: any(session.atomics for session in self.sessions))
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        """Commit or rollback, of the transaction or of a savepoint."""
        session = data.draw(st.sampled_from([session for session in self.sessions if session.atomics]))
        block = session.atomics.pop()
        error = ZeroDivisionError() if fails else None
        session.first.do(lambda: block.__exit__(None if error is None else ZeroDivisionError, error, None))
        depth = len(session.atomics)
        session.forget(lambda lock: lock.scope == "transaction" and (depth == 0 or (fails and lock.depth > depth)))
        for lock in session.locks:
            lock.depth = min(lock.depth, depth)

    @rule(number=st.integers(0, 2), by_kill=st.booleans())
    def lose_the_session(self, number: int, by_kill: bool) -> None:
        """Killed, or closed by the application: all is gone, and after that the alias works again."""
        session = self.sessions[number]
        if session.atomics:
            return
        if by_kill:
            self.other.kill(session.pid())
            session.forget(lambda lock: True)
            # The next query finds out; as a release would, which is another step.
            session.first.do(session.connection.close)
        else:
            session.forget(lambda lock: True)
            session.first.do(session.connection.close)
        session.first.do(session.connection.ensure_connection)

    def one_of(self, data: st.DataObject, locks: Callable[[Session], list[Lock]]) -> tuple[Session, Lock]:
        pairs = [(number, index) for number, one in enumerate(self.sessions) for index in range(len(locks(one)))]
        number, index = data.draw(st.sampled_from(pairs))
        return self.sessions[number], locks(self.sessions[number])[index]

    # What has to be so after each step

    @invariant()
    def the_server_holds_what_the_model_says(self) -> None:
        by_columns = {key.pg_locks: key for key in WATCHED}
        rows = self.other.raw.execute(
            "SELECT pid, classid::bigint, objid::bigint, objsubid::int, mode = 'ShareLock', granted FROM pg_locks"
            " WHERE locktype = 'advisory' AND pid = ANY(%s)",
            [[session.pid() for session in self.sessions]],
        ).fetchall()
        assert all(row[-1] for row in rows), "somebody waits"
        found = Counter((row[0], by_columns.get(row[1:4]), row[4]) for row in rows)
        expected = Counter((session.pid(), *row) for session in self.sessions for row in session.rows())
        assert found == expected

    @invariant()
    def the_handles_say_the_same(self) -> None:
        for session in self.sessions:
            for lock in session.locks[-2:]:
                assert lock.worker.do(lock.handle.is_held)

    def teardown(self) -> None:
        try:
            for session in self.sessions:
                while session.atomics:
                    block = session.atomics.pop()
                    session.first.do(lambda block=block: block.__exit__(None, None, None))  # type: ignore[misc]
                session.forget(lambda lock: lock.scope == "transaction")
                for lock in reversed(session.locks):
                    lock.worker.do(lock.handle.release)
                session.locks.clear()
            self.the_server_holds_what_the_model_says()
        finally:
            for session in self.sessions:
                session.first.do(session.connection.close)
                for worker in session.workers:
                    worker.end()
            self.other.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_random_steps(other: OtherSession) -> None:
    """The same steps in every run; a failure prints the shortest that lead to it."""
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            print_blob=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
