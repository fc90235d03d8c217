"""The list of breakages: each still fits the package, breaks it in a way of its own, and names tests that there are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutation.__main__ import judge, table
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
    first, second, third = MUTANTS[:3]
    logged = "ERROR    django_advisory_lock:handles.py:1 Lost."
    results = [
        judge(first, 1, f"..F\n{logged}\nFAILED tests/test_owners.py::test_it[a b] - AssertionError\n1 failed"),
        judge(second, 0, "3 passed"),
        judge(third, 1, ""),
    ]
    rows = table(results).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == [
        "`test_owners.py::test_it` |",
        "**nobody** |",
        "a limit of time |",
    ]


@pytest.mark.parametrize("status", [2, 4, 5])
def test_a_copy_that_cannot_be_imported_proves_nothing(status: int) -> None:
    with pytest.raises(SystemExit, match="ended with"):
        judge(MUTANTS[0], status, "")
