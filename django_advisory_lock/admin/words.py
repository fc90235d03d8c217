"""How the admin says a length of time."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils.timesince import timesince
from django.utils.translation import ngettext

ANY_DAY = datetime(2001, 1, 1)  # only lengths of time are counted from it


def in_words(length: timedelta) -> str:
    """Say how long a time is, as one would say it: the two largest units, or the seconds of less than a minute."""
    if length < timedelta(minutes=1):
        seconds = round(max(0.0, length.total_seconds()), 1 if length < timedelta(seconds=10) else None)
        plural = 2 if seconds % 1 else int(seconds)  # there is no rule for 1.5 seconds
        return ngettext("%(count)s second", "%(count)s seconds", plural) % {"count": f"{seconds:g}"}
    try:
        return timesince(ANY_DAY, ANY_DAY + length)
    except OverflowError:
        return str(length)
