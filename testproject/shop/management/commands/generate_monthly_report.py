from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError

from django_advisory_lock import AdvisoryLockCommandMixin
from testproject.shop import arguments
from testproject.shop.reports import NoOrdersError, generate_report, report_key

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
        return report_key(options["month"])

    def handle(self, *, month: str, database: str, verbosity: int, **options: Any) -> None:
        try:
            report = generate_report(month, using=database)
        except NoOrdersError as error:
            raise CommandError(str(error)) from error
        if verbosity:
            self.stdout.write(self.style.SUCCESS(f"{month}: {report.order_count:,} orders, {report.total:,} in total."))
