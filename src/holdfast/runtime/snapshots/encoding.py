"""Encodes the parts of a saved run that are not tensors as JSON, and decodes them. Nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from holdfast.core.base.errors import RunDirError
from holdfast.runtime.data.source import Position
from holdfast.runtime.tensors.nested_state import TensorSlot, split_tensors

PART = "part."
"""prefix of the names of tensors found among the parts"""


def encode(parts: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Return the parts as text, and move tensors among them to `tensors`. RunDirError for values JSON cannot hold."""
    return json.dumps(_encode(split_tensors(parts, PART.rstrip("."), tensors)))


def decode(text: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the parts, with those of `tensors` that belong to them. RunDirError if the text is damaged."""
    try:
        parts = _decode(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunDirError(f"the saved state cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(parts, dict):
        raise RunDirError("the saved state cannot be read: it is not an object")
    return parts


def _encode(value: Any) -> Any:
    """Encode as JSON, keeping tuples, keys that are not strings, positions, and the places of tensors."""
    if isinstance(value, TensorSlot):
        return {"$tensor": value.name}
    if isinstance(value, Position):
        return {"$position": list(value)}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(v) for v in value]}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _encode(v) for k, v in value.items()}
        return {"$dict": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise RunDirError(
        f"a checkpoint cannot hold a {type(value).__name__} ({value!r:.80}): keep plain values and tensors in the state"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        name = value["$tensor"]
        return tensors[name] if name.startswith(PART) else TensorSlot(name)
    if "$position" in value:
        return Position(*value["$position"])
    if "$tuple" in value:
        return tuple(_decode(v, tensors) for v in value["$tuple"])
    if "$dict" in value:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value["$dict"]}
    return {k: _decode(v, tensors) for k, v in value.items()}
