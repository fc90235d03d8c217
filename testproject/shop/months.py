"""Months as text, "2026-09": their form, and their bounds in UTC."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from django.urls import register_converter

MONTH = r"\A(19|20)[0-9]{2}-(0[1-9]|1[0-2])\Z"


class MonthConverter:
    """A month in a URL."""

    regex = MONTH.removeprefix(r"\A").removesuffix(r"\Z")

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: str) -> str:
        return value


register_converter(MonthConverter, "month")


def month_bounds(month: str) -> tuple[datetime, datetime]:
    """Return the first moment of a month and the first one after it."""
    start = datetime.strptime(month, "%Y-%m").replace(tzinfo=timezone.utc)
    return start, (start + timedelta(days=31)).replace(day=1)
