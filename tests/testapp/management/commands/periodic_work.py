from __future__ import annotations

from datetime import timedelta

from .work import Command as Work


class Command(Work):
    lock_min_interval = timedelta(minutes=5)
