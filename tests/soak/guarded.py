"""The kinds of work of a thread that guards lock, and one lock object that all threads share."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management import BaseCommand, call_command
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_advisory_lock import (
    AdvisoryLockCommandMixin,
    AdvisoryLockJobMixin,
    advisory_lock,
    lock_view,
    periodic_lock,
)
from tests.soak.attempt import Attempt
from tests.soak.plan import BY_SESSION, KEPT, POOLED, PROXIED, SHORT
from tests.soak.work import Hand, named


@advisory_lock(lambda attempt, key: key, using=KEPT, timeout=0.5)
def _decorated(attempt: Attempt, key: str) -> None:
    attempt.body()


def decorated(hand: Hand, kind: str) -> None:
    """One lock object for all threads."""
    key = hand.key()
    with hand.attempt(kind, KEPT, key) as attempt:
        _decorated(attempt, key)


class _Job(AdvisoryLockJobMixin):
    lock_timeout = 0.3
    lock_using = POOLED

    def get_lock_key(self, attempt: Attempt, key: str) -> str:
        return key

    def run(self, attempt: Attempt, key: str) -> None:
        attempt.body()


def job(hand: Hand, kind: str) -> None:
    key = hand.key()
    with hand.attempt(kind, POOLED, key) as attempt:
        _Job().run(attempt, key)


@lock_view(lambda request, attempt, key: key, using=PROXIED, timeout=0.2)
def _view(request: HttpRequest, attempt: Attempt, key: str) -> HttpResponse:
    attempt.body()
    return HttpResponse()


def view(hand: Hand, kind: str) -> None:
    key = hand.key()
    with hand.attempt(kind, PROXIED, key) as attempt:
        response = _view(RequestFactory().post("/"), attempt, key)
        assert response.status_code == (200 if attempt.is_in else 409)


class _Command(AdvisoryLockCommandMixin, BaseCommand):
    lock_using = BY_SESSION
    stealth_options = ("attempt",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--key")

    def get_lock_key(self, *args: Any, **options: Any) -> str:
        return str(options["key"])

    def handle(self, *args: Any, **options: Any) -> None:
        options["attempt"].body(self.held_lock)


def command(hand: Hand, kind: str) -> None:
    key = hand.key()
    with hand.attempt(kind, BY_SESSION, key) as attempt:
        call_command(_Command(), key=key, attempt=attempt, lock_timeout=hand.timeout(None), verbosity=0)


@periodic_lock("soak", min_interval=0.2, using=SHORT)
def _periodic(attempt: Attempt) -> None:
    attempt.body()


def periodic(hand: Hand, kind: str) -> None:
    with hand.attempt(kind, SHORT, "soak-periodic") as attempt:
        _periodic(attempt)


KINDS = named(decorated, job, view, command, periodic)
