"""Two workers are given the same job at once: one works, the other skips it."""

from __future__ import annotations

import abc
import ast
import asyncio
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import logging
import os
import pickle
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar
from unittest import mock

import pytest
from asgiref.sync import iscoroutinefunction, sync_to_async
from celery import Task, shared_task
from celery.exceptions import Retry
from django.db import transaction
from django.db.transaction import TransactionManagementError
from django.test import override_settings
from django.utils.decorators import method_decorator

from django_advisory_lock import (
    AdvisoryLockJobMixin,
    LockDeadlock,
    LockKey,
    LockLost,
    LockTimeout,
    advisory_lock,
    lock_key,
)
from tests.guards.periods import Runs
from tests.support import LIMIT, OtherSession, Thread, backend_pid, fork, statements, value, wait_until
from tests.test_async import run, until
from tests.test_docs import cells, reader, run_section, table
from tests.test_interrupts import INTERRUPTS, Interrupter, strike_at_every_line
from tests.testapp.models import Account

T = TypeVar("T")


def key_of(cls: type) -> LockKey:
    return lock_key("job", f"{cls.__module__}.{cls.__qualname__}")


class Base:
    """What a job is for its queue."""

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        return "ran", args, kwargs


class Job(AdvisoryLockJobMixin, Base):
    """A job with a method that it inherits, and that can be pickled."""

    def __init__(self, payload: int = 0) -> None:
        self.payload = payload


class Own(AdvisoryLockJobMixin):
    """A job with a method of its own, which may be given something to do."""

    def run(self, body: Callable[[], Any] | None = None, /, *args: Any, **kwargs: Any) -> Any:
        """Do it."""
        return body() if body else "ran"


class Asynchronous(AdvisoryLockJobMixin):
    async def run(self, body: Callable[[], Any] | None = None) -> Any:
        """Do it later."""
        return await body() if body else "ran"


class Watch:
    """Tells how often a key is held whenever it is called."""

    def __init__(self, other: OtherSession) -> None:
        self.other = other
        self.seen: list[int] = []

    def __call__(self, cls: type) -> None:
        self.seen.append(self.other.holders(key_of(cls)))

    async def asynchronously(self, cls: type) -> None:
        self(cls)


@pytest.fixture
def watch(other: OtherSession) -> Watch:
    return Watch(other)


@pytest.fixture
def skipped(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was logged about skipped jobs."""
    with caplog.at_level(logging.INFO, "django_advisory_lock"):
        yield lambda: [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]


class TestRuns:
    @pytest.mark.parametrize("cls", [Job, Own])
    def test_under_the_lock_and_free_right_after(self, cls: type[Any], other: OtherSession) -> None:
        job = cls()
        with statements(2):
            assert "ran" in job.run()
        other.take(key_of(cls))
        assert job.run() is None
        other.drop(key_of(cls))
        assert "ran" in job.run()
        assert other.is_free(key_of(cls))

    def test_held_meanwhile(self, watch: Watch) -> None:
        Own().run(lambda: watch(Own))
        Own.run(Own(), lambda: watch(Own))
        assert watch.seen == [1, 1]

    def test_asynchronously(self, watch: Watch) -> None:
        async def main() -> None:
            assert await Asynchronous().run() == "ran"
            await Asynchronous().run(lambda: watch.asynchronously(Asynchronous))
            await Asynchronous.run(Asynchronous(), lambda: watch.asynchronously(Asynchronous))
            watch.other.take(key_of(Asynchronous))
            assert await Asynchronous().run() is None
            watch.other.drop(key_of(Asynchronous))

        run(main)
        assert watch.seen == [1, 1]

    def test_arguments_and_result_pass(self, other: OtherSession) -> None:
        named = {"self": 2, "job": 3, "cls": 4, "function": 5, "error": 6}
        assert Job().run(1, **named) == ("ran", (1,), named)
        assert Job.run(Job(), 1, b=2) == ("ran", (1,), {"b": 2})

    def test_errors_pass_and_the_lock_is_free(self, other: OtherSession) -> None:
        with pytest.raises(ZeroDivisionError):
            Own().run(lambda: 1 / 0)
        assert other.is_free(key_of(Own))

    def test_inside_a_transaction_it_lasts_until_the_commit(self, other: OtherSession) -> None:
        with transaction.atomic():
            assert Own().run() == "ran"
            assert other.holders(key_of(Own)) == 1
        assert other.is_free(key_of(Own))

    def test_not_beside_a_transaction_of_another_alias(self, other: OtherSession) -> None:
        with transaction.atomic("same"), pytest.raises(TransactionManagementError, match="would be freed before"):
            Own().run()

    def test_not_asynchronously_inside_a_transaction(self, other: OtherSession) -> None:
        async def main() -> None:
            block = transaction.atomic()
            await sync_to_async(block.__enter__)()
            with pytest.raises(TransactionManagementError, match="asynchronous code"):
                await Asynchronous().run()
            await sync_to_async(block.__exit__)(None, None, None)

        run(main)

    def test_within_itself(self, watch: Watch) -> None:
        """One owner nests, and its outermost call frees the lock."""

        def inner() -> None:
            Own().run()
            watch(Own)

        async def ainner() -> None:
            await Asynchronous().run()
            watch(Asynchronous)

        Own().run(inner)
        run(lambda: Asynchronous().run(ainner))
        assert watch.seen == [1, 1]

    def test_a_lost_lock(self, other: OtherSession) -> None:
        """Case 72: a job whose session was killed is no success, and the next one runs."""
        with pytest.raises(LockLost):
            Own().run(lambda: other.kill(backend_pid()))
        assert Own().run() == "ran"

        async def main() -> None:
            async def killed() -> None:
                other.kill(await sync_to_async(backend_pid)())

            with pytest.raises(LockLost):
                await Asynchronous().run(killed)
            assert await Asynchronous().run() == "ran"

        run(main)

    def test_a_job_that_fails_over_a_killed_session(self, other: OtherSession) -> None:
        def body() -> None:
            other.kill(backend_pid())
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            Own().run(body)
        assert Own().run() == "ran"

    def test_a_wait_that_cannot_end(self, name: str, other: OtherSession) -> None:
        job = Own()
        job.lock_key, job.lock_timeout = name, None
        with advisory_lock(name, dedicated=True), pytest.raises(LockDeadlock):
            job.run()

    def test_a_fork_takes_the_lock_for_itself(self, other: OtherSession) -> None:
        """It does not nest in what its parent holds."""

        def body() -> int:
            pid = fork()
            if pid == 0:  # pragma: no cover - a child is not measured
                os._exit(0 if Own().run() is None else 1)
            return os.waitpid(pid, 0)[1]

        assert Own().run(body) == 0


class TestInheritance:
    def test_super_takes_nothing_more(self, name: str, watch: Watch) -> None:
        """At several levels, with other arguments than the call had, and as it was written before super()."""

        class First(Own):
            def get_lock_key(self, *args: Any, **kwargs: Any) -> Any:
                asked.append(args)
                return name, *args

            def run(self, *args: Any, **kwargs: Any) -> Any:
                return "first", Own.run(self)

        class Second(First):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                return "second", super().run("other", "arguments")

        class Third(Second):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                return "third", super().run()

        asked: list[Any] = []
        Third().run("warm")
        with statements(2):
            assert Third().run("a") == ("third", ("second", ("first", "ran")))
        assert asked == [("warm",), ("a",)]

    def test_asynchronous_super_takes_nothing_more(self, watch: Watch) -> None:
        class Child(Asynchronous):
            async def run(self, body: Any = None) -> Any:
                return "child", await super().run(body)

        async def main() -> None:
            assert await Child().run(lambda: watch.asynchronously(Child)) == ("child", None)

        run(main)
        assert watch.seen == [1]

    def test_a_diamond(self, watch: Watch) -> None:
        class Left(Own):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                return "left", super().run(*args)

        class Right(Own):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                return "right", super().run(*args)

        class Bottom(Left, Right):
            pass

        Bottom().run()
        with statements(2):
            assert Bottom().run() == ("left", ("right", "ran"))
        Bottom().run(lambda: watch(Bottom))
        assert watch.seen == [1]

    def test_bases_that_come_in_between(self, watch: Watch) -> None:
        """What a class inherits depends on the class that inherits from it."""

        class Middle(Base):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                watch(type(self))
                return "middle", super().run()

        class Bottom(Job, Middle):
            pass

        class Guarded(AdvisoryLockJobMixin):
            def run(self) -> Any:
                return "guarded", super().run()  # type: ignore[misc]

        class Empty(AdvisoryLockJobMixin):
            pass

        class Both(Empty, Guarded, Base):
            pass

        assert Bottom().run() == ("middle", ("ran", (), {}))
        Both().run()
        with statements(2):
            assert Both().run() == ("guarded", ("ran", (), {}))
        assert watch.seen == [1]

    def test_an_abstract_base(self, watch: Watch) -> None:
        class Abstract(AdvisoryLockJobMixin, abc.ABC):
            @abc.abstractmethod
            def run(self) -> Any:
                watch(type(self))
                return "abstract"

        class StillAbstract(Abstract):
            pass

        class Concrete(StillAbstract):
            def run(self) -> Any:
                return super().run()

        abstract: list[Any] = [Abstract, StillAbstract]
        for cls in abstract:
            with pytest.raises(TypeError, match="abstract"):
                cls()
        assert Concrete().run() == "abstract"
        assert watch.seen == [1]

    def test_abstract_in_name_only(self, watch: Watch) -> None:
        """Without ABC such a class can be used."""

        class Job(AdvisoryLockJobMixin):
            @abc.abstractmethod
            def run(self) -> None:
                watch(type(self))

        job: Any = Job
        job().run()
        assert watch.seen == [1]

    def test_a_base_that_keeps_init_subclass_to_itself(self, watch: Watch) -> None:
        class Registry:
            def __init_subclass__(cls) -> None:
                pass

        class Job(Registry, AdvisoryLockJobMixin):
            def run(self) -> None:
                watch(type(self))

        class Child(Job):
            def run(self) -> None:
                watch(type(self))
                super().run()

        Job().run()
        Child().run()
        assert watch.seen == [1, 1, 1]

    def test_a_base_before_the_mixin(self, watch: Watch) -> None:
        """It hides the method of the job, unless it calls super()."""
        with pytest.raises(TypeError, match=r"Base defines run\(\) before AdvisoryLockJobMixin"):
            type("Job", (Base, AdvisoryLockJobMixin), {})
        with pytest.raises(TypeError, match="Base defines run"):
            type("Child", (Base, Own), {})

        class Timed:
            def run(self, *args: Any) -> Any:
                return "timed", super().run(*args)  # type: ignore[misc]

        class Child(Timed, Own):
            pass

        Child().run()
        with statements(2):
            assert Child().run() == ("timed", "ran")
        Child().run(lambda: watch(Child))
        assert watch.seen == [1]

    def test_a_base_that_is_made_with_arguments(self, other: OtherSession) -> None:
        class Made:
            def __new__(cls, number: int) -> Any:
                made: Any = super().__new__(cls)
                made.number = number
                return made

        class Job(AdvisoryLockJobMixin, Made, Base):
            pass

        class Pair(AdvisoryLockJobMixin, tuple):  # type: ignore[type-arg]
            def run(self) -> Any:
                return sum(self)

        job: Any = Job(3)
        assert job.number == 3
        assert job.run() == ("ran", (), {})
        assert Pair([1, 2]).run() == 3

    def test_a_job_takes_the_arguments_that_it_would_take_without_the_mixin(self) -> None:
        class Takes(Own):
            def __init__(self, number: int) -> None:
                self.number = number

        assert Takes(3).number == Takes(number=3).number == 3
        own: Any = Own
        takes: Any = Takes
        for wrong in (lambda: own(1), lambda: own(a=1), takes):
            with pytest.raises(TypeError):
                wrong()


class TestMethod:
    def test_another_name(self, watch: Watch) -> None:
        class Handler(AdvisoryLockJobMixin):
            lock_method = "perform"

            def run(self) -> None:
                watch(type(self))

            def perform(self) -> None:
                watch(type(self))

        Handler().run()
        Handler().perform()
        assert watch.seen == [0, 1]

    def test_another_name_in_a_subclass(self, watch: Watch) -> None:
        class Child(Own):
            lock_method = "all"

            def all(self) -> None:
                for _ in range(2):
                    super().run(lambda: watch(Child))
                    self.run(lambda: watch(Child))

        class Grandchild(Child):
            lock_method = "run"

        Child().run(lambda: watch(Child))
        Child.run(Child(), lambda: watch(Child))
        assert watch.seen == [0, 0]
        watch.seen.clear()
        Child().all()
        with statements(2):
            Child().all()
        assert watch.seen == [1] * 8
        watch.seen.clear()
        Grandchild().run(lambda: watch(Grandchild))
        Own().run(lambda: watch(Own))
        assert watch.seen == [1, 1]

    def test_a_name_that_does_not_exist(self) -> None:
        """An error, not a job without a lock. Classes between the mixin and the job need no method yet."""

        class Missing(AdvisoryLockJobMixin):
            lock_method = "preform"

            def perform(self) -> None: ...

        class Disabled(Own):
            run = None  # type: ignore[assignment]

        class Between(AdvisoryLockJobMixin):
            pass

        for cls in (Missing, Disabled, Between, AdvisoryLockJobMixin):
            with pytest.raises(TypeError, match=rf"{cls.__name__} has no {cls.lock_method}\(\)"):
                cls()

    def test_a_name_that_metaclasses_have_too(self, watch: Watch) -> None:
        class Calls(AdvisoryLockJobMixin, abc.ABC):
            lock_method = "__call__"

        class Job(Calls):
            def __call__(self) -> None:
                watch(type(self))

        class Registers(AdvisoryLockJobMixin, abc.ABC):
            lock_method = "register"

        Job()()
        assert watch.seen == [1]
        for cls in (Calls, Registers):
            with pytest.raises(TypeError, match="has no"):
                cls()

    def test_static_and_class_methods(self, watch: Watch) -> None:
        class Static(AdvisoryLockJobMixin):
            @staticmethod
            def run(number: int) -> int:
                watch(Static)
                return number

        class OfClass(AdvisoryLockJobMixin):
            @classmethod
            def run(cls, number: int) -> Any:
                watch(OfClass)
                return cls, number

        class Child(OfClass):
            @classmethod
            def run(cls, number: int) -> Any:
                return super().run(number + 1)

        assert [Static.run(1), Static().run(2)] == [1, 2]
        assert [OfClass.run(1), OfClass().run(2)] == [(OfClass, 1), (OfClass, 2)]
        assert watch.seen == [1] * 4
        with statements(4):
            assert [Child.run(1), Child().run(2)] == [(Child, 2), (Child, 3)]

    def test_asynchronous_static_methods(self, watch: Watch) -> None:
        class Static(AdvisoryLockJobMixin):
            @staticmethod
            async def run() -> str:
                watch(Static)
                return "ran"

        async def main() -> None:
            assert [await Static.run(), await Static().run()] == ["ran", "ran"]

        assert inspect.iscoroutinefunction(Static.run)
        assert inspect.iscoroutinefunction(Static().run)
        run(main)
        assert watch.seen == [1, 1]

    def test_called_on_the_class_without_a_job(self) -> None:
        own: Any = Own
        for call in (own.run, lambda: own.run("x"), lambda: own.run(Base()), lambda: own.run(Job())):
            with pytest.raises(TypeError, match=r"Own.run\(\) is called with a job of its class, not"):
                call()

    def test_wrapped_around_that_of_a_parent(self, watch: Watch) -> None:
        own: Any = Own

        class Wrapped(Own):
            @functools.wraps(own.run)
            def run(self, *args: Any) -> Any:  # type: ignore[override]
                watch(Wrapped)
                return Own.run(self, *args)

        class Alias(Own):
            run = Own.run

        class Borrowed(AdvisoryLockJobMixin):
            run = vars(Own)["run"]

        wrapped: Any = Wrapped()
        wrapped.run()
        with statements(2):
            assert wrapped.run(lambda: watch(Wrapped)) is None
        Alias().run(lambda: watch(Alias))
        Borrowed().run(lambda: watch(Borrowed))
        assert watch.seen == [1] * 5

    def test_replaced_by_a_decorator_of_the_class(self, watch: Watch) -> None:
        def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapper(*args: Any) -> Any:
                return "decorated", function(*args)

            return wrapper

        @method_decorator(decorated, name="run")
        class Child(Own):
            pass

        @method_decorator(decorated, name="run")
        class Inherits(AdvisoryLockJobMixin, Base):
            pass

        Child().run()
        with statements(2 + 2):
            assert Child().run() == ("decorated", "ran")
            assert Inherits().run() == ("decorated", ("ran", (), {}))
        Child().run(lambda: watch(Child))
        assert watch.seen == [1]

    def test_replaced_in_a_test(self, other: OtherSession) -> None:
        with mock.patch.object(Own, "run", return_value="replaced") as replaced:
            assert Own().run(None, 1) == "replaced"
            with statements(2):
                Own().run()
            other.take(key_of(Own))
            assert Own().run() is None
            other.drop(key_of(Own))
        assert replaced.call_args_list == [mock.call(None, 1), mock.call()]
        assert Own().run() == "ran"

    def test_partials_and_callable_objects(self, watch: Watch) -> None:
        class Work:
            """An object with attributes of any name."""

            def __init__(self) -> None:
                self.name = self.own = self.function = self.is_static = "its own"

            def __call__(self, *args: Any) -> Any:
                watch(jobs[-1])
                return args

        class Later(Work):
            async def __call__(self, *args: Any) -> Any:
                watch(jobs[-1])
                return args

        def work(*args: Any) -> Any:
            watch(jobs[-1])
            return args[1:]

        class Objects(AdvisoryLockJobMixin):
            run = Work()

        class Partial(AdvisoryLockJobMixin):
            run = staticmethod(functools.partial(Work(), 1))

        class PartialMethod(AdvisoryLockJobMixin):
            run = functools.partialmethod(work, 1)

        class Inherits(PartialMethod):
            pass

        class Awaited(AdvisoryLockJobMixin):
            run = Later()

        jobs: list[type] = []
        for cls, expected in ((Objects, ()), (Partial, (1,)), (PartialMethod, (1,)), (Inherits, (1,))):
            jobs.append(cls)
            assert cls().run(2) == (*expected, 2)
        jobs.append(Awaited)
        assert iscoroutinefunction(Awaited().run)
        assert run(lambda: Awaited().run(2)) == (2,)
        assert Objects.run.__doc__ == "An object with attributes of any name."
        assert watch.seen == [1] * 5

    def test_work_that_would_be_done_after_the_call_is_refused(self, other: OtherSession) -> None:
        class Generates(AdvisoryLockJobMixin):
            def run(self) -> Iterator[int]:
                yield 1

        class GeneratesLater(AdvisoryLockJobMixin):
            async def run(self) -> AsyncIterator[int]:
                yield 1

        class Returns(AdvisoryLockJobMixin):
            def run(self) -> Any:
                return asyncio.sleep(0)

        class ReturnsLater(AdvisoryLockJobMixin):
            async def run(self) -> Any:
                return asyncio.sleep(0)

        for cls in (Generates, GeneratesLater, Returns):
            with pytest.raises(TypeError, match="whose body runs after it"):
                cls().run()
            assert other.is_free(key_of(cls))

        async def main() -> None:
            with pytest.raises(TypeError, match="whose body runs after it"):
                await ReturnsLater().run()

        run(main)


class Numbered(AdvisoryLockJobMixin, Generic[T]):
    def run(self, item: T) -> T:
        return item


class OfNumbers(Numbered[int]):
    pass


class TestObjects:
    @pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, *(
        functools.partial(lambda protocol, job: pickle.loads(pickle.dumps(job, protocol)), protocol)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    )], ids=["copy", "deepcopy", *map(str, range(pickle.HIGHEST_PROTOCOL + 1))])  # fmt: skip
    def test_copies(self, make: Callable[[Any], Any], other: OtherSession) -> None:
        job = make(Job(3))
        assert (type(job), job.payload) == (Job, 3)
        method = make(job.run)
        assert method(1) == ("ran", (1,), {})
        other.take(key_of(Job))
        assert [job.run(), method()] == [None, None]

    def test_the_method_is_one_like_any_other(self) -> None:
        job = Own()
        assert inspect.ismethod(job.run)
        assert job.run.__self__ is job
        assert job.run == job.run != Own().run
        assert Own.run is Own.run
        assert pickle.loads(pickle.dumps(Job.run)) is Job.run

    def test_how_it_looks(self) -> None:
        def plain(self, body: Callable[[], Any] | None = None, /, *args: Any, **kwargs: Any) -> Any: ...

        for run_, name, doc in (
            (Own().run, "Own.run", "Do it."),
            (Asynchronous().run, "Asynchronous.run", "Do it later."),
        ):
            assert (run_.__name__, run_.__qualname__, run_.__doc__, run_.__module__) == ("run", name, doc, __name__)
        assert str(inspect.signature(Own.run)) == str(inspect.signature(plain))
        assert list(inspect.signature(Own().run).parameters) == ["body", "args", "kwargs"]
        assert [*map(inspect.iscoroutinefunction, (Own.run, Own().run))] == [False, False]
        assert [*map(inspect.iscoroutinefunction, (Asynchronous.run, Asynchronous().run))] == [True, True]

    def test_slots(self, watch: Watch) -> None:
        class Slots(AdvisoryLockJobMixin):
            __slots__ = ("number",)

            def run(self) -> None:
                watch(Slots)

        Slots().run()
        assert watch.seen == [1]

    def test_dataclasses(self, watch: Watch) -> None:
        """One with slots is a copy of the class that was decorated."""

        @dataclasses.dataclass(frozen=True)
        class Frozen(AdvisoryLockJobMixin):
            number: int = 0

            def run(self) -> int:
                watch(Frozen)
                return self.number

        @dataclasses.dataclass(slots=True)
        class Slots(AdvisoryLockJobMixin, Base):
            number: int = 0

        @dataclasses.dataclass(slots=True)
        class SlotsToo(Slots):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                watch(SlotsToo)
                return self.number, Slots.run(self)

        SlotsToo(2).run()
        watch.seen.clear()
        with statements(2 * 3):
            assert Frozen(1).run() == 1
            assert Slots(1).run() == ("ran", (), {})
            assert SlotsToo(2).run() == (2, ("ran", (), {}))
        assert watch.seen == [1, 1]

    def test_generic_classes_and_protocols(self, other: OtherSession) -> None:
        class Runs(Protocol):
            def run(self, item: str) -> str: ...

        class Says(AdvisoryLockJobMixin, Runs):
            def run(self, item: str) -> str:
                return item

        assert Numbered[int]().run(3) == OfNumbers().run(3) == 3
        assert Says().run("it") == "it"
        other.take(key_of(Numbered))
        assert Numbered[str]().run("3") is None
        assert OfNumbers().run(3) == 3


class TestKey:
    def test_the_default_is_the_class(self, other: OtherSession) -> None:
        class Child(Own):
            pass

        other.take(lock_key("job", f"{__name__}.Own"))
        assert [Own().run(), Child().run()] == [None, "ran"]
        other.take(lock_key("job", f"{__name__}.TestKey.test_the_default_is_the_class.<locals>.Child"))
        assert Child().run() is None

    @pytest.mark.parametrize("key", ["text", ("text", 7), LockKey.pair(7, 2**31 - 1), Account(pk=7)], ids=str)
    def test_of_the_class(self, key: Any, other: OtherSession) -> None:
        class Keyed(Own):
            lock_key = key

        other.take(lock_key(*key) if isinstance(key, tuple) else lock_key(key))
        assert Keyed().run() is None
        with override_settings(ADVISORY_LOCK_NAMESPACE="another tenant"):
            assert Keyed().run() == (None if isinstance(key, LockKey) else "ran")

    def test_from_the_arguments(self, name: str, other: OtherSession) -> None:
        class PerTenant(AdvisoryLockJobMixin):
            def get_lock_key(self, tenant: str, *, purpose: str = "sync") -> Any:
                return name, tenant, purpose

            def run(self, tenant: str, *, purpose: str = "sync") -> str:
                return f"{purpose} {tenant}"

            async def perform(self, tenant: str, *, purpose: str = "sync") -> str:
                return f"{purpose} {tenant}"

        class Later(PerTenant):
            lock_method = "perform"

        other.take(lock_key(name, "a", "sync"))
        for job in (PerTenant().run, lambda *args, **kwargs: run(lambda: Later().perform(*args, **kwargs))):
            assert [job("a"), job("b"), job("a", purpose="report")] == [None, "sync b", "report a"]

    def test_none_is_an_error(self, other: OtherSession) -> None:
        """Case 29: never a job without a lock."""

        class Nothing(Own):
            def get_lock_key(self, *args: Any, **kwargs: Any) -> Any:
                return None

        with pytest.raises(TypeError, match="returned None, which is no key"):
            Nothing().run()

    @pytest.mark.parametrize(
        ("attributes", "error"),
        [
            ({"lock_key": ""}, ValueError),
            ({"lock_key": 1.5}, TypeError),
            ({"lock_key": lambda self: "a"}, TypeError),
            ({"lock_timeout": -1}, ValueError),
            ({"lock_timeout": "5"}, TypeError),
            ({"lock_shared": 1}, TypeError),
            ({"lock_using": 1}, TypeError),
        ],
        ids=lambda value: ascii(value)[:25] if isinstance(value, dict) and "lock_key" not in value else None,
    )
    def test_what_is_refused(self, attributes: dict[str, Any], error: type[Exception], other: OtherSession) -> None:
        with pytest.raises(error):
            type("Wrong", (Own,), attributes)().run()

    def test_a_key_has_to_be_made_at_once(self, other: OtherSession) -> None:
        class Awaits(Asynchronous):
            async def get_lock_key(self, *args: Any) -> Any:  # type: ignore[override]
                return "a"

        async def main() -> None:
            with pytest.raises(TypeError, match="cannot be a coroutine function"):
                await Awaits().run()

        run(main)


class TestOptions:
    def test_another_alias(self, other: OtherSession) -> None:
        job = Own()
        other.take(key_of(Own))
        assert job.run() is None
        job.lock_using = "other"
        assert job.run() == "ran"
        with override_settings(ADVISORY_LOCK_DATABASE="other"):
            assert Own().run() == "ran"

    def test_shared(self, other: OtherSession) -> None:
        class Reads(Own):
            lock_shared = True

        other.take(key_of(Reads), shared=True)
        assert Reads().run() == "ran"
        other.drop(key_of(Reads), shared=True)
        other.take(key_of(Reads))
        assert Reads().run() is None

    @pytest.mark.parametrize("timeout", [None, LIMIT, timedelta(seconds=LIMIT)], ids=["for ever", "float", "timedelta"])
    def test_waits(self, timeout: Any, other: OtherSession) -> None:
        class Waits(Own):
            lock_timeout = timeout

        other.take(key_of(Waits))
        waiting = Thread(Waits().run)
        other.wait_for_waiters(key_of(Waits))
        other.drop(key_of(Waits))
        assert waiting.result() == "ran"

    def test_a_task_waits_and_lets_others_go_on(self, other: OtherSession) -> None:
        class Waits(Asynchronous):
            lock_timeout = LIMIT

        async def main() -> None:
            other.take(key_of(Waits))
            waiting = asyncio.create_task(Waits().run())
            await asyncio.sleep(0)
            assert await Asynchronous().run() == "ran"
            assert not waiting.done()
            other.drop(key_of(Waits))
            assert await waiting == "ran"

        run(main)

    def test_gives_up(self, skipped: Callable[[], list[str]], other: OtherSession) -> None:
        class Waits(Own):
            lock_timeout = 0.05

        other.take(key_of(Waits))
        assert Waits().run() is None
        assert "0.05" in skipped()[0]

    def test_they_are_read_when_the_job_runs(self, other: OtherSession) -> None:
        """Celery looks the method up once."""
        job = Own()
        method = job.run
        other.take(key_of(Own))
        assert method() is None
        job.lock_using = "other"
        assert method() == "ran"


class TestBusy:
    def test_is_logged_with_the_holder(self, skipped: Callable[[], list[str]], other: OtherSession) -> None:
        other.take(key_of(Own))
        assert Own().run(lambda: 1 / 0) is None
        (message,) = skipped()
        for part in ("Own was skipped. ", f"job:{__name__}.Own", f"pid {other.pid} (other-session)"):
            assert part in message

    def test_in_three_statements(self, other: OtherSession) -> None:
        """One more than a try, to name the holder."""
        other.take(key_of(Own))
        Own().run()
        with statements(2):
            Own().run()

    @pytest.mark.parametrize("is_asynchronous", [False, True], ids=["hook", "asynchronous hook"])
    def test_a_hook(self, is_asynchronous: bool, name: str, other: OtherSession) -> None:
        class Hooked(Asynchronous):
            def handle_lock_busy(self, error: LockTimeout, *args: Any, **kwargs: Any) -> Any:
                assert error.key == key_of(type(self))
                assert isinstance(error, TimeoutError)
                return "busy", args, kwargs

        class Awaits(Hooked):
            async def handle_lock_busy(self, error: LockTimeout, *args: Any, **kwargs: Any) -> Any:
                await asyncio.sleep(0)
                return super().handle_lock_busy(error, *args, **kwargs)

        cls = Awaits if is_asynchronous else Hooked
        other.take(key_of(cls))
        assert run(lambda: cls().run(body=1)) == ("busy", (), {"body": 1})  # type: ignore[arg-type]

    def test_a_hook_of_a_synchronous_job(self, other: OtherSession) -> None:
        class Hooked(Job):
            def handle_lock_busy(self, error: LockTimeout, *args: Any, **kwargs: Any) -> Any:
                return "busy", args, kwargs

        other.take(key_of(Hooked))
        assert Hooked().run(1, b=2) == ("busy", (1,), {"b": 2})

    def test_a_hook_that_nobody_would_await(self, other: OtherSession) -> None:
        """An error, where the hook would not have run and nobody would have known."""

        class Awaits(Own):
            async def handle_lock_busy(self, error: LockTimeout, *args: Any, **kwargs: Any) -> Any: ...

        other.take(key_of(Awaits))
        with pytest.raises(TypeError, match="coroutine"):
            Awaits().run()

    @pytest.mark.parametrize("where", ["body", "key", "hook"])
    @pytest.mark.parametrize("base", [Own, Asynchronous], ids=["sync", "async"])
    def test_the_same_error_from_elsewhere_passes_through(self, where: str, base: Any, other: OtherSession) -> None:
        class Fails(base):
            lock_method = "go"

            def get_lock_key(self, *args: Any, **kwargs: Any) -> Any:
                self.fail("key")
                return super().get_lock_key()

            def handle_lock_busy(self, error: LockTimeout, *args: Any, **kwargs: Any) -> Any:
                self.fail("hook")

            def fail(self, at: str) -> None:
                passed.append(at)
                if at == where:
                    raise LockTimeout("from elsewhere")

            def go(self) -> Any:
                self.fail("body")

        class FailsLater(Fails):
            async def go(self) -> Any:
                super().go()

        passed: list[str] = []
        cls = Fails if base is Own else FailsLater
        if where == "hook":
            other.take(key_of(cls))
        with pytest.raises(LockTimeout, match="from elsewhere"):
            cls().go() if base is Own else run(lambda: cls().go())
        assert passed == ["key"] if where == "key" else ["key", where]
        assert where == "hook" or other.is_free(key_of(cls))


class Rivals:
    """Bodies that count how many of them are inside at once, and stay until they may go."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = self.most = self.begun = 0
        self.go = threading.Event()

    def __call__(self) -> str:
        with self.lock:
            self.begun += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.go.wait(LIMIT)
        with self.lock:
            self.inside -= 1
        return "ran"


class TestRivals:
    def test_threads_with_one_job(self, other: OtherSession) -> None:
        """One object for all threads, as Celery has it: one works, and the others skip while it does."""
        rivals, job = Rivals(), Own()
        first = Thread(lambda: job.run(rivals))
        wait_until(lambda: rivals.begun)
        others = [Thread(lambda: job.run(rivals)) for _ in range(5)]
        assert [thread.result() for thread in others] == [None] * 5
        rivals.go.set()
        assert first.result() == "ran"
        assert (rivals.begun, rivals.most) == (1, 1)
        assert job.run(rivals) == "ran"

    def test_threads_that_wait_take_turns(self, other: OtherSession) -> None:
        class Waits(Own):
            lock_timeout = LIMIT

        rivals, job = Rivals(), Waits()
        threads = [Thread(lambda: job.run(rivals)) for _ in range(4)]
        other.wait_for_waiters(key_of(Waits), 3)
        rivals.go.set()
        assert [thread.result() for thread in threads] == ["ran"] * 4
        assert (rivals.begun, rivals.most) == (4, 1)

    def test_without_the_mixin_they_meet(self) -> None:
        """The control."""
        rivals = Rivals()
        threads = [Thread(rivals) for _ in range(4)]
        wait_until(lambda: rivals.most == 4)
        rivals.go.set()
        assert [thread.result() for thread in threads] == ["ran"] * 4

    @pytest.mark.parametrize("locked", [True, False], ids=["locked", "control"])
    def test_tasks_that_share_a_thread(self, locked: bool, other: OtherSession) -> None:
        """Case 89: and with it a session, which would grant them all."""
        most = inside = 0

        async def main() -> list[Any]:
            nonlocal most, inside
            go = asyncio.Event()

            async def body() -> str:
                nonlocal most, inside
                inside += 1
                most = max(most, inside)
                await go.wait()
                inside -= 1
                return "ran"

            job = Asynchronous()
            tasks = [asyncio.create_task(job.run(body) if locked else body()) for _ in range(4)]
            await until(lambda: sum(task.done() for task in tasks) == 3 if locked else inside == 4)
            go.set()
            return list(await asyncio.gather(*tasks))

        results = run(main)
        assert most == (1 if locked else 4)
        assert results.count("ran") == (1 if locked else 4)

    def test_synchronous_jobs_of_tasks(self, other: OtherSession) -> None:
        """A task holds the job; another one's synchronous code, in the same thread, does not nest in it."""

        class Both(AdvisoryLockJobMixin):
            lock_method = "__call__"
            lock_key = key_of(Asynchronous)

            def __call__(self) -> str:
                return "ran"

        async def main() -> None:
            async def body() -> tuple[Any, Any]:
                rival = asyncio.create_task(in_another_task())
                return await rival, await sync_to_async(Both())()

            async def in_another_task() -> Any:
                await begun.wait()
                return await sync_to_async(Both())()

            begun = asyncio.Event()

            async def outer() -> Any:
                begun.set()
                return await body()

            assert (await Asynchronous().run(outer))[1] == "ran"

        run(main)

    def test_a_task_that_is_cancelled(self, other: OtherSession) -> None:
        async def main() -> None:
            begun = asyncio.Event()

            async def body() -> None:
                begun.set()
                await asyncio.sleep(LIMIT)

            task = asyncio.create_task(Asynchronous().run(body))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert other.is_free(key_of(Asynchronous))

        run(main)

    def test_classes_that_are_first_used_by_many_threads_at_once(self, name: str, other: OtherSession) -> None:
        """What got past __init_subclass__() is locked when a job is made."""

        class Registry:
            def __init_subclass__(cls) -> None:
                pass

        class Late(Registry, AdvisoryLockJobMixin):
            lock_timeout = LIMIT

            def run(self) -> Any:
                return rivals()

        rivals = Rivals()
        rivals.go.set()
        barrier = threading.Barrier(4)
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [Thread(lambda: (barrier.wait(LIMIT), Late().run())) for _ in range(4)]
            for thread in threads:
                thread.result()
        finally:
            sys.setswitchinterval(before)
        assert (rivals.begun, rivals.most) == (4, 1)


@pytest.fixture
def runs(other: OtherSession) -> Iterator[Runs]:
    yield Runs()
    Runs().forget()


class Periodic(Own):
    """A job with an interval of a minute."""

    lock_min_interval: Any = 60


class AsynchronousPeriodic(Asynchronous):
    lock_min_interval = timedelta(minutes=1)


PERIODIC = key_of(Periodic)


class Locked(AdvisoryLockJobMixin, Task):
    """A base for tasks that are functions."""


class TestInterval:
    """`lock_min_interval`: at most one start in each interval."""

    def test_one_start_in_each(self, runs: Runs, skipped: Callable[[], list[str]]) -> None:
        """Case 59, 79: two messages that are worked on one after the other."""
        with statements(5):
            assert Periodic().run() == "ran"
        with statements(1):
            assert Periodic().run() is None
        (message,) = skipped()
        row = runs.get(PERIODIC)
        assert message.startswith("Periodic was skipped, too soon: started ")
        assert f"ago by {row.last_host}, process {os.getpid()}, may start again in " in message
        runs.let_pass(61, PERIODIC)
        assert Periodic().run() == "ran"
        assert (runs.count(PERIODIC), runs.outcome(PERIODIC)) == (2, "succeeded")

    def test_asynchronously(self, runs: Runs, skipped: Callable[[], list[str]]) -> None:
        async def main() -> list[Any]:
            return [await AsynchronousPeriodic().run() for _ in range(2)]

        key = key_of(AsynchronousPeriodic)
        assert run(main) == ["ran", None]
        assert "AsynchronousPeriodic was skipped, too soon: started " in skipped()[0]
        runs.let_pass(61, key)
        assert run(main) == ["ran", None]
        assert (runs.count(key), runs.outcome(key)) == (2, "succeeded")

    def test_busy_in_two_statements(self, runs: Runs, skipped: Callable[[], list[str]], other: OtherSession) -> None:
        """Case 62."""
        other.take(PERIODIC)
        with statements(2):
            assert Periodic().run() is None
        assert "running elsewhere, holder unknown." in skipped()[0]
        assert runs.count(PERIODIC) == 0

    def test_busy_by_whom(self, runs: Runs, skipped: Callable[[], list[str]]) -> None:
        """Another thread works, for longer than the interval."""
        rivals = Rivals()
        first = Thread(lambda: Periodic().run(rivals))
        wait_until(lambda: rivals.begun)
        runs.let_pass(61, PERIODIC)
        assert Periodic().run(rivals) is None
        rivals.go.set()
        assert first.result() == "ran"
        who = f"{runs.get(PERIODIC).last_host}, process {os.getpid()}"
        assert f"running elsewhere, last started by {who}, 0:01:0" in skipped()[0]
        assert runs.outcome(PERIODIC) == "succeeded"

    @pytest.mark.parametrize("base", [Periodic, AsynchronousPeriodic], ids=["sync", "async"])
    def test_the_hook_is_for_busy_alone(self, base: Any, runs: Runs, other: OtherSession) -> None:
        class Hooked(base):
            lock_method = "go"

            def handle_lock_busy(self, error: LockTimeout, *args: Any, **kwargs: Any) -> Any:
                assert error.key == key_of(Hooked)
                return "busy"

            if base is Periodic:

                def go(self) -> Any:
                    return "ran"

            else:

                async def go(self) -> Any:  # type: ignore[misc]
                    return "ran"

        async def main() -> Any:
            return await Hooked().go()

        def result() -> Any:
            return Hooked().go() if base is Periodic else run(main)

        other.take(key_of(Hooked))
        assert result() == "busy"
        other.drop(key_of(Hooked))
        assert [result(), result()] == ["ran", None]

    @pytest.mark.parametrize("base", [Own, Asynchronous], ids=["sync", "async"])
    @pytest.mark.parametrize("interval", [60, 0.05])
    def test_who_has_waited_looks_again(
        self, interval: float, base: Any, runs: Runs, skipped: Callable[[], list[str]], other: OtherSession
    ) -> None:
        """Case 59: by then another one may have started, and that may be long ago."""

        class Waits(base):
            lock_timeout = LIMIT
            lock_min_interval = interval

        def body() -> str:
            value("SELECT pg_sleep(0.06)")  # longer than the shorter interval, by the same clock
            return "ran"

        async def main() -> list[Any]:
            tasks = [asyncio.create_task(Waits().run(sync_to_async(body))) for _ in range(2)]
            await asyncio.sleep(0.05)  # they may have looked, or not: the outcome is the same
            other.drop(key_of(Waits))
            return list(await asyncio.gather(*tasks))

        def in_threads() -> list[Any]:
            threads = [Thread(lambda: Waits().run(body)) for _ in range(2)]
            other.wait_for_waiters(key_of(Waits), 2)
            other.drop(key_of(Waits))
            return [thread.result() for thread in threads]

        other.take(key_of(Waits))
        results = in_threads() if base is Own else run(main)
        assert sorted(results, key=str) == ([None, "ran"] if interval == 60 else ["ran", "ran"])
        assert runs.count(key_of(Waits)) == results.count("ran")

    @pytest.mark.parametrize("interval", [60, None], ids=["interval", "control"])
    def test_threads_with_one_job(self, interval: int | None, runs: Runs) -> None:
        """Case 59: without the interval each of them works, one after the other."""

        class Waits(Own):
            lock_timeout = LIMIT
            lock_min_interval = interval

        job, barrier = Waits(), threading.Barrier(6, timeout=LIMIT)

        def call() -> Any:
            value("SELECT 1")
            barrier.wait()
            return job.run()

        threads = [Thread(call) for _ in range(barrier.parties)]
        results = [thread.result() for thread in threads]
        assert results.count("ran") == (1 if interval else 6)
        assert runs.count(key_of(Waits)) == (1 if interval else 0)

    def test_tasks_that_share_a_thread(self, runs: Runs) -> None:
        """Case 76, 89."""
        job = AsynchronousPeriodic()

        async def main() -> list[Any]:
            return list(await asyncio.gather(*(job.run() for _ in range(4))))

        assert sorted(run(main), key=str) == [None, None, None, "ran"]
        assert runs.count(key_of(AsynchronousPeriodic)) == 1

    def test_a_failure_counts(self, runs: Runs) -> None:
        with pytest.raises(ZeroDivisionError):
            Periodic().run(lambda: 1 / 0)
        assert Periodic().run() is None
        row = runs.get(PERIODIC)
        assert (row.last_outcome, row.last_error) == ("failed", "ZeroDivisionError: division by zero")

    def test_a_lost_lock_is_no_success(self, runs: Runs, other: OtherSession) -> None:
        """Case 72."""
        with pytest.raises(LockLost):
            Periodic().run(lambda: other.kill(backend_pid()))
        assert runs.outcome(PERIODIC) == "failed"
        assert "LockLost" in runs.get(PERIODIC).last_error

    def test_a_task_that_is_cancelled(self, runs: Runs, other: OtherSession) -> None:
        """Its end is noted all the same."""
        key = key_of(AsynchronousPeriodic)

        async def main() -> None:
            begun = asyncio.Event()

            async def body() -> None:
                begun.set()
                await asyncio.sleep(LIMIT)

            task = asyncio.create_task(AsynchronousPeriodic().run(body))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert other.is_free(key)

        run(main)
        assert runs.outcome(key) == "failed"
        assert "CancelledError" in runs.get(key).last_error

    def test_inside_a_transaction(self, runs: Runs) -> None:
        with transaction.atomic(), pytest.raises(RuntimeError, match=r"outside of atomic\(\)"):
            Periodic().run()
        assert runs.count(PERIODIC) == 0

    def test_super_counts_once(self, runs: Runs) -> None:
        """And a subclass may have another interval for the key of its parent."""

        class Parent(Periodic):
            lock_key = PERIODIC

        class Child(Parent):
            lock_min_interval = timedelta(hours=1)

            def run(self, *args: Any, **kwargs: Any) -> str:
                return f"child {super().run()}"

        assert Child().run() == "child ran"
        assert runs.count(PERIODIC) == 1
        runs.let_pass(61, PERIODIC)
        assert Child().run() is None
        assert Parent().run() == "ran"
        assert runs.count(PERIODIC) == 2

    def test_for_each_account(self, name: str, runs: Runs) -> None:
        """Case 52, 74: a key has an interval of its own, in each namespace."""

        class PerAccount(Periodic):
            def get_lock_key(self, body: None, account_id: int) -> tuple[str, int]:
                return name, account_id

        results = [PerAccount().run(None, account_id) for account_id in (1, 2, 1)]
        with override_settings(ADVISORY_LOCK_NAMESPACE="another"):
            results.append(PerAccount().run(None, 1))
        assert results == ["ran", "ran", None, "ran"]

    def test_on_another_database(self, runs: Runs) -> None:
        job = Periodic()
        job.lock_using = "other"
        assert [job.run(), job.run(), Periodic().run()] == ["ran", None, "ran"]
        with override_settings(ADVISORY_LOCK_DATABASE="other"):
            assert Periodic().run() is None
        assert (runs.count(PERIODIC), runs.count(PERIODIC, using="other")) == (1, 1)

    @pytest.mark.parametrize(("interval", "error"), [(0, ValueError), (-1, ValueError), ("1 h", TypeError)], ids=repr)
    def test_what_is_refused(self, interval: Any, error: type[Exception], runs: Runs) -> None:
        """When the class is made, as by the decorator of Celery; of an object, before anything is sent."""
        with pytest.raises(error, match=r"^Wrong\.lock_min_interval: "):
            type("Wrong", (Own,), {"lock_min_interval": interval})
        job = Own()
        job.lock_min_interval = interval
        with statements(0), pytest.raises(error, match="min_interval"):
            job.run()

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    def test_an_interrupt_at_every_line(self, runs: Runs, other: OtherSession) -> None:
        """Case 67."""

        class Frequent(Own):
            lock_min_interval = timedelta(microseconds=1)

        job = Frequent()
        job.run()
        strike_at_every_line(INTERRUPTS["sigint"], lambda: job.run() and None, [key_of(Frequent)], other)
        assert job.run() == "ran"


class TestIntervalOfCelery:
    """The `run()` that `@shared_task` makes is static."""

    def test_a_function(self, name: str, runs: Runs) -> None:
        """Case 76: two beats, one message after the other."""

        @shared_task(base=Locked, name=name, lock_key=name, lock_min_interval=timedelta(minutes=3))
        def refresh(number: int) -> str:
            return f"refreshed {number}"

        assert refresh.apply((1,)).get() == "refreshed 1"
        skipped = refresh.apply((2,))
        assert (skipped.state, skipped.result) == ("SUCCESS", None)
        assert refresh(3) is None
        runs.let_pass(181, name)
        assert refresh(4) == "refreshed 4"

    def test_a_retry_comes_too_soon(self, name: str, runs: Runs) -> None:
        """Case 79: each is a call, and the first one has started."""
        begun = []

        @shared_task(base=Locked, name=name, bind=True, lock_key=name, lock_min_interval=60, max_retries=3)
        def fails(self: Any) -> None:
            begun.append(self.request.retries)
            raise self.retry(countdown=0)

        with contextlib.suppress(Retry):
            assert fails.apply().get() is None
        assert begun == [0]
        assert runs.outcome(name) == "failed"
        assert "Retry" in runs.get(name).last_error


class TestPage:
    """What docs/jobs.md says."""

    def test_attributes_and_their_defaults(self) -> None:
        rows = cells("docs/jobs.md", "job attribute")
        assert rows.pop("lock_key") == "the class"
        assert {name: getattr(AdvisoryLockJobMixin, name) for name in rows} == {
            name: ast.literal_eval(default) for name, default in rows.items()
        }
        assert set(AdvisoryLockJobMixin.__annotations__) == {*rows, "lock_key"}

    def test_hooks(self) -> None:
        for row, _ in table("docs/jobs.md", "job hook"):
            name, _, parameters = row.rstrip(")").partition("(")
            found = inspect.signature(getattr(Own(), name))
            assert [str(parameter).partition(":")[0] for parameter in found.parameters.values()] == parameters.split(
                ", "
            )

    def test_a_skipped_job_that_somebody_hears_of(self, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        other.take(lock_key("sync-account", 7))
        with reader() as page:
            job = run_section("docs/jobs.md", "what-it-does", page)["SyncAccount"]()
            assert job.run(7) is None
        assert "Account 7 is being synced already. The lock 'sync-account:7' (" in caplog.text

    def test_another_method(self, other: OtherSession) -> None:
        with reader() as page:
            job = run_section("docs/jobs.md", "which-method", page)["LoudJob"]()
            assert run(job.perform) == "PERFORMED"
            other.take(key_of(type(job)))
            assert run(job.perform) is None


@pytest.mark.filterwarnings("ignore::ResourceWarning")
class TestInterrupts:
    """Case 67."""

    def test_at_every_line(self, other: OtherSession) -> None:
        job = Own()
        job.run()
        strike_at_every_line(INTERRUPTS["sigint"], lambda: job.run() and None, [key_of(Own)], other)

    def test_between_the_body_and_the_release(self, other: OtherSession) -> None:
        """The handle of a call is the guard's to release, so the lock is free at once, as with the decorators."""

        class InTheStack(Interrupter):
            def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
                return self.in_frame if frame.f_code.co_filename == contextlib.__file__ else None

        def interrupted_at(point: int) -> Any:
            interrupter = InTheStack(point, INTERRUPTS["sigint"], deep=False)
            sys.settrace(interrupter)
            try:
                job.run()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            return interrupter.place

        job, before, left = Own(), sys.gettrace(), []
        try:
            for point in range(1, 100):
                place = interrupted_at(point)
                if place is None:
                    break
                if not other.is_free(key_of(Own)):
                    left.append((place[0].co_name, place[1]))
                    gc.collect()  # frames of an ExitStack refer to each other
                    with advisory_lock("next"):
                        assert other.is_free(key_of(Own))
        finally:
            sys.settrace(before)
        assert left == []

    def test_at_every_line_of_a_skipped_job(self, other: OtherSession) -> None:
        job = Own()
        job.run()
        other.take(key_of(Own))
        strike_at_every_line(INTERRUPTS["sigint"], job.run, [], other)
        other.drop(key_of(Own))
        assert value("SELECT 1") == 1
        assert job.run() == "ran"
