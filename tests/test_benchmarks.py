"""The benchmarks: that they run, that their numbers have the right shape, and that the page has what they write.

Nothing here depends on how fast a machine is.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, program
from benchmarks.measuring import Plot, Report, Spread, Table, interleave, jain, percentile, ratio
from benchmarks.peers import BARE, OURS, PGWARE, WRAPPER, pg_lock
from benchmarks.situations import SITUATIONS
from benchmarks.witness import Outcome, Witness
from tests.support import LIMIT, OtherSession, environment, output, spawn
from tests.test_docs import BLOCKS

PROJECT = Path(__file__).resolve().parent.parent
PAGE = program.PAGE.read_text(encoding="utf-8")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        check=False,
        cwd=PROJECT,
        env=environment(DJANGO_SETTINGS_MODULE="benchmarks.settings"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2.5 * LIMIT,
    )


@pytest.fixture(scope="module")
def quick(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run finds, by part."""
    path = tmp_path_factory.mktemp("benchmarks") / "figures.json"
    done = run("--quick", "--json", path)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(path.read_text())
    for part in figures.values():
        for name in part["tables"]:
            assert f"\n{name}\n\n| " in done.stdout
    return figures


@pytest.mark.slow
class TestQuickRun:
    def test_each_part_makes_the_tables_that_have_a_place(self, quick: dict[str, Any]) -> None:
        assert {name: tuple(part["tables"]) for name, part in quick.items()} == program.TABLES

    def test_ratios(self, quick: dict[str, Any]) -> None:
        for form, of_form in {**quick["pair"]["ratios"], **quick["tasks"]["ratios"]}.items():
            assert of_form[BARE] == 1, form
            assert of_form[OURS] > 0, form
        for size in ("2", "10"):
            assert min(quick["several"][size]) > 0

    def test_nobody_overlaps_in_a_hand_over(self, quick: dict[str, Any]) -> None:
        figures = {name: each for name, each in quick["handover"].items() if name != "tables"}
        assert {name.split(" 2 ")[0] for name in figures} == {"hot", "hot, timeout", "many"}
        for name, each in figures.items():
            assert each["overlaps"] == 0, name
        assert all(each["watched"] > 0 for each in figures.values())
        assert all(each["grants"] > 0 and each["fairness"] >= 0.5 for name, each in figures.items() if OURS in name)

    def test_the_stress_finds_no_fault_with_this_library(self, quick: dict[str, Any]) -> None:
        outcomes = {name: each for name, each in quick["stress"].items() if name.endswith(f" / {OURS}")}
        assert len(outcomes) >= len(SITUATIONS) - 2  # without PgBouncer
        assert {name: each for name, each in outcomes.items() if each["faults"]} == {}
        refused = {name for name, each in outcomes.items() if each["is_refused"]}
        assert refused <= {f"behind PgBouncer, transaction mode / {OURS}"}
        assert all(each["entered"] > 0 for name, each in outcomes.items() if name not in refused)

    def test_a_loss_is_told(self, quick: dict[str, Any]) -> None:
        for situation in ("the session is killed in the body", "the same, and Django connects anew"):
            outcome = quick["stress"][f"{situation} / {OURS}"]
            assert outcome["told"] == {"LockLost": outcome["entered"]}

    def test_the_stress_does_find_faults(self, quick: dict[str, Any]) -> None:
        """The negative control: what happens to others whatever the machine does."""
        stress = quick["stress"]
        assert stress[f"inside `atomic()`, the body fails / {WRAPPER}"]["leaked"] == 1
        if f"asyncio tasks of one process / {PGWARE}" in stress:
            assert stress[f"asyncio tasks of one process / {PGWARE}"]["overlaps"] > 0

    def test_room_and_losses(self, quick: dict[str, Any]) -> None:
        """The rule of PostgreSQL's manual is a floor, and all dedicated sessions notice their end."""
        memory, dedicated = quick["memory"], quick["dedicated"]
        assert all(taken >= promised for taken, promised in zip(memory["taken"], memory["promised"], strict=True))
        assert 100 < memory["a lock"] < 1000
        assert dedicated["noticed"] == dedicated["of"]
        assert quick["listing"]["100 20"] == 120

    def test_nothing_is_left(self, quick: dict[str, Any], other: OtherSession) -> None:
        assert other.one("SELECT to_regclass('benchmark_counter')") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--write"], "leave out --quick or --write"),
        (["--rounds", "1"], "at least 2"),
        (["--only", "nothing"], "invalid choice: 'nothing'"),
    ],
    ids=["write", "rounds", "only"],
)
def test_what_is_refused(arguments: list[str], message: str, other: OtherSession) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


class TestPage:
    def test_each_table_has_its_place_and_each_place_its_table(self) -> None:
        names = ["machine", *itertools.chain.from_iterable(program.TABLES.values())]
        assert sorted(program.places(PAGE)) == sorted(names)
        assert list(program.TABLES) == [*program.TABLES]
        assert set(program.TABLES) == set(program.NAMES)

    @pytest.mark.parametrize("name", [table for part in program.TABLES.values() for table in part])
    def test_each_place_is_filled(self, name: str) -> None:
        (content,) = re.findall(program.MARKED.format(name=name, text="(.*?)"), PAGE, flags=re.DOTALL)
        assert content.startswith("\n| ")
        assert re.search(r"Load average of the machine meanwhile: \d+\.\d to \d+\.\d\.\n$", content)

    def test_the_rows_of_the_stress_are_the_situations(self) -> None:
        (content,) = re.findall(program.MARKED.format(name="stress", text="(.*?)"), PAGE, flags=re.DOTALL)
        rows = [line.split(" | ")[0].strip("| ") for line in content.splitlines() if line.startswith("| ")]
        assert rows == ["situation", "---", *(name.strip() for name in SITUATIONS)]

    def test_pictures(self) -> None:
        assert sorted(re.findall(r"\]\(images/(\w+)\.svg\)", PAGE)) == sorted(program.PLOTS)
        assert {path.name for path in program.IMAGES.iterdir()} >= {f"{name}.svg" for name in program.PLOTS}

    def test_it_names_no_machine(self) -> None:
        texts = [PAGE, *(path.read_text() for path in program.IMAGES.glob("*.svg"))]
        assert not [text for text in texts if str(PROJECT) in text or os.sep + "tmp" in text]
        assert not [text for text in texts if len(socket.gethostname()) > 4 and socket.gethostname() in text]

    def test_filling_in(self, tmp_path: Path, other: OtherSession) -> None:
        page = tmp_path / "page.md"
        empty = [program.MARKED.format(name=name, text="old\n") for name in ("a", "machine")]
        page.write_text("before a\n{}\nbefore machine\n{}\n".format(*empty))
        table = Table("a", ["x"], [["1"]])
        program.write({"part": Report([table], load=(1.25, 0.5))}, page, tmp_path)
        assert page.read_text().startswith(
            "before a\n<!-- measured: a -->\n\n| x |\n| --- |\n| 1 |\n\n"
            "Load average of the machine meanwhile: 0.5 to 1.2.\n\n<!-- end of a -->\nbefore machine\n"
        )
        assert "PostgreSQL" in page.read_text()
        with pytest.raises(SystemExit, match="no place for b"):
            program.filled(page.read_text(), "b", "")


class TestPictures:
    PLOT = Plot("p", "Title", "y", {"a": [(1, Spread(1, 0.5, 2)), (10, Spread(3, 2, 4))]}, x="x")

    @pytest.mark.parametrize("axis", ["x", ""])
    def test_the_same_numbers_make_the_same_file(self, axis: str, tmp_path: Path) -> None:
        if find_spec("matplotlib") is None:
            pytest.skip("NOT TESTED: matplotlib is not installed.")
        lines = self.PLOT.lines if axis else {"a": [("`one`, two", Spread(1, 0.5, 2))]}
        made = []
        for name in ("first.svg", "second.svg"):
            plots.draw(Plot("p", "Title", "y", lines, x=axis), tmp_path / name)
            made.append((tmp_path / name).read_text())
        assert made[0] == made[1]
        assert "<dc:date>" not in made[0]
        assert ">Title</text>" in made[0]

    @pytest.mark.parametrize("colour", [plots.INK, *plots.COLOURS])
    @pytest.mark.parametrize("page", ["#ffffff", "#0d1117", "#000000"])
    def test_it_can_be_read_on_light_and_dark_pages(self, colour: str, page: str) -> None:
        """WCAG 2.2 asks for a contrast of 3 for graphics."""
        low, high = sorted(self.luminance(each) for each in (colour, page))
        assert (high + 0.05) / (low + 0.05) >= 3

    def luminance(self, colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


class TestMeasuring:
    def test_spread(self) -> None:
        values = list(range(1, 102))
        random.Random(1).shuffle(values)
        spread = Spread.of(values)
        assert (spread.low, spread.median, spread.high) == (26, 51, 76)
        assert spread.median == statistics.median(values)
        assert str(Spread(1.236, 0.5, 2)) == "1.24 (0.50–2.00)"  # noqa: RUF001
        assert Spread.of([7]) == Spread(7, 7, 7)

    def test_interleave(self) -> None:
        """All take part in each round, in an order that changes, and the first rounds do not count."""
        calls: list[str] = []

        def call(name: str) -> float:
            calls.append(name)
            return len(calls)

        found = interleave({name: functools.partial(call, name) for name in "abc"}, 20)
        rounds = ["".join(calls[place : place + 3]) for place in range(0, len(calls), 3)]
        assert len(rounds) == 22
        assert {"".join(sorted(each)) for each in rounds} == {"abc"}
        assert len(set(rounds)) > 3
        assert sorted(itertools.chain.from_iterable(found.values())) == list(range(7, 67))

    def test_ratios_are_made_within_the_rounds(self) -> None:
        found = {"ours": [2.0, 20.0, 200.0], "theirs": [1.0, 10.0, 100.0]}
        assert ratio(found, "ours", "theirs") == Spread(2, 2, 2)

    def test_fairness(self) -> None:
        assert jain([5, 5, 5, 5]) == 1
        assert jain([8, 0, 0, 0]) == 0.25
        assert jain([0, 0]) == 0

    def test_percentile(self) -> None:
        values = list(range(100, 0, -1))
        assert percentile(values, 0.99) == 100
        assert percentile(values, 0.5) == 51
        assert percentile([], 0.5) == 0


class TestWitness:
    def test_it_sees_two_inside(self) -> None:
        witness = Witness()
        with witness.body(), witness.body():
            pass
        with witness.body():
            pass
        assert (witness.entered, witness.overlaps) == (3, 1)

    def test_that_of_the_processes_sees_two_inside(self, other: OtherSession) -> None:
        """The negative control: those who take nothing are seen together, at the pace of a lock too."""
        code = f"""if True:
            import contextlib, time
            from benchmarks import workers
            from benchmarks.handover import STAY
            from benchmarks.libraries import libraries
            from benchmarks.peers import OURS, Peer

            @contextlib.contextmanager
            def nothing(key, alias):
                time.sleep(0.0002)
                yield True
                time.sleep(0.0002)

            peers = [Peer("nothing", lock=nothing), *libraries()]
            workers.libraries = lambda: peers
            crew = workers.Workers(4)

            def overlaps(peer):
                return sum(each.overlaps for each in crew.take_turns(4, workers.Turns(peer, "lock", 1, 0.2, stay=STAY)))

            end = time.monotonic() + {LIMIT / 4}
            seen = 0
            while not seen and time.monotonic() < end:
                seen = overlaps("nothing")
            print(seen, overlaps(OURS))
            crew.close()
        """
        seen, of_ours = output(spawn(code, DJANGO_SETTINGS_MODULE="benchmarks.settings")).split()
        assert int(seen) > 0
        assert int(of_ours) == 0

    @pytest.mark.parametrize(
        ("outcome", "text"),
        [
            (Outcome(entered=7), "right (in 7)"),
            (Outcome(is_refused=True), "refused"),
            (Outcome(entered=7, overlaps=2, leaked=1), "**two were in: 2**, **stranded: 1** (in 7)"),
            (Outcome(entered=7, vanished=3, silent=4), "**writes lost: 3**, **lost in silence: 4** (in 7)"),
        ],
        ids=["right", "refused", "overlaps", "lost"],
    )
    def test_how_it_is_told(self, outcome: Outcome, text: str) -> None:
        assert str(outcome) == text


def test_the_wrapper_is_the_one_of_the_readme() -> None:
    (readme,) = (block.text for block in BLOCKS if block.page == "README.md" and "def pg_lock" in block.text)
    source = inspect.getsource(pg_lock)
    ours = source.replace("(name: str, using: str) -> Iterator[Any]", "(name)").replace(
        "connections[using]", "connection"
    )
    ours = re.sub(r'    """.*?"""\n', "", ours).replace("@contextlib.", "@")
    assert ours.strip() == readme.strip()
