"""The asynchronous API: who owns, who waits where, and what a cancelled task leaves behind, which is nothing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import logging
import random
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from asgiref.sync import (
    ThreadSensitiveContext,
    async_to_sync,
    iscoroutinefunction,
    markcoroutinefunction,
    sync_to_async,
)
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import AsyncClient, TestCase, TransactionTestCase, override_settings
from django.test.utils import CaptureQueriesContext

from django_advisory_lock import (
    AdvisoryLockError,
    LockDeadlock,
    LockHandle,
    LockLost,
    LockTimeout,
    advisory_lock,
    advisory_lock_all,
    advisory_semaphore,
    lock_key,
    try_advisory_lock,
    try_advisory_semaphore,
)
from tests.support import LIMIT, OtherSession, Thread, backend_pid, output, spawn, value, wait_until
from tests.testapp.models import Account
from tests.webserver import WebServer, answers, uvicorn

T = TypeVar("T")

since: Any = asyncio  # what Python 3.10 does not have
since_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has neither TaskGroup nor timeout()")

# What each kind of lock is made of, from a name: those that wait, and those that only try.
WAITING: dict[str, Callable[..., Any]] = {
    "lock": advisory_lock,
    "shared": functools.partial(advisory_lock, shared=True),
    "dedicated": functools.partial(advisory_lock, dedicated=True),
    "several": lambda name, **options: advisory_lock_all((name, "a"), (name, "b"), **options),
    "one of several": advisory_lock_all,
    "semaphore": functools.partial(advisory_semaphore, limit=1),
}
TRYING: dict[str, Callable[..., Any]] = {
    "try": try_advisory_lock,
    "try dedicated": functools.partial(try_advisory_lock, dedicated=True),
    "try semaphore": functools.partial(try_advisory_semaphore, limit=1),
}
waiting = pytest.mark.parametrize("make", WAITING.values(), ids=WAITING)
excluding = pytest.mark.parametrize(
    "make",
    [make for kind, make in WAITING.items() if kind != "shared"],
    ids=[kind for kind in WAITING if kind != "shared"],
)
trying = pytest.mark.parametrize("make", TRYING.values(), ids=TRYING)
every = pytest.mark.parametrize("make", [*WAITING.values(), *TRYING.values()], ids=[*WAITING, *TRYING])

Make = Callable[..., Any]


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function in a loop of its own, within a limit, and close the connections of the shared thread."""

    async def limited() -> T:
        try:
            return await asyncio.wait_for(main(), 3 * LIMIT)
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(limited())


async def until(condition: Callable[[], object], what: str = "condition") -> None:
    """Ask again and again until a condition holds, while other tasks go on; fail where it does not in time."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        await asyncio.sleep(0.005)


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for it."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def busy_thread() -> AsyncIterator[None]:
    """Keep the thread of synchronous code busy for the length of a block."""
    begun, end = threading.Event(), threading.Event()

    def occupy() -> None:
        begun.set()
        assert end.wait(LIMIT)

    task = asyncio.create_task(sync_to_async(occupy)())
    await until(begun.is_set, "the thread is busy")
    try:
        yield
    finally:
        end.set()
        await task


def granted(other: OtherSession) -> int:
    """Count the advisory locks that are held in this database."""
    return int(
        other.one(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
    )


async def take(lock: Any) -> LockHandle:
    """Enter and leave a block."""
    async with lock as handle:
        assert handle
    return handle  # type: ignore[no-any-return]


class TestBlocks:
    @every
    def test_held_in_the_body_and_free_after_it(self, make: Make, name: str, other: OtherSession) -> None:
        async def main() -> None:
            lock = make(name)
            for _ in range(2):
                async with lock as handle:
                    assert handle
                    assert await handle.ais_held()
                    await handle.acheck()
                    assert granted(other) == len(handle._hold.keys)
                assert granted(other) == 0
                assert handle.acquired
                assert not await handle.ais_held()
                with pytest.raises(LockLost, match="no longer"):
                    await handle.acheck()
                assert handle.scope == "session"

        run(main)

    @every
    def test_by_hand(self, make: Make, name: str, other: OtherSession) -> None:
        async def main() -> None:
            handle = await make(name).aacquire()
            assert handle
            assert granted(other)
            await handle.arelease()
            assert not granted(other)
            await handle.arelease()  # a second call does nothing
            async with await make(name).aacquire() as handle:
                assert await handle.ais_held()
            assert not granted(other)
            with pytest.raises(AdvisoryLockError, match="acquire the lock again"):
                async with handle:
                    pytest.fail("entered a lock that is over")

        run(main)

    @every
    def test_an_error_of_the_body_frees_the_lock_and_stays_itself(
        self, make: Make, name: str, other: OtherSession
    ) -> None:
        error = KeyError("mine")

        async def main() -> None:
            with pytest.raises(KeyError) as caught:
                async with make(name) as handle:
                    assert handle
                    raise error
            assert caught.value is error
            assert error.__context__ is None
            assert not granted(other)

        run(main)

    @excluding
    def test_busy_until_the_time_is_up(self, make: Make, name: str, other: OtherSession) -> None:
        async def main() -> None:
            async with make(name):
                for timeout in (0, 0.05):
                    with pytest.raises(LockTimeout) as caught:
                        await asyncio.create_task(make(name, timeout=timeout).aacquire())
                    assert caught.value.waited is not None
                    assert caught.value.waited >= timeout

        run(main)

    @trying
    def test_busy_for_one_that_tries(self, make: Make, name: str, other: OtherSession) -> None:
        async def attempt() -> bool:
            async with make(name) as handle:
                return bool(handle)

        async def main() -> None:
            async with make(name) as handle:
                assert handle
                assert await asyncio.create_task(attempt()) is False
            assert await attempt() is True

        run(main)

    @excluding
    def test_waits_until_it_is_free(self, make: Make, name: str, other: OtherSession) -> None:
        async def main() -> None:
            order: list[str] = []

            async def second() -> None:
                async with make(name):
                    order.append("second")

            async with make(name):
                task = asyncio.create_task(second())
                for _ in range(3):
                    await sync_to_async(time.sleep)(0.01)
                order.append("first")
            await task
            assert order == ["first", "second"]

        run(main)

    def test_a_failed_try_that_nobody_looks_at_warns(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            other.take(lock_key(name))
            with pytest.warns(RuntimeWarning, match="was not acquired") as warned:
                async with try_advisory_lock(name):
                    pass
            assert warned[0].filename == __file__
            other.drop(lock_key(name))

        run(main)

    def test_an_exit_stack(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            async with contextlib.AsyncExitStack() as stack:
                outer = await stack.enter_async_context(advisory_lock(name))
                await stack.enter_async_context(advisory_lock(name, "inner"))
                await stack.enter_async_context(advisory_lock(name))
                assert granted(other) == 2
                assert await outer.ais_held()
            assert not granted(other)

        run(main)

    def test_a_callable_key_is_for_decorators(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            with pytest.raises(TypeError, match="belongs to a decorator"):
                async with advisory_lock(lambda: name):
                    pytest.fail("entered")
            with pytest.raises(TypeError, match="belongs to a decorator"):
                await advisory_lock(lambda: name).aacquire()

        run(main)


class TestDecorators:
    """Case 95."""

    @pytest.mark.parametrize("make", [advisory_lock, try_advisory_lock, advisory_lock_all])
    @pytest.mark.parametrize("kind", ["function", "partial", "marked", "method", "static", "wrapped"])
    def test_the_lock_is_held_while_the_coroutine_runs(
        self, make: Make, kind: str, name: str, other: OtherSession
    ) -> None:
        lock = make(name)

        async def work(number: int, *, factor: int = 1) -> int:
            """Say what it does."""
            assert not other.is_free(lock_key(name))
            await asyncio.sleep(0)
            assert not other.is_free(lock_key(name))
            return number * factor

        @markcoroutinefunction
        def marked(number: int, *, factor: int = 1) -> Coroutine[Any, Any, int]:
            return work(number, factor=factor)

        class Sync:
            @lock  # type: ignore[untyped-decorator]
            async def method(self, number: int, *, factor: int = 1) -> int:
                assert isinstance(self, Sync)
                return await work(number, factor=factor)

            @staticmethod
            @lock  # type: ignore[untyped-decorator]
            async def static(number: int, *, factor: int = 1) -> int:
                return await work(number, factor=factor)

        @functools.wraps(work)
        async def wrapped(*args: Any, **kwargs: Any) -> int:
            return await work(*args, **kwargs)

        kinds: dict[str, Callable[..., Awaitable[int]]] = {
            "function": lock(work),
            "partial": lock(functools.partial(work, factor=2)),
            "marked": lock(marked),
            "method": Sync().method,
            "static": Sync.static,
            "wrapped": lock(wrapped),
        }
        function = kinds[kind]
        assert iscoroutinefunction(function)
        if kind in {"function", "wrapped"}:
            assert (function.__name__, function.__doc__) == ("work", "Say what it does.")
            assert inspect.signature(function) == inspect.signature(work)

        async def main() -> None:
            assert await function(21, factor=2) == 42
            assert other.is_free(lock_key(name))
            await asyncio.gather(*[asyncio.create_task(sync_to_async(value)("SELECT 1")) for _ in range(3)])

        run(main)

    def test_a_key_from_the_call(self, name: str, other: OtherSession) -> None:
        class Books:
            tenant = "tenant"

            @advisory_lock(lambda self, number, **_: (name, self.tenant, number))
            async def close(self, number: int, *, flag: bool = False) -> tuple[int, bool]:
                assert not other.is_free(lock_key(name, "tenant", number))
                return number, flag

        @advisory_lock_all(lambda *numbers: [(name, number) for number in numbers])
        async def move(*numbers: int) -> int:
            return granted(other)

        @advisory_semaphore(lambda number: (name, "semaphore", number), limit=2)
        async def call(number: int) -> int:
            return granted(other)

        async def main() -> None:
            assert await Books().close(7, flag=True) == (7, True)
            assert await move(3, 1, 2, 1) == 3
            assert await call(1) == 1
            assert not granted(other)

        run(main)

    @pytest.mark.parametrize("returned", [None, ""])
    def test_a_key_function_that_makes_no_key(self, returned: Any, name: str, other: OtherSession) -> None:
        @advisory_lock(lambda: returned)
        async def work() -> None:
            pytest.fail("ran without a lock")

        async def main() -> None:
            with pytest.raises((TypeError, ValueError)):
                await work()

        run(main)

    def test_a_busy_try_returns_the_default_without_running(self, name: str, other: OtherSession) -> None:
        ran: list[int] = []

        @try_advisory_lock(name, default="skipped")
        async def work(number: int) -> str:
            ran.append(number)
            await asyncio.sleep(0.01)
            return "done"

        async def main() -> None:
            other.take(lock_key(name))
            assert await work(1) == "skipped"
            other.drop(lock_key(name))
            answers = await asyncio.gather(*(work(number) for number in range(2, 7)))
            assert sorted(answers) == ["done", *["skipped"] * 4]
            assert len(ran) == 1

        run(main)

    def test_a_call_that_only_begins_the_work_is_refused(self, name: str, other: OtherSession) -> None:
        """Case 88."""

        async def numbers() -> AsyncIterator[int]:
            yield 1

        async def later() -> None:
            pytest.fail("ran")

        @advisory_lock(name)
        async def generator() -> AsyncIterator[int]:
            return numbers()

        @advisory_lock(name)
        async def coroutine() -> Any:
            return later()

        async def main() -> None:
            for function in (generator, coroutine):
                with pytest.raises(TypeError, match="runs after it"):
                    await function()
                assert other.is_free(lock_key(name))

        run(main)

    def test_errors_of_the_body(self, name: str, other: OtherSession) -> None:
        @advisory_lock(name)
        async def work() -> None:
            raise KeyError("mine")

        async def main() -> None:
            with pytest.raises(KeyError):
                await work()
            assert other.is_free(lock_key(name))

        run(main)


class TestExclusion:
    """Case 89: tasks share one session, and the server would grant it to all of them."""

    @pytest.mark.parametrize("kind", ["none", "lock", "several", "semaphore"])
    def test_tasks_on_one_thread(self, kind: str, name: str, other: OtherSession) -> None:
        counter = 0
        locks: dict[str, Any] = {
            "none": contextlib.nullcontext(),
            "lock": advisory_lock(name, poll_interval=0.002),
            "several": advisory_lock_all((name, 1), (name, 2)),
            "semaphore": advisory_semaphore(name, limit=1),
        }

        async def add() -> None:
            nonlocal counter
            for _ in range(3):
                async with locks[kind]:
                    seen = counter
                    await sync_to_async(value)("SELECT 1")
                    counter = seen + 1

        async def main() -> None:
            await asyncio.gather(*(add() for _ in range(5)))

        run(main)
        assert counter < 15 if kind == "none" else counter == 15

    @pytest.mark.parametrize("kind", ["none", "lock"])
    def test_tasks_of_two_processes(self, kind: str, name: str, other: OtherSession) -> None:
        """The counter is a row, read and written through the async ORM."""
        account = Account.objects.create()
        code = """
import asyncio, contextlib, sys
from asgiref.sync import sync_to_async
from django.db import connections
from django_advisory_lock import advisory_lock
from tests.testapp.models import Account
kind, name, pk = sys.argv[1:]
async def add():
    for _ in range(5):
        async with advisory_lock(name, poll_interval=0.01) if kind == "lock" else contextlib.nullcontext():
            account = await Account.objects.aget(pk=pk)
            await asyncio.sleep(0)
            account.balance += 1
            await account.asave()
async def main():
    await asyncio.gather(*(add() for _ in range(3)))
    await sync_to_async(connections.close_all)()
asyncio.run(main())
"""
        for process in [spawn(code, kind, name, str(account.pk)) for _ in range(2)]:
            output(process)
        account.refresh_from_db()
        account.delete()
        assert account.balance < 30 if kind == "none" else account.balance == 30

    def test_a_semaphore_lets_in_as_many_as_it_has_slots(self, name: str, other: OtherSession) -> None:
        inside, most = 0, 0

        async def work() -> None:
            nonlocal inside, most
            async with advisory_semaphore(name, limit=2):
                inside += 1
                most = max(most, inside)
                await sync_to_async(value)("SELECT 1")
                inside -= 1

        async def main() -> None:
            await asyncio.gather(*(work() for _ in range(6)))

        run(main)
        assert most == 2

    def test_shared_locks_of_tasks_meet_and_keep_exclusive_ones_out(self, name: str, other: OtherSession) -> None:
        async def read(go: asyncio.Event, seen: list[int]) -> None:
            async with advisory_lock(name, shared=True):
                seen.append(1)
                await go.wait()

        async def main() -> None:
            go, seen = asyncio.Event(), list[int]()
            tasks = [asyncio.create_task(read(go, seen)) for _ in range(3)]
            await until(lambda: len(seen) == 3)
            assert not await try_advisory_lock(name).aacquire()
            go.set()
            await asyncio.gather(*tasks)
            async with try_advisory_lock(name) as lock:
                assert lock

        run(main)

    @since_3_11
    def test_a_task_group(self, name: str, other: OtherSession) -> None:
        inside: list[int] = []
        most: list[int] = []

        async def work(number: int) -> None:
            async with advisory_lock(name, poll_interval=0.002):
                inside.append(number)
                most.append(len(inside))
                await asyncio.sleep(0.001)
                inside.remove(number)

        async def fail() -> None:
            async with advisory_lock(name, "failing"):
                raise KeyError

        async def main() -> None:
            async with since.TaskGroup() as group:
                for number in range(5):
                    group.create_task(work(number))
            assert most == [1] * 5
            with pytest.raises(Exception, match="unhandled errors"):
                async with since.TaskGroup() as group:
                    for number in range(5):
                        group.create_task(work(number))
                    group.create_task(fail())
            assert not granted(other)

        run(main)

    def test_a_task_and_a_thread(self, name: str, other: OtherSession) -> None:
        """They are on sessions of their own, and the thread waits in the server's queue."""
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            with advisory_lock(name):
                held.set()
                assert go.wait(LIMIT)

        async def main() -> None:
            thread = Thread(hold)
            await until(held.is_set)
            assert not await try_advisory_lock(name).aacquire()
            asyncio.get_running_loop().call_later(0.05, go.set)
            lock = await advisory_lock(name).aacquire()
            waiter = Thread(lambda: advisory_lock(name).acquire().release())
            await until(lambda: other.waiters(lock_key(name)) == 1)
            await lock.arelease()
            await asyncio.to_thread(waiter.result)
            thread.result()

        run(main)

    def test_two_loops_in_two_threads(self, name: str, other: OtherSession) -> None:
        """asgiref sends the synchronous code of both to one thread, and so to one session."""
        counter = 0

        async def add() -> None:
            nonlocal counter
            for _ in range(5):
                async with advisory_lock(name, poll_interval=0.002):
                    seen = counter
                    await sync_to_async(value)("SELECT 1")
                    counter = seen + 1

        for thread in [Thread(lambda: asyncio.run(add())) for _ in range(3)]:
            thread.result()
        run(lambda: asyncio.sleep(0))
        assert counter == 15


class TestOwnership:
    def test_what_synchronous_code_holds_by_hand_is_its_own_again(self, name: str, other: OtherSession) -> None:
        """After a block of asynchronous code, as before it: the same task nests, and releases."""

        def nest() -> None:
            with advisory_lock(name, timeout=1):
                pass

        async def main() -> None:
            lock = await sync_to_async(advisory_lock(name).acquire)()
            await sync_to_async(nest)()
            async with advisory_lock(name, "other"):
                pass
            await sync_to_async(nest)()
            await sync_to_async(lock.release)()

        run(main)
        assert other.is_free(lock_key(name))

    def test_a_task_nests(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            async with advisory_lock(name) as outer:
                async with advisory_lock(name, timeout=0), try_advisory_lock(name) as inner:
                    assert inner
                    by_hand = await try_advisory_lock(name).aacquire()
                    assert by_hand
                    await by_hand.arelease()
                assert await outer.ais_held()
                assert not other.is_free(lock_key(name))
            assert other.is_free(lock_key(name))

        run(main)

    def test_blocks_of_one_lock_end_in_any_order(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name)

        async def generate() -> AsyncIterator[LockHandle]:
            async with lock as handle:
                yield handle

        async def main() -> None:
            first, second = generate(), generate()
            handles = [await first.__anext__(), await second.__anext__()]
            await first.aclose()  # type: ignore[attr-defined]
            assert handles[1]._hold is not None
            assert handles[1]._hold.noted
            assert not handles[0]._hold.noted  # type: ignore[union-attr]
            assert not other.is_free(lock_key(name))
            await second.aclose()  # type: ignore[attr-defined]
            assert other.is_free(lock_key(name))

        run(main)

    @pytest.mark.parametrize("using", ["block", "hand"])
    def test_a_child_started_inside_the_block_is_kept_out(self, using: str, name: str, other: OtherSession) -> None:
        async def child() -> bool:
            with pytest.raises(LockTimeout, match="another thread or task of this process"):
                await advisory_lock(name, timeout=0.02).aacquire()
            async with try_advisory_lock(name) as lock:
                return bool(lock)

        async def main() -> None:
            if using == "block":
                async with advisory_lock(name):
                    assert tuple(await asyncio.gather(child(), child())) == (False, False)
            else:
                lock = await advisory_lock(name).aacquire()
                assert tuple(await asyncio.gather(child(), child())) == (False, False)
                await lock.arelease()

        run(main)

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
    def test_an_eager_task_is_a_task(self, name: str, other: OtherSession) -> None:
        async def child() -> bool:
            async with try_advisory_lock(name) as lock:
                return bool(lock)

        async def main() -> None:
            asyncio.get_running_loop().set_task_factory(since.eager_task_factory)
            async with advisory_lock(name):
                assert await asyncio.create_task(child()) is False
            assert await asyncio.create_task(child()) is True

        run(main)

    def test_synchronous_code_of_the_task_nests(self, name: str, other: OtherSession) -> None:
        def inner() -> bool:
            with advisory_lock(name) as lock, try_advisory_lock(name) as tried:
                return bool(tried) and lock.is_held()

        async def main() -> None:
            async with advisory_lock(name) as outer:
                assert await sync_to_async(inner)()
                assert await outer.ais_held()
            assert other.is_free(lock_key(name))

        run(main)

    def test_synchronous_code_of_a_child_counts_as_its_parent(self, name: str, other: OtherSession) -> None:
        """The documented limit: a context variable is all that it has, and it inherits that."""

        async def child() -> bool:
            lock = await sync_to_async(try_advisory_lock(name).acquire)()
            if lock:
                await sync_to_async(lock.release)()
            return bool(lock)

        async def main() -> None:
            async with advisory_lock(name):
                assert await asyncio.create_task(child())
                assert not other.is_free(lock_key(name))
            assert other.is_free(lock_key(name))

        run(main)

    def test_synchronous_code_by_hand_around_the_asynchronous_api(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            outer = await sync_to_async(advisory_lock(name).acquire)()
            async with advisory_lock(name, "between") as between:
                assert await between.ais_held()
                assert await sync_to_async(outer.is_held)()
                inner = await sync_to_async(advisory_lock(name, "crossed").acquire)()
            await sync_to_async(inner.release)()
            await sync_to_async(outer.release)()
            assert not granted(other)

        run(main)

    def test_what_synchronous_code_took_by_hand_keeps_the_asynchronous_api_out(
        self, name: str, other: OtherSession
    ) -> None:
        """It might be the parent's: nothing tells them apart."""

        async def main() -> None:
            outer = await sync_to_async(advisory_lock(name).acquire)()
            with pytest.raises(LockTimeout, match="another thread or task"):
                await advisory_lock(name, timeout=0).aacquire()
            await sync_to_async(outer.release)()

        run(main)

    def test_async_to_sync_makes_another_task(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            with pytest.raises(LockTimeout, match="another thread or task"):
                await advisory_lock(name, timeout=0).aacquire()
            async with advisory_lock(name, "else", timeout=0):
                pass

        with advisory_lock(name):
            async_to_sync(work)()

        async def main() -> None:
            async with advisory_lock(name):
                await sync_to_async(async_to_sync(work))()

        run(main)
        connections.close_all()

    def test_a_synchronous_block_around_the_asynchronous_api(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name)

        async def main() -> None:
            await sync_to_async(lock.__enter__)()
            async with advisory_lock(name, "between"):
                pass
            await sync_to_async(lock.__exit__)(None, None, None)
            assert not granted(other)

        run(main)

    def test_a_synchronous_block_that_ends_inside_an_asynchronous_one(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name)

        async def main() -> None:
            await sync_to_async(lock.__enter__)()
            async with advisory_lock(name, "between"):
                await sync_to_async(lock.__exit__)(None, None, None)
                assert other.is_free(lock_key(name))
                assert not other.is_free(lock_key(name, "between"))
                with pytest.raises(AdvisoryLockError, match="can leave it"):
                    await sync_to_async(lock.__exit__)(None, None, None)

        run(main)

    def test_synchronous_code_nests_also_after_it_called_asynchronous_code(
        self, name: str, other: OtherSession
    ) -> None:
        async def innermost() -> None:
            async with advisory_lock(name, "inner"):
                pass

        def work() -> None:
            async_to_sync(innermost)()
            with advisory_lock(name):
                pass

        async def main() -> None:
            async with advisory_lock(name):
                await sync_to_async(work)()
                await sync_to_async(take_synchronously)()
                assert not other.is_free(lock_key(name))
            assert other.is_free(lock_key(name))

        def take_synchronously() -> None:
            with try_advisory_lock(name) as lock:
                assert lock

        run(main)

    def test_siblings_stay_apart_after_their_parent_used_a_lock(self, name: str, other: OtherSession) -> None:
        inside: list[int] = []
        most: list[int] = []

        async def work(number: int) -> None:
            lock = await sync_to_async(try_advisory_lock(name).acquire)()
            if lock:
                inside.append(number)
                most.append(len(inside))
                await asyncio.sleep(0.001)
                inside.remove(number)
                await sync_to_async(lock.release)()

        async def main() -> None:
            async with advisory_lock(name):
                pass
            await asyncio.gather(*(work(number) for number in range(5)))

        run(main)
        assert max(most) == 1

    def test_only_the_task_that_took_it_releases(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            lock = await advisory_lock(name).aacquire()
            with pytest.raises(AdvisoryLockError, match="another thread or task"):
                await asyncio.create_task(lock.arelease())
            with pytest.raises(AdvisoryLockError, match="another thread or task"):
                await asyncio.create_task(lock.__aexit__(None, None, None))
            with pytest.raises(AdvisoryLockError):
                await asyncio.to_thread(lock.release)
            assert await asyncio.create_task(lock.ais_held())
            await lock.arelease()

        run(main)

    def test_a_block_left_in_another_task(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name)

        async def leave() -> None:
            await lock.__aexit__(None, None, None)

        async def main() -> None:
            await lock.__aenter__()
            with pytest.raises(AdvisoryLockError, match="only the task that entered"):
                await asyncio.create_task(leave())
            assert not other.is_free(lock_key(name))
            await lock.__aexit__(None, None, None)

        run(main)

    def test_the_task_that_took_it_has_ended(self, name: str, other: OtherSession) -> None:
        """Nobody else could release it any more."""

        async def main() -> None:
            tasks = [asyncio.create_task(advisory_lock(name, number).aacquire()) for number in range(3)]
            for lock in await asyncio.gather(*tasks):
                assert await lock.ais_held()
                await lock.arelease()
            assert not granted(other)

        run(main)

    def test_what_wait_for_waits_for(self, name: str, other: OtherSession) -> None:
        """Before Python 3.12 `wait_for` makes a task of its own for it, which is the owner then."""

        async def main() -> None:
            lock = await asyncio.wait_for(advisory_lock(name).aacquire(), LIMIT)
            async with try_advisory_lock(name) as nested:
                assert bool(nested) is (sys.version_info >= (3, 12))
            await lock.arelease()
            assert not granted(other)

        run(main)

    def test_synchronous_code_that_calls_asynchronous_code(self, name: str, other: OtherSession) -> None:
        """The task keeps its lock, whatever `async_to_sync` brings back into its context."""

        async def innermost() -> None:
            async with advisory_lock(name, "inner"):
                pass

        def bridge() -> None:
            async_to_sync(innermost)()

        async def main() -> None:
            async with advisory_lock(name):
                await sync_to_async(bridge)()
                gc.collect()
                async with advisory_lock(name, "again"):
                    pass
                assert not other.is_free(lock_key(name))
            assert not granted(other)

        run(main)

    @since_3_11
    def test_tasks_that_share_a_context(self, name: str, other: OtherSession) -> None:
        context = contextvars.copy_context()

        async def main() -> None:
            inside, go = asyncio.Event(), asyncio.Event()

            async def first() -> None:
                async with advisory_lock(name):
                    inside.set()
                    await go.wait()
                    gc.collect()
                    async with advisory_lock(name, "again"):
                        pass
                    assert not other.is_free(lock_key(name))

            async def second() -> None:
                await inside.wait()
                async with advisory_lock(name, "second"):
                    pass
                go.set()

            tasks = [asyncio.create_task(work(), context=context) for work in (first, second)]  # type: ignore[call-arg]
            await asyncio.gather(*tasks)
            assert not granted(other)

        run(main)

    def test_code_on_threads_of_its_own(self, name: str, other: OtherSession) -> None:
        """`thread_sensitive=False`: the same owner on another session, which could wait for itself for ever."""

        def inner() -> None:
            try:
                assert not try_advisory_lock(name).acquire()
                with pytest.raises(LockDeadlock):
                    advisory_lock(name).acquire()
                with advisory_lock(name, "else") as lock:
                    assert lock.is_held()
            finally:
                connections.close_all()

        async def main() -> None:
            async with advisory_lock(name):
                await sync_to_async(inner, thread_sensitive=False)()
                assert not other.is_free(lock_key(name))

        run(main)

    def test_a_synchronous_wait_for_another_task_is_said_at_once(self, name: str, other: OtherSession) -> None:
        """It would block the thread that the other task needs to release its lock."""

        async def main() -> None:
            go = asyncio.Event()

            async def wait() -> None:
                await go.wait()
                with pytest.raises(LockDeadlock):
                    await sync_to_async(advisory_lock(name).acquire)()

            task = asyncio.create_task(wait())
            async with advisory_lock(name):
                go.set()
                await task

        run(main)


class TestThreadSensitiveContext:
    """As under ASGI, where each request has a thread, and so a session, of its own."""

    def test_each_has_a_session_of_its_own(self, name: str, other: OtherSession) -> None:
        async def work() -> int:
            async with ThreadSensitiveContext():
                try:
                    async with advisory_lock(name, poll_interval=0.005):
                        return await sync_to_async(backend_pid)()
                finally:
                    await sync_to_async(connections.close_all)()

        async def main() -> None:
            pids = await asyncio.gather(*(asyncio.create_task(work()) for _ in range(4)))
            assert len(set(pids)) == 4

        run(main)

    def test_left_in_another_one(self, name: str, other: OtherSession) -> None:
        """Said, and not for ever: its session ends with the thread of its context."""
        lock = advisory_lock(name)

        async def main() -> None:
            async with ThreadSensitiveContext():
                await lock.__aenter__()
            with pytest.raises(AdvisoryLockError, match="ThreadSensitiveContext"):
                await lock.__aexit__(None, None, None)
            await until(lambda: gc.collect() >= 0 and not granted(other), "freed")

        with pytest.warns(ResourceWarning):
            run(main)


class TestWaiting:
    def test_the_event_loop_goes_on(self, name: str, other: OtherSession) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        async def main() -> None:
            other.take(lock_key(name))
            ticker, waiter = asyncio.create_task(tick()), asyncio.create_task(take(advisory_lock(name)))
            await until(lambda: ticks > 100)
            assert not waiter.done()
            other.drop(lock_key(name))
            await waiter
            await cancelled(ticker)

        run(main)

    @excluding
    def test_the_shared_thread_goes_on(self, make: Make, name: str, other: OtherSession) -> None:
        async def main() -> None:
            async with make(name):
                waiter = asyncio.create_task(take(make(name)))
                for _ in range(20):
                    assert await sync_to_async(value)("SELECT 1") == 1
                    assert await Account.objects.filter(pk=0).acount() == 0
                    await asyncio.sleep(0.005)
                assert not waiter.done()
            await waiter

        run(main)

    @excluding
    @pytest.mark.parametrize("timeout", [0, 0.1, 0.4])
    def test_the_time_is_kept_and_the_last_try_is_at_its_end(
        self, make: Make, timeout: float, name: str, other: OtherSession
    ) -> None:
        async def wait() -> float:
            with pytest.raises(LockTimeout) as caught:
                await make(name, timeout=timeout).aacquire()
            return float(caught.value.waited or 0.0)

        async def main() -> None:
            async with make(name):
                waited = await asyncio.create_task(wait())
            assert timeout <= waited < timeout + LIMIT

        run(main)

    def test_free_shortly_before_the_time_is_up(self, name: str, other: OtherSession) -> None:
        """By then it sleeps longer than what is left, and looks once more at the deadline."""

        async def main() -> None:
            other.take(lock_key(name))
            pid = await sync_to_async(backend_pid)()
            waiter = asyncio.create_task(take(advisory_lock(name, timeout=1, poll_interval=60)))
            tried = "SELECT state = 'idle' AND query LIKE '%%try_advisory%%' FROM pg_stat_activity WHERE pid = %s"
            await asyncio.to_thread(wait_until, lambda: other.one(tried, [pid]), "the first try")
            other.drop(lock_key(name))
            assert 0.9 < (await waiter).waited < LIMIT

        run(main)

    def test_a_holder_elsewhere_is_named(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            other.take(lock_key(name))
            for timeout in (0, 0.02):
                with pytest.raises(LockTimeout, match=f"pid {other.pid} \\(other-session\\)"):
                    await advisory_lock(name, timeout=timeout).aacquire()
            other.drop(lock_key(name))

        run(main)

    def test_pauses_grow_from_short_to_long(self, name: str, other: OtherSession) -> None:
        assert _tries(name, other, 1.0) in range(6, 16)

    def test_a_poll_interval(self, name: str, other: OtherSession) -> None:
        assert _tries(name, other, 0.5, poll_interval=0.2) in range(3, 8)

    def test_no_snapshot_stays_open(self, name: str, other: OtherSession) -> None:
        """Case 37, in its async kind: between two tries the session is idle, in no transaction."""

        async def main() -> None:
            other.take(lock_key(name))
            pid = await sync_to_async(backend_pid)()
            waiter = asyncio.create_task(advisory_lock(name, poll_interval=0.05).aacquire())
            for _ in range(10):
                await asyncio.sleep(0.01)
                assert not other.waiters(lock_key(name))
            await until(
                lambda: other.one("SELECT state FROM pg_stat_activity WHERE pid = %s", [pid]) == "idle",
                "an idle session",
            )
            await cancelled(waiter)
            other.drop(lock_key(name))

        run(main)

    @waiting
    def test_what_a_free_lock_costs(self, make: Make, name: str, other: OtherSession) -> None:
        """One statement to take it and one to free it, and a hop into the thread for each."""

        async def main() -> None:
            lock = make(name)
            loop = asyncio.get_running_loop()
            await sync_to_async(backend_pid)()
            captured = await sync_to_async(_start_capturing)()
            hops: list[Any] = []
            run_in_executor = loop.run_in_executor

            def count(*args: Any) -> Any:
                hops.append(args)
                return run_in_executor(*args)

            setattr(loop, "run_in_executor", count)  # noqa: B010 - or mypy objects
            async with lock as handle:
                pass
            delattr(loop, "run_in_executor")
            await sync_to_async(captured.__exit__)(None, None, None)
            assert len(hops) == 3 if handle._options.dedicated else 2
            if not handle._options.dedicated:
                assert len(captured.captured_queries) == 2, captured.captured_queries

        run(main)

    def test_a_failed_try_has_nothing_to_end_in_the_thread(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            other.take(lock_key(name))
            entered, go = asyncio.Event(), asyncio.Event()

            async def attempt() -> None:
                async with try_advisory_lock(name) as lock:
                    assert not lock
                    entered.set()
                    await go.wait()

            task = asyncio.create_task(attempt())
            await entered.wait()
            async with busy_thread():
                go.set()
                await asyncio.wait([task], timeout=LIMIT / 2)
                assert task.done(), "held up"
            other.drop(lock_key(name))

        run(main)

    def test_a_try_does_not_overtake_a_task_at_the_gate(self, name: str, other: OtherSession) -> None:
        """The gate is held by the session of both, for which the server opens it again."""

        async def main() -> None:
            slot = await advisory_semaphore(name, limit=1).aacquire()
            waiter = asyncio.create_task(take(advisory_semaphore(name, limit=1)))
            await asyncio.sleep(0.3)  # its pauses are long by now
            await slot.arelease()
            assert not await try_advisory_semaphore(name, limit=1).aacquire()
            await waiter

        run(main)

    def test_waiting_for_a_semaphore_is_not_logged_at_every_try(
        self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def main() -> None:
            with caplog.at_level(logging.INFO, "django_advisory_lock"):
                async with advisory_semaphore(name, limit=1):
                    waiters = [asyncio.create_task(take(advisory_semaphore(name, limit=1))) for _ in range(3)]
                    await asyncio.sleep(0.3)
                await asyncio.gather(*waiters)

        run(main)
        assert caplog.messages == []

    def test_a_namespace_that_asks_the_context_and_the_connection(self, name: str, other: OtherSession) -> None:
        """It is called in the thread of synchronous code, with the context of the task."""
        tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="")

        def namespace() -> str:
            return f"{tenant.get()}-{value('SELECT 1')}"

        async def work(of: str) -> None:
            tenant.set(of)
            async with advisory_lock(name, timeout=0) as lock:
                assert lock.key == lock_key(name, namespace=f"{of}-1")
                assert not other.is_free(lock.key)

        async def main() -> None:
            await asyncio.gather(*(work(of) for of in "abc"))

        with override_settings(ADVISORY_LOCK_NAMESPACE=namespace):
            run(main)

    def test_the_session_is_killed_between_two_tries(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            other.take(lock_key(name))
            pid = await sync_to_async(backend_pid)()
            waiter = asyncio.create_task(advisory_lock(name, poll_interval=0.05).aacquire())
            await asyncio.sleep(0.1)
            other.kill(pid)
            from django.db import OperationalError

            with pytest.raises(OperationalError):
                await waiter
            other.drop(lock_key(name))
            async with advisory_lock(name) as lock:  # the alias works again
                assert await lock.ais_held()

        run(main)


def _start_capturing() -> CaptureQueriesContext:
    captured = CaptureQueriesContext(connections["default"])
    captured.__enter__()
    return captured


def _tries(name: str, other: OtherSession, timeout: float, **options: Any) -> int:
    """Count the tries of a wait whose time is up."""

    async def main() -> int:
        other.take(lock_key(name))
        captured = await sync_to_async(_start_capturing)()
        with pytest.raises(LockTimeout):
            await advisory_lock(name, timeout=timeout, **options).aacquire()
        await sync_to_async(captured.__exit__)(None, None, None)
        other.drop(lock_key(name))
        return sum("pg_try_advisory_lock" in query["sql"] for query in captured.captured_queries)

    return run(main)


class Moment:
    """Does something in the event loop while the thread is at a statement, and waits there until it is done."""

    def __init__(self, text: str, action: Callable[[], object], *, after: bool = False, times: int = 1) -> None:
        self.text, self.action, self.after, self.times = re.compile(text), action, after, times
        self.loop = asyncio.get_running_loop()
        self.seen = 0

    def __call__(self, execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if not self.text.match(sql) or self.seen:
            return execute(sql, *args)
        self.seen += 1
        if not self.after:
            self._act()
        result = execute(sql, *args)
        if self.after:
            self._act()
        return result

    def _act(self) -> None:
        for _ in range(self.times):
            done = threading.Event()
            self.loop.call_soon_threadsafe(self.action)
            self.loop.call_soon_threadsafe(self.loop.call_later, 0.001, done.set)
            assert done.wait(LIMIT)

    async def __aenter__(self) -> Moment:
        await sync_to_async(lambda: connections["default"].execute_wrappers.append(self))()
        return self

    async def __aexit__(self, *_: object) -> None:
        await sync_to_async(lambda: connections["default"].execute_wrappers.remove(self))()


at_a_statement = pytest.mark.parametrize("after", [False, True], ids=["before the statement", "after it"])


class TestCancelledWaits:
    @pytest.mark.parametrize(
        "make",
        [make for kind, make in (WAITING | TRYING).items() if "dedicated" not in kind],
        ids=[kind for kind in WAITING | TRYING if "dedicated" not in kind],
    )
    @at_a_statement
    @pytest.mark.parametrize("times", [1, 2])
    def test_while_the_thread_takes_it(
        self, make: Make, after: bool, times: int, name: str, other: OtherSession
    ) -> None:
        """Granted late, it is given back, and the owner is in no block."""

        async def main() -> None:
            entered: list[int] = []

            async def enter() -> None:
                async with make(name) as lock:
                    entered.append(1)
                    assert lock

            task = asyncio.create_task(enter())
            async with Moment(".*advisory", task.cancel, after=after, times=times) as moment:
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert moment.seen
            assert not entered
            assert not granted(other)

        run(main)

    def test_the_children_of_one_that_caught_its_cancellation_are_kept_apart(
        self, name: str, other: OtherSession
    ) -> None:
        """A block that its owner never came into would make it the owner of what its children do."""
        inside: list[int] = []
        most: list[int] = []

        async def child(number: int) -> None:
            lock = await sync_to_async(try_advisory_lock(name, "children").acquire)()
            if lock:
                inside.append(number)
                most.append(len(inside))
                await asyncio.sleep(0.001)
                inside.remove(number)
                await sync_to_async(lock.release)()

        async def parent() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                async with advisory_lock(name):
                    pytest.fail("entered")
            await asyncio.gather(child(1), child(2), child(3))

        async def main() -> None:
            task = asyncio.create_task(parent())
            async with Moment(".*advisory", task.cancel, after=True):
                await task
            assert not granted(other)

        run(main)
        assert max(most) == 1

    @excluding
    def test_at_every_step(self, make: Make, name: str, other: OtherSession) -> None:
        async def work() -> None:
            async with make(name, timeout=LIMIT) as lock:
                assert lock
                await asyncio.sleep(0)

        async def main() -> None:
            for steps in range(30):
                task = asyncio.create_task(work())
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert not granted(other), steps

        run(main)

    @pytest.mark.parametrize("kind", ["lock", "several", "semaphore"])
    def test_at_random_times(self, kind: str, name: str, other: OtherSession) -> None:
        """Hundreds of times, while three tasks and another session want it too."""
        chance = random.Random(kind)
        make = WAITING[kind]

        async def work() -> None:
            async with make(name):
                await asyncio.sleep(chance.uniform(0, 0.002))

        async def disturb() -> None:
            for _ in range(100):
                tasks = [asyncio.create_task(work()) for _ in range(3)]
                for task in tasks:
                    await asyncio.sleep(chance.uniform(0, 0.004))
                    task.cancel()
                    if chance.random() < 0.3:
                        task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        async def main() -> None:
            await asyncio.gather(disturb(), disturb())
            assert not granted(other)
            async with make(name, timeout=0):
                assert granted(other)

        run(main)

    @excluding
    @pytest.mark.parametrize("tried", [False, True], ids=["before the first try", "between two tries"])
    def test_while_other_code_keeps_the_thread_busy(
        self, make: Make, tried: bool, name: str, other: OtherSession
    ) -> None:
        """The cancellation is not held up, and nothing is taken later."""

        async def main() -> None:
            if tried and make is WAITING["semaphore"]:
                pytest.skip("who stands at the gate has it to free, in the thread")
            async with make(name) if tried else contextlib.nullcontext():
                task = asyncio.create_task(make(name).aacquire()) if tried else None
                await asyncio.sleep(0.1)
                async with busy_thread():
                    task = task or asyncio.create_task(make(name).aacquire())
                    await asyncio.sleep(0.02)
                    task.cancel()
                    await asyncio.wait([task], timeout=LIMIT / 2)
                    assert task.cancelled(), "held up"
            await sync_to_async(value)("SELECT 1")
            assert not granted(other)

        run(main)

    def test_at_the_gate_of_a_semaphore(self, name: str, other: OtherSession) -> None:
        """It frees the gate, though the thread is busy just then."""

        async def main() -> None:
            async with advisory_semaphore(name, limit=1):
                task = asyncio.create_task(advisory_semaphore(name, limit=1).aacquire())
                await until(lambda: granted(other) == 2, "at the gate")
                async with busy_thread():
                    task.cancel()
                    await asyncio.sleep(0.01)
                    task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert granted(other) == 1

        run(main)

    @since_3_11
    @excluding
    def test_within_asyncio_timeout(self, make: Make, name: str, other: OtherSession) -> None:
        async def wait() -> None:
            for seconds in (0.0, 0.001, 0.01, 0.1):
                with pytest.raises(TimeoutError):
                    async with since.timeout(LIMIT), since.timeout(seconds):
                        await make(name).aacquire()
            assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

        async def main() -> None:
            async with make(name):
                held = granted(other)
                await asyncio.create_task(wait())
                assert granted(other) == held

        run(main)

    def test_within_wait_for(self, name: str, other: OtherSession) -> None:
        async def wait() -> None:
            async with advisory_lock(name):
                pytest.fail("entered")

        async def main() -> None:
            async with advisory_lock(name):
                for seconds in (0.001, 0.01, 0.1):
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(asyncio.create_task(wait()), seconds)

        run(main)


class TestCancelledExits:
    """The lock is freed, and the cancellation comes after that."""

    @pytest.mark.parametrize("kind", [kind for kind in WAITING | TRYING if "dedicated" not in kind])
    @at_a_statement
    @pytest.mark.parametrize("times", [1, 2])
    def test_while_the_thread_frees_it(
        self, kind: str, after: bool, times: int, name: str, other: OtherSession
    ) -> None:
        async def main() -> None:
            async def work() -> None:
                async with (WAITING | TRYING)[kind](name) as lock:
                    assert lock

            task = asyncio.create_task(work())
            # A semaphore unlocks its gate as it takes a slot.
            async with Moment("(?!WITH RECURSIVE).*unlock", task.cancel, after=after, times=times) as moment:
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert moment.seen
            assert not granted(other)

        run(main)

    @every
    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_while_the_thread_is_busy(self, make: Make, times: int, name: str, other: OtherSession) -> None:
        async def main() -> None:
            go, at_the_end, is_dedicated = asyncio.Event(), False, False

            async def work() -> None:
                nonlocal at_the_end, is_dedicated
                async with make(name) as lock:
                    assert lock
                    is_dedicated = lock._options.dedicated
                    await go.wait()
                    at_the_end = True

            task = asyncio.create_task(work())
            await until(lambda: granted(other))
            await asyncio.sleep(0.02)
            async with busy_thread():
                go.set()
                await until(lambda: at_the_end)
                if is_dedicated:  # it needs nothing of that thread
                    await task
                    assert not granted(other)
                    return
                for _ in range(times):
                    await asyncio.sleep(0.01)
                    task.cancel()
                await asyncio.sleep(0.01)
                assert not task.done()
                assert granted(other)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not granted(other)

        run(main)

    def test_cancelled_in_the_body_just_before_its_end(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            async with advisory_lock(name):
                asyncio.current_task().cancel()  # type: ignore[union-attr]

        async def main() -> None:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(work())
            assert not granted(other)

        run(main)

    def test_synchronous_code_that_nobody_can_cancel(self, name: str, other: OtherSession) -> None:
        """The end of the block comes after it in the thread, so the lock outlasts it."""
        begun, end = threading.Event(), threading.Event()
        seen: list[int] = []

        def work() -> None:
            begun.set()
            assert end.wait(LIMIT)
            seen.append(granted(other))

        async def hold() -> None:
            async with advisory_lock(name):
                await sync_to_async(work)()

        async def main() -> None:
            task = asyncio.create_task(hold())
            await until(begun.is_set)
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
            end.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert seen == [1]
            assert not granted(other)

        run(main)

    def test_a_release_by_hand(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            async def work() -> None:
                lock = await advisory_lock(name).aacquire()
                async with busy_thread():
                    asyncio.get_running_loop().call_later(0.02, asyncio.current_task().cancel)  # type: ignore[union-attr]
                    release = asyncio.ensure_future(lock.arelease())
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(LIMIT)
                with pytest.raises(AdvisoryLockError):
                    await release  # another task
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await lock.arelease()

            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(work())
            assert not granted(other)

        run(main)

    @since_3_11
    def test_a_body_that_runs_out_of_time(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    async with since.timeout(random.uniform(0, 0.01)), advisory_lock(name):
                        await asyncio.sleep(LIMIT)
                assert not granted(other)

        run(main)


class TestInterrupts:
    """Ctrl-C ends `asyncio.run()`, which cancels what is left."""

    CODE = """
import asyncio, sys
from django_advisory_lock import advisory_lock, lock_key
name, what = sys.argv[1:]
async def hold():
    async with advisory_lock(name):
        print("ready", flush=True)
        await asyncio.sleep(600)
async def main():
    if what == "hold":
        await hold()
    else:
        first = asyncio.create_task(hold())
        await asyncio.sleep(0.1)
        await asyncio.create_task(advisory_lock(name).aacquire())
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
"""

    @pytest.mark.parametrize("what", ["hold", "wait"])
    def test_ctrl_c(self, what: str, name: str, other: OtherSession) -> None:
        process = spawn(self.CODE, name, what)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if what == "wait":
                time.sleep(0.3)  # any moment of the wait will do
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.poll() is None  # its session is open
            other.wait_until_free(lock_key(name))
            out, errors = process.communicate("\n", timeout=LIMIT)
            assert (process.returncode, out, errors) == (0, "", "")
        finally:
            process.kill()
            process.wait()


class TestAbandoned:
    """Loops that are closed, coroutines and generators that are: nothing can be awaited any more."""

    @contextlib.contextmanager
    def loop(self) -> Iterator[asyncio.AbstractEventLoop]:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending!"
        try:
            yield loop
        finally:
            loop.close()
            gc.collect()

    @excluding
    def test_the_loop_is_closed_while_a_task_waits(self, make: Make, name: str, other: OtherSession) -> None:
        tasks: list[asyncio.Task[Any]] = []

        async def start() -> None:
            tasks.append(asyncio.create_task(make(name).aacquire()))
            await asyncio.sleep(0.1)

        holder = make(name).acquire()
        # What it had already, the gate of a semaphore or a session of its own, is dropped.
        has_something = make in (WAITING["semaphore"], WAITING["dedicated"])
        with pytest.warns(ResourceWarning) if has_something else contextlib.nullcontext():
            with self.loop() as loop:
                loop.run_until_complete(start())
                tasks.clear()
            run(lambda: asyncio.sleep(0))  # a try that was under way is over
            gc.collect()
        holder.release()
        run(_settle)
        assert not granted(other)

    def test_the_loop_is_closed_while_the_thread_takes_it(self, name: str, other: OtherSession) -> None:
        """Nobody is there to have it: it is dropped, and freed by the next lock operation."""
        tasks: list[asyncio.Task[Any]] = []
        begun, end = threading.Event(), threading.Event()

        async def start() -> None:
            tasks.append(asyncio.create_task(advisory_lock(name).aacquire()))
            await until(begun.is_set)

        with override_settings(ADVISORY_LOCK_NAMESPACE=_stop_at(begun, end)):
            with pytest.warns(ResourceWarning, match="dropped without release"):
                with self.loop() as loop:
                    loop.run_until_complete(start())
                    tasks.clear()
                end.set()
                run(lambda: asyncio.sleep(0))
                gc.collect()
            run(_settle)
        assert not granted(other)

    def test_a_coroutine_is_closed_while_the_thread_takes_it(self, name: str, other: OtherSession) -> None:
        """The thread gives it back by itself."""
        begun, end = threading.Event(), threading.Event()

        async def main() -> None:
            coroutine = advisory_lock(name).aacquire()
            future = coroutine.send(None)
            await until(begun.is_set)
            coroutine.close()
            end.set()
            await sync_to_async(value)("SELECT 1")
            assert not granted(other)
            del future

        with override_settings(ADVISORY_LOCK_NAMESPACE=_stop_at(begun, end)):
            run(main)

    def test_a_coroutine_is_closed_before_the_thread_takes_it(self, name: str, other: OtherSession) -> None:
        """The thread is busy with something else, and finds nothing to do afterwards."""

        async def main() -> None:
            async with busy_thread():
                coroutine = advisory_lock(name).aacquire()
                future = coroutine.send(None)
                coroutine.close()
            await sync_to_async(value)("SELECT 1")
            assert not granted(other)
            del future

        run(main)

    def test_a_coroutine_is_closed_while_its_key_is_made_in_vain(self, name: str, other: OtherSession) -> None:
        begun, end = threading.Event(), threading.Event()
        stop = _stop_at(begun, end)

        def namespace() -> str:
            stop()
            raise LookupError("no tenant")

        async def main() -> None:
            coroutine = advisory_lock(name).aacquire()
            future = coroutine.send(None)
            await until(begun.is_set)
            coroutine.close()
            end.set()
            await sync_to_async(value)("SELECT 1")
            assert not granted(other)
            del future

        with override_settings(ADVISORY_LOCK_NAMESPACE=namespace):
            run(main)

    # The block cannot await its end, and Python says so.
    @pytest.mark.filterwarnings("ignore:Exception ignored in. <coroutine:pytest.PytestUnraisableExceptionWarning")
    def test_the_loop_is_closed_inside_the_block(self, name: str, other: OtherSession) -> None:
        """Freed by the next lock operation on the session, as with every handle that is dropped."""
        tasks: list[asyncio.Task[Any]] = []

        async def hold() -> None:
            async with advisory_lock(name):
                await asyncio.sleep(LIMIT)

        async def start() -> None:
            tasks.append(asyncio.create_task(hold()))
            await until(lambda: granted(other))
            await asyncio.sleep(0.02)

        with pytest.warns(ResourceWarning, match="dropped without release"):
            with self.loop() as loop:
                loop.run_until_complete(start())
                tasks.clear()
        run(_settle)
        assert not granted(other)

    def test_a_try_that_has_not_begun_is_taken_back(self, name: str, other: OtherSession) -> None:
        """The thread is busy with something else when the task is cancelled."""
        begun, end = threading.Event(), threading.Event()

        async def main() -> None:
            busy = asyncio.create_task(sync_to_async(_stop_at(begun, end))())
            await until(begun.is_set)
            task = asyncio.create_task(advisory_lock(name).aacquire())
            await asyncio.sleep(0)  # one turn of the loop, in which it goes to wait for the thread
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            end.set()
            await busy
            await sync_to_async(value)("SELECT 1")
            assert not granted(other)

        run(main)

    def test_a_decorated_coroutine_is_closed_after_its_loop(self, name: str, other: OtherSession) -> None:
        """It ends as it should, and its lock is freed by the next lock operation on the session."""

        @advisory_lock(name)
        async def sleeps() -> None:
            await asyncio.sleep(LIMIT)

        coroutine: Any = sleeps()

        async def start(coroutine: Any) -> None:
            task = asyncio.create_task(coroutine)
            await until(lambda: granted(other))
            await asyncio.sleep(0.02)
            del task

        with pytest.warns(ResourceWarning, match="dropped without release"):
            with self.loop() as loop:
                loop.run_until_complete(start(coroutine))
            coroutine.close()
            del coroutine
            gc.collect()
        run(_settle)
        assert not granted(other)

    def test_a_coroutine_is_closed_while_it_waits(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            other.take(lock_key(name))
            coroutine = advisory_lock(name).aacquire()
            future = coroutine.send(None)  # on its way into the thread
            coroutine.close()
            del future
            await sync_to_async(value)("SELECT 1")
            other.drop(lock_key(name))
            async with advisory_lock(name, "settle"):
                assert granted(other) == 1
            coroutine = advisory_lock(name).aacquire()
            coroutine.close()  # never begun

        run(main)

    def test_an_asynchronous_generator_is_closed(self, name: str, other: OtherSession) -> None:
        async def generate() -> AsyncIterator[int]:
            async with advisory_lock(name):
                yield 1
                yield 2

        async def main() -> None:
            async with contextlib.aclosing(generate()) as numbers:  # type: ignore[type-var]
                async for _ in numbers:
                    break
            assert not granted(other)

        run(main)

    def test_an_asynchronous_generator_is_left_half_way(self, name: str, other: OtherSession) -> None:
        """Case 88: its loop closes it, in a task of its own."""
        failed: list[dict[str, Any]] = []

        async def generate() -> AsyncIterator[int]:
            async with advisory_lock(name):
                yield 1
                yield 2

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
            async for _ in generate():
                break
            await until(lambda: not granted(other), "freed")

        run(main)
        gc.collect()
        assert failed == []

    def test_a_handle_is_dropped(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            with pytest.warns(ResourceWarning, match="dropped without release") as warned:
                await advisory_lock(name).aacquire()
                # The loop and the thread have the result of their last step at hand for a moment.
                await until(lambda: gc.collect() >= 0 and len(warned), "the warning")
            async with advisory_lock(name, "settle"):
                assert granted(other) == 1

        run(main)


def _stop_at(begun: threading.Event, end: threading.Event) -> Callable[[], str]:
    """Return a namespace that keeps the thread where it is about to take a lock."""

    def namespace() -> str:
        begun.set()
        assert end.wait(LIMIT)
        return ""

    return namespace


async def _settle() -> None:
    """Use the session once more, so that it frees what was dropped on it."""
    async with advisory_lock("settle"):
        pass


class TestLosses:
    @pytest.mark.parametrize("using", ["block", "hand"])
    @pytest.mark.parametrize("how", ["killed", "killed and seen", "closed", "replaced", "unlocked"])
    def test_said_at_the_end_of_the_block(self, using: str, how: str, name: str, other: OtherSession) -> None:
        def lose() -> None:
            if how.startswith("killed"):
                other.kill(backend_pid())
                if how == "killed and seen":
                    with pytest.raises(Exception, match=r"terminat|closed"):
                        value("SELECT 1")
            elif how == "unlocked":
                value("SELECT pg_advisory_unlock(%s)", lock_key(name).args)
            else:
                connections["default"].close()
                if how == "replaced":
                    value("SELECT 1")

        async def main() -> None:
            with pytest.raises(LockLost, match="was lost") as caught:
                if using == "block":
                    async with advisory_lock(name) as lock:
                        await sync_to_async(lose)()
                else:
                    lock = await advisory_lock(name).aacquire()
                    await sync_to_async(lose)()
                    await lock.arelease()
            assert (caught.value.key, caught.value.using) == (lock_key(name), "default")
            assert lock.lost.is_set()
            async with advisory_lock(name, timeout=0) as again:
                assert await again.ais_held()

        run(main)

    def test_asked_in_between(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            with pytest.raises(LockLost):
                async with advisory_lock(name) as lock:
                    await lock.acheck()
                    pid = await sync_to_async(backend_pid)()
                    other.kill(pid)
                    assert not await lock.ais_held()
                    assert lock.lost.is_set()
                    await lock.acheck()

        run(main)

    def test_an_error_of_the_body_stays_and_gets_a_note(
        self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def main() -> None:
            with caplog.at_level(logging.ERROR, "django_advisory_lock"), pytest.raises(KeyError) as caught:
                async with advisory_lock(name):
                    other.kill(await sync_to_async(backend_pid)())
                    raise KeyError("mine")
            if sys.version_info >= (3, 11):
                assert "was lost" in caught.value.__notes__[0]
            assert "KeyError" in caplog.text

        run(main)

    @since_3_11
    def test_a_cancelled_body_stays_cancelled(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            with pytest.raises(TimeoutError):
                async with since.timeout(0.1), advisory_lock(name):
                    other.kill(await sync_to_async(backend_pid)())
                    await asyncio.sleep(LIMIT)

        run(main)

    def test_a_dedicated_session_is_watched(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            with pytest.raises(LockLost):
                async with advisory_lock(name, dedicated=True) as lock:
                    other.kill(other.holder(lock.key))
                    await until(lock.lost.is_set)

        run(main)

    def test_old_connections_are_closed_in_the_block(self, name: str, other: OtherSession) -> None:
        from django.db import close_old_connections

        async def main() -> None:
            async with advisory_lock(name) as lock:
                await sync_to_async(close_old_connections)()
                await lock.acheck()

        run(main)


class TestSynchronousApiInAsynchronousCode:
    def test_taking(self, name: str, other: OtherSession) -> None:
        @advisory_lock(name)
        def work() -> None:
            pytest.fail("ran")

        async def main() -> None:
            with pytest.raises(SynchronousOnlyOperation):
                work()
            with pytest.raises(SynchronousOnlyOperation):
                with advisory_lock(name):
                    pytest.fail("entered")
            for lock in (advisory_lock(name), try_advisory_lock(name), advisory_semaphore(name, limit=1)):
                with pytest.raises(SynchronousOnlyOperation):
                    lock.acquire()
            assert not granted(other)
            async with advisory_lock(name, timeout=0) as handle:
                with pytest.raises(SynchronousOnlyOperation):
                    handle.is_held()
                with pytest.raises(SynchronousOnlyOperation):
                    handle.check()

        run(main)

    def test_releasing(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            handle = await advisory_lock(name).aacquire()
            with pytest.raises(SynchronousOnlyOperation):
                handle.release()
            assert await handle.ais_held()
            await handle.arelease()

        run(main)


class TestTransactions:
    @pytest.mark.parametrize("scope", ["auto", "transaction"])
    @pytest.mark.parametrize("make", [advisory_lock, try_advisory_lock, advisory_lock_all])
    def test_refused_inside_one(self, make: Make, scope: Any, name: str, other: OtherSession) -> None:
        async def work() -> None:
            with pytest.raises(TransactionManagementError, match="asynchronous code"):
                async with make(name, scope=scope):
                    pytest.fail("entered")
            assert await Account.objects.acount() >= 0  # the transaction is usable

        with transaction.atomic():
            async_to_sync(work)()
            assert not granted(other)
        connections["default"].close()

    def test_a_transaction_lock_outside_one(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            with pytest.raises(TransactionManagementError):
                await advisory_lock(name, scope="transaction").aacquire()

        run(main)

    def test_session_scope_inside_one(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            async with advisory_lock(name, scope="session") as lock:
                assert lock.scope == "session"
                assert not other.is_free(lock.key)
            assert other.is_free(lock.key)

        with transaction.atomic():
            async_to_sync(work)()
        connections["default"].close()

    def test_session_scope_inside_one_that_fails(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            with pytest.raises(Exception, match="division"):
                async with advisory_lock(name, scope="session"):
                    await sync_to_async(value)("SELECT 1/0")
            assert other.is_free(lock_key(name))

        with contextlib.suppress(TransactionManagementError), transaction.atomic():
            async_to_sync(work)()
        connections["default"].close()

    def test_autocommit_off(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            await sync_to_async(transaction.set_autocommit)(False)
            with pytest.raises(TransactionManagementError):
                await advisory_lock(name).aacquire()
            await sync_to_async(transaction.rollback)()
            await sync_to_async(transaction.set_autocommit)(True)

        run(main)

    def test_another_alias_inside_one(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            with pytest.raises(TransactionManagementError, match="'other'"):
                await advisory_lock(name).aacquire()

        with transaction.atomic(using="other"):
            async_to_sync(work)()
        connections.close_all()

    def test_the_lock_belongs_into_the_synchronous_function(self, name: str, other: OtherSession) -> None:
        @transaction.atomic
        def work() -> str:
            with advisory_lock(name) as lock:
                return lock.scope

        async def main() -> None:
            assert await sync_to_async(work)() == "transaction"
            assert other.is_free(lock_key(name))

        run(main)

    def test_a_synchronous_transaction_lock_nests_in_an_asynchronous_block(
        self, name: str, other: OtherSession
    ) -> None:
        def work() -> str:
            with transaction.atomic(), advisory_lock(name) as lock:
                return lock.scope

        async def main() -> None:
            async with advisory_lock(name):
                assert await sync_to_async(work)() == "transaction"
                assert not other.is_free(lock_key(name))
            assert other.is_free(lock_key(name))

        run(main)


class TestInTestCase(TestCase):
    """The `atomic()` around a test does not count: the code under test locks as in production."""

    async def test_blocks_lock_as_in_production(self) -> None:
        account = await Account.objects.acreate(name="before")
        async with advisory_lock("in-test-case") as lock:
            assert lock.scope == "session"
            assert await lock.ais_held()
            account.name = "inside"
            await account.asave()
        assert not await lock.ais_held()
        await account.arefresh_from_db()
        assert account.name == "inside"

    async def test_tasks_exclude_each_other(self) -> None:
        inside, most = 0, 0

        async def work() -> None:
            nonlocal inside, most
            async with advisory_lock("in-test-case", poll_interval=0.005):
                inside += 1
                most = max(most, inside)
                await Account.objects.acount()
                inside -= 1

        await asyncio.gather(*(work() for _ in range(4)))
        assert most == 1

    async def test_blocks_of_two_tasks_cross(self) -> None:
        """Each has a savepoint of its own around its body, and the first one ends first."""
        first, second = asyncio.Event(), asyncio.Event()

        async def begin() -> None:
            async with advisory_lock("in-test-case", 1):
                first.set()
                await second.wait()
            first.clear()

        async def end() -> None:
            await first.wait()
            async with advisory_lock("in-test-case", 2):
                second.set()
                await until(lambda: not first.is_set())

        await asyncio.gather(begin(), end())
        assert await Account.objects.acount() == 0

    async def test_what_fails_in_the_body(self) -> None:
        with pytest.raises(KeyError):
            async with advisory_lock("in-test-case"):
                raise KeyError
        assert await self.aacquired()

    async def aacquired(self) -> bool:
        async with try_advisory_lock("in-test-case") as lock:
            return bool(lock)

    def test_async_to_sync_in_a_synchronous_test(self) -> None:
        assert async_to_sync(self.aacquired)()


@pytest.mark.usefixtures("other")
class TestInTransactionTestCase(TransactionTestCase):
    async def test_blocks(self) -> None:
        async with advisory_lock("in-test-case") as lock:
            assert lock.scope == "session"
            await Account.objects.acreate(name="inside")
        assert not await lock.ais_held()

    async def test_an_async_to_sync_test_runs_on_the_thread_of_its_connection(self) -> None:
        async with advisory_lock("in-test-case"):
            with pytest.raises(LockTimeout):
                await asyncio.create_task(advisory_lock("in-test-case", timeout=0).aacquire())


class TestAsgi:
    """Async views, through the handler that every ASGI server calls."""

    def test_the_test_client(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            client = AsyncClient()
            answer = await client.get(f"/block/{name}")
            assert (answer.status_code, answer.content) == (200, b"True")
            assert (await client.get(f"/tried/{name}")).content == b"done"
            assert (await client.get(f"/sync/{name}")).content == b"True"
            other.take(lock_key(name))
            answer = await client.get(f"/block/{name}")
            assert answer.status_code == 409
            assert f"pid {other.pid}" in answer.content.decode()
            assert (await client.get(f"/tried/{name}")).status_code == 409
            other.drop(lock_key(name))

        with override_settings(ROOT_URLCONF="tests.asgi"):
            run(main)

    @pytest.mark.parametrize("view", ["locked", "unlocked"])
    def test_simultaneous_requests_of_the_test_client(self, view: str, name: str, other: OtherSession) -> None:
        account = Account.objects.create()

        async def main() -> None:
            answers = await asyncio.gather(*(AsyncClient().get(f"/{view}/{name}/{account.pk}") for _ in range(6)))
            assert {answer.status_code for answer in answers} == {200}

        with override_settings(ROOT_URLCONF="tests.asgi"):
            run(main)
        account.refresh_from_db()
        account.delete()
        assert account.balance == 6 if view == "locked" else account.balance < 6


@pytest.fixture(scope="module")
def running(django_db_setup: None) -> Iterator[WebServer]:
    with uvicorn("own", application="own", settings="tests.settings") as server:
        yield server


class TestServer:
    @pytest.fixture
    def server(self, running: WebServer, other: OtherSession) -> Iterator[WebServer]:
        yield running
        running.forget_clients()

    def test_simultaneous_requests(self, server: WebServer, name: str, other: OtherSession) -> None:
        """Each has a thread and a session of its own; without the lock updates are lost."""
        counts: dict[str, int] = {}
        for view in ("unlocked", "locked"):
            account = Account.objects.create()
            found = answers(server.at_once(12, f"/{view}/{name}/{account.pk}"))
            assert {answer.status for answer in found} == {200}, found
            account.refresh_from_db()
            account.delete()
            counts[view] = account.balance
        assert counts["locked"] == 12
        assert counts["unlocked"] < 12

    def test_busy(self, server: WebServer, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        answer = server.get(f"/block/{name}")
        assert answer.status == 409
        assert f"pid {other.pid} (other-session)" in answer.body
        assert server.get(f"/tried/{name}").status == 409
        other.drop(lock_key(name))
        assert server.get(f"/block/{name}").body == "True"

    def test_a_stream_that_is_left_half_way(self, server: WebServer, name: str, other: OtherSession) -> None:
        """Case 88."""
        request = server.send(f"/streamed/{name}")
        request.read_until(b"line")
        assert other.holders(lock_key(name)) == 1
        request.go_away()
        other.wait_until_free(lock_key(name))

    def test_a_client_that_goes_away(self, server: WebServer, name: str, other: OtherSession) -> None:
        """Django cancels the view: the lock is freed, and a request that waited for it gets it."""
        holder = server.send(f"/held/{name}")
        wait_until(lambda: other.holders(lock_key(name)) == 1)
        waiter = server.send(f"/held/{name}")
        waiting = server.send(f"/sync/{name}")
        other.wait_for_waiters(lock_key(name))
        waiter.go_away()
        holder.go_away()
        assert waiting.answer().body == "True"
        other.wait_until_free(lock_key(name))
