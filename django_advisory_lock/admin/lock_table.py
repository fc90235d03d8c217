"""What the admin's page of locks shows: one group for each key, with a row for each session that holds it or waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from django.apps import apps
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _

from ..ending import start_of
from ..parts import visible
from .words import in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from django.contrib.admin import AdminSite
    from django.http import HttpRequest

    from ..inspection import KeyLock
    from ..keys import LockKey

LIMIT = 200  # keys on one page
BLOCKERS = 5  # named for one session: of hundreds in a queue each has all those before it in its way


@dataclass(frozen=True)
class Row:
    """A session that holds a key, or waits for it."""

    lock: KeyLock
    anchor: str
    start: int | None
    is_own: bool
    blockers: list[tuple[str, str]] = field(default_factory=list)

    @property
    def application(self) -> str:
        return visible(self.lock.application_name)

    @property
    def session(self) -> str:
        return session_name(self.lock)

    @property
    def client(self) -> str:
        is_visible = self.lock.pid is not None and self.lock.state is not None
        return self.lock.client or (_("local socket") if is_visible else "")

    @property
    def mode(self) -> str:
        return _("shared") if self.lock.shared else _("exclusive")

    @property
    def state_since(self) -> str:
        return _length(self.lock.seconds_in_state)

    @property
    def waiting_for(self) -> str:
        return _length(self.lock.seconds_waiting)

    @property
    def can_be_ended(self) -> bool:
        return self.start is not None and not self.is_own


@dataclass(frozen=True)
class Group:
    """A key, and who is at it: holders first."""

    anchor: str
    name: str
    numbers: str
    url: str
    rows: list[Row]

    @property
    def waiting(self) -> int:
        return sum(not row.lock.granted for row in self.rows)

    @property
    def order(self) -> tuple[float, str, str]:
        """First what is waited for longest, and what nobody waits for by name."""
        waits = [row.lock.seconds_waiting or 0.0 for row in self.rows if not row.lock.granted]
        return (-1 - max(waits) if waits else 0.0, self.name, self.numbers)

    def contains(self, text: str) -> bool:
        """Whether what is shown of the key, or of any of its sessions, contains a text in whatever case."""
        shown = [self.name, self.numbers]
        for row in self.rows:
            shown += [row.session, row.client]
        return any(text.casefold() in one.casefold() for one in shown)


@dataclass(frozen=True)
class Table:
    """The groups that a filter leaves, of which a page shows the first."""

    groups: list[Group]

    @property
    def shown(self) -> list[Group]:
        return self.groups[:LIMIT]

    @property
    def more(self) -> int:
        return len(self.groups) - len(self.shown)

    @property
    def held(self) -> int:
        return sum(len(group.rows) - group.waiting for group in self.groups)

    @property
    def waiting(self) -> int:
        return sum(group.waiting for group in self.groups)

    @property
    def hides_sessions(self) -> bool:
        """Whether any session of them cannot be told from another one that gets its pid, so cannot be ended here."""
        return any(row.start is None and row.lock.pid is not None for group in self.groups for row in group.rows)


def session_name(lock: KeyLock) -> str:
    """Name the session of a lock, for people."""
    if lock.pid is None:
        return _("a prepared transaction")
    application = visible(lock.application_name)
    return f"{lock.pid} ({application})" if application else str(lock.pid)


def numbers_of(key: LockKey) -> str:
    """Return the numbers of a key, as PostgreSQL's functions take them."""
    return ", ".join(map(str, key.args))


class TableMaker:
    """Makes a table for a request: who asks decides on what is linked."""

    def __init__(self, request: HttpRequest, site: AdminSite, own: set[tuple[int, int]]) -> None:
        self.request = request
        self.site = site
        self.own = own
        self._pages: dict[str, str] = {}

    def make(self, locks: Iterable[KeyLock], text: str = "") -> Table:
        by_key: dict[LockKey, list[KeyLock]] = {}
        for lock in locks:
            by_key.setdefault(lock.key, []).append(lock)
        groups = [self._group(of_key) for of_key in by_key.values()]
        return Table(sorted((group for group in groups if group.contains(text)), key=lambda group: group.order))

    def is_own(self, lock: KeyLock) -> bool:
        """Whether the session serves this request, on whatever alias."""
        return lock.own or (lock.pid, start_of(lock)) in self.own

    def _group(self, locks: Sequence[KeyLock]) -> Group:
        key, anchors = locks[0].key, _anchors(locks)
        # The holders first, so one who holds and waits too is found at what it holds.
        places = {lock.pid or 0: anchor for lock, anchor in zip(reversed(locks), reversed(anchors), strict=True)}
        rows = [
            Row(lock, anchor, start_of(lock), self.is_own(lock), _blockers(lock, places))
            for lock, anchor in zip(locks, anchors, strict=True)
        ]
        numbers = numbers_of(key)
        name = visible(key.name) if locks[0].is_named else numbers
        return Group(f"key-{_id(key)}", name, numbers, self._url(locks[0]), rows)

    def _url(self, lock: KeyLock) -> str:
        """Return the address of the object that a key stands for, where there is a page of it for this user."""
        if lock.model is None:
            return ""
        if lock.model not in self._pages:
            self._pages[lock.model] = self._page(lock.model)
        page = self._pages[lock.model]
        try:
            return page and reverse(page, args=[lock.object_pk], current_app=self.site.name)
        except NoReverseMatch:
            return ""  # the class has pages of its own

    def _page(self, label: str) -> str:
        model = apps.get_model(label)
        if not self.site.is_registered(model):
            return ""
        may_view = self.site.get_model_admin(model).has_view_permission(self.request)
        return f"admin:{model._meta.app_label}_{model._meta.model_name}_change" if may_view else ""


def _id(key: LockKey) -> str:
    return "-".join(map(str, key.pg_locks))


def _anchors(locks: Sequence[KeyLock]) -> list[str]:
    """Return an id for each row, which is the same when the page is loaded again."""
    found: Counter[str] = Counter()
    anchors = []
    for lock in locks:
        anchor = f"lock-{_id(lock.key)}-{lock.pid or 0}-{lock.mode}-{'held' if lock.granted else 'waiting'}"
        found[anchor] += 1  # prepared transactions have no pid
        anchors.append(anchor if found[anchor] == 1 else f"{anchor}-{found[anchor]}")
    return anchors


def _blockers(lock: KeyLock, places: dict[int, str]) -> list[tuple[str, str]]:
    """Return who is in the way of a session: text, and the id of the row, where there is one."""
    pids = list(dict.fromkeys(lock.blocked_by))
    found = [(str(pid) if pid else _("a prepared transaction"), places.get(pid, "")) for pid in pids[:BLOCKERS]]
    if len(pids) > BLOCKERS:
        found.append((_("%(count)d more") % {"count": len(pids) - BLOCKERS}, ""))
    return found


def _length(seconds: float | None) -> str:
    return "" if seconds is None else in_words(timedelta(seconds=seconds))
