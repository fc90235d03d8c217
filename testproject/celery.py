"""The shop's Celery application. `celery -A testproject worker` starts a worker, on any number of terminals.

    $ celery -A testproject worker --loglevel INFO &
    $ python manage.py shell -c "from testproject.shop.jobs import generate; generate.delay('2026-09')"

The broker is `CELERY_BROKER_URL`, by default files in `.celery/` beside this package: that takes no set-up, and is for
trying things out only. With `SHOP_CELERY_EAGER=1` there is no broker at all: `delay()` runs the task at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")


def make_folders(*, data_folder_in: str, data_folder_out: str, control_folder: str) -> None:
    """Make the folders of a broker of files, out of sight of git."""
    root = Path(control_folder).parent
    root.mkdir(mode=0o700, exist_ok=True)
    (root / ".gitignore").write_text("*\n")
    for folder in {data_folder_in, data_folder_out, control_folder}:
        Path(folder).mkdir(exist_ok=True)


app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
if app.conf.broker_url == "filesystem://" and not app.conf.task_always_eager:
    make_folders(**app.conf.broker_transport_options)
# Not named tasks.py, which is what every task queue looks for.
app.autodiscover_tasks(["testproject.shop"], related_name="jobs")
