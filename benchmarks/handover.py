"""How fast a busy key goes from hand to hand, how fairly, and how it grows with those who wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import bare
from .libraries import libraries
from .measuring import Effort, Plot, Report, Spread, Table, jain, percentile
from .peers import BARE, OURS, Peer
from .workers import Taken, Turns, Workers

WAITERS = (2, 8, 32)
FORMS = {
    "hot": ("lock", 1, "one key"),
    "hot, timeout": ("timed", 1, "one key, with a timeout"),
    "many": ("lock", 512, "512 keys"),
}

STAY = 0.0002  # seconds in the body, in the turns that are watched and not timed

Found = dict[str, list[list[Taken]]]
Watched = dict[tuple[str, int, str], list[Taken]]


def run(effort: Effort, workers: Workers) -> Report:
    seconds: float = effort.pick(0.5, 0.05)
    rounds: int = max(2, min(15, effort.scaled(0.003)))
    sizes: Sequence[int] = effort.pick(WAITERS, WAITERS[:1])
    peers = [bare.with_psycopg(), bare.with_django(), *libraries()]
    found: dict[tuple[str, int], Found] = {}
    watched: Watched = {}
    for form, (method, keys, _) in FORMS.items():
        offering = [peer for peer in peers if getattr(peer, method) is not None]
        for size in sizes:
            of_size = found.setdefault((form, size), {peer.name: [] for peer in offering})
            for number in range(rounds):
                for peer in offering if number % 2 else reversed(offering):
                    of_size[peer.name].append(workers.take_turns(size, Turns(peer.name, method, keys, seconds)))
            for peer in offering:
                turns = Turns(peer.name, method, keys, seconds, stay=STAY)
                watched[form, size, peer.name] = workers.take_turns(size, turns)
    return report(peers, found, watched, seconds)


def rate(taken: list[Taken], seconds: float) -> float:
    return sum(len(each.waits) for each in taken) / seconds


def report(peers: list[Peer], found: Mapping[tuple[str, int], Found], watched: Watched, seconds: float) -> Report:
    rows, figures = [], {}
    lines: dict[str, list[tuple[int, Spread]]] = {}
    for (form, size), of_size in found.items():
        rates = {name: [rate(each, seconds) for each in runs] for name, runs in of_size.items()}
        for peer in (peer for peer in peers if peer.name in of_size):
            runs = of_size[peer.name]
            against = Spread.of([a / b for a, b in zip(rates[peer.name], rates[BARE], strict=True)])
            fairness = Spread.of([jain([len(each.waits) for each in taken]) for taken in runs]).median
            p99 = Spread.of(
                [percentile([wait for each in taken for wait in each.waits], 0.99) for taken in runs]
            ).median
            overlaps = sum(each.overlaps for each in watched[form, size, peer.name])
            seen = sum(len(each.waits) for each in watched[form, size, peer.name])
            speed = Spread.of(rates[peer.name])
            grants = sum(len(each.waits) for taken in runs for each in taken)
            rows.append(
                [
                    FORMS[form][2],
                    str(size),
                    str(peer),
                    f"{speed.median:,.0f}",
                    str(against) if peer.name != BARE else "1",
                    f"{fairness:.2f}",
                    f"{p99 * 1000:.1f}",
                    f"{overlaps} in {seen:,}",
                ]
            )
            figures[f"{form} {size} {peer.name}"] = {
                "ratio": against.median,
                "fairness": fairness,
                "overlaps": overlaps,
                "watched": seen,
                "grants": grants,
            }
            if form == "hot":
                lines.setdefault(peer.name, []).append((size, speed))
    header = [
        "keys",
        "processes",
        "",
        "grants a second",
        f"against {BARE}",
        "Jain's index",
        "p99 of the wait, ms",
        "overlaps",
    ]
    plot = Plot("handover", "One key that everybody wants", "grants a second", lines, x="processes that want it")
    return Report([Table("handover", header, rows), Table("handover-target", *target(figures))], [plot], figures)


def target(figures: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [FORMS[form][2], str(size), f"{figures[name]['ratio']:.2f}", "at least 0.9"]
        for form in FORMS
        for size in WAITERS
        if (name := f"{form} {size} {OURS}") in figures
    ]
    return ["keys", "processes", f"grants against {BARE}", "aim"], rows
