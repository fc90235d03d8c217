"""The faults, one after another in an order that a seed gives, each with the moments between which it happened."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass

import psycopg

from tests.server import IMMEDIATE
from tests.soak import plan as plans
from tests.soak.records import Fault
from tests.soak.site import NAME, Site

# How often each comes in a round.
DECK = {
    "terminate": 5,
    "cancel": 4,
    "kill worker": 1,
    "freeze worker": 2,
    "crash server": 1,
    f"restart pooler {plans.BY_SESSION}": 1,
    f"restart pooler {plans.BY_TRANSACTION}": 1,
    "cut link": 2,
    "stall link": 1,
    "stall and cut link": 1,
    "fill lock table": 1,
}
CROWD = "SELECT pg_advisory_lock(7, n) FROM generate_series(%s::int, %s::int) n"
# All that lock or wait for one, and others.
VICTIM = """
SELECT pid FROM pg_stat_activity a WHERE application_name = %s
 ORDER BY EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND locktype = 'advisory') DESC, random() LIMIT 1
"""


@dataclass
class Faults:
    site: Site
    chance: random.Random
    pause: float = 0.5  # seconds between two, on average

    def __post_init__(self) -> None:
        self.noted: list[Fault] = []

    def strike_until(self, end: float, deck: dict[str, int] = DECK) -> None:
        while time.monotonic() < end:
            names = [name for name, count in deck.items() for _ in range(count)]
            self.chance.shuffle(names)
            for name in names:
                time.sleep(self.pause * 2 * self.chance.random())
                if time.monotonic() > end:
                    return
                self.strike(name)

    def strike(self, name: str) -> None:
        verb, _, what = name.partition(" ")
        if verb == "restart":
            self._restart_pooler(name, what.removeprefix("pooler "))
        else:
            getattr(self, f"_{name.replace(' ', '_')}")(name)

    def _note(self, name: str, begin: float, **facts: object) -> None:
        self.noted.append(Fault(name, begin, time.monotonic(), **facts))  # type: ignore[arg-type]

    def _moment(self) -> float:
        return 0.1 + 0.7 * self.chance.random()

    # Sessions

    def _signal_session(self, name: str, call: str) -> None:
        for (pid,) in self.site.ask(VICTIM, NAME):
            begin = time.monotonic()
            [(is_done,)] = self.site.ask(f"SELECT {call}", pid)
            if is_done:
                self._note(name, begin, pid=pid, ends_sessions=name == "terminate")

    def _terminate(self, name: str) -> None:
        self._signal_session(name, "pg_terminate_backend(%s, 5000)")

    def _cancel(self, name: str) -> None:
        self._signal_session(name, "pg_cancel_backend(%s)")

    # Workers

    def _kill_worker(self, name: str) -> None:
        begin, worker = time.monotonic(), self.chance.choice(list(self.site.workers))
        self.site.kill_worker(worker)
        self._note(name, begin, worker=worker)
        self.site.start_worker()

    def _freeze_worker(self, name: str) -> None:
        begin, worker = time.monotonic(), self.chance.choice(list(self.site.workers))
        pid = self.site.workers[worker].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._moment())
        os.kill(pid, signal.SIGCONT)
        self._note(name, begin, worker=worker)

    # The server, and the ways to it

    def _crash_server(self, name: str) -> None:
        begin = time.monotonic()
        self.site.server.stop(IMMEDIATE)
        down = time.monotonic()
        self.site.server.start()
        self._note(name, begin, ends_sessions=True, down=down)

    def _restart_pooler(self, name: str, route: str) -> None:
        begin = time.monotonic()
        self.site.bouncers[route].kill()
        down = time.monotonic()
        self.site.bouncers[route].start()
        self._note(name, begin, route=route, ends_sessions=True, down=down)

    def _cut_link(self, name: str) -> None:
        begin = time.monotonic()
        self.site.proxy.cut()
        self._note(name, begin, route=plans.PROXIED, ends_sessions=True)

    def _stall_link(self, name: str) -> None:
        begin = time.monotonic()
        self.site.proxy.pause()
        time.sleep(self._moment())
        self.site.proxy.resume()
        self._note(name, begin, route=plans.PROXIED)

    def _stall_and_cut_link(self, name: str) -> None:
        begin = time.monotonic()
        self.site.proxy.pause()
        time.sleep(self._moment())
        self.site.proxy.cut()
        down = time.monotonic()
        self.site.proxy.resume()
        self._note(name, begin, route=plans.PROXIED, ends_sessions=True, down=down)

    def _fill_lock_table(self, name: str) -> None:
        begin = time.monotonic()
        with self.site.server.connect(application_name="crowd") as raw:
            with contextlib.suppress(psycopg.errors.OutOfMemory):
                for number in range(0, 1_000_000, 20):
                    raw.execute(CROWD, [number, number + 19])
            time.sleep(self._moment() / 2)
        self._note(name, begin)
