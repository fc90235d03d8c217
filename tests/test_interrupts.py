"""Interrupts at every line of the library while a lock is taken, held and released."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import linecache
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import django.db.backends
import psycopg
import pytest
from django.db import connection, transaction

import django_advisory_lock
from django_advisory_lock import LockKey, advisory_lock, lock_key, try_advisory_lock
from django_advisory_lock.configured import ConfiguredLock
from django_advisory_lock.owners import current_owner
from tests.support import LIMIT, OtherSession, Thread, backend_pid, output, spawn, wait_until

PACKAGE = str(Path(django_advisory_lock.__file__).parent)
# What a take or a release calls: an interrupt strikes there most of the time.
CALLED = tuple(str(Path(module.__file__ or "").parent) for module in (psycopg, django.db.backends))


class TimeLimitExceeded(Exception):
    """What task queues raise from a signal handler, at any line."""


def raises(error: type[BaseException]) -> Callable[[], None]:
    def strike() -> None:
        raise error

    return strike


def sends(number: signal.Signals) -> Callable[[], None]:
    return lambda: signal.raise_signal(number)


INTERRUPTS = {
    "keyboard_interrupt": raises(KeyboardInterrupt),
    "time_limit": raises(TimeLimitExceeded),
    "sigint": sends(signal.SIGINT),
    "sigterm": sends(signal.SIGTERM),
}
Place = tuple[CodeType, int]


@pytest.fixture(autouse=True)
def daemon_manners() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, as servers, task queues and most daemons do."""
    before = signal.signal(signal.SIGTERM, lambda *args: sys.exit(15))
    yield
    signal.signal(signal.SIGTERM, before)


def library_line(frame: FrameType | None) -> Place | None:
    """Return the line of the library that a frame runs for."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


class Interrupter:
    """A trace function that strikes at the n-th line within the library.

    A deep one counts the lines of psycopg and Django that the library calls as well, once for each line of its own.
    """

    def __init__(self, point: int, strike: Callable[[], None], deep: bool) -> None:
        self.left = point
        self.strike = strike
        self.deep = deep
        self.place: Place | None = None
        self.entered: set[tuple[FrameType, int]] = set()
        self.visited: set[tuple[CodeType, int, Place | None]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_name == "__del__":
            return None
        if code.co_filename.startswith(PACKAGE):
            return self.in_frame
        return self.in_frame if self.deep and code.co_filename.startswith(CALLED) and library_line(frame) else None

    def in_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not (self.deep and (self.is_exit_of_with(frame) or self.is_known(frame))):
            self.left -= 1
            if self.left == 0:
                self.place = (frame.f_code, frame.f_lineno)
                self.strike()
        return self.in_frame

    def is_exit_of_with(self, frame: FrameType) -> bool:
        """Whether a `with` line comes again: no signal gets between it and the release of a lock written in C."""
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return False
        comes_again = (frame, frame.f_lineno) in self.entered
        self.entered.add((frame, frame.f_lineno))
        return comes_again

    def is_known(self, frame: FrameType) -> bool:
        visit = (frame.f_code, frame.f_lineno, library_line(frame))
        comes_again = visit in self.visited and not frame.f_code.co_filename.startswith(PACKAGE)
        self.visited.add(visit)
        return comes_again


def interrupt_at(
    point: int, strike: Callable[[], None], function: Callable[[], None], *, deep: bool = False
) -> Place | None:
    """Run a function and strike at its n-th line; return the place, or None where it ended before."""
    interrupter = Interrupter(point, strike, deep)
    before = sys.gettrace()
    sys.settrace(interrupter)
    try:
        function()
    except (KeyboardInterrupt, SystemExit, TimeLimitExceeded, ZeroDivisionError):
        pass
    finally:
        sys.settrace(before)
        interrupter.entered.clear()
    _forget_handled_errors()
    return interrupter.place


def _forget_handled_errors() -> None:
    """Reset what `sys.exc_info()` returns here.

    Where a trace function raises at the end of a `with` block, CPython goes on to handle that error for ever: from
    then on the last error of the thread, with the frames that it went through and all that is in them, stays.
    """
    reset = ctypes.pythonapi.PyErr_SetExcInfo
    reset.argtypes, reset.restype = [ctypes.c_void_p] * 3, None
    reset(None, None, None)


def waits(name: str) -> None:
    with advisory_lock(name):
        pass


def waits_with_timeout(name: str) -> None:
    with advisory_lock(name, timeout=5):
        pass


def fails(name: str) -> None:
    with advisory_lock(name):
        raise ZeroDivisionError


def tries(name: str) -> None:
    with try_advisory_lock(name) as lock:
        assert lock


def nests(name: str) -> None:
    with advisory_lock(name), advisory_lock(name):
        pass


def by_hand(name: str) -> None:
    advisory_lock(name).acquire().release()


def decorated(name: str) -> None:
    advisory_lock(name)(lambda: None)()


def session_scope_in_a_transaction(name: str) -> None:
    with transaction.atomic(), advisory_lock(name, scope="session"):
        pass


def transaction_lock(name: str) -> None:
    with transaction.atomic(), advisory_lock(name):
        pass


def polls(name: str) -> None:
    with advisory_lock(name, poll_interval=0.002):
        pass


def polls_with_timeout(name: str) -> None:
    with advisory_lock(name, timeout=5, poll_interval=0.002):
        pass


def decorated_try(name: str) -> None:
    try_advisory_lock(name)(lambda: None)()


def keyed_by_arguments(name: str) -> None:
    advisory_lock(lambda name: name)(lambda name: None)(name)


def nests_both_modes(name: str) -> None:
    with advisory_lock(name), advisory_lock(name, shared=True), advisory_lock(name, shared=True):
        pass


def waits_in_a_transaction(name: str) -> None:
    with transaction.atomic(), advisory_lock(name, timeout=5):
        pass


def check_free_after(place: Place, keys: Iterable[LockKey], other: OtherSession) -> None:
    """Case 67: free at once; or, where the handle was the caller's to release, with the next lock operation."""
    held = [key for key in keys if not other.is_free(key)]
    exit_of_block = ConfiguredLock.__exit__.__code__
    if current_owner().entered:
        # Python can be interrupted before the first line of any __exit__: the block was never told that it ended.
        assert place[0] is exit_of_block
        assert place[1] - exit_of_block.co_firstlineno < 5
        current_owner().entered.clear()
    if not held:
        return
    gc.collect()
    with advisory_lock("next"):
        wait_until(lambda: all(other.is_free(key) for key in held), f"free after {place}")


def strike_at_every_line(
    strike: Callable[[], None], run: Callable[[], None], keys: Iterable[LockKey], other: OtherSession
) -> None:
    """Run something again and again, and strike one line later each time, until it comes to its end."""
    keys = list(keys)
    for point in range(1, 3000):
        place = interrupt_at(point, strike, run)
        if place is None:
            assert point > 100
            return
        check_free_after(place, keys, other)
    pytest.fail("never ran to its end")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_at_every_step_of_the_end_of_an_inner_block(name: str, other: OtherSession) -> None:
    """Also within a line, where a call has returned and its result has no name yet: the outer block keeps its lock."""
    lock, key = advisory_lock(name), lock_key(name)
    for point in itertools.count(1):
        with lock as outer:
            lock.__enter__()
            stepper = Stepper(point)
            before = sys.gettrace()
            sys.settrace(stepper)
            try:
                lock.__exit__(None, None, None)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            _forget_handled_errors()
            assert outer.is_held(), point
            assert not other.is_free(key), point
            if len(current_owner().entered[lock]) == 2:
                assert stepper.place == ConfiguredLock.__exit__.__code__  # it was not told yet
                lock.__exit__(None, None, None)
        wait_until(lambda: other.is_free(key), f"free after {point}")
        if stepper.place is None:
            assert point > 100
            return


class Stepper:
    """A trace function that interrupts at the n-th instruction of what finds and forgets blocks."""

    def __init__(self, point: int) -> None:
        self.left = point
        self.place: CodeType | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if Path(frame.f_code.co_filename).name not in ("configured.py", "owners.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                self.place = frame.f_code
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


USAGES = [
    waits,
    waits_with_timeout,
    fails,
    tries,
    nests,
    by_hand,
    decorated,
    decorated_try,
    keyed_by_arguments,
    nests_both_modes,
    session_scope_in_a_transaction,
    transaction_lock,
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("function", "interrupt"),
    [
        *((function, "sigint") for function in USAGES),
        *((function, "sigterm") for function in (waits, decorated, session_scope_in_a_transaction, transaction_lock)),
        *((function, "time_limit") for function in (waits, waits_with_timeout, fails, by_hand)),
    ],
)
def test_at_every_line(function: Callable[[str], None], interrupt: str, name: str, other: OtherSession) -> None:
    with contextlib.suppress(ZeroDivisionError):
        function(name)
    strike_at_every_line(INTERRUPTS[interrupt], lambda: function(name), [lock_key(name)], other)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("function", "interrupt"),
    [
        (waits, "sigint"),
        (waits_with_timeout, "sigterm"),
        (polls, "sigterm"),
        (polls_with_timeout, "sigint"),
        (waits_in_a_transaction, "sigterm"),
        (session_scope_in_a_transaction, "sigint"),
    ],
)
def test_at_every_line_of_a_wait(
    function: Callable[[str], None], interrupt: str, name: str, other: OtherSession
) -> None:
    """Another session holds the lock, and releases it once it is waited for."""
    key = lock_key(name)
    rival = OtherSession()
    function(name)
    for point in range(1, 2000):
        with rival_who_gives_way(rival, key, backend_pid()):
            place = interrupt_at(point, INTERRUPTS[interrupt], lambda: function(name))
        if place is None:
            assert point > 100
            rival.close()
            return
        check_free_after(place, [lock_key(name)], other)
    pytest.fail("never ran to its end")


@contextlib.contextmanager
def rival_who_gives_way(rival: OtherSession, key: LockKey, pid: int) -> Iterator[None]:
    over = threading.Event()
    tried = "SELECT query LIKE '%%pg_try%%' FROM pg_stat_activity WHERE pid = %s"

    def give_way() -> None:
        wait_until(lambda: over.is_set() or rival.waiters(key) or rival.one(tried, [pid]), "waited for, or over")
        assert rival.drop(key)

    assert rival.take(key)
    giving_way = Thread(give_way)
    try:
        yield
    finally:
        over.set()
        giving_way.result()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("function", "interrupt"),
    [
        (waits, "sigint"),
        (session_scope_in_a_transaction, "sigterm"),
        (transaction_lock, "sigint"),
    ],
)
def test_in_what_the_library_calls(
    function: Callable[[str], None], interrupt: str, name: str, other: OtherSession
) -> None:
    """At every line of psycopg and of Django's cursor: what the server was told may be known to nobody then."""
    function(name)
    for point in range(1, 5000):
        connection.close_if_unusable_or_obsolete()
        connection.ensure_connection()
        place = interrupt_at(point, INTERRUPTS[interrupt], lambda: function(name), deep=True)
        if place is None:
            assert point > 300
            return
        check_free_after(place, [lock_key(name)], other)
    pytest.fail("never ran to its end")


WORKER = """
import contextlib, gc, random, signal, sys, warnings
from django.db import Error, connection, connections, transaction
from django_advisory_lock import advisory_lock
from django_advisory_lock.transactions import is_idle
from django_advisory_lock.owners import current_owner

warnings.simplefilter("ignore", ResourceWarning)
name, armed = sys.argv[1], False


def stop(number, frame):
    global armed
    if armed:
        armed = False
        raise SystemExit if number == signal.SIGTERM else KeyboardInterrupt


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)


def block():
    with advisory_lock(name):
        pass


def with_timeout():
    with advisory_lock(name, timeout=30), advisory_lock(name, shared=True):
        pass


def in_a_transaction():
    with transaction.atomic(), advisory_lock(name):
        pass


def session_in_a_transaction():
    with transaction.atomic(), advisory_lock(name, timeout=30, scope="session"):
        pass


def by_polling():
    with advisory_lock(name, poll_interval=0.001):
        pass


usages = [block, with_timeout, in_a_transaction, session_in_a_transaction, by_polling]


def start_afresh():
    '''Give up a connection that an interrupt inside Django's atomic() has left in a transaction, or for one.'''
    if connection.in_atomic_block or not connection.autocommit or not is_idle(connection.connection):
        if connection.connection is not None:
            connection.connection.close()
        del connections["default"]


while line := sys.stdin.readline():
    usage = usages[int(line) % len(usages)]
    try:
        armed = True
        print("at work", flush=True)
        while True:
            try:
                usage()
            except Error:  # what atomic() makes of an interrupt in its COMMIT
                start_afresh()
                raise SystemExit
    except (KeyboardInterrupt, SystemExit):
        armed = False
    start_afresh()
    # Python may leave out the end of a block that a signal hits in its first step; then the handle is still here.
    left = [handle for blocks in current_owner().entered.values() for _, handle in blocks]
    current_owner().entered.clear()
    for handle in left:
        with contextlib.suppress(Exception):
            handle.release()
    left = handle = None
    gc.collect()
    with advisory_lock(name, "next"):
        pass
    print("free" if current_owner().is_vacant else "held", flush=True)
"""


class Worker:
    """The other end of such a process."""

    def __init__(self, name: str) -> None:
        self.process = spawn(WORKER, name)

    def work(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        assert self.hears(LIMIT) == "at work\n"

    def hears(self, seconds: float) -> str | None:
        """Return a line, or None where none comes in time."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return None
        return self.process.stdout.readline() or output(self.process)

    def is_hit(self) -> str | None:
        """Send a signal until it is heard: Python swallows what is raised in the finaliser of an object."""
        for _ in range(5):
            self.process.send_signal(random.choice([signal.SIGTERM, signal.SIGINT]))
            if line := self.hears(LIMIT / 5):
                return line
        return None


@pytest.mark.slow
@pytest.mark.parametrize(("contended", "rounds"), [(False, 140), (True, 60)])
def test_a_worker_that_goes_on(contended: bool, rounds: int, name: str, other: OtherSession) -> None:
    """Case 67: signals at random moments of one long-lived process; each time the key is what the worker says."""
    key = lock_key(name)
    worker = Worker(name)
    try:
        for number in range(rounds):
            if contended:
                assert other.take(key)
            worker.work(number)
            time.sleep(random.uniform(0, 0.01))  # the moment of the signal is what varies
            if contended:
                worker.process.send_signal(signal.SIGTERM)
                wait_until(lambda: other.waiters(key) == 0, "nobody is left in the queue")
                assert worker.hears(LIMIT) == "free\n"
                assert other.drop(key)
            else:
                assert worker.is_hit() == "free\n"
            wait_until(lambda: other.is_free(key), f"free in round {number}")
        output(worker.process)
    finally:
        worker.process.kill()
        worker.process.communicate()


@pytest.mark.parametrize("function", [waits, tries, by_hand, decorated, transaction_lock])
def test_nothing_of_the_library_runs_as_a_finaliser(
    function: Callable[[str], None], name: str, other: OtherSession
) -> None:
    """Python swallows what a signal handler raises in a finaliser, so that the SIGTERM of a deployment went unheard."""
    ran: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            ran.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function(name)
    finally:
        sys.setprofile(before)
    assert "__del__" not in ran
