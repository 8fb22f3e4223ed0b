"""Conversion of any value to plain data, for JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_MAX_DEPTH = 32


def plain(value: Any) -> Any:
    """Convert structs to objects, enums to values, numbers of other libraries to numbers, and the rest to text.

    Never raises: evidence may come from the user's own detectors, and writing it must not end the run.
    """
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_convert)
    except Exception:  # keys that are not text, a structure that contains itself
        return _convert_each(value, ())


def loads(line: bytes) -> Any:
    """Parse JSON. Half of a surrogate pair, as in an undecodable path, becomes a question mark: msgspec refuses it."""
    value = json.loads(line)
    if b"\\ud" in line.lower():
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def text(value: Any) -> str:
    """Return the repr of a value, or its type if that fails."""
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


def _convert_each(value: Any, containers: tuple[int, ...]) -> Any:
    """Convert what can be converted, and the rest to text. `containers` has the ids of those that enclose the value."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        tag = {} if config.tag_field is None else {config.tag_field: config.tag}
        value = {**tag, **{name: getattr(value, name) for name in value.__struct_fields__}}
    if isinstance(value, dict | list | tuple | set | frozenset):
        if len(containers) == _MAX_DEPTH or id(value) in containers:
            return "..."
        containers = (*containers, id(value))
        if isinstance(value, dict):
            return {k if type(k) is str else text(k): _convert_each(v, containers) for k, v in value.items()}
        return [_convert_each(v, containers) for v in value]
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_convert)
    except Exception:
        return text(value)
