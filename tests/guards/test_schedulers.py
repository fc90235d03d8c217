"""APScheduler in several web workers: each has a scheduler of its own, and all of them fire the same job."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_advisory_lock import advisory_lock, lock_key, try_advisory_lock
from tests.queues import scheduler as jobs
from tests.queues.work import Place, running
from tests.support import LIMIT, OtherSession, backend_pid, value, wait_until
from tests.testapp.models import Country

WEB_WORKER = "import sys\nfrom tests.queues.scheduler import web_worker\nweb_worker()"
COUNT = 3


class Workers:
    """Web workers, each with a scheduler of its own."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def fire(self, job: str, name: str, place: Place) -> None:
        """Let all schedulers start a job."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{job} {name} {place}\n")
            process.stdin.flush()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.open()  # whatever happened, nobody stays


@pytest.fixture(scope="module")
def workers(django_db_setup: None) -> Iterator[Workers]:
    with contextlib.ExitStack() as stack:
        yield Workers([stack.enter_context(running(WEB_WORKER)) for _ in range(COUNT)])


class Told(list[tuple[str, Any]]):
    """What became of the runs of a scheduler, in the order of their ends."""

    def wait_for(self, *events: tuple[str, Any]) -> None:
        wait_until(lambda: sorted(map(str, self)) == sorted(map(str, events)), f"{events}, not {self}")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def threads() -> int:
    return 10  # the default


@pytest.fixture
def scheduler(other: OtherSession, threads: int, told: Told, place: Place) -> Iterator[BackgroundScheduler]:
    """A scheduler in this process; its threads end with the test."""
    with started(BackgroundScheduler(executors={"default": ThreadPoolExecutor(threads)}), told) as scheduler:
        yield scheduler
        place.open()


@contextlib.contextmanager
def started(scheduler: Any, told: Told) -> Iterator[Any]:
    jobs.note_events(scheduler, told)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.shutdown()


def ends(place: Place) -> list[str]:
    """What the web workers wrote down: how each run ended."""
    return sorted(line for path in place.path.glob("events-*") for line in path.read_text().splitlines())


def is_open(other: OtherSession, pid: int) -> bool:
    """Whether a session is there."""
    return bool(other.one("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [pid]))


def now() -> datetime:
    return datetime.now(timezone.utc)


class TestSeveralWebWorkers:
    def test_without_a_lock_they_overlap(self, workers: Workers, name: str, place: Place, other: OtherSession) -> None:
        """The negative control."""
        workers.fire("unlocked", name, place)
        place.wait_for(COUNT)
        place.open()
        wait_until(lambda: ends(place) == ["executed done"] * COUNT, "all are done")

    @pytest.mark.parametrize("job", ["locked", "class"])
    def test_one_works_and_the_others_skip(
        self, workers: Workers, job: str, name: str, place: Place, other: OtherSession
    ) -> None:
        """Case 76: and at the next tick too, while the first one is still at it."""
        workers.fire(job, name, place)
        wait_until(lambda: ends(place) == ["executed busy"] * (COUNT - 1), "all but one have skipped")
        place.wait_for(1)
        workers.fire(job, name, place)
        wait_until(lambda: ends(place) == ["executed busy"] * (2 * COUNT - 1), "all have skipped")
        assert not other.is_free(lock_key(name))
        place.open()
        wait_until(lambda: ends(place) == ["executed busy"] * (2 * COUNT - 1) + ["executed done"], "done")
        assert not place.overlapped

    def test_a_web_worker_that_is_killed(self, name: str, place: Place, other: OtherSession) -> None:
        """Case 61: the next tick of another one runs."""
        with running(WEB_WORKER) as process:
            worker = Workers([process])
            worker.fire("locked", name, place)
            place.wait_for(1)
            assert jobs.locked(name, str(place)) == "busy"
            process.send_signal(signal.SIGKILL)
            process.wait(LIMIT)
        other.wait_until_free(lock_key(name))
        place.open()
        assert jobs.locked(name, str(place)) == "done"

    def test_a_web_worker_that_ends(self, name: str, place: Place, other: OtherSession) -> None:
        """`shutdown()` waits for the job, and the job keeps its lock as long."""
        with running(WEB_WORKER) as process:
            worker = Workers([process])
            worker.fire("locked", name, place)
            place.wait_for(1)
            assert process.stdin is not None
            process.stdin.close()
            assert not other.is_free(lock_key(name))
            place.open()
            assert process.wait(LIMIT) == 0
            process.stdin = None
        assert ends(place) == ["executed done"]
        assert other.is_free(lock_key(name))


class TestThreadsOfOneScheduler:
    def test_they_exclude_each_other(
        self, scheduler: Any, told: Told, name: str, place: Place, other: OtherSession
    ) -> None:
        """`max_instances` counts runs of one job; two jobs, or one that may run three times, need the lock."""
        for _ in range(2):
            scheduler.add_job(jobs.locked, args=[name, str(place)], max_instances=3)
        told.wait_for(("executed", "busy"))
        place.wait_for(1)
        place.open()
        told.wait_for(("executed", "busy"), ("executed", "done"))

    def test_max_instances_is_for_one_process(
        self, scheduler: Any, told: Told, name: str, place: Place, other: OtherSession
    ) -> None:
        """What it keeps back does not even try; another scheduler knows nothing of it."""
        tick = timedelta(milliseconds=20)
        scheduler.add_job(
            jobs.locked, "interval", seconds=tick.total_seconds(), args=[name, str(place)], next_run_time=now()
        )
        place.wait_for(1)
        wait_until(lambda: ("max_instances", None) in told, "kept back")
        others = Told()
        with started(BackgroundScheduler(), others) as second:
            second.add_job(jobs.locked, args=[name, str(place)])
            others.wait_for(("executed", "busy"))
        scheduler.pause()

    def test_a_run_that_is_late_takes_nothing(
        self, scheduler: Any, told: Told, name: str, place: Place, other: OtherSession
    ) -> None:
        scheduler.add_job(
            jobs.locked,
            "date",
            run_date=now() - timedelta(minutes=5),
            misfire_grace_time=1,
            args=[name, str(place)],
        )
        told.wait_for(("missed", None))
        assert other.is_free(lock_key(name))

    def test_an_error_is_the_error_of_the_run(self, scheduler: Any, told: Told, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))

        @jobs.closes_connections
        @advisory_lock(name, timeout=0)
        def failing() -> None: ...

        @jobs.closes_connections
        @advisory_lock(name)
        def breaking() -> None:
            value("SELECT 1/0")

        scheduler.add_job(failing)
        told.wait_for(("error", None))
        other.drop(lock_key(name))
        scheduler.add_job(breaking)
        told.wait_for(("error", None), ("error", None))
        assert other.is_free(lock_key(name))

    def test_one_after_the_other_runs_twice(
        self, scheduler: Any, told: Told, name: str, place: Place, other: OtherSession
    ) -> None:
        """Case 79: two web workers, one of them late."""
        place.open()
        scheduler.add_job(jobs.locked, args=[name, str(place)])
        told.wait_for(("executed", "done"))
        scheduler.add_job(jobs.locked, args=[name, str(place)])
        told.wait_for(("executed", "done"), ("executed", "done"))

    def test_a_slot_written_down_with_the_work_runs_once(
        self, scheduler: Any, told: Told, name: str, place: Place, other: OtherSession
    ) -> None:
        """Case 79: whatever the order; and what failed before its commit is done again."""
        slot = name[:40]
        failures = [True]

        @jobs.closes_connections
        @advisory_lock(name)
        def once() -> str:
            with transaction.atomic():
                if Country.objects.filter(code=slot).exists():
                    return "already done"
                Country.objects.create(code=slot)
                if failures.pop() if failures else False:
                    raise RuntimeError("half way")
                return "done"

        scheduler.add_job(once)
        told.wait_for(("error", None))
        for _ in range(3):
            scheduler.add_job(once, max_instances=3)
        told.wait_for(("error", None), ("executed", "done"), *[("executed", "already done")] * 2)
        Country.objects.get(code=slot).delete()


class TestConnections:
    """The threads of a scheduler have connections of their own, and no request ends that would close them."""

    @pytest.fixture
    def threads(self) -> int:
        return 1

    def test_a_thread_keeps_its_connection(self, scheduler: Any, told: Told, name: str, other: OtherSession) -> None:
        """The negative control."""
        for _ in range(2):
            scheduler.add_job(try_advisory_lock(name)(backend_pid))
        wait_until(lambda: len(told) == 2, "they have run")
        assert told[0] == told[1]
        assert is_open(other, told[0][1])
        close_all(scheduler, told)

    def test_the_recipe_closes_it(self, scheduler: Any, told: Told, name: str, other: OtherSession) -> None:
        for _ in range(2):
            scheduler.add_job(jobs.closes_connections(try_advisory_lock(name)(backend_pid)))
        wait_until(lambda: len(told) == 2, "they have run")
        assert told[0] != told[1]
        wait_until(lambda: not any(is_open(other, pid) for _, pid in told), "their sessions have ended")

    def test_housekeeping_in_the_job_leaves_the_lock_alone(
        self, scheduler: Any, told: Told, name: str, other: OtherSession
    ) -> None:
        """Case 3: as in a job that calls another one, with the same decorator."""

        @jobs.closes_connections
        @advisory_lock(name)
        def job() -> bool:
            jobs.closes_connections(backend_pid)()
            return other.is_free(lock_key(name))

        scheduler.add_job(job)
        told.wait_for(("executed", False))
        assert other.is_free(lock_key(name))

    def test_the_other_way_round_the_connection_stays(
        self, scheduler: Any, told: Told, name: str, other: OtherSession
    ) -> None:
        """A lock outside: it is still held when the connections are looked at, so the connection is kept."""
        scheduler.add_job(try_advisory_lock(name)(jobs.closes_connections(backend_pid)))
        wait_until(lambda: told, "it has run")
        assert other.is_free(lock_key(name))
        assert is_open(other, told[0][1])
        close_all(scheduler, told)

    def test_a_pool(self, scheduler: Any, told: Told, name: str, other: OtherSession) -> None:
        """The connection goes back to the pool without the lock."""

        @jobs.closes_connections
        @try_advisory_lock(name, using="pooled", default="busy")
        def job() -> int:
            return backend_pid("pooled")

        for count in (1, 2):
            scheduler.add_job(job)
            wait_until(lambda count=count: len(told) == count, "it has run")  # type: ignore[misc]
            assert other.is_free(lock_key(name))
        assert told[0] == told[1] != ("executed", "busy")
        connections["pooled"].close_pool()  # type: ignore[attr-defined]


def close_all(scheduler: Any, told: Told) -> None:
    """Close the connections of the one thread that there is."""
    count = len(told)
    scheduler.add_job(connections.close_all)
    wait_until(lambda: len(told) > count, "closed")


class TestAsyncio:
    def test_a_coroutine_job(self, name: str, place: Place, other: OtherSession) -> None:
        """In the event loop of an ASGI worker."""
        told = Told()

        @try_advisory_lock(name, default="busy")
        async def job() -> Any:
            return await sync_to_async(lambda: "done" if not other.is_free(lock_key(name)) else "unlocked")()

        async def main() -> None:
            both = asyncio.Event()
            with started(AsyncIOScheduler(), told) as scheduler:
                scheduler.add_listener(lambda event: both.set() if len(told) == 2 else None, jobs.ALL)
                for _ in range(2):
                    scheduler.add_job(job, max_instances=2)
                await asyncio.wait_for(both.wait(), LIMIT)
            await sync_to_async(connections.close_all)()

        asyncio.run(main())
        assert sorted(told) == [("executed", "busy"), ("executed", "done")]

    def test_a_shutdown_cancels_a_coroutine(self, name: str, other: OtherSession) -> None:
        """And the lock is freed."""
        inside = asyncio.Event()
        is_held = []

        @advisory_lock(name)
        async def job() -> None:
            inside.set()
            try:
                await asyncio.sleep(LIMIT)
            finally:
                is_held.append(not other.is_free(lock_key(name)))

        async def main() -> None:
            with started(AsyncIOScheduler(), Told()) as scheduler:
                scheduler.add_job(job)
                await asyncio.wait_for(inside.wait(), LIMIT)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.wait(others, timeout=LIMIT)
            await sync_to_async(connections.close_all)()

        asyncio.run(main())
        assert is_held == [True]
        assert other.is_free(lock_key(name))


class TestJobStores:
    """What a job store or a pool of processes keeps is the name of a function, and the object of a method."""

    def test_a_function(self, scheduler: Any, name: str) -> None:
        job = scheduler.add_job(jobs.locked, "date", run_date=now() + timedelta(days=1), args=[name, ""])
        assert job.__getstate__()["func"] == "tests.queues.scheduler:locked"
        assert pickle.loads(pickle.dumps(jobs.locked)) is jobs.locked

    def test_a_method(self, scheduler: Any, name: str) -> None:
        job = jobs.Job()
        added = scheduler.add_job(job.run, "date", run_date=now() + timedelta(days=1), args=[name, ""])
        state = added.__getstate__()
        assert (state["func"], state["args"]) == ("tests.queues.scheduler:Job.run", (job, name, ""))

    def test_a_pickled_method(self) -> None:
        pickle.loads(pickle.dumps(jobs.Job().run))
