"""The admin for the tests of it: settings and tables that the other tests do without, users, and real servers."""

from __future__ import annotations

import contextlib
import html
import re
import threading
from collections.abc import Iterator
from http.cookiejar import CookieJar
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application
from django.db import connection, connections
from django.db.models import Model
from django.test import Client, override_settings
from django.urls import URLResolver, path
from django.utils import translation

from tests.settings import INSTALLED_APPS
from tests.support import LIMIT

SETTINGS: dict[str, Any] = {
    # Without autodiscovery, which would import admin modules for nothing.
    "INSTALLED_APPS": [*INSTALLED_APPS, "django.contrib.admin.apps.SimpleAdminConfig", "django.contrib.messages"],
    "MIDDLEWARE": [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.locale.LocaleMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    "TEMPLATES": [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
    # Both in cookies, so that the statements of a request are those of its view.
    "SESSION_ENGINE": "django.contrib.sessions.backends.signed_cookies",
    "MESSAGE_STORAGE": "django.contrib.messages.storage.cookie.CookieStorage",
    "PASSWORD_HASHERS": ["django.contrib.auth.hashers.MD5PasswordHasher"],
    "ALLOWED_HOSTS": ["*"],
    "STATIC_URL": "/static/",
    "USE_I18N": True,
}


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install the admin, with its table, for the length of a block."""
    with override_settings(**SETTINGS):
        call_command("migrate", "admin", verbosity=0)
        try:
            yield
        finally:
            User.objects.all().delete()
            call_command("migrate", "admin", "zero", verbosity=0)
            connection.close()
            translation.deactivate()  # the test client's requests share the context of the tests


@contextlib.contextmanager
def serving(
    model: type[Model], model_admin: type[admin.ModelAdmin[Any]] | None = None, name: str = "admin"
) -> Iterator[admin.AdminSite]:
    """Serve an admin with one model for the length of a block."""
    site = admin.AdminSite(name)
    site.register(model, model_admin)
    with serving_urls([path("admin/", site.urls)]):
        yield site


def serving_urls(patterns: list[URLResolver]) -> override_settings:
    return override_settings(ROOT_URLCONF=type("urls", (), {"urlpatterns": patterns}))


def user(name: str, *permissions: str, **attributes: Any) -> User:
    """Make a member of the staff with permissions such as `testapp.view_report`; without any, a superuser."""
    made: User = User.objects.create_user(name, is_staff=True, is_superuser=not permissions, **attributes)
    for permission in permissions:
        app_label, codename = permission.split(".")
        made.user_permissions.add(Permission.objects.get(content_type__app_label=app_label, codename=codename))
    return made


def log_entries() -> Any:
    """Return the manager of the admin's log, whose model cannot be imported before the admin is installed."""
    from django.contrib.admin.models import LogEntry

    return LogEntry.objects


def client(who: User, **options: Any) -> Client:
    made = Client(**options)
    made.force_login(who)
    return made


def texts(response: Any) -> list[str]:
    """Return the messages of a page, without their markup."""
    content = response.content.decode()
    found = re.findall(r'<li class="(?:success|warning|error|info)">(.*?)</li>', content, re.DOTALL)
    return [html.unescape(text) for text in found]


def text_of(response: Any) -> str:
    """Return what a page says, without tags."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", response.content.decode())))


class _Handler(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadedWSGIServer):
    daemon_threads = False  # so that closing waits for the requests, and their connections

    def process_request_thread(self, *args: Any) -> None:
        try:
            super().process_request_thread(*args)
        finally:
            connections.close_all()


@contextlib.contextmanager
def live_server() -> Iterator[str]:
    """Serve what is installed from threads, one for each request; yield the address."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.set_app(get_wsgi_application())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Browser:
    """Somebody who has logged in to a live server, with cookies and tokens."""

    def __init__(self, address: str, who: User, password: str) -> None:
        self.address = address
        self.cookies = CookieJar()
        self.opener = build_opener(HTTPCookieProcessor(self.cookies))
        self.get("/admin/login/")
        self.post("/admin/login/", {"username": who.get_username(), "password": password, "next": "/admin/"})

    def get(self, where: str) -> SimpleNamespace:
        return self._open(where, None)

    def post(self, where: str, data: dict[str, Any]) -> SimpleNamespace:
        token = next(cookie.value for cookie in self.cookies if cookie.name == "csrftoken")
        return self._open(where, urlencode({**data, "csrfmiddlewaretoken": token}, doseq=True).encode())

    def _open(self, where: str, data: bytes | None) -> SimpleNamespace:
        try:
            with self.opener.open(self.address + where, data, timeout=2 * LIMIT) as answer:
                return SimpleNamespace(status_code=answer.status, url=answer.url, content=answer.read())
        except HTTPError as error:
            with error:
                return SimpleNamespace(status_code=error.code, url=error.url, content=error.read())
