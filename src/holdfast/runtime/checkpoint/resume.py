"""Resume a run: from the checkpoint a person named, from the newest good one, or from the beginning."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from holdfast.core.base.errors import HoldfastError, RunDirError, SetupError, UnreadableError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints import fit
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.core.checkpoints.resume import RejectedCheckpoint, is_left, list_gone
from holdfast.runtime.checkpoint.content_checks import RunChecks
from holdfast.runtime.checkpoint.manager import CheckpointManager
from holdfast.runtime.checkpoint.serialization import RestorePoint, restore_point_on_disk
from holdfast.runtime.context import Context
from holdfast.runtime.data.source import BatchSource
from holdfast.runtime.ports.checkpoint_store import CheckpointStore, RestoredCheckpoint
from holdfast.runtime.snapshots.manager import SnapshotManager

log = logging.getLogger("holdfast")


class ResumedRun(NamedTuple):
    """Where a run begins."""

    step: int
    is_trusted: bool
    """whether a rollback may return to this state at once

    An orderly end leaves a candidate: a run may resume from it, but it is certified only by healthy steps."""
    is_restored: bool = False
    """whether the state of an earlier process was restored"""
    source: str = "disk"
    """where that state was: disk or memory"""


def resume(manager: CheckpointManager, snapshots: SnapshotManager, source: BatchSource) -> ResumedRun:
    """Restore the checkpoint that the run resumes from, if there is one. Nothing may have been trained before."""
    if manager.store is None:
        return ResumedRun(0, True)
    began = time.perf_counter()
    manager.describe_model()
    rejected: list[RejectedCheckpoint] = []
    restorer = _CheckpointRestorer(manager.context, manager.store, snapshots, source)
    if manager.load_path:
        restored: _RestoredRun | None = _restore_named(manager, manager.store, restorer)
    else:
        restored, rejected = _restore_newest(manager, manager.store, restorer)
    if restored is None:
        _start_over(manager, manager.store, rejected)
        return ResumedRun(0, True)
    _continue_from(manager, restored, rejected, began)
    return ResumedRun(restored.point.step, restored.entry.health is Health.GOOD, True, restored.source)


class _RestoredRun(NamedTuple):
    """A checkpoint whose state the run is in now."""

    entry: CheckpointEntry
    saved: RestoredCheckpoint
    point: RestorePoint
    differences: list[fit.Difference]
    warnings: list[str]

    @property
    def source(self) -> str:
        return "memory" if self.entry.in_memory else "disk"


class _CheckpointRestorer:
    """Loads, checks and restores checkpoints, one after another until one is restored."""

    def __init__(
        self, context: Context, store: CheckpointStore, snapshots: SnapshotManager, source: BatchSource
    ) -> None:
        self._context, self._store, self._snapshots, self._source = context, store, snapshots, source

    def restore(self, entry: CheckpointEntry) -> _RestoredRun:
        """Put the run into the state of a checkpoint. SetupError if it does not fit, RunDirError if it is damaged; then
        nothing was touched, unless an object of the user refuses its state."""
        context, differences = self._context, self._compare(entry)
        refusal = fit.refusal(differences)
        try:
            saved = self._store.load(entry, context.state.target(), RunChecks(context))
        except SetupError as error:
            raise SetupError("\n".join(filter(None, (str(error), refusal)))) from None
        if refusal is not None:
            raise SetupError(f"checkpoint {entry.name}: {refusal}")
        point = restore_point_on_disk(context, self._snapshots, self._source, saved, is_resume=True)
        problem, warnings = "", []
        try:
            warnings = point.restore()
        except HoldfastError:
            raise
        except Exception as error:  # an object of the user that refuses its state, or a kernel of torch
            problem = f"{type(error).__name__}: {error}"
        problems = [each for each in context.ranks.all_gather_object(problem) if each]
        if problems:
            raise SetupError(f"checkpoint {entry.name} cannot be restored: {problems[0]}")
        if context.ranks.size > 2:  # the sum of two gradients has one order
            orders = context.ranks.all_gather_object(saved.parts["light"]["gradient_orders"])
            context.state.restore_gradient_orders(orders[0])
        return _RestoredRun(entry, saved, point, differences, warnings)

    def describes_another_run(self, entry: CheckpointEntry) -> bool:
        """Return whether the manifest itself says that the state is that of another model, optimizer or data."""
        return fit.refusal(self._compare(entry)) is not None

    def _compare(self, entry: CheckpointEntry) -> list[fit.Difference]:
        return fit.compare({} if entry.manifest is None else entry.manifest.about, self._context.records.about())


def _restore_named(manager: CheckpointManager, store: CheckpointStore, restorer: _CheckpointRestorer) -> _RestoredRun:
    """Restore the checkpoint a person named. It wins over the automatic choice, with a note."""
    context, named = manager.context, store.find(manager.load_path)
    automatic = None
    if manager.config.resume == "auto":
        automatic, _ = store.choose(lambda entry: _why_abandoned(context, entry), manager.tier.entries())
    if automatic is None or automatic.path != named.path:
        other = "nothing" if automatic is None else automatic.name
        context.engine.note(0, f"resuming from load_path = {named.path}; automatic resume would have chosen {other}")
    try:
        return restorer.restore(named)
    except RunDirError as error:
        raise RunDirError(
            f"load_path {named.path} cannot be used: {error}; name another, or restore a complete copy"
        ) from None


def _restore_newest(
    manager: CheckpointManager, store: CheckpointStore, restorer: _CheckpointRestorer
) -> tuple[_RestoredRun | None, list[RejectedCheckpoint]]:
    """Restore the newest good checkpoint, of the disk or of the memory tier. Those that cannot be are marked bad on the
    way, and removed if they are in memory.

    One whose manifest describes this run, and whose contents do not fit it, is marked only if an older one fits: if none
    does, the program has changed, and the SetupError of the newest is raised.
    """
    if manager.config.resume == "never":
        return None, []
    unusable: dict[tuple[str, bool], str] = {}
    misfits: dict[tuple[str, bool], SetupError] = {}
    context, in_memory = manager.context, manager.tier.entries()
    while True:
        entry, rejected = store.choose(
            lambda e: unusable.get((e.name, e.in_memory)) or _why_abandoned(context, e), in_memory
        )
        for each in rejected:
            if each.in_memory:
                continue
            record = manager.records.get(each.name)
            if each.damaged and record is not None and record.health is not Health.BAD:
                log.warning("holdfast: checkpoint %s cannot be used: %s", each.name, each.why)
                manager.mark(record, Health.BAD, each.why)
        rejected = [*list_gone(context.records.usable_checkpoints, store.entries(), entry), *rejected]
        if entry is None:
            if misfits:
                raise next(iter(misfits.values()))
            return None, rejected
        try:
            restored = restorer.restore(entry)
        except RunDirError as error:
            unusable[entry.name, entry.in_memory] = str(error)
            _mark_unusable(manager, entry.name, entry.in_memory, error)
        except SetupError as error:
            if restorer.describes_another_run(entry):
                raise
            key = (entry.name, entry.in_memory)
            unusable[key], misfits[key] = str(error), error
        else:
            for (name, is_in_memory), misfit in misfits.items():
                _mark_unusable(manager, name, is_in_memory, misfit)
            for each in rejected:
                if each.in_memory:
                    manager.tier.remove(each.name)
            return restored, rejected


def _mark_unusable(manager: CheckpointManager, name: str, in_memory: bool, error: Exception) -> None:
    log.warning("holdfast: checkpoint %s%s cannot be used: %s", name, " in memory" if in_memory else "", error)
    if not in_memory and name in manager.records and not isinstance(error, UnreadableError):
        manager.mark(manager.records[name], Health.BAD, str(error))


def _why_abandoned(context: Context, entry: CheckpointEntry) -> str | None:
    is_abandoned = is_left(context.history.lineage, entry.branch, entry.step)
    return "it is on a branch that the run has left" if is_abandoned else None


def _start_over(manager: CheckpointManager, store: CheckpointStore, rejected: list[RejectedCheckpoint]) -> None:
    """Begin at step 0. RunDirError if there are checkpoints and none is usable, unless resume = "never"."""
    context = manager.context
    if manager.config.resume == "never":
        if context.records.restarted:
            context.engine.note(0, '[checkpoint] resume = "never": the run starts over, whatever its run_dir holds')
            context.engine.write("started_over", durable=True)
            context.history.clear_interventions()
    elif any(e.damage is not None or e.health in (Health.BAD, Health.GOOD) for e in store.entries()):
        raise RunDirError(
            f"no usable checkpoint in {context.records.place} ({_listed(rejected)}); name one with [checkpoint] "
            'load_path, or start over with [checkpoint] resume = "never" or another run_dir'
        )
    elif rejected:
        context.engine.note(0, f"the run starts from the beginning: {_listed(rejected)}")
    manager.tier.remove_all()
    if manager.records or context.history.branches:
        manager.fork(Lineage(), 0)
        manager.quarantine_abandoned("the run started over")


def _note_differences(context: Context, manifest: Manifest, differences: list[fit.Difference]) -> None:
    """Record what the checkpoint says of its run and is not so in this one."""
    name, step = manifest.name, manifest.step
    for line in fit.describe([d for d in differences if d.weight != "note"]):
        context.engine.note(0, f"resuming from {name}: {line}")
    for line in fit.describe([d for d in differences if d.weight == "note"]):
        context.engine.write("note", step=step, message=f"resuming from {name}: {line}")


def _continue_from(
    manager: CheckpointManager, restored: _RestoredRun, rejected: list[RejectedCheckpoint], began: float
) -> None:
    """Begin a branch at the restored state, and record where the run continues."""
    saved, point = restored.saved, restored.point
    context, manifest, by_load_path = manager.context, saved.manifest, bool(manager.load_path)
    engine, history, state = context.engine, context.history, context.state
    is_foreign = manifest.run != context.records.identity
    _note_differences(context, manifest, restored.differences)
    for warning in restored.warnings:
        engine.note(point.step, warning)
    manager.fork(Lineage() if is_foreign else manifest.lineage, point.step)
    manager.set_resumed(from_another_run=is_foreign)
    if is_foreign:
        engine.note(
            point.step, f"{manifest.name} is of another run ({manifest.run[:8]}): its quarantine and budgets stay there"
        )
        state.interventions.applied = 0
    elif not context.records.restarted:
        engine.note(
            point.step,
            "the journal of this run is lost: budgets start from zero, and exclusions and interventions made after this "
            "state are unknown",
        )
    elif 0 < (opened := context.records.journal_bytes[0]) < (was := saved.parts["journal_bytes"]):
        engine.note(
            point.step,
            f"the journal is {was - opened:,} bytes shorter than when {manifest.name} was saved: budgets, exclusions and "
            "interventions that were in its end are unknown",
        )
    if not saved.has_local_rng:
        engine.note(
            point.step, "this rank did not exist when the checkpoint was saved: its random streams start as set"
        )
    held = state.interventions.applied
    if by_load_path:  # A person went back: what recoveries did after this state is not repeated.
        history.rolled_back(held, ())
    engine.write(
        "resumed",
        durable=True,
        step=point.step,
        checkpoint=manifest.name,
        restored_from=restored.source,
        by_load_path=by_load_path or None,
        branch=manager.lineage.branch,
        lineage=manager.lineage,
        interventions_kept=held if by_load_path else None,
        passed_over=[_described(each) for each in rejected] or None,
        seconds=time.perf_counter() - began,
    )
    manager.quarantine_abandoned(f"the run resumed from step {point.step}")
    log.warning(
        "holdfast: resumed from %s, %s, at step %d%s",
        restored.source,
        manifest.name,
        point.step,
        f" (not usable: {_listed(rejected)})" if rejected else "",
    )
    engine.load_saved_windows(point.detectors, point.step)


def _described(rejected: RejectedCheckpoint) -> dict[str, Any]:
    place = {"in_memory": True} if rejected.in_memory else {}
    return {"name": rejected.name, "step": rejected.step, "why": rejected.why, **place}


def _listed(rejected: list[RejectedCheckpoint]) -> str:
    return "; ".join(f"{each.name}{' in memory' if each.in_memory else ''}: {each.why}" for each in rejected)
