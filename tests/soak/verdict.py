"""What the journals say: who was in at once, which losses nobody was told of, and what else should not have been."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from tests.soak import plan as plans

# Each visit that ended so held its lock from its beginning to its end: the release said so.
OK = "ok"
ENDINGS = ("ok", "lost", "error", "undone", "killed")
LIBRARY = "django_advisory_lock.exceptions."
DATABASE = ("django.db.utils.OperationalError", "django.db.utils.InterfaceError")
EXPECTED = {f"{LIBRARY}{name}" for name in ("LockNotAcquired", "LockTimeout", "LockTableFull", "LockLost")}
OWN = {"tests.soak.attempt.BodyError", "asyncio.exceptions.CancelledError"}
CAUSES = {"57014": "cancel", "53200": "fill lock table"}  # of errors; all others come from the end of a session
REFUSAL = f"{LIBRARY}PoolerDetected"
# A session that ended while nobody used it is noticed when it is used next.
LATE = 3.0


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
        if not self.ends_sessions or not self.concerns(visit) or (self.pid is not None and visit.pid is None):
            return False
        gone = self.end if self.down is None else self.down
        return visit.begin < self.begin and gone < visit.end < inf

    def explains(self, visit: Visit) -> bool:
        """Whether a visit may have come by its error of the database, or its loss, in this way."""
        fits = self.name == CAUSES[visit.state] if visit.state in CAUSES else self.ends_sessions
        begin = min(visit.started, visit.begin) - LATE
        return fits and self.concerns(visit) and self.begin < visit.over and begin < self.end


@dataclass
class Visit:
    """One attempt, and where it succeeded the time that it was in."""

    name: str
    worker: str
    kind: str
    route: str
    keys: tuple[str, ...]
    limit: int
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
            visit.text = note.get("text", "")

    @property
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


# -- What must not be -------------------------------------------------------------------------------------------------


def overlaps(records: Records) -> Iterator[str]:
    """Yield who was in at once without a loss: more than one, or more than so many of a semaphore."""
    by_key: dict[str, list[Visit]] = defaultdict(list)
    for visit in records.visits.values():
        if visit.was_in and visit.outcome == OK:
            for key in visit.keys:
                by_key[key].append(visit)
    for key, visits in by_key.items():
        inside: list[Visit] = []
        for visit in sorted(visits, key=lambda visit: visit.begin):
            inside = [other for other in inside if other.end > visit.begin]
            against = [other for other in inside if visit.excludes(other)]
            if len(against) >= max(visit.limit, 1):
                yield f"{key}: {visit} came in to " + " and ".join(map(str, against))
            inside.append(visit)


def _parties(records: Records, conflict: dict[str, Any]) -> list[Visit]:
    """Return all that were in, or may have been, when somebody found a place taken."""
    return [
        visit
        for visit in records.visits.values()
        if conflict["key"] in visit.keys
        and visit.begin <= conflict["after"]
        and conflict["before"] <= (visit.end if visit.end < inf else visit.over)
    ]


def unexplained_conflicts(records: Records) -> Iterator[str]:
    """Yield the conflicts of which nobody was told that the lock is lost, and nobody was killed."""
    for conflict in records.conflicts:
        parties = _parties(records, conflict)
        if all(visit.outcome == OK for visit in parties):
            yield f"{conflict['seen_by']} of {conflict['key']}: " + " and ".join(map(str, parties))


def silent_losses(records: Records) -> Iterator[str]:
    """Yield the visits that were told of nothing, although their sessions ended inside them."""
    for fault in records.faults:
        for visit in records.visits.values():
            if visit.outcome == OK and fault.ended(visit):
                yield f"{fault.name} at {fault.begin:.6f}: {visit}"


def groundless_losses(records: Records) -> Iterator[str]:
    """Yield the losses that no fault explains."""
    for visit in records.visits.values():
        if visit.outcome == "lost" and not _is_explained(records, visit):
            yield str(visit)


def surprises(records: Records) -> Iterator[str]:
    """Yield errors that are of no expected kind or that no fault explains, and whatever was said beside them."""
    for visit in records.visits.values():
        if visit.outcome == "killed":
            if visit.worker not in records.killed:
                yield f"never ended: {visit}"
        elif visit.kind == "refused" and visit.was_in:
            yield f"not refused: {visit}"
        elif visit.error and not _is_expected(records, visit):
            yield f"unexpected: {visit} [{visit.state}]"
    for note in records.others:
        if note["event"] in ("crash", "warning"):
            yield f"{note['worker']}: {note.get('where', '')} {note['text']}"


def _is_expected(records: Records, visit: Visit) -> bool:
    if visit.error == REFUSAL:
        return visit.kind == "refused"
    if visit.error in DATABASE:
        return _is_explained(records, visit)
    return visit.error in EXPECTED | OWN


def _is_explained(records: Records, visit: Visit) -> bool:
    return visit.route == plans.SHORT or any(fault.explains(visit) for fault in records.faults)


# -- Figures ----------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What came of a run."""

    violations: list[str]
    silent_losses: list[str]
    groundless_losses: list[str]
    surprises: list[str]
    conflicts: int
    acquisitions: Counter[str]
    outcomes: Counter[str]
    faults: Counter[str]

    @property
    def complaints(self) -> list[str]:
        return [
            *(f"VIOLATION {text}" for text in self.violations),
            *(f"SILENT LOSS {text}" for text in self.silent_losses),
            *(f"GROUNDLESS LOSS {text}" for text in self.groundless_losses),
            *(f"SURPRISE {text}" for text in self.surprises),
        ]


def judge(records: Records) -> Verdict:
    visits = [visit for visit in records.visits.values() if visit.was_in]
    refused = Counter(visit.kind for visit in records.visits.values() if visit.outcome == "refused")
    return Verdict(
        [*overlaps(records), *unexplained_conflicts(records)],
        list(silent_losses(records)),
        list(groundless_losses(records)),
        list(surprises(records)),
        len(records.conflicts),
        Counter(visit.kind for visit in visits) + refused,
        Counter(visit.outcome for visit in records.visits.values()),
        Counter(fault.name for fault in records.faults),
    )
