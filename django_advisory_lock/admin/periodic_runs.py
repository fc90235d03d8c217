"""The admin's list of periodic work: when it last ran, how that went, and a button that allows the next run now."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from django.contrib import admin
from django.db import transaction
from django.utils.html import format_html_join
from django.utils.safestring import mark_safe
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import conf
from ..models import PeriodicRun
from .words import in_words

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

    from ..models import PeriodicRunQuerySet


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

    list_display = ("label", "last_outcome", "age", "duration", "interval", "last_host", "last_pid", "runs", "error")
    list_filter = ("last_outcome", SilentFilter, "last_host")
    search_fields = ("name", "last_error", "last_host")
    actions = ("allow_next_run",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[PeriodicRun]:
        """Return what is noted in the database of the locks; work with another `using` is not in this list."""
        runs = super().get_queryset(request).using(conf.get_database())
        return cast("PeriodicRunQuerySet", runs).with_age()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_allow_permission(self, request: HttpRequest) -> bool:
        """Whether a user may let something run before its time: those who may change the rows may."""
        return super().has_change_permission(request)

    @admin.display(description=gettext_lazy("name"), ordering="name")
    def label(self, run: PeriodicRun) -> str:
        # The name of a module is one long word, which would push the other columns off the page.
        return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in re.split(r"(?<=[.:])", run.name)))

    @admin.display(description=gettext_lazy("last started"), ordering="last_started_at")
    def age(self, run: PeriodicRun) -> str | None:
        age = getattr(run, "age", None)
        return None if age is None else _("%(age)s ago") % {"age": in_words(timedelta(seconds=age))}

    @admin.display(description=gettext_lazy("duration"))
    def duration(self, run: PeriodicRun) -> str | None:
        return None if run.duration is None else in_words(run.duration)

    @admin.display(description=gettext_lazy("minimum interval"), ordering="min_interval")
    def interval(self, run: PeriodicRun) -> str:
        return in_words(run.min_interval)

    @admin.display(description=gettext_lazy("runs"), ordering="run_count")
    def runs(self, run: PeriodicRun) -> int:
        return run.run_count

    @admin.display(description=gettext_lazy("error"))
    def error(self, run: PeriodicRun) -> str | None:
        return Truncator(" ".join(run.last_error.split())).chars(80) or None

    @admin.action(description=gettext_lazy("Allow the next run now"), permissions=["allow"])
    def allow_next_run(self, request: HttpRequest, queryset: QuerySet[PeriodicRun]) -> None:
        with transaction.atomic(using=queryset.db):
            runs = list(queryset)
            PeriodicRun.objects.using(queryset.db).filter(pk__in=[run.pk for run in runs]).update(last_started_at=None)
            for run in runs:
                self.log_change(request, run, _("Allowed the next run now."))
        text = ngettext(
            "The next run of “%(name)s” may start now, whenever it comes.",
            "The next runs of these %(count)d may start now, whenever they come.",
            len(runs),
        )
        self.message_user(request, text % {"count": len(runs), "name": runs[0] if runs else ""})
