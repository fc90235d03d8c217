from __future__ import annotations

from decimal import Decimal

from django.db import transaction
from django.db.models import Count, Sum
from django.db.models.functions import Now

from .models import MonthlyReport, Order, this_host, this_pid


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
