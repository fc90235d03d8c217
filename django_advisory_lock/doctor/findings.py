"""What the doctor hands back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Severity = Literal["ok", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")

# Each is a question, and stays for good; the severity is the answer. Each has its place in docs/doctor.md.
FindingId = Literal[
    "engine",
    "connection",
    "server",
    "second_session",
    "exclusion",
    "pooler",
    "standby",
    "lock_table",
    "connections",
    "idle_session_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
    "statement_timeout",
    "lock_timeout",
    "isolation",
    "keepalives",
    "client_connection_check_interval",
    "role",
    "application_name",
    "pool",
    "conn_max_age",
    "autocommit",
    "atomic_requests",
    "hosts",
    "periodic",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of the doctor.

    `id` names the question and stays for good. `severity` is "ok", "note" (good to know), "warning" (locks will be
    refused or lost, or are about to run out) or "error" (locks exclude nobody, or cannot be taken). `found` is what was
    seen, `meaning` what that means for locks, `advice` what to do; both are empty where there is nothing to say.
    """

    id: FindingId
    severity: Severity
    found: str
    meaning: str = ""
    advice: str = ""


def worst(findings: Iterable[Finding]) -> Severity:
    """Return the worst severity; "ok" where there is none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")
