"""The steps of the demo. Each waits for what it needs to have happened; none relies on luck or on a pause."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from django.db.models import Sum
from django.urls import reverse

from testproject.shop.models import Account, MonthlyReport, Order

from . import claims, server
from .claims import Claim
from .processes import BUSY, PATIENCE
from .scene import Scene
from .visitor import Visitor, port_of

if TYPE_CHECKING:
    from .stage import Stage

WORKERS = 4
REQUESTS = 5
HAND_OVER_LIMIT = 5.0  # seconds; a command that waits looks about every 0.25 s


def run_copies(copies: int, *options: str) -> tuple[Scene, int]:
    """Run refresh_reports in many processes at once; return how many were at work when all had decided, too."""
    with Scene() as scene:
        with server.held_back(MonthlyReport):
            for number in range(1, copies + 1):
                scene.start(f"copy {number}", "refresh_reports", f"--lock-busy-exit-code={BUSY}", *options)
            scene.wait(lambda: scene.at_work() + scene.ended() == copies, "every copy has decided")
            at_work = scene.at_work()
        scene.wait_for_all()
        return scene, at_work


def copies_with_lock(stage: Stage, copies: int) -> None:
    stage.step(
        f"refresh_reports, started {copies} times at once",
        "As cron does on as many hosts. The table of reports is held back until every copy has decided whether to"
        " work or to skip, so that all of them do meet.",
    )
    scene, at_work = run_copies(copies)
    skipped = [child for child in scene.children if child.skipped]
    stage.chart([scene.row(c, "skipped" if c.skipped else "worked", "○" * c.skipped) for c in scene.children])
    if skipped:
        stage.say(f"{skipped[0].name} said: {skipped[0].output.removeprefix('CommandError: ')}")
    stage.claim(claims.one_worked(copies - len(skipped), len(skipped), copies))
    stage.claim(claims.gave_up_meanwhile(at_work, len(skipped)))
    stage.claim(claims.never_two(scene.intervals()))
    stage.claim(claims.nothing_left(server.advisory_locks()))


def copies_without_lock(stage: Stage, copies: int) -> None:
    stage.step("The same with --no-lock", "What the lock prevents, and the proof that the log would show it.")
    scene, _ = run_copies(copies, "--no-lock")
    stage.chart([scene.row(child, "worked") for child in scene.children], collision=True)
    stage.claim(claims.all_collided(scene.intervals(), copies))
    stage.claim(claims.nothing_left(server.advisory_locks()))


def run_workers(*options: str, apart: bool = False) -> Scene:
    """Run sync_accounts in several processes; apart means in namespaces of their own, so that no locks meet."""
    Account.objects.update(synced_at=None)
    with Scene() as scene:
        with server.held_back(Account):
            for number in range(1, WORKERS + 1):
                namespace = {"SHOP_LOCK_NAMESPACE": f"worker-{number}"} if apart else {}
                scene.start(f"worker {number}", "sync_accounts", "--delay=0.01", *options, **namespace)
            scene.wait(lambda: scene.at_work() == WORKERS, "every worker is at its first account")
        scene.wait_for_all()
        return scene


def chart_workers(stage: Stage, scene: Scene, *, collision: bool = False) -> tuple[list[int], int]:
    """Draw the chart; return how many accounts each worker synced, and how many there were in all."""
    counts = [len(scene.runs(child)) for child in scene.children]
    notes = [f"{count} account{'s' * (count != 1)}" for count in counts]
    rows = [scene.row(child, note) for child, note in zip(scene.children, notes, strict=True)]
    stage.chart(rows, collision=collision)
    return counts, len({run.subject for run in scene.runs()})


def workers_with_lock(stage: Stage, accounts: int) -> None:
    stage.step(
        f"sync_accounts: {WORKERS} workers share {accounts} accounts",
        "One lock for each account: a worker that finds one busy goes on to the next.",
    )
    scene = run_workers()
    counts, distinct = chart_workers(stage, scene)
    stage.claim(claims.each_once(sum(counts), distinct, accounts))
    stage.claim(claims.no_account_twice(server.doubled_accounts(scene.since)))
    stage.claim(claims.shared_out(counts))
    stage.claim(claims.nothing_left(server.advisory_locks()))


def workers_without_lock(stage: Stage, accounts: int) -> None:
    some = min(accounts, 20)
    stage.step(
        f"The same with {some} accounts and locks that do not meet",
        "Each worker has a lock namespace of its own, so nobody is in anybody's way.",
    )
    scene = run_workers(f"--limit={some}", apart=True)
    counts, distinct = chart_workers(stage, scene, collision=True)
    doubled = server.doubled_accounts(scene.since)
    stage.claim(claims.accounts_collided(doubled, distinct, sum(counts)))
    stage.claim(claims.nothing_left(server.advisory_locks()))


def requests_with_lock(stage: Stage) -> None:
    month = f"{Order.objects.latest('placed_at').placed_at:%Y-%m}"
    stage.step(
        f"{REQUESTS} requests for the report of {month} at once, and the command for it",
        "To a web server of several threads. The page and the command take the same lock, so whoever comes first works;"
        " the others are told so.",
    )
    with ThreadPoolExecutor(REQUESTS) as pool, Scene() as scene:
        web = scene.start("server", "runserver", "--noreload", "--skip-checks", "127.0.0.1:0", PYTHONUNBUFFERED="1")
        scene.wait(lambda: port_of(web), "the web server listens")
        visitor = Visitor(port_of(web) or 0, reverse("shop:month", args=[month]))
        visitor.look()
        with server.held_back(MonthlyReport):
            answers = [pool.submit(visitor.submit) for _ in range(REQUESTS)]
            scene.wait(lambda: scene.at_work() or all(a.done() for a in answers), "one request is at work")
            command = scene.start("command", "generate_monthly_report", month, f"--lock-busy-exit-code={BUSY}")
            scene.wait(
                lambda: scene.at_work() + scene.ended() + sum(a.done() for a in answers) == REQUESTS + 1,
                "every request and the command have decided",
            )
        statuses = [answer.result() for answer in answers]
        scene.wait(command.has_ended, "the command has ended")
        outcome = "skipped" if command.skipped else "worked"
        stage.chart([scene.row(web, "worked"), scene.row(command, outcome, "○" * command.skipped)])
        stage.claim(claims.one_answered(statuses, command_skipped=command.skipped))
        stage.claim(claims.never_two(scene.intervals()))
        stage.claim(claims.nothing_left(server.advisory_locks()))


def killed_holder(stage: Stage) -> None:
    stage.step(
        "refresh_reports, killed in the middle of its work",
        "The holder hangs in an open transaction and another copy waits for the lock; then kill -9.",
    )
    with Scene() as scene:
        with server.held_back(MonthlyReport):
            holder = scene.start("holder", "refresh_reports")
            scene.wait(lambda: server.kept_waiting(MonthlyReport), "the holder wants to write")
            holder.pause()
        scene.wait(lambda: server.state_of("holder") == "idle in transaction", "the holder hangs in its transaction")
        heir = scene.start("next", "refresh_reports", f"--lock-timeout={PATIENCE:g}")
        scene.wait(lambda: server.has_tried("next") or scene.at_work() > 1, "the next one waits for the lock")
        scene.kill(holder)
        scene.wait_for_all()
    stage.chart([scene.row(holder, "killed", "†"), scene.row(heir, "waited, then worked")])
    runs = scene.runs(heir)
    after = (runs[0].started_at - scene.killed_at[holder.pid]).total_seconds() if runs else None
    stage.claim(Claim(scene.runs(holder)[0].finished_at is None, "the holder never finished"))
    stage.claim(claims.taken_over(after, HAND_OVER_LIMIT))
    stage.claim(claims.never_two(scene.intervals()))
    stage.claim(Claim(reports_add_up(), "the reports add up to the orders"))
    stage.claim(claims.nothing_left(server.advisory_locks()))


def periodic_work(stage: Stage) -> None:
    stage.step(
        "prune_runs on two hosts, whose clocks differ",
        "The first one is done before the second one starts, so the lock is free. What keeps the second one out is the"
        " interval of 12 hours. A third one ignores it.",
    )
    with Scene() as scene:
        scene.start("host 1", "prune_runs")
        scene.wait_for_all()
        second = scene.start("host 2", "prune_runs")
        scene.start("no interval", "prune_runs", "--lock-ignore-interval")
        scene.wait_for_all()
    counts = [len(scene.runs(child)) for child in scene.children]
    stage.chart([scene.row(child, "worked" if scene.runs(child) else "skipped") for child in scene.children])
    stage.say(f"{second.name} said: {second.output}")
    stage.claim(claims.once_in_its_interval(*counts))
    stage.claim(claims.nothing_left(server.advisory_locks()))


def reports_add_up() -> bool:
    reported = MonthlyReport.objects.aggregate(total=Sum("total"))["total"]
    return bool(reported == Order.objects.aggregate(total=Sum("amount"))["total"])
