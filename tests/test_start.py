"""docs/start.md, as a stranger follows it: its files and its commands, in their order, in an empty directory.

What is installed is this checkout, or what START_PYTHON has, an interpreter with the wheel. The server is that of the
tests. All else is the page's.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from tests.support import LIMIT, environment, parameters, wait_until
from tests.test_docs import PROJECT, read_blocks

pytestmark = pytest.mark.slow

PAGE = "docs/start.md"
START_PYTHON = os.environ.get("START_PYTHON")
# Done before, or not of this machine.
NOT_RUN = re.compile(r"mkdir shop$|cd shop$|python3 -m venv |\. \.venv|python -m pip install |docker run ")
# What a terminal of its own is for.
STAYS = re.compile(r"make_report --seconds|runserver")


class Stranger:
    """Somebody who does what the page says, and looks whether what comes out is what the page shows."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        self.database = database
        self.python = START_PYTHON or sys.executable
        self.environment = environment(PYTHONPATH=str(PROJECT), PYTHONUNBUFFERED="1", PYTHONWARNINGS="error")
        for name in ("DJANGO_SETTINGS_MODULE", *(["PYTHONPATH"] if START_PYTHON else [])):
            del self.environment[name]
        self.running: list[subprocess.Popen[bytes]] = []
        self.port = 0

    def write(self, text: str) -> None:
        """Make the file that a block names in its first line."""
        named = re.match(r"# (\S+\.py)(, at its end)?\n", text)
        assert named, text
        path = self.directory / named[1]
        before = path.read_text() if named[2] else ""
        if "DATABASES" in text:
            text += f"DATABASES['default'].update({self.server()})\n"
        path.write_text(before + text)

    def server(self) -> dict[str, str]:
        names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
        there = {names[name]: value for name, value in parameters().items() if name in names}
        return {**dict.fromkeys(names.values(), ""), **there, "NAME": self.database}

    def type(self, line: str) -> str:
        """Type a line, and return what is printed; nothing of what stays."""
        if NOT_RUN.match(line):
            return ""
        words = shlex.split(line)
        if words[0] == "curl":
            return self.ask(words[-1], with_head="--include" in words)
        programs = {"python": [self.python], "django-admin": [self.python, "-m", "django"]}
        words[:1] = programs.get(words[0], words[:1])
        if STAYS.search(line):
            self.start(words)
            return ""
        done = subprocess.run(
            words, check=False, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == self.expected_status(line), done.stdout + done.stderr
        return done.stdout

    def expected_status(self, line: str) -> int:
        return 1 if "advisory_lock list" in line and not self.is_working() else 0

    def start(self, words: list[str]) -> None:
        is_server = "runserver" in words
        words = [*words[:-1], "--noreload", "0"] if is_server else words
        log = self.directory / f"{words[2]}.log"
        with log.open("w") as file:
            self.running.append(
                subprocess.Popen(words, cwd=self.directory, env=self.environment, stdout=file, stderr=subprocess.STDOUT)
            )
        if is_server:
            wait_until(lambda: "Quit the server" in log.read_text(), lambda: f"it serves: {log.read_text()}")
            self.port = int(re.findall(r"server at http://127\.0\.0\.1:(\d+)/", log.read_text())[0])
        else:
            wait_until(self.is_working, lambda: f"the command works: {log.read_text()}")

    def is_working(self) -> bool:
        with psycopg.connect(**parameters() | {"dbname": self.database}) as raw:
            held = "SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            where = "WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()"
            return raw.execute(f"{held} {where}").fetchone() is not None

    def ask(self, url: str, *, with_head: bool) -> str:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        try:
            client.request("GET", urlsplit(url).path)
            answer = client.getresponse()
            body = answer.read().decode()
        finally:
            client.close()
        head = f"HTTP/1.1 {answer.status} {answer.reason}\nRetry-After: {answer.headers['Retry-After']}\n"
        return head if with_head else body

    def interrupt(self) -> None:
        """Press Ctrl-C in the first terminal."""
        command = self.running.pop(0)
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=LIMIT)
        wait_until(lambda: not self.is_working(), "free")

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate(timeout=LIMIT)


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    database = f"start_{uuid.uuid4().hex}"
    name = sql.Identifier(database)
    with psycopg.connect(**parameters() | {"dbname": "postgres"}, autocommit=True) as raw:
        raw.execute(sql.SQL("CREATE DATABASE {}").format(name))
        someone = Stranger(tmp_path, database)
        try:
            yield someone
        finally:
            someone.end()
            raw.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """Return the commands of a console and what each prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, printed = re.sub(r"\\\n\s*", "", part).partition("\n")
        yield line, printed


def same(shown: str, printed: str) -> bool:
    """Whether a page shows what is printed, but for pids, times and addresses."""
    moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+\d\d:\d\d"
    for pattern, name in ((moment, "SINCE"), (r"(?<=pid )\d+", "PID"), (r"[\d.]+ s\.", "SECONDS")):
        shown, printed = re.sub(pattern, name, shown), re.sub(pattern, name, printed)
    return [normal(line) for line in shown.splitlines()] == [normal(line) for line in printed.splitlines()]


def normal(line: str) -> list[str]:
    words = line.split()
    # The pid of a row of the list, and the client, which is none over a unix socket.
    return [*words[:3], "PID", words[4], "CLIENT", *words[6:]] if words[1:2] == ["exclusive"] else words


def test_a_stranger_succeeds(stranger: Stranger) -> None:
    shown_and_printed = []
    for block in read_blocks(PAGE):
        if block.language == "python":
            stranger.write(block.text)
        elif block.language == "console":
            if "is free." in block.text:
                stranger.interrupt()
            for line, shown in sessions(block.text):
                shown_and_printed.append((line, shown, stranger.type(line)))
    assert [row for row in shown_and_printed if not same(*row[1:])] == []
    assert len(shown_and_printed) == 19
