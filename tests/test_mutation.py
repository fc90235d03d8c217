"""The list of breakages: each still fits the package, breaks it in a way of its own, and names tests that there are."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mutation.__main__ import BEGIN, END, PAGE, TIME, Copy, Result, attempt, judge, summary, table
from mutation.mutants import MUTANTS, Mutant

PROJECT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_breakage_fits(mutant: Mutant) -> None:
    text = (PROJECT / "django_advisory_lock" / mutant.module).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(text.replace(mutant.old, mutant.new)))
    assert all((PROJECT / f"tests/{name}.py").exists() for name in mutant.tests)


def test_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_what_the_tests_say() -> None:
    first, second, third, fourth = MUTANTS[:4]
    logged = "ERROR    django_advisory_lock:handles.py:1 Lost."
    results = [
        judge(first, 1, f"..F\n{logged}\nFAILED tests/test_owners.py::test_it[a b] - AssertionError\n1 failed"),
        judge(second, 0, "3 passed"),
        judge(third, 1, ""),
        Result(fourth, "tests/test_owners.py::test_it", "", is_sound=False),
    ]
    rows = table(results).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == [
        "`test_owners.py::test_it` |",
        "**nobody** |",
        f"{TIME} |",
        "**nobody**: `test_owners.py::test_it` fails on the unbroken package too |",
    ]
    assert [result.is_noticed for result in results] == [True, False, True, False]
    assert summary(results) == (
        "1 of 4 were noticed by a test, 1 by a limit of time. 1 by a test that is unsound, which does not count."
    )


class FakeCopy(Copy):
    """A copy whose tests end as it is told, one run after another."""

    def __init__(self, *ends: tuple[int, str]) -> None:
        self.ends = list(ends)
        self.runs: list[tuple[bool, Sequence[str]]] = []
        self.is_broken = False

    @contextlib.contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        self.is_broken = True
        yield
        self.is_broken = False

    def test(self, tests: Sequence[str]) -> tuple[int, str]:
        self.runs.append((self.is_broken, tests))
        return self.ends.pop(0)


@pytest.mark.parametrize(("status", "is_sound"), [(0, True), (1, False), (4, False)])
def test_who_noticed_passes_on_the_unbroken_package(status: int, is_sound: bool) -> None:
    copy = FakeCopy((1, "FAILED tests/test_owners.py::test_it[a b] - AssertionError"), (status, ""))
    result = attempt(copy, MUTANTS[0])
    assert (result.is_sound, result.is_noticed) == (is_sound, is_sound)
    broken_run, second_run = copy.runs
    assert broken_run == (True, [f"tests/{name}.py" for name in MUTANTS[0].tests])
    assert second_run == (False, ["tests/test_owners.py::test_it"])


@pytest.mark.parametrize("end", [(0, "3 passed"), (1, "")], ids=["nobody", "time"])
def test_where_no_test_is_named_none_is_repeated(end: tuple[int, str]) -> None:
    copy = FakeCopy(end)
    assert attempt(copy, MUTANTS[0]).is_sound
    assert len(copy.runs) == 1


def test_a_copy_has_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DATABASE_URL", "PGHOST", "DJANGO_SETTINGS_MODULE", "COVERAGE_PROCESS_START"):
        monkeypatch.setenv(variable, "elsewhere")
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_it():\n    assert 'elsewhere' not in os.environ.values()\n"
    )
    copy = FakeCopy()
    copy.home = tmp_path
    status, text = Copy.test(copy, ["-p", "no:django", "test_it.py"])
    assert status == 0, text


@pytest.mark.parametrize("status", [2, 4, 5])
def test_a_copy_that_cannot_be_imported_proves_nothing(status: int) -> None:
    with pytest.raises(SystemExit, match="ended with"):
        judge(MUTANTS[0], status, "")


def test_the_page_has_a_row_for_each_breakage() -> None:
    """What `python -m mutation --write` wrote is of this list, and somebody noticed each."""
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("| ")][1:]
    assert [row[:2] for row in rows] == [[mutant.name, f"`{mutant.module}`"] for mutant in MUTANTS]
    assert not [row for row in rows if "**nobody**" in row[2]]
