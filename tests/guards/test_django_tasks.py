"""Tasks of Django's own framework, in the process itself and in the workers of `django-tasks-db`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.apps import apps
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.test import override_settings

from django_advisory_lock import LockTimeout, advisory_lock, lock_key
from tests.queues import settings
from tests.queues.work import Place, running
from tests.support import LIMIT, OtherSession, Thread, wait_until
from tests.testapp.models import Country

pytest.importorskip("django.tasks", reason="django.tasks came with Django 6.0")

from tests.queues import django_tasks as tasks

WORKER = """
import sys
from django.core.management import call_command
from tests.queues.work import end_with_the_test
end_with_the_test()
call_command("db_worker", interval=0.02, startup_delay=False, queue_name=sys.argv[1])
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.open()  # whatever happened, nobody stays


@pytest.fixture(scope="module", autouse=True)
def backends() -> Iterator[None]:
    with override_settings(TASKS=settings.TASKS):
        yield


@pytest.fixture(scope="module")
def queue(django_db_setup: None) -> Iterator[None]:
    """The tables of the database backend, by its own migrations."""
    pytest.importorskip("django_tasks_db", reason="django-tasks-db needs Python 3.12")
    with override_settings(INSTALLED_APPS=settings.INSTALLED_APPS):
        call_command("migrate", "django_tasks_database", verbosity=0)
        yield
        with connection.schema_editor() as editor:  # not all of its migrations can be undone
            for model in apps.get_app_config("django_tasks_database").get_models():
                editor.delete_model(model)
        MigrationRecorder(connection).migration_qs.filter(app="django_tasks_database").delete()
        ContentType.objects.filter(app_label="django_tasks_database").delete()
    connection.close()


@pytest.fixture(scope="module")
def workers(queue: None) -> Iterator[list[subprocess.Popen[str]]]:
    """Two workers that take tasks from one queue."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running(WORKER, "shared")) for _ in range(2)]


def immediate(task: Any, *arguments: Any) -> Any:
    """Run a task in this thread, and return its result."""
    return task.using(backend="immediate").enqueue(*arguments)


def shared(task: Any, *arguments: Any) -> Any:
    """Enqueue a task for the two workers."""
    return task.using(queue_name="shared").enqueue(*arguments)


def finished(result: Any) -> Any:
    """Wait for the result of a task that a worker runs."""

    def is_finished() -> bool:
        result.refresh()
        return bool(result.is_finished)

    wait_until(is_finished, "the task is finished")
    return result


def status(result: Any) -> str:
    return str(result.status.value)


def run(task: Any, *arguments: Any, times: int = 1) -> list[Any]:
    """Enqueue a task, and run it in this thread, as a worker does; return its results."""
    from django_tasks_db.management.commands.db_worker import Worker

    results = [task.using(queue_name="here").enqueue(*arguments) for _ in range(times)]
    Worker(
        queue_names=["here"],
        interval=0,
        batch=True,
        backend_name="default",
        startup_delay=False,
        max_tasks=None,
        worker_id="here",
        excluded_queue_names=[],
    ).run()
    return [finished(result) for result in results]


class TestInTheProcess:
    """The immediate backend runs a task where it is enqueued; the dummy backend never does."""

    @pytest.mark.parametrize(
        "task",
        [tasks.skipping, tasks.waiting, tasks.failing, tasks.asynchronous, tasks.job, tasks.asynchronous_job],
        ids=lambda task: task.name,
    )
    def test_runs_and_is_free_right_after(self, task: Any, name: str, place: Place, other: OtherSession) -> None:
        place.open()
        assert immediate(task, name, str(place)).return_value == "done"
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize(
        ("task", "value"),
        [
            (tasks.skipping, "busy"),
            (tasks.skipping_without_a_default, None),
            (tasks.asynchronous, "busy"),
            (tasks.job, "busy"),
            (tasks.asynchronous_job, "busy"),
        ],
        ids=lambda value: getattr(value, "name", None),
    )
    def test_busy_is_a_success_with_the_default(
        self, task: Any, value: Any, name: str, place: Place, other: OtherSession
    ) -> None:
        other.take(lock_key(name))
        result = immediate(task, name, str(place))
        assert (status(result), result.return_value) == ("SUCCESSFUL", value)
        other.drop(lock_key(name))

    @pytest.mark.parametrize("task", [tasks.failing, tasks.asynchronous_failing], ids=lambda task: task.name)
    def test_busy_is_a_failure_where_it_raises(self, task: Any, name: str, place: Place, other: OtherSession) -> None:
        other.take(lock_key(name))
        result = immediate(task, name, str(place))
        assert status(result) == "FAILED"
        assert result.errors[0].exception_class is LockTimeout
        assert f"pid {other.pid}" in result.errors[0].traceback
        other.drop(lock_key(name))

    @pytest.mark.parametrize("task", [tasks.with_context, tasks.asynchronous_with_context], ids=lambda task: task.name)
    def test_the_context_goes_through(self, task: Any, name: str, other: OtherSession) -> None:
        assert immediate(task, name).return_value == 1
        other.take(lock_key(name))
        assert immediate(task, name).return_value == "busy"
        other.drop(lock_key(name))

    @pytest.mark.parametrize("task", [tasks.skipping, tasks.asynchronous], ids=lambda task: task.name)
    def test_enqueued_by_asynchronous_code(self, task: Any, name: str, place: Place, other: OtherSession) -> None:
        place.open()

        async def enqueue() -> list[Any]:
            one = task.using(backend="immediate")
            try:
                return [await one.aenqueue(name, str(place)) for _ in range(2)]
            finally:
                await sync_to_async(connections.close_all)()

        assert [result.return_value for result in async_to_sync(enqueue)()] == ["done", "done"]
        assert [result.return_value for result in asyncio.run(enqueue())] == ["done", "done"]

    def test_in_a_transaction_the_lock_lasts_until_the_commit(
        self, name: str, place: Place, other: OtherSession
    ) -> None:
        place.open()
        with transaction.atomic():
            assert immediate(tasks.skipping, name, str(place)).return_value == "done"
            assert not other.is_free(lock_key(name))
            assert immediate(tasks.skipping, name, str(place)).return_value == "done"
        assert other.is_free(lock_key(name))

    def test_an_asynchronous_task_in_a_transaction(self, name: str, place: Place, other: OtherSession) -> None:
        """The lock would join the transaction of whoever enqueued it, and is refused."""
        with transaction.atomic():
            result = immediate(tasks.asynchronous, name, str(place))
        assert status(result) == "FAILED"
        assert result.errors[0].exception_class is transaction.TransactionManagementError

    def test_enqueued_under_the_same_lock(self, name: str, place: Place, other: OtherSession) -> None:
        """A function runs in it; a coroutine function is a task of the loop, so somebody else."""
        place.open()
        with advisory_lock(name):
            assert immediate(tasks.skipping, name, str(place)).return_value == "done"
            assert immediate(tasks.asynchronous, name, str(place)).return_value == "busy"
            assert status(immediate(tasks.asynchronous_failing, name, str(place))) == "FAILED"
        assert other.is_free(lock_key(name))

    def test_the_dummy_backend_takes_nothing(self, name: str, place: Place, other: OtherSession) -> None:
        result = tasks.skipping.using(backend="dummy").enqueue(name, str(place))
        assert status(result) == "READY"
        assert other.is_free(lock_key(name))

    def test_a_call_is_locked_too(self, name: str, place: Place, other: OtherSession) -> None:
        other.take(lock_key(name))
        assert tasks.skipping.call(name, str(place)) == "busy"
        assert async_to_sync(tasks.skipping.acall)(name, str(place)) == "busy"
        other.drop(lock_key(name))

    def test_above_the_task_it_is_refused(self) -> None:
        task: Any = tasks.unlocked
        with pytest.raises(TypeError, match="below @task"):
            advisory_lock("x")(task)


@pytest.mark.usefixtures("queue")
class TestWhatAWorkerRunsItIn:
    """Of `django-tasks-db`: claims the task in a transaction, and runs it after that has ended."""

    def test_no_transaction_and_the_connection_of_the_worker(self, name: str, other: OtherSession) -> None:
        """Case 3: not even the housekeeping of connections ends the lock."""
        (result,) = run(tasks.report, name)
        assert result.return_value == {
            "in_transaction": False,
            "scope": "session",
            "alias": "default",
            "same session": True,
            "held": True,
        }

    def test_free_before_the_result_is_written(self, name: str, place: Place, other: OtherSession) -> None:
        from django.tasks.signals import task_finished

        place.open()
        free: list[bool] = []

        def note(**kwargs: Any) -> None:
            free.append(other.is_free(lock_key(name)))

        task_finished.connect(note)
        try:
            run(tasks.waiting, name, str(place))
        finally:
            task_finished.disconnect(note)
        assert free == [True]

    def test_a_failed_statement_frees_it_too(self, name: str, other: OtherSession) -> None:
        (result,) = run(tasks.breaking, name)
        assert status(result) == "FAILED"
        assert other.is_free(lock_key(name))

    def test_one_after_the_other_runs_twice(self, name: str, place: Place, other: OtherSession) -> None:
        """Case 76, 79: mutual exclusion is not de-duplication."""
        place.open()
        results = run(tasks.skipping, name, str(place), times=2)
        assert [result.return_value for result in results] == ["done", "done"]

    def test_a_slot_written_down_with_the_work_runs_once(self, name: str, place: Place, other: OtherSession) -> None:
        """Case 79."""
        place.open()
        slot = name[:40]
        results = run(tasks.once, name, slot, str(place), times=2)
        assert [result.return_value for result in results] == ["done", "already done"]
        Country.objects.get(code=slot).delete()


class TestTwoWorkers:
    def test_without_a_lock_they_overlap(
        self, workers: list[subprocess.Popen[str]], name: str, place: Place, other: OtherSession
    ) -> None:
        """The negative control."""
        results = [shared(tasks.unlocked, name, str(place)) for _ in range(2)]
        place.wait_for(2)
        place.open()
        assert [finished(result).return_value for result in results] == ["done", "done"]
        assert place.overlapped

    @pytest.mark.parametrize(
        "task",
        [tasks.skipping, tasks.asynchronous, tasks.job, tasks.asynchronous_job],
        ids=lambda task: task.name,
    )
    def test_one_works_and_the_other_skips(
        self, workers: list[subprocess.Popen[str]], task: Any, name: str, place: Place, other: OtherSession
    ) -> None:
        """Case 76: one tick enqueued twice, and picked by two workers at once."""
        results = [shared(task, name, str(place)) for _ in range(2)]
        place.wait_for(1)
        wait_until(lambda: [result.refresh() or status(result) for result in results].count("SUCCESSFUL") == 1)
        assert not other.is_free(lock_key(name))
        place.open()
        assert sorted(finished(result).return_value for result in results) == ["busy", "done"]
        assert not place.overlapped

    def test_one_works_and_the_other_fails(
        self, workers: list[subprocess.Popen[str]], name: str, place: Place, other: OtherSession
    ) -> None:
        first = shared(tasks.failing, name, str(place))
        place.wait_for(1)
        second = finished(shared(tasks.failing, name, str(place)))
        assert status(second) == "FAILED"
        assert second.errors[0].exception_class is LockTimeout
        place.open()
        assert finished(first).return_value == "done"

    def test_duplicates_run_one_at_a_time(
        self, workers: list[subprocess.Popen[str]], name: str, place: Place, other: OtherSession
    ) -> None:
        results = [shared(tasks.waiting, name, str(place)) for _ in range(6)]
        place.wait_for(1)
        other.wait_for_waiters(lock_key(name))
        place.open()
        assert [finished(result).return_value for result in results] == ["done"] * 6
        assert not place.overlapped

    def test_a_slot_is_done_once(
        self, workers: list[subprocess.Popen[str]], name: str, place: Place, other: OtherSession
    ) -> None:
        """Case 79: at the same time."""
        slot = name[:40]
        results = [shared(tasks.once, name, slot, str(place)) for _ in range(2)]
        place.wait_for(1)
        other.wait_for_waiters(lock_key("once", name, slot))
        place.open()
        assert sorted(finished(result).return_value for result in results) == ["already done", "done"]
        Country.objects.get(code=slot).delete()

    def test_the_process_that_enqueues_is_one_more(
        self, workers: list[subprocess.Popen[str]], name: str, place: Place, other: OtherSession
    ) -> None:
        """Case 81: the same work as a task and by hand."""
        with advisory_lock(name):
            assert finished(shared(tasks.skipping, name, str(place))).return_value == "busy"
            here = Thread(lambda: immediate(tasks.skipping, name, str(place)).return_value)
            assert here.result() == "busy"


class TestTheEndOfAWorker:
    def test_killed(self, queue: None, name: str, place: Place, other: OtherSession) -> None:
        """Case 60, 61: the task stays RUNNING for ever, its lock does not."""
        with running(WORKER, name[:32]) as worker:
            first = tasks.skipping.using(queue_name=name[:32]).enqueue(name, str(place))
            place.wait_for(1)
            assert immediate(tasks.skipping, name, str(place)).return_value == "busy"
            worker.send_signal(signal.SIGKILL)
            worker.wait(LIMIT)
        other.wait_until_free(lock_key(name))
        place.open()
        (second,) = run(tasks.skipping, name, str(place))
        assert second.return_value == "done"
        first.refresh()
        assert status(first) == "RUNNING"

    def test_told_to_end_twice(self, queue: None, name: str, place: Place, other: OtherSession) -> None:
        """The first SIGTERM lets the task end; the second breaks it off, and the lock is free before the process is."""
        with running(WORKER, name[:32]) as worker:
            result = tasks.skipping.using(queue_name=name[:32]).enqueue(name, str(place))
            place.wait_for(1)
            worker.send_signal(signal.SIGTERM)
            assert worker.stdout is not None
            assert any("shutting down gracefully" in line for line in worker.stdout)
            place.wait_for_a_beat()
            assert not other.is_free(lock_key(name))
            worker.send_signal(signal.SIGTERM)
            worker.wait(LIMIT)
        assert status(finished(result)) == "FAILED"
        assert other.is_free(lock_key(name))
