"""Processes that take turns: started before anything else is, each with a connection of its own."""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from django.db import connections

from . import bare
from .libraries import libraries
from .peers import Form, Peer

START = 0.05  # seconds until all of them have read what to do
FIRST_KEY = 900_000
MOST_KEYS = 512


@dataclass(frozen=True)
class Turns:
    """What each process is to do: take turns at some keys, for some seconds."""

    peer: str
    form: str
    keys: int
    seconds: float
    start: float = 0.0
    stay: float = 0.0  # seconds that each stays inside, where it is looked for overlaps


@dataclass(frozen=True)
class Taken:
    """What one process did in that time: how often it was in, and how long it waited each time."""

    waits: list[float]
    overlaps: int  # looked for only by those who stay: the others are in too shortly to be seen together


class Workers:
    """Some processes, to be given turns. Forked, so make them before there are threads or connections."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("fork")
        self.cells = context.RawArray("i", MOST_KEYS)
        self.pipes: list[Connection] = []
        self.processes = []
        for index in range(number):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, index + 1, self.cells), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def take_turns(self, number: int, turns: Turns) -> list[Taken]:
        """Have so many of them take turns, and return what each did."""
        pipes = self.pipes[:number]
        self._ask(pipes, replace(turns, seconds=0.0))  # connects
        start = time.monotonic() + START
        return self._ask(pipes, replace(turns, start=start))

    def _ask(self, pipes: list[Connection], turns: Turns) -> list[Taken]:
        for pipe in pipes:
            pipe.send(turns)
        return [self._read_answer(pipe) for pipe in pipes]

    def _read_answer(self, pipe: Connection) -> Taken:
        answer = pipe.recv()
        if not isinstance(answer, Taken):
            raise AssertionError(f"a process failed: {answer}")
        return answer

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _work(pipe: Connection, name: int, cells: Any) -> None:
    peers = {peer.name: peer for peer in (bare.with_psycopg(), bare.with_django(), *libraries())}
    while (turns := pipe.recv()) is not None:
        pipe.send(_answer(peers[turns.peer], turns, name, cells))
    bare.close()
    connections.close_all()


def _answer(peer: Peer, turns: Turns, name: int, cells: Any) -> Taken | str:
    try:
        return _take_turns(peer, turns, name, cells)
    except Exception as error:
        return repr(error)


def _take_turns(peer: Peer, turns: Turns, name: int, cells: Any) -> Taken:
    form = _form(peer, turns.form)
    if not turns.seconds:
        with form(FIRST_KEY - name, "default"):
            return Taken([], 0)
    chosen = random.Random(name).randrange
    waits: list[float] = []
    overlaps = 0
    time.sleep(max(turns.start - time.monotonic(), 0))
    end = turns.start + turns.seconds
    # At least once, also where the machine let nobody begin in time.
    while (asked := time.monotonic()) < end or not waits:
        cell = chosen(turns.keys)
        with form(FIRST_KEY + cell, "default"):
            got = time.monotonic()
            if turns.stay:
                # The witness: memory that all processes share, and no lock.
                overlaps += cells[cell] != 0
                cells[cell] = name
                time.sleep(turns.stay)
                overlaps += cells[cell] != name
                cells[cell] = 0
            if got < end or not waits:
                waits.append(got - asked)
    return Taken(waits, overlaps)


def _form(peer: Peer, name: str) -> Form:
    within, lock = peer.timed, peer.lock
    if name == "timed" and within is not None:
        return lambda key, alias: within(key, alias, 30.0)
    if name == "lock" and lock is not None:
        return lock
    raise AssertionError(f"{peer} has no form {name}")
