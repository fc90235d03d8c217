"""The judge of a soak run: what it finds in journals that were made up, and what it lets pass."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.soak import report
from tests.soak.plan import BY_TRANSACTION, DIRECT, KEPT, SHORT
from tests.soak.records import Fault, Records, Visit
from tests.soak.verdict import DATABASE, Verdict, judge

LOST = "django_advisory_lock.exceptions.LockLost"


def visit(
    name: str, begin: float, end: float | None = None, outcome: str | None = "ok", **facts: Any
) -> list[dict[str, Any]]:
    """Return what a worker notes of a visit; without an end it was killed."""
    common = {"visit": name, "worker": "w", "kind": "wait", "route": DIRECT, "keys": ["k"], "limit": 1, **facts}
    notes = [{"event": "in", "at": begin, **common}]
    if end is not None:
        notes.append({"event": "out", "at": end, "pid": 7, **common})
    if outcome is not None:
        notes.append({"event": "end", "started": begin - 1, "at": (end or begin) + 1, "outcome": outcome, **common})
    return notes


def attempt(name: str, **facts: Any) -> list[dict[str, Any]]:
    """Return what a worker notes of an attempt that failed."""
    return [note for note in visit(name, 10, None, **facts) if note["event"] == "end"]


def conflict(name: str, at: float) -> list[dict[str, Any]]:
    return [{"event": "conflict", "visit": name, "key": "k", "seen_by": "file", "before": at, "after": at + 0.1}]


def judged(*notes: list[dict[str, Any]], faults: tuple[Fault, ...] = ()) -> Verdict:
    records = Records(faults=list(faults))
    for note in itertools.chain(*notes):
        records.add(note)
    return judge(records)


def end_of_session(begin: float, end: float, **facts: Any) -> Fault:
    return Fault("terminate", begin, end, ends_sessions=True, **facts)


class TestOverlaps:
    def test_one_after_the_other(self) -> None:
        assert judged(visit("a", 1, 2), visit("b", 2, 3), visit("c", 2.5, 4, keys=["other"])).complaints == []

    @pytest.mark.parametrize("second", [(1.5, 3), (1.2, 1.8), (0.5, 3)])
    def test_two_at_once(self, second: tuple[float, float]) -> None:
        (violation,) = judged(visit("a", 1, 2), visit("b", *second)).violations
        assert violation.startswith("k: ")

    def test_one_of_several_keys(self) -> None:
        assert len(judged(visit("a", 1, 2, keys=["x", "k"]), visit("b", 1.5, 3)).violations) == 1

    def test_a_loss_that_was_told(self) -> None:
        faults = (end_of_session(1, 1.5, pid=7),)
        assert judged(visit("a", 1, 2, "lost", error=LOST), visit("b", 1.6, 3), faults=faults).complaints == []

    def test_a_body_that_raised_in_a_transaction(self) -> None:
        """Nobody tells whether the lock held to its end, but without a fault it did."""
        notes = [visit("a", 1, 2, "undone"), visit("b", 1.5, 3), conflict("b", 1.5)]
        assert len(judged(*notes).violations) == 2
        assert judged(*notes, faults=(end_of_session(1, 1.2),)).violations == []

    @pytest.mark.parametrize("outcome", ["undone", "error"])
    def test_a_body_that_ended_with_an_error(self, outcome: str) -> None:
        """It was told nothing of the lock, but only what may have ended the session may have ended the lock."""
        cancelled = {"error": DATABASE[0], "state": "57014"} if outcome == "error" else {}
        notes = [visit("a", 1, 3, worker="v"), visit("b", 2, 2.5, outcome, **cancelled), conflict("b", 2)]
        cancel = Fault("cancel", 2.2, 2.3, pid=7)
        verdict = judged(*notes, faults=(cancel,))
        assert [text.partition(":")[0] for text in verdict.violations] == ["k", "file of k"]
        assert verdict.surprises == []
        assert judged(*notes, faults=(cancel, end_of_session(2.2, 2.4, pid=7))).violations == []
        assert len(judged(*notes, faults=(cancel, end_of_session(2.2, 2.4, route=KEPT))).violations) == 2

    @pytest.mark.parametrize(("scope", "count"), [("session", 2), ("transaction", 0)])
    def test_a_failed_statement_frees_the_locks_of_its_transaction(self, scope: str, count: int) -> None:
        cancelled = visit("a", 1, 3, "error", error=DATABASE[0], state="57014", scope=scope)
        notes = [cancelled, visit("b", 2.5, 3.5), conflict("b", 2.5)]
        assert len(judged(*notes, faults=(Fault("cancel", 2.2, 2.3, pid=7),)).violations) == count

    def test_an_error_of_its_own_frees_no_lock_of_a_transaction(self) -> None:
        notes = [visit("a", 1, 3, "undone", scope="transaction"), visit("b", 2, 4)]
        assert len(judged(*notes, faults=(Fault("cancel", 2.2, 2.3, pid=7),)).violations) == 1

    def test_an_idle_session_may_end_by_itself(self) -> None:
        error = {"error": DATABASE[0], "route": SHORT}
        assert judged(visit("a", 1, 3, "error", **error), visit("b", 2, 4)).complaints == []

    def test_shared(self) -> None:
        shared = [visit("a", 1, 5, limit=0), visit("b", 2, 3, limit=0)]
        assert judged(*shared).complaints == []
        assert len(judged(*shared, visit("c", 4, 6)).violations) == 1
        assert len(judged(visit("c", 0, 1.5), *shared).violations) == 1

    def test_semaphore(self) -> None:
        two = [visit("a", 1, 5, limit=2), visit("b", 2, 3, limit=2)]
        assert judged(*two, visit("c", 3, 4, limit=2)).complaints == []
        assert len(judged(*two, visit("c", 2.5, 4, limit=2)).violations) == 1


class TestConflicts:
    def test_nobody_lost_anything(self) -> None:
        (violation,) = judged(visit("a", 1, 2), visit("b", 2.05, 3), conflict("b", 1.98)).violations
        assert violation.startswith("file of k")

    def test_who_was_killed(self) -> None:
        notes = [visit("a", 1, None, None, worker="dead"), visit("b", 2, 3), conflict("b", 2)]
        verdict = judged(*notes, faults=(Fault("kill worker", 1.5, 2.5, worker="dead"),))
        assert verdict.violations == []
        assert verdict.explained == {"killed": 1}

    def test_who_was_told(self) -> None:
        notes = [visit("a", 1, 2, "lost", error=LOST), visit("b", 1.5, 3), conflict("b", 1.5)]
        verdict = judged(*notes, faults=(end_of_session(1, 1.2),))
        assert verdict.complaints == []
        assert (verdict.conflicts, verdict.explained) == (1, {"lost": 1})

    def test_whose_body_met_a_fault(self) -> None:
        notes = [visit("a", 1, 2, "error", error=DATABASE[0]), visit("b", 1.5, 3), conflict("b", 1.5)]
        assert judged(*notes, faults=(end_of_session(1, 1.2),)).explained == {"error": 1}
        assert judged(*notes).explained == {}

    def test_the_loss_of_somebody_else_later(self) -> None:
        notes = [visit("a", 1, 2), visit("b", 2, 3), conflict("b", 2), visit("c", 5, 6, "lost", error=LOST)]
        assert len(judged(*notes, faults=(end_of_session(5, 5.5),)).violations) == 1


class TestLosses:
    def test_silent(self) -> None:
        assert len(judged(visit("a", 1, 2), faults=(end_of_session(1.2, 1.5, pid=7),)).silent_losses) == 1

    @pytest.mark.parametrize(
        "fault",
        [
            end_of_session(1.2, 1.5, pid=8),
            end_of_session(1.2, 1.5, route=KEPT),
            end_of_session(0.9, 1.5, pid=7),
            end_of_session(1.2, 2.5, pid=7),
            Fault("cancel", 1.2, 1.5, pid=7),
        ],
        ids=["another session", "another route", "before it", "after it", "no end"],
    )
    def test_not_for_certain(self, fault: Fault) -> None:
        assert judged(visit("a", 1, 2), faults=(fault,)).complaints == []

    def test_down_before_it_is_up_again(self) -> None:
        fault = Fault("crash server", 1.2, 5, ends_sessions=True, down=1.4)
        assert len(judged(visit("a", 1, 2), faults=(fault,)).silent_losses) == 1

    def test_groundless(self) -> None:
        lost = visit("a", 1, 2, "lost", error=LOST)
        assert len(judged(lost).groundless_losses) == 1
        assert len(judged(lost, faults=(end_of_session(9, 9.5),)).groundless_losses) == 1
        assert judged(lost, faults=(end_of_session(1, 1.5),)).complaints == []
        assert judged(visit("a", 1, 2, "lost", error=LOST, route=SHORT)).complaints == []


class TestSurprises:
    def test_an_error_of_no_expected_kind(self) -> None:
        (text,) = judged(attempt("a", outcome="error", error="builtins.AssertionError")).surprises
        assert text.startswith("unexpected")

    def test_an_error_of_the_database(self) -> None:
        error = attempt("a", outcome="error", error=DATABASE[0])
        cancelled = attempt("a", outcome="error", error=DATABASE[0], state="57014")
        end, cancel = end_of_session(9, 9.5), Fault("cancel", 9, 9.5, pid=3)
        assert len(judged(error).surprises) == len(judged(error, faults=(cancel,)).surprises) == 1
        assert len(judged(cancelled, faults=(end,)).surprises) == 1
        assert judged(error, faults=(end,)).complaints == judged(cancelled, faults=(cancel,)).complaints == []

    @pytest.mark.parametrize(
        ("kind", "state", "cause"),
        [("LockNotAcquired", "57014", "cancel"), ("LockTableFull", "53200", "fill lock table")],
    )
    def test_an_error_of_the_library_that_a_fault_brings_about(self, kind: str, state: str, cause: str) -> None:
        error = attempt("a", outcome="error", error=f"django_advisory_lock.exceptions.{kind}", state=state)
        assert judged(error, faults=(Fault(cause, 9, 9.5),)).complaints == []
        assert len(judged(error).surprises) == 1
        assert len(judged(error, faults=(end_of_session(9, 9.5),)).surprises) == 1
        assert len(judged(error, faults=(Fault(cause, 19, 19.5),)).surprises) == 1

    @pytest.mark.parametrize(
        ("text", "count"), [("received 2 results from command 'COMMIT'", 0), ("current transaction is aborted", 1)]
    )
    def test_two_errors_for_one_commit(self, text: str, count: int) -> None:
        notes = attempt("a", outcome="error", error="django.db.utils.InternalError", text=text)
        assert len(judged(notes, faults=(end_of_session(9, 9.5),)).surprises) == count
        assert len(judged(notes).surprises) == 1

    def test_what_was_not_refused(self) -> None:
        refusal = "django_advisory_lock.exceptions.PoolerDetected"
        facts = {"kind": "refused", "route": BY_TRANSACTION}
        assert judged(attempt("a", outcome="refused", error=refusal, **facts)).complaints == []
        assert len(judged(visit("a", 1, 2, **facts)).surprises) == 1
        assert len(judged(attempt("a", outcome="refused", error=refusal)).surprises) == 1

    @pytest.mark.parametrize(("started", "begin", "count"), [(9, 11.5, 0), (9, 10.95, 0), (9, 10.5, 1), (11.2, 12, 1)])
    def test_a_deadlock(self, started: float, begin: float, count: int) -> None:
        """Anybody may have to give way, while one waits that makes it. Here it ends at 11."""
        deadlock = {"outcome": "error", "error": "django_advisory_lock.exceptions.LockDeadlock"}
        beside = visit("b", begin, 14, kind="async transaction beside", keys=["other"])
        beside[-1]["started"] = started
        assert len(judged(attempt("a", **deadlock), beside).surprises) == count
        assert judged(attempt("a", kind="async transaction beside", **deadlock)).complaints == []

    def test_what_never_ended(self) -> None:
        assert len(judged(visit("a", 1, None, None)).surprises) == 1

    @pytest.mark.parametrize("event", ["crash", "warning"])
    def test_what_was_said_beside(self, event: str) -> None:
        assert len(judged([{"event": event, "worker": "w", "text": "a handle was dropped"}]).surprises) == 1


def test_figures(tmp_path: Path) -> None:
    verdict = judged(visit("a", 1, 2), visit("b", 2, 3, "lost", error=LOST), faults=(end_of_session(2, 2.5),))
    text = report.figures(verdict, 40, 1, 4)
    assert "| acquisitions, and what was refused | 2: wait 2 |" in text
    assert "| losses that were told | 1 |" in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.MARKER}\nold\n{report.MARKER}\nafter\n")
    for _ in range(2):
        report.write(page, text)
        assert page.read_text() == f"before\n{report.MARKER}\n\n{text}\n\n{report.MARKER}\nafter\n"


def test_a_page_without_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(AssertionError, match="no two markers"):
        report.write(page, "")


def test_a_visit_says_who_it_was() -> None:
    assert "on kept, pid 3" in str(Visit("w/1", "w", "wait", KEPT, ("k",), 1, pid=3))
