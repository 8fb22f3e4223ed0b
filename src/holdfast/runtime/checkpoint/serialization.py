"""Turn a snapshot into checkpoint contents, and a snapshot or a checkpoint into a state to restore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.core.base.errors import DataError
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.runtime.checkpoint.config_overrides import apply_overrides
from holdfast.runtime.context import Context
from holdfast.runtime.data.source import BatchSource, Position
from holdfast.runtime.data.world import world_size_problem
from holdfast.runtime.ports.checkpoint_store import CheckpointContents, RestoredCheckpoint
from holdfast.runtime.snapshots.encoding import PART
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.rng import RngState
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.tensors.sharded import local
from holdfast.runtime.tensors.torch_private import shard_like


class RestorePoint(NamedTuple):
    """A state to return to, in memory or on disk."""

    step: int
    lineage: Lineage
    interventions: int
    """how many interventions of the run's history the state holds"""
    detectors: dict[str, Any]
    name: str
    """"memory", or the name of a checkpoint"""
    position: Position
    """the data position of the state"""
    restore: Callable[[], list[str]]
    """restores everything but the detectors, the data position included; returns warnings for the record"""


def contents_of(snapshot: Snapshot, state: RunState, journal_bytes: int = 0) -> CheckpointContents:
    """Return what a complete snapshot is on disk. Host memory is not copied, but read until `release` is called."""
    assert snapshot.small_state is not None and snapshot.rng is not None
    parts = {
        "step": snapshot.step,
        "light": snapshot.small_state,
        "detectors": snapshot.detectors,
        "rng": snapshot.rng.plain(),
        "data": snapshot.data,
        "journal_bytes": journal_bytes,
    }
    sharded, share = state.sharded_tensors(), snapshot.share
    owners = {} if share is None else share.owners
    on_host = {n: t.cpu() for n, t in snapshot.tensors().items()}
    tensors = {n: shard_like(sharded[n], t) if n in sharded else t for n, t in on_host.items()}
    snapshot.begin_reading()
    return CheckpointContents(
        snapshot.step,
        snapshot.lineage,
        parts,
        tensors,
        snapshot.wait_for,
        snapshot.inspect,
        lambda name: name.startswith(("buffer.", PART)) or state.is_rank_specific(name),
        snapshot.end_reading,
        owners,
    )


def restore_point_in_memory(snapshot: Snapshot, snapshots: SnapshotManager, source: BatchSource) -> RestorePoint:
    """Return a snapshot of this process as a state to return to."""
    position = snapshot.position
    assert position is not None

    def restore() -> list[str]:
        snapshots.restore(snapshot)
        source.seek(position)
        return []

    return RestorePoint(
        snapshot.step, snapshot.lineage, snapshot.intervention_count, snapshot.detectors, "memory", position, restore
    )


def restore_point_on_disk(
    context: Context, snapshots: SnapshotManager, source: BatchSource, saved: RestoredCheckpoint, *, is_resume: bool
) -> RestorePoint:
    """Return a loaded checkpoint, which has passed its checks, as a state to return to.

    is_resume: this process has drawn nothing yet. Otherwise the source's own record of its order is used: a sampler that
    is not a function of seed and epoch would give another order if it were asked again.
    """
    parts, name = saved.parts, saved.manifest.name
    tensors = {key: local(value) for key, value in saved.tensors.items()}
    if is_resume:
        why = world_size_problem(parts["data"], then=saved.manifest.world_size, now=saved.world_size)
        if why is not None:
            raise DataError(f"checkpoint {name}: {why}")
    position = Position(*(int(parts["data"][key]) for key in Position._fields))

    def restore() -> list[str]:
        warnings: list[str] = []
        if is_resume or not source.can_seek(position):
            # The loader's workers of a rank that was not saved draw numbers of their own.
            warnings = source.resume(parts["data"] if saved.has_local_rng else {**parts["data"], "worker_rng": None})
        else:
            source.seek(position)
        rng = RngState.of(parts["rng"]) if saved.has_local_rng else None
        # Which layers train is what the lines say that this process runs.
        light = parts["light"] | ({"flags": None} if is_resume else {})
        snapshots.restore_saved(saved.manifest.step, light, tensors, rng)
        changed = apply_overrides(context.state, saved.manifest.about, context.records.about())
        if changed:
            warnings.append(f"these settings changed since {name} was saved; the new ones apply: {', '.join(changed)}")
        if missing := sorted(set(parts["light"]["registered"]) - context.state.registered):
            warnings.append(f"registered in {name} but not in this run, so not restored: {', '.join(missing)}")
        return warnings

    return RestorePoint(
        saved.manifest.step,
        saved.manifest.lineage,
        int(parts["light"]["interventions"]["turns"]),
        parts["detectors"],
        name,
        position,
        restore,
    )
