"""Old and new code exclude each other while a release rolls out: the real libraries that people come from, and ours.

What is written in docs/migrating.md is taken from the page itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from django.db import transaction

from django_advisory_lock import LockKey, LockTimeout, advisory_lock, crc32_key, lock_key, try_advisory_lock
from tests.support import LIMIT, OtherSession, Thread, output, spawn, value
from tests.test_docs import BLOCKS, reader, run_section, table

pytestmark = pytest.mark.slow

PAGE = "docs/migrating.md"
NAMES = ["nightly-report", "shop.Account", "é 🔒", "x" * 200]


def peer(module: str, distribution: str) -> Any:
    """Import another library. Without it skip, or fail where every tool is required, as in `.ci/run`.

    All that are named here work with every Django that is supported.
    """
    if importlib.util.find_spec(module) is None:
        message = f"NOT TESTED: {distribution} is not installed."
        if os.environ.get("TESTS_REQUIRE_TOOLS"):
            pytest.fail(message)
        pytest.skip(message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # django-pglocks 2 asks to be replaced
        return importlib.import_module(module)


@pytest.fixture
def page(other: OtherSession) -> Iterator[dict[str, Any]]:
    """The functions that make the keys of others, as they stand on the page."""
    with reader() as namespace:
        yield run_section(PAGE, "whose-key-is-which", namespace)


Block = AbstractContextManager[Any]


def pglock(key: Any, **options: Any) -> Block:
    block: Block = peer("pglock", "django-pglock").advisory(key, timeout=0, **options)
    return block


def pgware(key: Any, **options: Any) -> Block:
    block: Block = peer("django_pg_utils", "django-pgware").advisory_lock(key, wait=False, **options)
    return block


def pglocks(key: Any, **options: Any) -> Block:
    block: Block = peer("django_pglocks", "django-pglocks").advisory_lock(key, wait=False, **options)
    return block


@contextlib.contextmanager
def pglock_in_transaction(key: Any) -> Iterator[bool]:
    with transaction.atomic():
        yield peer("pglock", "django-pglock").advisory(key, timeout=0, xact=True).acquire()


@contextlib.contextmanager
def ours_in_transaction(key: LockKey, **options: Any) -> Iterator[Any]:
    with transaction.atomic(), try_advisory_lock(key, **options) as lock:
        yield lock


def gets_in(block: Callable[[], Block]) -> bool:
    """Whether somebody else, in a thread with a session of its own, gets the lock."""

    def enter() -> bool:
        with block() as acquired:
            return bool(acquired)

    return Thread(enter).result()


TEXTS: list[tuple[Callable[..., Block], str]] = [
    (pglock, "pglock_key"),
    (pglock_in_transaction, "pglock_key"),
    (lambda key: peer("pglock", "django-pglock").advisory(key, timeout=0, xact=True), "pglock_key"),
    (pgware, "lock_key"),
    (pglocks, "lock_key"),
]
EDGES = (1, 4711, -5, 2**63 - 1, -(2**63) + 1)
SAME: list[tuple[Callable[..., Block], Any, LockKey]] = [
    *((hold, number, LockKey((number,))) for hold in (pglock, pgware) for number in EDGES),
    *((pgware, pair, LockKey.pair(*pair)) for pair in ((1, 2), (0, 8), (-1, 2**31 - 1))),
    (pglocks, (1, 2), LockKey.pair(1, 2)),
]


class TestRollingChange:
    """The old library holds: ours, with the old key, is busy. And the other way round."""

    @pytest.mark.parametrize("ours", [try_advisory_lock, ours_in_transaction])
    @pytest.mark.parametrize("text", NAMES, ids=lambda text: ascii(text)[:20])
    @pytest.mark.parametrize(("old", "function"), TEXTS, ids=["pglock", "acquire", "xact", "pgware", "pglocks"])
    def test_names(
        self, old: Callable[..., Block], function: str, text: str, ours: Callable[..., Block], page: dict[str, Any]
    ) -> None:
        self.exclude_each_other(lambda: old(text), lambda: ours(page[function](text)))

    @pytest.mark.parametrize("ours", [try_advisory_lock, ours_in_transaction])
    @pytest.mark.parametrize(("old", "number", "key"), SAME, ids=lambda part: getattr(part, "__name__", str(part)))
    def test_numbers(
        self, old: Callable[..., Block], number: Any, key: LockKey, ours: Callable[..., Block], other: OtherSession
    ) -> None:
        self.exclude_each_other(lambda: old(number), lambda: ours(key))

    def exclude_each_other(self, old: Callable[[], Block], new: Callable[[], Block]) -> None:
        for first, second in ((old, new), (new, old)):
            with first() as acquired:
                assert acquired
                assert not gets_in(second)
            assert gets_in(second)  # free again: nothing else was in the way

    @pytest.mark.parametrize("library", [pglock, pgware])
    def test_shared_locks(self, library: Callable[..., Block], page: dict[str, Any]) -> None:
        key = page["pglock_key" if library is pglock else "lock_key"]("nightly-report")
        with library("nightly-report", shared=True) as acquired:
            assert acquired
            assert gets_in(lambda: try_advisory_lock(key, shared=True))
            assert not gets_in(lambda: try_advisory_lock(key))
        with advisory_lock(key, shared=True):
            assert gets_in(lambda: library("nightly-report", shared=True))
            assert not gets_in(lambda: library("nightly-report"))

    def test_the_key_that_django_pglock_makes_of_a_function(self, page: dict[str, Any]) -> None:
        key, library = page["pglock_key"](f"{__name__}.work"), peer("pglock", "django-pglock")

        def work() -> bool:
            return gets_in(lambda: try_advisory_lock(key))

        locked: Callable[[], bool | None] = library.advisory(timeout=0, side_effect=library.Skip)(work)
        assert locked() is False
        with advisory_lock(key):
            assert Thread(locked).result() is None

    def test_waiting_for_the_old_release(self, page: dict[str, Any], other: OtherSession) -> None:
        """Ours waits in the server's queue until the other library is done, and the other way round."""
        key, library = page["pglock_key"]("nightly-report"), peer("pglock", "django-pglock")

        def wait_for_it() -> bool:
            with library.advisory("nightly-report", timeout=LIMIT) as acquired:
                return bool(acquired)

        def wait_for_ours() -> bool:
            with advisory_lock(key, timeout=LIMIT) as lock:
                return bool(lock)

        with library.advisory("nightly-report"):
            waiting = Thread(wait_for_ours)
            other.wait_for_waiters(key)
        assert waiting.result()
        with advisory_lock(key):
            waiting = Thread(wait_for_it)
            other.wait_for_waiters(key)
        assert waiting.result()

    def test_a_process_of_the_old_release(self, page: dict[str, Any], other: OtherSession) -> None:
        peer("pglock", "django-pglock")
        key = page["pglock_key"]("nightly-report")
        old = spawn("import pglock\nwith pglock.advisory('nightly-report'):\n print('in', flush=True)\n input()")
        try:
            assert self.first_line(old) == "in"
            with pytest.raises(LockTimeout, match="held by pid"), advisory_lock(key, timeout=0):
                pass
            assert "in" not in self.answer(old)
        finally:
            old.kill()
        with advisory_lock(key):
            refused = spawn("import pglock\nwith pglock.advisory('nightly-report', timeout=0) as got:\n print(got)")
            assert output(refused) == "False\n"

    def first_line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def answer(self, process: subprocess.Popen[str]) -> str:
        return process.communicate("\n", timeout=LIMIT)[0]

    def test_two_keys_side_by_side_are_a_hole(self, page: dict[str, Any]) -> None:
        with pglock("nightly-report") as acquired:
            assert acquired
            assert gets_in(lambda: try_advisory_lock("nightly-report"))

    def test_both_keys_for_one_release(self, other: OtherSession) -> None:
        """The release before, the one between and the one after: neighbours exclude each other."""
        with reader() as namespace:
            between = run_section(PAGE, "a-rolling-change", namespace)["nightly_report"]
        assert between() == "ran"
        for key in (crc32_key("nightly-report"), lock_key("nightly-report")):
            with advisory_lock(key):
                assert Thread(between).result() is None
            assert Thread(between).result() == "ran"


class TestKeys:
    """The numbers on the page, against those that the libraries compute."""

    @pytest.mark.parametrize(("library", "numbers", "recipe"), table(PAGE, "from", columns=3))
    def test_of_the_page(self, library: str, numbers: str, recipe: str, page: dict[str, Any]) -> None:
        key = eval(recipe, {**page, "name": "nightly-report"})
        if library.endswith("in any of them"):
            assert numbers in ("that int", "that pair")
            assert key in (LockKey((4711,)), LockKey.pair(1, 2))
        else:
            assert key.args == tuple(int(number) for number in numbers.split(", "))

    @pytest.mark.parametrize("text", NAMES, ids=lambda text: ascii(text)[:20])
    @pytest.mark.parametrize(
        ("library", "function"), [(pglock, "pglock_key"), (pgware, "lock_key"), (pglocks, "lock_key")]
    )
    def test_of_the_libraries(
        self, library: Callable[..., Block], function: str, text: str, page: dict[str, Any], other: OtherSession
    ) -> None:
        with library(text):
            assert other.holders(page[function](text)) == 1
            if library is pglock:  # it shows the first number signed, where pg_locks has it unsigned
                assert peer("pglock", "django-pglock").advisory_id(text)[1] == page[function](text).pg_locks[1]

    def test_of_django_pglocks_1(self, page: dict[str, Any], other: OtherSession) -> None:
        """By the statement that it sends; no environment has it and its successor."""
        with advisory_lock(page["pglocks1_key"]("nightly-report")):
            assert other.one("SELECT pg_try_advisory_lock(-2077502800)") is False

    @pytest.mark.parametrize("text", NAMES, ids=lambda text: ascii(text)[:20])
    def test_crc32(self, text: str, other: OtherSession) -> None:
        """The CRC-32 of zlib, gzip and PNG: unsigned, so that as a bigint it is never negative."""
        crc = 0xFFFFFFFF
        for byte in text.encode():
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
        assert crc32_key(text).args == (crc ^ 0xFFFFFFFF,) == (zlib.crc32(text.encode()),)

    def test_crc32_of_the_check_value(self) -> None:
        """The value that every implementation of CRC-32/ISO-HDLC is checked with."""
        assert crc32_key("123456789").args == (0xCBF43926,)

    def test_hashtext(self, other: OtherSession) -> None:
        """A number that is asked of the server meets code that lets the server compute it."""
        with advisory_lock(LockKey((int(value("SELECT hashtext('nightly-report')::bigint")),))):
            assert other.one("SELECT pg_try_advisory_lock(hashtext('nightly-report'))") is False


class TestRails:
    """The gem with_advisory_lock, by the statement that it sends."""

    @pytest.mark.parametrize("text", NAMES, ids=lambda text: ascii(text)[:20])
    def test_the_gem_of_today(self, text: str, page: dict[str, Any], other: OtherSession) -> None:
        """Version 2.0 to 7.5: [Zlib.crc32(name), prefix.to_i], each & 0x7fffffff."""
        keys = f"{zlib.crc32(text.encode()) & 0x7FFFFFFF},0"
        with advisory_lock(page["rails_key"](text)):
            assert other.one(f"SELECT pg_try_advisory_lock({keys}) AS t1 /* {text[:20]} */".replace("%", "%%")) is False
        assert other.one(f"SELECT pg_try_advisory_lock({keys})") is True
        assert not gets_in(lambda: try_advisory_lock(page["rails_key"](text)))
        assert gets_in(lambda: try_advisory_lock(crc32_key(text)))  # the other form, and another lock

    def test_the_gem_of_old(self, other: OtherSession) -> None:
        """Up to version 1.0, and Ruby code that locks by Zlib.crc32(name)."""
        number = zlib.crc32(b"nightly-report")
        with advisory_lock(crc32_key("nightly-report")):
            assert other.one(f"SELECT pg_try_advisory_lock({number}), 1.5") is False


class TestOwnHelper:
    def test_it_and_what_takes_its_place(self, other: OtherSession) -> None:
        with reader() as namespace:
            helper = run_section(PAGE, "your-own-helper", namespace)["pg_lock"]
            with helper("nightly-report") as acquired:
                assert acquired
                assert not gets_in(lambda: try_advisory_lock(crc32_key("nightly-report")))
            with advisory_lock(crc32_key("nightly-report")):
                assert not gets_in(lambda: helper("nightly-report"))

    def test_it_is_the_one_of_the_readme(self) -> None:
        helpers = [block.text for block in BLOCKS if "def pg_lock" in block.text]
        assert len(helpers) == 2
        assert all(min(helpers, key=len) in helper for helper in helpers)
