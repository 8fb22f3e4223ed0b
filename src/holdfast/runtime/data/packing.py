"""Converts random state and the state of a loader to plain values and tensors, which any file can hold, and back."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.state.host_rng import numpy_from_plain, numpy_to_plain
from holdfast.runtime.state.rng import RngState

_DEFAULT_BIT_GENERATOR = "MT19937"


def pack_rng(state: RngState, generators: Sequence[Tensor]) -> dict[str, Any]:
    """Pack what a sampler may draw from: the global CPU generators, and the states of the loader's own generators."""
    version, words, gauss = state.python
    numpy = numpy_to_plain(state.numpy)
    if numpy is not None and numpy["bit_generator"] == _DEFAULT_BIT_GENERATOR:  # stored flat
        numpy = {"has_gauss": numpy["has_gauss"], "gauss": numpy["gauss"], **numpy["state"]}
    return {
        # A list of Python's integers takes `torch.tensor` five times as long.
        "python": {"version": version, "words": torch.frombuffer(array("q", words), dtype=torch.int64), "gauss": gauss},
        "numpy": numpy,
        "torch": state.torch.clone(),
        "own": [t.clone() for t in generators],
    }


def unpack_rng(packed: dict[str, Any], current: RngState) -> RngState:
    """Return the packed state. Device generators and whatever else was not packed are those of `current`."""
    python, numpy = packed["python"], packed["numpy"]
    if numpy is not None and "bit_generator" not in numpy:
        rest = {name: value for name, value in numpy.items() if name not in ("key", "pos")}
        numpy = {**rest, "bit_generator": _DEFAULT_BIT_GENERATOR, "state": {"key": numpy["key"], "pos": numpy["pos"]}}
    words = tuple(python["words"].tolist())
    return current._replace(
        python=(python["version"], words, python["gauss"]),
        numpy=numpy_from_plain(numpy) or current.numpy,
        torch=packed["torch"],
    )


def pack_state(value: Any) -> Any:
    """Pack a loader's state. The result shares no memory with it. TypeError if it holds what no file can."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, tuple):
        return {"$tuple": [pack_state(v) for v in value]}
    if isinstance(value, list):
        return [pack_state(v) for v in value]
    if isinstance(value, dict):
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: pack_state(v) for k, v in value.items()}
        return {"$dict": [[pack_state(k), pack_state(v)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return {"$numpy": [str(value.dtype), list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise TypeError(f"it holds a {type(value).__name__}; plain values and tensors can be saved")


def unpack_state(value: Any) -> Any:
    """Invert `pack_state`."""
    if isinstance(value, list):
        return [unpack_state(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tuple" in value:
        return tuple(unpack_state(v) for v in value["$tuple"])
    if "$dict" in value:
        return {unpack_state(k): unpack_state(v) for k, v in value["$dict"]}
    if "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if "$numpy" in value:
        import numpy as np

        dtype, shape, data = value["$numpy"]
        array = np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape)
        return array.copy() if shape else array[()]
    return {k: unpack_state(v) for k, v in value.items()}
