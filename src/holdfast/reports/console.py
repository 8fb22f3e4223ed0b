"""The console that everything in colour is printed on. It cleans all text and reads no markup in it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from holdfast.core.base.clean import clean


class CleanConsole(Console):
    """Cleans what it prints, except for the colours and cursor movements of rich itself."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment("\n".join(map(clean, text.split("\n"))), style)


def console(*, stderr: bool = False, quiet: bool = False) -> CleanConsole:
    """Return a console that prints question marks for characters that the stream's encoding lacks."""
    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    return CleanConsole(file=stream, highlight=False, markup=False, emoji=False, quiet=quiet)
