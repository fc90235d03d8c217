"""Tasks of Huey. `register()` makes them for one storage: of a consumer, or of a test that enqueues for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from django.db import close_old_connections
from huey import Huey

from django_advisory_lock import AdvisoryLockJobMixin, LockTimeout, advisory_lock, try_advisory_lock
from tests.queues.work import work
from tests.support import LIMIT


def first(name: str, *args: str) -> str:
    return name


class Job(AdvisoryLockJobMixin):
    def get_lock_key(self, name: str, *args: str) -> str:
        return name

    def handle_lock_busy(self, error: LockTimeout, *args: str) -> str:
        return "busy"

    def run(self, name: str, folder: str) -> str:
        return work(folder)


def unlocked(name: str, folder: str) -> str:
    return work(folder)


@try_advisory_lock(first, default="busy")
def skipping(name: str, folder: str) -> str:
    close_old_connections()
    return work(folder)


@advisory_lock(first, timeout=0)
def retrying(name: str, folder: str) -> str:
    return work(folder)


@advisory_lock(first, timeout=LIMIT)
def waiting(name: str, folder: str) -> str:
    return work(folder)


def job(name: str, folder: str) -> str:
    return str(Job().run(name, folder))


def locked_by_huey(name: str, folder: str) -> str:
    return work(folder)


def register(huey: Huey) -> Any:
    """Make the tasks of a storage, as `@huey.task()` above them would."""
    return SimpleNamespace(
        unlocked=huey.task()(unlocked),
        skipping=huey.task()(skipping),
        retrying=huey.task(retries=2)(retrying),
        waiting=huey.task()(waiting),
        job=huey.task()(job),
        locked_by_huey=huey.task()(huey.lock_task("of huey")(locked_by_huey)),
    )
