"""`doctor`: what makes an advisory lock of a database worth less than it seems."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...doctor import diagnose
from ...doctor.findings import SEVERITIES, worst
from .base import Status, Subcommand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.core.management.base import BaseCommand

    from ...doctor.findings import Finding
    from .base import SubcommandParser

# As monitoring expects it: https://www.monitoring-plugins.org/doc/guidelines.html
STATUS = {"ok": 0, "note": 0, "warning": 1, "error": 2}
STYLES = {"ok": "SUCCESS", "note": "NOTICE", "warning": "WARNING", "error": "ERROR"}
PLURALS = {"error": "errors", "warning": "warnings", "note": "notes", "ok": "ok"}


class Doctor(Subcommand):
    name = "doctor"
    help = (
        "Probe a database for all that makes an advisory lock worth less than it seems: whether two sessions exclude"
        " each other, poolers, standbys, timeouts, room."
    )
    epilog = """\
exit status, that of the worst finding:
  0   all is well, or there are notes
  1   warnings
  2   errors; or wrong usage
  69  the settings name no database
"""

    def add_arguments(self, parser: SubcommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="Write one JSON document instead of lines.")

    def handle(self, command: BaseCommand, using: str, **options: Any) -> None:
        findings = diagnose(using)
        if options["json"]:
            command.stdout.write(_document(using, findings))
        else:
            _write(command, using, findings, is_quiet=not options["verbosity"])
        if status := STATUS[worst(findings)]:
            raise Status(_summary(using, findings), returncode=status)


def _document(using: str, findings: Sequence[Finding]) -> str:
    rows = [asdict(finding) for finding in findings]
    return json.dumps({"database": using, "worst": worst(findings), "findings": rows}, indent=2)


def _write(command: BaseCommand, using: str, findings: Sequence[Finding], *, is_quiet: bool) -> None:
    told = [finding for finding in findings if STATUS[finding.severity] or not is_quiet]
    for finding in told:
        command.stdout.write(_lines(command, finding))
    if told:
        command.stdout.write(_summary(using, findings))


def _summary(using: str, findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    summary = ", ".join(
        f"{counts[severity]} {severity if counts[severity] == 1 else PLURALS[severity]}"
        for severity in reversed(SEVERITIES)
        if counts[severity]
    )
    return f"Advisory locks on {using!r}: {summary}."


def _lines(command: BaseCommand, finding: Finding) -> str:
    style = getattr(command.style, STYLES[finding.severity])
    text = f"{style(f'{finding.severity:8}')}{finding.found} [{finding.id}]"
    return "\n".join([text, *(f"{'':8}{line}" for line in (finding.meaning, finding.advice) if line)])
