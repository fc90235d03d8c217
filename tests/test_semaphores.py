"""Semaphores: never more than the limit at once, in the order of the queue, and a gate that never stays shut."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, OperationalError, connection, connections, transaction

from django_advisory_lock import (
    AdvisoryLockError,
    LockDeadlock,
    LockHandle,
    LockKey,
    LockLost,
    LockNotAcquired,
    LockTableFull,
    LockTimeout,
    PoolerDetected,
    advisory_lock,
    advisory_semaphore,
    lock_key,
    try_advisory_lock,
    try_advisory_semaphore,
)
from django_advisory_lock.sessions import attach
from django_advisory_lock.slots import slot_key, slot_keys
from tests.support import LIMIT, OtherSession, Thread, backend_pid, output, spawn, statements, value, wait_until
from tests.test_interrupts import TimeLimitExceeded, raises, strike_at_every_line
from tests.test_several import mine
from tests.test_taking import wrapped
from tests.testapp.models import Account


def gate_of(name: str) -> LockKey:
    return slot_key(lock_key(name), "gate")


def slots_of(name: str, limit: int) -> tuple[LockKey, ...]:
    return slot_keys(lock_key(name), limit)


@pytest.fixture
def second(other: OtherSession) -> Iterator[OtherSession]:
    session = OtherSession()
    yield session
    session.close()


@pytest.fixture
def full(name: str, other: OtherSession) -> Iterator[OtherSession]:
    """Another session in both slots of a semaphore of two."""
    for slot in slots_of(name, 2):
        other.take(slot)
    yield other
    for slot in slots_of(name, 2):
        if other.holders(slot) and other.holder(slot) == other.pid:
            other.drop(slot)


def wait_at_gate(name: str, session: OtherSession, count: int = 1) -> None:
    """Wait until one holds the gate exclusively, and the others queue for it."""
    gate = gate_of(name)
    exclusive = (
        "SELECT count(*) FROM pg_locks WHERE granted AND mode = 'ExclusiveLock' AND locktype = 'advisory'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND (classid::bigint, objid::bigint, objsubid) = (%s, %s, %s)"
    )
    wait_until(
        lambda: session.one(exclusive, gate.pg_locks) == 1 and session.waiters(gate) == count - 1,
        f"{count} at the gate",
    )


class Witness:
    """Counts who is inside without a look at the lock."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.inside = 0
        self.most = 0
        self.turns = 0

    def __enter__(self) -> None:
        with self.mutex:
            self.inside += 1
            self.turns += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *error: object) -> None:
        with self.mutex:
            self.inside -= 1


class TestKeys:
    """The keys are a promise: programs of two versions have to meet."""

    @staticmethod
    def derived(text: str) -> int:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)

    def test_golden_values(self) -> None:
        report = lock_key("nightly-report", namespace="")
        assert report.args == (7440995589958059143,)
        assert slot_key(report, 1).args == (-6717989260767846946,)
        assert slot_key(report, 2).args == (913264481737511798,)
        assert slot_key(report, "gate").args == (6118341482618060171,)
        assert slot_key(LockKey.pair(-1, 42), 3).args == (5384394847499239888,)

    @pytest.mark.parametrize("key", [LockKey((8,)), LockKey((-1,)), LockKey.pair(-1, 42), LockKey.pair(0, 8)])
    def test_how_they_are_derived(self, key: LockKey) -> None:
        numbers = ",".join(str(number) for number in key.args)
        for slot in (1, 2, 64, "gate"):
            assert slot_key(key, slot).args == (self.derived(f"semaphore\x1d{numbers}\x1d{slot}"),)
        assert slot_keys(key, 3) == tuple(slot_key(key, slot) for slot in (1, 2, 3))

    def test_a_namespace_enters_once(self, settings: Any) -> None:
        """With the key itself, so that the slots of two tenants differ and those of raw numbers do not."""
        before = slot_key(LockKey((8,)), 1)
        settings.ADVISORY_LOCK_NAMESPACE = "shop"
        assert slot_key(LockKey((8,)), 1) == before
        assert slot_key(lock_key("x"), 1) != slot_key(lock_key("x", namespace=""), 1)

    def test_the_server_shows_just_these(self, name: str, other: OtherSession) -> None:
        with advisory_semaphore(name, limit=3) as first, advisory_semaphore(name, limit=3):
            one, two, three = slots_of(name, 3)
            assert (other.holders(one), other.holders(two), other.holders(three)) == (1, 1, 0)
            assert other.holders(gate_of(name)) == 0
            assert other.is_free(lock_key(name))
            assert first.key == lock_key(name)
            assert name in repr(first)

    def test_a_lock_of_that_name_is_another(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name), try_advisory_semaphore(name, limit=1) as slot:
            assert slot


class TestUse:
    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_limit_below_one(self, limit: int) -> None:
        for make in (advisory_semaphore, try_advisory_semaphore):
            with pytest.raises(ValueError, match="at least 1"):
                make("x", limit=limit)

    @pytest.mark.parametrize("limit", [True, 1.0, "1", None])
    def test_a_limit_that_is_no_number(self, limit: Any) -> None:
        for make in (advisory_semaphore, try_advisory_semaphore):
            with pytest.raises(TypeError, match="limit"):
                make("x", limit=limit)
        with pytest.raises(TypeError):
            advisory_semaphore("x")  # type: ignore[call-arg]

    @pytest.mark.parametrize(("bad", "error"), [((), ValueError), ((None,), ValueError), (("",), ValueError)])
    def test_bad_keys(self, bad: Any, error: type[Exception]) -> None:
        """Case 29."""
        for make in (advisory_semaphore, try_advisory_semaphore):
            with pytest.raises(error):
                make(*bad, limit=2)

    def test_decorators(self, name: str, other: OtherSession) -> None:
        @advisory_semaphore(lambda number: (name, number), limit=2)
        def waits(number: int) -> int:
            return mine()

        @try_advisory_semaphore(name, limit=2, default="busy")
        def tries() -> int:
            return mine()

        assert waits(1) == 1
        assert tries() == 1
        with advisory_semaphore(name, limit=2), advisory_semaphore(name, limit=2):
            assert tries() == "busy"
        assert mine() == 0

    def test_by_hand(self, name: str, other: OtherSession) -> None:
        first = advisory_semaphore(name, limit=2).acquire()
        then = try_advisory_semaphore(name, limit=2).acquire()
        assert first.is_held()
        assert then.is_held()
        assert not try_advisory_semaphore(name, limit=2).acquire()
        first.release()
        first.release()
        assert not first.is_held()
        assert then.is_held()
        then.check()
        again = try_advisory_semaphore(name, limit=2).acquire()
        assert other.holders(slots_of(name, 1)[0]) == 1
        again.release()
        then.release()
        assert mine() == 0

    def test_nested_use_takes_a_second_slot(self, name: str, other: OtherSession) -> None:
        semaphore = advisory_semaphore(name, limit=3)
        with semaphore, semaphore, semaphore:
            assert mine() == 3
            with try_advisory_semaphore(name, limit=3) as fourth:
                assert not fourth
            with pytest.raises(LockTimeout, match="3 slots"):
                advisory_semaphore(name, limit=3, timeout=0).acquire()
            for timeout in (None, 5):
                with statements(0), pytest.raises(LockDeadlock, match="all of its slots") as caught:
                    advisory_semaphore(name, limit=3, timeout=timeout).acquire()
                assert caught.value.key == lock_key(name)
        assert mine() == 0

    def test_what_it_costs(self, name: str, other: OtherSession) -> None:
        for inside in (False, True):
            with transaction.atomic() if inside else nullcontext():
                for make in (advisory_semaphore, try_advisory_semaphore):
                    with statements(1):
                        slot = make(name, limit=2).acquire()
                    with statements(0 if inside else 1):
                        slot.release()

    def test_a_failed_try_sends_nothing_more(self, name: str, full: OtherSession) -> None:
        with statements(1):
            assert not try_advisory_semaphore(name, limit=2).acquire()
        with statements(2), pytest.raises(LockTimeout):
            advisory_semaphore(name, limit=2, timeout=0).acquire()

    def test_another_limit_elsewhere(self, name: str, other: OtherSession) -> None:
        """Who says 2 has the first two slots, who says 3 a third one besides: each keeps to his own limit."""
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(advisory_semaphore(name, limit=3))
            assert not try_advisory_semaphore(name, limit=2).acquire()
            third = try_advisory_semaphore(name, limit=3).acquire()
            assert third
            third.release()
        assert mine() == 0

    @pytest.mark.parametrize("alias", ["binding", "prepared", "same", "persistent"])
    def test_other_aliases(self, alias: str, name: str, other: OtherSession) -> None:
        for inside in (False, True):
            with transaction.atomic(using=alias) if inside else nullcontext():
                with advisory_semaphore(name, limit=2, using=alias) as one:
                    assert one.is_held()
                    with try_advisory_semaphore(name, limit=2, using=alias) as two:
                        assert two.is_held()
                        assert not try_advisory_semaphore(name, limit=2, scope="session").acquire()
        assert mine(alias) == 0

    def test_a_waiter_on_another_alias(self, name: str, full: OtherSession, second: OtherSession) -> None:
        for alias in ("binding", "prepared"):
            with pytest.raises(LockTimeout):
                advisory_semaphore(name, limit=2, using=alias, timeout=0.05).acquire()
            with transaction.atomic(using=alias), pytest.raises(LockTimeout):
                advisory_semaphore(name, limit=2, using=alias, timeout=0.05).acquire()
            assert mine(alias) == 0

    def test_a_dropped_handle(self, name: str, other: OtherSession) -> None:
        with pytest.warns(ResourceWarning, match="dropped"):
            advisory_semaphore(name, limit=1).acquire()
            gc.collect()
        with advisory_semaphore(name, limit=1, timeout=0):
            assert mine() == 1

    def test_an_answer_that_nobody_looked_at(self, name: str, full: OtherSession) -> None:
        with pytest.warns(RuntimeWarning, match="try_advisory"), try_advisory_semaphore(name, limit=2):
            pass

    def test_an_inner_try_that_nobody_looked_at(self, name: str, other: OtherSession) -> None:
        """Its warning, where it is an error, ends no block but its own."""
        lock = try_advisory_semaphore(name, limit=1)
        with lock as outer:
            with pytest.raises(RuntimeWarning), lock:
                pass
            assert outer.is_held()
        assert other.is_free(slot_key(lock_key(name), 1))


class TestLimit:
    """Never more than the limit, by a witness that does not rely on the lock."""

    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("limit", [1, 2])
    def test_threads(self, limit: int, inside: bool, name: str, other: OtherSession) -> None:
        witness = Witness()

        def work() -> None:
            for _ in range(4):
                if inside:
                    with transaction.atomic():
                        with advisory_semaphore(name, limit=limit):
                            pass
                        with witness:
                            value("SELECT pg_sleep(0.002)")
                else:
                    with advisory_semaphore(name, limit=limit, timeout=60), witness:
                        value("SELECT pg_sleep(0.002)")

        for thread in [Thread(work) for _ in range(6)]:
            thread.result()
        assert witness.most == limit
        assert witness.turns == 24

    def test_without_it_they_collide(self, other: OtherSession) -> None:
        """The negative control."""
        witness = Witness()
        barrier = threading.Barrier(6)

        def work() -> None:
            with witness:
                barrier.wait(LIMIT)

        for thread in [Thread(work) for _ in range(6)]:
            thread.result()
        assert witness.most == 6

    def test_tries_beside_waits(self, name: str, other: OtherSession) -> None:
        witness = Witness()
        end = time.monotonic() + 1.5
        counts = {"waited": 0, "tried": 0, "busy": 0, "late": 0}

        def wait() -> None:
            with advisory_semaphore(name, limit=2), witness:
                counts["waited"] += 1
                value("SELECT pg_sleep(0.002)")

        def attempt() -> None:
            with try_advisory_semaphore(name, limit=2) as slot:
                counts["tried" if slot else "busy"] += 1
                with witness if slot else nullcontext():
                    pass

        def give_up_soon() -> None:
            try:
                with advisory_semaphore(name, limit=2, timeout=0.002), witness:
                    pass
            except LockTimeout:
                counts["late"] += 1
                assert mine() == 0, "reported as busy, and kept"

        def again(use: Callable[[], None]) -> None:
            while time.monotonic() < end:
                use()

        uses = (wait, wait, attempt, attempt, give_up_soon, give_up_soon)
        for thread in [Thread(partial(again, use)) for use in uses]:
            thread.result()
        assert witness.most == 2
        assert counts["waited"]
        assert other.holders(gate_of(name)) == 0

    PROCESS = """
import fcntl, os, sys, time
files = [open(path, "w") for path in sys.argv[2:]]  # before the connection, so that a kill frees them first
from django.db import connection
from django_advisory_lock import advisory_semaphore
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    with advisory_semaphore(NAME, limit=LIMIT):
        for attempt in range(200):
            for file in files:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    pass
            else:
                if attempt == 20:
                    raise SystemExit("more than the limit inside")
                time.sleep(0.001)
                continue
            break
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(0.02)")
        fcntl.lockf(file, fcntl.LOCK_UN)
print("done")
"""

    @pytest.mark.parametrize("limit", [2])
    def test_processes_some_of_which_are_killed(
        self, limit: int, name: str, other: OtherSession, tmp_path: Path
    ) -> None:
        """Case 35, 61: with file locks as the witness, which the kernel frees as the process dies."""
        code = self.PROCESS.replace("NAME", repr(name)).replace("LIMIT", str(limit))
        arguments = [str(tmp_path / file) for file in ("stop", "one", "two")]
        survivors = [spawn(code, *arguments) for _ in range(3)]
        victims = [spawn(code, *arguments) for _ in range(3)]
        try:
            for process in (*survivors, *victims):
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for process in victims:
                wait_until(lambda: sum(other.holders(slot) for slot in slots_of(name, limit)) == limit)
                process.send_signal(signal.SIGKILL)
                process.communicate(timeout=LIMIT)
            wait_until(lambda: sum(other.holders(slot) for slot in slots_of(name, limit)) == limit)
            (tmp_path / "stop").touch()
            assert [output(process) for process in survivors] == ["done\n"] * 3
        finally:
            for process in (*survivors, *victims):
                process.kill()
        wait_until(lambda: other.holders(gate_of(name)) == 0)
        wait_until(lambda: not any(other.holders(slot) for slot in slots_of(name, limit)))

    def test_sessions_that_are_ended(self, name: str, other: OtherSession) -> None:
        """Case 4: the slot is another's at once, the old holder is told, and the limit counts sessions that live."""
        pids: list[int] = []
        inside, go = threading.Barrier(3), threading.Event()

        def hold() -> None:
            with pytest.raises(LockLost), advisory_semaphore(name, limit=2) as slot:
                pids.append(backend_pid())
                inside.wait(LIMIT)
                assert go.wait(LIMIT)
                assert not slot.is_held()
            assert backend_pid() not in pids

        holding = [Thread(hold), Thread(hold)]
        inside.wait(LIMIT)
        assert not try_advisory_semaphore(name, limit=2).acquire()
        for pid in pids:
            other.kill(pid)
        with advisory_semaphore(name, limit=2), advisory_semaphore(name, limit=2, timeout=0):
            go.set()
            for thread in holding:
                thread.result()
            assert not try_advisory_semaphore(name, limit=2, using="same").acquire()


class TestQueue:
    def test_a_freed_slot_is_taken_soon(self, name: str, full: OtherSession, second: OtherSession) -> None:
        """By the one at the gate, who looks every 10 to 30 ms, and not by whoever tries meanwhile."""
        looks: list[str] = []
        taken = threading.Event()

        def wait() -> None:
            with wrapped(after=lambda sql: looks.append(sql) if taken.is_set() else None):
                with advisory_semaphore(name, limit=2) as slot:
                    assert slot.waited > 0

        waiting = Thread(wait)
        wait_at_gate(name, second)
        taken.set()
        full.drop(slots_of(name, 2)[1])
        waiting.result()
        assert 1 <= len(looks) <= 3  # one look that was on its way, the take, and the release

    def test_a_try_is_false_while_somebody_waits(self, name: str, full: OtherSession, second: OtherSession) -> None:
        waiting = Thread(lambda: advisory_semaphore(name, limit=2).acquire().release())
        wait_at_gate(name, second)
        assert not try_advisory_semaphore(name, limit=3).acquire()
        with pytest.raises(LockTimeout):
            advisory_semaphore(name, limit=3, timeout=0).acquire()
        full.drop(slots_of(name, 2)[0])
        waiting.result()

    def test_the_order_is_that_of_the_queue(self, name: str, full: OtherSession, second: OtherSession) -> None:
        order: list[int] = []

        def work(number: int) -> None:
            with advisory_semaphore(name, limit=2):
                order.append(number)

        threads = []
        for number in range(5):
            threads.append(Thread(lambda number=number: work(number)))  # type: ignore[misc]
            wait_at_gate(name, second, number + 1)
        full.drop(slots_of(name, 2)[0])
        for thread in threads:
            thread.result()
        assert order == [0, 1, 2, 3, 4]

    def test_nobody_starves(self, name: str, other: OtherSession) -> None:
        """Twelve on two slots, who all come again at once: each gets its turns while the others want theirs too."""
        witness = Witness()
        start = threading.Barrier(12)
        turns: list[int] = []

        def work(number: int) -> None:
            backend_pid()
            start.wait(LIMIT)
            for _ in range(4):
                with advisory_semaphore(name, limit=2), witness:
                    turns.append(number)

        for thread in [Thread(lambda number=number: work(number)) for number in range(12)]:  # type: ignore[misc]
            thread.result()
        assert witness.most <= 2
        assert len(turns) == 48
        # In the first half everybody has been inside once: nobody comes again before those who queued.
        assert set(turns[:36]) == set(range(12))

    def test_a_waiter_that_is_killed_at_the_gate(self, name: str, full: OtherSession, second: OtherSession) -> None:
        pids: list[int] = []

        def wait() -> None:
            pids.append(backend_pid())
            with pytest.raises(OperationalError):
                advisory_semaphore(name, limit=2).acquire()
            assert backend_pid() not in pids

        victim = Thread(wait)
        wait_at_gate(name, second)
        waiting = Thread(lambda: advisory_semaphore(name, limit=2).acquire().release())
        wait_at_gate(name, second, 2)
        second.kill(pids[0])
        victim.result()
        wait_at_gate(name, second)
        full.drop(slots_of(name, 2)[0])
        waiting.result()
        assert second.is_free(gate_of(name))

    def test_a_process_that_is_killed_at_the_gate(self, name: str, full: OtherSession, second: OtherSession) -> None:
        code = f"from django_advisory_lock import advisory_semaphore\nadvisory_semaphore({name!r}, limit=2).acquire()"
        process = spawn(code)
        try:
            wait_at_gate(name, second)
        finally:
            process.kill()
            process.communicate(timeout=LIMIT)
        wait_until(lambda: second.is_free(gate_of(name)))


class TestFailures:
    """Whatever goes wrong, neither a slot nor the gate stays behind."""

    def clean(self, name: str, other: OtherSession, held: int = 0) -> None:
        assert other.is_free(gate_of(name))
        assert mine() == held

    @pytest.mark.parametrize("timeout", [0, 0.001, 0.08])
    @pytest.mark.parametrize("scope", ["auto", "session"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_a_timeout(self, timeout: float, scope: Any, inside: bool, name: str, full: OtherSession) -> None:
        """Case 9, 73: in time, with who is inside, and the transaction stays usable."""

        def attempt() -> None:
            start = time.monotonic()
            with pytest.raises(LockTimeout, match="None of the 2 slots") as caught:
                advisory_semaphore(name, limit=2, timeout=timeout, scope=scope).acquire()
            assert time.monotonic() - start >= timeout
            assert (caught.value.key, caught.value.using) == (lock_key(name), "default")
            assert caught.value.waited is not None
            assert caught.value.waited >= timeout
            assert f"pid {full.pid} (other-session)" in str(caught.value)
            self.clean(name, full)

        if not inside:
            attempt()
            return
        with transaction.atomic():
            account = Account.objects.create(name=name)
            attempt()
            account.delete()

    def test_a_timeout_in_the_queue_for_the_gate(self, name: str, full: OtherSession, second: OtherSession) -> None:
        waiting = Thread(lambda: advisory_semaphore(name, limit=2).acquire().release())
        wait_at_gate(name, second)
        for inside in (False, True):
            with transaction.atomic() if inside else nullcontext():
                start = time.monotonic()
                with pytest.raises(LockTimeout, match=str(full.pid)) as caught:
                    advisory_semaphore(name, limit=2, timeout=0.05).acquire()
                assert time.monotonic() - start >= 0.05
                assert caught.value.key == lock_key(name)
                assert mine() == 0
        full.drop(slots_of(name, 2)[0])
        waiting.result()
        self.clean(name, second)

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_wait_that_is_cancelled_in_the_queue_for_the_gate(
        self, inside: bool, name: str, full: OtherSession, second: OtherSession
    ) -> None:
        pids: list[int] = []
        second.take(gate_of(name))

        def work() -> None:
            with transaction.atomic() if inside else nullcontext():
                pids.append(backend_pid())
                with pytest.raises(LockNotAcquired, match="cancelled") as caught:
                    advisory_semaphore(name, limit=2).acquire()
                assert caught.value.key == lock_key(name)
                assert mine() == 0
                assert backend_pid() == pids[0]

        waiting = Thread(work)
        full.wait_for_waiters(gate_of(name))
        second.cancel(pids[0])
        waiting.result()
        second.drop(gate_of(name))
        self.clean(name, second)

    def test_a_deadlock_in_the_queue_for_the_gate(self, name: str, full: OtherSession, second: OtherSession) -> None:
        second.take(gate_of(name))
        second.raw.execute("SET deadlock_timeout = '1min'")
        with advisory_lock(name) as outer:
            crossing = Thread(lambda: second.wait(lock_key(name)))
            full.wait_for_waiters(lock_key(name))
            for inside in (False, True):
                with transaction.atomic() if inside else nullcontext():
                    with pytest.raises(LockDeadlock) as caught:
                        advisory_semaphore(name, limit=2).acquire()
                    assert caught.value.key == lock_key(name)
                    assert mine() == 1
            assert outer.is_held()
        crossing.result()
        second.drop(lock_key(name))
        second.drop(gate_of(name))

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
    @pytest.mark.parametrize("at", ["try_slot", "gate", "take_slot_at_gate"])
    @pytest.mark.parametrize("moment", ["before", "after"])
    @pytest.mark.parametrize("scope", ["auto", "session"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_an_interrupt_beside_the_grant(
        self,
        interrupt: type[BaseException],
        at: str,
        moment: str,
        scope: Any,
        inside: bool,
        name: str,
        full: OtherSession,
    ) -> None:
        """Case 67b."""

        marks = {"try_slot": "is_open", "gate": "advisory_lock(", "take_slot_at_gate": "is_ours"}

        def raise_it(sql: str) -> None:
            if marks[at] in sql and ("RECURSIVE" in sql or at == "gate"):
                raise interrupt

        def take() -> None:
            with pytest.raises(interrupt), wrapped(**{moment: raise_it}):
                advisory_semaphore(name, limit=2, scope=scope).acquire()
            assert full.is_free(gate_of(name))
            if inside and scope == "auto" and moment == "after" and at == "try_slot":
                return  # a transaction lock goes with its transaction
            assert mine() == 0

        if at != "gate":
            full.drop(slots_of(name, 2)[0])
        if at == "take_slot_at_gate":
            full.take(gate_of(name))  # for the try to fail; it is free when the gate is asked for

        def open_gate(sql: str) -> None:
            if "is_open" in sql and at == "take_slot_at_gate":
                full.drop(gate_of(name))

        with wrapped(after=open_gate):
            if inside:
                with transaction.atomic():
                    take()
            else:
                take()
        self.clean(name, full)

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_signal_while_it_sleeps_at_the_gate(
        self, inside: bool, name: str, full: OtherSession, second: OtherSession
    ) -> None:
        """Case 67a."""

        def raise_it(*args: object) -> None:
            raise TimeLimitExceeded

        before = signal.signal(signal.SIGALRM, raise_it)
        try:
            with transaction.atomic() if inside else nullcontext():
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(TimeLimitExceeded):
                    advisory_semaphore(name, limit=2).acquire()
                if not connection.needs_rollback and connection.connection is not None:
                    self.clean(name, second)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        wait_until(lambda: second.is_free(gate_of(name)))
        assert mine() == 0

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_statement_timeout_in_the_queue(
        self, inside: bool, name: str, full: OtherSession, second: OtherSession
    ) -> None:
        second.take(gate_of(name))
        value("SELECT set_config('statement_timeout', '60ms', false)")
        with (
            transaction.atomic() if inside else nullcontext(),
            pytest.raises(LockNotAcquired, match="statement_timeout"),
        ):
            advisory_semaphore(name, limit=2).acquire()
        assert mine() == 0
        second.drop(gate_of(name))
        connection.close()

    @pytest.mark.parametrize("pinned", [False, True])
    @pytest.mark.parametrize("at", ["is_open", "is_ours"])
    def test_a_look_that_fails_inside_a_transaction(self, at: str, pinned: bool, name: str, full: OtherSession) -> None:
        """The first has no savepoint around it: the transaction fails, and may not end as if all were well."""

        def fail(sql: str) -> None:
            if at in sql:
                with connection.wrap_database_errors:
                    connection.connection.execute("DO $$ BEGIN RAISE SQLSTATE '57014'; END $$")

        with advisory_lock(name) if pinned else nullcontext():
            with contextlib.suppress(DatabaseError, LockLost), transaction.atomic():
                Account.objects.create(name=name)
                with pytest.raises(LockNotAcquired), wrapped(after=fail):
                    advisory_semaphore(name, limit=2).acquire()
                if at == "is_open":
                    with pytest.raises(DatabaseError):
                        backend_pid()
            assert full.is_free(gate_of(name))
            assert Account.objects.filter(name=name).exists() is (at == "is_ours")
            assert mine() == pinned
        Account.objects.filter(name=name).delete()

    def test_a_full_lock_table(self, name: str, full: OtherSession) -> None:
        def no_room(sql: str) -> None:
            if "is_ours" in sql:
                with connection.wrap_database_errors:
                    connection.connection.execute(
                        "DO $$ BEGIN RAISE SQLSTATE '53200' USING"
                        " HINT = 'You might need to increase \"max_locks_per_transaction\".'; END $$"
                    )

        for inside in (False, True):
            with transaction.atomic() if inside else nullcontext():
                with pytest.raises(LockTableFull), wrapped(before=no_room):
                    advisory_semaphore(name, limit=2).acquire()
                self.clean(name, full)

    def test_after_a_failed_transaction(self, name: str, other: OtherSession) -> None:
        """In one nothing is sent; after it all works."""
        with pytest.raises(DatabaseError), transaction.atomic():
            with contextlib.suppress(DatabaseError):
                value("SELECT 1/0")
            advisory_semaphore(name, limit=2).acquire()
        self.clean(name, other)
        with advisory_semaphore(name, limit=2, timeout=0):
            assert mine() == 1

    @pytest.mark.parametrize("timeout", [None, 0, 5])
    def test_behind_a_pooler_nothing_is_taken(self, timeout: float | None, name: str, other: OtherSession) -> None:
        """Case 37."""
        connection.ensure_connection()
        attach(connections["default"]).guard = other.pid
        with statements(1), pytest.raises(PoolerDetected):
            advisory_semaphore(name, limit=2, timeout=timeout).acquire()
        with pytest.raises(PoolerDetected), transaction.atomic():
            advisory_semaphore(name, limit=2, timeout=timeout, scope="session").acquire()
        with transaction.atomic(), advisory_semaphore(name, limit=2, timeout=timeout) as slot:
            assert slot.is_held()
        self.clean(name, other)
        connection.close()

    def test_behind_a_pooler_a_transaction_waits_too(self, name: str, full: OtherSession, second: OtherSession) -> None:
        """Case 37: a transaction has one server session, so the gate needs no guard there."""

        def work() -> None:
            connection.ensure_connection()
            attach(connections["default"]).guard = full.pid
            with transaction.atomic(), advisory_semaphore(name, limit=2) as slot:
                assert slot.is_held()
                assert mine() == 1
            with transaction.atomic(), pytest.raises(LockTimeout):
                second.take(slots_of(name, 2)[0])
                advisory_semaphore(name, limit=2, timeout=0.05).acquire()
            assert mine() == 0
            connection.close()

        waiting = Thread(work)
        wait_until(lambda: second.holders(gate_of(name)) or not waiting.is_alive())
        full.drop(slots_of(name, 2)[0])
        waiting.result()
        second.drop(slots_of(name, 2)[0])
        assert second.is_free(gate_of(name))

    @pytest.mark.parametrize("inside", [False, True])
    def test_an_interrupt_when_the_handle_gets_the_slot(
        self, inside: bool, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Case 67."""

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(LockHandle, "_keep", interrupted)
            with transaction.atomic() if inside else contextlib.nullcontext():
                advisory_semaphore(name, limit=2).acquire()
        self.clean(name, other)

    def test_behind_a_pooler_an_interrupt_at_the_gate(
        self, name: str, full: OtherSession, second: OtherSession
    ) -> None:
        """Case 37, 67: the gate is a session lock, and would stay on the pooler's session for good."""

        def interrupt(sql: str) -> None:
            if "pg_try_advisory_lock(" in sql and "WITH" not in sql:
                raise KeyboardInterrupt

        connection.ensure_connection()
        attach(connections["default"]).guard = full.pid
        with pytest.raises(KeyboardInterrupt), transaction.atomic(), wrapped(after=interrupt):
            advisory_semaphore(name, limit=2, timeout=5).acquire()
        assert second.is_free(gate_of(name))
        connection.close()

    def test_a_pooled_connection(self, name: str, full: OtherSession) -> None:
        """Case 2."""
        with pytest.raises(LockTimeout):
            advisory_semaphore(name, limit=2, using="pooled", timeout=0.05).acquire()
        pid = backend_pid("pooled")
        connections["pooled"].close()
        assert backend_pid("pooled") == pid
        assert mine("pooled") == 0
        with pytest.raises(LockLost), advisory_semaphore(name, limit=3, using="pooled"):
            connections["pooled"].close()
        assert backend_pid("pooled") != pid
        connections["pooled"].close()


class TestScope:
    def test_in_a_transaction_the_slot_is_kept_and_the_gate_is_not(
        self, name: str, full: OtherSession, second: OtherSession
    ) -> None:
        """Case 13."""
        inside, go = threading.Event(), threading.Event()

        def work() -> None:
            with transaction.atomic():
                with advisory_semaphore(name, limit=2) as slot:
                    assert slot.scope == "transaction"
                inside.set()
                assert go.wait(LIMIT)

        waiting = Thread(work)
        wait_at_gate(name, second)
        full.drop(slots_of(name, 2)[1])
        assert inside.wait(LIMIT)
        assert second.holders(slots_of(name, 2)[1]) == 1
        assert second.is_free(gate_of(name))
        go.set()
        waiting.result()
        assert second.holders(slots_of(name, 2)[1]) == 0

    def test_session_scope_in_a_transaction(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with advisory_semaphore(name, limit=1, scope="session"):
                assert mine() == 1
            assert mine() == 0
            with pytest.raises(DatabaseError, match="division"), advisory_semaphore(name, limit=1, scope="session"):
                value("SELECT 1/0")
        assert mine() == 0

    def test_transaction_scope_outside_one(self, other: OtherSession) -> None:
        with pytest.raises(transaction.TransactionManagementError):
            advisory_semaphore("x", limit=1, scope="transaction").acquire()

    def test_a_savepoint_that_is_rolled_back(self, name: str, other: OtherSession) -> None:
        """Case 16: the slot is free again, for this session too."""
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                lost = advisory_semaphore(name, limit=1).acquire()
                raise ZeroDivisionError
            assert not lost.is_held()
            with advisory_semaphore(name, limit=1) as slot:
                assert slot.is_held()
                assert mine() == 1
                with pytest.raises(LockDeadlock):
                    advisory_semaphore(name, limit=1).acquire()
        with transaction.atomic(), advisory_semaphore(name, limit=1):
            assert mine() == 1

    def test_one_whose_slots_went_to_others(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                advisory_semaphore(name, limit=1).acquire()
                raise ZeroDivisionError
            other.take(slots_of(name, 1)[0])
            with pytest.raises(LockTimeout, match=str(other.pid)):
                advisory_semaphore(name, limit=1, timeout=0.03).acquire()
            other.drop(slots_of(name, 1)[0])


class TestSharedSession:
    """Threads that share a connection, and tasks: the server would let them all through the gate."""

    @pytest.fixture
    def shared(self, other: OtherSession) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        connection.ensure_connection()
        connection.inc_thread_sharing()
        mine_too = connections["default"]

        def run(function: Callable[[], Any]) -> Any:
            def work() -> Any:
                connections["default"] = mine_too
                try:
                    return function()
                finally:
                    del connections["default"]

            return Thread(work)

        yield run
        connection.dec_thread_sharing()

    def test_they_count_one_by_one(self, shared: Any, name: str, other: OtherSession) -> None:
        witness = Witness()

        def work() -> int:
            got = 0
            for _ in range(20):
                with try_advisory_semaphore(name, limit=2) as slot:
                    if slot:
                        got += 1
                        with witness:
                            time.sleep(0.001)
            return got

        threads = [shared(work) for _ in range(4)]
        assert sum(thread.result() for thread in threads) > 0
        assert witness.most <= 2
        assert mine() == 0

    def test_a_statement_of_another_thread_is_no_transaction(
        self, shared: Any, name: str, other: OtherSession, second: OtherSession
    ) -> None:
        """While one runs the connection is not idle, but a lock has to last all the same."""

        def take() -> None:
            with try_advisory_semaphore(name, limit=1) as slot:
                assert slot.scope == "session"
                assert slot.is_held()

        other.take(lock_key(name))
        busy = shared(lambda: value("SELECT pg_advisory_lock(%s) IS NULL", lock_key(name).args))
        second.wait_for_waiters(lock_key(name))
        taking = shared(take)
        other.drop(lock_key(name))
        busy.result()
        taking.result()
        assert value("SELECT pg_advisory_unlock(%s)", lock_key(name).args)

    def test_who_tries_does_not_overtake_who_waits(
        self, shared: Any, name: str, full: OtherSession, second: OtherSession
    ) -> None:
        """A try is False while somebody waits, on the same session too."""
        waiting = shared(lambda: advisory_semaphore(name, limit=2).acquire().release())
        wait_at_gate(name, second)
        assert not try_advisory_semaphore(name, limit=3).acquire()
        full.drop(slots_of(name, 2)[0])
        waiting.result()
        with try_advisory_semaphore(name, limit=3) as slot:
            assert slot

    def test_two_who_wait(self, shared: Any, name: str, full: OtherSession, second: OtherSession) -> None:
        """The second waits behind the first: that is no deadlock, for the first will leave the gate."""
        waiting = shared(lambda: advisory_semaphore(name, limit=2).acquire().release())
        wait_at_gate(name, second)
        too = shared(lambda: advisory_semaphore(name, limit=2, timeout=15).acquire().release())
        with pytest.raises(LockTimeout):
            advisory_semaphore(name, limit=2, timeout=0.05).acquire()
        full.drop(slots_of(name, 2)[0])
        waiting.result()
        too.result()
        assert mine() == 0
        assert second.is_free(gate_of(name))

    def test_only_the_owner_releases(self, shared: Any, name: str, other: OtherSession) -> None:
        slot = advisory_semaphore(name, limit=2).acquire()

        def meddle() -> None:
            with pytest.raises(AdvisoryLockError, match="another thread"):
                slot.release()

        shared(meddle).result()
        assert slot.is_held()
        slot.release()


class TestTasks:
    """Case 89."""

    @staticmethod
    def run(main: Callable[[], Any]) -> None:
        async def work() -> None:
            try:
                await main()
            finally:
                await sync_to_async(connections.close_all)()

        asyncio.run(work())

    def test_never_more_than_the_limit(self, name: str, other: OtherSession) -> None:
        witness = Witness()

        @advisory_semaphore(name, limit=2)
        async def decorated() -> None:
            with witness:
                await asyncio.sleep(0.002)

        async def block() -> None:
            async with advisory_semaphore(name, limit=2, timeout=60) as slot:
                with witness:
                    await asyncio.sleep(0.002)
                    assert await slot.ais_held()

        async def main() -> None:
            await asyncio.gather(*(decorated() for _ in range(4)), *(block() for _ in range(4)))
            assert other.is_free(gate_of(name))

        self.run(main)
        assert witness.most == 2
        assert witness.turns == 8

    def test_a_try(self, name: str, other: OtherSession) -> None:
        @try_advisory_semaphore(name, limit=1, default="busy")
        async def decorated() -> str:
            return "ran"

        async def main() -> None:
            assert await decorated() == "ran"
            slot = await advisory_semaphore(name, limit=1).aacquire()
            assert await asyncio.create_task(decorated()) == "busy"
            async with try_advisory_semaphore(name, limit=1) as second:
                assert not second
            await slot.arelease()
            assert await decorated() == "ran"

        self.run(main)

    def test_they_wait_at_the_gate_in_turn(self, name: str, full: OtherSession, second: OtherSession) -> None:
        """Once a task is at the gate no other one of the same session gets by, in however many tries."""
        order: list[str] = []

        async def work(who: str) -> None:
            async with advisory_semaphore(name, limit=2):
                order.append(who)

        async def main() -> None:
            first = asyncio.create_task(work("first"))
            await self.until(lambda: second.holders(gate_of(name)) == 1)
            async with try_advisory_semaphore(name, limit=3) as slot:
                assert not slot
            later = [asyncio.create_task(work("later")) for _ in range(3)]
            await asyncio.sleep(0.05)
            full.drop(slots_of(name, 2)[0])
            await asyncio.wait_for(asyncio.gather(first, *later), LIMIT)
            assert second.is_free(gate_of(name))

        self.run(main)
        assert order[0] == "first"
        assert len(order) == 4

    @staticmethod
    async def until(condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.005)

    def test_cancelled_at_the_gate(self, name: str, full: OtherSession, second: OtherSession) -> None:
        async def main() -> None:
            for wait in (False, True):
                task = asyncio.create_task(advisory_semaphore(name, limit=2).aacquire())
                await self.until(lambda: second.holders(gate_of(name)) == 1)
                if wait:
                    await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert second.is_free(gate_of(name))
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(advisory_semaphore(name, limit=2).aacquire(), 0.05)
                assert second.is_free(gate_of(name))
            with pytest.raises(LockTimeout, match="2 slots"):
                await advisory_semaphore(name, limit=2, timeout=0.05).aacquire()
            assert second.is_free(gate_of(name))

        self.run(main)

    def test_cancelled_at_any_moment(self, name: str, other: OtherSession) -> None:
        async def work(pause: float) -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(use(), pause)

        async def use() -> None:
            async with advisory_semaphore(name, limit=1):
                await asyncio.sleep(0.004)

        async def main() -> None:
            for round_ in range(8):
                await asyncio.gather(*(work(0.001 * number + 0.0005 * round_) for number in range(1, 12)))
                assert await sync_to_async(mine)() == 0
            assert other.is_free(gate_of(name))

        self.run(main)

    def test_a_connection_that_another_task_closes_while_one_waits(
        self, name: str, full: OtherSession, second: OtherSession
    ) -> None:
        """Its gate is gone with the session: it queues for it again, and does not pass by whoever has it now."""

        async def use() -> None:
            async with advisory_semaphore(name, limit=2) as slot:
                assert await slot.ais_held()

        async def main() -> None:
            task = asyncio.create_task(use())
            await self.until(lambda: second.holders(gate_of(name)) == 1)
            await sync_to_async(self.close_when_somebody_else_is_at)(gate_of(name), second)
            full.drop(slots_of(name, 2)[0])
            await asyncio.sleep(0.5)
            assert not task.done(), "walked past the gate"
            second.drop(gate_of(name))
            await asyncio.wait_for(task, LIMIT)

        self.run(main)

    @staticmethod
    def close_when_somebody_else_is_at(gate: LockKey, second: OtherSession) -> None:
        """Close the connection of the tasks, in their thread, and have another session at the gate when they go on."""
        connections.close_all()
        wait_until(lambda: second.take(gate))


def waits(name: str) -> None:
    with advisory_semaphore(name, limit=2):
        pass


def waits_in_a_transaction(name: str) -> None:
    with transaction.atomic(), advisory_semaphore(name, limit=2):
        pass


def session_scope_in_a_transaction(name: str) -> None:
    with transaction.atomic(), advisory_semaphore(name, limit=2, scope="session"):
        pass


def tries(name: str) -> None:
    with try_advisory_semaphore(name, limit=2) as slot:
        assert slot


def by_hand(name: str) -> None:
    advisory_semaphore(name, limit=2).acquire().release()


def nests(name: str) -> None:
    with advisory_semaphore(name, limit=2), advisory_semaphore(name, limit=2):
        pass


class _OnceBusy:
    """Let the try of a function find the slots busy, so that it goes to the gate; there one is free at once."""

    def __init__(self, function: Callable[[str], None], other: OtherSession, name: str) -> None:
        self.function = function
        self.other = other
        self.slots = slots_of(name, 2)

    def __call__(self, name: str) -> None:
        for slot in self.slots:
            self.other.take(slot)

        def free(sql: str) -> None:
            if "is_open" in sql:
                for slot in self.slots:
                    self.other.drop(slot)

        try:
            with wrapped(after=free):
                self.function(name)
        finally:
            for slot in self.slots:
                while self.other.holders(slot) and self.other.holder(slot) == self.other.pid:
                    self.other.drop(slot)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("function", "busy"),
    [
        (waits, False),
        (waits, True),
        (waits_in_a_transaction, False),
        (waits_in_a_transaction, True),
        (session_scope_in_a_transaction, False),
        (session_scope_in_a_transaction, True),
        (by_hand, False),
        (by_hand, True),
        (tries, False),
        (nests, False),
    ],
)
def test_an_interrupt_at_every_line(
    function: Callable[[str], None], busy: bool, name: str, other: OtherSession
) -> None:
    """Case 67: slots and gate are free at once; or, where the handle was the caller's, with the next lock operation."""
    run = _OnceBusy(function, other, name) if busy else function
    run(name)
    watched = (*slots_of(name, 2), gate_of(name))
    strike_at_every_line(raises(KeyboardInterrupt), lambda: run(name), watched, other)


def test_one_lock_beside_a_semaphore(name: str, other: OtherSession) -> None:
    with advisory_semaphore(name, limit=1), try_advisory_lock(name, using="same") as lock:
        assert lock
