"""The monthly reports, and the lock that commands, pages, the API and background jobs share."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from django.db import DEFAULT_DB_ALIAS, transaction
from django.db.models import Count, Sum
from django.db.models.functions import Now

from .models import MonthlyReport, Order, Run, this_host, this_pid

if TYPE_CHECKING:
    from django_advisory_lock import KeyLike


class NoOrdersError(Exception):
    """A month without orders has no report."""

    def __init__(self, month: str) -> None:
        super().__init__(f"There are no orders in {month}, so there is nothing to report.")


def report_key(month: str) -> KeyLike:
    """Return the key of the lock that whoever computes the report of a month has to hold."""
    return ("monthly-report", month)


def generate_report(month: str, *, using: str = DEFAULT_DB_ALIAS) -> MonthlyReport:
    """Compute the report of one month, and log the work. The caller holds `report_key(month)`."""
    if not Order.objects.using(using).in_month(month).exists():
        raise NoOrdersError(month)
    with Run.objects.using(using).record("generate_monthly_report", month):
        refresh_month(month, using=using)
    report: MonthlyReport = MonthlyReport.objects.using(using).get(month=month)
    return report


def refresh_month(month: str, *, using: str) -> None:
    """Recompute the report of a month from its orders.

    The advisory locks around it keep the work from being done twice. The lock on the row keeps the result right:
    who has it reads the orders after whoever had it before has committed.
    """
    with transaction.atomic(using=using):
        reports = MonthlyReport.objects.using(using)
        report, _ = reports.select_for_update().get_or_create(month=month)
        totals = (
            Order.objects.using(using)
            .in_month(month)
            .aggregate(order_count=Count("pk"), total=Sum("amount", default=Decimal(0)))
        )
        reports.filter(pk=report.pk).update(
            **totals, computed_at=Now(), computed_by_pid=this_pid(), computed_by_host=this_host()
        )
