"""What the shop's commands read from the command line."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

from django.db import DEFAULT_DB_ALIAS, connections

from .months import MONTH

if TYPE_CHECKING:
    from django.core.management.base import CommandParser


def add_database(parser: CommandParser) -> None:
    parser.add_argument(
        "--database",
        default=DEFAULT_DB_ALIAS,
        choices=tuple(connections),
        help='The database to work on; "default" by default. Locks are taken there too.',
    )


def positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds, at least 0")
    return value


def month(text: str) -> str:
    if not re.match(MONTH, text):
        raise ArgumentTypeError(f"{text!r} is no month: write it as YYYY-MM, such as 2026-09")
    return text
