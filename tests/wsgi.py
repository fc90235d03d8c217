"""The WSGI application of the tests, in gunicorn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def serve(descriptor: int, directory: str, options: dict[str, Any]) -> None:
    """Serve on a socket that listens already, until a signal comes."""
    from django.core.wsgi import get_wsgi_application
    from gunicorn.app.base import BaseApplication

    class Gunicorn(BaseApplication):  # type: ignore[misc]
        def load_config(self) -> None:
            for name, value in options.items():
                if name in self.cfg.settings:  # older ones do not know them all
                    self.cfg.set(name, value)
            self.cfg.set("bind", f"fd://{descriptor}")
            self.cfg.set("post_fork", lambda arbiter, worker: Path(directory, f"worker.{os.getpid()}").touch())

        def load(self) -> Any:
            return get_wsgi_application()

    Gunicorn().run()
