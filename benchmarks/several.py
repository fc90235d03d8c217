"""What many locks cost: `advisory_lock_all` against one lock after the other, and a semaphore against its limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from django.db import connections

from django_advisory_lock import advisory_lock, advisory_lock_all, advisory_semaphore, lock_key, try_advisory_semaphore

from .measuring import Effort, Report, Table, interleave, microseconds, ratio, timed
from .peers import BARE, execute

SIZES = (2, 10, 100, 1000)


def together(keys: list[Any]) -> Callable[[], None]:
    def enter() -> None:
        with advisory_lock_all(*keys):
            pass

    return enter


def one_by_one(keys: list[Any]) -> Callable[[], None]:
    def enter() -> None:
        with contextlib.ExitStack() as stack:
            for key in keys:
                stack.enter_context(advisory_lock(key))

    return enter


def by_hand(keys: list[Any]) -> Callable[[], None]:
    """One statement for all, without what makes it all or nothing."""
    numbers = sorted(key.args[0] for key in keys)

    def enter() -> None:
        execute("default", "SELECT count(pg_advisory_lock(k)) FROM unnest(CAST(%s AS bigint[])) AS k", [numbers])
        execute("default", "SELECT count(pg_advisory_unlock(k)) FROM unnest(CAST(%s AS bigint[])) AS k", [numbers])

    return enter


def slot(*, limit: int, tries: bool = False) -> Callable[[], None]:
    make = try_advisory_semaphore if tries else advisory_semaphore

    def enter() -> None:
        with make("benchmark-slot", limit=limit) as acquired:
            assert acquired

    return enter


def run(effort: Effort) -> Report:
    all_keys = [lock_key("benchmark-several", number) for number in range(max(SIZES))]
    rows, figures = [], {}
    for size in effort.pick(SIZES, SIZES[:2]):
        keys = all_keys[:size]
        forms = {"together": together(keys), "one by one": one_by_one(keys), "by hand": by_hand(keys)}
        rounds = max(5, min(effort.rounds, 20_000 // size) // 4) if not effort.quick else 3
        found = interleave({name: timed(form) for name, form in forms.items()}, rounds)
        against = ratio(found, "together", "one by one"), ratio(found, "together", "by hand")
        rows.append([f"{size:,} keys", *map(str, against), f"{microseconds(found['together']) / size:.1f}"])
        figures[str(size)] = [each.median for each in against]
    slots = {"a lock": one_by_one(all_keys[:1])}
    slots |= {f"{limit} slots": slot(limit=limit) for limit in (1, 5, 50)} | {"tried": slot(limit=5, tries=True)}
    found = interleave({name: timed(form) for name, form in slots.items()}, effort.scaled(0.25))
    connections.close_all()
    semaphores = [[name, str(ratio(found, name, "a lock"))] for name in slots if name != "a lock"]
    figures["slots"] = [ratio(found, name, "a lock").median for name in slots]
    header = ["", "against one by one", f"against one statement of {BARE}", "µs a key"]
    return Report(
        [Table("several", header, rows), Table("semaphores", ["a free slot of", "against a lock"], semaphores)],
        [],
        figures,
    )
