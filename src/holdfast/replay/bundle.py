"""Reads the bundle of an incident, every byte verified. Nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.bundles import find_bundle, incident_folder
from holdfast.core.checkpoints.entry import read_entry
from holdfast.core.checkpoints.manifest import is_name
from holdfast.core.checkpoints.resume import CHECKPOINTS
from holdfast.core.checkpoints.verify import verify
from holdfast.distributed.checkpoint.export import refuse_holes
from holdfast.distributed.checkpoint.load import read_parts, read_tensors
from holdfast.runtime.snapshots.encoding import decode
from holdfast.runtime.state.rng import RngState

_NO_REPLAY = "so the step cannot run again"


class Bundle(NamedTuple):
    """Holds what a step needs to run again, on the host."""

    path: Path
    step: int
    incident: int
    rank: int
    about: dict[str, Any]
    weights: dict[str, Tensor]
    """parameters and buffers by name, with the prefixes model. and buffer."""
    earlier: dict[str, Tensor]
    """the same of the newest certified snapshot before it; empty if the bundle has none"""
    batches: list[Any]
    next_batches: list[Any] | None
    """of the next step; None if it had not been begun"""
    rng: RngState
    notes: list[str]
    """what is not as it was in training"""

    @property
    def folder(self) -> Path:
        """Return the folder of its incident."""
        return incident_folder(self.path)

    def measured(self, name: str) -> float | None:
        """Return a number of the step's signal, of which "nan" and "inf" may be text; None if it is no number."""
        signal = self.about.get("signal")
        value = signal.get(name) if isinstance(signal, dict) else None
        try:
            return None if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            return None


def read_bundle(path: Path, rank: int | None = None) -> Bundle:
    """Return the bundle that a path names. RunDirError if it is damaged, or lacks the batch or the weights."""
    entry = find_bundle(path, rank)
    manifest = entry.manifest
    assert manifest is not None, "find_bundle has verified it"
    tensors = read_tensors(entry.path, manifest, {}, rank=0, size=1, check_layout=refuse_holes)
    parts = decode(read_parts(entry.path, 0, manifest), tensors)
    about = manifest.about
    if parts.get("batches") is None:
        why = str(about.get("batch"))[:300]
        raise RunDirError(
            f"{entry.path} holds no batch, {_NO_REPLAY}: {why}. For the next incident set [replay] keep_batch = true"
        )
    try:
        rng, batches = RngState.of(parts["rng"]), list(parts["batches"])
        next_batches = None if parts.get("next_batches") is None else list(parts["next_batches"])
        rng.try_out()
        incident, owner = int(about["incident"]), int(about["rank"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise RunDirError(
            f"{entry.path} is no bundle that this version can read ({type(error).__name__}: {error}); use the version "
            "of Holdfast that wrote it"
        ) from None
    weights = {name: value for name, value in tensors.items() if name.startswith(("model.", "buffer."))}
    earlier = {name.removeprefix("before."): t for name, t in tensors.items() if name.startswith("before.")}
    notes: list[str] = []
    if not weights:
        weights, note = _referenced(entry.path, about)
        notes.append(note)
    if about.get("moment") == "after the step":
        notes.append("the weights are those after the step: its update had landed before anything was found")
    return Bundle(
        entry.path, manifest.step, incident, owner, about, weights, earlier, batches, next_batches, rng, notes
    )


def _referenced(bundle: Path, about: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Return the weights of the checkpoint that a bundle names, and a note that they are older."""
    why, named = str(about.get("weights"))[:300], about.get("checkpoint")
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or not is_name(name):
        raise RunDirError(
            f"{bundle} holds no weights, {_NO_REPLAY}: {why}, and the run had no good checkpoint by then; "
            "raise [replay] max_bundle_mb"
        )
    path = incident_folder(bundle).parent.parent / CHECKPOINTS / name
    entry = read_entry(path)
    if entry is None:
        raise RunDirError(
            f"{bundle} holds no weights ({why}) and names the checkpoint {name}, which is not at {path}: replay it inside "
            f"its run directory, or copy that checkpoint there; a run keeps it for a while only ([checkpoint] keep_last)"
        )
    if (damage := verify(entry, contents=False)) is not None or entry.manifest is None:
        raise RunDirError(f"{path}, which holds the weights of the bundle, is damaged: {damage}; restore a copy")
    tensors = read_tensors(
        *(path, entry.manifest, {}),
        rank=0,
        size=1,
        check_layout=refuse_holes,
        is_wanted=lambda name: name.startswith(("model.", "frozen.", "buffer.")),
    )
    frozen = {f"model.{key[7:]}": value for key, value in tensors.items() if key.startswith("frozen.")}
    others = {key: value for key, value in tensors.items() if not key.startswith("frozen.")}
    return {**frozen, **others}, f"the weights are those of {name}, not those of the step itself: {why}"
