"""The surroundings that projects really have: forks, threads, pools, request cycles, wrappers, roles, settings."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.core.signals import request_finished, request_started
from django.db import (
    DatabaseError,
    InterfaceError,
    OperationalError,
    close_old_connections,
    connection,
    connections,
    reset_queries,
    transaction,
)
from django.db.backends.signals import connection_created
from django.http import HttpRequest, JsonResponse
from django.test import AsyncClient, Client, TestCase, override_settings
from django.urls import path
from psycopg.rows import namedtuple_row

from django_advisory_lock import (
    AdvisoryLockError,
    LockHandle,
    LockLost,
    LockTimeout,
    advisory_lock,
    lock_key,
    try_advisory_lock,
)
from django_advisory_lock.inspection import holders_of
from tests.support import (
    LIMIT,
    OtherSession,
    Thread,
    backend_pid,
    extra_alias,
    fork,
    in_child,
    output,
    spawn,
    value,
    wait_until,
)
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


def wait_for_end(pid: int) -> None:
    wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the end of the child")


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
    @pytest.mark.parametrize("error", [None, SystemExit])
    def test_a_child_that_leaves_the_blocks(
        self, way: str, error: type[BaseException] | None, name: str, other: OtherSession
    ) -> None:
        """Its code goes on behind the fork: to the end of the blocks, or out of them by an error, as sys.exit() is."""
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

    @pytest.mark.parametrize("way", ["session", "atomic", "session in atomic"])
    @pytest.mark.parametrize("close", [connections.close_all, close_old_connections])
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
    @pytest.mark.parametrize("used_for", ["locks", "queries", "queries in a thread"])
    def test_workers_forked_with_a_pool(
        self, size: int, used_for: str, name: str, other: OtherSession, tmp_path: Path
    ) -> None:
        """The idle connections of a pool are the parent's: two processes on one session would both be let in."""
        with extra_alias(f"pool-{name}", {"pool": {"min_size": 1, "max_size": size, "timeout": 5}}) as alias:
            if used_for == "locks":
                with advisory_lock(name, using=alias):
                    pass
            if used_for == "queries in a thread":
                Thread(lambda: backend_pid(alias)).result()
            else:
                backend_pid(alias)
                connections[alias].close()
            now = other.one("SELECT clock_timestamp()")
            began = "SELECT backend_start > %s FROM pg_stat_activity WHERE pid = pg_backend_pid()"

            def work() -> list[bool]:
                with try_advisory_lock(name, using=alias) as lock:
                    return [lock.acquired, value(began, [now], alias), in_child(try_it) == "False"]

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

        def is_lost() -> bool:
            gc.collect()
            try:
                handles[0].release()
            except AdvisoryLockError as error:  # still that of the thread, for a moment after its join
                return isinstance(error, LockLost)
            return False

        wait_until(is_lost, "LockLost")

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


# Pools


@pytest.fixture
def pool(request: pytest.FixtureRequest, name: str, other: OtherSession) -> Iterator[str]:
    """An alias with a pool of its own; the parameter is its options."""
    options = {"min_size": 1, "max_size": 1, "timeout": LIMIT, **request.param}
    changes = {"CONN_HEALTH_CHECKS": options.pop("checks", False)}
    with extra_alias(f"pool-{name}", {"pool": options}, **changes) as alias:
        yield alias


def pools(*options: dict[str, object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pool", options, indirect=True, ids=str)


class TestPools:
    """Django's `pool` option."""

    @pools({"max_size": 4})
    def test_a_holder_and_as_many_waiters_as_there_are_connections(
        self, pool: str, name: str, other: OtherSession
    ) -> None:
        """Case 33: whoever holds has its connection, and goes on."""
        holds, goes_on = threading.Event(), threading.Event()

        def hold() -> list[int]:
            with advisory_lock(name, using=pool):
                holds.set()
                assert goes_on.wait(LIMIT)
                return [backend_pid(pool) for _ in range(5)]

        def wait() -> int:
            with advisory_lock(name, using=pool, timeout=LIMIT):
                return backend_pid(pool)

        holder = Thread(hold)
        assert holds.wait(LIMIT)
        waiters = [Thread(wait) for _ in range(3)]
        other.wait_for_waiters(lock_key(name), 3)
        goes_on.set()
        assert len(set(holder.result())) == 1
        assert len({waiter.result() for waiter in waiters}) <= 4

    @pools({"max_size": 4}, {})
    def test_a_key_for_each(self, pool: str, name: str, other: OtherSession) -> None:
        """Case 33: as many and more threads than connections, each locks its own key and then queries."""

        def work(number: int) -> int:
            with advisory_lock(name, number, using=pool), transaction.atomic(using=pool):
                with advisory_lock(name, number, "inner", using=pool):
                    return backend_pid(pool)

        threads = [Thread(partial(work, number)) for number in range(8)]
        assert all(thread.result() for thread in threads)

    @pools({"timeout": 0.2})
    def test_an_exhausted_pool(self, pool: str, name: str, other: OtherSession) -> None:
        """Where the holder has the only connection nobody can even wait: bounded by the pool's own timeout."""

        def wait(**options: Any) -> None:
            with pytest.raises(OperationalError, match="couldn't get a connection"):
                advisory_lock(name, using=pool, **options).acquire()

        with advisory_lock(name, using=pool) as lock:
            for options in ({}, {"timeout": LIMIT}, {"poll_interval": 0.01}):
                Thread(partial(wait, **options)).result()
            assert lock.is_held()
        assert other.is_free(lock_key(name))

    @pools({"checks": True})
    def test_a_check_that_finds_a_dead_connection(self, pool: str, name: str, other: OtherSession) -> None:
        pid = backend_pid(pool)
        connections[pool].close()
        other.kill(pid)
        with advisory_lock(name, using=pool) as lock:
            assert lock.is_held()
            assert backend_pid(pool) != pid
        assert other.is_free(lock_key(name))

    @pools({"max_lifetime": 0.01}, {"max_idle": 0.01, "min_size": 0})
    def test_recycling_leaves_a_held_connection_alone(self, pool: str, name: str, other: OtherSession) -> None:
        for _ in range(3):
            with advisory_lock(name, using=pool) as lock:
                pid = backend_pid(pool)
                connections[pool].pool.check()  # type: ignore[attr-defined]
                assert lock.is_held()
                assert backend_pid(pool) == pid
            assert other.is_free(lock_key(name))
            connections[pool].close()

    @pools({})
    def test_a_pool_that_is_closed_under_the_lock(self, pool: str, name: str, other: OtherSession) -> None:
        with advisory_lock(name, using=pool) as lock:
            connections[pool].close_pool()  # type: ignore[attr-defined]
            assert lock.is_held()
            assert Thread(lambda: try_and_release(name, using=pool)).result() is False
        assert other.is_free(lock_key(name))
        with pytest.raises(LockLost), advisory_lock(name, using=pool):
            connections[pool].close_pool()  # type: ignore[attr-defined]
            connections[pool].close()
            other.wait_until_free(lock_key(name))
        with advisory_lock(name, using=pool) as lock:
            assert lock.is_held()

    @pools({})
    @ways
    def test_whatever_ends_the_borrowing(self, pool: str, way: str, name: str, other: OtherSession) -> None:
        """The next borrower finds nothing that the last one locked, however that was."""
        with contextlib.suppress(LockLost, InterfaceError), holding(way, name, pool):
            connections[pool].close()
        other.wait_until_free(lock_key(name))
        assert Thread(lambda: try_and_release(name, using=pool)).result() is True


def try_and_release(*key: Any, **options: Any) -> bool:
    with try_advisory_lock(*key, **options) as lock:
        return lock.acquired


# The life of a connection, as Django's request cycle, and people, manage it

AGES: list[dict[str, Any]] = [
    {"CONN_MAX_AGE": 0},
    {"CONN_MAX_AGE": None},
    {"CONN_MAX_AGE": 600},
    {"CONN_MAX_AGE": 0.0001},
    {"CONN_MAX_AGE": 0, "CONN_HEALTH_CHECKS": True},
    {"CONN_MAX_AGE": 600, "CONN_HEALTH_CHECKS": True},
]


def one_request(alias: str) -> None:
    """What Django does around each request."""
    request_started.send(sender=None)
    assert backend_pid(alias)
    request_finished.send(sender=None)


def with_errors(alias: str) -> None:
    with pytest.raises(DatabaseError):
        value("SELECT 1/0", alias=alias)
    close_old_connections()


HOUSEKEEPING: list[Callable[[str], object]] = [
    one_request,
    with_errors,
    lambda alias: connections[alias].close_if_unusable_or_obsolete(),
    lambda alias: connections[alias].is_usable(),
    lambda alias: connections[alias].ensure_connection(),
    lambda alias: reset_queries(),
]


@pytest.mark.parametrize("age", AGES, ids=str)
class TestHousekeeping:
    def test_it_leaves_a_session_lock_alone(self, age: dict[str, Any], name: str, other: OtherSession) -> None:
        """Case 3."""
        with extra_alias(f"aged-{name}", **age) as alias:
            for housekeeping in HOUSEKEEPING:
                with advisory_lock(name, using=alias) as lock:
                    pid = backend_pid(alias)
                    housekeeping(alias)
                    assert lock.is_held(), housekeeping
                    assert backend_pid(alias) == pid, housekeeping
                assert other.is_free(lock_key(name))
                close_old_connections()
                assert (connections[alias].connection is None) is (age["CONN_MAX_AGE"] in (0, 0.0001))

    def test_a_request_after_the_session_died(self, age: dict[str, Any], name: str, other: OtherSession) -> None:
        """A health check opens another session in silence. The lock is not taken for one on that."""
        with extra_alias(f"aged-{name}", **age) as alias:
            with pytest.raises(LockLost), advisory_lock(name, using=alias) as lock:
                pid = backend_pid(alias)
                other.kill(pid)
                with contextlib.suppress(DatabaseError):
                    one_request(alias)
                if age.get("CONN_HEALTH_CHECKS"):
                    assert backend_pid(alias) != pid
                assert not lock.is_held()
            assert other.is_free(lock_key(name))
            with advisory_lock(name, using=alias) as lock:
                assert lock.is_held()

    def test_a_health_check_inside_a_nested_take(self, age: dict[str, Any], name: str, other: OtherSession) -> None:
        with extra_alias(f"aged-{name}", **age) as alias:
            with pytest.raises(LockLost), advisory_lock(name, using=alias) as outer:
                other.kill(backend_pid(alias))
                close_old_connections()
                with contextlib.suppress(OperationalError), advisory_lock(name, using=alias) as inner:
                    assert inner.is_held()
                    assert not outer.is_held()
            assert other.is_free(lock_key(name))


def connect_again() -> None:
    old = connection.connection
    connection.connect()
    old.close()


def without_autocommit() -> None:
    connection.set_autocommit(False)
    close_old_connections()


def discard_all() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DISCARD ALL")


@pytest.mark.parametrize("end", [connect_again, without_autocommit, discard_all])
def test_what_ends_a_session_lock_is_reported(end: Callable[[], None], name: str, other: OtherSession) -> None:
    with pytest.raises(LockLost), advisory_lock(name) as lock:
        end()
        assert not lock.is_held()
        other.wait_until_free(lock_key(name))
    with advisory_lock(name) as lock:
        assert lock.is_held()


# What aliases are set up with


def row_of_names(cursor: Any) -> Any:
    return namedtuple_row(cursor)


ALIASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "server-side binding": ({"server_side_binding": True}, {}),
    "prepared": ({"prepare_threshold": 0}, {}),
    "bound and prepared": ({"server_side_binding": True, "prepare_threshold": 0}, {}),
    "generic plans": ({"prepare_threshold": 0, "options": "-c plan_cache_mode=force_generic_plan"}, {}),
    "search path": ({"options": "-c search_path=nowhere"}, {}),
    "empty search path": ({"options": "-c search_path="}, {}),
    "read only": ({"options": "-c default_transaction_read_only=on"}, {}),
    "deferrable": ({"options": "-c default_transaction_deferrable=on"}, {}),
    "timeouts": ({"options": "-c lock_timeout=40ms -c statement_timeout=9s -c idle_session_timeout=9s"}, {}),
    "parallel": ({"options": "-c {parallel}=on"}, {}),
    "no shortcuts": ({"options": "-c enable_seqscan=off -c enable_hashjoin=off -c enable_nestloop=off"}, {}),
    "formats": ({"options": "-c DateStyle=German -c IntervalStyle=iso_8601 -c extra_float_digits=-15"}, {}),
    "backslashes": ({"options": "-c standard_conforming_strings=off -c escape_string_warning=off"}, {}),
    "isolation 2": ({"isolation_level": 2}, {}),
    "isolation 3": ({"isolation_level": 3}, {}),
    "isolation 4": ({"isolation_level": 4}, {}),
    "serializable by default": ({"options": "-c default_transaction_isolation=serializable"}, {}),
    "rows with names": ({"row_factory": row_of_names}, {}),
    "role": ({"assume_role": "pg_monitor"}, {}),
    "time zone": ({}, {"TIME_ZONE": "Asia/Kathmandu"}),
    "application": ({"application_name": "Käse 100 % 'x'"}, {}),
    "pool": ({"pool": {"min_size": 1, "max_size": 4}}, {}),
    "pool with checks": ({"pool": True}, {"CONN_HEALTH_CHECKS": True}),
    "own engine": ({}, {"ENGINE": "tests.testbackend"}),
    "no server-side cursors": ({}, {"DISABLE_SERVER_SIDE_CURSORS": True}),
    "persistent with checks": ({}, {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}),
}


@pytest.mark.filterwarnings("ignore:The lock .* was taken inside a .* transaction:RuntimeWarning")
@pytest.mark.parametrize("kind", ALIASES)
class TestAliases:
    """Every way to lock, on every kind of alias."""

    @pytest.fixture
    def alias(self, kind: str, name: str, other: OtherSession) -> Iterator[str]:
        options, changes = ALIASES[kind]
        if kind == "parallel":  # PostgreSQL 16 gave it another name
            parallel = "debug_parallel_query" if other.raw.info.server_version >= 160000 else "force_parallel_mode"
            options = {"options": options["options"].format(parallel=parallel)}
        with extra_alias(f"kind-{name}", options, **changes) as alias:
            yield alias

    def test_every_way(self, alias: str, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        for way in WAYS:
            with holding(way, name, alias) as lock:
                assert lock.is_held()
                assert not other.take(key)
                assert other.take(key, shared=True) is ("shared" in way)
                if "shared" in way:
                    other.drop(key, shared=True)
                with holding(way, name, alias) as nested:
                    assert nested.is_held()
                assert lock.is_held()
            assert other.is_free(key)
        with pytest.raises(LockLost), advisory_lock(name, using=alias) as lock:
            other.kill(backend_pid(alias))
            assert not lock.is_held()
        with advisory_lock(name, using=alias) as lock:
            assert lock.is_held()

    def test_every_wait(self, alias: str, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        holder = rf"held by pid {other.pid} \(other-session\)"
        for inside in (False, True):
            other.take(key)
            assert [lock.pid for lock in holders_of(name, using=alias)] == [other.pid]
            with transaction.atomic(using=alias) if inside else contextlib.nullcontext():
                own = value("SHOW lock_timeout", alias=alias)
                for options in ({"timeout": 0}, {"timeout": 0.02}, {"timeout": 0.02, "poll_interval": 0.01}):
                    with pytest.raises(LockTimeout, match=holder):
                        advisory_lock(name, using=alias, **options).acquire()
                assert try_and_release(name, using=alias) is False
                assert value("SHOW lock_timeout", alias=alias) == own
            for options in ({}, {"timeout": LIMIT}, {"poll_interval": 0.005}):
                waiting = Thread(partial(self.wait, alias, name, inside, options))
                if "poll_interval" not in options:
                    other.wait_for_waiters(key)
                other.drop(key)
                assert waiting.result() is True
                other.take(key)
            other.drop(key)

    def wait(self, alias: str, name: str, inside: bool, options: dict[str, Any]) -> bool:
        with transaction.atomic(using=alias) if inside else contextlib.nullcontext():
            with advisory_lock(name, using=alias, **options) as lock:
                return lock.is_held()


def test_an_alias_without_autocommit(name: str, other: OtherSession) -> None:
    """`AUTOCOMMIT: False`: every lock is one of a transaction, and ends with it."""
    with extra_alias(f"manual-{name}", AUTOCOMMIT=False) as alias:
        with advisory_lock(name, using=alias) as lock:
            assert lock.scope == "transaction"
        assert not other.is_free(lock_key(name))
        connections[alias].commit()
        assert other.is_free(lock_key(name))
        with advisory_lock(name, using=alias, scope="session") as lock:
            connections[alias].commit()
            assert lock.is_held()
        assert other.is_free(lock_key(name))
        connections[alias].rollback()


def test_an_alias_that_is_removed_and_added_again(name: str, other: OtherSession) -> None:
    for _ in range(3):
        with extra_alias(f"again-{name}") as alias, advisory_lock(name, using=alias) as lock:
            assert lock.is_held()
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))
    with extra_alias(f"again-{name}") as alias:
        handle = advisory_lock(name, using=alias).acquire()
    with pytest.raises(LockLost):
        handle.release()
    other.wait_until_free(lock_key(name))


def test_many_aliases(name: str, other: OtherSession) -> None:
    with contextlib.ExitStack() as stack:
        aliases = [stack.enter_context(extra_alias(f"many-{number}-{name}")) for number in range(25)]
        handles = [stack.enter_context(advisory_lock(name, alias, using=alias)) for alias in aliases]
        assert all(handle.is_held() for handle in handles)
        for alias in aliases:
            assert not try_and_release(name, alias)
            assert try_and_release(name, alias, using=alias)
    assert all(other.is_free(lock_key(name, alias)) for alias in aliases)


# Roles


class TestRoles:
    """A session whose role changes while it holds: rights change, the lock does not."""

    @pytest.mark.parametrize("kind", ["ROLE", "SESSION AUTHORIZATION"])
    def test_less_privileged(self, kind: str, name: str, other: OtherSession) -> None:
        def change(to: str) -> None:
            with connection.cursor() as cursor:
                cursor.execute(to)

        other.raw.execute(f'CREATE ROLE "{name}"')
        try:
            with advisory_lock(name) as lock:
                change(f'SET {kind} "{name}"')
                assert lock.is_held()
                with (
                    advisory_lock(name, "inside") as inner,
                    transaction.atomic(),
                    advisory_lock(name, "atomic") as last,
                ):
                    assert inner.is_held()
                    assert last.is_held()
                other.take(lock_key(name, "busy"))
                with pytest.raises(LockTimeout, match=rf"held by pid {other.pid} \(other-session\)\.$"):
                    advisory_lock(name, "busy", timeout=0.01).acquire()
            assert other.is_free(lock_key(name))
            with pytest.raises(LockLost), advisory_lock(name):
                other.kill(backend_pid())
            with advisory_lock(name):
                change(f"RESET {kind}")
        finally:
            connection.close()
            other.raw.execute(f'DROP ROLE "{name}"')


# What stands between the library and the database


def rewriting(before: str, after: str) -> Any:
    """Return a wrapper that changes each statement, as those that add the route of a request do."""

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        return execute(before + sql + after, params, many, context)

    return wrapper


class Failing:
    """A wrapper that raises at one statement, before or after it is sent, and knows whether it came so far."""

    def __init__(self, at: int, sent: bool, error: type[BaseException]) -> None:
        self.left, self.sent, self.error = at, sent, error

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.sent:
            raise self.error
        result = execute(sql, params, many, context)
        if self.left == 0:
            raise self.error
        return result


def busy(name: str, **options: Any) -> None:
    with pytest.raises(LockTimeout):
        advisory_lock(name, "busy", timeout=0.01, **options).acquire()


def nested(name: str) -> None:
    with advisory_lock(name), advisory_lock(name), advisory_lock(name, shared=True):
        pass


def inside_atomic(name: str, scope: Any, *, is_busy: bool = False) -> None:
    with transaction.atomic():
        backend_pid()
        with advisory_lock(name, scope=scope) as lock:
            assert lock.is_held()
            if is_busy:
                busy(name, scope=scope)


SCENES: dict[str, Callable[[str], None]] = {
    "session": lambda name: advisory_lock(name).acquire().release(),
    "shared": lambda name: advisory_lock(name, shared=True).acquire().release(),
    "with a timeout": lambda name: advisory_lock(name, timeout=5).acquire().release(),
    "try": lambda name: try_advisory_lock(name).acquire().release(),
    "busy": busy,
    "busy, polled": partial(busy, poll_interval=0.005),
    "nested": nested,
    "atomic": partial(inside_atomic, scope="auto"),
    "session in atomic": partial(inside_atomic, scope="session"),
    "busy in atomic": partial(inside_atomic, scope="auto", is_busy=True),
    "busy session in atomic": partial(inside_atomic, scope="session", is_busy=True),
}


class TestWrappers:
    """`connection.execute_wrapper()`: whoever looks at, changes or forbids statements."""

    @pytest.mark.parametrize(
        ("before", "after"), [("", " /*route='x',db='y'*/"), ("/* x */ ", ""), ("", " -- 100 %%"), ("", ";")]
    )
    @pytest.mark.parametrize("alias", ["default", "binding", "prepared"])
    def test_statements_that_are_rewritten(
        self, before: str, after: str, alias: str, name: str, other: OtherSession
    ) -> None:
        other.take(lock_key(name, "busy"))
        connections[alias].ensure_connection()
        with connections[alias].execute_wrapper(rewriting(before, after)):
            for way in WAYS:
                with holding(way, name, alias) as lock:
                    assert lock.is_held()
                    busy(name, using=alias)
                assert other.is_free(lock_key(name))

    @pytest.mark.parametrize("scene", SCENES)
    @pytest.mark.parametrize("sent", [False, True])
    def test_one_that_raises_at_any_statement(self, scene: str, sent: bool, name: str, other: OtherSession) -> None:
        """Whatever fails, nothing stays locked, and the alias goes on."""
        other.take(lock_key(name, "busy"))
        for error in (RuntimeError, KeyboardInterrupt, OperationalError):
            self.raise_at_any_statement(scene, sent, error, name, other)

    def raise_at_any_statement(
        self, scene: str, sent: bool, error: type[BaseException], name: str, other: OtherSession
    ) -> None:
        at, failing = 0, None
        while failing is None or failing.left <= 0:
            at, failing = at + 1, Failing(at + 1, sent, error)
            connection.ensure_connection()
            with contextlib.suppress(error, pytest.fail.Exception, LockLost):
                with connection.execute_wrapper(failing):
                    SCENES[scene](name)
            assert other.is_free(lock_key(name)), f"{scene}: left behind at statement {at}"
            assert backend_pid()
            assert at < 30
        assert at > 1

    def test_one_that_forbids_all(self, name: str, other: OtherSession) -> None:
        def forbid(*args: Any) -> NoReturn:
            raise RuntimeError("no queries here")

        connection.ensure_connection()
        with connection.execute_wrapper(forbid):
            for make in (advisory_lock, try_advisory_lock):
                with pytest.raises(RuntimeError, match="no queries here"):
                    make(name).acquire()
        with pytest.raises(RuntimeError, match="no queries here"), contextlib.ExitStack() as stack:
            with advisory_lock(name):
                stack.enter_context(connection.execute_wrapper(forbid))
        assert other.is_free(lock_key(name))

    def test_one_that_sends_nothing(self, name: str, other: OtherSession) -> None:
        """As a dry run: no answer is no lock."""
        connection.ensure_connection()
        with connection.execute_wrapper(lambda *args: None):
            for options in ({}, {"timeout": 0}, {"timeout": 1}, {"poll_interval": 0.1}):
                with pytest.raises(DatabaseError):
                    advisory_lock(name, **options).acquire()
            with pytest.raises(DatabaseError):
                try_advisory_lock(name).acquire()
        lock = advisory_lock(name).acquire()
        with connection.execute_wrapper(lambda *args: None):
            lock.release()
        assert other.is_free(lock_key(name))

    @override_settings(DEBUG=True)
    @pytest.mark.parametrize("alias", ["default", "binding"])
    def test_what_the_query_log_shows(self, alias: str, name: str, other: OtherSession) -> None:
        reset_queries()
        with advisory_lock(name, using=alias):
            pass
        with transaction.atomic(using=alias), advisory_lock(name, using=alias):
            pass
        shown = [query["sql"] for query in connections[alias].queries if "advisory" in query["sql"]]
        for sql, function in zip(shown, ("lock", "unlock", "xact_lock"), strict=True):
            assert f"advisory_{function}(" in sql
            assert str(lock_key(name).args[0]) in sql
        reset_queries()
        connections[alias].close()

    def test_garbage_that_is_collected_in_the_middle_of_a_take(self, name: str, other: OtherSession) -> None:
        """A dropped handle of the same key, finalized between the grant and the note of it, or before the unlock."""

        def drop_and_collect(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            result = execute(sql, params, many, context)
            cycle.clear()
            gc.collect()
            return result

        for way in ("session", "session in atomic"):
            cycle: list[Any] = [advisory_lock(name).acquire()]
            cycle.append(cycle)
            with pytest.warns(ResourceWarning, match="without release"), connection.execute_wrapper(drop_and_collect):
                with holding(way, name) as lock:
                    assert lock.is_held()
                    assert not other.is_free(lock_key(name))
            with advisory_lock(name, "another"):
                assert other.is_free(lock_key(name))


# Code of others that runs in the middle of ours


class TestReentrancy:
    @ways
    def test_a_handler_that_locks_while_the_connection_opens(self, way: str, name: str, other: OtherSession) -> None:
        inside = []

        def handler(connection: Any, **kwargs: Any) -> None:
            with holding(way, name, connection.alias) as lock:
                inside.append(lock.is_held())

        connection.close()
        connection_created.connect(handler)
        try:
            for again in WAYS:
                with holding(again, name) as lock:
                    assert lock.is_held()
                    assert not other.is_free(lock_key(name))
                assert other.is_free(lock_key(name))
                connection.close()
        finally:
            connection_created.disconnect(handler)
        assert inside == [True] * len(WAYS)

    def test_a_log_handler_that_writes_to_the_database(self, name: str, other: OtherSession) -> None:
        """It takes a lock, too, and for the same key."""
        logged: list[str] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                logged.append(record.getMessage())
                with advisory_lock(name, "log"), try_advisory_lock(name) as lock:
                    Account.objects.create(name=name, balance=bool(lock))

        handler, logger = Handler(), logging.getLogger("django_advisory_lock")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            for end in (connection.close, lambda: other.kill(backend_pid())):
                with pytest.raises(LockLost), advisory_lock(name):
                    end()
            with override_settings(ADVISORY_LOCK_SLOW_WAIT=0):
                other.take(lock_key(name, "slow"))
                waiting = Thread(lambda: try_after_wait(name, "slow"))
                other.wait_for_waiters(lock_key(name, "slow"))
                wait_until(
                    lambda: other.one(
                        "SELECT now() - min(query_start) > '20ms' FROM pg_stat_activity"
                        " WHERE wait_event = 'advisory' AND datname = current_database()"
                    )
                )
                other.drop(lock_key(name, "slow"))
                assert waiting.result() is True
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        # On a busy machine the handler's own lock may be slow, too, which it is told as well.
        lost = [message for message in logged if " was lost: " in message]
        waited = [message for message in logged if f"for the lock '{name}:slow'" in message]
        assert (len(lost), len(waited)) == (2, 1)
        assert Account.objects.filter(name=name).delete()[0] == len(logged)
        assert other.is_free(lock_key(name))

    def test_a_finalizer_that_locks_in_the_middle_of_a_take(self, name: str, other: OtherSession) -> None:
        inside = []

        class Resource:
            def __del__(self) -> None:
                with advisory_lock(name) as lock:
                    inside.append(lock.is_held())

        def drop(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            result = execute(sql, params, many, context)
            resources.clear()
            return result

        for way in WAYS:
            connection.ensure_connection()
            resources = [Resource()]
            with connection.execute_wrapper(drop), holding(way, name) as lock:
                assert lock.is_held()
                assert not other.is_free(lock_key(name))
            assert other.is_free(lock_key(name))
        assert inside == [True] * len(WAYS)

    def test_the_end_of_an_object_that_frees_its_lock(self, name: str, other: OtherSession) -> None:
        class Job:
            pass

        job = Job()
        lock = advisory_lock(name).acquire()
        weakref.finalize(job, lock.release)
        del job
        gc.collect()
        assert other.is_free(lock_key(name))


def try_after_wait(*key: Any) -> bool:
    with advisory_lock(*key) as lock:
        return lock.is_held()


# Copies


def take_and_release(lock: Any) -> None:
    lock.acquire().release()


class TestCopies:
    """A lock is configuration and may be copied; a handle is a thing."""

    @pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda lock: pickle.loads(pickle.dumps(lock))])
    def test_of_a_lock(self, how: Callable[[Any], Any], name: str, other: OtherSession) -> None:
        for lock in (advisory_lock(name, timeout=0), advisory_lock(name, shared=True), try_advisory_lock(name)):
            twin = how(lock)
            with lock as one, twin as two:
                assert one.is_held()
                assert two.is_held()
            with twin:
                assert not other.is_free(lock_key(name))
            assert other.is_free(lock_key(name))
            Thread(partial(take_and_release, twin)).result()

    @pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_of_a_handle(self, how: Callable[[Any], Any], name: str, other: OtherSession) -> None:
        """A second one would free the lock under the first, at its own end."""
        with advisory_lock(name) as lock:
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                how(lock)
            with advisory_lock(name, "another"):
                pass
            assert lock.is_held()
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))


# Requests


def is_free_now(name: str) -> bool:
    session = OtherSession()
    try:
        return session.is_free(lock_key(name))
    finally:
        session.close()


def locked_view(request: HttpRequest) -> JsonResponse:
    """Lock, write, and say what is seen of the lock behind its block, before the response is sent."""
    name, alias = request.GET["name"], request.GET["alias"]
    with advisory_lock(name, using=alias) as lock:
        Account.objects.using(alias).create(name=name)
    if "fail" in request.GET:
        raise KeyError(name)
    committed: list[bool] = []
    transaction.on_commit(lambda: committed.append(is_free_now(name)), using=alias)
    return JsonResponse({"scope": lock.scope, "free": is_free_now(name), "committed": committed})


@transaction.non_atomic_requests(using="atomic-requests")
def non_atomic_view(request: HttpRequest) -> JsonResponse:
    return locked_view(request)


async def async_view(request: HttpRequest) -> JsonResponse:
    """Synchronous code of which the lock is kept while the view awaits something else."""
    lock = await sync_to_async(try_advisory_lock(request.GET["name"]).acquire)()
    if not lock:
        return JsonResponse({"others": None})
    others = [await sync_to_async(is_free_now)(request.GET["name"]) for _ in range(3)]
    await sync_to_async(lock.release)()
    return JsonResponse({"others": others})


urlpatterns = [
    path("locked/", locked_view),
    path("non-atomic/", non_atomic_view),
    path("async/", async_view),
]


class TestRequests:
    @pytest.fixture(autouse=True)
    def urls(self) -> Iterator[None]:
        with override_settings(ROOT_URLCONF=__name__):
            yield

    @pytest.fixture
    def alias(self, other: OtherSession) -> Iterator[str]:
        with extra_alias("atomic-requests", ATOMIC_REQUESTS=True) as alias:
            yield alias

    @pytest.mark.parametrize(
        ("url", "scope", "free"), [("/locked/", "transaction", False), ("/non-atomic/", "session", True)]
    )
    def test_atomic_requests(
        self, url: str, scope: str, free: bool, alias: str, name: str, other: OtherSession
    ) -> None:
        """Case 13: kept to the commit, which comes after the view."""
        shown = Client().get(url, {"name": name, "alias": alias}).json()
        assert (shown["scope"], shown["free"]) == (scope, free)
        assert shown["committed"] == ([] if scope == "transaction" else [True])
        assert other.is_free(lock_key(name))
        assert Account.objects.filter(name=name).delete()[0] == 1

    def test_a_view_that_fails(self, alias: str, name: str, other: OtherSession) -> None:
        with pytest.raises(KeyError):
            Client().get("/locked/", {"name": name, "alias": alias, "fail": "1"})
        assert other.is_free(lock_key(name))
        assert not Account.objects.filter(name=name).exists()

    def test_atomic_requests_of_another_alias(self, alias: str, name: str, other: OtherSession) -> None:
        """The lock would be free before that alias commits what was written under it."""
        with pytest.raises(transaction.TransactionManagementError, match="atomic-requests"):
            Client().get("/locked/", {"name": name, "alias": "default"})

    def test_many_requests_at_once(self, name: str, other: OtherSession) -> None:
        """Tasks that share a thread, and so a session, keep each other out."""

        async def requests() -> list[object]:
            responses = await asyncio.gather(*(AsyncClient().get("/async/", {"name": name}) for _ in range(4)))
            await sync_to_async(connections.close_all)()
            return [response.json()["others"] for response in responses]

        answers = asyncio.run(asyncio.wait_for(requests(), LIMIT))
        assert [False, False, False] in answers
        assert None in answers
        assert len([answer for answer in answers if answer not in (None, [False, False, False])]) == 0
        assert other.is_free(lock_key(name))

    def test_the_client_under_a_lock_of_the_test(self, name: str, other: OtherSession) -> None:
        """Case 97: a request inside the block leaves its connection alone."""
        with advisory_lock(name, "outer") as lock:
            pid = backend_pid()
            assert Client().get("/locked/", {"name": name, "alias": "default"}).json()["scope"] == "session"
            assert lock.is_held()
            assert backend_pid() == pid
        Account.objects.filter(name=name).delete()


# Transactions beside the lock


class TestTransactions:
    def test_durable(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            with transaction.atomic(durable=True), advisory_lock(name) as inner:
                assert inner.scope == "transaction"
            assert lock.is_held()
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize("robust", [False, True])
    def test_on_commit(self, robust: bool, name: str, other: OtherSession) -> None:
        """By then the transaction's locks are gone, and another owner may have them."""
        seen: list[object] = []

        def after_commit() -> None:
            seen.append(other.is_free(lock_key(name)))
            with advisory_lock(name, timeout=0) as lock:
                seen.append(lock.scope)
            other.take(lock_key(name))
            seen.append(try_and_release(name))
            other.drop(lock_key(name))

        with transaction.atomic():
            with advisory_lock(name):
                transaction.on_commit(after_commit, robust=robust)
            assert seen == []
        assert seen == [True, "session", False]

    def test_on_commit_that_fails_under_a_lock(self, name: str, other: OtherSession) -> None:
        def after_commit() -> None:
            with advisory_lock(name):
                raise KeyError

        with pytest.raises(KeyError), transaction.atomic():
            transaction.on_commit(after_commit)
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize("way", WAYS)
    def test_select_for_update(self, way: str, name: str, other: OtherSession) -> None:
        """A row lock and ours on the same row know nothing of each other; a row that is busy fails as ever."""
        account = Account.objects.create(name=name)
        row = "SELECT FROM testapp_account WHERE id = %s FOR UPDATE NOWAIT"
        with holding(way, name) as lock:
            with transaction.atomic():
                Account.objects.select_for_update().get(pk=account.pk)
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    other.raw.execute(row, [account.pk])
                assert lock.is_held()
            with other.raw.transaction():
                if "atomic" not in way:
                    other.raw.execute(row, [account.pk])
                    with pytest.raises(OperationalError), transaction.atomic():
                        Account.objects.select_for_update(nowait=True).get(pk=account.pk)
            assert lock.is_held()
        account.delete()
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize("way", WAYS)
    def test_a_server_side_cursor(self, way: str, name: str, other: OtherSession) -> None:
        """Rows that are still being read while locks come and go on the same session."""
        for number in range(5):
            Account.objects.create(name=name, balance=number)
        read = 0
        with holding(way, name) as outer:
            for account in Account.objects.filter(name=name).order_by("balance").iterator(chunk_size=2):
                with advisory_lock(account) as lock:
                    assert lock.is_held()
                    read += 1
            assert outer.is_held()
        assert read == 5
        Account.objects.filter(name=name).delete()


class TestInsideTestCase(TestCase):
    """Django's own helpers for tests."""

    def test_the_number_of_queries(self) -> None:
        """A session lock costs two more for the savepoint around its body: the test is inside a transaction."""
        with self.assertNumQueries(4), advisory_lock("test-environments"):
            pass
        with transaction.atomic(), self.assertNumQueries(1), advisory_lock("test-environments"):
            pass

    def test_callbacks_on_commit(self) -> None:
        scopes = []

        def after_commit() -> None:
            with advisory_lock("test-environments") as lock:
                assert not is_free_now("test-environments")
                scopes.append(lock.scope)

        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            with advisory_lock("test-environments", "transaction"):
                transaction.on_commit(after_commit)
        assert scopes == ["session"]

    def test_durable(self) -> None:
        with transaction.atomic(durable=True), advisory_lock("test-environments", "kept") as lock:
            assert lock.scope == "transaction"
        assert lock.is_held(), "until the test is rolled back"
        with advisory_lock("test-environments") as lock, transaction.atomic(durable=True):
            assert lock.scope == "session"
        assert is_free_now("test-environments")

    @override_settings(ROOT_URLCONF=__name__)
    def test_the_client(self) -> None:
        shown = self.client.get("/locked/", {"name": "test-environments", "alias": "default"}).json()
        assert (shown["scope"], shown["free"]) == ("session", True)
