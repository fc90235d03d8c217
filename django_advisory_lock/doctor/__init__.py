"""The doctor: probes a live database for all that makes an advisory lock worth less than it seems.

It opens sessions of its own, two at most, each for a limited time, takes locks on random keys between them, and leaves
nothing behind.
"""

from __future__ import annotations

import contextlib

from .. import conf, sessions
from ..exceptions import LockUnsupported
from .examining import examine, examine_quickly
from .findings import SEVERITIES, Finding, FindingId, Severity, worst
from .project import probe_project
from .visits import ERRORS

__all__ = ["SEVERITIES", "Finding", "FindingId", "Severity", "diagnose", "diagnose_quickly", "worst"]


def diagnose(using: str | None = None) -> list[Finding]:
    """Return what there is to say about advisory locks on a database, the worst first.

    `using` is the alias of the database, by default `ADVISORY_LOCK_DATABASE`. Two sessions are opened, apart from the
    connection of this thread. Nothing waits for long: a session that gives no answer within ten seconds is cut, and
    that is a finding. So is a database that cannot be reached, or is not PostgreSQL.

    Raises `ConnectionDoesNotExist` for an unknown alias, and `ImproperlyConfigured` where a setting of this library is
    wrong. See docs/doctor.md.
    """
    alias = conf.get_database() if using is None else using
    is_named = alias in conf.session_pooler_aliases()
    try:
        sessions.connection_for(alias)
    except LockUnsupported as error:
        return [
            Finding(
                "engine",
                "error",
                str(error),
                "No lock can be taken there: each raises LockUnsupported.",
                "Let ADVISORY_LOCK_DATABASE name an alias of a PostgreSQL server.",
            )
        ]
    findings = [
        Finding("engine", "ok", "The engine is PostgreSQL through psycopg 3."),
        *probe_project(alias),
        *examine(alias, is_named),
    ]
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))


def diagnose_quickly(using: str) -> list[Finding]:
    """Return what is worth a warning at each `migrate`: a few statements, on two sessions that are open for a moment.

    What cannot be reached, or answers with an error, is passed over in silence: others say that.
    """
    is_named = using in conf.session_pooler_aliases()
    findings: list[Finding] = []
    with contextlib.suppress(*ERRORS):
        findings.extend(examine_quickly(using, is_named))
    return [finding for finding in findings if finding.severity in ("warning", "error")]
