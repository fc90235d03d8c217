"""Tasks of `django.tasks`: below `@task` stands the lock, in each of the ways in which a task may have one."""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connection, transaction
from django.tasks import task

from django_advisory_lock import AdvisoryLockJobMixin, LockTimeout, advisory_lock, try_advisory_lock
from tests.queues.work import work
from tests.support import LIMIT, backend_pid, value
from tests.testapp.models import Country


def first(name: str, *args: Any) -> str:
    return name


@task
def unlocked(name: str, folder: str) -> str:
    return work(folder)


@task
@try_advisory_lock(first, default="busy")
def skipping(name: str, folder: str) -> str:
    return work(folder)


@task
@try_advisory_lock(first)
def skipping_without_a_default(name: str, folder: str) -> str:
    return work(folder)


@task
@advisory_lock(first, timeout=0)
def failing(name: str, folder: str) -> str:
    return work(folder)


@task
@advisory_lock(first, timeout=LIMIT)
def waiting(name: str, folder: str) -> str:
    return work(folder)


@task(takes_context=True)
@try_advisory_lock(lambda context, name: name, default="busy")
def with_context(context: Any, name: str) -> int:
    return int(context.attempt)


@task
@try_advisory_lock(first, default="busy")
async def asynchronous(name: str, folder: str) -> str:
    return await sync_to_async(work)(folder)


@task(takes_context=True)
@try_advisory_lock(lambda context, name: name, default="busy")
async def asynchronous_with_context(context: Any, name: str) -> int:
    return int(context.attempt)


@task
@advisory_lock(first, timeout=0)
async def asynchronous_failing(name: str, folder: str) -> str:
    return await sync_to_async(work)(folder)


class Job(AdvisoryLockJobMixin):
    def get_lock_key(self, name: str, *args: Any) -> str:
        return name

    def handle_lock_busy(self, error: LockTimeout, *args: Any) -> str:
        return "busy"

    def run(self, name: str, folder: str) -> str:
        return work(folder)


@task
def job(name: str, folder: str) -> str:
    return str(Job().run(name, folder))


class AsynchronousJob(Job):
    async def run(self, name: str, folder: str) -> str:  # type: ignore[override]
        return await sync_to_async(work)(folder)


@task
async def asynchronous_job(name: str, folder: str) -> str:
    return str(await AsynchronousJob().run(name, folder))


@task
def report(name: str) -> dict[str, Any]:
    """Tell what the lock of a task stands on."""
    with advisory_lock(name, timeout=0) as lock:
        close_old_connections()
        holder = value("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
        return {
            "in_transaction": connection.in_atomic_block,
            "scope": lock.scope,
            "alias": lock.using,
            "same session": holder == backend_pid(),
            "held": lock.is_held(),
        }


@task
def breaking(name: str) -> None:
    with advisory_lock(name):
        value("SELECT 1/0")


@task
def once(name: str, slot: str, folder: str) -> str:
    """Do the work of a slot, unless it is done, and write down that it is, in one transaction."""
    with advisory_lock("once", name, slot), transaction.atomic():
        if Country.objects.filter(code=slot).exists():
            return "already done"
        Country.objects.create(code=slot)
        return work(folder)
