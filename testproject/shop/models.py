"""The tables of a small shop, and a log of who worked at what, and when."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, ClassVar

from django.core.validators import RegexValidator
from django.db import models
from django.db.models.functions import Now

from .months import MONTH, month_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from typing_extensions import Self


def this_pid() -> int:
    return os.getpid()


def this_host() -> str:
    return socket.gethostname()


class AccountQuerySet(models.QuerySet["Account"]):
    def due(self, older_than: timedelta) -> Self:
        """Return those that were never synced, or not for so long, by the database's clock."""
        due: Self = self.filter(models.Q(synced_at=None) | models.Q(synced_at__lt=Now() - older_than))
        return due


class Account(models.Model):
    name = models.CharField(max_length=100)
    email = models.EmailField(unique=True)
    balance = models.DecimalField(max_digits=12, decimal_places=2, default=0)
    synced_at = models.DateTimeField(null=True, blank=True)

    objects = AccountQuerySet.as_manager()

    def __str__(self) -> str:
        return self.name


class OrderQuerySet(models.QuerySet["Order"]):
    def in_month(self, month: str) -> Self:
        start, end = month_bounds(month)
        orders: Self = self.filter(placed_at__gte=start, placed_at__lt=end)
        return orders


class Order(models.Model):
    account = models.ForeignKey(Account, on_delete=models.CASCADE, related_name="orders")
    placed_at = models.DateTimeField(db_index=True)
    amount = models.DecimalField(max_digits=10, decimal_places=2)

    objects = OrderQuerySet.as_manager()

    def __str__(self) -> str:
        return f"Order {self.pk}"


class MonthlyReport(models.Model):
    month = models.CharField(max_length=7, unique=True, validators=[RegexValidator(MONTH)])
    order_count = models.PositiveIntegerField(default=0)
    total = models.DecimalField(max_digits=14, decimal_places=2, default=0)
    computed_at = models.DateTimeField(db_default=Now())
    computed_by_pid = models.PositiveIntegerField(default=this_pid)
    computed_by_host = models.CharField(max_length=255, default=this_host)

    objects: ClassVar[models.Manager[MonthlyReport]] = models.Manager()

    class Meta:
        ordering = ("month",)

    def __str__(self) -> str:
        return self.month


class RunQuerySet(models.QuerySet["Run"]):
    @contextlib.contextmanager
    def record(self, task: str, subject: object) -> Iterator[None]:
        """Log that this process works at something for the length of a block, which lies inside the lock.

        A block that raises, or whose process is killed, leaves a run that never finished. Outside a transaction, or
        others would see it only when it is over.
        """
        run = self.create(task=task, subject=str(subject))
        yield
        self.filter(pk=run.pk).update(finished_at=Now())


class Run(models.Model):
    """One piece of work by one process: the proof that nobody else was at the same thing meanwhile."""

    task = models.CharField(max_length=50)
    subject = models.CharField(max_length=50)
    pid = models.PositiveIntegerField(default=this_pid)
    host = models.CharField(max_length=255, default=this_host)
    started_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True, blank=True)

    objects = RunQuerySet.as_manager()

    class Meta:
        indexes = (models.Index(fields=["task", "subject"]),)

    def __str__(self) -> str:
        return f"{self.task} {self.subject}"
