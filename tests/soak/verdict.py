"""The judge: who was in at once, which losses nobody was told of, and what else should not have been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from tests.soak import plan as plans
from tests.soak.records import Records, Visit

# Each visit that ended so held its lock from its beginning to its end: the release said so.
OK = "ok"
# Each that ended so was told nothing of its lock: an error came first.
UNSAID = ("undone", "error")
LIBRARY = "django_advisory_lock.exceptions."
DATABASE = ("django.db.utils.OperationalError", "django.db.utils.InterfaceError")
# A session that was terminated behind a pooler: it passes on the server's last word, and adds its own. What psycopg
# then says of a COMMIT is an InternalError.
TWICE_TOLD = ("django.db.utils.InternalError", "received 2 results from command")
# Errors that a fault must explain. Another judgement looks for what explains a LockLost.
CAUSED = {*DATABASE, f"{LIBRARY}LockNotAcquired", f"{LIBRARY}LockTableFull"}
EXPECTED = {f"{LIBRARY}LockTimeout", f"{LIBRARY}LockLost"}
OWN = {"tests.soak.attempt.BodyError", "asyncio.exceptions.CancelledError"}
REFUSED, DEADLOCK = f"{LIBRARY}PoolerDetected", f"{LIBRARY}LockDeadlock"
# It waits in the thread of all tasks, and keeps what others hold on its session from being released meanwhile.
BESIDE = "async transaction beside"
MOMENT = 0.1  # seconds from the end of a deadlock until whoever had to give way has said so


# -- What must not be -------------------------------------------------------------------------------------------------


def overlaps(records: Records) -> Iterator[str]:
    """Yield who was in at once without a loss: more than one, or more than so many of a semaphore."""
    for key, visits in records.by_key.items():
        inside: list[Visit] = []
        for visit in sorted(visits, key=lambda visit: visit.begin):
            if _held(records, visit):
                inside = [other for other in inside if other.end > visit.begin]
                against = [other for other in inside if visit.excludes(other)]
                if len(against) >= max(visit.limit, 1):
                    yield f"{key}: {visit} came in to " + " and ".join(map(str, against))
                inside.append(visit)


def _held(records: Records, visit: Visit) -> bool:
    """Whether a visit must have had its lock to its end: it was told so, or nothing happened that could free it."""
    if visit.outcome not in UNSAID or visit.route == plans.SHORT:
        return visit.outcome == OK
    return not any(fault.may_have_freed(visit) for fault in records.faults)


def unexplained_conflicts(records: Records) -> Iterator[str]:
    """Yield the conflicts of which nobody was told that the lock is lost, and nobody was killed."""
    for conflict in records.conflicts:
        parties = _parties(records, conflict)
        if all(_held(records, visit) for visit in parties):
            yield f"{conflict['seen_by']} of {conflict['key']}: " + " and ".join(map(str, parties))


def explained_conflicts(records: Records) -> Iterator[str]:
    """Yield what explains each other conflict: the first of these that a party of it met with."""
    for conflict in records.conflicts:
        outcomes = {visit.outcome for visit in _parties(records, conflict) if not _held(records, visit)}
        if outcomes:
            yield next((outcome for outcome in ("lost", "killed") if outcome in outcomes), "error")


def _parties(records: Records, conflict: dict[str, Any]) -> list[Visit]:
    return [visit for visit in records.by_key[conflict["key"]] if _is_party(visit, conflict)]


def _is_party(visit: Visit, conflict: dict[str, Any]) -> bool:
    """Whether one was in, or may have been, when somebody found a place taken."""
    end = visit.end if visit.end < inf else visit.over
    return visit.begin <= float(conflict["after"]) and float(conflict["before"]) <= end


def silent_losses(records: Records) -> Iterator[str]:
    """Yield the visits that were told of nothing, although their sessions ended inside them."""
    told_nothing = [visit for visit in records.visits.values() if visit.was_in and visit.outcome == OK]
    for fault in records.faults:
        for visit in told_nothing:
            if fault.ended(visit):
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
    if visit.error == REFUSED:
        return visit.kind == "refused"
    if visit.error == DEADLOCK:
        return visit.kind == BESIDE or _is_beside(records, visit)
    if visit.error in CAUSED or (visit.error == TWICE_TOLD[0] and visit.text.startswith(TWICE_TOLD[1])):
        return _is_explained(records, visit)
    return visit.error in EXPECTED | OWN


def _is_beside(records: Records, visit: Visit) -> bool:
    """Whether a wait ended beside another that makes deadlocks, for the server ends any one of those that wait."""
    beside = (other for other in records.visits.values() if other.kind == BESIDE)
    return any(other.started < visit.over < min(other.begin, other.over) + MOMENT for other in beside)


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
    explained: Counter[str]
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
        Counter(explained_conflicts(records)),
        Counter(visit.kind for visit in visits) + refused,
        Counter(visit.outcome for visit in records.visits.values()),
        Counter(fault.name for fault in records.faults),
    )
