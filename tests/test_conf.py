import enum
import math
import types
from datetime import timedelta

import pytest
from django.conf import LazySettings
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from django.utils.translation import gettext_lazy

from django_advisory_lock import conf
from django_advisory_lock.conf import get_database, get_namespace, get_slow_wait, session_pooler_aliases

NOT_CALLABLE = "a namespace in a constant"
tenant = "one"


def current_tenant():
    return tenant


class Region(str, enum.Enum):
    EU = "eu-west"


def test_without_settings_the_one_that_is_missed_is_named(monkeypatch):
    monkeypatch.setattr(conf, "settings", LazySettings())
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    with pytest.raises(ImproperlyConfigured, match="ADVISORY_LOCK_NAMESPACE"):
        conf.get_namespace()


class TestHowSettingsAreMade:
    """Whatever way Django has for it."""

    def test_a_module_of_defaults(self, monkeypatch):
        settings = LazySettings()
        settings.configure(default_settings=types.SimpleNamespace(ADVISORY_LOCK_NAMESPACE="shop"))
        monkeypatch.setattr(conf, "settings", settings)
        assert get_namespace() == "shop"
        assert get_database() == "default"

    def test_an_attribute(self, monkeypatch):
        monkeypatch.setattr(django_settings, "ADVISORY_LOCK_NAMESPACE", "shop", raising=False)
        assert get_namespace() == "shop"

    def test_a_setting_that_is_deleted(self):
        with override_settings(ADVISORY_LOCK_NAMESPACE="shop"), override_settings():
            delattr(django_settings, "ADVISORY_LOCK_NAMESPACE")
            assert get_namespace() == ""


class TestDatabase:
    def test_default(self):
        assert get_database() == "default"

    def test_setting(self):
        with override_settings(ADVISORY_LOCK_DATABASE="direct"):
            assert get_database() == "direct"
        assert get_database() == "default"

    @pytest.mark.parametrize("value", ["", None, 1, ["default"]])
    def test_refused(self, value):
        with override_settings(ADVISORY_LOCK_DATABASE=value), pytest.raises(ImproperlyConfigured, match="DATABASE"):
            get_database()


class TestNamespace:
    def test_default(self):
        assert get_namespace() == ""

    @pytest.mark.parametrize("text", ["shop", "", "eu-west.example", "10.0.0.1", "a..b", ".", "é x"])
    def test_text(self, text):
        with override_settings(ADVISORY_LOCK_NAMESPACE=text):
            assert get_namespace() == text

    def test_member_of_a_text_enum_is_its_text(self):
        with override_settings(ADVISORY_LOCK_NAMESPACE=Region.EU):
            assert type(get_namespace()) is str
            assert get_namespace() == "eu-west"

    @pytest.mark.parametrize("source", [current_tenant, f"{__name__}.current_tenant"])
    def test_callables_are_asked_at_each_call(self, source, monkeypatch):
        with override_settings(ADVISORY_LOCK_NAMESPACE=source):
            assert get_namespace() == "one"
            monkeypatch.setattr(f"{__name__}.tenant", "two")
            assert get_namespace() == "two"
        assert get_namespace() == ""

    @pytest.mark.parametrize(
        "path", [f"{__name__}.curent_tenant", "tests.no_such_module.tenant", "no_such_package.tenant", "example.com"]
    )
    def test_a_dotted_path_that_leads_nowhere_is_no_text(self, path):
        refused = pytest.raises(ImproperlyConfigured, match="reads as a dotted path")
        with override_settings(ADVISORY_LOCK_NAMESPACE=path), refused as caught:
            get_namespace()
        assert isinstance(caught.value.__cause__, ImportError)

    def test_a_dotted_path_to_something_else(self):
        path = f"{__name__}.NOT_CALLABLE"
        with override_settings(ADVISORY_LOCK_NAMESPACE=path), pytest.raises(ImproperlyConfigured, match="a callable"):
            get_namespace()

    @pytest.mark.parametrize("value", [None, 1, b"shop", gettext_lazy("shop"), lambda: None, lambda: 7])
    def test_not_text(self, value):
        with override_settings(ADVISORY_LOCK_NAMESPACE=value), pytest.raises(ImproperlyConfigured, match="text"):
            get_namespace()

    @pytest.mark.parametrize("text", ["a\x1db", "\x1e", "a\x1f", "\ud800"])
    def test_text_that_cannot_be_in_a_key(self, text):
        for value in (text, lambda: text):
            with (
                override_settings(ADVISORY_LOCK_NAMESPACE=value),
                pytest.raises(ImproperlyConfigured, match=r"U\+001D"),
            ):
                get_namespace()

    def test_an_error_of_the_callable_passes_through(self):
        def no_tenant():
            raise LookupError("no tenant")

        with override_settings(ADVISORY_LOCK_NAMESPACE=no_tenant), pytest.raises(LookupError, match="no tenant"):
            get_namespace()


class TestSessionPooler:
    def test_default(self):
        assert session_pooler_aliases() == frozenset()

    @pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
    def test_setting(self, kind):
        with override_settings(ADVISORY_LOCK_SESSION_POOLER=kind(["default", "other"])):
            assert session_pooler_aliases() == {"default", "other"}
        assert session_pooler_aliases() == frozenset()

    @pytest.mark.parametrize("value", ["default", None, True, {"default": True}, [1], [["default"]]])
    def test_refused(self, value):
        with override_settings(ADVISORY_LOCK_SESSION_POOLER=value), pytest.raises(ImproperlyConfigured, match="a list"):
            session_pooler_aliases()


class TestSlowWait:
    def test_default(self):
        assert get_slow_wait() == 5.0

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [(0, 0.0), (2, 2.0), (0.5, 0.5), (timedelta(milliseconds=1500), 1.5), (None, math.inf), (math.inf, math.inf)],
    )
    def test_setting(self, value, seconds):
        with override_settings(ADVISORY_LOCK_SLOW_WAIT=value):
            assert get_slow_wait() == seconds
            assert type(get_slow_wait()) is float
        assert get_slow_wait() == 5.0

    @pytest.mark.parametrize("value", [-1, math.nan, True, "5", [5], timedelta(seconds=-1)])
    def test_refused(self, value):
        with override_settings(ADVISORY_LOCK_SLOW_WAIT=value), pytest.raises(ImproperlyConfigured, match="SLOW_WAIT"):
            get_slow_wait()
