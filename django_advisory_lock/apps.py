from __future__ import annotations

from django.apps import AppConfig
from django.core import checks
from django.utils.translation import gettext_lazy as _

from .checks import check_periodic_runs


class DjangoAdvisoryLockConfig(AppConfig):
    name = "django_advisory_lock"
    verbose_name = _("Advisory locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register(check_periodic_runs, checks.Tags.database)
