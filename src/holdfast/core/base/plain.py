"""Values as plain data, for JSON."""

from __future__ import annotations

from typing import Any

import msgspec

_DEEPEST = 32


def plain(value: Any) -> Any:
    """Structs as objects, enums as values, numbers of other libraries as numbers; what is left, as its text.

    Evidence comes from the user's detectors too: no value of theirs may end the run when it is written down.
    """
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_convert)
    except Exception:  # keys that are no names, a structure that holds itself
        return _piecewise(value, ())


def text(value: Any) -> str:
    """What a value says of itself, if it can."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _convert(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    for method in ("item", "tolist"):
        convert = getattr(value, method, None)
        if callable(convert):
            try:
                return plain(convert())
            except Exception:
                continue
    return text(value)


def _piecewise(value: Any, around: tuple[int, ...]) -> Any:
    """What can be converted, converted; the rest as text. `around` are the containers that it lies in."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__
        named = {} if tag.tag_field is None else {tag.tag_field: tag.tag}
        value = {**named, **{name: getattr(value, name) for name in value.__struct_fields__}}
    if isinstance(value, dict | list | tuple | set | frozenset):
        if len(around) == _DEEPEST or id(value) in around:
            return "..."
        around = (*around, id(value))
        if isinstance(value, dict):
            return {k if type(k) is str else text(k): _piecewise(v, around) for k, v in value.items()}
        return [_piecewise(v, around) for v in value]
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_convert)
    except Exception:
        return text(value)
