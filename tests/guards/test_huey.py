"""Huey: real consumers on SQLite storages of their own. Its own lock knows one storage, ours the database."""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huey import SqliteHuey
from huey.exceptions import TaskException

from django_advisory_lock import advisory_lock, lock_key
from tests.queues.huey_tasks import register
from tests.queues.work import Place, kill, running
from tests.support import LIMIT, OtherSession, wait_until

CONSUMER = """
import sys
from django.core.management import call_command
from huey.contrib.djhuey import HUEY
from tests.queues.huey_tasks import register
from tests.queues.work import end_with_the_test

end_with_the_test()
register(HUEY)
call_command("run_huey", disable_autoload=True, workers=2, worker_type=sys.argv[1], initial_delay=0.02, max_delay=0.05)
"""


class Storage:
    """A storage, and the consumer that works for it."""

    def __init__(self, path: Path) -> None:
        self.path = path / f"{uuid.uuid4().hex}.db"
        self.huey = SqliteHuey("tests", filename=str(self.path))
        self.tasks = register(self.huey)

    def consumer(self, kind: str = "thread") -> Any:
        return running(CONSUMER, kind, HUEY_FILE=str(self.path))

    def run(self) -> None:
        """Run what is enqueued now in this thread, as a worker does."""
        for _ in range(self.huey.pending_count()):
            self.huey.execute(self.huey.dequeue())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.open()  # whatever happened, nobody stays


@pytest.fixture(scope="module")
def storages(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Storage]]:
    """Two storages, each with a consumer of two workers: threads, and processes."""
    found = [Storage(tmp_path_factory.mktemp("huey")) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for storage, kind in zip(found, ("thread", "process"), strict=True):
            stack.enter_context(storage.consumer(kind))
        yield found
        for storage in found:
            storage.huey.storage.close()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """A storage without a consumer."""
    storage = Storage(tmp_path)
    yield storage
    storage.huey.storage.close()


def value(result: Any) -> Any:
    return result.get(blocking=True, timeout=LIMIT, max_delay=0.05)


class TestConsumers:
    def test_without_a_lock_they_overlap(
        self, storages: list[Storage], name: str, place: Place, other: OtherSession
    ) -> None:
        """The negative control: four workers."""
        results = [storage.tasks.unlocked(name, str(place)) for storage in storages * 2]
        place.wait_for(4)
        place.open()
        assert [value(result) for result in results] == ["done"] * 4

    @pytest.mark.parametrize("task", ["skipping", "job"])
    def test_one_works_and_the_others_skip(
        self, storages: list[Storage], task: str, name: str, place: Place, other: OtherSession
    ) -> None:
        """Case 76: workers of one consumer, and consumers of two storages."""
        results = [getattr(storage.tasks, task)(name, str(place)) for storage in storages * 2]
        wait_until(lambda: [result.get() for result in results].count("busy") == 3, "three have skipped")
        place.wait_for(1)
        assert not other.is_free(lock_key(name))
        place.open()
        assert sorted(value(result) for result in results) == ["busy", "busy", "busy", "done"]
        assert not place.overlapped

    def test_waiting_they_run_one_at_a_time(
        self, storages: list[Storage], name: str, place: Place, other: OtherSession
    ) -> None:
        results = [storage.tasks.waiting(name, str(place)) for storage in storages * 2]
        place.wait_for(1)
        other.wait_for_waiters(lock_key(name), 3)
        place.open()
        assert [value(result) for result in results] == ["done"] * 4
        assert not place.overlapped

    def test_huey_itself_locks_one_storage(
        self, storages: list[Storage], name: str, place: Place, other: OtherSession
    ) -> None:
        results = [storage.tasks.locked_by_huey(name, str(place)) for storage in storages]
        place.wait_for(2)
        place.open()
        assert [value(result) for result in results] == ["done", "done"]
        assert place.overlapped

    @pytest.mark.parametrize("kind", ["thread", "process"])
    def test_killed(self, kind: str, storage: Storage, name: str, place: Place, other: OtherSession) -> None:
        """Case 60, 61: our lock is free with the process, the one of Huey stays until somebody flushes it."""
        with storage.consumer(kind) as consumer:
            storage.tasks.locked_by_huey(name, str(place))
            storage.tasks.skipping(name, str(place))
            place.wait_for(2)
            kill(consumer)
            consumer.wait(LIMIT)
        other.wait_until_free(lock_key(name))
        assert storage.huey.is_locked("of huey")
        place.open()
        results = [storage.tasks.skipping(name, str(place)), storage.tasks.locked_by_huey(name, str(place))]
        storage.run()
        assert results[0].get() == "done"
        with pytest.raises(TaskException, match="unable to acquire lock"):
            results[1].get()

    def test_a_killed_consumer_leaves_its_processes(
        self, storage: Storage, name: str, place: Place, other: OtherSession
    ) -> None:
        """And they their locks, as long as they work: a lock belongs to who works."""
        with storage.consumer("process") as consumer:
            result = storage.tasks.skipping(name, str(place))
            place.wait_for(1)
            consumer.send_signal(signal.SIGKILL)
            assert consumer.wait(LIMIT) == -signal.SIGKILL
            assert not other.is_free(lock_key(name))
            place.open()
            assert value(result) == "done"
            other.wait_until_free(lock_key(name))


class TestOneTask:
    def test_a_busy_one_is_retried(self, storage: Storage, name: str, place: Place, other: OtherSession) -> None:
        place.open()
        result = storage.tasks.retrying(name, str(place))
        other.take(lock_key(name))
        storage.run()
        assert storage.huey.pending_count() == 1
        storage.run()
        other.drop(lock_key(name))
        storage.run()
        assert result.get() == "done"
        assert storage.huey.pending_count() == 0

    def test_a_busy_one_fails_in_the_end(self, storage: Storage, name: str, place: Place, other: OtherSession) -> None:
        result = storage.tasks.retrying(name, str(place))
        with advisory_lock(name, using="same"):
            for _ in range(3):
                storage.run()
        with pytest.raises(TaskException, match="LockTimeout"):
            result.get()
        assert storage.huey.pending_count() == 0

    def test_one_after_the_other_runs_twice(
        self, storage: Storage, name: str, place: Place, other: OtherSession
    ) -> None:
        """Case 79."""
        place.open()
        results = [storage.tasks.skipping(name, str(place)) for _ in range(2)]
        storage.run()
        assert [result.get() for result in results] == ["done", "done"]

    def test_in_immediate_mode(self, name: str, place: Place, other: OtherSession) -> None:
        """As in tests of a project."""
        huey = SqliteHuey("tests", filename=":memory:", immediate=True)
        tasks = register(huey)
        other.take(lock_key(name))
        assert tasks.skipping(name, str(place)).get() == "busy"
        other.drop(lock_key(name))

    def test_a_direct_call_is_locked_too(self, storage: Storage, name: str, place: Place, other: OtherSession) -> None:
        other.take(lock_key(name))
        assert storage.tasks.skipping.call_local(name, str(place)) == "busy"
        other.drop(lock_key(name))
