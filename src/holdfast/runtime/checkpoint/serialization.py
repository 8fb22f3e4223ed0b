"""A run apart for another process, and back: everything it is, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.base.errors import DataError, SetupError
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.runtime.checkpoint import config_overrides as given
from holdfast.runtime.data.source import Position
from holdfast.runtime.data.world import world_size_problem
from holdfast.runtime.ports.checkpoint_store import CheckpointContents, RestoredCheckpoint
from holdfast.runtime.snapshots.encoding import PART
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.rng import RngState
from holdfast.runtime.tensors.sharded import local
from holdfast.runtime.tensors.torch_private import shard_like

if TYPE_CHECKING:
    from holdfast.runtime.state.run_state import RunState
    from holdfast.runtime.step.run import Run


class Found(NamedTuple):
    """A state to return to, wherever it was kept."""

    step: int
    lineage: Lineage
    turns: int
    detectors: dict[str, Any]
    where: str
    """memory, or the name of a checkpoint"""
    position: Position
    """where its data stood"""
    put_back: Callable[[], None]
    """everything but the detectors, the data too"""


def frame_of(snapshot: Snapshot, state: RunState) -> CheckpointContents:
    """What a whole snapshot is on disk. Nothing is copied: its memory is read until `written` is set."""
    assert snapshot.light is not None and snapshot.rng is not None
    parts = {
        "step": snapshot.step,
        "light": snapshot.light,
        "detectors": snapshot.detectors,
        "rng": snapshot.rng.plain(),
        "data": snapshot.data,
    }
    spread = state.sharded_tensors()
    tensors = {n: shard_like(spread[n], t) if n in spread else t for n, t in snapshot.tensors().items()}
    snapshot.written.clear()
    return CheckpointContents(
        snapshot.step,
        snapshot.lineage,
        parts,
        tensors,
        snapshot.wait_for,
        snapshot.inspect,
        lambda name: name.startswith(("buffer.", PART)) or state.is_rank_specific(name),
        snapshot.written.set,
    )


def in_memory(run: Run, snapshot: Snapshot) -> Found:
    """A snapshot of this process's own."""
    position = snapshot.position
    assert run.source is not None and position is not None
    source = run.source

    def put_back() -> None:
        run.snapshots.restore(snapshot)
        source.seek(position)

    return Found(
        snapshot.step, snapshot.lineage, snapshot.intervention_count, snapshot.detectors, "memory", position, put_back
    )


def on_disk(run: Run, saved: RestoredCheckpoint, *, fresh: bool) -> Found:
    """A state that was read back; SetupError where it is not one of this run's model and optimizer.

    fresh: nothing was drawn yet in this process. Otherwise what the source has on record of its order serves better than
    asking the sampler again: one that is no function of seed and epoch would give another.
    """
    parts = saved.parts
    why = run.state.mismatch(parts["light"], saved.tensors, whole=True)
    if why is not None:
        raise SetupError(
            f"checkpoint {saved.manifest.name} does not fit this run: {why}; name another run_dir for another run, or set "
            '[checkpoint] resume = "never"'
        )

    tensors = {name: local(value) for name, value in saved.tensors.items()}
    why = world_size_problem(parts["data"], then=saved.manifest.world_size, now=saved.world_size) if fresh else None
    if why is not None:
        raise DataError(f"checkpoint {saved.manifest.name}: {why}")
    position = Position(*(int(parts["data"][key]) for key in Position._fields))

    def put_back() -> None:
        assert run.source is not None
        notes: list[str] = []
        if fresh or not run.source.can_seek(position):
            notes = run.source.resume(parts["data"])
        else:
            run.source.seek(position)
        run.snapshots.restore_saved(
            saved.manifest.step, parts["light"], tensors, RngState.of(parts["rng"]) if saved.has_local_rng else None
        )
        names = given.hold(run.state, saved.manifest.about, run.records.about())
        if names:
            notes.append(f"changed since it was saved, and the new settings hold from here: {', '.join(names)}")
        if gone := sorted(set(parts["light"]["registered"]) - run.state.registered):
            notes.append(f"registered when it was saved and not now, so not restored: {', '.join(gone)}")
        for note in notes:
            run.tell(note)

    return Found(
        saved.manifest.step,
        saved.manifest.lineage,
        int(parts["light"]["interventions"]["turns"]),
        parts["detectors"],
        saved.manifest.name,
        position,
        put_back,
    )
