"""The subcommand `doctor`: to be mounted in a management command."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import connections

from .. import conf
from . import diagnose
from .findings import SEVERITIES, worst

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.core.management.base import BaseCommand, CommandParser

    from .findings import Finding

HELP = (
    "Probe a database for all that makes an advisory lock worth less than it seems: whether two sessions exclude each"
    " other, poolers, standbys, timeouts, room. The exit status is 0, 1 with warnings, 2 with errors."
)
# As monitoring expects it: https://www.monitoring-plugins.org/doc/guidelines.html
STATUS = {"ok": 0, "note": 0, "warning": 1, "error": 2}
STYLES = {"ok": "SUCCESS", "note": "NOTICE", "warning": "WARNING", "error": "ERROR"}
PLURALS = {"error": "errors", "warning": "warnings", "note": "notes", "ok": "ok"}


def add_arguments(parser: CommandParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "--database",
        choices=tuple(connections),
        metavar="ALIAS",
        help="The alias to probe, by default ADVISORY_LOCK_DATABASE.",
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="Print the findings as JSON.")


def handle(command: BaseCommand, options: dict[str, Any]) -> int:
    """Run the subcommand with the options of `handle()`, and return its exit status."""
    try:
        alias = options.get("database") or conf.get_database()
        findings = diagnose(alias)
    except (ImproperlyConfigured, connections.exception_class) as error:
        raise CommandError(str(error), returncode=STATUS["error"]) from error
    if options.get("as_json"):
        command.stdout.write(_json(alias, findings))
    else:
        _write(command, alias, findings, options.get("verbosity", 1))
    return STATUS[worst(findings)]


def _json(alias: str, findings: Sequence[Finding]) -> str:
    rows = [asdict(finding) for finding in findings]
    return json.dumps({"database": alias, "worst": worst(findings), "findings": rows}, indent=2)


def _write(command: BaseCommand, alias: str, findings: Sequence[Finding], verbosity: int) -> None:
    for finding in findings:
        if verbosity or STATUS[finding.severity]:
            command.stdout.write(_lines(command, finding))
    counts = Counter(finding.severity for finding in findings)
    summary = ", ".join(
        f"{counts[severity]} {severity if counts[severity] == 1 else PLURALS[severity]}"
        for severity in reversed(SEVERITIES)
        if counts[severity]
    )
    if verbosity or STATUS[worst(findings)]:
        command.stdout.write(f"Advisory locks on {alias!r}: {summary}.")


def _lines(command: BaseCommand, finding: Finding) -> str:
    style = getattr(command.style, STYLES[finding.severity])
    text = f"{style(f'{finding.severity:8}')}{finding.found} [{finding.id}]"
    return "\n".join([text, *(f"{'':8}{line}" for line in (finding.meaning, finding.advice) if line)])
