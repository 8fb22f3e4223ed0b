"""Random streams and the state of a loader as plain values and tensors, which any file can hold, and back."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.state.host_rng import numpy_from_plain, numpy_to_plain
from holdfast.runtime.state.rng import RngState

_USUAL = "MT19937"


def pack_streams(state: RngState, own: Sequence[Tensor]) -> dict[str, Any]:
    """The global streams of the CPU, and those of the loader's own generators: what a sampler may draw from."""
    version, words, gauss = state.python
    numpy = numpy_to_plain(state.numpy)
    if numpy is not None and numpy["bit_generator"] == _USUAL:  # its words are not in a part of their own
        numpy = {"has_gauss": numpy["has_gauss"], "gauss": numpy["gauss"], **numpy["state"]}
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": numpy,
        "torch": state.torch.clone(),
        "own": [t.clone() for t in own],
    }


def unpack_streams(packed: dict[str, Any], present: RngState) -> RngState:
    """The streams that were packed; devices and what else was not are those of `present`."""
    python, numpy = packed["python"], packed["numpy"]
    if numpy is not None and "bit_generator" not in numpy:
        rest = {name: value for name, value in numpy.items() if name not in ("key", "pos")}
        numpy = {**rest, "bit_generator": _USUAL, "state": {"key": numpy["key"], "pos": numpy["pos"]}}
    words = tuple(python["words"].tolist())
    return present._replace(
        python=(python["version"], words, python["gauss"]),
        numpy=numpy_from_plain(numpy) or present.numpy,
        torch=packed["torch"],
    )


def pack_state(value: Any) -> Any:
    """A loader's own state. Nothing in the result is shared with it. TypeError where it holds what no file can."""
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

        kind, shape, data = value["$numpy"]
        found = np.frombuffer(base64.b64decode(data), dtype=np.dtype(kind)).reshape(shape)
        return found.copy() if shape else found[()]
    return {k: unpack_state(v) for k, v in value.items()}
