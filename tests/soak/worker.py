"""A process at work under locks until the end of the run: `python -m tests.soak.worker NAME`."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import time
import traceback
import warnings
from typing import Any

import django

from tests.soak import plan as plans
from tests.soak.witness import Witness


def main(name: str) -> int:
    faulthandler.enable()
    plan = plans.read()
    witness = Witness(plan, name)

    def note_warning(message: Any, category: type[Warning], filename: str, lineno: int, *more: Any, **kw: Any) -> None:
        witness.note("warning", category=category.__name__, text=str(message)[:300], where=f"{filename}:{lineno}")

    warnings.simplefilter("always")
    warnings.showwarning = note_warning
    django.setup()
    witness.note("begin", at=time.monotonic())
    witness.end = plan.wait_for_end()
    crew = [threading.Thread(target=_guarded, args=(witness, _work, n)) for n in range(plan.threads)]
    for thread in crew:
        thread.start()
    if not plan.control:
        _guarded(witness, _loop, plan.tasks)
    for thread in crew:
        thread.join()
    _close_pools()
    witness.close()
    witness.note("finish", at=time.monotonic())
    return 0


def _guarded(witness: Witness, function: Any, number: int) -> None:
    try:
        function(witness, number)
    except BaseException:
        witness.note("crash", text=traceback.format_exc())
        raise


def _work(witness: Witness, number: int) -> None:
    from django.db import connections

    from tests.soak import control, guarded, work

    hand = work.Hand(witness, f"thread {number}")
    kinds = control.CONTROLS.get(witness.plan.control, {**work.KINDS, **guarded.KINDS})
    while time.monotonic() < witness.end:
        hand.work(kinds)
    connections.close_all()


def _close_pools() -> None:
    from django.db import connections

    for connection in connections.all():
        connection.close()
        if getattr(connection, "pool", None):
            connection.close_pool()  # type: ignore[attr-defined]


def _loop(witness: Witness, count: int) -> None:
    asyncio.run(_work_together(witness, count))


async def _work_together(witness: Witness, count: int) -> None:
    from asgiref.sync import sync_to_async
    from django.db import connections

    from tests.soak import awork, work

    async def one(number: int) -> None:
        hand = work.Hand(witness, f"task {number}")
        while time.monotonic() < witness.end:
            await awork.do_one(hand)

    await asyncio.gather(*map(one, range(count)))
    await sync_to_async(connections.close_all)()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
