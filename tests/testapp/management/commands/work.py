from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from django_advisory_lock import AdvisoryLockCommandMixin
from django_advisory_lock.keys import KeyLike


class Command(AdvisoryLockCommandMixin, BaseCommand):
    """Say "working", then wait for a line on standard input where `--wait` is given."""

    def add_arguments(self, parser: ArgumentParser) -> None:  # without super(), as many commands do
        parser.add_argument("--key")
        parser.add_argument("--wait", action="store_true")

    def get_lock_key(self, *args: Any, **options: Any) -> KeyLike:
        return options["key"] or super().get_lock_key(*args, **options)

    def handle(self, *args: Any, **options: Any) -> str:
        self.stdout.write(f"working {sorted(name for name in options if 'lock' in name)}")
        self.stdout.flush()
        if options["wait"]:
            input()
        return "done"
