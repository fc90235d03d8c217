"""What a lock costs a task: ours against the same two statements through `sync_to_async`.

python -m benchmarks.coroutines [--rounds N]
"""

from __future__ import annotations

import asyncio
import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
django.setup()

from asgiref.sync import sync_to_async  # noqa: E402
from django.db import connection  # noqa: E402

from benchmarks.measuring import acompare, rounds  # noqa: E402
from django_advisory_lock import advisory_lock, lock_key, try_advisory_lock  # noqa: E402

NAME = "benchmark-coroutines"
KEY = lock_key(NAME).args[0]


def ask(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, [KEY])
        cursor.fetchone()


async def bare() -> None:
    await sync_to_async(ask)("SELECT pg_try_advisory_lock(%s)")
    await sync_to_async(ask)("SELECT pg_advisory_unlock(%s)")


async def wait() -> None:
    async with advisory_lock(NAME):
        pass


async def attempt() -> None:
    async with try_advisory_lock(NAME) as lock:
        assert lock


@advisory_lock(NAME)
async def decorated() -> None:
    pass


COMPARISONS = {
    "async with advisory_lock(…)": (wait, bare),
    "async with try_advisory_lock(…)": (attempt, bare),
    "@advisory_lock(…)": (decorated, bare),
}


async def main(number: int) -> None:
    await acompare(COMPARISONS, number)
    await sync_to_async(connection.close)()


if __name__ == "__main__":
    asyncio.run(main(rounds(__doc__, 3000)))
