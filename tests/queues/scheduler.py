"""Jobs of APScheduler, and a web worker with a scheduler of its own, as every one of several web workers has."""

from __future__ import annotations

import functools
import operator
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import BaseScheduler
from django.db import close_old_connections

from django_advisory_lock import AdvisoryLockJobMixin, try_advisory_lock
from tests.queues.work import work
from tests.support import backend_pid

P = ParamSpec("P")
R = TypeVar("R")


def closes_connections(job: Callable[P, R]) -> Callable[P, R]:
    """Do for a job what Django does for a request."""

    @functools.wraps(job)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        close_old_connections()
        try:
            return job(*args, **kwargs)
        finally:
            close_old_connections()

    return run


def first(name: str, *args: str) -> str:
    return name


@closes_connections
@try_advisory_lock(first, default="busy")
def locked(name: str, folder: str) -> str:
    return work(folder)


@closes_connections
def unlocked(name: str, folder: str) -> str:
    backend_pid()
    return work(folder)


class Job(AdvisoryLockJobMixin):
    def get_lock_key(self, name: str, *args: str) -> str:
        return name

    def run(self, name: str, folder: str) -> str:
        return work(folder)


@closes_connections
def of_a_class(name: str, folder: str) -> str:
    return str(Job().run(name, folder) or "busy")


JOBS = {"locked": locked, "unlocked": unlocked, "class": of_a_class}
EVENTS = {
    EVENT_JOB_EXECUTED: "executed",
    EVENT_JOB_ERROR: "error",
    EVENT_JOB_MISSED: "missed",
    EVENT_JOB_MAX_INSTANCES: "max_instances",
}
ALL = functools.reduce(operator.or_, EVENTS)


def note_events(scheduler: BaseScheduler, noted: list[tuple[str, Any]]) -> None:
    """Note what becomes of each run."""
    scheduler.add_listener(lambda event: noted.append((EVENTS[event.code], getattr(event, "retval", None))), ALL)


def write_down(event: Any) -> None:
    """Write what becomes of a run into the folder that its job works in."""
    folder = event.job_id.rpartition(":")[0]
    with Path(folder, f"events-{os.getpid()}").open("a") as file:
        file.write(f"{EVENTS[event.code]} {event.retval}\n")


def web_worker() -> None:
    """Say that it is there; then start the job that each line of standard input names, until that ends."""
    scheduler = BackgroundScheduler()
    scheduler.add_listener(write_down, ALL)
    scheduler.start()
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        job, name, folder = line.rstrip("\n").split(" ", 2)
        scheduler.add_job(JOBS[job], args=[name, folder], id=f"{folder}:{uuid.uuid4()}")
    scheduler.shutdown()
