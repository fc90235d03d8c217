from __future__ import annotations

from django.contrib import admin

from .models import Account, MonthlyReport, Order, Run


@admin.register(Account)
class AccountAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("name", "email", "balance", "synced_at")
    search_fields = ("name", "email")


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
