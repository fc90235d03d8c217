"""The program: which parts there are, what the command line says, and what is written into the docs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import django
import psycopg

from tests.support import parameters

from . import growth, handover, memory, pair, sessions, several, stress, tasks
from .measuring import Effort, Report, Table
from .workers import Workers

PROJECT = Path(__file__).resolve().parent.parent
PAGE = PROJECT / "docs" / "performance.md"
IMAGES = PROJECT / "docs" / "images"
ROUNDS, QUICK_ROUNDS = 2000, 10
PARTS: dict[str, Callable[[Effort], Report]] = {
    "pair": pair.run,
    "tasks": tasks.run,
    "several": several.run,
    "growth": growth.run,
    "memory": memory.run,
    "dedicated": sessions.dedicated,
    "listing": sessions.listing,
    "stress": stress.run,
}
NAMES = ["handover", *PARTS]
# What each part fills in on the page.
TABLES = {
    "pair": ("pair", "targets"),
    "tasks": ("tasks",),
    "handover": ("handover", "handover-target"),
    "several": ("several", "semaphores"),
    "growth": ("growth",),
    "memory": ("memory", "room"),
    "dedicated": ("dedicated",),
    "listing": ("listing",),
    "stress": ("stress",),
}
PLOTS = ("pair", "handover", "growth")
MARKED = "<!-- measured: {name} -->\n{text}<!-- end of {name} -->"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare what locks cost and are worth.")
    parser.add_argument("--quick", action="store_true", help="only show that everything works, in a few seconds")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"how often each pair is timed ({ROUNDS})")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", default=NAMES, help=", ".join(NAMES))
    parser.add_argument("--write", action="store_true", help="write the tables and pictures into docs/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures behind the tables")
    chosen = parser.parse_args(arguments)
    rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else ROUNDS)
    if rounds < 2:
        parser.error("--rounds is at least 2")
    if chosen.quick and chosen.write:
        parser.error("a quick run measures nothing that is worth writing down: leave out --quick or --write")
    if chosen.write:
        require_places(chosen.only)
    reports = measure(Effort(rounds, chosen.quick), chosen.only)
    if chosen.json:
        figures = {name: {"tables": [t.name for t in each.tables], **each.figures} for name, each in reports.items()}
        chosen.json.write_text(json.dumps(figures, indent=1))
    if chosen.write:
        write(reports)
    return 0


def measure(effort: Effort, names: Sequence[str]) -> dict[str, Report]:
    """Run some parts, and print their tables as they come."""
    found: dict[str, Report] = {}
    # Forked first: later there are threads and connections.
    workers = Workers(effort.pick(max(handover.WAITERS), 2)) if "handover" in names else None
    print(f"{machine()}\n")
    for name in NAMES:
        if name not in names:
            continue
        before = load()
        if name == "handover" and workers is not None:
            found[name] = handover.run(effort, workers)
            workers.close()
        else:
            found[name] = PARTS[name](effort)
        found[name].load = (before, load())
        for table in found[name].tables:
            print(f"{table.name}\n\n{table}\n", flush=True)
    return found


def load() -> float:
    return os.getloadavg()[0]


def machine() -> str:
    """Say in general words on what it was measured."""
    with psycopg.connect(**parameters()) as raw:
        server = raw.info.parameter_status("server_version")
        row = raw.execute("SELECT inet_server_addr() IS NULL").fetchone()
    link = "a unix socket" if row and row[0] else "TCP"
    peers = ("django-pglock", "django-pgware", "django-pglocks", "sqlalchemy-dlock", "SQLAlchemy")
    versions = ", ".join(f"{peer} {version}" for peer in peers if (version := version_of(peer)))
    return (
        f"{os.cpu_count()} cores, {platform.system()} on {platform.machine()}; PostgreSQL {server} over {link};"
        f" Python {platform.python_version()}, Django {django.__version__}, psycopg {psycopg.__version__}"
        f" ({psycopg.pq.__impl__}); {versions}"
    )


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


# -- The page ---------------------------------------------------------------------------------------------------------


def require_places(names: Sequence[str], page: Path = PAGE) -> None:
    """Fail before anything is measured where it could not be written."""
    if find_spec("matplotlib") is None:
        raise SystemExit("The pictures are drawn by matplotlib: python -m pip install -e '.[bench]'")
    text = page.read_text(encoding="utf-8")
    for name in ("machine", *(table for part in names for table in TABLES[part])):
        filled(text, name, "")


def write(reports: Mapping[str, Report], page: Path = PAGE, images: Path = IMAGES) -> None:
    """Put tables, and below what load they were measured, into their places on the page, and draw the pictures."""
    from .plots import draw  # noqa: PLC0415 - matplotlib is for this alone

    text = page.read_text(encoding="utf-8")
    for report in reports.values():
        for table in report.tables:
            text = filled(text, table.name, written(table, report))
        for plot in report.plots:
            draw(plot, images / f"{plot.name}.svg")
    page.write_text(filled(text, "machine", machine() + "."), encoding="utf-8")


def written(table: Table, report: Report) -> str:
    low, high = min(report.load), max(report.load)
    return f"{table}\n\nLoad average of the machine meanwhile: {low:.1f} to {high:.1f}."


def filled(text: str, name: str, content: str) -> str:
    """Replace what stands between the marks of a name."""
    pattern = MARKED.format(name=re.escape(name), text=".*?")
    filled_in, count = re.subn(
        pattern, lambda _: MARKED.format(name=name, text=f"\n{content}\n\n"), text, count=1, flags=re.DOTALL
    )
    if not count:
        raise SystemExit(f"docs/performance.md has no place for {name}.")
    return filled_in


def places(text: str) -> list[str]:
    """Return the names of the places on a page."""
    return re.findall("^<!-- measured: (.*) -->$", text, flags=re.MULTILINE)
