"""The settings of the tests, and what the queues need that come from elsewhere."""

import os
from importlib.util import find_spec

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as _APPS

INSTALLED_APPS = list(_APPS)
if find_spec("django.tasks") and find_spec("django_tasks_db"):
    INSTALLED_APPS.append("django_tasks_db")

TASKS = {
    "default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": []},
    "immediate": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"},
    "dummy": {"BACKEND": "django.tasks.backends.dummy.DummyBackend"},
}

if "HUEY_FILE" in os.environ:
    INSTALLED_APPS.append("huey.contrib.djhuey")
    HUEY = {
        "huey_class": "huey.SqliteHuey",
        "name": "tests",
        "immediate": False,
        "connection": {"filename": os.environ["HUEY_FILE"]},
    }
