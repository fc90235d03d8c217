"""Stands for the client of a remote system: slow, and not to be asked the same thing twice at once."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .models import Account


def fetch_balance(account: Account, *, delay: float) -> Decimal:
    time.sleep(delay)
    return Decimal(account.pk * 7919 % 1_000_000) / 100
