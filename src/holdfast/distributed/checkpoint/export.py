"""Writes the model and the optimizers of a checkpoint in formats that other tools read: safetensors, torch.save, DCP."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.base import durable
from holdfast.core.base.errors import MissingDependency, RunDirError, first_line
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.core.checkpoints.verify import verify
from holdfast.distributed.checkpoint.load import read_parts, read_tensors
from holdfast.runtime.ports.checkpoint_store import TensorSpec
from holdfast.runtime.snapshots.encoding import PART, decode
from holdfast.runtime.tensors.nested_state import TensorSlot

_MODEL = ("model.", "frozen.", "buffer.")
_OPTIMIZER = ("optimizer.", "group.", PART)
_TIMES_THE_DISK, _SMALL_BYTES = 16, 64 << 20
"""tensors may be this many times as large as their files on disk: some file systems compress"""
_MAX_GROUP = 10_000_000
"""tensors of a parameter group; more is no description of a run"""


class ExportedState(NamedTuple):
    """The state dicts of a checkpoint."""

    manifest: Manifest
    model: dict[str, Tensor]
    tied: dict[str, str]
    """further names of tensors of the model, and the name that `model` has them under"""
    optimizers: list[dict[str, Any]]
    notes: list[str]

    def nested(self) -> dict[str, Any]:
        """Return everything as one dict: step, model, and optimizer, or optimizers if there are several."""
        model = {**self.model, **{alias: self.model[name] for alias, name in self.tied.items()}}
        one = len(self.optimizers) == 1
        optimizers = {"optimizer": self.optimizers[0]} if one else {"optimizers": self.optimizers}
        return {"step": self.manifest.step, "model": model, **(optimizers if self.optimizers else {})}


def read_state(
    entry: CheckpointEntry, *, with_optimizers: bool, advance: Callable[[int], None] | None = None
) -> ExportedState:
    """Return the state dicts, every byte verified. RunDirError if the checkpoint is damaged or lacks what is needed.

    What each rank has of its own, such as buffers, is rank 0's. advance: called with the number of bytes of each read.
    """
    if (damage := verify(entry, contents=False)) is not None:
        raise RunDirError(f"{entry.path} cannot be exported: {damage}")
    manifest = entry.manifest
    assert manifest is not None, "verify has read it"
    prefixes = (*_MODEL, *_OPTIMIZER) if with_optimizers else _MODEL
    tensors = read_tensors(
        entry.path,
        manifest,
        {},
        rank=0,
        size=1,
        check_layout=refuse_holes,
        is_wanted=lambda name: name.startswith(prefixes),
        advance=advance,
    )
    transient = set(_strings(manifest.about.get("transient_buffers")))
    model: dict[str, Tensor] = {}
    for name in (name for name in tensors if name.startswith(_MODEL)):
        kind, _, bare = name.partition(".")
        is_older = kind == "frozen" and f"model.{bare}" in tensors  # it has changed although no optimizer has it
        if not is_older and not (kind == "buffer" and bare in transient):
            model[bare] = tensors[name]
    notes = []
    if any(name.startswith("buffer.") for name in tensors) and manifest.world_size > 1:
        notes.append(f"each of {manifest.world_size} ranks saved its own buffers; those of rank 0 are exported")
    optimizers = _optimizers(entry.path, manifest, tensors) if with_optimizers else []
    return ExportedState(manifest, model, _aliases(manifest, model), optimizers, notes)


def refuse_holes(layout: dict[str, TensorSpec], bytes_on_disk: int) -> None:
    declared = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in layout.values())
    if declared > max(_TIMES_THE_DISK * bytes_on_disk, _SMALL_BYTES):
        raise RunDirError(
            f"it declares {declared:,} bytes, and has {bytes_on_disk:,} bytes on disk: its files have holes"
        )


def _aliases(manifest: Manifest, model: Mapping[str, Tensor]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    groups = manifest.about.get("tied")
    for names in map(_strings, groups if isinstance(groups, list) else []):
        saved = next((name for name in names if name in model), None)
        if saved is not None:
            aliases |= {name: saved for name in names if name not in model}
    return aliases


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _optimizers(folder: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the state dict of each optimizer, as torch's `Optimizer.state_dict` returns it."""
    try:
        small = decode(read_parts(folder, 0, manifest), tensors)["light"]
        described = manifest.about["optimizer_groups"]
        optimizers = []
        for state, groups, about in zip(small["optimizer_state"], small["optimizer_groups"], described, strict=True):
            start, filled = 0, []
            for options, facts in zip(groups, about, strict=True):
                end = start + min(int(facts["tensors"]), _MAX_GROUP)
                filled.append({**_fill(options, tensors), "params": list(range(start, end))})
                start = end
            optimizers.append({"state": _fill(state, tensors), "param_groups": filled})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunDirError(
            f"{folder} does not describe its optimizers ({type(error).__name__}: {error}); "
            "--format safetensors exports the model alone"
        ) from None
    return optimizers


def _fill(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of a skeleton, with the tensors themselves."""
    if isinstance(skeleton, TensorSlot):
        return tensors[skeleton.name]
    if isinstance(skeleton, dict):
        return {key: _fill(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, list | tuple):
        return type(skeleton)(_fill(value, tensors) for value in skeleton)
    return skeleton


def check_format(name: str) -> None:
    """Raise MissingDependency if the package that writes a format is not installed."""
    if name == "safetensors":
        try:
            import safetensors.torch  # noqa: F401
        except ImportError as error:
            raise MissingDependency(
                f"--format safetensors needs safetensors, which cannot be imported ({error}); "
                "install it with: pip install safetensors"
            ) from None


def write(state: ExportedState, format: str, path: Path) -> int:
    """Write the state to a new file, or a new folder for DCP. Return its bytes. RunDirError if that fails.

    It is written under another name and renamed: a path that exists is complete.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.aside")
    try:
        _WRITERS[format](state, temporary)
        files = [each for each in temporary.rglob("*") if each.is_file()] if temporary.is_dir() else [temporary]
        for file in files:
            durable.fsync_file(file)
        nbytes = sum(file.stat().st_size for file in files)
        if os.path.lexists(path):
            raise RunDirError(f"{path} has appeared meanwhile; it is not overwritten")
        durable.rename(temporary, path)
        durable.fsync_folder(path.parent)
    except RunDirError:
        raise
    except OSError as error:
        raise durable.run_dir_error(path, "written", error) from None
    except Exception as error:  # torch and safetensors have errors of their own for a full disk and for odd dtypes
        raise RunDirError(f"{path} cannot be written: {type(error).__name__}: {first_line(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            durable.remove_tree(temporary)
    return nbytes


def _write_safetensors(state: ExportedState, path: Path) -> None:
    from safetensors.torch import save_file

    # safetensors.torch.load_model reads the other names of a tied weight from here.
    metadata = {"format": "pt", "step": str(state.manifest.step), **state.tied}
    save_file(state.model, str(path), metadata)
    os.umask(umask := os.umask(0))
    os.chmod(path, 0o666 & ~umask)  # safetensors makes files that only their owner can read


def _write_torch(state: ExportedState, path: Path) -> None:
    torch.save(state.nested(), path)


def _write_dcp(state: ExportedState, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that this is a single process
        save(state.nested(), checkpoint_id=path, no_dist=True)


_WRITERS: dict[str, Callable[[ExportedState, Path], None]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "dcp": _write_dcp,
}
