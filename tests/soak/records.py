"""What a run has left: the visits of all workers as their journals tell them, and the faults."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

CAUSES = {"57014": "cancel", "53200": "fill lock table"}  # of errors; all others come from the end of a session
# A session that ended while nobody used it is noticed when it is used next.
LATE = 3.0  # seconds


@dataclass(frozen=True)
class Fault:
    """What happened between two moments: to one session or worker, on one route, or to all."""

    name: str
    begin: float
    end: float
    route: str | None = None
    pid: int | None = None
    worker: str | None = None
    ends_sessions: bool = False
    down: float | None = None  # when the sessions were gone for certain, where that was not at the end

    def concerns(self, visit: Visit) -> bool:
        is_its_session = self.pid is None or visit.pid is None or self.pid == visit.pid
        return is_its_session and self.route in (None, visit.route) and self.worker in (None, visit.worker)

    def ended(self, visit: Visit) -> bool:
        """Whether the session of a visit ended for certain inside it."""
        gone = self.end if self.down is None else self.down
        is_inside = self.ends_sessions and visit.begin < self.begin and gone < visit.end < inf
        return is_inside and self.concerns(visit) and (self.pid is None or visit.pid is not None)

    def meets(self, visit: Visit) -> bool:
        """Whether it may have had to do with a visit, by its time too."""
        begin = min(visit.started, visit.begin) - LATE
        return self.concerns(visit) and self.begin < visit.over and begin < self.end

    def explains(self, visit: Visit) -> bool:
        """Whether a visit may have come by its error of the database, or its loss, in this way."""
        fits = self.name == CAUSES[visit.state] if visit.state in CAUSES else self.ends_sessions
        return fits and self.meets(visit)

    def may_have_freed(self, visit: Visit) -> bool:
        """Whether a visit may have lost its lock by it: with its session, or as a failed statement frees those of its
        transaction. A lock of the session stays held after a statement that failed."""
        if visit.scope == "transaction" and self.explains(visit):
            return True
        return self.ends_sessions and self.meets(visit)


@dataclass
class Visit:
    """One attempt, and where it succeeded the time that it was in."""

    name: str
    worker: str
    kind: str
    route: str
    keys: tuple[str, ...]
    limit: int
    scope: str = "session"
    outcome: str = "killed"
    begin: float = inf
    end: float = inf  # without one, its process ended before
    started: float = inf
    over: float = inf
    pid: int | None = None
    error: str = ""
    state: str | None = None
    text: str = ""

    @property
    def was_in(self) -> bool:
        return self.begin < inf

    def excludes(self, other: Visit) -> bool:
        return not self.limit == other.limit == 0

    def __str__(self) -> str:
        moments = f"{self.begin:.6f} to {self.end:.6f}"
        what = f"{self.name} {self.kind!r} on {self.route}, pid {self.pid}, {', '.join(self.keys)}"
        return f"{what}: {moments}, {self.outcome} {self.error} {self.text}".strip()


@dataclass
class Records:
    """All journals of a run, and its faults."""

    visits: dict[str, Visit] = field(default_factory=dict)
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def add(self, note: dict[str, Any]) -> None:
        event = note["event"]
        if event == "conflict":
            self.conflicts.append(note)
        elif "visit" not in note:
            self.others.append(note)
        else:
            self._add_to_visit(event, note)

    def _add_to_visit(self, event: str, note: dict[str, Any]) -> None:
        visit = self.visits.get(note["visit"])
        if visit is None:
            facts = {name: note[name] for name in ("worker", "kind", "route", "limit")}
            visit = self.visits[note["visit"]] = Visit(note["visit"], keys=tuple(note["keys"]), **facts)
        if event == "in":
            visit.begin = note["at"]
        elif event == "out":
            visit.end, visit.pid = note["at"], note["pid"]
        else:
            visit.outcome, visit.started, visit.over = note["outcome"], note["started"], note["at"]
            visit.error, visit.state = note.get("error", ""), note.get("state")
            visit.text, visit.scope = note.get("text", ""), note.get("scope", "session")

    @cached_property
    def by_key(self) -> dict[str, list[Visit]]:
        """Return who was in, by key."""
        found: dict[str, list[Visit]] = defaultdict(list)
        for visit in self.visits.values():
            for key in visit.keys if visit.was_in else ():
                found[key].append(visit)
        return found

    @cached_property
    def killed(self) -> dict[str, float]:
        return {fault.worker: fault.end for fault in self.faults if fault.name == "kill worker" and fault.worker}


def read(directory: Path, faults: Iterable[Fault]) -> Records:
    records = Records(faults=list(faults))
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            records.add(json.loads(line))
    for visit in records.visits.values():
        if visit.outcome == "killed":
            visit.over = records.killed.get(visit.worker, inf)
    return records
