"""What the demo writes, and the claims that failed."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from .timeline import SHADES, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.core.management.base import BaseCommand

    from .claims import Claim
    from .timeline import Row

WIDTH = 80
# Where the terminal, or the file, cannot show the characters on the left.
PLAIN = str.maketrans({"·": ".", "░": "-", "▒": "=", "▓": "#", "█": "#", "○": "o", "†": "x", "✓": "+", "✗": "!"})


class Stage:
    def __init__(self, command: BaseCommand, *, quiet: bool) -> None:
        self._out = command.stdout
        self._style = command.style
        self._quiet = quiet
        self._plain = not _can_show("·░▒▓█○†✓✗", getattr(command.stdout, "encoding", None))
        self.claims: list[Claim] = []
        self._steps = 0

    @property
    def failed(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.holds]

    def step(self, title: str, *paragraphs: str) -> None:
        self._steps += 1
        self._write(self._style.MIGRATE_HEADING(f"\n{self._steps}. {title}"))
        for paragraph in paragraphs:
            self.say(paragraph)

    def say(self, text: str) -> None:
        self._write(textwrap.fill(text, WIDTH - 2, initial_indent="   ", subsequent_indent="   "))

    def chart(self, rows: Sequence[Row], *, collision: bool = False) -> None:
        colour = self._style.ERROR if collision else self._style.SUCCESS
        self._write("")
        for line in render(rows, width=WIDTH):
            self._write(re.sub(f"[{SHADES}]+", lambda bar: colour(bar[0]), line))
        self._write("")

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)
        mark = self._style.SUCCESS("✓") if claim.holds else self._style.ERROR("✗")
        text = claim.text if claim.holds else self._style.ERROR(claim.text)
        self._write(f"   {mark} {text}")

    def end(self, text: str) -> None:
        self._write("\n" + self._style.SUCCESS(text))

    def _write(self, text: str) -> None:
        if not self._quiet:
            self._out.write(text.translate(PLAIN) if self._plain else text)


def _can_show(characters: str, encoding: str | None) -> bool:
    try:
        characters.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
