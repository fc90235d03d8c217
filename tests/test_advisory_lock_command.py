"""`manage.py advisory_lock`: real processes, real signals, a real terminal, and sessions that are killed."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unicodedata import east_asian_width

import coverage
import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, ProgrammingError, transaction
from django.test import override_settings

from django_advisory_lock import (
    LockHandle,
    LockKey,
    advisory_lock,
    advisory_semaphore,
    lock_key,
    model_key,
    periodic_lock,
    try_advisory_lock,
)
from django_advisory_lock.inspection import KeyLock, waiting_locks
from django_advisory_lock.management import child, inbox, surroundings
from django_advisory_lock.management.subcommands import terminating
from django_advisory_lock.management.subcommands.base import Status
from django_advisory_lock.management.subcommands.listing import table
from django_advisory_lock.management.terminal import Terminal
from django_advisory_lock.signals import lock_acquired
from django_advisory_lock.slots import slot_keys
from tests.server import new_server
from tests.support import (
    LIMIT,
    OtherSession,
    Thread,
    backend_pid,
    environment,
    extra_alias,
    statements,
    tool,
    value,
    wait_until,
)
from tests.test_interrupts import interrupt_at, raises
from tests.testapp.models import Account, Membership

pytestmark = pytest.mark.usefixtures("other")

PROJECT = Path(__file__).resolve().parent.parent
PROGRAM = (
    sys.executable,
    "-c",
    "import sys; from django.core.management import execute_from_command_line as run; run(sys.argv)",
    "advisory_lock",
)

# A command that says which signals it gets, and ends with the end of its input, or with SIGUSR2. Without a wake-up
# descriptor Python would see a signal that comes right before it waits only after that.
COUNT = """
import os, select, signal, sys
ear, mouth = os.pipe()
os.set_blocking(mouth, False)
signal.set_wakeup_fd(mouth)
for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "WINCH", *(["CONT"] if "CONT" in sys.argv else [])):
    signal.signal(getattr(signal, "SIG" + name), lambda number, frame: None)
print("ready", os.getpid(), flush=True)
numbers, text = b"", b"text"
while text and signal.SIGUSR2 not in numbers:
    found = select.select([ear] if "deaf" in sys.argv else [ear, 0], [], [])[0]
    if 0 in found:
        text = os.read(0, 4096)
    if ear in found:
        numbers = os.read(ear, 4096)
        for number in numbers:
            print(signal.Signals(number).name, flush=True)
"""

T = TypeVar("T")


def called(*arguments: Any, **options: Any) -> str:
    out = io.StringIO()
    call_command("advisory_lock", *arguments, stdout=out, **options)
    return out.getvalue()


def outcome(*arguments: Any, **options: Any) -> tuple[int, str]:
    """Return the exit status of a call, and the message of its error."""
    try:
        called(*arguments, **options)
    except CommandError as error:
        return error.returncode, str(error)
    return 0, ""


def run_and(action: Callable[[int], T], told: Path, *arguments: str) -> tuple[int, str, T]:
    """Run in this process what writes its pid into a file, and meanwhile do something in another thread."""

    def act() -> T:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"), "the command")
        return action(int(told.read_text()))

    acting = Thread(act)
    return *outcome("run", *arguments), acting.result()


def measured() -> dict[str, str]:
    """Return what makes coverage measure a process too: what a terminal does cannot be seen in this one."""
    running = coverage.Coverage.current() is not None
    return {"COVERAGE_PROCESS_START": str(PROJECT / "pyproject.toml")} if running else {}


def start(*arguments: str, wrap: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    settings = {"env": environment(), "cwd": PROJECT, **pipes, **options}
    return subprocess.Popen([*wrap, *PROGRAM, *arguments], **settings)


def ended(process: subprocess.Popen[bytes], text: bytes | None = None) -> tuple[int, bytes, bytes]:
    """Wait for the end of a process; return its exit status, and what it said."""
    try:
        out, errors = process.communicate(text, timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, errors


def said(process: subprocess.Popen[bytes]) -> str:
    """Return the next line that a process writes."""
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def ready(process: subprocess.Popen[bytes]) -> int:
    """Wait until the command of `run` is ready, and return its pid."""
    word, pid = said(process).split()
    assert word == "ready"
    return int(pid)


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended may be left as a zombie, where nobody waits for it."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not Path("/proc/self/stat").exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class TestKeys:
    """The ways to name one lock."""

    @pytest.mark.parametrize(
        ("arguments", "key"),
        [
            (["{name}"], lock_key),
            (["{name}", "42"], lambda name: lock_key(name, 42)),
            (["4711"], lambda name: lock_key("4711")),
            (["--", "-x", "{name}"], lambda name: lock_key("-x", name)),
            (["--int", "-4711"], lambda name: LockKey((-4711,))),
            (["--pair", "-1", "5"], lambda name: LockKey.pair(-1, 5)),
            (["--model", "testapp.Account"], lambda name: model_key(Account)),
            (["--model", "testapp.account", "42"], lambda name: model_key(Account, pk=42)),
            (
                ["--model", "testapp.account", "42", "--purpose", "{name}"],
                lambda name: model_key(Account, pk=42, purpose=name),
            ),
            (["--model", "testapp.membership", "42", "staff"], lambda name: model_key(Membership, pk=(42, "staff"))),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "key",
    )
    def test_forms(self, arguments: list[str], key: Callable[[str], LockKey], name: str, other: OtherSession) -> None:
        words = [word.format(name=name) for word in arguments]
        assert outcome("list", *words) == (1, f"Nobody holds {key(name).name!r}.")
        other.take(key(name))
        assert f" {other.pid} " in called("list", *words)
        other.drop(key(name))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["a", "--int", "1"], "Name one lock"),
            (["--int", "1", "--pair", "1", "2"], "Name one lock"),
            (["a", "--purpose", "x"], "--purpose goes with --model"),
            ([""], "Empty text cannot be part of a key: pass text that stands for it"),
            (["--int", str(2**63)], "out of the range"),
            (["--pair", "1", str(2**31)], "out of the range"),
            (["--model", "account"], "There is no model 'account': name one as app_label.model."),
            (["--model", "shop.nothing", "1"], "There is no model 'shop.nothing'"),
            (["--model", "testapp.account", "x"], "'x' is no primary key of testapp.account."),
            (["--model", "testapp.account", "1", "2"], "A tuple of 2 values is no primary key of testapp.account."),
            (["--model", "testapp.membership", "1"], "a tuple of 2 values"),
        ],
        ids=str,
    )
    def test_what_is_refused(self, arguments: list[str], message: str) -> None:
        with statements(0):
            status, text = outcome("list", *arguments)
        assert status == 2
        assert message in text
        assert outcome("run", *arguments, "--", "true") == (status, text)

    def test_from_python(self, name: str, other: OtherSession) -> None:
        """What argparse would have read comes as it is."""
        other.take(lock_key(name))
        assert f" {other.pid} " in called("list", key=name)
        assert f" {other.pid} " in called("list", key=[name])
        assert outcome("list", int="4711") == (2, "A LockKey consists of ints, not str.")

    @pytest.mark.parametrize("arguments", [(), ("list", "--int", "x"), ("list", "--nothing"), ("nothing",)], ids=str)
    def test_wrong_usage(self, arguments: tuple[str, ...]) -> None:
        assert outcome(*arguments)[1].startswith("Error: ")

    @pytest.mark.parametrize("order", [("-v", "0", "list"), ("list", "-v", "0"), ("list", "--verbosity=0")], ids=str)
    def test_the_options_of_every_command(self, order: tuple[str, ...]) -> None:
        assert called(*order) == ""
        assert called("list", verbosity=0) == ""
        assert called("--traceback", "list", "--no-color", "--settings", "tests.settings") == "No advisory locks.\n"


class TestDatabase:
    def test_another_alias(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        assert called("list", name, "--database", "same")
        assert outcome("list", name, database="other")[0] == 1
        with override_settings(ADVISORY_LOCK_DATABASE="other"):
            assert outcome("list", name)[0] == 1
            assert called("run", name, "--", "true") == ""
            assert called("list", name, database="default")
        assert outcome("run", name, "--", "true")[0] == 75

    @pytest.mark.parametrize("subcommand", [("list",), ("list", "x"), ("run", "x", "--", "true"), ("terminate", "1")])
    def test_one_that_cannot_hold_a_lock(self, subcommand: tuple[str, ...]) -> None:
        assert outcome(*subcommand, database="sqlite")[0] == 69
        assert outcome(*subcommand, database="nothing")[0] == 69
        assert outcome(subcommand[0], "--database", "nothing", *subcommand[1:])[1].startswith("Error: ")
        with extra_alias("unreachable", HOST="/nowhere"):
            status, message = outcome(*subcommand, database="unreachable")
        assert (status, "/nowhere" in message) == (69, True)

    def test_wrong_settings(self) -> None:
        with override_settings(ADVISORY_LOCK_DATABASE=7):
            assert outcome("list")[0] == 69


LOCK = KeyLock(LockKey((1,)), 7, False, False, True, "", None, None)


class TestList:
    def test_held_and_waiting(self, name: str, other: OtherSession) -> None:
        key = lock_key("command", "tests.testapp.management.commands.work")
        other.take(key)
        waiting = Thread(lambda: advisory_lock(key, timeout=LIMIT).acquire().release())
        other.wait_for_waiters(key)
        head, *lines = called("list").splitlines()
        columns = [match.start() for match in re.finditer(r"\S+( \S+)*", head)]
        rows = [
            [line[begin:end].strip() for begin, end in zip(columns, [*columns[1:], None], strict=True)]
            for line in lines
        ]
        assert head.split()[:4] == ["NAME", "MODE", "STATUS", "PID"]
        held, waits = rows
        assert held[:7] == [key.name, "exclusive", "held", str(other.pid), "other-session", held[5], "idle"]
        assert (held[8], waits[2], waits[6], waits[8]) == ("-", "waiting", "active", str(other.pid))
        assert all(datetime.fromisoformat(row[7]) for row in rows)
        other.drop(key)
        waiting.result()

    def test_none(self, name: str, other: OtherSession) -> None:
        assert called("list") == "No advisory locks.\n"
        out = io.StringIO()
        with pytest.raises(Status):
            call_command("advisory_lock", "list", name, stdout=out)
        assert out.getvalue() == f"{name!r} is free.\n"

    def test_a_free_key_beside_others_with_names_like_it(self, name: str, other: OtherSession) -> None:
        """The keys of periodic work, and of the slots of a semaphore, are others than that of the name alone."""
        guards = periodic_lock(name, min_interval=60), advisory_semaphore(name, limit=4), try_advisory_lock(f"{name}x")
        known = [guard(lambda: None) for guard in guards]

        def said() -> str:
            out = io.StringIO()
            with pytest.raises(Status):
                call_command("advisory_lock", "list", name, stdout=out)
            return out.getvalue().rstrip()

        other.take(lock_key(f"{name}x"))
        assert said() == f"{name!r} is free."
        keys = [lock_key("periodic", name)]
        like = f"{name!r} is free. Held are other keys with names like it: "
        other.take(keys[0])
        assert said() == f"{like}'periodic:{name}' ({keys[0].args[0]})."
        for slot in slot_keys(lock_key(name), 4):
            other.take(slot)
            keys.append(slot)
        shown = "; ".join(f"{key.name!r} ({key.args[0]})" for key in sorted(keys)[:3])
        assert said() == f"{like}{shown}; …"
        assert known

    def test_who_waits_does_not_hold(self, name: str, other: OtherSession) -> None:
        assert table([LOCK], "utf-8").splitlines()[1].split()[:3] == ["1", "exclusive", "held"]

    def test_json(self, name: str, other: OtherSession) -> None:
        key = model_key(Account, pk=42)
        other.take(key, shared=True)
        waiting = Thread(lambda: advisory_lock(key, timeout=LIMIT).acquire().release())
        other.wait_for_waiters(key)
        answer = json.loads(called("list", "--json", "-v", "0"))
        assert (answer["database"], len(answer["locks"])) == ("default", 2)
        held, waits = answer["locks"]
        assert waits.pop("waiting_since")
        assert waits.pop("seconds_waiting") >= 0
        assert datetime.fromisoformat(held.pop("query_start")).tzinfo
        assert held.pop("seconds_in_state") >= 0
        assert held == {
            "name": "testapp.account:42",
            "is_named": True,
            "key": list(map(str, key.args)),
            "model": "testapp.account",
            "object_pk": 42,
            "mode": "shared",
            "status": "held",
            "pid": other.pid,
            "own": False,
            "application_name": "other-session",
            "client": held["client"],
            "state": "idle",
            "waiting_since": None,
            "seconds_waiting": None,
            "blocked_by": [],
        }
        assert (waits["mode"], waits["status"], waits["blocked_by"]) == ("exclusive", "waiting", [other.pid])
        asked = json.loads(called("list", "--model", "testapp.account", "42", "--json"))["locks"]
        assert [(lock["name"], lock["model"], lock["object_pk"]) for lock in asked] == 2 * [
            ("testapp.account:42", "testapp.account", 42)
        ]
        other.drop(key, shared=True)
        waiting.result()
        status, _ = outcome("list", "--model", "testapp.account", "42", json=True)
        assert status == 1

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("streams", "status", "said"),
        [
            (">&-", 0, b""),
            ("<&- >&- 2>&-", 0, b""),
            (">/dev/full", 74, b"CommandError: Cannot write to stdout: No space left on device\n"),
        ],
        ids=["closed", "all closed", "full"],
    )
    def test_where_it_cannot_be_shown(
        self, streams: str, status: int, said: bytes, name: str, other: OtherSession
    ) -> None:
        """The status never is that of a lock that is free."""
        other.take(lock_key(name))
        assert ended(
            start("list", name, wrap=("sh", "-c", f'"$@" {streams}', "sh"), env=environment(**measured()))
        ) == (status, b"", said)
        other.drop(lock_key(name))

    @pytest.mark.slow
    def test_nobody_reads_it(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        ear, mouth = os.pipe()
        os.close(ear)
        process = start("list", name, stdout=mouth, env=environment(**measured()))
        os.close(mouth)
        assert process.wait(LIMIT) == 128 + signal.SIGPIPE
        assert ended(process)[2] == b""
        other.drop(lock_key(name))

    def test_names_that_could_do_harm(self, name: str, other: OtherSession) -> None:
        """A name is anybody's text, and so is what an application calls itself."""
        hostile = f"<b>'\"&\x1b[31m\n\u202e🔒é{name}"
        other.take(lock_key(hostile))
        other.one("SELECT set_config('application_name', %s, false)", ["<i>'\"\x1b[2J\n\u00e9"])
        text = called("list", hostile)
        head, line = text.splitlines()
        assert "<b>'\"&\\x1b[31m\\n\\u202e🔒é" in line
        assert "<i>'\"" in line
        assert text.replace("\n", "").isprintable()
        before = line[: line.index("exclusive")]
        assert len(before) + sum(east_asian_width(char) in "WF" for char in before) == head.index("MODE")
        assert json.loads(called("list", hostile, json=True))["locks"][0]["name"] == lock_key(hostile).name

    def test_letters_without_a_width_of_their_own(self) -> None:
        lock = KeyLock(LockKey((1,), "e\u0301漢"), 7, False, False, True, "", None, None)
        head, line = table([lock], "utf-8").splitlines()
        assert line == "e\u0301漢   exclusive  held    7    -            -       -      -      -"
        assert head.startswith("NAME  MODE")

    def test_where_not_every_letter_can_be_shown(self, name: str, other: OtherSession) -> None:
        """As with LC_ALL=POSIX, or in the mail of an old cron."""
        key = lock_key("🔒é", name)
        other.take(key)
        with io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True) as out:
            call_command("advisory_lock", "list", "🔒é", name, stdout=out)
            shown = out.buffer.getvalue().decode("latin-1")
        assert f"\\U0001f512é:{name}" in shown

    def test_what_a_role_may_not_see(self, name: str, other: OtherSession) -> None:
        other.raw.execute(f'CREATE ROLE "{name}"')
        other.take(lock_key(name))
        try:
            with transaction.atomic():
                value(f"SELECT set_config('role', '{name}', true)")
                (_, line) = called("list", name).splitlines()
                (lock,) = json.loads(called("list", name, json=True))["locks"]
        finally:
            other.raw.execute(f'DROP ROLE "{name}"')
        assert line.split()[1:] == ["exclusive", "held", str(other.pid), "other-session", "-", "-", "-", "-"]
        assert (lock["state"], lock["client"], lock["query_start"]) == (None, None, None)

    def test_times(self) -> None:
        """In the time zone of the project, or as they are where it has none."""
        aware = datetime(2026, 9, 1, 12, 30, 5, 123456, tzinfo=timezone.utc)
        locks = [
            KeyLock(LockKey((1,)), pid, False, True, pid == 1, "", None, None, None, moment, moment)
            for pid, moment in ((1, aware), (2, aware.replace(tzinfo=None)))
        ]
        with override_settings(TIME_ZONE="Asia/Tokyo"):
            _, first, second = table(locks, "utf-8").splitlines()
        assert "2026-09-01 21:30:05+09:00" in first
        assert "2026-09-01 12:30:05 " in second

    def test_a_prepared_transaction(self) -> None:
        lock = KeyLock(LockKey((1,)), None, False, False, True, "", None, None)
        assert table([lock], "utf-8").splitlines()[1].split()[3] == "prepared"


# -- run --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """Where a command writes its pid once it is ready."""
    return tmp_path / "pid"


def stubborn(told: Path) -> str:
    """Return a command for a shell that does not end when it is told to."""
    return f"trap '' TERM; echo $$ >{told}; while :; do sleep 0.02; done"


def interrupt(number: int) -> None:
    """Send a signal to this process, which this thread takes: the main one has to wake up all the same."""
    signal.pthread_kill(threading.get_ident(), number)


def state(pid: int) -> str:
    """Return how the system calls what a process does: T is stopped."""
    answer = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], check=False, stdout=subprocess.PIPE, text=True)
    return answer.stdout.strip()[:1]


@contextlib.contextmanager
def same_mask() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture
def plain_file(tmp_path: Path) -> Path:
    path = tmp_path / "plain"
    path.write_text("nothing to run")
    return path


class TestRun:
    @pytest.mark.parametrize(
        ("command", "status"),
        [
            (["true"], 0),
            (["sh", "-c", "exit 3"], 3),
            (["sh", "-c", "exit 200"], 200),
            (["sh", "-c", "kill -TERM $$"], 143),
            (["sh", "-c", "kill -KILL $$"], 137),
            (["sh", "-c", "kill -PIPE $$"], 141),
            (["no-such-command"], 127),
            (["/no/such/command"], 127),
            ([""], 127),
            (["{plain_file}"], 126),
            (["/"], 126),
        ],
        ids=str,
    )
    def test_exit_statuses(
        self, command: list[str], status: int, plain_file: Path, name: str, other: OtherSession
    ) -> None:
        words = [word.format(plain_file=plain_file) for word in command]
        with statements(0):  # it has a session of its own
            found, message = outcome("run", name, "--", *words)
        assert found == status
        assert message.startswith(words[0]) if status else message == ""
        assert other.is_free(lock_key(name))

    def test_as_a_program(self, name: str, tmp_path: Path, other: OtherSession) -> None:
        """What comes after the first dashes, and the streams, and other files that are open, are the command's."""
        code = (
            "import os, sys; os.write(3, repr(sys.argv[1:]).encode()); print('ready', 0, flush=True);"
            "sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.stderr.write('error'); sys.exit(3)"
        )
        words = ["--timeout", "x", "--", "-v", "9", "--settings", "nothing", "--", ""]
        shell = ("sh", "-c", f'exec "$@" 3>{tmp_path}/third', "sh")
        process = start("run", "-v", "2", name, "--", sys.executable, "-c", code, *words, wrap=shell)
        ready(process)
        assert other.holders(lock_key(name)) == 1
        data = bytes(range(256)) * 1000
        assert ended(process, data) == (3, data, b"error")
        assert (tmp_path / "third").read_text() == repr(words)
        assert other.is_free(lock_key(name))

    def test_what_a_program_says(self, plain_file: Path, name: str, other: OtherSession) -> None:
        """Nothing, where the exit status is the answer."""
        status, out, errors = ended(start("run", name, "--", str(plain_file)))
        assert (status, out, errors.decode()) == (126, b"", f"CommandError: {plain_file}: Permission denied\n")
        assert ended(start("list", name)) == (1, f"{name!r} is free.\n".encode(), b"")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("streams", "status", "said"),
        [("2>&-", 127, b""), ("2>/dev/full", 127, b""), ("<&- >&- 2>&-", 127, b"")],
        ids=["no stderr", "full stderr", "none"],
    )
    def test_nobody_reads_why(self, streams: str, status: int, said: bytes, name: str, tmp_path: Path) -> None:
        process = start(
            "run",
            name,
            "--",
            str(tmp_path / "missing"),
            wrap=("sh", "-c", f'"$@" {streams}', "sh"),
            env=environment(**measured()),
        )
        assert ended(process) == (status, b"", said)

    def test_as_cron_and_systemd_start_it(self, name: str, other: OtherSession) -> None:
        """No terminal, closed standard input, next to nothing in the environment."""
        needed = ("DJANGO_SETTINGS_MODULE", "PGHOST", "PGPORT", "PGUSER", "PGPASSWORD", "PGDATABASE")
        few = {key: value for key, value in environment().items() if key in needed}
        shell = ("/bin/sh", "-c", 'exec "$@" <&-', "sh")
        process = start("run", name, "--", "sh", "-c", "echo out; exit 4", wrap=shell, env=few, start_new_session=True)
        assert ended(process) == (4, b"out\n", b"")

    def test_from_python(self, name: str, other: OtherSession) -> None:
        """An error with the status, never SystemExit."""
        with pytest.raises(Status) as caught:
            called("run", name, "--", "sh", "-c", "exit 3")
        assert (caught.value.returncode, str(caught.value)) == (3, "sh ended with exit status 3.")

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process was started with")
    @pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Chicago", None])
    def test_the_time_zone_of_the_machine(self, zone: str | None, name: str) -> None:
        """Django puts its own into the environment, by default America/Chicago."""
        env = {key: text for key, text in environment().items() if key != "TZ"} | ({"TZ": zone} if zone else {})
        process = start("run", name, "--", "sh", "-c", "echo ${TZ-none}", env=env)
        assert ended(process) == (0, f"{zone or 'none'}\n".encode(), b"")

    @pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Chicago"])
    def test_a_time_zone_that_nobody_knows_of(
        self, zone: str, name: str, told: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that was set since stays, and where it cannot be told that of Django does."""
        monkeypatch.setenv("TZ", zone)
        monkeypatch.setattr(surroundings, "AT_START", told.parent / "missing")
        assert outcome("run", name, "--", "sh", "-c", 'echo "$TZ" > "$1"', "sh", str(told)) == (0, "")
        assert told.read_text() == f"{zone}\n"

    @pytest.mark.parametrize("arguments", [("x",), ("x", "--"), ("--", "true"), ("--int", "1")], ids=str)
    def test_both_have_to_be_named(self, arguments: tuple[str, ...]) -> None:
        assert outcome("run", *arguments) == (2, "Name a lock, and after -- the command: run KEY -- COMMAND.")

    def test_never_in_a_transaction(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            status, message = outcome("run", name, "--", "true")
        assert status == 69
        assert "would be freed before the transaction" in message

    def test_shared(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name), shared=True)
        assert outcome("run", name, "--shared", "--", "true") == (0, "")
        assert outcome("run", name, "--", "true")[0] == 75

    def test_signals_that_are_ignored_stay_so(self, name: str, other: OtherSession) -> None:
        """As nohup does it; what Python itself ignores, such as SIGPIPE, is no wish of anybody."""
        with handled(signal.SIGHUP, signal.SIG_IGN):
            assert outcome("run", name, "--", "sh", "-c", "kill -HUP $$")[0] == 0
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert outcome("run", name, "--", "sh", "-c", "kill -HUP $$")[0] == 129

    def test_nothing_is_left(self, name: str, other: OtherSession) -> None:
        before = [signal.getsignal(number) for number in child.PASSED_ON], len(os.listdir("/dev/fd"))
        assert outcome("run", name, "--", "true")[0] == 0
        assert ([signal.getsignal(number) for number in child.PASSED_ON], len(os.listdir("/dev/fd"))) == before
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == inbox.THREAD], "threads")

    def test_in_another_thread(self, name: str, other: OtherSession) -> None:
        assert Thread(lambda: outcome("run", name, "--", "sh", "-c", "exit 3")).result()[0] == 3

    def test_where_the_ends_of_children_are_ignored(self, name: str, other: OtherSession) -> None:
        with handled(signal.SIGCHLD, signal.SIG_IGN):
            assert outcome("run", name, "--", "sh", "-c", "exit 3")[0] == 3
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
            # Another thread cannot change that, and so cannot know.
            assert Thread(lambda: outcome("run", name, "--", "true")).result()[0] == child.UNKNOWN


class TestBusy:
    def test_says_who_holds_it(self, name: str, other: OtherSession) -> None:
        """Case 64."""
        other.take(lock_key(name))
        status, out, errors = ended(start("run", name, "--", "echo", "never"))
        assert (status, out) == (75, b"")
        assert re.fullmatch(rf"CommandError: The lock {name!r} .* held by pid {other.pid} \(.*\n", errors.decode())

    def test_quietly(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        with pytest.raises(Status) as caught:
            called("run", name, "-v", "0", "--", "false")
        assert caught.value.returncode == 75

    def test_another_status(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        assert outcome("run", name, "--busy-exit-code", "3", "--", "false")[0] == 3
        assert called("run", name, "--busy-exit-code", "0", "--", "false").startswith(f"Skipped. The lock {name!r}")
        assert called("run", name, "--busy-exit-code", "0", "-v", "0", "--", "false") == ""

    @pytest.mark.parametrize("timeout", ["20", "none"])
    def test_waits(self, timeout: str, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        waiting = Thread(lambda: outcome("run", name, "--timeout", timeout, "--", "true"))
        wait_until(lambda: other.one(TRIES), "a try")
        other.drop(lock_key(name))
        assert waiting.result() == (0, "")

    def test_waits_in_vain(self, name: str, other: OtherSession) -> None:
        """Case 73."""
        other.take(lock_key(name))
        status, message = outcome("run", name, "--timeout", "0.1", "--", "true")
        assert status == 75
        assert f"within 0.1 s: held by pid {other.pid}" in message

    @pytest.mark.parametrize(
        "option",
        [("--timeout", "soon"), ("--timeout", "-1"), ("--grace", "none"), ("--busy-exit-code", "256")],
        ids=str,
    )
    def test_wrong_options(self, option: tuple[str, str]) -> None:
        assert option[1] in outcome("run", "x", *option, "--", "true")[1]

    @pytest.mark.parametrize(
        ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)], ids=["INT", "TERM"]
    )
    def test_interrupted_while_it_waits(self, number: int, status: int, name: str, other: OtherSession) -> None:
        """Case 67: at once, in few words, and nobody is left in the queue."""
        other.take(lock_key(name))
        # A process that is killed would leave half a file of what was covered.
        env = environment(**(measured() if number == signal.SIGINT else {}))
        process = start("run", name, "--timeout", "none", "--", "echo", "never", env=env)
        wait_until(lambda: other.one(TRIES), "a try")
        process.send_signal(number)
        assert ended(process) == (status, b"", b"")
        assert other.waiters(lock_key(name)) == 0


# The sessions that have tried to take a lock, and do nothing now.
TRIES = (
    "SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'idle'"
    " AND query LIKE '%try_advisory%' AND datname = current_database()"
)


class TestSignals:
    def test_are_passed_on_once(self, name: str, other: OtherSession) -> None:
        process = start("run", name, "--", sys.executable, "-c", COUNT)
        ready(process)
        for word in ("HUP", "INT", "QUIT", "TERM", "USR1", "WINCH"):
            process.send_signal(signal.Signals[f"SIG{word}"])
            assert said(process) == f"SIG{word}"
        assert other.holders(lock_key(name)) == 1
        assert ended(process) == (0, b"", b"")

    def test_stopped_and_continued_together(self, name: str, other: OtherSession) -> None:
        # In a process group of its own, or the kernel would stop nobody whom no shell could continue.
        command = ("run", name, "--", sys.executable, "-c", COUNT, "CONT")
        process = start(*command, env=environment(**measured()), preexec_fn=os.setpgrp)
        pid = ready(process)
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state(pid) == state(process.pid) == "T", "stop of both")
        assert other.holders(lock_key(name)) == 1
        process.send_signal(signal.SIGCONT)
        assert ended(process) == (0, b"SIGCONT\n", b"")

    def test_the_status_is_that_of_the_command(self, name: str, told: Path, other: OtherSession) -> None:
        command = f"trap 'exit 5' TERM; echo $$ >{told}; while :; do sleep 0.05; done"
        status, *_ = run_and(lambda pid: interrupt(signal.SIGTERM), told, name, "--", "sh", "-c", command)
        assert status == 5

    def test_they_go_to_the_whole_group_which_is_waited_for(
        self, name: str, told: Path, tmp_path: Path, other: OtherSession
    ) -> None:
        """A shell ends at once, and what it had started is still at work: the lock stays until that is done."""
        trap = f"touch {tmp_path}/trapped; until [ -e {tmp_path}/go ]; do sleep 0.02; done; touch {tmp_path}/done; exit"

        def act(pid: int) -> None:
            interrupt(signal.SIGTERM)
            wait_until((tmp_path / "trapped").exists, "the signal")
            for _ in range(5):
                assert not other.is_free(lock_key(name))
            (tmp_path / "go").touch()

        work = f"trap '{trap}' TERM; echo $$ >{told}; while :; do sleep 0.02; done"
        assert run_and(act, told, name, "--", "sh", "-c", 'sh -c "$0" & wait', work)[0] == 143
        assert (tmp_path / "done").exists()
        assert other.is_free(lock_key(name))

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt its orphans")
    def test_the_first_process_of_a_container(self, name: str, other: OtherSession) -> None:
        """It is the parent of what the command leaves, and nobody else lets go of that when it has ended."""
        adopt = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
        shell = "sleep 500 & echo ready $$; exec sleep 500"
        process = start(
            "run",
            name,
            "--grace",
            "500",
            "--",
            "sh",
            "-c",
            shell,
            wrap=(sys.executable, "-c", adopt),
            env=environment(**measured()),
        )
        ready(process)
        process.terminate()
        assert ended(process)[0] == 128 + signal.SIGTERM
        assert other.is_free(lock_key(name))

    def test_what_goes_on_all_the_same_is_left(self, name: str, told: Path, other: OtherSession) -> None:
        """After the time of grace: nobody asked for its death."""
        line = ("--grace", "0.1", "--", "sh", "-c", 'sh -c "$0" & wait', stubborn(told))
        assert run_and(lambda pid: interrupt(signal.SIGTERM), told, name, *line)[0] == 143
        pid = int(told.read_text())
        assert is_alive(pid)
        os.kill(pid, signal.SIGKILL)

    @pytest.mark.parametrize("stop", [signal.SIGSTOP, signal.SIGTTIN], ids=str)
    def test_a_stopped_command_is_continued_to_end(
        self, stop: signal.Signals, name: str, told: Path, other: OtherSession
    ) -> None:
        """Also one that wants a terminal where there is none."""

        def act(pid: int) -> None:
            os.kill(pid, stop)
            wait_until(lambda: state(pid) == "T", "stop")
            interrupt(signal.SIGUSR1)
            interrupt(signal.SIGTERM)

        command = f"trap 'got=1' USR1; trap 'exit 4$got' TERM; echo $$ >{told}; while :; do sleep 0.02; done"
        assert run_and(act, told, name, "--", "sh", "-c", command)[0] == 41

    def test_a_command_that_waits_for_a_terminal(self, name: str, told: Path, other: OtherSession) -> None:
        """It is looked for now and then, and meanwhile somebody else may continue the command."""

        def act(pid: int) -> None:
            wait_until(lambda: state(pid) == "T", "stop")
            looks = threading.Event()
            assert not looks.wait(1.1 * child.TICK)
            os.kill(pid, signal.SIGCONT)

        assert run_and(act, told, name, "--", "sh", "-c", f"echo $$ >{told}; kill -TTOU $$; exit 6")[0] == 6


class TestLoss:
    def lose(self, other: OtherSession, key: LockKey) -> float:
        begin = time.monotonic()
        other.kill(other.holder(key))
        return begin

    def test_the_command_is_ended(self, name: str, other: OtherSession) -> None:
        process = start("run", name, "--", sys.executable, "-c", "print('ready 0', flush=True); input()")
        ready(process)
        self.lose(other, lock_key(name))
        status, _, errors = ended(process)
        assert status == 70
        last = errors.decode().splitlines()[-1]
        assert last.startswith(f"CommandError: The lock {name!r} on 'default' was lost: ")
        assert last.endswith(f"It ended with exit status 143: {sys.executable}")

    def test_whatever_its_status(self, name: str, told: Path, other: OtherSession) -> None:
        command = f"trap 'exit 0' TERM; echo $$ >{told}; while :; do sleep 0.02; done"
        lose = partial(self.lose, other, lock_key(name))
        status, message, _ = run_and(lambda pid: lose(), told, name, "--", "sh", "-c", command)
        assert (status, "It ended with exit status 0: sh" in message) == (70, True)

    def test_one_that_does_not_obey_is_killed(self, name: str, told: Path, other: OtherSession) -> None:
        line = ("--grace", "0.3", "--", "sh", "-c", stubborn(told))
        status, message, begin = run_and(lambda pid: self.lose(other, lock_key(name)), told, name, *line)
        assert time.monotonic() - begin >= 0.3
        assert (status, "exit status 137" in message) == (70, True)
        assert not is_alive(int(told.read_text()))

    def test_what_it_has_started_is_killed_too(self, name: str, told: Path, other: OtherSession) -> None:
        line = ("--grace", "0.2", "--", "sh", "-c", 'sh -c "$0" & wait', stubborn(told))
        status, message, _ = run_and(lambda pid: self.lose(other, lock_key(name)), told, name, *line)
        assert (status, "exit status 143" in message) == (70, True)
        wait_until(lambda: not is_alive(int(told.read_text())), "the end of all")

    def test_what_is_left_behind_is_its_own_affair(self, name: str, told: Path, other: OtherSession) -> None:
        """Where nothing happens: the lock is about the command that was named."""
        assert outcome("run", name, "--", "sh", "-c", f"exec >{told} 2>&1; sleep 60 & echo $!") == (0, "")
        pid = int(told.read_text())
        assert other.is_free(lock_key(name))
        assert is_alive(pid)
        os.kill(pid, signal.SIGKILL)

    def test_lost_before_the_start(self, name: str, told: Path, other: OtherSession) -> None:
        def lose(handle: LockHandle, **kwargs: object) -> None:
            self.lose(other, handle.key)
            assert handle.lost.wait(LIMIT)

        lock_acquired.connect(lose)
        try:
            status, message = outcome("run", name, "--", "touch", str(told))
        finally:
            lock_acquired.disconnect(lose)
        assert (status, "It was not started: touch" in message) == (70, True)
        assert not told.exists()


class TestInterrupted:
    def test_by_an_error_the_command_has_ended_before_it_is_raised(
        self, name: str, told: Path, other: OtherSession
    ) -> None:
        """As by a time limit of the caller that is a signal."""

        class TimeLimitExceeded(Exception):
            pass

        def raise_it(number: int, frame: object) -> NoReturn:
            raise TimeLimitExceeded

        with handled(signal.SIGVTALRM, raise_it), pytest.raises(TimeLimitExceeded):
            run_and(
                lambda pid: interrupt(signal.SIGVTALRM), told, name, "--grace", "0.1", "--", "sh", "-c", stubborn(told)
            )
        assert not is_alive(int(told.read_text()))
        assert other.is_free(lock_key(name))

    def test_at_every_line_while_it_starts(self) -> None:
        """Nothing is left running, also where the interrupt comes right before its pid is known."""
        seconds = f"300.{os.getpid()}"
        for point in range(1, 1000):
            with contextlib.closing(inbox.Inbox()) as messages, contextlib.closing(Terminal()) as terminal, same_mask():
                messages.put("lost")  # so that it is ended as soon as it has begun
                run: Any = partial(child.Child(messages, terminal, LIMIT).run, ["sleep", seconds])
                place = interrupt_at(point, raises(ZeroDivisionError), run)
            assert subprocess.run(["pgrep", "-f", f"^sleep {seconds}"], check=False, capture_output=True).stdout == b""
            if place is None:
                break
        else:
            pytest.fail("never ran to its end")
        assert point > 30

    @pytest.mark.timeout(LIMIT)
    def test_what_is_no_command_is_raised_where_it_is_waited_for(self) -> None:
        command: Any = [5]
        with pytest.raises(TypeError):
            child.supervise(command, threading.Event(), LIMIT)

    def test_before_the_thread_has_begun(self, monkeypatch: pytest.MonkeyPatch, told: Path) -> None:
        """It starts nothing then."""
        threads: list[Callable[[], None]] = []

        def strike(function: Callable[[], None]) -> NoReturn:
            threads.append(function)
            raise ZeroDivisionError

        monkeypatch.setattr(child, "start_thread", strike)
        with contextlib.closing(inbox.Inbox()) as messages, contextlib.closing(Terminal()) as terminal:
            with pytest.raises(ZeroDivisionError):
                child.Child(messages, terminal, LIMIT).run(["touch", str(told)])
            threads[0]()
        assert not told.exists()

    def test_killed_and_the_lock_stays_as_long_as_the_command_runs(self, name: str, other: OtherSession) -> None:
        process = start("run", name, "--", sys.executable, "-c", COUNT, "deaf")
        pid = ready(process)
        process.kill()
        assert process.wait(LIMIT) == -signal.SIGKILL
        assert is_alive(pid)
        assert not other.is_free(lock_key(name))
        os.kill(pid, signal.SIGUSR2)
        other.wait_until_free(lock_key(name))
        ended(process)


# -- A terminal -------------------------------------------------------------------------------------------------------

LAUNCH = """
import fcntl, os, sys, termios
terminal = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for number in range(3):
    os.dup2(terminal, number)
os.execvp(sys.argv[2], sys.argv[2:])
"""
# A script that says when it gets a Ctrl-C, and goes on.
SCRIPT = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda number, frame: print("script: Ctrl-C", flush=True))
print("after", subprocess.Popen(sys.argv[1:]).wait(), flush=True)
"""
CTRL_C, CTRL_D, CTRL_Z = "\x03", "\x04", "\x1a"


class Screen:
    """A program on a terminal of its own, in a session that it leads."""

    def __init__(self, *command: str) -> None:
        self.keys, terminal = pty.openpty()
        self.text = self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, os.ttyname(terminal), *command],
            env=environment(TERM="dumb", PS1="$ ", HISTFILE="", **measured()),
            cwd=PROJECT,
            start_new_session=True,
        )
        os.close(terminal)

    def type(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def resize(self, rows: int) -> None:
        fcntl.ioctl(self.keys, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))

    def expect(self, text: str) -> str:
        """Wait until a text is shown; return what was shown before."""
        wait_until(lambda: text in self._read(), lambda: f"{text!r} in {self.text!r}")
        before, _, self.text = self.text.partition(text)
        return before

    def _read(self) -> str:
        with contextlib.suppress(OSError):  # the other end is closed
            if select.select([self.keys], [], [], 0)[0]:
                shown = os.read(self.keys, 4096).decode(errors="replace")
                self.text += shown
                self.seen += shown
        return self.text

    def end(self) -> int:
        """Wait for the end of the program, and return its exit status."""
        wait_until(lambda: self._read() is None or self.process.poll() is not None, lambda: f"end: {self.text}")
        return int(self.process.wait(LIMIT))

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)
        with contextlib.suppress(OSError):
            os.close(self.keys)


@pytest.fixture
def open_screen(other: OtherSession) -> Iterator[Callable[..., Screen]]:
    screens: list[Screen] = []

    def open_one(*command: str) -> Screen:
        screens.append(Screen(*command))
        return screens[-1]

    yield open_one
    for screen in screens:
        screen.close()


@pytest.mark.slow
class TestTerminal:
    def test_a_job_of_its_own(self, name: str, open_screen: Callable[..., Screen], other: OtherSession) -> None:
        """Whatever comes from the terminal comes once. Nothing is stopped where no shell could continue it."""
        screen = open_screen(*PROGRAM, "run", name, "--", sys.executable, "-c", COUNT, "CONT")
        screen.expect("ready")
        screen.type(CTRL_C)
        screen.expect("SIGINT")
        screen.resize(50)
        screen.expect("SIGWINCH")
        screen.type(CTRL_Z)
        screen.expect("SIGCONT")
        screen.type(CTRL_D)
        assert screen.end() == 0
        assert (screen.seen.count("SIGINT"), screen.seen.count("SIGWINCH")) == (1, 1)
        assert other.is_free(lock_key(name))

    def test_a_part_of_a_script(self, name: str, open_screen: Callable[..., Screen], other: OtherSession) -> None:
        """The foreground is the script's, so that it and the command get a Ctrl-C: each of them once."""
        run = (*PROGRAM, "run", name, "--", sys.executable, "-c", COUNT, "deaf")
        screen = open_screen(sys.executable, "-c", SCRIPT, *run)
        screen.expect("ready ")
        screen.resize(50)
        screen.expect("SIGWINCH")
        screen.type(CTRL_C)
        wait_until(lambda: "SIGINT" in screen._read() and "script: Ctrl-C" in screen.text, "both")
        os.kill(int(re.findall(r"ready (\d+)", screen.seen)[0]), signal.SIGUSR2)
        screen.expect("after 0")
        assert screen.end() == 0
        assert [screen.seen.count(text) for text in ("SIGINT", "SIGWINCH", "script: Ctrl-C")] == [1, 1, 1]

    def test_one_that_reads_in_a_script(
        self, name: str, open_screen: Callable[..., Screen], other: OtherSession
    ) -> None:
        """It gets the terminal when it asks for it; and the script its share of what is typed then."""
        screen = open_screen(sys.executable, "-c", SCRIPT, *PROGRAM, "run", name, "--", "cat")
        screen.type("hello\n")
        screen.expect("hello")
        screen.expect("hello")
        screen.type(CTRL_C)
        screen.expect("script: Ctrl-C")
        screen.expect("after 130")
        assert screen.end() == 0

    def test_the_end_of_a_terminal(self, name: str, open_screen: Callable[..., Screen], other: OtherSession) -> None:
        screen = open_screen(*PROGRAM, "run", name, "--", sys.executable, "-c", "print('ready', flush=True); input()")
        screen.expect("ready")
        os.close(screen.keys)
        assert screen.process.wait(LIMIT) == 129
        assert other.is_free(lock_key(name))

    def test_job_control(self, name: str, open_screen: Callable[..., Screen], other: OtherSession) -> None:
        screen = open_screen(tool("bash", "bash"), "--norc", "--noprofile", "--noediting", "-i")
        screen.type("set -b\n")
        screen.type(f"{shlex.join([*PROGRAM, 'run', name, '--', 'cat'])} &\n")
        screen.expect("Stopped")  # it wants to read
        screen.type("bg; fg\n")
        screen.type("one\n")
        screen.expect("one\r\n")
        screen.expect("one\r\n")
        screen.type(CTRL_Z)
        screen.expect("Stopped")
        assert other.holders(lock_key(name)) == 1
        screen.type("fg\n")
        screen.type("two\n")
        screen.expect("two\r\n")
        screen.expect("two\r\n")
        screen.type(CTRL_C)
        screen.expect("$ ")
        screen.type("echo status $?\n")
        screen.expect("status 130")
        screen.type("exit 5\n")
        assert screen.end() == 5

    def test_tmux(self, name: str, tmp_path: Path, other: OtherSession) -> None:
        tmux = (tool("tmux", "tmux"), "-S", f"{tmp_path}/tmux", "-f", "/dev/null")

        def tell(*arguments: str) -> str:
            answer = subprocess.run(
                [*tmux, *arguments], check=True, stdout=subprocess.PIPE, env=environment(HISTFILE="")
            )
            return answer.stdout.decode()

        def see(text: str, count: int = 1) -> None:
            wait_until(lambda: tell("capture-pane", "-p").count(text) >= count, lambda: tell("capture-pane", "-p"))

        shell = f"cd {PROJECT} && exec {tool('bash', 'bash')} --norc --noprofile --noediting"
        tell("new-session", "-d", "-x", "200", "-y", "50", shell)
        try:
            tell("send-keys", f"{shlex.join([*PROGRAM, 'run', name, '--', 'cat'])}; echo status $?", "Enter")
            tell("send-keys", "hello", "Enter")
            see("hello", 2)
            tell("send-keys", "C-z")
            see("Stopped")
            assert other.holders(lock_key(name)) == 1
            tell("send-keys", "fg", "Enter")
            tell("send-keys", "again", "Enter")
            see("again", 2)
            tell("send-keys", "C-c")
            other.wait_until_free(lock_key(name))
        finally:
            tell("kill-server")


# -- terminate --------------------------------------------------------------------------------------------------------


class Keyboard:
    """Somebody who answers a question, after having done something."""

    def __init__(self, answer: str, action: Callable[[], object] = lambda: None) -> None:
        self.answer = answer
        self.action = action

    def readline(self) -> str:
        self.action()
        return self.answer


class TestTerminate:
    @pytest.fixture
    def holder(self, name: str, other: OtherSession) -> Iterator[OtherSession]:
        session = OtherSession()
        session.take(lock_key(name))
        yield session
        session.close()

    def test_ends_a_holder(
        self, name: str, holder: OtherSession, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin", Keyboard("yes\n"))
        head, line, said = called("terminate", str(holder.pid)).splitlines()
        assert (head.split()[0], line.split()[3:5]) == ("NAME", [str(holder.pid), "other-session"])
        assert said == f"The session {holder.pid} has ended."
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize(("answer", "message"), [("no\n", "Cancelled."), ("y\n", "Cancelled."), ("", "--no-input")])
    def test_asks_before(
        self, answer: str, message: str, holder: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin", Keyboard(answer))
        status, text = outcome("terminate", str(holder.pid), verbosity=0)
        assert (status, message in text) == (1, True)
        assert holder.one("SELECT 1") == 1

    def test_does_not_ask(self, name: str, holder: OtherSession, other: OtherSession) -> None:
        """And is quiet where nothing is to be said."""
        with pytest.raises(CommandError):
            called("terminate", "1", "--no-input", verbosity=0)
        assert called("terminate", str(holder.pid), "--no-input", verbosity=0) == ""
        assert other.is_free(lock_key(name))

    def test_ends_one_that_waits(self, name: str, holder: OtherSession, other: OtherSession) -> None:
        waiting = Thread(lambda: advisory_lock(name).acquire())
        other.wait_for_waiters(lock_key(name))
        (pid,) = [lock.pid for lock in waiting_locks()]
        assert called("terminate", str(pid), interactive=False).endswith(f"The session {pid} has ended.\n")
        with pytest.raises(OperationalError):
            waiting.result()

    def test_nobody_else(self, name: str, other: OtherSession) -> None:
        """A session without a lock, one with a lock of another database, the own one."""
        elsewhere = OtherSession("other")
        elsewhere.take(lock_key(name))
        for session in (other, elsewhere):
            status, message = outcome("terminate", str(session.pid), "--no-input")
            assert (status, "holds an advisory lock on 'default'" in message) == (1, True)
        with advisory_lock(name):
            for alias in ("default", "same"):
                status, message = outcome("terminate", str(backend_pid()), "--no-input", database=alias)
                assert (status, "the own session" in message) == (1, True)
        assert outcome("terminate", str(elsewhere.pid), "--no-input", database="other") == (0, "")
        elsewhere.close()

    @pytest.mark.parametrize("pid", ["x", "0", "-1", str(2**31), "²"])
    def test_no_pids(self, pid: str) -> None:
        assert outcome("terminate", pid)[1].startswith("Error: ")

    def test_one_that_has_gone_meanwhile(
        self, holder: OtherSession, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin", Keyboard("yes\n", lambda: other.kill(holder.pid)))
        assert f"The session {holder.pid} had ended" in called("terminate", str(holder.pid))

    def test_one_that_has_let_go_meanwhile(
        self, name: str, holder: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin", Keyboard("yes\n", lambda: holder.drop(lock_key(name))))
        assert f"The session {holder.pid} had ended, or let go" in called("terminate", str(holder.pid))
        assert holder.one("SELECT 1") == 1

    def test_what_a_role_may_not_do(self, name: str, holder: OtherSession, other: OtherSession) -> None:
        other.raw.execute(f'CREATE ROLE "{name}"')
        try:
            with transaction.atomic():
                value(f"SELECT set_config('role', '{name}', true)")
                status, message = outcome("terminate", str(holder.pid), "--no-input")
                assert value("SELECT 1") == 1
        finally:
            other.raw.execute(f'DROP ROLE "{name}"')
        assert (status, "may not end the session" in message) == (77, True)
        assert holder.one("SELECT 1") == 1

    def test_other_errors_stay(self, holder: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise ProgrammingError("of another kind")

        monkeypatch.setattr(terminating, "end_session", fail)
        status, message = outcome("terminate", str(holder.pid), "--no-input")
        assert (status, message) == (69, "of another kind")

    def test_one_that_does_not_end(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(terminating, "TIMEOUT", 0.1)
        with new_server() as server, server.alias("frozen"), contextlib.closing(OtherSession("frozen")) as session:
            session.take(lock_key(name))
            with server.frozen([session.pid]):
                status, message = outcome("terminate", str(session.pid), "--no-input", database="frozen")
            assert (status, message) == (75, f"The session {session.pid} was told to end, but is still there.")
