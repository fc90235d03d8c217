"""The surroundings that projects really have: forks, threads, pools, request cycles, wrappers, roles, settings."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from django.db import close_old_connections, connection, connections, transaction

from django_advisory_lock import (
    AdvisoryLockError,
    LockHandle,
    LockLost,
    advisory_lock,
    lock_key,
    try_advisory_lock,
)
from tests.support import LIMIT, OtherSession, Thread, backend_pid, extra_alias, output, spawn, wait_until
from tests.testapp.models import Account


@contextlib.contextmanager
def holding(moment: str, name: str, using: str = "default") -> Iterator[LockHandle]:
    """Hold a lock in one of the ways there are."""
    shared, inside = "shared" in moment, "atomic" in moment
    with transaction.atomic(using=using) if inside else contextlib.nullcontext():
        scope: Any = "session" if "session" in moment else "auto"
        with advisory_lock(name, using=using, shared=shared, scope=scope) as lock:
            yield lock


WAYS = ["session", "shared session", "atomic", "shared atomic", "session in atomic", "shared session in atomic"]
ways = pytest.mark.parametrize("way", WAYS)


# Forks


def fork() -> int:
    """Fork. The child dies for certain: at the latest by the alarm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork with threads
        pid = os.fork()
    if pid == 0:  # pragma: no cover - a child is not measured
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LIMIT))
    return pid


def wait_for_end(pid: int) -> None:
    wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the end of the child")


def in_child(function: Callable[[], object]) -> str:
    """Return the repr of a function's result in a forked child, which ends without any clean-up."""
    read, write = os.pipe()
    pid = fork()
    if pid == 0:  # pragma: no cover
        try:
            answer = repr(function())
        except BaseException as error:
            answer = f"raised {error!r}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    wait_for_end(pid)
    with os.fdopen(read) as pipe:
        return pipe.read()


@contextlib.contextmanager
def only_the_parent_comes_out() -> Iterator[None]:
    """Let a child run into the end of this block, and no further."""
    parent = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != parent:  # pragma: no cover
            os._exit(0)


class TestFork:
    """Whatever a forked child does, its parent goes on holding, and releases."""

    @ways
    @pytest.mark.parametrize("error", [None, KeyError, SystemExit])
    def test_a_child_that_leaves_the_blocks(
        self, way: str, error: type[BaseException] | None, name: str, other: OtherSession
    ) -> None:
        """Its code goes on behind the fork: by the end of the block, by an exception, by sys.exit()."""
        with only_the_parent_comes_out(), holding(way, name) as lock:
            if "atomic" in way:
                Account.objects.create(name=name)
            pid = fork()
            if pid:
                wait_for_end(pid)
                assert lock.is_held()
                assert not other.is_free(lock_key(name))
            elif error is not None:  # pragma: no cover
                raise error
        assert other.is_free(lock_key(name))
        if "atomic" in way:
            assert Account.objects.filter(name=name).delete()[0] == 1

    @ways
    def test_a_child_with_locks_of_its_own(self, way: str, name: str, other: OtherSession) -> None:
        with holding(way, name) as lock:
            pid = backend_pid()

            def work() -> list[object]:
                with try_advisory_lock(name) as same:
                    got = [same.acquired]
                with advisory_lock(name, "child") as own, transaction.atomic(), advisory_lock(name, "atomic") as inner:
                    return [*got, own.is_held(), inner.is_held(), backend_pid() != pid, lock.is_held()]

            assert in_child(work) == "[False, True, True, True, False]"
            assert lock.is_held()
            assert backend_pid() == pid
        assert other.is_free(lock_key(name))

    @ways
    @pytest.mark.parametrize("close", [connections.close_all, connection.close, close_old_connections])
    def test_a_child_that_closes_its_connections(
        self, way: str, close: Callable[[], None], name: str, other: OtherSession
    ) -> None:
        """As initializers of worker processes do."""
        with holding(way, name) as lock:
            pid = backend_pid()
            assert in_child(close) == "None"
            assert lock.is_held()
            assert backend_pid() == pid
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize("way", ["session", "atomic", "session in atomic"])
    @pytest.mark.parametrize("ending", ["sys.exit()", "raise KeyError"])
    def test_a_child_that_ends_as_python_does(self, way: str, ending: str, name: str, other: OtherSession) -> None:
        """Exit handlers run, objects are finalized: behind the blocks, with the handle and the connection alive."""
        code = f"""
import os, sys
from django.db import connection, connections, transaction
from django_advisory_lock import advisory_lock, try_advisory_lock
scope = "auto" if {way!r} == "atomic" else "session"
atomic = transaction.atomic()
if "atomic" in {way!r}:
    atomic.__enter__()
lock = advisory_lock({name!r}, scope=scope).acquire()
pid = os.fork()
if pid == 0:
    with advisory_lock({name!r}, "child"), try_advisory_lock({name!r}) as mine:
        assert not mine
    sys.stderr = open(os.devnull, "w")
    {ending}
else:
    os.waitpid(pid, 0)
    print(lock.is_held())
    lock.release()
    if "atomic" in {way!r}:
        atomic.__exit__(None, None, None)
    connections.close_all()
"""
        assert output(spawn(code)) == "True\n"
        other.wait_until_free(lock_key(name))

    def test_a_grandchild(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name) as lock:

            def grandchild() -> list[bool]:
                return [bool(try_advisory_lock(name).acquire()), bool(try_advisory_lock(name, "child").acquire())]

            def child() -> list[object]:
                with advisory_lock(name, "child") as own:
                    return [in_child(grandchild), own.is_held(), bool(try_advisory_lock(name).acquire())]

            assert in_child(child) == "['[False, False]', True, False]"
            assert lock.is_held()
        assert other.is_free(lock_key(name))

    def test_a_fork_while_other_threads_hold_and_wait(self, name: str, other: OtherSession) -> None:
        """What those threads had is garbage in the child, and nobody there finalizes it on the server."""
        key = lock_key(name)

        def hold() -> bool:
            with advisory_lock(name, "held") as lock:
                with advisory_lock(name):
                    pass
                return lock.is_held()

        other.take(key)
        waiting = [Thread(hold)]
        wait_until(lambda: other.holders(lock_key(name, "held")) == 1)
        other.wait_for_waiters(key)

        def child() -> list[bool]:
            gc.collect()
            with (
                advisory_lock(name, "child"),
                try_advisory_lock(name) as first,
                try_advisory_lock(name, "held") as held,
            ):
                gc.collect()
                return [bool(first), bool(held)]

        assert in_child(child) == "[False, False]"
        assert (other.waiters(key), other.holders(lock_key(name, "held"))) == (1, 1)
        other.drop(key)
        assert [thread.result() for thread in waiting] == [True]

    def test_a_fork_inside_a_thread(self, name: str, other: OtherSession) -> None:
        def work() -> list[object]:
            with advisory_lock(name) as lock:
                return [in_child(lambda: bool(try_advisory_lock(name).acquire())), lock.is_held()]

        with advisory_lock(name, "main") as lock:
            assert Thread(work).result() == ["False", True]
            assert lock.is_held()

    @pytest.mark.parametrize("alias", ["default", "persistent", "healthy", "prepared"])
    def test_workers_forked_after_the_application_was_loaded(
        self, alias: str, name: str, other: OtherSession, tmp_path: Path
    ) -> None:
        """As gunicorn --preload: the connection was opened, and locks used, before the fork."""
        self.compete(alias, name, tmp_path)

    @pytest.mark.parametrize("size", [1, 4])
    @pytest.mark.parametrize("used_for", ["locks", "queries"])
    def test_workers_forked_with_a_pool(
        self, size: int, used_for: str, name: str, other: OtherSession, tmp_path: Path
    ) -> None:
        """The idle connections of a pool are the parent's: two processes on one session would both be let in."""
        with extra_alias(f"pool-{name}", {"pool": {"min_size": 1, "max_size": size, "timeout": 5}}) as alias:
            if used_for == "locks":
                with advisory_lock(name, using=alias):
                    pass
            pid = backend_pid(alias)
            connections[alias].close()

            def work() -> list[bool]:
                with try_advisory_lock(name, using=alias) as lock:
                    own = backend_pid(alias) != pid
                    return [lock.acquired, own, in_child(try_it) == "False"]

            def try_it() -> bool:
                with try_advisory_lock(name, using=alias) as lock:
                    return lock.acquired

            assert in_child(work) == "[True, True, True]"
            with advisory_lock(name, using=alias, timeout=LIMIT) as lock:
                assert in_child(try_it) == "False"
                assert lock.is_held()
            connections[alias].close()

    def compete(self, alias: str, name: str, tmp_path: Path) -> None:
        from tests.testbackend.workers import count

        path = tmp_path / "counter"
        path.write_text("0")
        with advisory_lock(name, using=alias):
            pass
        backend_pid(alias)

        def work() -> NoReturn:  # pragma: no cover
            try:
                for _ in range(10):
                    with advisory_lock(name, using=alias, timeout=LIMIT):
                        count(str(path))
            finally:
                os._exit(0)

        pids = [fork() or work() for _ in range(3)]
        for _ in range(10):
            with advisory_lock(name, using=alias, timeout=LIMIT):
                count(str(path))
        for pid in pids:
            wait_for_end(pid)
        assert path.read_text() == "40"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
class TestMultiprocessing:
    """Processes of the standard library, by each of its ways to start one."""

    def run(self, method: str, code: str, *arguments: str) -> list[str]:
        prelude = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from django.db import connections
from django_advisory_lock import LockTimeout, advisory_lock, lock_key
from tests.testbackend import workers
context = multiprocessing.get_context(sys.argv[1])
name, path = sys.argv[2:]
"""
        return output(spawn(prelude + code, method, *arguments)).split()

    def test_no_one_else_gets_in(self, method: str, name: str, other: OtherSession) -> None:
        """A process, and an executor that hands an error back."""
        code = """
queue = context.SimpleQueue()
with advisory_lock(name) as lock:
    process = context.Process(target=workers.put_is_taken, args=(queue, name))
    process.start()
    print(queue.get())
    process.join()
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        error = executor.submit(workers.time_out, name).exception()
    print(type(error) is LockTimeout, error.key == lock_key(name), error.using, name in str(error))
    print(process.exitcode, lock.is_held())
"""
        assert self.run(method, code, name, "") == ["True", "True", "True", "default", "True", "0", "True"]

    def test_a_pool_that_competes(self, method: str, name: str, other: OtherSession, tmp_path: Path) -> None:
        """Under a lock that travels in a pickle, and under one at module level."""
        code = """
from functools import partial
lock = advisory_lock(name, timeout=30)
with lock:
    pass
connections.close_all()
with context.Pool(3, initializer=workers.close_connections) as pool:
    pool.map(partial(workers.count_under, lock), [path] * 30, chunksize=1)
    print(open(path).read())
    pool.map(workers.count_under_module_level, [path] * 30, chunksize=1)
    print(open(path).read())
    pool.close()
    pool.join()
"""
        path = tmp_path / "counter"
        path.write_text("0")
        assert self.run(method, code, name, str(path)) == ["30", "60"]


# Threads


class TestThreads:
    def test_one_that_fails_while_it_holds_by_hand(self, name: str, other: OtherSession) -> None:
        handles = []

        def work() -> None:
            handles.append(advisory_lock(name).acquire())
            raise KeyError

        with pytest.raises(KeyError):
            Thread(work).result()
        other.wait_until_free(lock_key(name))  # with the connection of the thread
        assert not handles[0].is_held()
        with pytest.raises(LockLost):
            handles[0].release()

    def test_the_next_job_on_a_thread(self, name: str, other: OtherSession) -> None:
        """Held by hand from job to job, by the thread alone."""
        kept = []

        def take() -> None:
            kept.append(advisory_lock(name).acquire())

        def is_let_in() -> bool:
            with try_advisory_lock(name) as lock:
                return lock.acquired

        def drop() -> None:
            kept[0].release()

        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
            one.submit(take).result(LIMIT)
            assert one.submit(is_let_in).result(LIMIT) is True
            assert two.submit(is_let_in).result(LIMIT) is False
            with pytest.raises(AdvisoryLockError, match="another thread"):
                two.submit(drop).result(LIMIT)
            assert not other.is_free(lock_key(name))
            one.submit(drop).result(LIMIT)
            assert other.is_free(lock_key(name))
            for executor in (one, two):
                executor.submit(connections.close_all).result(LIMIT)

    def test_a_handle_that_a_job_dropped(self, name: str, other: OtherSession) -> None:
        """The thread lives on, and with it the session: the next job that locks anything there frees it."""

        def take() -> None:
            advisory_lock(name).acquire()
            gc.collect()

        def lock_another() -> None:
            with advisory_lock(name, "another"):
                pass

        with ThreadPoolExecutor(1) as executor:
            with pytest.warns(ResourceWarning, match="without release"):
                executor.submit(take).result(LIMIT)
            assert not other.is_free(lock_key(name))
            executor.submit(lock_another).result(LIMIT)
            assert other.is_free(lock_key(name))
            executor.submit(connections.close_all).result(LIMIT)

    def test_a_daemon_thread_at_the_end_of_the_process(self, name: str, other: OtherSession) -> None:
        code = f"""
import threading
from django_advisory_lock import advisory_lock
held, never = threading.Event(), threading.Event()
def hold():
    with advisory_lock({name!r}):
        held.set()
        never.wait()
threading.Thread(target=hold, daemon=True).start()
print(held.wait(20))
kept = advisory_lock({name!r}, "main").acquire()
"""
        process = spawn(code)
        assert output(process) == "True\n"
        other.wait_until_free(lock_key(name))
        other.wait_until_free(lock_key(name, "main"))
