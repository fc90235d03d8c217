from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from django_advisory_lock import AdvisoryLockCommandMixin


class Command(AdvisoryLockCommandMixin, BaseCommand):
    """A command that had an option of the same name before it was locked."""

    lock_key = "own-options"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--lock-timeout", default="mine")

    def handle(self, *args: Any, **options: Any) -> str:
        return f"{options['lock_timeout']} {'no_lock' in options}"
