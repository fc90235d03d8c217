from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DjangoAdvisoryLockConfig(AppConfig):
    name = "django_advisory_lock"
    verbose_name = _("Advisory locks")
