"""The logger, and warnings that point to the caller's own line."""

from __future__ import annotations

import logging
import sys
import warnings

logger = logging.getLogger("django_advisory_lock")


def warn_caller(message: str) -> None:
    """Emit a RuntimeWarning for the nearest line outside this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__ + "."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)
