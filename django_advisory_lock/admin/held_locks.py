"""The admin's page of the locks that are held and waited for, on which a session can be ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

import django
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import Error, connections, router, transaction
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.decorators import method_decorator
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from .. import conf
from ..ending import Outcome, end_session, own_sessions, start_of
from ..inspection import KeyLock, all_locks
from ..models import HeldLock
from ..parts import visible
from .lock_table import TableMaker, numbers_of, session_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

REFRESH_SECONDS = 5
SECONDS_WITHOUT_SCRIPTS = 30  # there the whole page is loaded again
TIMEOUT = 2.0  # seconds to wait for the end of a session
NAMED = 5  # keys in an entry of the log


class Asked(NamedTuple):
    """Which locks a request is about, and those that there are; or why they cannot be read."""

    database: str
    databases: list[str]
    named: str
    text: str
    locks: list[KeyLock]
    problem: str

    def query(self, **more: str) -> str:
        """Return what tells the address of this view from that of the plain list."""
        chosen = {"database": self.named, "q": self.text, **more}
        return urlencode({name: value for name, value in chosen.items() if value})


def read(request: HttpRequest) -> Asked:
    """Read the locks of the database that a request names, by default those of `ADVISORY_LOCK_DATABASE`."""
    named, text = request.GET.get("database", ""), visible(request.GET.get("q", "").strip())
    database, databases = named, list[str]()
    try:
        default = conf.get_database()
        databases = [name for name in connections if name == default or connections[name].vendor == "postgresql"]
        database = named or default
        if database not in databases:
            known = ", ".join(databases)
            problem = _("There is no PostgreSQL database “%(database)s” in DATABASES. There are: %(known)s.")
            return Asked("", databases, named, text, [], problem % {"database": visible(database), "known": known})
        with transaction.atomic(using=database):  # an error leaves the transaction of the request usable
            locks = all_locks(database)
    except (Error, ImproperlyConfigured) as error:
        problem = _("The locks of the database cannot be read: %(error)s")
        return Asked(database, databases, named, text, [], problem % {"error": _one_line(error)})
    return Asked(database, databases, named, text, locks, "")


@admin.register(HeldLock)
class HeldLockAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """No table is behind it: each page asks the server, and takes no lock."""

    change_list_template = "admin/django_advisory_lock/heldlock/change_list.html"
    table_template = "admin/django_advisory_lock/heldlock/lock_table.html"
    end_session_template = "admin/django_advisory_lock/heldlock/end_session.html"

    def get_urls(self) -> list[URLPattern]:
        def wrap(view: Any) -> Any:
            return self.admin_site.admin_view(view)

        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path("", wrap(self.changelist_view), name=f"{name}_changelist"),
            path("<int:pid>/<int:start>/end/", wrap(self.end_session_view), name=f"{name}_end"),
        ]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_end_session_permission(self, request: HttpRequest) -> bool:
        """Whether a user may end sessions: those that may see them, and have that permission too."""
        return self.has_view_permission(request) and request.user.has_perm(f"{self.opts.app_label}.end_session")

    @method_decorator(require_safe)
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the locks, or where a script asks for it, only their table."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        asked = read(request)
        maker = TableMaker(request, self.admin_site, own_sessions() if asked.locks else set())
        is_table = "table" in request.GET
        context = {
            **({} if is_table else self._context(request)),
            "title": capfirst(str(self.opts.verbose_name_plural)),
            "asked": asked,
            "table": maker.make(asked.locks, asked.text),
            "may_end": self.has_end_session_permission(request),
            "query": asked.query(),
            "table_query": asked.query(table="1"),
            "still_query": asked.query(refresh="off"),
            "reloads": request.GET.get("refresh") != "off",
            "refresh_seconds": REFRESH_SECONDS,
            "seconds_without_scripts": SECONDS_WITHOUT_SCRIPTS,
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, self.table_template if is_table else self.change_list_template, context)

    @method_decorator(require_http_methods(["GET", "HEAD", "POST"]))
    def end_session_view(self, request: HttpRequest, pid: int, start: int) -> HttpResponse:
        """Show what would end, and end it at a POST."""
        if not self.has_end_session_permission(request):
            raise PermissionDenied
        asked = read(request)
        maker = TableMaker(request, self.admin_site, own_sessions())
        locks = [lock for lock in asked.locks if (lock.pid, start_of(lock)) == (pid, start)]
        if refusal := self._refusal(pid, asked, locks, maker):
            self.message_user(request, *refusal)
        elif request.method == "POST":
            self._end(request, pid, start, asked.database, locks)
        else:
            waiting = {lock.pid for lock in asked.locks if pid in lock.blocked_by}
            context = {
                **self._context(request),
                "title": _("End session %(session)s?") % {"session": session_name(locks[0])},
                "asked": asked,
                "since": locks[0].backend_start,
                "groups": maker.make(locks).groups,
                "row": maker.make(locks).groups[0].rows[0],
                "waiting": len(waiting),
                "list_url": self._list_url(asked),
            }
            request.current_app = self.admin_site.name
            return TemplateResponse(request, self.end_session_template, context)
        return HttpResponseRedirect(self._list_url(asked))

    def _refusal(self, pid: int, asked: Asked, locks: list[KeyLock], maker: TableMaker) -> tuple[str, int] | None:
        """Return what speaks against ending a session, and how bad that is."""
        if asked.problem:
            return asked.problem, messages.ERROR
        if not locks:
            text = _("Nothing was ended: session %(pid)d is gone, or no longer holds or waits for a lock.")
            return text % {"pid": pid}, messages.WARNING
        if any(map(maker.is_own, locks)):
            text = _("Nothing was ended: session %(pid)d is the one that serves you this page.")
            return text % {"pid": pid}, messages.ERROR
        return None

    def _end(self, request: HttpRequest, pid: int, start: int, database: str, locks: list[KeyLock]) -> None:
        """End a session, note it in the admin's log, and say what came of it."""
        name, log = session_name(locks[0]), router.db_for_write(LogEntry)
        try:
            with transaction.atomic(using=log):
                # The entry first, so that nothing is ended that cannot be noted.
                self.log_change(request, HeldLock(pid, name), _describe(database, locks))
                outcome = end_session(pid, start, database, timeout=TIMEOUT)
                if outcome is Outcome.GONE:
                    transaction.set_rollback(True, using=log)
        except Error as error:
            text = _("Session %(session)s was not ended: %(error)s")
            self.message_user(request, text % {"session": name, "error": _one_line(error)}, messages.ERROR)
            return
        if outcome is Outcome.GONE:
            text, level = _("Nothing was ended: session %(session)s was gone already."), messages.WARNING
        elif outcome is Outcome.ENDED:
            text, level = _("Session %(session)s has ended, and what it held is free."), messages.SUCCESS
        else:
            text = _("Session %(session)s was told to end, and has not done so yet: look again.")
            level = messages.WARNING
        self.message_user(request, text % {"session": name}, level)

    def _context(self, request: HttpRequest) -> dict[str, Any]:
        return {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "breadcrumbs_are_list": django.VERSION >= (6, 1),
        }

    def _list_url(self, asked: Asked) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
        query = asked.query()
        return reverse(name, current_app=self.admin_site.name) + (f"?{query}" if query else "")


def _describe(database: str, locks: Iterable[KeyLock]) -> str:
    """Say for the admin's log what an ended session was at."""
    texts = [_("Ended the session, on %(database)s.") % {"database": database}]
    for granted, text in ((True, _("It held: %(keys)s.")), (False, _("It waited for: %(keys)s."))):
        keys = [f"{visible(lock.key.name)} ({numbers_of(lock.key)})" for lock in locks if lock.granted is granted]
        if keys:
            more = [_("%(count)d more") % {"count": len(keys) - NAMED}] if len(keys) > NAMED else []
            texts.append(text % {"keys": "; ".join(keys[:NAMED] + more)})
    return " ".join(texts)


def _one_line(error: Exception) -> str:
    return visible(" ".join(str(error).split()))
