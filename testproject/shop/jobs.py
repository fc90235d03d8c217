"""Background jobs, for Celery (see `testproject/celery.py`) and for Django's own tasks.

They take the locks of the commands and of the pages: whoever comes second skips, since the work is being done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import django
from celery import Task

from django_advisory_lock import AdvisoryLockJobMixin, try_advisory_lock
from testproject.celery import app

from .models import Account
from .reports import generate_report, report_key
from .syncing import sync_account, sync_key

if TYPE_CHECKING:
    from django_advisory_lock import KeyLike, LockTimeout

BUSY = "busy"


class Generate(AdvisoryLockJobMixin, Task):  # type: ignore[misc, unused-ignore]
    """Compute the report of one month. A class: the lock is its mixin's, and so is what happens where it is busy."""

    name = "shop.generate"

    def get_lock_key(self, month: str) -> KeyLike:
        return report_key(month)

    def run(self, month: str) -> int:
        return generate_report(month).order_count

    def handle_lock_busy(self, error: LockTimeout, *args: Any, **kwargs: Any) -> str:
        super().handle_lock_busy(error, *args, **kwargs)  # which logs it
        return BUSY


generate = app.register_task(Generate())


@app.task(name="shop.sync")  # type: ignore[untyped-decorator, unused-ignore]
@try_advisory_lock(sync_key, default=BUSY)
def sync(pk: int) -> str:
    """Sync one account. A function: the lock is a decorator, below that of the task."""
    sync_account(Account.objects.get(pk=pk))
    return "synced"


if django.VERSION >= (6, 0):
    from django.tasks import task

    @task
    @try_advisory_lock(report_key, default=None)
    def generate_by_django(month: str) -> int | None:
        """Compute the report of one month, by whatever backend `TASKS` names."""
        return generate_report(month).order_count
