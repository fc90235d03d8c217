from __future__ import annotations

from .work import Command as Work


class Command(Work):
    lock_busy_exit_code = 75
