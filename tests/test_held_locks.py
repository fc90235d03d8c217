"""The admin's page of locks: what it shows and to whom, and the button that ends a session."""

from __future__ import annotations

import contextlib
import html
import io
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_advisory_lock import LockKey, advisory_lock, lock_key, model_key, try_advisory_lock
from django_advisory_lock.inspection import holders_of
from django_advisory_lock.models import HeldLock, PeriodicRun
from tests.admin_site import client, installed, log_entries, serving_urls, text_of, texts, user
from tests.server import Watcher, new_server
from tests.support import OtherSession, Thread, extra_alias, value, wait_until
from tests.test_ending import lives, start
from tests.testapp.models import Account, Country, Profile

LIST = "/admin/django_advisory_lock/heldlock/"
VIEW, END = "django_advisory_lock.view_heldlock", "django_advisory_lock.end_session"
NASTY = "<script>alert('\"1\"')</script>&amp; \x1b[31m\u202egnp.\n\x07 👧🏽 🔒"
SHOWN = "<script>alert('\"1\"')</script>&amp; \\x1b[31m\\u202egnp.\\n\\x07 👧🏽 🔒"


class ProfileAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    def get_urls(self) -> list[Any]:
        return [path("", self.changelist_view, name="testapp_profile_changelist")]


@pytest.fixture(scope="module", autouse=True)
def site(django_db_setup: None) -> Iterator[admin.AdminSite]:
    with installed():
        from django_advisory_lock.admin import HeldLockAdmin

        site = admin.AdminSite()
        site.register(HeldLock, HeldLockAdmin)
        site.register(Account)
        site.register(Profile, ProfileAdmin)
        with serving_urls([path("admin/", site.urls)]):
            yield site


@pytest.fixture(scope="module")
def boss(site: admin.AdminSite) -> User:
    return user("boss")


@pytest.fixture(autouse=True)
def empty(site: admin.AdminSite) -> Iterator[None]:
    PeriodicRun.objects.all().delete()
    yield
    log_entries().all().delete()


@pytest.fixture
def victim(other: OtherSession) -> Iterator[OtherSession]:
    session = OtherSession()
    yield session
    session.close()


def rows(response: Any) -> list[dict[str, str]]:
    """Return what the table shows: for each row the key, and the texts of the cells by the heads of the columns."""
    found = []
    content = response.content.decode()
    for group in re.findall(r"<tbody.*?</tbody>", content, re.DOTALL):
        head = re.findall(r"<th scope=\"rowgroup\".*?<bdi>(.*?)</bdi>", group, re.DOTALL)[0]
        for row in re.findall(r"<tr[^>]*id=.*?</tr>", group, re.DOTALL):
            cells = re.findall(r'<td[^>]*data-label="([^"]*)"[^>]*>(.*?)</td>', row, re.DOTALL)
            found.append({"key": plain(head), **{name: plain(text) for name, text in cells}})
    return found


def plain(markup: str) -> str:
    text = html.unescape(re.sub("<[^>]+>", " ", markup)).replace("\xa0", " ")
    return re.sub(r"\s+", " ", text).replace(" ,", ",").strip()


def keys(response: Any) -> list[str]:
    return [row["key"] for row in rows(response)]


def end_url(session: OtherSession, key: str, alias: str = "default", query: str = "") -> str:
    return f"{LIST}{session.pid}/{start(session, key, alias)}/end/{query}"


def known(name: str) -> Any:
    """Decorate a function, so that the name is known for as long as the function is there."""
    return try_advisory_lock(name)(lambda: None)


class TestPage:
    def test_held_and_waiting(self, boss: User, name: str, other: OtherSession) -> None:
        work = known(name)
        other.take(lock_key(name))
        waiting = Thread(lambda: advisory_lock(name).acquire().release())
        other.wait_for_waiters(lock_key(name))
        response = client(boss).get(LIST)
        other.drop(lock_key(name))
        waiting.result()
        holder, waiter = rows(response)
        assert work() is None
        assert holder["key"] == waiter["key"] == name
        assert holder["Lock"] == "held, exclusive"
        assert re.fullmatch(r"waiting, exclusive for [\d.]+ seconds?", waiter["Lock"])
        assert (holder["Process"], holder["Application"]) == (str(other.pid), "other-session")
        assert re.fullmatch(r"idle, for [\d.]+ seconds?", holder["State"])
        assert waiter["State"].startswith("active, for")
        assert (holder["Blocked by"], waiter["Blocked by"]) == ("-", str(other.pid))
        content = response.content.decode()
        (target,) = re.findall(rf'<a href="#([^"]*)"[^>]*>{other.pid}</a>', content)
        assert f'id="{target}"' in content
        ids = re.findall(r'\bid="([^"]*)"', content)
        assert len(ids) == len(set(ids))
        assert "1 lock held, 1 session waiting" in text_of(response)
        assert str(lock_key(name).args[0]) in text_of(response)

    def test_many_in_the_way(self, boss: User, name: str, other: OtherSession) -> None:
        """In a queue of hundreds each is in the way of all that come later: named are those that are first."""
        holders = [OtherSession() for _ in range(7)]
        pids = {str(holder.pid) for holder in holders}
        for holder in holders:
            holder.take(lock_key(name), shared=True)
        waiting = Thread(lambda: advisory_lock(name).acquire().release())
        other.wait_for_waiters(lock_key(name))
        response = client(boss).get(LIST)
        for holder in holders:
            holder.close()
        waiting.result()
        *named, more = rows(response)[-1]["Blocked by"].split(", ")
        assert len(set(named) & pids) == len(named) == 5
        assert more == "2 more"

    def test_nothing(self, boss: User, other: OtherSession) -> None:
        text = text_of(client(boss).get(LIST))
        assert "0 locks held, 0 sessions waiting" in text
        assert "No advisory lock is held or waited for." in text

    def test_shared_and_numbers(self, boss: User, victim: OtherSession, other: OtherSession) -> None:
        pair, number = LockKey.pair(-7, 8), LockKey((-(2**63),))
        for session in (victim, other):
            session.take(pair, shared=True)
        other.take(number)
        other.take(number, shared=True)
        shown = rows(client(boss).get(LIST))
        assert [row["Lock"] for row in shown if row["key"] == "-7, 8"] == ["held, shared"] * 2
        modes = sorted(row["Lock"] for row in shown if row["key"] == str(-(2**63)))
        assert modes == ["held, exclusive", "held, shared"]

    def test_order(self, boss: User, name: str, other: OtherSession) -> None:
        """First what is waited for longest."""
        work = [known(f"{name}-{letter}") for letter in "abcd"]
        names = [f"{name}-{letter}" for letter in "abcd"]
        for one in names:
            other.take(lock_key(one))
        waiting = []
        for one in (names[3], names[1]):
            waiting.append(Thread(lambda one=one: advisory_lock(one).acquire().release()))  # type: ignore[misc]
            other.wait_for_waiters(lock_key(one))
        assert list(dict.fromkeys(keys(client(boss).get(LIST)))) == [names[3], names[1], names[0], names[2]]
        for one in names:
            other.drop(lock_key(one))
        for thread in waiting:
            thread.result()
        assert len(work) == 4

    def test_filter(self, boss: User, name: str, victim: OtherSession, other: OtherSession) -> None:
        work = known(f"{name}-One"), known(f"{name}-two")
        victim.raw.execute("SET application_name = 'the-victim'")
        victim.take(lock_key(f"{name}-One"))
        other.take(lock_key(f"{name}-two"))
        number = str(lock_key(f"{name}-two").args[0])
        for query, found in (
            ("", ["One", "two"]),
            (f"{name}-", ["One", "two"]),
            ("-one", ["One"]),
            (" -ONE ", ["One"]),
            ("the-victim", ["One"]),
            (str(other.pid), ["two"]),
            (number, ["two"]),
            ("none", []),
            ("nobody", []),
        ):
            assert keys(client(boss).get(LIST, {"q": query})) == [f"{name}-{end}" for end in found], query
        assert "Nothing fits the filter." in text_of(client(boss).get(LIST, {"q": "nobody"}))
        response = client(boss).get(LIST, {"q": '-one" onfocus="x'})
        assert 'value="-one&quot; onfocus=&quot;x"' in response.content.decode()
        assert work

    def test_most(self, boss: User, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        from django_advisory_lock.admin import lock_table

        monkeypatch.setattr(lock_table, "LIMIT", 2)
        for number in range(4):
            other.take(lock_key(number))
        response = client(boss).get(LIST)
        assert len(rows(response)) == 2
        assert "2 more keys are not shown: filter." in text_of(response)
        assert "4 locks held" in text_of(response)

    def test_one_question_and_no_lock(self, boss: User, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        with CaptureQueriesContext(connection) as captured:
            assert len(rows(client(boss).get(LIST))) == 1
        sent = [query["sql"] for query in captured.captured_queries]
        assert len([statement for statement in sent if "pg_locks" in statement]) == 1
        assert not [statement for statement in sent if re.search(r"pg_\w*advisory|FOR UPDATE|pg_terminate", statement)]

    def test_the_number_of_queries_does_not_grow(self, boss: User, other: OtherSession) -> None:
        counts = []
        for number in (1, 20):
            for pk in range(number):
                other.take(model_key(Account, pk=pk))
            with CaptureQueriesContext(connection) as captured:
                assert len(rows(client(boss).get(LIST))) == number
            counts.append(len(captured))
        assert counts[0] == counts[1]

    def test_objects(self, boss: User, other: OtherSession) -> None:
        """The object is linked where it has a page for this user."""
        numbers = model_key(Country, pk="de"), model_key(Account, pk=7)
        for key in (*numbers, model_key(PeriodicRun, pk=7), model_key(User, pk=7), model_key(Account)):
            other.take(key)
        links = r'<a href="(/admin/[^"]*)" id="key-[^"]*-object">([^<]*)</a>'
        content = client(boss).get(LIST).content.decode()
        assert re.findall(links, content) == [("/admin/testapp/account/7/change/", "testapp.account:7")]
        assert "auth.user:7" in content
        for extra, count in (("testapp.view_account", 1), ("testapp.view_profile", 0)):
            who = user(extra, VIEW, extra)
            assert len(re.findall(links, client(who).get(LIST).content.decode())) == count

    def test_a_class_with_pages_of_its_own(self, boss: User, other: OtherSession) -> None:
        """It has no page for one object."""
        other.take(model_key(Profile, pk=5))
        response = client(boss).get(LIST)
        assert keys(response) == ["testapp.profile:5"]
        assert "-object" not in response.content.decode()

    def test_the_table_alone(self, boss: User, name: str, other: OtherSession) -> None:
        """What a script asks for; it takes nobody's messages away."""
        other.take(lock_key(name))
        browser = client(boss)
        browser.get(f"{LIST}1/1/end/")
        response = browser.get(LIST, {"table": "1"})
        assert len(rows(response)) == 1
        assert response.content.decode().strip().startswith('<div id="held-locks-table">')
        assert "<html" not in response.content.decode()
        assert len(texts(browser.get(LIST))) == 1

    def test_without_scripts(self, boss: User, other: OtherSession) -> None:
        reload = '<noscript><meta http-equiv="refresh" content="30"></noscript>'
        content = client(boss).get(LIST).content.decode()
        assert reload in content.partition("</head>")[0]
        assert 'href="?refresh=off"' in content
        assert reload not in client(boss).get(f"{LIST}?refresh=off").content.decode()
        assert "style=" not in content
        assert not re.search(r"<script(?! src)|\son\w+=", content.partition('id="content-start"')[2])

    @pytest.mark.slow
    def test_a_prepared_transaction(self, boss: User, name: str) -> None:
        with new_server(max_prepared_transactions="2") as server, server.alias("two_phase"):
            with contextlib.closing(Watcher(server)) as session:
                for number in "12":
                    session.raw.execute("BEGIN")
                    session.raw.execute("SELECT pg_advisory_xact_lock_shared(%s)", lock_key(name).args)
                    session.raw.execute(f"PREPARE TRANSACTION '{number}'")
                waiting = Thread(lambda: advisory_lock(name, using="two_phase").acquire().release())
                session.wait_for_waiters(lock_key(name))
                response = client(boss).get(LIST, {"database": "two_phase"})
                for number in "12":
                    session.raw.execute(f"ROLLBACK PREPARED '{number}'")
                waiting.result()
        one, two, waiter = rows(response)
        assert one["Process"] == two["Process"] == waiter["Blocked by"] == "a prepared transaction"
        assert (one["State"], one["Client"], waiter["Client"]) == ("-", "-", "local socket")
        content = response.content.decode()
        assert len(re.findall("End this session", content)) == 1
        assert len(set(re.findall('<tr role="row" id="([^"]*)"', content))) == 3

    def test_somebody_in_the_way_who_is_gone(self, boss: User, name: str, other: OtherSession) -> None:
        """Locks and who blocks whom are read one after the other."""
        from dataclasses import replace

        from django_advisory_lock.admin.lock_table import TableMaker

        other.take(lock_key(name))
        (lock,) = holders_of(name)
        (group,) = TableMaker(None, admin.site, set()).make([replace(lock, granted=False, blocked_by=(1, 1))]).groups  # type: ignore[arg-type]
        assert group.rows[0].blockers == [("1", "")]
        assert group.order[0] == -1

    def test_in_another_language(self, boss: User, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        with override_settings(USE_THOUSAND_SEPARATOR=True):
            content = client(boss, headers={"accept-language": "de"}).get(LIST).content.decode()
            ending = client(boss, headers={"accept-language": "de"}).get(end_url(other, name)).content.decode()
        for page in (content, ending):
            assert "Abmelden" in page
            assert re.search(rf">{other.pid}</(td|dd)>", page)
        assert f"/{other.pid}/{start(other, name)}/end/" in content

    def test_only_reading(self, boss: User) -> None:
        assert client(boss).post(LIST).status_code == 405
        assert client(boss).head(LIST).status_code == 200
        for where in ("add/", "1/change/", "1/delete/", "1/history/", "1/"):
            assert client(boss).get(LIST + where).status_code == 404


class TestPlace:
    def test_in_the_index(self, boss: User) -> None:
        assert f'href="{LIST}"' in client(boss).get("/admin/").content.decode()
        viewer = client(user("viewer", VIEW))
        assert f'href="{LIST}"' in viewer.get("/admin/").content.decode()
        assert "Advisory locks" in text_of(viewer.get("/admin/django_advisory_lock/"))
        assert LIST not in client(user("ender", END)).get("/admin/").content.decode()

    def test_it_is_found_by_autodiscovery(self) -> None:
        from django_advisory_lock.admin import HeldLockAdmin

        assert type(admin.site.get_model_admin(HeldLock)) is HeldLockAdmin
        assert HeldLockAdmin(HeldLock, admin.site).check() == []

    def test_permissions(self) -> None:
        found = Permission.objects.filter(content_type__model="heldlock").values_list("codename", flat=True)
        assert set(found) == {"view_heldlock", "end_session"}

    @pytest.mark.parametrize("options", [{}, {"use_base_manager": True}])
    def test_there_is_no_table_to_dump(self, options: dict[str, Any], other: OtherSession) -> None:
        out = io.StringIO()
        call_command("dumpdata", "django_advisory_lock", stdout=out, **options)
        assert json.loads(out.getvalue()) == []
        assert not HeldLock.objects.exists()
        assert HeldLock._meta.db_table not in connection.introspection.table_names()


class TestDatabases:
    def test_a_choice(self, boss: User, name: str, other: OtherSession) -> None:
        with contextlib.closing(OtherSession("other")) as elsewhere:
            elsewhere.take(lock_key(name))
            assert rows(client(boss).get(LIST)) == []
            response = client(boss).get(LIST, {"database": "other"})
            assert [row["Process"] for row in rows(response)] == [str(elsewhere.pid)]
            content = response.content.decode()
            assert '<option value="other" selected>' in content
            assert '<option value="sqlite"' not in content
            link = html.unescape(re.findall(r'href="([^"]*/end/[^"]*)"', content)[0])
            assert link == end_url(elsewhere, name, "other", "?database=other")
            assert client(boss).post(link).headers["Location"] == f"{LIST}?database=other"
            with override_settings(ADVISORY_LOCK_DATABASE="other"):
                assert rows(client(boss).get(LIST)) == []

    def test_the_one_of_the_settings(self, boss: User, name: str, other: OtherSession) -> None:
        with contextlib.closing(OtherSession("other")) as elsewhere:
            elsewhere.take(lock_key(name))
            with override_settings(ADVISORY_LOCK_DATABASE="other"):
                assert len(rows(client(boss).get(LIST))) == 1

    def test_only_one(self, boss: User, monkeypatch: pytest.MonkeyPatch) -> None:
        left = {alias: connections.settings[alias] for alias in ("default", "sqlite")}
        monkeypatch.setattr(connections, "settings", left)
        assert 'name="database"' not in client(boss).get(LIST).content.decode()

    @pytest.mark.parametrize(
        ("setting", "query", "problem"),
        [
            ("default", "sqlite", "There is no PostgreSQL database “sqlite” in DATABASES. There are: default, same,"),
            ("default", "<b>\x00", "There is no PostgreSQL database “<b>\\x00” in DATABASES."),
            ("nowhere", "", "There is no PostgreSQL database “nowhere” in DATABASES."),
            ("sqlite", "", "Advisory locks need PostgreSQL through psycopg 3; the database 'sqlite' is SQLite"),
            (3, "", "ADVISORY_LOCK_DATABASE must be the alias of a database, not 3."),
        ],
        ids=["not PostgreSQL", "nonsense", "no alias", "SQLite", "no text"],
    )
    def test_what_cannot_be_read(self, setting: Any, query: str, problem: str, boss: User) -> None:
        with override_settings(ADVISORY_LOCK_DATABASE=setting):
            for more in ({}, {"table": "1"}):
                response = client(boss).get(LIST, {"database": query, **more})
                assert response.status_code == 200
                (said,) = re.findall(r'<p class="errornote">(.*?)</p>', response.content.decode())
                assert problem in html.unescape(said)
                assert "<b>" not in said
            response = client(boss).post(f"{LIST}1/1/end/?{urlencode({'database': query})}", follow=True)
            assert problem in texts(response)[0]

    def test_one_that_cannot_be_reached(self, boss: User, other: OtherSession) -> None:
        with extra_alias("down", HOST="/nowhere"):
            response = client(boss).get(LIST, {"database": "down"})
        assert response.status_code == 200
        (problem,) = re.findall('<p class="errornote">(.*?)</p>', response.content.decode())
        assert problem.startswith("The locks of the database cannot be read: ")
        assert "No such file or directory" in problem

    def test_inside_a_transaction(self, boss: User, monkeypatch: pytest.MonkeyPatch, other: OtherSession) -> None:
        """The one of the request goes on after an error, as with ATOMIC_REQUESTS."""
        from django_advisory_lock import pg_locks

        monkeypatch.setattr(pg_locks, "ALL_LOCKS", "SELECT 1 / 0")
        with transaction.atomic():
            response = client(user("reader", VIEW)).get(LIST)
            assert value("SELECT 1") == 1
        assert "The locks of the database cannot be read: division by zero" in text_of(response)


class TestPermissions:
    @pytest.mark.parametrize(
        ("permissions", "may_view", "may_end"),
        [
            (["testapp.view_account"], False, False),
            (["django_advisory_lock.change_periodicrun"], False, False),
            ([VIEW], True, False),
            ([END], False, False),
            ([VIEW, END], True, True),
            ([], True, True),
        ],
        ids=["other app", "other model", "view", "end", "both", "superuser"],
    )
    def test_matrix(
        self,
        permissions: list[str],
        may_view: bool,
        may_end: bool,
        request: pytest.FixtureRequest,
        name: str,
        victim: OtherSession,
    ) -> None:
        victim.take(lock_key(name))
        url = end_url(victim, name)
        browser = client(user(request.node.name, *permissions))
        for query in ({}, {"table": "1"}):
            response = browser.get(LIST, query)
            assert response.status_code == (200 if may_view else 403)
            assert ("End this session" in response.content.decode()) is may_end
        assert browser.get(url).status_code == (200 if may_end else 403)
        assert browser.post(url).status_code == (302 if may_end else 403)
        wait_until(lambda: may_end == (not holders_of(name)))
        if not may_end:
            assert lives(victim)
        assert log_entries().count() == may_end

    @pytest.mark.parametrize("attributes", [{"is_staff": False}, {"is_active": False}], ids=str)
    def test_nobody_else(self, attributes: dict[str, Any], name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        who = user(f"{name}", VIEW, END)
        User.objects.filter(pk=who.pk).update(**attributes)
        for response in (client(who).get(LIST), client(who).post(end_url(victim, name))):
            assert (response.status_code, response.headers["Location"].partition("?")[0]) == (302, "/admin/login/")
        assert lives(victim)


class TestEndingASession:
    def test_it_ends_and_is_noted(self, boss: User, name: str, victim: OtherSession, other: OtherSession) -> None:
        work = known(name)
        victim.take(lock_key(name))
        waiting = Thread(lambda: advisory_lock(name).acquire().release())
        other.wait_for_waiters(lock_key(name))
        browser = client(boss)
        asked = browser.get(end_url(victim, name))
        text = text_of(asked)
        for part in (
            *(f"End session {victim.pid} (other-session)?", "its open transaction is rolled back"),
            *(f"{name} : held, exclusive", "1 session waits for it.", "Connected since", "Database default"),
        ):
            assert part in text
        response = browser.post(end_url(victim, name), follow=True)
        waiting.result()
        assert response.redirect_chain == [(LIST, 302)]
        assert texts(response) == [f"Session {victim.pid} (other-session) has ended, and what it held is free."]
        (entry,) = log_entries().all()
        assert (entry.user, entry.object_id) == (boss, str(victim.pid))
        assert entry.object_repr == f"{victim.pid} (other-session)"
        number = lock_key(name).args[0]
        assert entry.get_change_message() == f"Ended the session, on default. It held: {name} ({number})."
        assert entry.get_admin_url() is None
        assert f"Changed: {entry.object_id} (other-session)" in text_of(browser.get("/admin/"))
        assert work() is None

    def test_who_waits(self, boss: User, name: str, victim: OtherSession, other: OtherSession) -> None:
        other.take(lock_key(name))
        victim.take(lock_key(7))
        waiting = Thread(lambda: victim.wait(lock_key(name)))
        other.wait_for_waiters(lock_key(name))
        url = f"{LIST}{victim.pid}/{start_of_waiting(victim)}/end/"
        assert "waiting, exclusive" in text_of(client(boss).get(url))
        client(boss).post(url)
        with pytest.raises(Exception, match="terminating connection"):
            waiting.result()
        (entry,) = log_entries().all()
        numbers = f"{lock_key(name).args[0]} ({lock_key(name).args[0]})"
        assert entry.get_change_message().endswith(f"It held: 7 (7). It waited for: {numbers}.")

    def test_many_locks(self, boss: User, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        for number in range(9):
            victim.take(lock_key(number))
        client(boss).post(end_url(victim, name))
        (entry,) = log_entries().all()
        assert entry.get_change_message().endswith("; 5 more.")

    def test_a_get_never_ends_anything(self, boss: User, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        url = end_url(victim, name)
        browser = client(boss)
        assert [browser.get(url).status_code, browser.head(url).status_code] == [200, 200]
        assert browser.get(url, {"post": "yes", "_method": "POST"}).status_code == 200
        for method in ("put", "delete", "patch", "options"):
            assert getattr(browser, method)(url).status_code == 405
        assert lives(victim)
        assert not log_entries().exists()

    def test_csrf(self, boss: User, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        url = end_url(victim, name)
        browser = client(boss, enforce_csrf_checks=True)
        assert browser.post(url).status_code == 403
        assert browser.post(url, {"csrfmiddlewaretoken": "x" * 64}).status_code == 403
        assert lives(victim)
        page = browser.get(url).content.decode()
        token = re.findall('name="csrfmiddlewaretoken" value="([^"]*)"', page)[-1]
        assert browser.post(url, {"csrfmiddlewaretoken": token}).status_code == 302
        wait_until(lambda: not holders_of(name))

    def test_the_filter_is_kept(self, boss: User, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        number = str(lock_key(name).args[0])
        content = client(boss).get(LIST, {"q": number}).content.decode()
        url = html.unescape(re.findall(r'href="([^"]*/end/[^"]*)"', content)[0])
        assert f'href="{LIST}?q={number}"' in client(boss).get(url).content.decode()
        assert client(boss).post(url).headers["Location"] == f"{LIST}?q={number}"

    @pytest.mark.parametrize("method", ["get", "post"])
    def test_another_session_with_its_pid(self, method: str, boss: User, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        url = f"{LIST}{victim.pid}/{start(victim, name) - 1}/end/"
        response = getattr(client(boss), method)(url, follow=True)
        text = f"Nothing was ended: session {victim.pid} is gone, or no longer holds or waits for a lock."
        assert texts(response) == [text]
        assert lives(victim)
        assert not log_entries().exists()

    @pytest.mark.parametrize("numbers", ["0/0", f"{2**31}/{2**63}", f"{10**40}/{10**40}"])
    def test_numbers_out_of_range(self, numbers: str, boss: User) -> None:
        for method in ("get", "post"):
            assert "is gone" in texts(getattr(client(boss), method)(f"{LIST}{numbers}/end/", follow=True))[0]

    def test_it_has_no_lock_any_more(self, boss: User, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        url = end_url(victim, name)
        victim.drop(lock_key(name))
        assert "no longer holds" in texts(client(boss).post(url, follow=True))[0]
        assert lives(victim)

    def test_gone_in_the_last_moment(
        self, boss: User, name: str, victim: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from django_advisory_lock import ending
        from django_advisory_lock.admin import held_locks

        def late(*args: Any, **kwargs: Any) -> Any:
            victim.close()
            return ending.end_session(*args, **kwargs)

        monkeypatch.setattr(held_locks, "end_session", late)
        victim.take(lock_key(name))
        pid = victim.pid
        response = client(boss).post(end_url(victim, name), follow=True)
        assert texts(response) == [f"Nothing was ended: session {pid} (other-session) was gone already."]
        assert not log_entries().exists()

    @pytest.mark.parametrize("alias", ["default", "same"])
    def test_the_own_session(self, alias: str, boss: User, name: str, other: OtherSession) -> None:
        """Also where it is looked at from another alias of this thread."""
        with advisory_lock(name) as lock:
            browser = client(boss)
            page = browser.get(LIST, {"database": alias})
            assert len(rows(page)) == 1
            assert "serves this page" in text_of(page)
            assert "/end/" not in page.content.decode()
            (holder,) = holders_of(name)
            assert holder.backend_start is not None
            url = f"{LIST}{holder.pid}/{int(holder.backend_start.timestamp() * 10**6 + 0.5)}/end/?database={alias}"
            for method in ("get", "post"):
                (said,) = texts(getattr(browser, method)(url, follow=True))
                assert said == f"Nothing was ended: session {holder.pid} is the one that serves you this page."
            assert lock.is_held()
        assert not log_entries().exists()

    def test_what_cannot_be_noted_is_not_ended(self, boss: User, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE django_admin_log RENAME TO away")
            try:
                response = client(boss).post(end_url(victim, name), follow=True)
            finally:
                cursor.execute("ALTER TABLE away RENAME TO django_admin_log")
        assert 'relation "django_admin_log" does not exist' in texts(response)[0]
        assert lives(victim)

    @pytest.mark.slow
    def test_one_that_does_not_end_in_time(self, boss: User, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from django_advisory_lock.admin import held_locks

        monkeypatch.setattr(held_locks, "TIMEOUT", 0.01)
        with new_server() as server, server.alias("frozen") as alias:
            with contextlib.closing(Watcher(server)) as watcher, contextlib.closing(Watcher(server)) as stopped:
                stopped.take(lock_key(name))
                url = end_url(stopped, name, alias, f"?database={alias}")
                with server.frozen([stopped.pid]):
                    response = client(boss).post(url, follow=True)
                watcher.wait_until_free(lock_key(name))
        assert "was told to end, and has not done so yet" in texts(response)[0]
        assert log_entries().count() == 1


def start_of_waiting(session: OtherSession) -> int:
    from django_advisory_lock.ending import start_of
    from django_advisory_lock.inspection import waiting_locks

    (lock,) = [lock for lock in waiting_locks() if lock.pid == session.pid]
    found = start_of(lock)
    assert found is not None
    return found


class TestRoles:
    """What the database role of the site may see and do."""

    @pytest.fixture
    def role(self, name: str, other: OtherSession) -> Iterator[str]:
        other.raw.execute(f'CREATE ROLE "{name}"')
        try:
            with extra_alias("weak", {"options": f"-c role={name}"}):
                yield name
        finally:
            other.raw.execute(f'DROP ROLE "{name}"')

    def test_none(self, role: str, boss: User, victim: OtherSession) -> None:
        """What it cannot tell from another session with the same pid is not ended."""
        victim.take(lock_key(role))
        page = client(boss).get(LIST, {"database": "weak"})
        (row,) = rows(page)
        assert (row["Process"], row["Application"], row["State"]) == (str(victim.pid), "other-session", "-")
        assert "/end/" not in page.content.decode()
        assert "With pg_read_all_stats it may" in text_of(page)
        url = end_url(victim, role, query="?database=weak")
        assert "is gone" in texts(client(boss).post(url, follow=True))[0]
        assert lives(victim)

    def test_may_look_and_not_end(self, role: str, boss: User, victim: OtherSession, other: OtherSession) -> None:
        other.raw.execute(f'GRANT pg_read_all_stats TO "{role}"')
        victim.take(lock_key(role))
        page = client(boss).get(LIST, {"database": "weak"})
        assert "/end/" in page.content.decode()
        assert "With pg_read_all_stats it may" not in text_of(page)
        with transaction.atomic(using="weak"):  # which goes on
            response = client(boss).post(end_url(victim, role, query="?database=weak"), follow=True)
            assert value("SELECT 1", alias="weak") == 1
        (said,) = texts(response)
        reasons = ("permission denied", "must be a superuser")  # from PostgreSQL 16 on, and before
        assert said.startswith(tuple(f"Session {victim.pid} (other-session) was not ended: {each}" for each in reasons))
        assert lives(victim)
        assert not log_entries().exists()


class TestEscaping:
    def test_names(self, boss: User, name: str, victim: OtherSession) -> None:
        nasty = f"{name} {NASTY}"
        work = known(nasty)
        victim.raw.execute(f"SET application_name = $${NASTY}$$")
        victim.take(lock_key(nasty))
        browser = client(boss)
        page = browser.get(LIST)
        (row,) = rows(page)
        assert row["key"] == f"{name} {SHOWN}"
        assert row["Application"].startswith("<script>alert('\"1\"')</script>&amp; ")
        ended = browser.get(end_url(victim, nasty))
        done = browser.post(end_url(victim, nasty), follow=True)
        (entry,) = log_entries().all()
        assert f"It held: {name} {SHOWN} (" in entry.get_change_message()
        index = browser.get("/admin/")
        for response in (page, ended, done, index, browser.get(LIST, {"q": NASTY}), browser.get(LIST, {"q": SHOWN})):
            content = response.content.decode()
            assert "<script>alert" not in content
            assert "'\"1\"'" not in content
            assert not set(content) & {"\x1b", "\x07", "\u202e"}
        for response in (page, ended):
            assert "👧🏽 🔒" in response.content.decode()
        assert work() is None

    def test_a_name_from_the_table(self, boss: User, other: OtherSession) -> None:
        """Not every name was made by the library."""
        run = PeriodicRun.objects.create(key="7", name=NASTY, min_interval=timedelta(1))
        other.take(lock_key(7))
        assert keys(client(boss).get(LIST)) == [SHOWN]
        run.delete()
