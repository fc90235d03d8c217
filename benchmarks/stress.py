"""What a lock is worth: the same trouble for everybody, judged by a witness that does not rely on any lock."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator

from django.db import connections

from tests.bouncer import bouncer
from tests.support import extra_alias

from .libraries import libraries
from .measuring import Effort, Report, Table
from .peers import Peer, execute
from .situations import BOUNCED, SITUATIONS, TABLE
from .witness import observing

FIRST_KEY = 940_000


@contextlib.contextmanager
def surroundings() -> Iterator[bool]:
    """Make the table and the aliases, one through PgBouncer; yield whether there is one."""
    execute("default", f"DROP TABLE IF EXISTS {TABLE}")
    execute("default", f"CREATE UNLOGGED TABLE {TABLE} (key bigint PRIMARY KEY, value bigint)")
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(extra_alias("pooled", {"pool": {"min_size": 1, "max_size": 3, "timeout": 10}}))
            program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
            if program is not None:
                started = stack.enter_context(bouncer("transaction", default_pool_size=3))
                stack.enter_context(started.alias("bounced"))
            yield program is not None
    finally:
        execute("default", f"DROP TABLE {TABLE}")


def close_all(peers: list[Peer]) -> None:
    for peer in peers:
        peer.close()
    connections.close_all()
    connections["pooled"].close_pool()  # type: ignore[attr-defined]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let nobody log what happens on purpose here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(effort: Effort) -> Report:
    peers, rounds = libraries(), effort.pick(50, 6)
    rows, figures = [], {}
    with quiet(), surroundings() as has_bouncer:
        for number, (name, situation) in enumerate(SITUATIONS.items()):
            if situation in BOUNCED and not has_bouncer:
                continue
            cells = []
            for index, peer in enumerate(peers):
                key = FIRST_KEY + 10 * number + index
                with observing(peer.key(key)) as observer:
                    outcome = situation(peer, key, rounds, observer)
                cells.append("–" if outcome is None else str(outcome))
                if outcome is not None:
                    figures[f"{name} / {peer.name}"] = vars(outcome) | {"faults": outcome.faults}
                close_all(peers)
            rows.append([name, *cells])
    connections.close_all()
    return Report([Table("stress", ["situation", *map(str, peers)], rows)], [], figures)
