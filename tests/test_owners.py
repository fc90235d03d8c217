"""Tasks share the thread of `sync_to_async`, and with it the session: the owner is the task."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections, transaction

from django_advisory_lock import (
    AdvisoryLockError,
    LockDeadlock,
    LockHandle,
    advisory_lock,
    hops,
    lock_key,
    try_advisory_lock,
)
from django_advisory_lock.owners import current_owner, owner_in, task_owner
from django_advisory_lock.sessions import attach
from tests.support import OtherSession


async def close_connections() -> None:
    await sync_to_async(connections.close_all)()


class TestTasks:
    """Case 89."""

    def test_tasks_exclude_each_other(self, name: str, other: OtherSession) -> None:
        inside: list[int] = []
        most: list[int] = []
        skipped: list[int] = []

        async def work(number: int) -> None:
            lock = await sync_to_async(try_advisory_lock(name).acquire)()
            if not lock:
                skipped.append(number)
                return
            inside.append(number)
            most.append(len(inside))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            inside.remove(number)
            await sync_to_async(lock.release)()

        async def main() -> None:
            # What the parent did before must not make its children one owner.
            parent = await sync_to_async(advisory_lock(name, "before").acquire)()
            await sync_to_async(parent.release)()
            await asyncio.gather(*(work(number) for number in range(5)))
            await close_connections()

        asyncio.run(main())
        assert max(most) == 1
        assert skipped
        assert other.is_free(lock_key(name))

    def test_a_wait_for_another_task_on_the_session_is_said_at_once(self, name: str, other: OtherSession) -> None:
        async def wait() -> None:
            with pytest.raises(LockDeadlock):
                await sync_to_async(advisory_lock(name).acquire)()

        async def hold() -> None:
            go = asyncio.Event()

            async def later() -> None:
                await go.wait()
                await wait()

            task = asyncio.create_task(later())  # started outside the block: an owner of its own
            lock = await sync_to_async(advisory_lock(name).acquire)()
            go.set()
            await task
            await sync_to_async(lock.release)()
            await close_connections()

        asyncio.run(hold())

    def test_a_task_nests(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            outer = await sync_to_async(advisory_lock(name).acquire)()
            inner = await sync_to_async(advisory_lock(name).acquire)()
            await sync_to_async(inner.release)()
            assert await sync_to_async(outer.is_held)()
            await sync_to_async(outer.release)()
            await close_connections()

        asyncio.run(work())
        assert other.is_free(lock_key(name))

    def test_a_block_entered_in_one_call_and_left_in_another(self, name: str, other: OtherSession) -> None:
        lock = advisory_lock(name)

        async def work() -> None:
            await sync_to_async(lock.__enter__)()
            assert not other.is_free(lock_key(name))
            await sync_to_async(lock.__exit__)(None, None, None)
            busy = try_advisory_lock(name)
            other.take(lock_key(name))
            handle = await sync_to_async(busy.__enter__)()
            assert not handle
            await sync_to_async(busy.__exit__)(None, None, None)
            await close_connections()

        asyncio.run(work())
        assert other.drop(lock_key(name))

    def test_a_task_nests_after_a_savepoint_was_rolled_back(self, name: str, other: OtherSession) -> None:
        """It is the same task, though only the server knows whether its lock is still there."""

        def work() -> bool:
            with transaction.atomic():
                with advisory_lock(name):
                    pass
                with pytest.raises(KeyError), transaction.atomic():
                    raise KeyError
                with advisory_lock(name) as lock:
                    return lock.is_held()

        async def main() -> bool:
            try:
                return await sync_to_async(work)()
            finally:
                await close_connections()

        assert asyncio.run(main()) is True

    def test_only_the_task_releases(self, name: str, other: OtherSession) -> None:
        async def work() -> None:
            go, done = asyncio.Event(), asyncio.Event()
            locks: list[Any] = []

            async def hold() -> None:
                locks.append(await sync_to_async(advisory_lock(name).acquire)())
                go.set()
                await done.wait()
                await sync_to_async(locks[0].release)()

            task = asyncio.create_task(hold())
            await go.wait()
            with pytest.raises(AdvisoryLockError, match="another thread or task"):
                await sync_to_async(locks[0].release)()
            done.set()
            await task
            await close_connections()

        asyncio.run(work())
        assert other.is_free(lock_key(name))

    def test_async_to_sync_inside_a_synchronous_block(self, name: str, other: OtherSession) -> None:
        """The tasks below are owners of their own, also where the thread above them holds something."""
        most: list[int] = []
        inside: list[int] = []

        async def work(number: int) -> None:
            lock = await sync_to_async(try_advisory_lock(name).acquire)()
            if lock:
                inside.append(number)
                most.append(len(inside))
                await asyncio.sleep(0)
                inside.remove(number)
                await sync_to_async(lock.release)()

        async def main() -> None:
            await asyncio.gather(*(work(number) for number in range(4)))

        with advisory_lock(name, "outer"):
            async_to_sync(main)()
            assert current_owner() is current_owner()
            with advisory_lock(name, "outer"):
                pass  # the thread is itself again
        assert max(most) == 1


def test_a_thread_has_one_owner_and_every_thread_its_own() -> None:
    owners = {id(current_owner()): current_owner()}
    keep: list[Any] = []

    def work() -> None:
        keep.append(current_owner())
        assert current_owner() is keep[-1]

    for _ in range(10):  # one after the other, so that their idents are the same
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
    assert len({id(owner) for owner in keep} | owners.keys()) == 11


class TestCornersOfOwners:
    def test_a_block_that_never_began_beside_one_that_did(self, name: str, other: OtherSession) -> None:
        lock, owner = advisory_lock(name), current_owner()
        with lock as first:
            second = lock.acquire()
            owner.enter(lock, 0, second)
            owner.forget_block(lock, second)
            assert [handle for _, handle in owner.entered[lock]] == [first]
            second.release()
        assert other.is_free(lock_key(name))

    def test_outside_a_task(self, name: str, other: OtherSession) -> None:
        async def main() -> str:
            task_owner()
            assert owner_in(object(), 0) is None
            loop = asyncio.get_running_loop()
            said = loop.create_future()

            def call() -> None:
                try:
                    advisory_lock(name).__aenter__().close()
                except RuntimeError as error:
                    said.set_result(str(error))

            loop.call_soon(call)
            return str(await said)

        assert "runs in none" in asyncio.run(main())

    def test_a_block_that_is_closed_after_its_loop(self, name: str, other: OtherSession) -> None:
        """It cannot await its end: the lock stays with the handle, which another task may release."""

        async def take() -> LockHandle:
            return await advisory_lock(name).aacquire()

        async def give_back(lock: LockHandle) -> None:
            await lock.arelease()
            await sync_to_async(connections.close_all)()

        lock = asyncio.run(take())
        assert not hops.can_wait()
        with pytest.raises(StopIteration):
            lock._aend_block(GeneratorExit(), current_owner()).send(None)
        assert not other.is_free(lock_key(name))
        asyncio.run(give_back(lock))
        assert other.is_free(lock_key(name))

    def test_a_connection_that_was_swapped_and_is_still_open(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            raw, connection.connection = connection.connection, None
            assert not lock.is_held()
            connection.close()
            connection.connection = raw
            assert lock.is_held()

    def test_two_doubts_of_one_key(self, name: str, other: OtherSession) -> None:
        locks = [advisory_lock(name).acquire() for _ in range(2)]
        session = attach(connections["default"])
        for lock in locks:
            assert lock._hold is not None
            session.disown(lock._hold)
        session.settle(connections["default"])
        assert not session.doubts
        assert other.is_free(lock_key(name))
