from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand

from django_advisory_lock import AdvisoryLockCommandMixin
from testproject.shop import arguments
from testproject.shop.models import MonthlyReport, Order, Run
from testproject.shop.reports import refresh_month

if TYPE_CHECKING:
    from django.core.management.base import CommandParser


class Command(AdvisoryLockCommandMixin, BaseCommand):
    help = "Recomputes all monthly reports from the orders. Where another copy is at it, this one does nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        arguments.add_database(parser)

    def get_lock_using(self, *args: Any, **options: Any) -> str:
        return str(options["database"])

    def handle(self, *, database: str, verbosity: int, **options: Any) -> None:
        with Run.objects.using(database).record("refresh_reports", "all"):
            months = [f"{start:%Y-%m}" for start in Order.objects.using(database).datetimes("placed_at", "month")]
            for month in months:
                refresh_month(month, using=database)
            MonthlyReport.objects.using(database).exclude(month__in=months).delete()
        if verbosity:
            self.stdout.write(self.style.SUCCESS(f"Refreshed {len(months)} reports."))
