"""What a lock decorates, and what would run without the lock."""

from __future__ import annotations

import functools
import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, TypeVar

from django.db.models import Model

R = TypeVar("R")

MISSING: Any = object()


def finished(result: R) -> R:
    """Return the result of a call, unless the work is still to be done with it, when the lock is free again."""
    if isinstance(result, (GeneratorType, AsyncGeneratorType)) or inspect.isawaitable(result):
        if isinstance(result, (CoroutineType, GeneratorType)):  # or Python says that it was never awaited
            result.close()
        raise TypeError(
            f"A lock guards a call, and this one returned a {type(result).__name__}, whose body runs after it. Take the"
            f" lock inside that body; in an async view decorate the handler, not dispatch()."
        )
    return result


def is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, (type, Model))


def check_decorated(function: object) -> None:
    """Refuse what would run without the lock, or what a wrapper would break."""
    if function is MISSING:
        reason = "a call without arguments; write @advisory_lock(…) with a key, not the bare @advisory_lock"
    elif isinstance(function, (classmethod, staticmethod)):
        reason = f"a {type(function).__name__}; put the lock below @{type(function).__name__}"
    elif isinstance(function, type):
        reason = "a class; decorate its method, in a view with method_decorator"
    elif not callable(function) or not (inspect.isroutine(function) or isinstance(function, functools.partial)):
        reason = f"{type(function).__name__}; decorate the function itself, for a task below @task"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        reason = "a generator function, whose body runs after the call has returned; take the lock inside it"
    else:
        return
    raise TypeError(f"A lock decorates functions, methods and partials, not {reason}.")
