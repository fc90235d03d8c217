"""The names of keys, read back from the numbers of `pg_locks`."""

from __future__ import annotations

import gc
import sys
import threading
import uuid
from collections.abc import Iterator

import pytest
from django.core.management.base import BaseCommand
from django.db import connection
from django.http import HttpResponse
from django.test import override_settings
from django.views import View

from django_advisory_lock import (
    AdvisoryLockCommandMixin,
    AdvisoryLockJobMixin,
    AdvisoryLockViewMixin,
    LockKey,
    advisory_lock,
    advisory_lock_all,
    advisory_semaphore,
    known,
    lock_key,
    lock_view,
    model_key,
    periodic_lock,
    try_advisory_lock,
    try_advisory_semaphore,
)
from django_advisory_lock import keys as keys_module
from django_advisory_lock.inspection import held_locks
from django_advisory_lock.known import Meaning, Names
from django_advisory_lock.models import PeriodicRun
from django_advisory_lock.slots import slot_key
from django_advisory_lock.testing import assert_no_locks
from tests.support import OtherSession, Thread
from tests.testapp.models import Account, Country, Essay, Profile


def read(key: LockKey, **options: object) -> Meaning:
    return Names("default", **options).read(*key.pg_locks)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _forgotten_purposes() -> Iterator[None]:
    before = set(keys_module.purposes)
    yield
    keys_module.purposes.clear()
    keys_module.purposes.update(before)


@pytest.fixture(autouse=True)
def _no_lock_left(other: OtherSession) -> None:
    """Nothing here takes a lock, but the names of periodic work are read from the database."""


class TestUnknown:
    @pytest.mark.parametrize(
        "key", [LockKey((-1,)), LockKey((2**63 - 1,)), LockKey.pair(-5, -6), LockKey.pair(5, 6)], ids=repr
    )
    def test_it_stays_a_number(self, key: LockKey) -> None:
        meaning = read(key)
        assert meaning == Meaning(key, False)
        assert meaning.key.name == str(key.args if len(key.args) == 2 else key.args[0])

    def test_names_of_the_caller(self, name: str) -> None:
        assert not read(lock_key(name)).is_named
        assert read(lock_key(name), more=[lock_key(name)]).key.name == name


class TestModels:
    def test_a_row(self) -> None:
        assert read(model_key(Account, pk=42)) == Meaning(
            model_key(Account, pk=42), True, model="testapp.account", object_pk=42
        )
        assert read(model_key(Account, pk=42)).key.name == "testapp.account:42"

    def test_a_row_that_somebody_names(self) -> None:
        """As code that is decorated with the key of one row, or who asks for it: it is a row all the same."""
        meaning = read(model_key(Account, pk=42), more=[LockKey(model_key(Account, pk=42).args, "the first")])
        assert (meaning.key.name, meaning.model, meaning.object_pk) == ("the first", "testapp.account", 42)

    def test_a_model_as_a_whole(self) -> None:
        assert read(model_key(Account)).key.name == "testapp.account"
        assert read(model_key(Account)).model is None

    def test_no_row(self) -> None:
        """A hash beside a negative number is a pair of somebody else's, and so is a hash that is no model's."""
        assert not read(LockKey.pair(model_key(Account, pk=42).args[0], -1)).is_named
        assert not read(LockKey.pair(7, 42)).is_named

    def test_another_kind_of_primary_key_is_not_read_back(self) -> None:
        assert not read(model_key(Country, pk="at")).is_named
        assert read(model_key(Profile, pk=3)).object_pk == 3

    def test_a_purpose_that_this_process_has_met(self) -> None:
        purpose = f"sync-{uuid.uuid4().hex}"
        meaning = read(model_key(Account, pk=42, purpose=purpose))
        assert meaning.key.name == f"testapp.account[{purpose}]:42"
        assert (meaning.model, meaning.object_pk) == ("testapp.account", 42)
        assert read(model_key(Account, purpose=purpose)).key.name == f"testapp.account[{purpose}]"

    def test_purposes_without_end(self) -> None:
        """Who makes one of each row must not fill the memory."""
        for number in range(2 * keys_module.MOST_PURPOSES):
            model_key(Account, pk=1, purpose=f"for-{number}")
        assert len(keys_module.purposes) == keys_module.MOST_PURPOSES

    @override_settings(ADVISORY_LOCK_NAMESPACE="tenant-7")
    def test_a_namespace(self) -> None:
        assert read(model_key(Account, pk=42)).key.name == "tenant-7/testapp.account:42"
        assert read(model_key(Account, pk=42, namespace="")).key.name == "testapp.account:42"
        assert not read(model_key(Account, pk=42, namespace="tenant-8")).is_named

    def test_a_row_between_two_models(self) -> None:
        """Of a table that Django made for a ManyToManyField."""
        assert read(model_key(Essay.tags.through, pk=42)).model == "testapp.essay_tags"


def no_tenant() -> str:
    raise LookupError("there is no tenant here")


class TestWithoutANamespace:
    """Its function may need a tenant, and whoever lists locks, in a shell or after a test, has none."""

    @pytest.fixture(autouse=True)
    def _no_tenant(self) -> Iterator[None]:
        with override_settings(ADVISORY_LOCK_NAMESPACE=no_tenant):
            yield

    def test_what_needs_none_is_read_back(
        self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        @advisory_lock(lock_key(name, namespace=""))
        def numbered() -> None: ...

        @advisory_lock(name)
        def named() -> None: ...

        assert read(model_key(Account, pk=42, namespace="")).key.name == "testapp.account:42"
        assert read(lock_key(name, namespace="")).key.name == name
        assert not read(lock_key(name, namespace="tenant-7")).is_named
        assert "there is no tenant here" in caplog.messages[0]

    def test_locks_are_listed(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name, namespace=""))
        (lock,) = held_locks()
        assert lock.key == lock_key(name, namespace="")
        with pytest.raises(AssertionError, match=f"is held by pid {other.pid}"):
            assert_no_locks()

    def test_other_errors_are_raised(self) -> None:
        @known.source
        def failing(using: str | None) -> list[LockKey]:
            raise ZeroDivisionError

        try:
            with pytest.raises(ZeroDivisionError):
                Names("default")
        finally:
            known._sources.remove(failing)


class TestDecorated:
    def test_functions(self, name: str) -> None:
        @advisory_lock(name, "waits")
        def waits() -> None: ...

        @try_advisory_lock(name, "tries")
        def tries() -> None: ...

        @advisory_lock_all((name, "one"), (name, "two"))
        def several() -> None: ...

        @lock_view(name, "view")
        def view(request: object) -> HttpResponse:
            return HttpResponse()

        @periodic_lock(name, min_interval=60)
        def periodic() -> None: ...

        for last in ("waits", "tries", "one", "two", "view"):
            assert read(lock_key(name, last)).key.name == f"{name}:{last}"
        assert read(lock_key("periodic", name)).key.name == f"periodic:{name}"
        del waits
        gc.collect()
        assert not read(lock_key(name, "waits")).is_named

    def test_semaphores(self, name: str) -> None:
        @advisory_semaphore(name, limit=2)
        def waits() -> None: ...

        @try_advisory_semaphore(name, "try", limit=1)
        def tries() -> None: ...

        assert read(slot_key(lock_key(name), 2)).key.name == f"{name}:2"
        assert read(slot_key(lock_key(name), "gate")).key.name == f"{name}:gate"
        assert read(slot_key(lock_key(name, "try"), 1)).key.name == f"{name}:try:1"
        assert not read(slot_key(lock_key(name), 3)).is_named

    def test_others_decorate_meanwhile(self, name: str) -> None:
        """As requests do in other threads, while names are gathered."""
        stop = threading.Event()

        def decorate() -> None:
            while not stop.is_set():
                for number in range(50):
                    advisory_lock(name, number)(lambda: None)

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        threads = [Thread(decorate) for _ in range(2)]
        try:
            for _ in range(100):
                read(lock_key(name))
        finally:
            sys.setswitchinterval(before)
            stop.set()
            for thread in threads:
                thread.result()

    def test_keys_of_the_call_are_not_known_before_it(self, name: str) -> None:
        @advisory_lock(lambda: name)
        def function() -> None: ...

        assert not read(lock_key(name)).is_named

    @override_settings(ADVISORY_LOCK_NAMESPACE=lambda: "tenant-7")
    def test_a_namespace(self, name: str) -> None:
        @advisory_lock(name)
        def function() -> None: ...

        assert read(lock_key(name)).key.name == f"tenant-7/{name}"


class TestClasses:
    def test_keys_of_their_own(self, name: str) -> None:
        class Command(AdvisoryLockCommandMixin, BaseCommand):
            lock_key = (name, "command")

        class Job(AdvisoryLockJobMixin):
            lock_key = (name, "job")

            def run(self) -> None: ...

        class Page(AdvisoryLockViewMixin, View):
            lock_key = (name, "view")

        for last in ("command", "job", "view"):
            assert read(lock_key(name, last)).key.name == f"{name}:{last}"

    def test_default_keys(self) -> None:
        class Command(AdvisoryLockCommandMixin, BaseCommand): ...

        class Job(AdvisoryLockJobMixin):
            def run(self) -> None: ...

        class Page(AdvisoryLockViewMixin, View): ...

        job = f"{Job.__module__}.{Job.__qualname__}"
        assert read(lock_key("job", job)).key.name == f"job:{job}"
        assert read(lock_key("command", __name__)).key.name == f"command:{__name__}"

    def test_what_only_an_instance_knows_or_is_wrong(self, name: str) -> None:
        class Asked(AdvisoryLockJobMixin):
            @property
            def lock_key(self) -> str:  # type: ignore[override]
                return name

            def run(self) -> None: ...

        class Wrong(AdvisoryLockJobMixin):
            lock_key = 1.5  # type: ignore[assignment]

            def run(self) -> None: ...

        assert not read(lock_key(name)).is_named

    def test_commands_that_were_never_imported(self) -> None:
        path = "django.core.management.commands.migrate"
        assert read(lock_key("command", path)).key.name == f"command:{path}"


class TestPeriodicWork:
    def test_what_is_in_the_table(self, name: str, other: OtherSession) -> None:
        key = lock_key("periodic", name)
        run = PeriodicRun.objects.create(key=str(key.args[0]), name="the nightly work", min_interval="1 day")
        pair = PeriodicRun.objects.create(key=f"7,{run.pk}", name="by a pair", min_interval="1 day")
        try:
            assert read(key).key.name == "the nightly work"
            assert read(LockKey.pair(7, run.pk)).key.name == "by a pair"
        finally:
            run.delete()
            pair.delete()

    def test_is_called_as_its_code_calls_it(self, name: str, other: OtherSession) -> None:
        key = lock_key("periodic", name)
        run = PeriodicRun.objects.create(key=str(key.args[0]), name=name, min_interval="1 day")
        try:
            assert read(key).key.name == f"periodic:{name}"
            with override_settings(ADVISORY_LOCK_NAMESPACE=no_tenant):
                assert read(key).key.name == name
        finally:
            run.delete()

    def test_what_is_no_key_there(self, name: str, other: OtherSession) -> None:
        runs = [
            PeriodicRun.objects.create(key=key, name=name, min_interval="1 day") for key in ("x", "1,2,3", f"{2**70}")
        ]
        try:
            assert not read(lock_key(name)).is_named
        finally:
            for run in runs:
                run.delete()

    def test_without_the_table(self, name: str, other: OtherSession) -> None:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE django_advisory_lock_periodicrun RENAME TO hidden")
            try:
                assert not read(lock_key(name)).is_named
                cursor.execute("SELECT 1")
            finally:
                cursor.execute("ALTER TABLE hidden RENAME TO django_advisory_lock_periodicrun")
