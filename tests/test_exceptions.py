import builtins
import copy
import pickle

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import Error

from django_advisory_lock import exceptions
from django_advisory_lock.exceptions import (
    AdvisoryLockError,
    LockDeadlock,
    LockLost,
    LockNotAcquired,
    LockTableFull,
    LockTimeout,
    LockUnsupported,
    PoolerDetected,
)
from django_advisory_lock.keys import LockKey

ALL = [
    value for value in vars(exceptions).values() if isinstance(value, type) and value.__module__ == exceptions.__name__
]


def test_the_tree():
    assert {error: error.__bases__ for error in ALL} == {
        AdvisoryLockError: (Exception,),
        LockNotAcquired: (AdvisoryLockError,),
        LockTimeout: (LockNotAcquired, TimeoutError),
        LockDeadlock: (LockNotAcquired,),
        LockTableFull: (LockNotAcquired,),
        LockLost: (AdvisoryLockError,),
        LockUnsupported: (AdvisoryLockError, ImproperlyConfigured),
        PoolerDetected: (LockUnsupported,),
    }


@pytest.mark.parametrize("error_class", ALL)
def test_none_is_an_error_of_the_database(error_class):
    assert not issubclass(error_class, Error)


@pytest.mark.parametrize("error_class", ALL)
def test_every_one_has_a_docstring_of_one_line(error_class):
    assert error_class.__doc__.endswith(".")
    assert "\n" not in error_class.__doc__


@pytest.mark.parametrize("error_class", ALL)
def test_raised_bare(error_class):
    with pytest.raises(error_class) as caught:
        raise error_class
    assert str(caught.value) == ""
    assert (caught.value.key, caught.value.using, caught.value.waited) == (None, None, None)


@pytest.mark.parametrize("error_class", ALL)
def test_the_message_and_what_it_is_about(error_class):
    error = error_class("report:42 is busy", key=LockKey((42,)), using="default", waited=1.5)
    assert str(error) == "report:42 is busy"
    assert error.args == ("report:42 is busy",)
    assert (error.key, error.using, error.waited) == (LockKey((42,)), "default", 1.5)


@pytest.mark.parametrize("error_class", ALL)
def test_all_but_the_message_is_keyword_only(error_class):
    with pytest.raises(TypeError):
        error_class("message", LockKey((42,)))


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, *(lambda error, p=p: pickle.loads(pickle.dumps(error, p)) for p in range(2, 6))],
)
@pytest.mark.parametrize("error_class", ALL)
def test_copies_and_pickles_keep_everything(error_class, duplicate):
    error = error_class("busy", key=LockKey.pair(1, -2), using="other", waited=0.25)
    error.holders = ["added later"]
    twin = duplicate(error)
    assert type(twin) is error_class
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))
    assert twin.key.name == error.key.name


def test_a_timeout_is_the_builtin_one_without_an_errno():
    error = LockTimeout("busy after 5 s", waited=5.0)
    assert isinstance(error, (builtins.TimeoutError, OSError))
    assert (error.errno, error.filename) == (None, None)
    assert repr(error) == "LockTimeout('busy after 5 s')"
