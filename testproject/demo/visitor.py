"""A visitor of the shop's pages, as far as a form needs one: the cookie, and the token that goes with it."""

from __future__ import annotations

import re
from http.client import HTTPConnection
from http.cookies import SimpleCookie
from typing import TYPE_CHECKING

from .processes import PATIENCE

if TYPE_CHECKING:
    from .processes import Child


class Visitor:
    def __init__(self, port: int, path: str) -> None:
        self._port = port
        self._path = path
        self._token = ""

    def look(self) -> None:
        """Read the page, and keep its token."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        try:
            connection.request("GET", self._path)
            self._token = SimpleCookie(connection.getresponse().headers["Set-Cookie"])["csrftoken"].value
        finally:
            connection.close()

    def submit(self) -> int:
        """Send the form of the page, and return the status of the answer."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": f"csrftoken={self._token}"}
        try:
            connection.request("POST", self._path, f"csrfmiddlewaretoken={self._token}", headers)
            return connection.getresponse().status
        finally:
            connection.close()


def port_of(child: Child) -> int | None:
    """Return where a runserver listens; None where it has not said so yet."""
    child.read()
    said = re.search(r"http://127\.0\.0\.1:(\d+)/", child.output)
    return int(said[1]) if said else None
