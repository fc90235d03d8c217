"""Guards for the admin: actions that run once however often they are clicked, and objects that one person saves."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.options import IS_POPUP_VAR, TO_FIELD_VAR
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import quote, unquote
from django.db import connections, transaction
from django.http import HttpResponseRedirect
from django.urls import reverse
from django.utils.encoding import escape_uri_path
from django.utils.text import Truncator, get_text_list
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import conf, sessions
from ..decorating import MISSING, check_decorated, finished
from ..exceptions import LockTimeout
from ..inspection import describe_holders, read_key_locks
from ..keys import model_key, remember_purpose
from ..locks import advisory_lock, try_advisory_lock
from ..notices import logger
from ..owners import current_owner
from ..transactions import in_transaction
from .base import Guard, refuse_hidden_hook

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from django.db.models import Model, QuerySet
    from django.forms import ModelForm
    from django.http import HttpRequest, HttpResponse

    from ..keys import KeyLike, LockKey

A = TypeVar("A", bound="Callable[..., Any]")

LIMIT = 1000  # objects of one action: each takes a place in the server's lock table, which all databases share
NAMED = 5  # busy objects in a message
LONGEST_NAME = 100  # characters of each


def locked_action(
    *key: KeyLike | Callable[..., KeyLike], purpose: str = "", using: str | None = None, shared: bool = False
) -> Callable[[A], A]:
    """Return a decorator for an action of the admin, which runs only what nobody else is at.

    With a key, or a function of the action's arguments `(modeladmin, request, queryset)` that returns one, it is one
    lock around the action; where that is busy, the action is not run, and a message says so. Without a key each of the
    selected objects, at most 1,000, has its own, as `model_key(object, purpose=…)`: the action runs with those that
    were free, a message names the others, and all are freed at the end. Nothing waits.
    """
    if key and purpose:
        raise TypeError("purpose= is for the keys of the selected objects; beside a key, make it a part of that key.")
    # Without a key it stands for the options, which are checked here and not at the first click.
    lock = advisory_lock(*(key or ("action",)), using=using, timeout=0, shared=shared)

    def decorate(action: A = MISSING, *args: Any) -> A:
        if action is MISSING or args:
            raise TypeError("locked_action(…) returns a decorator: write @locked_action() or @locked_action(key).")
        check_decorated(action)
        if iscoroutinefunction(action):
            raise TypeError("locked_action() decorates functions that the admin calls, not coroutine functions.")
        remember_purpose(purpose)
        return _ActionGuard(lock).around(action) if key else _around_objects(action, purpose, using, shared)

    return decorate


class _ActionGuard(Guard):
    """One lock around an action."""

    def busy(
        self, error: LockTimeout, /, modeladmin: ModelAdmin[Any], request: HttpRequest, *args: Any, **kwargs: Any
    ) -> None:
        text = _("Nothing was done, because this is being done right now by somebody else.")
        modeladmin.message_user(request, f"{text} {error}", messages.WARNING)


def _around_objects(action: A, purpose: str, using: str | None, shared: bool) -> A:
    @functools.wraps(action)
    def run(modeladmin: ModelAdmin[Any], request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        # Not sorted by the query, whose own order may belong to a DISTINCT ON.
        objects = list(queryset[: LIMIT + 1])
        if len(objects) > LIMIT:
            text = _("Nothing was done: select at most %(limit)d at a time.") % {"limit": LIMIT}
            return modeladmin.message_user(request, text, messages.ERROR)
        with contextlib.ExitStack() as block:
            free: list[Any] = []
            busy: list[tuple[Model, LockKey]] = []
            by_pk = {one.pk: one for one in objects}  # a join may bring an object twice
            for pk in sorted(by_pk):
                key = model_key(by_pk[pk], purpose=purpose)
                handle = try_advisory_lock(key, using=using, shared=shared)._fixed_handle()
                block.callback(handle._give_up)  # for an interrupt before the next but one line
                if handle._enter(current_owner()):
                    block.enter_context(handle)
                    free.append(pk)
                else:
                    busy.append((by_pk[pk], key))
            if busy:
                alias = conf.get_database() if using is None else using
                modeladmin.message_user(request, _describe(busy, alias, shared), messages.WARNING)
                if not free:
                    return None
            return finished(action(modeladmin, request, queryset.filter(pk__in=free)))

    return cast("A", run)


def _describe(busy: list[tuple[Model, LockKey]], alias: str, shared: bool) -> str:
    """Name the first of the busy objects, and who is at them: one query for all."""
    named = busy[:NAMED]
    with connections[alias].cursor() as cursor:
        locks = read_key_locks(cursor, [key for _one, key in named])
    names = []
    for one, key in named:
        holders = describe_holders([lock for lock in locks if lock.key == key], shared=shared)
        names.append(f"{Truncator(str(one)).chars(LONGEST_NAME)} ({holders})")
    if len(busy) > NAMED:
        names.append(_("%(count)d more") % {"count": len(busy) - NAMED})
    text = ngettext(
        "%(names)s was skipped, because somebody else is working on it right now.",
        "%(names)s were skipped, because somebody else is working on them right now.",
        len(busy),
    )
    return text % {"names": get_text_list(names, _("and"))}


class AdvisoryLockAdminMixin(ModelAdmin):  # type: ignore[type-arg]
    """Save and delete an object in the admin under its own lock. Name this class before `ModelAdmin`.

    The POST of a change or delete page takes the object's key, `model_key(object, purpose=lock_purpose)`, inside a
    transaction on the lock's alias, and keeps it until the COMMIT. It waits `lock_timeout` seconds. Then the form
    comes back with all that was typed, and with status 409; a delete comes back to the change page.

    It keeps people and jobs apart that work on one object at the same moment, not two people who edit it one after the
    other. `list_editable` and the action that deletes selected objects do not ask for it.
    """

    lock_key: KeyLike | None = None
    lock_timeout: float | timedelta | None = 2
    lock_using: str | None = None
    lock_shared: bool = False
    lock_purpose: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        remember_purpose(cls.lock_purpose)
        for hook in ("change_view", "changeform_view", "delete_view", "get_form"):
            refuse_hidden_hook(cls, AdvisoryLockAdminMixin, hook, also_own=True)

    def get_lock_key(self, request: HttpRequest, obj: Model) -> KeyLike:
        """Return the key of an object."""
        return model_key(obj, purpose=self.lock_purpose) if self.lock_key is None else self.lock_key

    def handle_lock_busy(self, request: HttpRequest, obj: Model, error: LockTimeout) -> HttpResponse | None:
        """Return a response of your own to somebody who finds the lock busy, or None for the usual one."""
        return None

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        def view() -> HttpResponse:
            return super(AdvisoryLockAdminMixin, self).change_view(request, object_id, form_url, extra_context)

        def again(obj: Model, refusal: LockTimeout) -> HttpResponse:
            message = f"{_not_saved()} {refusal}"
            request._advisory_lock_busy = message  # type: ignore[attr-defined]
            try:
                response = view()
            except _NotStopped:
                return self._back(request, obj, object_id, message)
            if response.status_code == 200:
                response.status_code = 409
            return response

        if "_saveasnew" in request.POST:
            return view()  # adds another one
        return self._locked(request, object_id, self.has_change_permission, view, again)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        def view() -> HttpResponse:
            return super(AdvisoryLockAdminMixin, self).delete_view(request, object_id, extra_context)

        def back(obj: Model, refusal: LockTimeout) -> HttpResponse:
            return self._back(request, obj, object_id, f"{_not_deleted()} {refusal}")

        return self._locked(request, object_id, self.has_delete_permission, view, back)

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> type[ModelForm[Any]]:
        form = super().get_form(request, obj, change, **kwargs)
        message = getattr(request, "_advisory_lock_busy", None)
        # A form that is not valid is not saved, and Django shows it again with all that was typed.
        return form if message is None else _busy_form(form, message)

    def save_form(self, request: HttpRequest, form: Any, change: bool) -> Any:
        if hasattr(request, "_advisory_lock_busy"):
            raise _NotStopped
        return super().save_form(request, form, change)

    def response_action(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if hasattr(request, "_advisory_lock_busy"):  # an action of the change page, as Django has them since 6.1
            raise _NotStopped
        return super().response_action(request, *args, **kwargs)

    def _locked(
        self,
        request: HttpRequest,
        object_id: str,
        has_permission: Callable[..., bool],
        view: Callable[[], HttpResponse],
        busy: Callable[[Model, LockTimeout], HttpResponse],
    ) -> HttpResponse:
        to_field = _to_field(request)
        if request.method != "POST" or (to_field and not self.to_field_allowed(request, to_field)):
            return view()
        obj = self.get_object(request, unquote(object_id), to_field)
        if obj is None or not has_permission(request, obj):
            return view()
        alias = conf.get_database() if self.lock_using is None else self.lock_using
        lock = advisory_lock(
            self.get_lock_key(request, obj), using=alias, timeout=self.lock_timeout, shared=self.lock_shared
        )
        if not in_transaction(sessions.connection_for(alias)):
            lock._fixed_handle()._refuse_other_transactions()  # ours would end before theirs
        with transaction.atomic(using=alias):
            try:
                lock.acquire()
            except LockTimeout as error:
                refusal = error
            else:
                return view()
        logger.info("%s %s was not run: %s", request.method, escape_uri_path(request.path), refusal)
        return self.handle_lock_busy(request, obj, refusal) or busy(obj, refusal)

    def _back(self, request: HttpRequest, obj: Model, object_id: str, message: str) -> HttpResponse:
        """Go to the change page with a message, or to the index, for somebody who may not see that page."""
        self.message_user(request, message, messages.ERROR)
        if not self.has_view_or_change_permission(request, obj):
            return HttpResponseRedirect(reverse("admin:index", current_app=self.admin_site.name))
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        url = reverse(name, args=(quote(unquote(object_id)),), current_app=self.admin_site.name)
        context: dict[str, Any] = {"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}
        is_popup = IS_POPUP_VAR in request.POST or IS_POPUP_VAR in request.GET
        return HttpResponseRedirect(add_preserved_filters(context, url, popup=is_popup, to_field=_to_field(request)))


def _not_saved() -> str:
    return _("Nothing was saved, because somebody else is working on this right now. Try again in a moment.")


def _not_deleted() -> str:
    return _("Nothing was deleted, because somebody else is working on this right now. Try again in a moment.")


def _to_field(request: HttpRequest) -> str | None:
    return request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))


class _NotStopped(Exception):
    """Something is about to be done although the lock is busy: a form of its own is valid, or it is an action."""


def _busy_form(form: type[ModelForm[Any]], message: str) -> type[ModelForm[Any]]:
    """Return a form that nothing can make valid."""
    busy = type(form.__name__, (_BusyForm, form), {"busy_message": message, "__module__": form.__module__})
    # A class of forms is made from its Meta: what was changed in it since then is taken over.
    for name in ("_meta", "base_fields", "declared_fields"):
        setattr(busy, name, getattr(form, name))
    return busy


class _BusyForm:
    """Makes a form invalid, after everything else was looked at."""

    busy_message: str

    def full_clean(self: Any) -> None:
        super().full_clean()  # type: ignore[misc]
        if self.is_bound:
            self.add_error(None, self.busy_message)
