"""What a lock costs a task: the same two statements through `sync_to_async`, and the libraries' asynchronous sides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from django_advisory_lock import lock_key

from .libraries import libraries
from .measuring import Effort, Plot, Report, Table, interleave, microseconds, ratio, timed_in
from .peers import BARE, execute

NAME = "benchmark-tasks"
KEY = lock_key(NAME).args[0]
FORMS = ("tries, free", "waits, with a timeout")


async def bare() -> None:
    await sync_to_async(execute)("default", "SELECT pg_try_advisory_lock(%s)", [KEY])
    await sync_to_async(execute)("default", "SELECT pg_advisory_unlock(%s)", [KEY])


def entering(form: Callable[[Any], AbstractAsyncContextManager[Any]]) -> Callable[[], Awaitable[None]]:
    async def enter() -> None:
        async with form(NAME) as acquired:
            if not acquired:
                raise AssertionError(f"{NAME} is busy")

    return enter


def run(effort: Effort) -> Report:
    peers = libraries()
    loop = asyncio.new_event_loop()
    try:
        found = {}
        for form in FORMS:
            measures = {BARE: timed_in(loop, bare)}
            for peer in peers:
                chosen = peer.aattempt if form == FORMS[0] else peer.atimed
                if chosen is not None:
                    measures[peer.name] = timed_in(loop, entering(chosen))
            found[form] = interleave(measures, effort.scaled(0.5))
        loop.run_until_complete(sync_to_async(connections.close_all)())
    finally:
        loop.close()
    ratios = {form: {name: ratio(of_form, name, BARE) for name in of_form} for form, of_form in found.items()}
    offered = [peer for peer in peers if any(peer.name in of_form for of_form in ratios.values())]
    rows = [[f"{BARE} through `sync_to_async`", *("1" for _ in FORMS)]]
    rows += [[str(peer), *(str(ratios[form].get(peer.name, "–")) for form in FORMS)] for peer in offered]
    rows.append([f"{BARE}, µs", *(f"{microseconds(found[form][BARE]):.0f}" for form in FORMS)])
    figures = {form: {name: each.median for name, each in of_form.items()} for form, of_form in ratios.items()}
    plots: list[Plot] = []
    return Report([Table("tasks", ["in a task", *FORMS], rows)], plots, {"ratios": figures})
