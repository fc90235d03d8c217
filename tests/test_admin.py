"""The admin's list of periodic work: how it reads, who may do what, and the button that allows the next run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.db.models.functions import Now
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import translation

from django_advisory_lock import lock_key, periodic_lock
from django_advisory_lock.models import PeriodicRun
from tests.admin_site import client, installed, log_entries, serving, text_of, texts, user
from tests.support import OtherSession, Thread

LIST = "/admin/django_advisory_lock/periodicrun/"
Outcome = PeriodicRun.Outcome


@pytest.fixture(scope="module", autouse=True)
def periodic_admin(django_db_setup: None) -> Iterator[None]:
    with installed():
        from django_advisory_lock.admin import PeriodicRunAdmin

        with serving(PeriodicRun, PeriodicRunAdmin):
            yield


@pytest.fixture(scope="module")
def boss(periodic_admin: None) -> User:
    return user("boss")


@pytest.fixture(autouse=True)
def empty(periodic_admin: None) -> Iterator[None]:
    """Begin and end without a row: other tests leave their periodic work."""
    delete_all()
    yield
    delete_all()


def delete_all() -> None:
    for alias in ("default", "other"):
        PeriodicRun.objects.using(alias).all().delete()
    log_entries().all().delete()


def note(name: str, using: str = "default", **values: Any) -> PeriodicRun:
    """Note a piece of work; times are given as what they are ago."""
    given: dict[str, Any] = {"key": f"key of {name}", "name": name, "min_interval": timedelta(minutes=3), **values}
    for field, value in given.items():
        if field.endswith("_at") and value is not None:
            given[field] = Now() - value
    made: PeriodicRun = PeriodicRun.objects.using(using).create(**given)
    made.refresh_from_db()
    return made


def rows(response: Any) -> dict[str, dict[str, str]]:
    """Return what the list shows: for each name the texts of the columns."""
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", response.content.decode().partition("<tbody>")[2], re.DOTALL):
        cells = re.findall(r'<t[dh] class="field-(\w+)[^"]*">(.*?)</t[dh]>', row, re.DOTALL)
        texts_of_row = {name: re.sub("<[^>]+>", "", text).replace("\xa0", " ") for name, text in cells}
        found[texts_of_row.pop("label")] = texts_of_row
    return found


def allow(who: User, *runs: PeriodicRun, where: str = "", **options: Any) -> Any:
    data = {"action": "allow_next_run", "_selected_action": [run.pk for run in runs], "index": "0"}
    return client(who, **options).post(LIST + where, data, follow=True)


STATES: dict[str, dict[str, Any]] = {
    "never": {},
    "succeeded": {
        "last_started_at": timedelta(hours=2, minutes=5, seconds=1),
        "last_finished_at": timedelta(hours=2, minutes=4, seconds=30.75),
        "last_succeeded_at": timedelta(hours=2, minutes=4, seconds=30.75),
        "last_outcome": Outcome.SUCCEEDED,
        "last_host": "web-1",
        "last_pid": 12345,
        "run_count": 1234,
        "min_interval": timedelta(days=1),
    },
    "runs": {
        "last_started_at": timedelta(minutes=1, seconds=1),
        "last_finished_at": timedelta(days=3),
        "last_outcome": Outcome.STARTED,
        "last_host": "web-2",
        "last_pid": 1,
    },
    "failed": {
        "last_started_at": timedelta(days=40),
        "last_finished_at": timedelta(days=39),
        "last_outcome": Outcome.FAILED,
        "last_error": "ValueError: <b>bad</b>\n" + "long " * 2000,
        "last_host": "web-1",
        "min_interval": timedelta(seconds=30),
    },
    "quick": {
        "last_started_at": timedelta(seconds=61.25),
        "last_finished_at": timedelta(seconds=61),
        "last_outcome": Outcome.SUCCEEDED,
        "min_interval": timedelta(seconds=1),
    },
}


def note_all() -> dict[str, PeriodicRun]:
    return {name: note(name, **values) for name, values in STATES.items()}


class TestList:
    def test_how_it_reads(self, boss: User, other: OtherSession) -> None:
        note_all()
        shown = rows(client(boss).get(LIST))
        assert list(shown) == sorted(STATES)
        nothing = {"last_outcome": "-", "age": "-", "duration": "-", "last_host": "-", "last_pid": "-", "error": "-"}
        assert shown["never"] == {**nothing, "interval": "3 minutes", "runs": "0"}
        assert shown["succeeded"] == {
            "last_outcome": "succeeded",
            "age": "2 hours, 5 minutes ago",
            "duration": "30 seconds",
            "interval": "1 day",
            "last_host": "web-1",
            "last_pid": "12345",
            "runs": "1234",
            "error": "-",
        }
        assert shown["runs"]["last_outcome"] == "started, not finished"
        assert (shown["runs"]["age"], shown["runs"]["duration"]) == ("1 minute ago", "-")
        assert shown["failed"]["age"] == "1 month, 1 week ago"
        assert shown["failed"]["duration"] == "1 day"
        assert shown["quick"]["duration"] == "0.2 seconds"
        assert shown["quick"]["interval"] == "1 second"

    def test_errors_are_shortened_and_escaped(self, boss: User, other: OtherSession) -> None:
        note_all()
        page = client(boss).get(LIST)
        assert "<b>bad" not in page.content.decode()
        assert rows(page)["failed"]["error"].startswith("ValueError: &lt;b&gt;bad&lt;/b&gt; long long")
        assert len(rows(page)["failed"]["error"]) < 120

    def test_a_name_with_html(self, boss: User, other: OtherSession) -> None:
        run = note("<script>%s", last_host="<i>")
        assert "<script>%s" not in client(boss).get(LIST).content.decode()
        page = allow(boss, run)
        assert "<script>%s" not in page.content.decode()
        assert texts(page) == ["The next run of “<script>%s” may start now, whenever it comes."]

    def test_empty(self, boss: User, other: OtherSession) -> None:
        assert "0 periodic runs" in text_of(client(boss).get(LIST))

    @pytest.mark.parametrize(
        ("length", "words"),
        [
            (timedelta(0), "0 seconds"),
            (timedelta(seconds=-5), "0 seconds"),  # a clock that was put back
            (timedelta(milliseconds=3), "0 seconds"),
            (timedelta(seconds=1), "1 second"),
            (timedelta(seconds=1.26), "1.3 seconds"),
            (timedelta(seconds=59.9), "60 seconds"),
            (timedelta(seconds=60), "1 minute"),
            (timedelta(hours=23, minutes=59, seconds=59), "23 hours, 59 minutes"),
            (timedelta(days=1, hours=3), "1 day, 3 hours"),
            (timedelta(days=366), "1 year"),
            (timedelta(days=10**7), "10000000 days, 0:00:00"),
        ],
        ids=str,
    )
    def test_lengths_of_time(self, length: timedelta, words: str) -> None:
        from django_advisory_lock.admin.words import in_words

        assert in_words(length).replace("\xa0", " ") == words

    def test_in_another_language(self) -> None:
        from django_advisory_lock.admin.words import in_words

        with translation.override("de"):
            assert in_words(timedelta(hours=2, minutes=1)).replace("\xa0", " ") == "2 Stunden, 1 Minute"

    def test_the_number_of_queries_does_not_grow(self, boss: User, other: OtherSession) -> None:
        who = client(boss)
        counts = []
        note("first")
        for number in range(2):
            with CaptureQueriesContext(connection) as captured:
                assert who.get(LIST).status_code == 200
            counts.append(len(captured))
            for run in range(20):
                note(f"{number} {run}", **STATES["failed"])
        assert counts[0] == counts[1]

    def test_filters_and_search(self, boss: User, other: OtherSession) -> None:
        note_all()
        for query, names in (
            ("?last_outcome__exact=failed", ["failed"]),
            ("?last_outcome__exact=started", ["runs"]),
            ("?silent=yes", ["failed", "quick"]),
            ("?silent=nonsense", sorted(STATES)),
            ("?last_host=web-1", ["failed", "succeeded"]),
            ("?last_host=web-1&silent=yes&q=fail", ["failed"]),
            ("?q=quick", ["quick"]),
            ("?q=ValueError", ["failed"]),
            ("?q=web-2", ["runs"]),
            ("?q=nobody", []),
        ):
            response = client(boss).get(LIST + query)
            assert sorted(rows(response)) == names, query
        text = text_of(client(boss).get(LIST))
        for title in ("By last outcome", "By silence", "no success for three intervals", "By last host"):
            assert title in text

    def test_silence(self, boss: User, other: OtherSession) -> None:
        states: dict[str, dict[str, Any]] = {
            "just in time": {"last_succeeded_at": timedelta(minutes=8)},
            "late": {"last_succeeded_at": timedelta(minutes=9, seconds=1)},
            "never": {"last_started_at": timedelta(minutes=10)},
            "never, often": {"last_started_at": timedelta(seconds=1), "run_count": 4},
            "new": {"last_started_at": timedelta(seconds=1), "run_count": 1},
        }
        for name, values in states.items():
            note(name, **values)
        assert sorted(rows(client(boss).get(LIST + "?silent=yes"))) == ["late", "never", "never, often"]

    def test_ordering(self, boss: User, other: OtherSession) -> None:
        note_all()
        by_age = {order: list(rows(client(boss).get(f"{LIST}?o={order}"))) for order in ("3", "-3")}
        assert by_age["3"] == ["failed", "succeeded", "quick", "runs", "never"]
        assert by_age["-3"] == by_age["3"][::-1]
        for order in ("5", "8", "-1.2"):
            assert len(rows(client(boss).get(f"{LIST}?o={order}"))) == len(STATES)

    @pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/New_York"])
    def test_time_zones(self, zone: str, boss: User, other: OtherSession) -> None:
        run = note("a", last_started_at=timedelta(hours=5))
        with override_settings(TIME_ZONE=zone), translation.override("en"):
            assert rows(client(boss).get(LIST))["a"]["age"] == "5 hours ago"
            assert client(boss).get(f"{LIST}{run.pk}/change/").status_code == 200

    def test_a_clock_that_was_put_back(self, boss: User, other: OtherSession) -> None:
        note("a", last_started_at=-timedelta(hours=5), last_finished_at=timedelta(hours=1))
        assert rows(client(boss).get(LIST))["a"]["age"] == "0 seconds ago"
        assert rows(client(boss).get(LIST))["a"]["duration"] == "-"

    def test_it_is_found_by_autodiscovery(self) -> None:
        from django_advisory_lock.admin import PeriodicRunAdmin

        assert type(admin.site.get_model_admin(PeriodicRun)) is PeriodicRunAdmin
        assert PeriodicRunAdmin(PeriodicRun, admin.site).check() == []


class TestPages:
    def test_the_page_of_one_shows_all_and_changes_nothing(self, boss: User, other: OtherSession) -> None:
        run = note("nightly", **STATES["failed"])
        response = client(boss).get(f"{LIST}{run.pk}/change/")
        text = text_of(response)
        assert response.status_code == 200
        for part in ("nightly", "failed", "web-1", "ValueError: <b>bad</b>", "Number of runs"):
            assert part in text
        assert "<b>bad" not in response.content.decode()
        assert 'name="name"' not in response.content.decode()
        assert 'name="_save"' not in response.content.decode()
        assert client(boss).post(f"{LIST}{run.pk}/change/", {"name": "changed"}).status_code == 403
        assert PeriodicRun.objects.get().name == "nightly"

    def test_nothing_is_added(self, boss: User, other: OtherSession) -> None:
        for response in (client(boss).get(LIST + "add/"), client(boss).post(LIST + "add/", {"name": "x"})):
            assert response.status_code == 403
        assert "Add periodic run" not in text_of(client(boss).get(LIST))

    def test_deleting(self, boss: User, other: OtherSession) -> None:
        for who, status in ((boss, 302), (user("cleaner", "django_advisory_lock.delete_periodicrun"), 302)):
            run = note("a")
            assert client(who).post(f"{LIST}{run.pk}/delete/", {"post": "yes"}).status_code == status
            assert not PeriodicRun.objects.exists()
        run = note("a")
        for codename in ("view", "change"):
            who = user(f"not to delete, only {codename}", f"django_advisory_lock.{codename}_periodicrun")
            assert client(who).post(f"{LIST}{run.pk}/delete/", {"post": "yes"}).status_code == 403
        assert PeriodicRun.objects.exists()

    def test_deleting_what_is_selected(self, boss: User, other: OtherSession) -> None:
        kept, gone = note("kept"), note("gone")
        data = {"action": "delete_selected", "_selected_action": [gone.pk], "post": "yes"}
        assert client(boss).post(LIST, data).status_code == 302
        assert list(PeriodicRun.objects.all()) == [kept]

    def test_who_may_look(self, other: OtherSession) -> None:
        note("a")
        for permission, status in (
            ("django_advisory_lock.view_periodicrun", 200),
            ("django_advisory_lock.add_periodicrun", 403),
            ("testapp.view_account", 403),
        ):
            who = user(permission, permission)
            assert client(who).get(LIST).status_code == status
        assert client(user("both", "django_advisory_lock.view_periodicrun")).get(LIST).status_code == 200


class TestAllowing:
    def test_the_next_run_goes_on_at_once(self, boss: User, name: str, other: OtherSession) -> None:
        ran: list[int] = []
        work = periodic_lock(name, min_interval=timedelta(hours=12))(lambda: ran.append(1))
        work()
        work()
        assert len(ran) == 1
        run = PeriodicRun.objects.get(name=name)
        response = allow(boss, run)
        assert response.redirect_chain == [(LIST, 302)]
        assert texts(response) == [f"The next run of “{name}” may start now, whenever it comes."]
        assert rows(response)[name]["age"] == "-"
        run.refresh_from_db()
        assert run.last_started_at is None
        assert (run.last_outcome, run.run_count) == ("succeeded", 1)
        (entry,) = log_entries().all()
        assert (entry.user, entry.object_repr, entry.get_change_message()) == (boss, name, "Allowed the next run now.")
        work()
        work()
        assert len(ran) == 2

    def test_while_it_runs(self, boss: User, name: str, other: OtherSession) -> None:
        """What runs is not disturbed, and nothing runs beside it: the lock says so, not the row."""

        def body() -> None:
            allow(boss, PeriodicRun.objects.get(name=name))
            assert Thread(work).result() is None
            ran.append(1)

        ran: list[int] = []
        work = periodic_lock(name, min_interval=timedelta(hours=12))(body)
        work()
        assert ran == [1]
        run = PeriodicRun.objects.get(name=name)
        assert (run.last_outcome, run.last_started_at, run.run_count) == ("succeeded", None, 1)
        assert run.duration is None
        assert other.is_free(lock_key("periodic", name))

    def test_several(self, boss: User, other: OtherSession) -> None:
        runs = note_all()
        response = allow(boss, runs["failed"], runs["quick"])
        assert texts(response) == ["The next runs of these 2 may start now, whenever they come."]
        left = PeriodicRun.objects.filter(last_started_at=None).values_list("name", flat=True)
        assert sorted(left) == ["failed", "never", "quick"]
        assert log_entries().count() == 2

    def test_in_a_filtered_list(self, boss: User, other: OtherSession) -> None:
        runs = note_all()
        response = allow(boss, runs["failed"], runs["quick"], where="?silent=yes&q=fail")
        assert texts(response) == ["The next run of “failed” may start now, whenever it comes."]
        assert PeriodicRun.objects.filter(name="quick", last_started_at=None).count() == 0

    def test_gone_meanwhile(self, boss: User, other: OtherSession) -> None:
        run = note("a")
        PeriodicRun.objects.all().delete()
        assert allow(boss, run).status_code == 200
        assert not log_entries().exists()

    def test_who_may(self, other: OtherSession) -> None:
        run = note("a", last_started_at=timedelta(hours=1))
        for codename in ("view", "delete"):
            who = user(
                f"only {codename}",
                f"django_advisory_lock.{codename}_periodicrun",
                "django_advisory_lock.view_periodicrun",
            )
            assert "Allow the next run now" not in text_of(client(who).get(LIST))
            assert texts(allow(who, run)) != ["The next run of “a” may start now, whenever it comes."]
            assert PeriodicRun.objects.get().last_started_at is not None
        who = user("may change", "django_advisory_lock.change_periodicrun")
        assert "Allow the next run now" in text_of(client(who).get(LIST))
        allow(who, run)
        assert PeriodicRun.objects.get().last_started_at is None

    def test_only_a_post_with_a_token(self, boss: User, other: OtherSession) -> None:
        run = note("a", last_started_at=timedelta(hours=1))
        assert allow(boss, run, enforce_csrf_checks=True).status_code == 403
        data: dict[str, Any] = {"action": "allow_next_run", "_selected_action": run.pk, "index": "0"}
        client(boss).get(LIST, data)
        assert PeriodicRun.objects.get().last_started_at is not None

    def test_all_or_nothing(self, boss: User, other: OtherSession) -> None:
        """What is not in the log did not happen."""
        run = note("a", last_started_at=timedelta(hours=1))
        with connection.cursor() as cursor, pytest.raises(Exception, match="django_admin_log"):
            cursor.execute("ALTER TABLE django_admin_log RENAME TO away")
            try:
                allow(boss, run)
            finally:
                cursor.execute("ALTER TABLE away RENAME TO django_admin_log")
        assert PeriodicRun.objects.get().last_started_at is not None


class TestAnotherDatabase:
    def test_it_shows_what_the_locks_note(self, boss: User, name: str, other: OtherSession) -> None:
        """With ADVISORY_LOCK_DATABASE the table is looked for there, by the locks and by the admin."""
        note("here")
        with override_settings(ADVISORY_LOCK_DATABASE="other"):
            ran: list[int] = []
            work = periodic_lock(name, min_interval=timedelta(hours=12))(lambda: ran.append(1))
            work()
            assert list(rows(client(boss).get(LIST))) == [name]
            assert list(rows(client(boss).get(LIST + "?silent=yes"))) == []
            run = PeriodicRun.objects.using("other").get()
            assert client(boss).get(f"{LIST}{run.pk}/change/").status_code == 200
            allow(boss, run)
            work()
            assert len(ran) == 2
            assert log_entries().count() == 1
            assert client(boss).post(f"{LIST}{run.pk}/delete/", {"post": "yes"}).status_code == 302
        assert not PeriodicRun.objects.using("other").exists()
        assert list(rows(client(boss).get(LIST))) == ["here"]
