"""Turns a batch into plain values and tensors on the host, and back. Nothing is pickled."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.core.base.errors import DataError
from holdfast.runtime.data.split import tensors_of
from holdfast.runtime.tensors.inspect import nbytes

_KIND = "holdfast.kind"
_PLAIN = (type(None), bool, int, float, str)


def batches_nbytes(batches: Iterable[Any]) -> int:
    """Return the bytes of the tensors of batches."""
    return sum(nbytes(tensor) for batch in batches for tensor in tensors_of(batch))


def pack_batch(value: Any) -> Any:
    """Return a copy of a batch in plain values and tensors. DataError if it holds an object that has no such form."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or hasattr(value, "to_local"):
            raise DataError(f"the batch holds a tensor of layout {value.layout}, or a sharded one")
        return value.detach().to("cpu", copy=True)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {key: pack_batch(inner) for key, inner in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: pack_batch(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_KIND: "dataclass", "name": type(value).__name__, "values": fields}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        values = [pack_batch(inner) for inner in value]
        return {_KIND: "namedtuple", "name": type(value).__name__, "fields": list(value._fields), "values": values}
    if isinstance(value, list | tuple):
        packed = [pack_batch(inner) for inner in value]
        return tuple(packed) if isinstance(value, tuple) else packed
    if hasattr(value, "__array_interface__"):
        try:
            return {_KIND: "array", "values": torch.tensor(value)}
        except (TypeError, ValueError) as error:
            raise DataError(f"the batch holds an array of {value.dtype}: {error}") from None
    raise DataError(f"the batch holds a {type(value).__name__}, which is neither a plain value nor a tensor")


def unpack_batch(value: Any, device: torch.device) -> Any:
    """Return the batch of a packed one, its tensors on `device`. A dataclass becomes another of the same fields."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(unpack_batch(inner, device) for inner in value)
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind == "dataclass":
        fields = {name: unpack_batch(inner, device) for name, inner in value["values"].items()}
        return dataclasses.make_dataclass(value["name"], list(fields))(**fields)
    if kind == "namedtuple":
        make = namedtuple(value["name"], value["fields"])  # type: ignore[misc]
        return make(*(unpack_batch(inner, device) for inner in value["values"]))
    if kind == "array":
        return value["values"].numpy()
    return {key: unpack_batch(inner, device) for key, inner in value.items()}
