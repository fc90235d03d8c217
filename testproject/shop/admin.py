"""The shop's admin. It asks for the locks of the commands, the pages and the jobs, which all name the same keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin, messages

from django_advisory_lock.guards.admin import AdvisoryLockAdminMixin, locked_action

from .models import Account, MonthlyReport, Order, Run
from .syncing import sync_account

if TYPE_CHECKING:
    from django.http import HttpRequest

    from .models import AccountQuerySet


@admin.register(Account)
class AccountAdmin(AdvisoryLockAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """Nobody saves or deletes an account while it is being synced, and the other way round."""

    list_display = ("name", "email", "balance", "synced_at")
    search_fields = ("name", "email")
    actions = ("sync_now",)
    lock_purpose = "sync"  # that of sync_key()

    @admin.action(description="Sync now", permissions=["change"])
    @locked_action(purpose="sync")
    def sync_now(self, request: HttpRequest, queryset: AccountQuerySet) -> None:
        accounts = list(queryset)
        for account in accounts:
            sync_account(account)
        synced = f"{accounts[0]} is" if len(accounts) == 1 else f"{len(accounts)} accounts are"
        self.message_user(request, f"{synced} synced.", messages.SUCCESS)


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("__str__", "account", "placed_at", "amount")
    list_select_related = ("account",)
    raw_id_fields = ("account",)
    date_hierarchy = "placed_at"


@admin.register(MonthlyReport)
class MonthlyReportAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("month", "order_count", "total", "computed_at", "computed_by_host", "computed_by_pid")


@admin.register(Run)
class RunAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("task", "subject", "host", "pid", "started_at", "finished_at")
    list_filter = ("task",)
