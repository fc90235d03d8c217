"""Two people, or a person and a job, at one object in the admin: one works, the other is told who is at it."""

from __future__ import annotations

import contextlib
import importlib
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import django
import pytest
from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import connection, connections, transaction
from django.db.models import Count, F, Value
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse
from django.utils import translation

from django_advisory_lock import LockTimeout, advisory_lock, lock_key, model_key
from django_advisory_lock.guards.admin import LIMIT as MOST
from django_advisory_lock.guards.admin import AdvisoryLockAdminMixin, locked_action
from django_advisory_lock.owners import current_owner
from tests.admin_site import (
    Browser,
    client,
    installed,
    live_server,
    log_entries,
    serving,
    serving_urls,
    text_of,
    texts,
    user,
)
from tests.guards.test_command import run
from tests.support import LIMIT, OtherSession, Thread, output
from tests.test_interrupts import interrupt_at, raises
from tests.testapp.models import (
    Account,
    AccountProxy,
    Country,
    Essay,
    Legacy,
    Line,
    PremiumAccount,
    Profile,
    Reading,
    Tag,
    Token,
)

PASSWORD = "correct horse"
# Generic for mypy, and not when they run.
Plain: Any = admin.ModelAdmin
Inline: Any = admin.TabularInline
ModelForm: Any = forms.ModelForm
TABLES = (
    "django_admin_log",
    *(f"testapp_{name}" for name in ("line", "essay_tags", "essay", "tag", "profile", "premiumaccount", "membership")),
    *(f"testapp_{name}" for name in ("account", "country", "legacy", "reading", "token")),
)
EMPTY = "; ".join(f"DELETE FROM {table}" for table in TABLES)


@pytest.fixture(scope="module", autouse=True)
def admin_installed(django_db_setup: None) -> Iterator[None]:
    with installed():
        yield


@pytest.fixture(scope="module")
def boss(admin_installed: None) -> User:
    return user("boss", password=PASSWORD)


@pytest.fixture(autouse=True)
def clean(admin_installed: None) -> Iterator[None]:
    yield
    with connection.cursor() as cursor:
        cursor.execute(EMPTY)


@pytest.fixture(scope="module")
def session(admin_installed: None) -> Iterator[OtherSession]:
    made = OtherSession()
    yield made
    made.close()


@pytest.fixture
def other(session: OtherSession) -> Iterator[OtherSession]:
    """One session for all tests here, as there are many small ones; after each no lock may be left."""
    yield session
    session.one("SELECT pg_advisory_unlock_all()")
    names = [connections[alias].settings_dict["NAME"] for alias in ("default", "other")]
    left = "SELECT count(*) FROM pg_locks JOIN pg_database d ON database = d.oid WHERE locktype = 'advisory'"
    assert session.one(f"{left} AND datname = ANY(%s)", [names]) == 0
    assert not current_owner().entered, "a block was never left"


@contextlib.contextmanager
def atomic_requests(alias: str = "default") -> Iterator[None]:
    settings = connections.settings[alias]
    before = settings["ATOMIC_REQUESTS"]
    settings["ATOMIC_REQUESTS"] = True
    try:
        yield
    finally:
        settings["ATOMIC_REQUESTS"] = before


@contextlib.contextmanager
def lock_statements(count: int, alias: str = "default") -> Iterator[None]:
    """Require a number of statements that have to do with advisory locks."""
    with CaptureQueriesContext(connections[alias]) as captured:
        yield
    sent = [query["sql"] for query in captured.captured_queries if "advisory" in query["sql"]]
    assert len(sent) == count, sent


def accounts(*names: str) -> list[Account]:
    return [Account.objects.create(name=name) for name in names]


# Actions


class Actions:
    """An admin with one action, and what it was called with."""

    def __init__(self, lock: Callable[[Any], Any], body: Callable[..., Any] = lambda *args: None) -> None:
        self.seen: list[list[Any]] = []
        calls = self

        @admin.action(description="Work now")
        @lock
        def work(modeladmin: Any, request: Any, queryset: Any) -> Any:
            calls.seen.append([one.pk for one in queryset])
            answer = body(modeladmin, request, queryset)
            for one in queryset:
                modeladmin.log_change(request, one, "worked")
            modeladmin.message_user(request, "Worked.", messages.SUCCESS)
            return answer

        self.action = work

    def admin(self, **attributes: Any) -> type[Plain]:
        return type("Admin", (admin.ModelAdmin,), {"actions": [self.action], **attributes})

    @property
    def done(self) -> list[Any]:
        return [pk for pks in self.seen for pk in pks]


def form_of(action: str, *objects: Any, **data: Any) -> dict[str, Any]:
    return {"action": action, "_selected_action": [one.pk for one in objects], "index": "0", **data}


def press(who: User, *objects: Any, action: str = "work", where: str = "", **data: Any) -> Any:
    url = reverse(f"admin:{objects[0]._meta.app_label}_{objects[0]._meta.model_name}_changelist")
    return client(who).post(url + where, form_of(action, *objects, **data), follow=True)


class Gate:
    """A body that waits, so that others come meanwhile."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, *args: Any) -> None:
        self.entered.release()
        assert self.open.wait(LIMIT)

    def wait(self) -> None:
        assert self.entered.acquire(timeout=LIMIT)


class TestActionWithAKey:
    def test_a_double_click(self, boss: User, name: str, other: OtherSession) -> None:
        """Case 80: two requests to a real server; the second click gets a message and a page, no error."""
        gate = Gate()
        calls = Actions(locked_action(name), gate)
        (one,) = accounts("a")
        with serving(Account, calls.admin()), live_server() as address:
            first, second = Browser(address, boss, PASSWORD), Browser(address, boss, PASSWORD)
            url = reverse("admin:testapp_account_changelist")
            working = Thread(lambda: first.post(url, form_of("work", one)))
            gate.wait()
            told = second.post(url, form_of("work", one))
            gate.open.set()
            assert texts(working.result()) == ["Worked."]
        assert told.status_code == 200
        (text,) = texts(told)
        assert text.startswith("Nothing was done, because this is being done right now by somebody else. The lock")
        assert name in text
        assert calls.seen == [[one.pk]]
        assert log_entries().count() == 1

    def test_without_the_lock_both_work(self, boss: User, name: str, other: OtherSession) -> None:
        gate = Gate()
        calls = Actions(lambda action: action, gate)
        (one,) = accounts("a")
        with serving(Account, calls.admin()):
            both = [Thread(lambda: press(boss, one)) for _ in range(2)]
            gate.wait()
            gate.wait()
            gate.open.set()
            assert [texts(each.result()) for each in both] == [["Worked."], ["Worked."]]
        assert log_entries().count() == 2

    def test_many_clicks_work_one_after_the_other(self, boss: User, name: str, other: OtherSession) -> None:
        inside: list[int] = []
        most: list[int] = []

        def body(*args: Any) -> None:
            inside.append(1)
            most.append(len(inside))
            connection.cursor().execute("SELECT pg_sleep(0.01)")
            inside.pop()

        calls = Actions(locked_action(name), body)
        (one,) = accounts("a")
        with serving(Account, calls.admin()):
            all_texts = [texts(each.result()) for each in [Thread(lambda: press(boss, one)) for _ in range(6)]]
        worked = all_texts.count(["Worked."])
        assert worked >= 1
        assert max(most) == 1
        assert log_entries().count() == len(calls.seen) == worked

    def test_held_by_a_command(self, boss: User, name: str, other: OtherSession) -> None:
        """Case 81: the admin says who, and for how long."""
        calls = Actions(locked_action(name))
        (one,) = accounts("a")
        command = run("work", "--key", name, "--wait", PGAPPNAME="nightly")
        assert command.stdout is not None
        assert "working" in command.stdout.readline()
        with serving(Account, calls.admin()):
            (text,) = texts(press(boss, one))
            pid = other.holder(lock_key(name))
            assert f"held by pid {pid} (nightly), idle for " in text
            assert calls.seen == []
            command.communicate("\n", timeout=LIMIT)
            assert texts(press(boss, one)) == ["Worked."]

    def test_the_command_is_told_of_the_admin(self, boss: User, name: str, other: OtherSession) -> None:
        """Case 81, the other way round."""
        gate = Gate()
        calls = Actions(locked_action(name), gate)
        (one,) = accounts("a")
        with serving(Account, calls.admin()):
            working = Thread(lambda: press(boss, one))
            gate.wait()
            said = output(run("work", "--key", name))
            gate.open.set()
            working.result()
        assert said.startswith(f"Skipped. The lock {name!r}")
        assert "held by pid" in said

    def test_a_key_from_the_arguments(self, boss: User, name: str, other: OtherSession) -> None:
        got: list[Any] = []

        def key(modeladmin: Any, request: Any, queryset: Any) -> tuple[str, int]:
            got.append((modeladmin.opts.model, queryset.count()))
            return name, request.user.pk

        calls = Actions(locked_action(key))
        two = accounts("a", "b")
        with serving(Account, calls.admin()):
            press(boss, *two)
            other.take(lock_key(name, boss.pk))
            assert texts(press(boss, *two))[0].startswith("Nothing was done")
        assert got == [(Account, 2)] * 2
        assert len(calls.seen) == 1

    def test_busy_with_named_arguments(self, boss: User, name: str, other: OtherSession, rf: RequestFactory) -> None:
        told: list[str] = []
        modeladmin: Any = SimpleNamespace(message_user=lambda request, text, level: told.append(text))
        other.take(lock_key(name))
        for lock in (locked_action(name), locked_action(lambda modeladmin, request, queryset: name)):
            action = lock(lambda modeladmin, request, queryset: None)
            action(modeladmin=modeladmin, request=rf.get("/"), queryset=Account.objects.none())
        assert len(told) == 2

    def test_what_it_returns_and_raises(self, boss: User, name: str, other: OtherSession) -> None:
        (one,) = accounts("a")
        with serving(Account, Actions(locked_action(name), lambda *args: HttpResponse("exported")).admin()):
            assert press(boss, one).content == b"exported"

        def fails(*args: Any) -> None:
            raise LockTimeout("of the body")

        with serving(Account, Actions(locked_action(name), fails).admin()):
            with pytest.raises(LockTimeout, match="of the body"):
                press(boss, one)
        assert other.is_free(lock_key(name))

    def test_shared_and_another_database(self, boss: User, name: str, other: OtherSession) -> None:
        (one,) = accounts("a")
        other.take(lock_key(name), shared=True)
        for lock, text in (
            (locked_action(name, shared=True), "Worked."),
            (locked_action(name, using="other"), "Worked."),
            (locked_action(name, using="same"), "Nothing was done"),
        ):
            with serving(Account, Actions(lock).admin()):
                assert texts(press(boss, one))[0].startswith(text)

    @pytest.mark.parametrize("lock", [locked_action, lambda name: locked_action()], ids=["key", "each"])
    def test_the_scope_is_that_of_the_request(
        self, lock: Callable[[str], Any], boss: User, name: str, other: OtherSession
    ) -> None:
        (one,) = accounts("a")
        keys = [lock_key(name), model_key(one)]

        def body(modeladmin: Any, request: Any, queryset: Any) -> None:
            held.append(sum(map(other.holders, keys)))

        def on_commit(*args: Any) -> None:
            body(*args)
            transaction.on_commit(lambda: held.append(sum(map(other.holders, keys))))

        held: list[int] = []
        with serving(Account, Actions(lock(name), on_commit).admin()):
            press(boss, one)
            assert held == [1, 1]  # outside a transaction a hook runs at once
            held.clear()
            with atomic_requests():
                press(boss, one)
        assert held == [1, 0]
        assert not any(map(other.holders, keys))

    def test_under_atomic_requests_it_is_held_to_the_commit(self, boss: User, name: str, other: OtherSession) -> None:
        (one,) = accounts("a")
        after: list[bool] = []

        class Slow(Plain):
            actions: ClassVar[Any] = [Actions(locked_action(name)).action]

            def response_action(self, *args: Any, **kwargs: Any) -> Any:
                response = super().response_action(*args, **kwargs)
                after.append(other.is_free(lock_key(name)))
                return response

        with serving(Account, Slow), atomic_requests():
            press(boss, one)
        with serving(Account, Slow):
            press(boss, one)
        assert after == [False, True]

    def test_refused_where_it_would_end_before_the_commit(self, boss: User, name: str, other: OtherSession) -> None:
        (one,) = accounts("a")
        with atomic_requests():
            for lock in (locked_action(name, using="other"), locked_action(using="other")):
                with serving(Account, Actions(lock).admin()):
                    with pytest.raises(transaction.TransactionManagementError, match="before the transaction"):
                        press(boss, one)


class TestActionForEach:
    def test_runs_with_what_is_free(self, boss: User, other: OtherSession) -> None:
        """Case 82: the busy one is named, with who is at it; the rest is done."""
        a, b, c = accounts("a", "b", "c")
        other.take(model_key(b, purpose="sync"))
        seen: list[bool] = []

        def body(*args: Any) -> None:
            seen.extend(other.is_free(model_key(one, purpose="sync")) for one in (a, b, c))

        calls = Actions(locked_action(purpose="sync"), body)
        with serving(Account, calls.admin()):
            busy, worked = texts(press(boss, c, b, a))
        assert sorted(calls.done) == [a.pk, c.pk]
        assert seen == [False, True, False]  # the other session nests its own
        other.drop(model_key(b, purpose="sync"))
        assert busy == (
            f"Account object ({b.pk}) (held by pid {other.pid} (other-session), {busy.partition('-session), ')[2]}"
        )
        assert busy.endswith(" was skipped, because somebody else is working on it right now.")
        assert worked == "Worked."

    def test_other_purposes_do_not_meet(self, boss: User, other: OtherSession) -> None:
        (a,) = accounts("a")
        other.take(model_key(a))
        for purpose, text in (("sync", "Worked."), ("", "Account object")):
            with serving(Account, Actions(locked_action(purpose=purpose)).admin()):
                assert texts(press(boss, a))[0].startswith(text)

    def test_all_busy(self, boss: User, other: OtherSession) -> None:
        """The action is not called: no success, no entry in the log."""
        two = accounts("a", "b")
        for one in two:
            other.take(model_key(one))
        calls = Actions(locked_action())
        with serving(Account, calls.admin()):
            (text,) = texts(press(boss, *two))
        assert text.endswith(" were skipped, because somebody else is working on them right now.")
        assert " and Account object" in text
        assert not calls.seen
        assert not log_entries().exists()

    def test_crosswise(self, boss: User, other: OtherSession) -> None:
        """Case 82: {1,2,3} and {3,2,1} at once, again and again: no deadlock, no object worked on by two."""
        three = accounts("a", "b", "c")
        inside: set[int] = set()
        collisions: list[int] = []

        def body(modeladmin: Any, request: Any, queryset: Any) -> None:
            pks = {one.pk for one in queryset}
            collisions.extend(pks & inside)
            inside.update(pks)
            connection.cursor().execute("SELECT pg_sleep(0.002)")
            inside.difference_update(pks)

        calls = Actions(locked_action(), body)
        with serving(Account, calls.admin()):
            orders = [three, three[::-1]]
            clicks = [Thread(partial(press, boss, *order)) for order in orders * 4]
            for click in clicks:
                assert click.result().status_code == 200
        assert not collisions
        assert set(calls.done) == {one.pk for one in three}

    def test_each_is_done_once(self, boss: User, other: OtherSession) -> None:
        """Case 82: while one admin is at it, the other one gets none of the three, and all are told."""
        three = accounts("a", "b", "c")
        gate = Gate()
        calls = Actions(locked_action(), gate)
        with serving(Account, calls.admin()), live_server() as address:
            first, second = Browser(address, boss, PASSWORD), Browser(address, boss, PASSWORD)
            url = reverse("admin:testapp_account_changelist")
            working = Thread(lambda: first.post(url, form_of("work", *three)))
            gate.wait()
            (told,) = texts(second.post(url, form_of("work", *three[::-1])))
            gate.open.set()
            assert texts(working.result()) == ["Worked."]
        assert told.count("held by pid") == 3
        assert sorted(calls.done) == [one.pk for one in three]
        assert log_entries().count() == 3

    def test_one_raises_half_way(self, boss: User, other: OtherSession) -> None:
        """Case 82: all are freed, also after an error of the database."""
        three = accounts("a", "b", "c")

        def fails(modeladmin: Any, request: Any, queryset: Any) -> None:
            queryset.filter(pk=three[0].pk).update(balance=1)
            assert not any(other.is_free(model_key(one)) for one in three)
            connection.cursor().execute("SELECT 1 / 0")

        for block in (contextlib.nullcontext, atomic_requests):
            with serving(Account, Actions(locked_action(), fails).admin()), block():
                with pytest.raises(Exception, match="division by zero"):
                    press(boss, *three)
            assert all(other.is_free(model_key(one)) for one in three)

    def test_a_thousand_and_one_more(self, boss: User, other: OtherSession) -> None:
        many = Account.objects.bulk_create([Account() for _ in range(MOST + 1)])
        calls = Actions(locked_action(), lambda *args: held.append(other.holders(model_key(many[0]))))
        held: list[int] = []
        modeladmin: Any = admin.ModelAdmin(Account, admin.AdminSite())
        modeladmin.message_user = lambda request, text, level=None: told.append((text, level))
        modeladmin.log_change = lambda *args: None
        told: list[Any] = []
        with lock_statements(0):
            calls.action(modeladmin, None, Account.objects.all())
        assert told == [("Nothing was done: select at most 1000 at a time.", messages.ERROR)]
        assert not calls.seen
        calls.action(modeladmin, None, Account.objects.exclude(pk=many[-1].pk))
        assert len(calls.done) == MOST
        assert held == [1]

    def test_all_across_pages(self, boss: User, other: OtherSession) -> None:
        four = accounts("a", "b", "c", "d")
        other.take(model_key(four[3]))
        calls = Actions(locked_action())
        with serving(Account, calls.admin(list_per_page=2, ordering=["-name"])):
            press(boss, four[0], select_across="1")
        assert calls.done == [one.pk for one in four[2::-1]]  # in the order of the list
        calls.seen.clear()
        with serving(Account, calls.admin(list_per_page=2, search_fields=["name"])):
            press(boss, four[0], select_across="1", where="?q=b")
        assert calls.done == [four[1].pk]

    def test_deleted_meanwhile(self, boss: User, other: OtherSession) -> None:
        a, b = accounts("a", "b")
        calls = Actions(locked_action())
        with serving(Account, calls.admin()):
            Account.objects.filter(pk=a.pk).delete()
            assert texts(press(boss, a, b)) == ["Worked."]
            assert calls.seen == [[b.pk]]
            # As Django does, with a queryset of nothing.
            assert texts(press(boss, a)) == ["Worked."]
            assert calls.seen == [[b.pk], []]

    def test_what_no_longer_fits_the_filter_is_left_out(self, boss: User, name: str, other: OtherSession) -> None:
        """What the former holder committed is seen under the lock."""
        a, b = accounts("a", "b")

        def change(modeladmin: Any, request: Any, queryset: Any) -> None:
            other.raw.execute("UPDATE testapp_account SET balance = 1 WHERE id = %s", [a.pk])

        def key(*args: Any) -> str:
            change(*args)
            return name

        def get_queryset(modeladmin: Any, request: Any) -> Any:
            return Account.objects.filter(balance=0)

        keyed = Actions(locked_action(key))
        with serving(Account, keyed.admin(get_queryset=get_queryset)):
            press(boss, a, b)
        assert keyed.seen == [[b.pk]]

    @pytest.mark.parametrize(
        "narrow",
        [
            lambda accounts: accounts.annotate(lines=Count("profile"), double=F("balance") * 2),
            lambda accounts: accounts.order_by("name").distinct("name"),
            lambda accounts: accounts.distinct().order_by("-name"),
            lambda accounts: accounts.order_by("?"),
            lambda accounts: accounts.only("name"),
            lambda accounts: accounts.select_related("profile"),
            lambda accounts: accounts.prefetch_related("membership_set"),
            lambda accounts: accounts.annotate(shown=Value("x")).filter(shown="x", name__gte="a"),
        ],
        ids=["annotate", "distinct on", "distinct", "random", "only", "related", "prefetch", "filter"],
    )
    def test_querysets(self, narrow: Callable[[Any], Any], boss: User, other: OtherSession) -> None:
        three = accounts("a", "b", "c")
        other.take(model_key(three[1]))
        got: list[Any] = []

        def body(modeladmin: Any, request: Any, queryset: Any) -> None:
            got.append(sorted(queryset.values_list("name", flat=True)))
            got.append(len(queryset[:1]))
            got.append(queryset.count())

        calls = Actions(locked_action(), body)
        with serving(Account, calls.admin(get_queryset=lambda self, request: narrow(Account.objects.all()))):
            press(boss, *three)
        assert got == [["a", "c"], 1, 2]

    def test_what_a_join_brings_twice_is_locked_once(self, boss: User, other: OtherSession) -> None:
        essay = Essay.objects.create(title="a")
        essay.line_set.set([Line(text="1"), Line(text="2")], bulk=False)
        twice = Essay.objects.filter(line__text__gt="")
        told: list[str] = []
        modeladmin: Any = SimpleNamespace(
            message_user=lambda request, text, level=None: told.append(text), log_change=lambda *args: None
        )
        calls = Actions(locked_action())
        with lock_statements(2):
            calls.action(modeladmin, None, twice)
        assert calls.seen == [[essay.pk] * 2]
        other.take(model_key(essay))
        calls.action(modeladmin, None, twice)
        assert told[-1].startswith("a (held by")
        assert " was skipped" in told[-1]

    @pytest.mark.parametrize(
        ("model", "pks"),
        [
            (Token, [uuid.UUID(int=1), uuid.UUID(int=2**127)]),
            (Country, ["a/b", "_5F", "ä ö", "%2F"]),
            (Legacy, ["3", "12"]),
            (Reading, ["2025-01-01T00:00:00Z", "2025-01-02T00:00:00+02:00"]),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_primary_keys(self, model: Any, pks: list[Any], boss: User, other: OtherSession) -> None:
        made = [model.objects.create(pk=pk) for pk in pks]
        for one in made:
            one.refresh_from_db()
        other.take(model_key(made[0]))
        calls = Actions(locked_action())
        with serving(model, calls.admin()):
            press(boss, *made)
        assert sorted(map(str, calls.done)) == sorted(str(one.pk) for one in made[1:])

    def test_proxies_and_links_as_primary_keys(self, boss: User, other: OtherSession) -> None:
        (one,) = accounts("a")
        other.take(model_key(one))
        Profile.objects.create(account=one)
        premium = PremiumAccount.objects.create(name="p")
        for model, free in ((AccountProxy, [premium.pk]), (Profile, [one.pk]), (PremiumAccount, [premium.pk])):
            calls = Actions(locked_action())
            with serving(model, calls.admin()):
                press(boss, *model._default_manager.all())
            assert calls.done == free

    def test_composite_primary_keys(self, other: OtherSession) -> None:
        """Django's admin does not take such a model; an action may be called all the same."""
        from tests.testapp.models import Membership

        (one,) = accounts("a")
        both = [Membership.objects.create(account=one, group=group) for group in ("x", "y")]
        other.take(model_key(both[0]))
        told: list[str] = []
        modeladmin: Any = SimpleNamespace(
            message_user=lambda request, text, level=None: told.append(text), log_change=lambda *args: None
        )
        calls = Actions(locked_action())
        calls.action(modeladmin, None, Membership.objects.all())
        assert calls.done == [(one.pk, "y")]
        assert len(told) == 2

    def test_html_in_a_name(self, boss: User, other: OtherSession) -> None:
        (one,) = essays("<script>alert(1)</script>%s%(x)s")
        other.take(model_key(one))
        with serving(Essay, Actions(locked_action()).admin()):
            page = press(boss, one)
        content = page.content.decode()
        assert "<script>alert(1)" not in content
        assert "&lt;script&gt;alert(1)&lt;/script&gt;%s%(x)s (held by" in content

    def test_long_lists_and_long_names_are_shortened(self, boss: User, other: OtherSession) -> None:
        many = essays(*["x" * 100 for _ in range(7)])
        for one in many:
            other.take(model_key(one))
        with serving(Essay, Actions(locked_action()).admin()):
            (text,) = texts(press(boss, *many))
        assert text.count("held by") == 5
        assert "and 2 more were skipped" in text
        assert "x" * 100 in text.lower()

    def test_a_name_of_a_thousand_characters(self, boss: User, other: OtherSession) -> None:
        country = Country.objects.create(code="c")
        country_admin = Actions(locked_action()).admin()
        other.take(model_key(country))
        with serving(Country, country_admin), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Country, "__str__", lambda self: "z" * 1000)
            (text,) = texts(press(boss, country))
        assert text.lower().startswith("z" * 99 + "… (held by")

    def test_in_another_language(self, boss: User, other: OtherSession) -> None:
        two = accounts("a", "b")
        for one in two:
            other.take(model_key(one))
        told: list[str] = []
        modeladmin: Any = SimpleNamespace(message_user=lambda request, text, level=None: told.append(text))
        with translation.override("de"):
            Actions(locked_action()).action(modeladmin, None, Account.objects.all())
        assert ") und Account object" in told[0]  # from Django's catalogue

    def test_the_holder_is_another_thread(self, boss: User, name: str, other: OtherSession) -> None:
        (one,) = accounts("a")
        with advisory_lock(model_key(one), using="same"):
            with serving(Account, Actions(locked_action()).admin()):
                assert "held by pid" in texts(press(boss, one))[0]

    def test_shared_and_another_database(self, boss: User, other: OtherSession) -> None:
        (one,) = accounts("a")
        other.take(model_key(one), shared=True)
        for lock, text in (
            (locked_action(shared=True), "Worked."),
            (locked_action(using="other"), "Worked."),
            (locked_action(using="same"), "Account object"),
        ):
            with serving(Account, Actions(lock).admin()):
                assert texts(press(boss, one))[0].startswith(text)
        connections["same"].close()

    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    def test_an_interrupt_at_any_line(self, boss: User, name: str, other: OtherSession) -> None:
        two = accounts("a", "b")
        modeladmin: Any = SimpleNamespace(message_user=lambda *args: None, log_change=lambda *args: None)
        other.take(model_key(two[1]))
        action = locked_action()(lambda modeladmin, request, queryset: None)
        point, queryset = 1, Account.objects.all()
        while interrupt_at(point, raises(KeyboardInterrupt), lambda: action(modeladmin, None, queryset)):
            with advisory_lock(name):  # the next operation frees what was interrupted between two bytecodes
                pass
            assert other.is_free(model_key(two[0])), point
            point += 4 if point > 60 else 1
        assert point > 60


class TestActionsEverywhere:
    @pytest.mark.parametrize("lock", [lambda: locked_action("key"), lambda: locked_action(purpose="x")])
    def test_above_and_below_admin_action(self, lock: Callable[[], Any]) -> None:
        def work(modeladmin: Any, request: Any, queryset: Any) -> None:
            """Work."""

        above = lock()(admin.action(description="Work now", permissions=["view"])(work))
        below = admin.action(description="Work now", permissions=["view"])(lock()(work))
        for action in (above, below):
            assert (action.__name__, action.__doc__) == ("work", "Work.")
            assert (action.short_description, action.allowed_permissions) == ("Work now", ["view"])

    @pytest.mark.parametrize("key", [("a-key",), ()], ids=["key", "each"])
    def test_as_a_method(self, key: tuple[str, ...], boss: User, other: OtherSession) -> None:
        (one,) = accounts("a")
        seen: list[Any] = []

        class WithMethod(Plain):
            actions: ClassVar[Any] = ["sync_now"]

            @admin.action(description="Sync now", permissions=["sync"])
            @locked_action(*key)
            def sync_now(self, request: Any, queryset: Any) -> None:
                seen.append((type(self), queryset.get()))
                assert not other.is_free(lock_key(*key) if key else model_key(one))
                self.message_user(request, "Synced.")

            def has_sync_permission(self, request: Any) -> bool:
                return bool(request.user.is_superuser)

        with serving(Account, WithMethod):
            assert texts(press(boss, one, action="sync_now")) == ["Synced."]
            assert "Sync now" in text_of(client(boss).get(reverse("admin:testapp_account_changelist")))
            clerk = user("clerk-sync", "testapp.change_account")
            assert texts(press(clerk, one, action="sync_now")) == []
            clerk.delete()
        assert seen == [(WithMethod, one)]

    def test_on_a_whole_site(self, boss: User, other: OtherSession) -> None:
        (one,) = accounts("a")
        calls = Actions(locked_action())
        with serving(Account) as site:
            site.add_action(calls.action)
            other.take(model_key(one))
            assert "was skipped" in texts(press(boss, one))[0]
            other.drop(model_key(one))
            assert texts(press(boss, one)) == ["Worked."]

    def test_the_check_of_the_admin_accepts_it(self) -> None:
        site = admin.AdminSite()
        for lock in (locked_action("a"), locked_action()):
            assert Actions(lock).admin()(Account, site).check() == []

    bare: ClassVar[Any] = locked_action(lambda modeladmin, request, queryset: "called with an action as the key")

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (lambda: locked_action("key", purpose="sync"), "purpose= is for the keys of the selected objects"),
            (lambda: locked_action(None), "None cannot be part of a key"),  # type: ignore[arg-type]
            (lambda: locked_action(1.5), "float cannot be part"),  # type: ignore[arg-type]
            (lambda: locked_action(using=3), "using is the alias"),  # type: ignore[arg-type]
            (lambda: locked_action(shared="yes"), "shared is True or False"),  # type: ignore[arg-type]
            (locked_action("k"), "write @locked_action"),
            (partial(bare, None, None, None), "write @locked_action"),
            (lambda: locked_action("k")(Account), "not a class"),
            (lambda: locked_action()("sync_now"), "not str"),  # type: ignore[type-var]
            (lambda: locked_action()(staticmethod(print)), "put the lock below"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_wrong_uses(self, wrong: Callable[[], Any], message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            wrong()

    @pytest.mark.parametrize("key", [("a-key",), ()], ids=["key", "each"])
    def test_what_is_no_plain_function(self, key: tuple[str, ...], other: OtherSession) -> None:
        async def coroutine(modeladmin: Any, request: Any, queryset: Any) -> None: ...

        def generator(modeladmin: Any, request: Any, queryset: Any) -> Iterator[None]:
            yield  # pragma: no cover - it never begins

        with pytest.raises(TypeError, match="not coroutine functions"):
            locked_action(*key)(coroutine)
        with pytest.raises(TypeError, match="not a generator function"):
            locked_action(*key)(generator)
        hidden = locked_action(*key)(lambda *args: generator(None, *args[1:]))
        with pytest.raises(TypeError, match="returned a generator"):
            hidden(None, None, Account.objects.all())

    def test_bare(self, boss: User, other: OtherSession) -> None:
        """It cannot be told from a key that is a function before the first click."""
        (one,) = accounts("a")

        class Bare(Plain):
            actions: ClassVar[Any] = ["sync_now"]

            @locked_action  # type: ignore[arg-type]
            def sync_now(self, request: Any, queryset: Any) -> None: ...

        with serving(Account, Bare), pytest.raises(TypeError, match=r"write @locked_action\(\) or"):
            press(boss, one, action="sync_now")


# Saving and deleting


def essays(*titles: str) -> list[Essay]:
    return [Essay.objects.create(title=title) for title in titles]


class LineInline(Inline):
    model = Line
    extra = 1


class Recorder:
    """What an admin of essays saw while it saved."""

    def __init__(self) -> None:
        self.free: list[bool] = []
        self.body: Callable[[], Any] = lambda: None


def essay_admin(recorder: Recorder, look: Callable[[Any], bool], **attributes: Any) -> Any:
    def save_model(self: Any, request: Any, obj: Any, form: Any, change: bool) -> None:
        if change:
            recorder.free.append(look(obj))
        recorder.body()
        admin.ModelAdmin.save_model(self, request, obj, form, change)

    def delete_model(self: Any, request: Any, obj: Any) -> None:
        recorder.free.append(look(obj))
        admin.ModelAdmin.delete_model(self, request, obj)

    given = {
        "inlines": [LineInline],
        "prepopulated_fields": {"slug": ("title",)},
        "readonly_fields": ["internal"],
        "save_as": True,
        "lock_timeout": 0.02,
        "save_model": save_model,
        "delete_model": delete_model,
    }
    return type("EssayAdmin", (AdvisoryLockAdminMixin, admin.ModelAdmin), {**given, **attributes})


class Desk:
    """The admin of essays, its one user, and another session."""

    def __init__(self, boss: User, other: OtherSession) -> None:
        self.boss = boss
        self.other = other
        self.recorder = Recorder()

    def admin(self, **attributes: Any) -> Any:
        return essay_admin(self.recorder, lambda obj: self.other.is_free(model_key(obj)), **attributes)

    def serving(self, name: str = "admin", **attributes: Any) -> Any:
        return serving(Essay, self.admin(**attributes), name)

    def url(self, essay: Essay, page: str = "change") -> str:
        return reverse(f"admin:testapp_essay_{page}", args=[quote(essay.pk)])

    def save(
        self, essay: Essay, *, where: str = "", who: User | None = None, follow: bool = False, **typed: Any
    ) -> Any:
        return client(who or self.boss).post(self.url(essay) + where, self.typed(essay, **typed), follow=follow)

    def delete(self, essay: Essay, *, where: str = "", who: User | None = None, **typed: Any) -> Any:
        return client(who or self.boss).post(self.url(essay, "delete") + where, {"post": "yes", **typed})

    def typed(self, essay: Essay, **changes: Any) -> dict[str, Any]:
        lines = list(essay.line_set.order_by("pk"))
        rows: dict[str, Any] = {"line_set-TOTAL_FORMS": len(lines) + 1, "line_set-INITIAL_FORMS": len(lines)}
        for number, line in enumerate(lines):
            rows |= {f"line_set-{number}-id": line.pk, f"line_set-{number}-text": line.text}
            rows |= {f"line_set-{number}-essay": essay.pk}
        rows |= {f"line_set-{len(lines)}-{name}": "" for name in ("id", "text")}
        return {"title": essay.title, "kind": essay.kind, **rows, **changes}


@pytest.fixture
def desk(boss: User, other: OtherSession) -> Desk:
    return Desk(boss, other)


def errors_of(response: Any) -> list[str]:
    return [str(error) for error in response.context["adminform"].form.non_field_errors()]


class TestSaving:
    def test_under_the_lock_of_the_object(self, desk: Desk) -> None:
        (essay,) = essays("old")
        with desk.serving(), lock_statements(1):
            response = desk.save(essay, title="new", follow=True)
        assert desk.recorder.free == [False]
        assert "was changed successfully" in texts(response)[0]
        assert log_entries().count() == 1
        assert Essay.objects.get().title == "new"
        assert desk.other.is_free(model_key(essay))

    def test_reading_and_adding_take_none(self, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(), lock_statements(0):
            one = client(desk.boss)
            for page in ("change", "delete", "history"):
                assert one.get(desk.url(essay, page)).status_code == 200
                assert one.head(desk.url(essay, page)).status_code == 200
            assert one.get(reverse("admin:testapp_essay_changelist")).status_code == 200
            assert one.options(desk.url(essay)).status_code == 200
            added = one.post(reverse("admin:testapp_essay_add"), desk.typed(essay, title="added"))
        assert added.status_code == 302
        assert Essay.objects.filter(title="added").exists()

    def test_busy(self, desk: Desk) -> None:
        """All that was typed comes back, nothing is saved; once the holder is gone the same POST saves."""
        tags = [Tag.objects.create(label=label) for label in ("red", "green")]
        (essay,) = essays("old")
        Essay.objects.update(internal="kept")
        for text in ("first", "second"):
            Line.objects.create(essay=essay, text=text)
        typed = {
            "title": "new <b>title</b>",
            "slug": "typed-slug",
            "body": "many\nwords",
            "is_public": "on",
            "kind": "monthly",
            "main_tag": tags[0].pk,
            "tags": [tag.pk for tag in tags],
            "line_set-0-text": "first, changed",
            "line_set-1-DELETE": "on",
            "line_set-2-text": "added",
        }
        desk.other.take(model_key(essay))
        with desk.serving():
            response = desk.save(essay, **typed)
            assert response.status_code == 409
            (message,) = errors_of(response)
            assert message.startswith("Nothing was saved, because somebody else is working on this right now.")
            assert f"was not free within 0.02 s: held by pid {desk.other.pid} (other-session), idle for" in message
            page = response.content.decode()
            for part in (
                'value="new &lt;b&gt;title&lt;/b&gt;"',
                'value="typed-slug"',
                "many\nwords</textarea>",
                'name="is_public" id="id_is_public" checked',
                '<option value="monthly" selected',
                'value="first, changed"',
                'name="line_set-1-DELETE" id="id_line_set-1-DELETE" checked',
                'value="added"',
                "kept",
            ):
                assert part in page, part
            # All of <option>: the main tag, and both of the tags.
            assert [f'value="{tag.pk}" selected' in page for tag in tags] == [True, True]
            assert page.count(f'value="{tags[0].pk}" selected') == 2
            assert text_of(response).count("Nothing was saved") == 1
            self.assert_nothing_happened(essay, desk)
            assert texts(client(desk.boss).get("/admin/")) == []

            desk.other.drop(model_key(essay))
            assert desk.save(essay, **typed).status_code == 302
        essay.refresh_from_db()
        assert (essay.title, essay.is_public, essay.internal) == ("new <b>title</b>", True, "kept")
        assert [line.text for line in essay.line_set.order_by("pk")] == ["first, changed", "added"]
        assert set(essay.tags.all()) == set(tags)

    def assert_nothing_happened(self, essay: Essay, desk: Desk) -> None:
        before = Essay.objects.get(pk=essay.pk)
        assert (before.title, before.slug, before.tags.count()) == ("old", "", 0)
        assert sorted(essay.line_set.values_list("text", flat=True)) == ["first", "second"]
        assert desk.recorder.free == []
        assert not log_entries().exists()

    def test_busy_in_a_real_server(self, desk: Desk) -> None:
        """Case 80: two people save one object at the same moment; the second one keeps what was typed."""
        (essay,) = essays("old")
        gate = Gate()
        desk.recorder.body = gate
        with desk.serving(lock_timeout=timedelta(milliseconds=30)), live_server() as address:
            first, second = Browser(address, desk.boss, PASSWORD), Browser(address, desk.boss, PASSWORD)
            working = Thread(lambda: first.post(desk.url(essay), desk.typed(essay, title="first")))
            gate.wait()
            refused = second.post(desk.url(essay), desk.typed(essay, title="second"))
            gate.open.set()
            assert "was changed successfully" in texts(working.result())[0]
        assert refused.status_code == 409
        assert b'value="second"' in refused.content
        assert b"held by pid" in refused.content
        assert Essay.objects.get().title == "first"
        assert log_entries().count() == 1

    def test_without_the_mixin_both_are_inside(self, desk: Desk) -> None:
        (essay,) = essays("old")
        gate = Gate()
        desk.recorder.body = gate
        unlocked = type("Unlocked", (admin.ModelAdmin,), {"save_model": desk.admin().save_model})
        with serving(Essay, unlocked):
            both = [Thread(lambda: desk.save(essay, title="x")) for _ in range(2)]
            gate.wait()
            gate.wait()
            gate.open.set()
            assert [each.result().status_code for each in both] == [302, 302]

    def test_no_update_is_lost_between_a_job_and_a_save(self, desk: Desk) -> None:
        """What the former holder committed is what the form is checked and saved on."""
        (essay,) = essays("old")
        with desk.serving(lock_timeout=LIMIT, fields=["title"], prepopulated_fields={}):
            with advisory_lock(model_key(essay)):
                saving = Thread(lambda: desk.save(essay, title="typed"))
                desk.other.wait_for_waiters(model_key(essay))
                Essay.objects.filter(pk=essay.pk).update(body="of the job")
            assert saving.result().status_code == 302
        essay.refresh_from_db()
        assert (essay.title, essay.body) == ("typed", "of the job")

    def test_deleted_while_it_waits(self, desk: Desk) -> None:
        (essay,) = essays("old")
        key = model_key(essay)
        desk.other.take(key)
        with desk.serving(lock_timeout=None):
            saving = Thread(lambda: desk.save(essay, title="typed", follow=True))
            desk.other.wait_for_waiters(key)
            Essay.objects.all().delete()
            desk.other.drop(key)
            (text,) = texts(saving.result())
        assert "Perhaps it was deleted?" in text
        assert not Essay.objects.exists()

    def test_deleted_when_the_wait_is_over(self, desk: Desk) -> None:
        """The page of an object that is gone is a redirect, and stays one."""
        (essay,) = essays("old")
        desk.other.take(model_key(essay))

        def gone(self: Any, request: Any, obj: Any, error: Any) -> None:
            Essay.objects.all().delete()

        with desk.serving(handle_lock_busy=gone):
            response = desk.save(essay, title="typed")
        assert (response.status_code, response.url) == (302, "/admin/")

    def test_gone_before(self, desk: Desk) -> None:
        (essay,) = essays("old")
        Essay.objects.all().delete()
        with desk.serving(), lock_statements(0):
            for response in (desk.save(Essay(pk=1)), desk.delete(Essay(pk=1))):
                assert response.url == "/admin/"
        assert essay.title

    @pytest.mark.parametrize("button", ["_continue", "_addanother"])
    def test_buttons(self, button: str, desk: Desk) -> None:
        (essay,) = essays("old")
        typed: dict[str, Any] = {"title": "new", button: "1"}
        desk.other.take(model_key(essay))
        with desk.serving():
            assert desk.save(essay, **typed).status_code == 409
            desk.other.drop(model_key(essay))
            assert desk.save(essay, **typed).status_code == 302

    def test_save_as_new_adds_another_one(self, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(), lock_statements(0):
            assert desk.save(essay, title="copy", _saveasnew="1").status_code == 302
        assert sorted(Essay.objects.values_list("title", flat=True)) == ["copy", "old"]

    def test_in_a_popup(self, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving():
            response = desk.save(essay, title="new", _popup="1", where="?_popup=1")
        assert response.status_code == 409
        assert response.context["is_popup"]
        assert b'name="_popup" value="1"' in response.content

    @pytest.mark.parametrize("timeout", [0, 0.01, timedelta(milliseconds=10)], ids=str)
    def test_timeouts(self, timeout: Any, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(lock_timeout=timeout):
            response = desk.save(essay, title="new")
        assert response.status_code == 409
        assert ("is busy: held by" if timeout == 0 else "was not free within 0.01 s") in errors_of(response)[0]

    @pytest.mark.parametrize("timeout", [None, LIMIT], ids=str)
    def test_it_waits(self, timeout: Any, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(lock_timeout=timeout):
            saving = Thread(lambda: desk.save(essay, title="new"))
            desk.other.wait_for_waiters(model_key(essay))
            desk.other.drop(model_key(essay))
            assert saving.result().status_code == 302

    def test_two_seconds_are_the_default(self) -> None:
        assert AdvisoryLockAdminMixin.lock_timeout == 2

    def test_keys(self, desk: Desk, name: str) -> None:
        (essay,) = essays("old")

        def of_request(self: Any, request: Any, obj: Any) -> Any:
            return name, request.user.pk, obj.pk

        for attributes, key in (
            ({"lock_key": name}, lock_key(name)),
            ({"lock_key": (name, 7)}, lock_key(name, 7)),
            ({"lock_purpose": "sync"}, model_key(essay, purpose="sync")),
            ({"get_lock_key": of_request}, lock_key(name, desk.boss.pk, essay.pk)),
            ({"get_lock_key": lambda self, request, obj: obj}, model_key(essay)),
        ):
            desk.other.take(key)
            with desk.serving(**attributes):
                assert desk.save(essay).status_code == 409
                assert desk.delete(essay).status_code == 302
            desk.other.drop(key)
            with desk.serving(**attributes):
                assert desk.save(essay).status_code == 302

    def test_no_key(self, desk: Desk) -> None:
        (essay,) = essays("old")
        with desk.serving(get_lock_key=lambda self, request, obj: None):
            with pytest.raises(ValueError, match="None cannot be part of a key"):
                desk.save(essay)

    def test_shared(self, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay), shared=True)
        with desk.serving(lock_shared=True):
            assert desk.save(essay).status_code == 302
        with desk.serving():
            assert desk.save(essay).status_code == 409

    def test_on_another_database(self, desk: Desk) -> None:
        (essay,) = essays("old")
        elsewhere = OtherSession("other")
        held: list[int] = []
        desk.recorder.body = lambda: held.append(elsewhere.holders(model_key(essay)))
        desk.other.take(model_key(essay))
        try:
            with desk.serving(lock_using="other"):
                assert desk.save(essay, title="new").status_code == 302
                assert held == [1]
                assert elsewhere.take(model_key(essay))
                assert desk.save(essay, title="newer").status_code == 409
        finally:
            elsewhere.close()
        assert Essay.objects.get().title == "new"

    def test_the_commit_comes_before_the_end_of_the_lock(self, desk: Desk) -> None:
        """Where the lock is on another alias, the transaction of the save is inside that of the lock."""
        (essay,) = essays("old")
        elsewhere = OtherSession("other")
        seen: list[tuple[str, int]] = []

        def look() -> None:
            title = desk.other.one("SELECT title FROM testapp_essay")
            seen.append((title, elsewhere.holders(model_key(essay))))

        desk.recorder.body = lambda: transaction.on_commit(look)
        with desk.serving(lock_using="other"):
            desk.save(essay, title="new")
        assert seen == [("new", 1)]
        elsewhere.close()

    def test_refused_where_it_would_end_before_the_commit(self, desk: Desk) -> None:
        """A lock on another alias would be free before the transaction of the request is committed."""
        (essay,) = essays("old")
        with atomic_requests(), desk.serving(lock_using="other"):
            for press in (desk.save, desk.delete):
                with pytest.raises(transaction.TransactionManagementError, match="before the transaction on 'default'"):
                    press(essay)
        assert desk.recorder.free == []

    def test_with_atomic_requests_it_lasts_to_the_commit(self, desk: Desk) -> None:
        (essay,) = essays("old")
        seen: list[bool] = []

        def response_change(self: Any, request: Any, obj: Any) -> Any:
            transaction.on_commit(lambda: seen.append(True))
            return admin.ModelAdmin.response_change(self, request, obj)

        def changeform_view(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            parent: Any = super(type(self), self)
            response = parent.changeform_view(request, *args, **kwargs)
            seen.append(desk.other.is_free(model_key(essay)))
            return response

        with atomic_requests(), desk.serving(changeform_view=changeform_view, response_change=response_change):
            assert desk.save(essay, title="new").status_code == 302
            assert seen == [False, True]
            desk.other.take(model_key(essay))
            # A wait that failed leaves the transaction of the request as it was.
            assert desk.save(essay, title="newer").status_code == 409
        assert Essay.objects.get().title == "new"

    def test_a_hook_for_what_is_busy(self, desk: Desk) -> None:
        (essay,) = essays("old")
        got: list[Any] = []

        def handle(self: Any, request: Any, obj: Any, error: LockTimeout) -> HttpResponse:
            got.append((request.path, obj, error.key))
            return HttpResponse("later", status=503)

        desk.other.take(model_key(essay))
        with desk.serving(handle_lock_busy=handle):
            for press, page in ((desk.save, "change"), (desk.delete, "delete")):
                response = press(essay)
                assert (response.status_code, response.content) == (503, b"later")
                assert got.pop() == (desk.url(essay, page), essay, model_key(essay))

    def test_it_is_logged(self, desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(), caplog.at_level("INFO", logger="django_advisory_lock"):
            desk.save(essay)
        assert f"POST /admin/testapp/essay/{essay.pk}/change/ was not run: The lock" in caplog.text

    def test_an_error_while_it_saves(self, desk: Desk) -> None:
        (essay,) = essays("old")
        key = model_key(essay)
        for error in (ZeroDivisionError("in the body"), LockTimeout("in the body"), KeyboardInterrupt("in the body")):

            def fail(error: BaseException = error) -> None:
                raise error

            desk.recorder.body = fail
            with desk.serving(), pytest.raises(type(error), match="in the body"):
                desk.save(essay, title="new")
            assert desk.other.is_free(key)
        assert Essay.objects.get().title == "old"

    def test_an_interrupt_while_it_waits(self, desk: Desk) -> None:
        (essay,) = essays("old")
        key = model_key(essay)
        desk.other.take(key)
        with desk.serving(lock_timeout=LIMIT):
            saving = Thread(lambda: desk.save(essay, title="new"))
            desk.other.wait_for_waiters(key)
            waiting = desk.other.one("SELECT pid FROM pg_locks WHERE NOT granted AND locktype = 'advisory'")
            desk.other.cancel(waiting)
            with pytest.raises(Exception, match="cancelled"):
                saving.result()
        desk.other.drop(key)
        desk.other.wait_until_free(key)
        assert Essay.objects.get().title == "old"


class TestForms:
    def test_its_own_errors_are_there_too(self, desk: Desk) -> None:
        class Form(ModelForm):
            def clean(self) -> Any:
                assert Essay.objects.filter(title="old").exists()
                raise ValidationError("of the form")

        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(form=Form):
            typed: dict[str, Any] = {"title": "", "line_set-0-text": "x" * 51}
            response = desk.save(essay, **typed)
        assert response.status_code == 409
        own, busy = errors_of(response)
        assert own == "of the form"
        assert busy.startswith("Nothing was saved")
        assert response.context["adminform"].form.errors["title"] == ["This field is required."]
        assert "at most 50 characters" in text_of(response)

    def test_changes_of_a_base_below_the_mixin_stay(self, desk: Desk) -> None:
        """A form whose fields were changed after its class was made: what is shown when busy is that form."""

        class Restricting(Plain):
            def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
                form: Any = super().get_form(request, obj, change, **kwargs)
                form.base_fields["main_tag"].queryset = Tag.objects.filter(label="allowed")
                form.base_fields["title"].help_text = "of the base"
                return form

        for label in ("allowed", "secret"):
            Tag.objects.create(label=label)
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        restricted = type(
            "A", (AdvisoryLockAdminMixin, Restricting), {"lock_timeout": 0, "fields": ["title", "main_tag"]}
        )
        with serving(Essay, restricted):
            response = desk.save(essay, title="new")
        assert response.status_code == 409
        text = text_of(response)
        assert "allowed" in text
        assert "of the base" in text
        assert "secret" not in text

    def test_changes_of_a_subclass_stay(self, desk: Desk) -> None:
        def get_form(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            parent: Any = super(type(self), self)
            form = parent.get_form(request, *args, **kwargs)
            form.base_fields["title"].label = "Headline"
            return form

        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(get_form=get_form, formfield_overrides={}):
            assert "Headline" in text_of(desk.save(essay, title="new"))

    def test_overrides_of_form_fields(self, desk: Desk) -> None:
        from django.db import models

        widget = {models.TextField: {"widget": forms.TextInput(attrs={"class": "short"})}}
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(formfield_overrides=widget):
            response = desk.save(essay, body="typed")
        assert 'name="body" value="typed" class="short"' in response.content.decode()

    def test_no_fields_named_and_readonly_all(self, desk: Desk) -> None:
        names = [field.name for field in Essay._meta.fields]
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        for attributes in (
            {"readonly_fields": names},
            {"fieldsets": [(None, {"fields": ["title"]})]},
            {"exclude": ["slug"]},
        ):
            with desk.serving(prepopulated_fields={}, **attributes):
                assert desk.save(essay, title="new").status_code == 409

    def test_called_by_other_code(self, desk: Desk, rf: RequestFactory) -> None:
        """A form that nobody filled in has no errors, also in a request that found the lock busy."""
        model_admin = desk.admin()(Essay, admin.AdminSite())
        request: Any = rf.post("/")
        request.user = desk.boss
        plain = model_admin.get_form(request)
        assert "busy_message" not in dir(plain)
        request._advisory_lock_busy = "busy"
        for arguments in ({}, {"fields": None}, {"change": True, "obj": Essay()}):
            form = model_admin.get_form(request, **arguments)
            assert form.__name__ == plain.__name__
            assert form.__module__ == plain.__module__
            assert not form().errors
            assert form({"title": "x", "kind": "daily"}).errors == {"__all__": ["busy"]}
        for what in (model_admin.save_form, model_admin.response_action):
            with pytest.raises(Exception, match=r"^$") as caught:
                what(request, None, None)
            assert type(caught.value).__name__ == "_NotStopped"

    def test_a_form_that_knows_nothing_of_the_mixin(self, desk: Desk) -> None:
        """What get_form() returns in one of its branches: nothing is saved, and the message comes all the same."""

        class Own(ModelForm):
            class Meta:
                model = Essay
                fields = ("title",)

        def get_form(self: Any, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
            parent: Any = super(type(self), self)
            return parent.get_form(request, obj, change, **kwargs) if obj is None else Own

        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(get_form=get_form, fields=["title"], prepopulated_fields={}, readonly_fields=[]):
            response = desk.save(essay, title="new", follow=True)
            assert response.redirect_chain == [(desk.url(essay), 302)]
            (text,) = texts(response)
            assert text.startswith("Nothing was saved")
            assert not log_entries().exists()
            assert Essay.objects.get().title == "old"
            desk.other.drop(model_key(essay))
            assert "was changed" in texts(desk.save(essay, title="new", follow=True))[0]

    def test_forms_without_a_check(self, desk: Desk) -> None:
        class Careless(ModelForm):
            def is_valid(self) -> bool:
                super().is_valid()
                return True

        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(form=Careless):
            assert desk.save(essay, title="new").status_code == 302
        assert Essay.objects.get().title == "old"


@pytest.mark.skipif(django.VERSION < (6, 1), reason="actions on the change page come with Django 6.1")
class TestActionOfTheChangePage:
    @pytest.mark.parametrize("each", [True, False], ids=["with locks", "without"])
    def test_under_the_lock_of_the_page(self, each: bool, desk: Desk) -> None:
        seen: list[bool] = []
        location = importlib.import_module("django.contrib.admin.options").ActionLocation.CHANGE_FORM

        def work(modeladmin: Any, request: Any, queryset: Any) -> None:
            seen.append(desk.other.is_free(model_key(queryset.get())))

        action: Any = partial(admin.action, location=location)()
        (essay,) = essays("old")
        data = {"CHANGE_FORM-action": "work", "action": "work", "_selected_action": essay.pk}
        with desk.serving(actions=[action(locked_action()(work) if each else work)]):
            desk.other.take(model_key(essay))
            response = client(desk.boss).post(desk.url(essay), data, follow=True)
            assert seen == []
            assert response.redirect_chain == [(desk.url(essay), 302)]
            assert texts(response)[0].startswith("Nothing was saved")
            desk.other.drop(model_key(essay))
            assert client(desk.boss).post(desk.url(essay), data).status_code == 302
        assert seen == [False]


class TestDeleting:
    def test_under_the_lock(self, desk: Desk) -> None:
        (essay,) = essays("old")
        with desk.serving(), lock_statements(1):
            assert desk.delete(essay).status_code == 302
        assert desk.recorder.free == [False]
        assert not Essay.objects.exists()

    @pytest.mark.parametrize("name", ["admin", "office"])
    def test_busy(self, name: str, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(name):
            response = desk.delete(essay)
            assert (response.status_code, response.url) == (302, desk.url(essay))
            page = client(desk.boss).get(response.url)
            assert page.status_code == 200
            one = client(desk.boss)
            followed = one.post(desk.url(essay, "delete"), {"post": "yes"}, follow=True)
            (text,) = texts(followed)
        assert text.startswith("Nothing was deleted, because somebody else is working on this right now. Try again")
        assert f"held by pid {desk.other.pid}" in text
        assert Essay.objects.exists()
        assert desk.recorder.free == []
        assert not log_entries().exists()

    def test_two_sites(self, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        patterns = []
        for name in ("admin", "office"):
            site = admin.AdminSite(name)
            site.register(Essay, desk.admin())
            patterns.append(path(f"{name}/", site.urls))
        with serving_urls(patterns):
            response: Any = client(desk.boss).post(f"/office/testapp/essay/{essay.pk}/delete/", {"post": "yes"})
        assert response.url == f"/office/testapp/essay/{essay.pk}/change/"

    @pytest.mark.parametrize("code", ["a/b", "_5F", "ä ö", "a?b=c&d", "%2F", "_"])
    def test_primary_keys_in_the_address(self, code: str, desk: Desk) -> None:
        country = Country.objects.create(code=code)
        desk.other.take(model_key(country))
        locked = type("A", (AdvisoryLockAdminMixin, admin.ModelAdmin), {"lock_timeout": 0})
        with serving(Country, locked):
            url = reverse("admin:testapp_country_delete", args=[quote(code)])
            response = client(desk.boss).post(url, {"post": "yes"}, follow=True)
            assert response.redirect_chain == [(reverse("admin:testapp_country_change", args=[quote(code)]), 302)]
            assert response.status_code == 200
            assert response.context["original"] == country
            assert texts(response)[0].startswith("Nothing was deleted")
            desk.other.drop(model_key(country))
            assert client(desk.boss).post(url, {"post": "yes"}).status_code == 302
        assert not Country.objects.exists()

    def test_in_a_popup_and_with_filters(self, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving():
            response = desk.delete(essay, _popup="1", where="?_changelist_filters=q%3Dold")
        address, _, query = response.url.partition("?")
        assert address == f"/admin/testapp/essay/{essay.pk}/change/"
        assert sorted(query.split("&")) == ["_changelist_filters=q%3Dold", "_popup=1"]

    def test_with_a_field_other_than_the_primary_key(self, boss: User, other: OtherSession) -> None:
        """The address names the object by what the popup will hand back."""

        class UserAdmin(AdvisoryLockAdminMixin, Plain):
            lock_timeout = 0
            fields = ("first_name",)

            def to_field_allowed(self, request: Any, to_field: str) -> bool:
                return to_field == "username"

        somebody = User.objects.create_user("a/b_5F")
        other.take(model_key(somebody))
        with serving(User, UserAdmin):
            change, delete = (
                reverse(f"admin:auth_user_{page}", args=[quote("a/b_5F")]) for page in ("change", "delete")
            )
            typed = {"_to_field": "username", "_popup": "1", "first_name": "A"}
            assert client(boss).post(change, typed).status_code == 409
            response = client(boss).post(delete, {"post": "yes", **typed}, follow=True)
            address, _, query = response.redirect_chain[0][0].partition("?")
            assert (address, sorted(query.split("&"))) == (change, ["_popup=1", "_to_field=username"])
            assert response.status_code == 200
            assert response.context["original"] == somebody
            with lock_statements(0):
                for page in (change, delete):
                    for field in ("password", "nonsense"):
                        assert client(boss).post(page, {"_to_field": field}).status_code == 400
        somebody.delete()

    def test_who_may_delete_but_not_look(self, desk: Desk) -> None:
        who = user("shredder", "testapp.delete_essay", "testapp.delete_line")
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving():
            response = desk.delete(essay, who=who)
            assert response.url == "/admin/"
            desk.other.drop(model_key(essay))
            assert desk.delete(essay, who=who).status_code == 302
        assert not Essay.objects.exists()
        who.delete()

    def test_while_somebody_saves(self, desk: Desk) -> None:
        (essay,) = essays("old")
        gate = Gate()
        desk.recorder.body = gate
        with desk.serving():
            saving = Thread(lambda: desk.save(essay, title="new"))
            gate.wait()
            assert desk.delete(essay).url == desk.url(essay)
            gate.open.set()
            assert saving.result().status_code == 302
        assert Essay.objects.get().title == "new"


class TestPermissions:
    @pytest.mark.parametrize("permission", ["testapp.view_essay", "testapp.view_account"])
    def test_nobody_without_permission_touches_the_lock(self, permission: str, desk: Desk) -> None:
        who = user("guest", permission)
        (essay,) = essays("old")
        with desk.serving(), lock_statements(0):
            assert desk.save(essay, who=who).status_code == 403
            assert desk.delete(essay, who=who).status_code == 403
        who.delete()

    def test_permissions_of_one_object(self, desk: Desk) -> None:
        mine, theirs = essays("mine", "theirs")

        def may(self: Any, request: Any, obj: Any = None) -> bool:
            return obj is None or obj.title == "mine"

        with desk.serving(has_change_permission=may, has_delete_permission=may):
            with lock_statements(0):
                assert desk.save(theirs).status_code == 403
                assert desk.delete(theirs).status_code == 403
            with lock_statements(2):
                assert desk.save(mine).status_code == 302
                assert desk.delete(mine).status_code == 302

    def test_a_stranger(self, desk: Desk) -> None:
        (essay,) = essays("old")
        with desk.serving(), lock_statements(0):
            for page in ("change", "delete"):
                response: Any = Client().post(desk.url(essay, page), {"post": "yes"})
                assert response.url.startswith("/admin/login/")

    def test_a_forged_post(self, desk: Desk) -> None:
        """Also in a site without Django's middleware, where the admin looks at the token itself."""
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving():
            one = client(desk.boss, enforce_csrf_checks=True)
            assert one.post(desk.url(essay), desk.typed(essay)).status_code == 403
            without = [name for name in settings.MIDDLEWARE if "csrf" not in name]
            with override_settings(MIDDLEWARE=without):
                one = client(desk.boss, enforce_csrf_checks=True)
                assert one.post(desk.url(essay), desk.typed(essay)).status_code == 403


class TestClasses:
    @pytest.mark.parametrize("hook", ["change_view", "changeform_view", "delete_view", "get_form"])
    def test_a_hook_without_super(self, hook: str) -> None:
        def without(self: Any, *args: Any, **kwargs: Any) -> Any: ...

        def with_super(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(super(type(self), self), hook)(*args, **kwargs)  # pragma: no cover - it is only looked at

        class Hiding(Plain):
            pass

        setattr(Hiding, hook, without)
        with pytest.raises(
            TypeError, match=rf"Own: Own defines {hook}\(\) before AdvisoryLockAdminMixin, without super"
        ):
            type("Own", (AdvisoryLockAdminMixin, admin.ModelAdmin), {hook: without})
        with pytest.raises(TypeError, match=f"Wrong: .*Hiding defines {hook}"):
            type("Wrong", (Hiding, AdvisoryLockAdminMixin), {})
        type("Right", (AdvisoryLockAdminMixin, admin.ModelAdmin), {hook: with_super})
        type("Below", (AdvisoryLockAdminMixin, Hiding), {})

    def test_the_wrong_order_of_bases(self) -> None:
        with pytest.raises(TypeError, match="consistent method resolution"):
            type("Wrong", (admin.ModelAdmin, AdvisoryLockAdminMixin), {})

    def test_the_mixin_alone_is_enough(self, boss: User, other: OtherSession) -> None:
        (essay,) = essays("old")
        with serving(Essay, AdvisoryLockAdminMixin), lock_statements(1):
            url = reverse("admin:testapp_essay_change", args=[essay.pk])
            assert client(boss).post(url, {"title": "new", "kind": "daily"}).status_code == 302

    def test_checks(self, desk: Desk) -> None:
        assert desk.admin()(Essay, admin.AdminSite()).check() == []


class TestLimits:
    """What docs/admin.md says that it does not do."""

    def test_editing_in_the_list_does_not_ask(self, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        data = {
            "form-TOTAL_FORMS": 1,
            "form-INITIAL_FORMS": 1,
            "form-0-id": essay.pk,
            "form-0-title": "new",
            "_save": "1",
        }
        listed: dict[str, Any] = {"list_display": ["id", "title"], "list_editable": ["title"]}
        with desk.serving(**listed), lock_statements(0):
            assert (
                client(desk.boss).post(reverse("admin:testapp_essay_changelist"), data | {"_save": "1"}).status_code
                == 302
            )
        assert Essay.objects.get().title == "new"

    def test_deleting_what_is_selected_does_not_ask(self, desk: Desk) -> None:
        (essay,) = essays("old")
        desk.other.take(model_key(essay))
        with desk.serving(), lock_statements(0):
            press(desk.boss, essay, action="delete_selected", post="yes")
        assert not Essay.objects.exists()

    def test_two_editors_one_after_the_other(self, desk: Desk) -> None:
        (essay,) = essays("old")
        first, second = desk.typed(essay, title="first"), desk.typed(essay, body="second")
        with desk.serving():
            for typed in (first, second):
                assert client(desk.boss).post(desk.url(essay), typed).status_code == 302
        assert Essay.objects.get().title == "old"
