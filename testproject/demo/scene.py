"""One act of the demo: its processes, and what the log says of them, in seconds since it began."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from django.db import connection

from testproject.shop.models import Run

from . import server
from .processes import Crew
from .timeline import Row

if TYPE_CHECKING:
    from datetime import datetime

    from .processes import Child
    from .timeline import Interval


class Scene(Crew):
    """Start processes in its block; the log can be read in it and after it."""

    def __init__(self) -> None:
        super().__init__(connection.get_connection_params())
        last = Run.objects.order_by("-pk").first()
        self.since = last.pk if last else 0
        self.killed_at: dict[int, datetime] = {}
        # Both clocks at one moment: the processes are seen by this one, the log is written by the server's.
        self._began = time.monotonic()
        self._began_there = server.now()

    def seconds(self, moment: datetime) -> float:
        return (moment - self._began_there).total_seconds()

    def runs(self, child: Child | None = None) -> list[Run]:
        children = self.children if child is None else [child]
        pids = [child.pid for child in children]
        return list(Run.objects.filter(pk__gt=self.since, pid__in=pids).order_by("pk"))

    def at_work(self) -> int:
        """Return how many runs have begun and not ended."""
        return len([run for run in self.runs() if run.finished_at is None])

    def intervals(self, child: Child | None = None) -> list[Interval]:
        """Return when work was done, by the server's clock; what never finished ended as its process was killed."""
        runs = self.runs(child)
        ends = [run.finished_at or self.killed_at.get(run.pid) for run in runs]
        return [
            (self.seconds(run.started_at), self.seconds(end) if end else math.inf)
            for run, end in zip(runs, ends, strict=True)
        ]

    def kill(self, child: Child) -> None:
        self.killed_at[child.pid] = server.now()
        child.kill()

    def end_of(self, child: Child) -> float:
        return (time.monotonic() if child.ended is None else child.ended) - self._began

    def row(self, child: Child, note: str, mark: str = "") -> Row:
        until = self.end_of(child)
        return Row(child.name, until, [(start, min(end, until)) for start, end in self.intervals(child)], note, mark)
