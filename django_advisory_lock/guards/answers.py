"""What a client is told whose request finds a lock busy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from django.http import HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist, loader
from django.template.response import TemplateResponse
from django.utils.cache import patch_vary_headers
from django.utils.encoding import escape_uri_path
from django.utils.html import format_html
from django.utils.translation import get_language, gettext

from ..notices import logger
from ..options import seconds

if TYPE_CHECKING:
    from datetime import timedelta

    from django.http import HttpRequest

    from ..exceptions import LockTimeout


def read_status(status: int) -> int:
    """Check the status of a busy response."""
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status <= 599:
        raise ValueError(f"The status of a busy view is from 400 to 599, such as 409, 423, 429 or 503, not {status!r}.")
    return status


def read_retry_after(value: float | timedelta | None) -> int | None:
    """Return the whole seconds of a Retry-After header, or None for no header."""
    number = seconds(value, "retry_after")
    return None if number is None else math.ceil(number)


def busy_response(error: LockTimeout, request: HttpRequest, status: int, retry_after: int | None) -> HttpResponse:
    """Answer that somebody else is at it, in HTML or JSON, and without saying who: that is for the log.

    A template named after the status, such as `409.html`, takes the place of the built-in page.
    """
    # Quoted again: a line break in it would forge a line of the log.
    logger.info("%s %s was not run: %s", request.method, escape_uri_path(request.path), error)
    text = gettext("Somebody else is doing this right now. Please try again in a moment.")
    # A request of Django REST framework has Django's inside; what it serves is JSON unless asked otherwise.
    plain = cast("HttpRequest", getattr(request, "_request", request))
    types = ["text/html", "application/json"] if plain is request else ["application/json", "text/html"]
    response: HttpResponse
    if request.get_preferred_type(types) == "application/json":
        response = JsonResponse({"detail": text}, status=status)
    else:
        response = _busy_page(plain, text, status, retry_after)
    if retry_after is not None:
        response["Retry-After"] = str(retry_after)
    patch_vary_headers(response, ["Accept"])
    return response


def _busy_page(request: HttpRequest, text: str, status: int, retry_after: int | None) -> HttpResponse:
    try:
        template = loader.get_template(f"{status}.html")
    except TemplateDoesNotExist:
        return HttpResponse(format_html(_PAGE, get_language() or "en", gettext("Busy"), text), status=status)
    return TemplateResponse(request, template, {"message": text, "retry_after": retry_after}, status=status)


_PAGE = """<!doctype html>
<html lang="{0}">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{1}</title></head>
<body><h1>{1}</h1><p>{2}</p></body>
</html>
"""
