"""The pages of the shop. Each takes the same lock as the command that does the same work."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import messages
from django.http import Http404, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe
from django.views.generic import ListView, TemplateView

from django_advisory_lock import AdvisoryLockViewMixin, lock_view

from .models import Account, MonthlyReport, Order
from .reports import NoOrdersError, generate_report, report_key
from .syncing import sync_account, sync_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.http import HttpRequest, HttpResponse

    from django_advisory_lock import KeyLike, LockTimeout

    from .models import OrderQuerySet


class Overview(TemplateView):
    """All months that have orders or a report, the latest first."""

    template_name = "shop/overview.html"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        reports = {report.month: report for report in MonthlyReport.objects.all()}
        months = {f"{start:%Y-%m}" for start in Order.objects.datetimes("placed_at", "month")}
        rows = [(month, reports.get(month)) for month in sorted(months | set(reports), reverse=True)]
        return super().get_context_data(rows=rows, **kwargs)


class Month(AdvisoryLockViewMixin, TemplateView):
    """The report of one month. Only the POST that computes it takes the lock: the page can always be read."""

    template_name = "shop/month.html"
    lock_methods = ("POST",)
    lock_retry_after = 2

    def get_lock_key(self) -> KeyLike:
        return report_key(self.kwargs["month"])

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        month = self.kwargs["month"]
        report = MonthlyReport.objects.filter(month=month).first()
        if report is None and not Order.objects.in_month(month).exists():
            raise Http404(str(NoOrdersError(month)))
        return super().get_context_data(report=report, **kwargs)

    def post(self, request: HttpRequest, month: str) -> HttpResponse:
        try:
            report = generate_report(month)
        except NoOrdersError as error:
            raise Http404(str(error)) from error
        messages.success(request, f"The report of {month} is ready: {report.order_count:,} orders.")
        return redirect("shop:month", month)

    def handle_lock_busy(self, error: LockTimeout, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show the page again, and say on it why nothing was done."""
        response = self.render_to_response(self.get_context_data(is_busy=True, **kwargs), status=409)
        response["Retry-After"] = str(self.lock_retry_after)
        return response


@require_safe
@lock_view(lambda request, month: report_key(month), shared=True)
def export(request: HttpRequest, month: str) -> StreamingHttpResponse:
    """Stream the orders of a month. Shared: many exports at once, and no new report until the last one has ended."""
    orders = Order.objects.in_month(month).select_related("account").order_by("placed_at", "pk")
    if not orders.exists():
        raise Http404(str(NoOrdersError(month)))
    return StreamingHttpResponse(
        csv_lines(orders),
        content_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="orders-{month}.csv"'},
    )


class _Echo:
    """A file for the writer of CSV, which hands each line back instead of keeping it."""

    def write(self, line: str) -> str:
        return line


def csv_lines(orders: OrderQuerySet) -> Iterator[str]:
    writer = csv.writer(_Echo())
    yield writer.writerow(["order", "placed_at", "account", "amount"])
    for order in orders.iterator(chunk_size=500):
        yield writer.writerow([order.pk, order.placed_at.isoformat(), order.account.name, order.amount])


class Accounts(ListView):  # type: ignore[type-arg]
    """The accounts, each with a button that syncs it."""

    template_name = "shop/accounts.html"
    queryset = Account.objects.order_by("pk")
    context_object_name = "accounts"
    paginate_by = 25


@require_POST
@lock_view(lambda request, pk: sync_key(pk))
def sync(request: HttpRequest, pk: int) -> HttpResponse:
    """Sync one account. Where it is being synced already, the answer is the project's 409.html."""
    account = get_object_or_404(Account, pk=pk)
    sync_account(account)
    messages.success(request, f"{account} is synced.")
    page = urlencode({"page": request.POST.get("page", "1")})
    return redirect(f"{reverse('shop:accounts')}?{page}#account-{pk}")
