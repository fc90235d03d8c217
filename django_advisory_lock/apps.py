from __future__ import annotations

from django.apps import AppConfig
from django.core import checks
from django.utils.translation import gettext_lazy as _

from .checks import check_database, check_periodic_runs, check_settings


class DjangoAdvisoryLockConfig(AppConfig):
    name = "django_advisory_lock"
    verbose_name = _("Advisory locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register(check_settings)
        checks.register(check_database, checks.Tags.database)
        checks.register(check_periodic_runs, checks.Tags.database)
