"""What one acquire and release costs where nobody else wants the lock, in every form, and a try that fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.db import connections

from django_advisory_lock import lock_key
from tests.support import LIMIT, Thread

from . import bare
from .libraries import libraries
from .measuring import Effort, Measure, Plot, Report, Spread, Table, interleave, microseconds, ratio, timed
from .peers import BARE, GUARDED, OURS, PSYCOPG, SECONDS, Form, Peer

FREE, BUSY = "benchmark-free", "benchmark-busy"
ALIAS = "default"
BEST_OF = 3  # of three calls in a row, so that a moment in which another process has the core does not count
STATEMENTS = (PSYCOPG, BARE, GUARDED)
TRY, TRY_BUSY, WAIT, TIMED, DECORATED, ATOMIC = FORMS = (
    "tries, free",
    "tries, busy",
    "waits",
    "waits, with a timeout",
    "decorator that tries",
    "in `atomic()`",
)


def run(effort: Effort) -> Report:
    peers = [bare.with_psycopg(), bare.with_django(), bare.guarded(), *libraries()]
    measures: dict[str, dict[str, Measure]] = {form: {} for form in FORMS}
    for peer in peers:
        for form, function in functions(peer).items():
            measures[form][peer.name] = timed(function, BEST_OF)
    measures[DECORATED][BARE] = measures[TRY][BARE]  # the same statements
    with held_elsewhere():
        found = {form: interleave(measures[form], effort.rounds) for form in FORMS}
    bare.close()
    connections.close_all()
    return report(peers, found)


def functions(peer: Peer) -> dict[str, Callable[[], Any]]:
    """Return what is timed of one of those compared, by the name of the form."""
    key, timed_form = key_for(peer, FREE), peer.timed
    found: dict[str, Callable[[], Any]] = {}
    if peer.attempt is not None:
        found[TRY] = entering(peer.attempt, key)
        found[TRY_BUSY] = entering(peer.attempt, key_for(peer, BUSY), expected=False)
    if peer.lock is not None:
        found[WAIT] = entering(peer.lock, key)
    if timed_form is not None:
        found[TIMED] = entering(lambda key, alias: timed_form(key, alias, SECONDS), key)
    if peer.decorate is not None:
        found[DECORATED] = peer.decorate(key, ALIAS, lambda: True)
    if peer.in_atomic is not None:
        found[ATOMIC] = entering(peer.in_atomic, key)
    return found


def key_for(peer: Peer, name: str) -> Any:
    """Libraries hash a name, which is part of what they cost; the bare statements take a number."""
    return lock_key(name).args[0] if peer.name in STATEMENTS else name


def entering(form: Form, key: Any, *, expected: bool = True) -> Callable[[], None]:
    def enter() -> None:
        with form(key, ALIAS) as acquired:
            if bool(acquired) is not expected:
                raise AssertionError(f"{key} is {'busy' if expected else 'free'}")

    return enter


@contextlib.contextmanager
def held_elsewhere() -> Iterator[None]:
    """Hold the busy key in another session for the length of a block, by the number that each makes of its name."""
    ready, over = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for peer in libraries():
                if peer.attempt is not None:
                    bool(stack.enter_context(peer.attempt(BUSY, ALIAS)))
            ready.set()
            over.wait()

    holder = Thread(hold)
    try:
        if not ready.wait(LIMIT):
            holder.result()
        yield
    finally:
        over.set()
        holder.result()


# -- What is told -----------------------------------------------------------------------------------------------------


def report(peers: list[Peer], found: Mapping[str, Mapping[str, list[float]]]) -> Report:
    ratios = {form: {name: ratio(of_form, name, BARE) for name in of_form} for form, of_form in found.items()}
    rows = []
    for peer in peers:
        cells = [str(ratios[form].get(peer.name, "–")) for form in FORMS]
        rows.append([str(peer), *(cell if peer.name != BARE else "1" for cell in cells)])
    rows.append([f"{BARE}, µs", *(f"{microseconds(found[form][BARE]):.0f}" for form in FORMS)])
    shown = [peer for peer in peers if peer.name not in (PSYCOPG, BARE)]
    lines = {
        peer.name: [(form, ratios[form][peer.name]) for form in FORMS if peer.name in ratios[form]] for peer in shown
    }
    plot = Plot("pair", "One acquire and release, against the bare statements", "times the bare statements", lines)
    targets = targets_of(found)
    return Report(
        [Table("pair", ["", *FORMS], rows), Table("targets", ["against", "form", "ratio", "aim"], targets[1])],
        [plot],
        {
            "ratios": {form: {name: each.median for name, each in row.items()} for form, row in ratios.items()},
            **targets[0],
        },
    )


def targets_of(found: Mapping[str, Mapping[str, list[float]]]) -> tuple[dict[str, Any], list[list[str]]]:
    """Compare directly with those that matter most: within each round, not by way of a third."""
    figures: dict[str, Any] = {}
    rows = []
    for other, form, aim in (
        (GUARDED, WAIT, 1.1),
        (GUARDED, TRY, 1.1),
        ("django-pglock", TIMED, 0.7),
        ("django-pglock", ATOMIC, 0.6),
    ):
        if other in found[form]:
            spread: Spread = ratio(found[form], OURS, other)
            figures[f"{form} / {other}"] = spread.median
            rows.append([other, form, str(spread), f"at most {aim}"])
    return figures, rows
