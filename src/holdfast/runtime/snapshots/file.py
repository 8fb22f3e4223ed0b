"""A snapshot as one file: tensors, and everything else as JSON of ours. Reading it unpickles nothing but tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import RunDirError
from holdfast.runtime.data.source import Position
from holdfast.runtime.rng import RngState
from holdfast.runtime.tree import Slot, split

_VERSION = 1


def save(path: str | os.PathLike[str], parts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write aside, then put in place: the file is the old one or the new one, never half of one."""
    found: dict[str, Tensor] = {}
    rest = split(parts, "part", found)
    everything = {**{n: t.detach().cpu() for n, t in tensors.items()}, **{n: t.cpu() for n, t in found.items()}}
    place = Path(path)
    aside = place.with_name(f".{place.name}.{os.getpid()}")
    text = json.dumps({"version": _VERSION, "parts": _encode(rest)})
    try:
        with aside.open("wb") as file:
            torch.save({"json": text, "tensors": everything}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(place)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RunDirError(f"{place} cannot be written: {error.strerror}") from None


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The parts and the tensors of a snapshot file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        data = json.loads(content["json"])
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']} is not {_VERSION}")
        tensors: dict[str, Tensor] = content["tensors"]
        return _decode(data["parts"], tensors), tensors
    except FileNotFoundError:
        raise RunDirError(f"{path}: no such snapshot file") from None
    except Exception as error:
        # torch's own text about untrusted pickles is a page long, and its advice must not be followed here.
        why = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise RunDirError(
            f"{path} is not a snapshot file that can be read ({why}); name one that guard.save wrote"
        ) from None


def pack_rng(state: RngState) -> dict[str, Any]:
    numpy = None
    if state.numpy is not None:
        numpy = {
            **state.numpy,
            "state": {"key": state.numpy["state"]["key"].tolist(), "pos": int(state.numpy["state"]["pos"])},
        }
    return {
        "python": state.python,
        "numpy": numpy,
        "torch": state.torch,
        "devices": state.devices,
        "generators": state.generators,
    }


def unpack_rng(data: dict[str, Any]) -> RngState:
    numpy = data["numpy"]
    if numpy is not None:
        import numpy as np

        numpy = {**numpy, "state": {**numpy["state"], "key": np.array(numpy["state"]["key"], dtype=np.uint32)}}
    return RngState(data["python"], numpy, data["torch"], data["devices"], data["generators"])


def _encode(value: Any) -> Any:
    """JSON that keeps tuples, keys that are no strings, positions, and the places of tensors."""
    if isinstance(value, Slot):
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
        f"a snapshot file cannot hold a {type(value).__name__} ({value!r}): keep plain values and tensors"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        name = value["$tensor"]
        return tensors[name] if name.startswith("part.") else Slot(name)
    if "$position" in value:
        return Position(*value["$position"])
    if "$tuple" in value:
        return tuple(_decode(v, tensors) for v in value["$tuple"])
    if "$dict" in value:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value["$dict"]}
    return {k: _decode(v, tensors) for k, v in value.items()}
