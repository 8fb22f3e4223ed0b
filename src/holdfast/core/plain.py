"""Values as plain data, for JSON."""

from __future__ import annotations

from typing import Any

import msgspec


def plain(value: Any) -> Any:
    """Structs as objects, enums as values, numbers of other libraries as numbers; what is left, as its text.

    Evidence comes from the user's detectors too: no value of theirs may end the run when it is written down.
    """
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_convert)


def _convert(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    for method in ("item", "tolist"):
        convert = getattr(value, method, None)
        if callable(convert):
            try:
                return plain(convert())
            except Exception:
                continue
    return repr(value)
