"""Jobs of APScheduler, and a web worker with a scheduler of its own, as every one of several web workers has."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

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


EVENTS = {
    EVENT_JOB_EXECUTED: "executed",
    EVENT_JOB_ERROR: "error",
    EVENT_JOB_MISSED: "missed",
    EVENT_JOB_MAX_INSTANCES: "max_instances",
}


def note_events(scheduler: BaseScheduler, noted: list[tuple[str, object]]) -> None:
    """Write down what becomes of each run."""
    scheduler.add_listener(
        lambda event: noted.append((EVENTS[event.code], getattr(event, "retval", None))), functools.reduce(int.__or__, EVENTS)
    )


class Told(list[tuple[str, object]]):
    """Events, written to a file of this process as they come."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"events-{os.getpid()}"

    def append(self, event: tuple[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(f"{event[0]} {event[1]}\n")


def web_worker(name: str, folder: str) -> None:
    """Say that it is there, and on a line fire one job of each kind, again and again, until standard input ends."""
    scheduler = BackgroundScheduler()
    note_events(scheduler, Told(Path(folder)))
    scheduler.start()
    print("ready", flush=True)  # noqa: T201
    for line in iter(input, "end"):
        scheduler.add_job({"locked": locked, "unlocked": unlocked, "class": of_a_class}[line], args=[name, folder])
    scheduler.shutdown()
