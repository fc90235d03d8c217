"""The logger, and warnings that point to the caller's own line."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .keys import LockKey

logger = logging.getLogger("django_advisory_lock")


def warn_caller(message: str) -> None:
    """Emit a RuntimeWarning for the nearest line outside this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__ + "."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def names(keys: Sequence[LockKey]) -> str:
    """Return the names of some keys for a message: all of a few, or the first of many."""
    shown = ", ".join(repr(key.name) for key in keys[:3])
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
