"""The pages of this app in Django's admin."""

from .held_locks import HeldLockAdmin
from .periodic_runs import PeriodicRunAdmin

__all__ = ["HeldLockAdmin", "PeriodicRunAdmin"]
