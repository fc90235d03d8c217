"""The admin's list of periodic work: when it last ran, how that went, and a button that allows the next run now."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from django.contrib import admin
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .models import PeriodicRun

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

    from .models import PeriodicRunQuerySet


class SilentFilter(admin.SimpleListFilter):
    """What has not succeeded for three of its intervals."""

    title = gettext_lazy("silence")
    parameter_name = "silent"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", _("no success for three intervals"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[PeriodicRun]) -> QuerySet[PeriodicRun]:
        silent = PeriodicRun.objects.using(queryset.db).silent()
        return queryset.filter(pk__in=silent.values("pk")) if self.value() == "yes" else queryset


@admin.register(PeriodicRun)
class PeriodicRunAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Read-only: the rows are written by the runs."""

    list_display = ("name", "last_outcome", "age", "duration", "min_interval", "last_host", "last_pid", "run_count")
    list_filter = ("last_outcome", SilentFilter, "last_host")
    search_fields = ("name", "last_error", "last_host")
    actions = ("allow_next_run",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[PeriodicRun]:
        return cast("PeriodicRunQuerySet", super().get_queryset(request)).with_age()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_allow_permission(self, request: HttpRequest) -> bool:
        """Whether a user may let something run before its time: those who may change the rows may."""
        return super().has_change_permission(request)

    @admin.display(description=gettext_lazy("last started"), ordering="last_started_at")
    def age(self, run: PeriodicRun) -> str:
        age = getattr(run, "age", None)
        return "" if age is None else _("%(age)s ago") % {"age": timedelta(seconds=round(age))}

    @admin.display(description=gettext_lazy("duration"))
    def duration(self, run: PeriodicRun) -> str:
        return "" if run.duration is None else str(run.duration)

    @admin.action(description=gettext_lazy("Allow the next run now"), permissions=["allow"])
    def allow_next_run(self, request: HttpRequest, queryset: QuerySet[PeriodicRun]) -> None:
        for run in queryset:
            self.log_change(request, run, _("Allowed the next run now."))
        count = queryset.update(last_started_at=None)
        text = ngettext("The next run of %(count)d may start now.", "The next runs of %(count)d may start now.", count)
        self.message_user(request, text % {"count": count})
