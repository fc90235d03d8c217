from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand
from django.db.models.functions import Now

from django_advisory_lock import AdvisoryLockCommandMixin
from testproject.shop import arguments
from testproject.shop.models import Run

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

KEPT = timedelta(days=30)


class Command(AdvisoryLockCommandMixin, BaseCommand):
    help = (
        "Deletes what is older than 30 days from the log of work. For a nightly line in the crontab of every host:"
        " whoever comes less than 12 hours after the last one does nothing."
    )
    lock_min_interval = timedelta(hours=12)

    def add_arguments(self, parser: CommandParser) -> None:
        arguments.add_database(parser)

    def get_lock_using(self, *args: Any, **options: Any) -> str:
        return str(options["database"])

    def handle(self, *, database: str, verbosity: int, **options: Any) -> None:
        runs = Run.objects.using(database)
        with runs.record("prune_runs", "all"):
            deleted, _ = runs.filter(started_at__lt=Now() - KEPT).delete()
        if verbosity:
            self.stdout.write(self.style.SUCCESS(f"Deleted {deleted:,} runs."))
