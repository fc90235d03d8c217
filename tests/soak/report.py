"""The figures of a run, for the terminal and for a page of the documentation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.soak.verdict import Verdict

MARKER = "<!-- soak -->"


def figures(verdict: Verdict, seconds: float, seed: int, workers: int) -> str:
    outcomes = verdict.outcomes
    rows = {
        "seconds": f"{seconds:g}",
        "seed": str(seed),
        "processes at a time": str(workers),
        "attempts": str(outcomes.total()),
        "acquisitions, and what was refused": _listed(verdict.acquisitions),
        "outcomes": _listed(outcomes),
        "faults": _listed(verdict.faults),
        "losses that were told": str(outcomes["lost"]),
        "conflicts that the witness saw": str(verdict.conflicts),
        "of these, with one who was told of a loss": str(verdict.explained["lost"]),
        "of the rest, with one whose process was killed": str(verdict.explained["killed"]),
        "of the rest, with one whose block ended with the error of a fault": str(verdict.explained["error"]),
        "violations": str(len(verdict.violations)),
        "losses that nobody was told of": str(len(verdict.silent_losses)),
        "losses without a fault": str(len(verdict.groundless_losses)),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _listed(counter: Counter[str]) -> str:
    return f"{counter.total()}: " + ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


def write(page: Path, text: str) -> None:
    """Put the figures between the markers of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKER)
    _, found, after = rest.partition(MARKER)
    assert found, f"{page} has no two markers {MARKER}"
    page.write_text(f"{before}{MARKER}\n\n{text}\n\n{MARKER}{after}", encoding="utf-8")
