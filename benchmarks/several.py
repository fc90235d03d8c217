"""What many locks cost: `advisory_lock_all` against one lock after the other, and a semaphore against its statements.

python -m benchmarks.several [--rounds N]
"""

from __future__ import annotations

import contextlib
import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
django.setup()

from django.db import connection  # noqa: E402

from benchmarks.measuring import compare, rounds  # noqa: E402
from django_advisory_lock import advisory_lock, advisory_lock_all, advisory_semaphore, lock_key  # noqa: E402

KEYS = [lock_key("benchmark-several", number) for number in range(1000)]


def together() -> None:
    with advisory_lock_all(*KEYS):
        pass


def one_by_one() -> None:
    with contextlib.ExitStack() as stack:
        for key in KEYS:
            stack.enter_context(advisory_lock(key))


def slot() -> None:
    with advisory_semaphore("benchmark-several", limit=5):
        pass


def lock() -> None:
    with advisory_lock(KEYS[0]):
        pass


COMPARISONS = {
    "1,000 keys against one by one": (together, one_by_one),
    "a slot of five against a lock": (slot, lock),
}

if __name__ == "__main__":
    compare(COMPARISONS, rounds(__doc__, 30))
    connection.close()
