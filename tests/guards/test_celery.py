"""Tasks of Celery, in this process and in real workers: a duplicate is skipped, and no death keeps a lock."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Task, shared_task
from celery.beat import Scheduler
from celery.exceptions import Retry
from celery.fixups.django import DjangoWorkerFixup
from django.db import transaction

from django_advisory_lock import (
    AdvisoryLockJobMixin,
    LockKey,
    LockLost,
    LockTimeout,
    advisory_lock,
    lock_key,
    try_advisory_lock,
)
from tests.guards import celery_app
from tests.guards.celery_app import app
from tests.support import LIMIT, OtherSession, fork, spawn, statements, wait_until

KEYS = {
    celery_app.work: lock_key("job", "tests.guards.celery_app.Work"),
    celery_app.static: lock_key("static"),
    celery_app.bound: lock_key("job", "tests.guards.celery_app.bound"),
    celery_app.late: lock_key("job", "tests.guards.celery_app.late"),
    celery_app.patient: lock_key("job", "tests.guards.celery_app.Patient"),
    celery_app.brief: lock_key("job", "tests.guards.celery_app.Brief"),
    celery_app.decorated: lock_key("decorated"),
    celery_app.automatic: lock_key("automatic"),
}
WORK = KEYS[celery_app.work]
EVENTS = (
    "ready",  # a worker
    "ending",
    "begun",  # a body
    "ended",
    "over",  # a task, whatever came of it
)


@pytest.fixture(scope="module", autouse=True)
def current_app() -> None:
    """Shared tasks are those of the current application, and other tests may have made another one."""
    app.set_current()


class Worker:
    """A worker with a queue of its own."""

    def __init__(self, folder: Path, queue: str, pool: str, **environment: str) -> None:
        self.folder = folder
        self.queue = queue
        self.log = folder / f"{queue}.log"
        names = ["worker", "--queues", queue, "--hostname", f"{queue}@tests", "--pool", pool, "--concurrency", "2"]
        logs = ["--loglevel", "INFO", "--logfile", str(self.log)]
        alone = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        self.process = spawn(
            "import sys\nfrom tests.guards.celery_app import main\nmain(sys.argv[1:])",
            *(names + logs + alone),
            CELERY_TESTS=str(folder),
            PGAPPNAME=f"celery {queue}",
            **environment,
        )

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.process.communicate()[1] + self.logged()
            return bool(self.told("ready", pid=self.process.pid))

        wait_until(is_ready, f"worker {self.queue}")

    def send(self, task: Any, label: str, **options: Any) -> str:
        return str(task.apply_async((label,), queue=self.queue, **options).id)

    def go(self, label: str) -> None:
        """Let the bodies of a label end."""
        (self.folder / f"go-{label}").touch()

    def told(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        """Return what the workers have told of some event."""
        assert event in EVENTS
        path = self.folder / "events"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [one for one in told if one["event"] == event and facts.items() <= one.items()]

    def wait_for(self, count: int, event: str, **facts: Any) -> list[dict[str, Any]]:
        """Wait until the workers have told of an event so often."""
        wait_until(lambda: len(self.told(event, **facts)) >= count, f"{count} {event}, {facts}: {self.logged()}")
        told = self.told(event, **facts)
        assert len(told) == count
        return told

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def stop(self) -> None:
        """Ask for a warm shutdown."""
        self.process.send_signal(signal.SIGTERM)
        self.wait_for(1, "ending", pid=self.process.pid)

    def status(self) -> int:
        """Wait for the end, and return the exit status."""
        self.process.communicate(timeout=LIMIT)
        return int(self.process.returncode)

    def kill(self) -> None:
        """Kill all of it, as a container is killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=LIMIT)


@pytest.fixture(scope="module")
def workers(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """Workers of all kinds, started at once. The last two are for tests that end them."""
    folder = tmp_path_factory.mktemp("celery")
    for part in ("messages", "control", "processed"):
        (folder / part).mkdir()
    before = os.environ.get("CELERY_TESTS")
    celery_app.use_folder(str(folder))
    started = {}
    try:
        started["prefork"] = Worker(folder, "prefork", "prefork", CELERY_TESTS_REUSE="1")
        started["threads"] = Worker(folder, "threads", "threads")
        started["ended"] = Worker(folder, "ended", "threads")
        started["killed"] = Worker(folder, "killed", "prefork")
        for worker in started.values():
            worker.wait_until_ready()
        yield started
    finally:
        for worker in started.values():
            worker.kill()
        os.environ.pop("CELERY_TESTS") if before is None else os.environ.update(CELERY_TESTS=before)
        wait_until_gone()


def wait_until_gone() -> None:
    """Wait until the server has noticed that all workers are gone, so that the database can be dropped."""
    session = OtherSession()
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ '^celery ' AND datname = %s"
    wait_until(lambda: session.one(count, [session.raw.info.dbname]) == 0, "no session of a worker")
    session.close()


@pytest.fixture
def prefork(workers: dict[str, Worker]) -> Worker:
    return workers["prefork"]


@pytest.fixture(params=["prefork", "threads"])
def worker(workers: dict[str, Worker], request: pytest.FixtureRequest) -> Worker:
    return workers[request.param]


TASKS = pytest.mark.parametrize(
    "task", [celery_app.work, celery_app.static, celery_app.bound, celery_app.decorated], ids=lambda task: task.__name__
)


class TestWorkers:
    @TASKS
    def test_of_two_at_once_one_works(self, task: Any, worker: Worker, name: str, other: OtherSession) -> None:
        first = worker.send(task, name)
        worker.wait_for(1, "begun", label=name)
        second = worker.send(task, name)
        (skipped,) = worker.wait_for(1, "over", label=name)
        assert (skipped["id"], skipped["state"]) == (second, "SUCCESS")
        assert skipped["returned"] == ("'skipped'" if task.name.endswith("decorated") else "None")
        assert other.holders(KEYS[task]) == 1
        worker.go(name)
        worker.wait_for(1, "over", label=name, id=first)
        assert other.is_free(KEYS[task])
        assert len(worker.told("begun", label=name)) == 1

    def test_what_is_skipped_is_logged(self, worker: Worker, name: str, other: OtherSession) -> None:
        """With the holder."""
        worker.send(celery_app.work, name)
        worker.wait_for(1, "begun", label=name)
        before = len(worker.logged())
        worker.send(celery_app.work, name)
        worker.wait_for(1, "over", label=name)
        assert "Work was skipped. The lock" in worker.logged()[before:]
        assert f"celery {worker.queue}" in worker.logged()[before:]
        worker.go(name)
        worker.wait_for(2, "over", label=name)

    def test_two_deliveries_of_one_message(self, worker: Worker, name: str, other: OtherSession) -> None:
        """A broker whose visibility timeout has passed, for one, delivers a message again while it is worked on."""
        for _ in range(2):
            worker.send(celery_app.work, name, task_id=name)
        worker.wait_for(1, "over", label=name, returned="None")
        worker.go(name)
        worker.wait_for(2, "over", label=name)
        assert len(worker.told("begun", label=name)) == 1

    def test_one_after_the_other_both_work(self, worker: Worker, name: str, other: OtherSession) -> None:
        """Case 79: exclusion is no de-duplication."""
        worker.go(name)
        for count in (1, 2):
            worker.send(celery_app.work, name, task_id=name)
            worker.wait_for(count, "over", label=name)
        assert len(worker.told("ended", label=name)) == 2

    def test_without_a_lock_they_meet(self, worker: Worker, name: str, other: OtherSession) -> None:
        """The control."""
        for _ in range(2):
            worker.send(celery_app.unlocked, name)
        worker.wait_for(2, "begun", label=name)
        assert worker.told("ended", label=name) == []
        worker.go(name)
        worker.wait_for(2, "over", label=name)

    @pytest.mark.parametrize(
        "task", [celery_app.patient, celery_app.automatic], ids=["handle_lock_busy", "autoretry_for"]
    )
    def test_what_is_busy_is_tried_again(self, task: Any, worker: Worker, name: str, other: OtherSession) -> None:
        for _ in range(2):
            worker.send(task, name)
        wait_until(lambda: len(worker.told("over", label=name, state="RETRY")) >= 2, "tried again, and again")
        assert len(worker.told("begun", label=name)) == 1
        worker.go(name)
        worker.wait_for(2, "over", label=name, state="SUCCESS")
        assert len(worker.told("begun", label=name)) == 2
        assert other.is_free(KEYS[task])

    def test_and_given_up_in_the_end(self, worker: Worker, name: str, other: OtherSession) -> None:
        other.take(KEYS[celery_app.brief])
        worker.send(celery_app.brief, name)
        (failed,) = worker.wait_for(1, "over", label=name, state="FAILURE")
        assert failed["returned"].startswith("LockTimeout(")
        worker.wait_for(2, "over", label=name, state="RETRY")  # told by another child, after the message was sent
        assert worker.told("begun", label=name) == []

    def test_sessions_that_are_kept_and_that_are_not(self, worker: Worker, name: str, other: OtherSession) -> None:
        """Celery closes the connections after each task, or with CELERY_DB_REUSE_MAX after many. No lock goes along."""
        label = f"fails-{name}"
        worker.go(label)
        tasks = [celery_app.work, celery_app.static]
        for count in range(1, 7):
            task = tasks[count % 2]
            worker.send(task, label)
            worker.wait_for(count, "over", label=label, state="FAILURE")
            assert other.holders(KEYS[task]) == 0
        begun = worker.told("begun", label=label)
        sessions = {one["backend"] for one in begun}
        if worker.queue == "prefork":
            assert len(sessions) == len({one["pid"] for one in begun}) <= 2
        else:
            assert len(sessions) == 6


class TestDeaths:
    @pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
    def test_a_time_limit(self, limit: str, prefork: Worker, name: str, other: OtherSession) -> None:
        """The soft one is an error in the body, the hard one kills the child."""
        prefork.send(celery_app.work, name, **{limit: 0.2})
        (begun,) = prefork.wait_for(1, "begun", label=name)
        if limit == "soft_time_limit":
            (over,) = prefork.wait_for(1, "over", label=name)
            assert over["returned"].startswith("SoftTimeLimitExceeded")
            assert other.holders(WORK) == 0
        else:
            other.wait_until_free(WORK)
            wait_until(lambda: not is_alive(begun["pid"]), "the child is gone")
        self.check_that_the_next_one_runs(prefork, celery_app.work, other)

    def test_a_child_is_killed(self, prefork: Worker, name: str, other: OtherSession) -> None:
        """The broker delivers the message again, and another child does the work."""
        prefork.send(celery_app.late, name)
        (first,) = prefork.wait_for(1, "begun", label=name)
        os.kill(first["pid"], signal.SIGKILL)
        _, second = prefork.wait_for(2, "begun", label=name)
        assert second["pid"] not in (first["pid"], prefork.process.pid)
        prefork.go(name)
        (over,) = prefork.wait_for(1, "over", label=name)
        assert over["returned"] == "'done'"
        assert other.is_free(KEYS[celery_app.late])

    def test_a_worker_is_killed(self, workers: dict[str, Worker], name: str, other: OtherSession) -> None:
        """With its children; another worker gets the message again."""
        killed, prefork = workers["killed"], workers["prefork"]
        killed.send(celery_app.work, name, task_id=name)
        killed.wait_for(1, "begun", label=name)
        assert other.holders(WORK) == 1
        killed.kill()
        other.wait_until_free(WORK)
        prefork.send(celery_app.work, name, task_id=name)
        prefork.wait_for(2, "begun", label=name)
        prefork.go(name)
        prefork.wait_for(1, "over", label=name, id=name)

    def test_a_worker_is_ended(self, workers: dict[str, Worker], name: str, other: OtherSession) -> None:
        """It finishes what it works on, and keeps the lock until then."""
        ended, prefork = workers["ended"], workers["prefork"]
        ended.send(celery_app.work, name)
        ended.wait_for(1, "begun", label=name)
        ended.stop()
        prefork.send(celery_app.work, f"{name}-next")
        (skipped,) = prefork.wait_for(1, "over", label=f"{name}-next")
        assert skipped["returned"] == "None"
        ended.go(name)
        assert ended.status() == 0
        ended.wait_for(1, "over", label=name, returned="'done'")
        assert other.is_free(WORK)

    def check_that_the_next_one_runs(self, worker: Worker, task: Any, other: OtherSession) -> None:
        label = f"next-{len(worker.told('over'))}"
        worker.go(label)
        worker.send(task, label)
        worker.wait_for(1, "over", label=label, returned="'done'")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestBeat:
    """Case 76: beat runs twice."""

    def tick(self, worker: Worker, label: str) -> None:
        """Be one beat, for which a task is due."""
        beat = Scheduler(app, schedule={}, lazy=True)
        beat.add(
            name="work",
            task=celery_app.work.name,
            schedule=timedelta(minutes=1),
            args=(label,),
            options={"queue": worker.queue},
            last_run_at=datetime.now(timezone.utc) - timedelta(minutes=2),
        )
        beat.tick()

    def test_at_the_same_time_one_works(self, workers: dict[str, Worker], name: str, other: OtherSession) -> None:
        """Two schedulers, and two workers that take a message each."""
        for queue in ("prefork", "threads"):
            self.tick(workers[queue], name)
        worker = workers["prefork"]
        worker.wait_for(1, "over", label=name, returned="None")
        worker.go(name)
        worker.wait_for(1, "over", label=name, returned="'done'")
        assert len(worker.told("begun", label=name)) == 1

    def test_one_after_the_other_both_work(self, workers: dict[str, Worker], name: str, other: OtherSession) -> None:
        """What comes late finds the lock free: that takes more than a lock."""
        worker = workers["prefork"]
        worker.go(name)
        self.tick(worker, name)
        worker.wait_for(1, "over", label=name, returned="'done'")
        self.tick(workers["threads"], name)
        worker.wait_for(2, "over", label=name, returned="'done'")


def test_a_child_inherits_no_lock(other: OtherSession, name: str) -> None:
    """A lock of the worker's main process is somebody else's in the children, and stays in spite of their clean-up."""

    def in_child() -> int:
        DjangoWorkerFixup(app).on_worker_process_init()
        return 0 if celery_app.work.apply((name,)).get() is None else 1

    with advisory_lock(WORK) as lock:
        pid = fork()
        if pid == 0:  # pragma: no cover - a child is not measured
            with contextlib.suppress(BaseException):
                os._exit(in_child())
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert lock.is_held()
    assert other.is_free(WORK)


class TestInThisProcess:
    """What a task is: called, applied, eager."""

    @pytest.fixture(params=[True, False], ids=["bound", "static"])
    def task(self, request: pytest.FixtureRequest, name: str) -> Any:
        def static(number: int, *, factor: int = 1) -> int:
            return number * factor

        def bound(self: Any, number: int, *, factor: int = 1) -> int:
            return static(number, factor=factor)

        return self.make(name, bound, bind=True) if request.param else self.make(name, static)

    def make(self, name: str, function: Callable[..., Any], **options: Any) -> Any:
        return app.task(name=name, base=celery_app.Locked, lock_key=name, **options)(function)

    @pytest.fixture
    def eager(self) -> Iterator[None]:
        before = app.conf.task_always_eager, app.conf.task_eager_propagates
        app.conf.task_always_eager = app.conf.task_eager_propagates = True
        yield
        app.conf.task_always_eager, app.conf.task_eager_propagates = before

    def test_all_ways_to_call_it(self, task: Any, name: str, eager: None, other: OtherSession) -> None:
        ways: list[Callable[[], Any]] = [
            lambda: task(3, factor=2),
            lambda: task.run(3, factor=2),
            lambda: task.apply((3,), {"factor": 2}).get(),
            lambda: task.delay(3, factor=2).get(),
            lambda: task.apply_async((3,), {"factor": 2}).get(),
            lambda: task.s(3, factor=2).apply().get(),
        ]
        assert [way() for way in ways] == [6] * 6
        other.take(lock_key(name))
        assert [way() for way in ways] == [None] * 6

    def test_it_takes_the_arguments_that_it_takes(self, task: Any, other: OtherSession) -> None:
        """Celery looks before it sends."""
        for wrong in (task.delay, lambda: task.delay(1, 2, 3, 4), lambda: task.delay(1, unknown=2)):
            with pytest.raises(TypeError):
                wrong()

    def test_two_statements(self, task: Any, other: OtherSession) -> None:
        task(1)
        with statements(2):
            task(1)

    def test_keys_by_arguments(self, name: str, other: OtherSession) -> None:
        class PerTenant(AdvisoryLockJobMixin, Task):
            def get_lock_key(self, tenant: str) -> Any:
                return name, tenant

        @app.task(name=name, base=PerTenant)
        def sync(tenant: str) -> str:
            return tenant

        other.take(lock_key(name, "a"))
        assert [sync.apply((tenant,)).get() for tenant in ("a", "b")] == [None, "b"]

    def test_the_default_key_is_the_function(self, other: OtherSession) -> None:
        other.take(KEYS[celery_app.bound])
        assert celery_app.bound.apply(("x",)).get() is None

    def test_a_retry_when_called_directly(self, name: str, other: OtherSession) -> None:
        """There is no message to be sent again: the caller gets the error."""
        other.take(KEYS[celery_app.patient])
        with pytest.raises(LockTimeout):
            celery_app.patient(name)

    @pytest.mark.parametrize("task", [celery_app.brief], ids=["brief"])
    def test_an_eager_retry_gives_up(self, task: Any, name: str, other: OtherSession) -> None:
        other.take(KEYS[task])
        result = task.apply((name,))
        assert result.state in {"FAILURE", "RETRY"}
        with pytest.raises((LockTimeout, Retry)):
            result.get()

    def test_eager_autoretry(self, name: str, other: OtherSession) -> None:
        tried = []

        def key(number: int) -> str:
            tried.append(number)
            return name

        @app.task(name=name, autoretry_for=(LockTimeout,), max_retries=2, retry_kwargs={"countdown": 0})
        @advisory_lock(key, timeout=0)
        def work(number: int) -> int:
            return number

        assert work.apply((3,)).get() == 3
        other.take(lock_key(name))
        with pytest.raises((LockTimeout, Retry)):
            work.apply((3,)).get()
        assert tried == [3] * 4

    def test_autoretry_of_a_class(self, name: str, other: OtherSession) -> None:
        """Where the hook raises the error again, it is one of the task's like any other."""
        tried = []

        class Work(AdvisoryLockJobMixin, Task):
            lock_key = name
            autoretry_for = (LockTimeout,)
            retry_kwargs = {"max_retries": 2, "countdown": 0}  # noqa: RUF012

            def run(self) -> str:
                return "done"

            def handle_lock_busy(self, error: LockTimeout, /, *args: Any, **kwargs: Any) -> Any:
                tried.append(error.key)
                raise error

        Work.name = name
        work = app.register_task(Work())
        assert work.apply().get() == "done"
        other.take(lock_key(name))
        with pytest.raises((LockTimeout, Retry)):
            work.apply().get()
        assert tried == [lock_key(name)] * 3

    def test_the_lock_goes_below_task(self, name: str) -> None:
        """Above it nothing would be locked, so it is refused."""
        for lock in (advisory_lock(name), try_advisory_lock(name)):
            with pytest.raises(TypeError, match="for a task below @task"):
                lock(celery_app.unlocked)

    def test_shared_tasks(self, name: str, other: OtherSession) -> None:
        @shared_task(name=name)
        @try_advisory_lock(name)
        def work() -> str:
            return "done"

        assert work.apply().get() == "done"
        other.take(lock_key(name))
        assert work.apply().get() is None

    def test_in_a_transaction_of_the_caller(self, task: Any, name: str, other: OtherSession) -> None:
        """An eager task joins it, so that its lock lasts until the commit."""
        with transaction.atomic():
            assert task.apply((3,)).get() == 3
            assert other.holders(lock_key(name)) == 1
        assert other.is_free(lock_key(name))

    def test_a_body_that_closes_its_connection(self, name: str, other: OtherSession) -> None:
        """As Celery does between tasks: the lock is lost, and the task fails."""

        def work() -> None:
            DjangoWorkerFixup(app).close_database()

        result = self.make(name, work).apply()
        assert (result.state, type(result.result)) == ("FAILURE", LockLost)


def test_the_keys_of_this_file() -> None:
    for task, key in KEYS.items():
        if isinstance(task, AdvisoryLockJobMixin):
            assert isinstance(key, LockKey)
            assert lock_key(task.get_lock_key()) == key
