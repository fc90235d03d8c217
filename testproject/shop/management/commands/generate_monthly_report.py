from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError

from django_advisory_lock import AdvisoryLockCommandMixin
from testproject.shop import arguments
from testproject.shop.models import MonthlyReport, Order, Run
from testproject.shop.reports import refresh_month

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

    from django_advisory_lock import KeyLike


class Command(AdvisoryLockCommandMixin, BaseCommand):
    help = "Computes the report of one month. Different months may run at the same time, the same month may not."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("month", type=arguments.month, help="The month as YYYY-MM, such as 2026-09.")
        arguments.add_database(parser)

    def get_lock_using(self, *args: Any, **options: Any) -> str:
        return str(options["database"])

    def get_lock_key(self, *args: Any, **options: Any) -> KeyLike:
        return ("monthly-report", options["month"])

    def handle(self, *, month: str, database: str, verbosity: int, **options: Any) -> None:
        if not Order.objects.using(database).in_month(month).exists():
            raise CommandError(f"There are no orders in {month}, so there is nothing to report.")
        with Run.objects.using(database).record("generate_monthly_report", month):
            refresh_month(month, using=database)
        if verbosity:
            report = MonthlyReport.objects.using(database).get(month=month)
            self.stdout.write(self.style.SUCCESS(f"{month}: {report.order_count:,} orders, {report.total:,} in total."))
