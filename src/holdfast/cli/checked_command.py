"""The class of every command: an error in a command line shows the value that is wrong."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

_PATHS = ("PATH", "FILE", "FILE.md")
"""metavars of options that name a file or folder"""


class CheckedCommand(TyperCommand):
    """Refuses empty paths, and adds the given value to typer's messages about wrong values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Read before typer converts the values: an empty path becomes the working folder.
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        param: Any  # typer's own classes differ between its versions
        for param in self.params:
            value = given.get(param.name or "")
            is_path = param.param_type_name == "argument" or param.metavar in _PATHS
            if is_path and "" in (value if isinstance(value, list | tuple) else [value]):
                raise typer.BadParameter("'' names no file or folder; is a shell variable unset?", ctx, param)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            value = given.get(getattr(error.param, "name", None) or "")
            if isinstance(value, str) and value not in error.message:
                error.message = f"{value!r}: {error.message}"
            raise
