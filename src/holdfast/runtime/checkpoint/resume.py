"""Resume a run: from the checkpoint a person named, from the newest good one, or from the beginning."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from holdfast.core.base.errors import RunDirError, SetupError, UnreadableError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints import fit
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.resume import RejectedCheckpoint, is_left, list_gone
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


def resume(manager: CheckpointManager, snapshots: SnapshotManager, source: BatchSource) -> ResumedRun:
    """Restore the checkpoint that the run resumes from, if there is one. Nothing may have been trained before."""
    if manager.store is None:
        return ResumedRun(0, True)
    began = time.perf_counter()
    rejected: list[RejectedCheckpoint] = []
    if manager.load_path:
        loaded: tuple[CheckpointEntry, RestoredCheckpoint] | None = _load_named(manager, manager.store)
    else:
        loaded, rejected = _load_newest(manager, manager.store)
    if loaded is None:
        _start_over(manager, manager.store, rejected)
        return ResumedRun(0, True)
    entry, saved = loaded
    context = manager.context
    _compare_with_run(context, saved)
    point = restore_point_on_disk(context, snapshots, source, saved, is_resume=True)
    _restore(manager, point, saved, rejected, began)
    return ResumedRun(point.step, entry.health is Health.GOOD)


def _load_named(manager: CheckpointManager, store: CheckpointStore) -> tuple[CheckpointEntry, RestoredCheckpoint]:
    """Load the checkpoint a person named. It wins over the automatic choice, with a note."""
    context, named = manager.context, store.find(manager.load_path)
    automatic = None
    if manager.config.resume == "auto":
        automatic, _ = store.choose(lambda entry: _why_abandoned(context, entry))
    if automatic is None or automatic.path != named.path:
        other = "nothing" if automatic is None else automatic.name
        context.engine.note(0, f"resuming from load_path = {named.path}; automatic resume would have chosen {other}")
    return named, store.load(named, context.state.target())


def _load_newest(
    manager: CheckpointManager, store: CheckpointStore
) -> tuple[tuple[CheckpointEntry, RestoredCheckpoint] | None, list[RejectedCheckpoint]]:
    """Load the newest good checkpoint that verifies. Those that do not are marked bad on the way."""
    if manager.config.resume == "never":
        return None, []
    unusable: dict[str, str] = {}
    context = manager.context
    while True:
        entry, rejected = store.choose(lambda e: unusable.get(e.name) or _why_abandoned(context, e))
        for each in rejected:
            record = manager.records.get(each.name)
            if each.damaged and record is not None and record.health is not Health.BAD:
                log.warning("holdfast: checkpoint %s cannot be used: %s", each.name, each.why)
                manager.mark(record, Health.BAD, each.why)
        rejected = [*list_gone(context.records.usable_checkpoints, store.entries(), entry), *rejected]
        if entry is None:
            return None, rejected
        try:
            return (entry, store.load(entry, context.state.target())), rejected
        except RunDirError as error:
            unusable[entry.name] = str(error)
            log.warning("holdfast: checkpoint %s cannot be used: %s", entry.name, error)
            if entry.name in manager.records and not isinstance(error, UnreadableError):
                manager.mark(manager.records[entry.name], Health.BAD, str(error))


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
    if manager.records or context.history.branches:
        manager.fork(Lineage(), 0)
        manager.quarantine_abandoned("the run started over")


def _compare_with_run(context: Context, saved: RestoredCheckpoint) -> None:
    """Compare what the checkpoint says of its run with this one. SetupError if it is another model or data."""
    name, step = saved.manifest.name, saved.manifest.step
    differences = fit.compare(saved.manifest.about, context.records.about())
    why = fit.refusal(differences)
    if why is not None:
        raise SetupError(f"checkpoint {name}: {why}")
    for line in fit.describe([d for d in differences if d.weight != "note"]):
        context.engine.note(0, f"resuming from {name}: {line}")
    for line in fit.describe([d for d in differences if d.weight == "note"]):
        context.engine.write("note", step=step, message=f"resuming from {name}: {line}")


def _restore(
    manager: CheckpointManager,
    point: RestorePoint,
    saved: RestoredCheckpoint,
    rejected: list[RejectedCheckpoint],
    began: float,
) -> None:
    context, manifest, by_load_path = manager.context, saved.manifest, bool(manager.load_path)
    engine, history, state = context.engine, context.history, context.state
    is_foreign = manifest.run != context.records.identity
    for warning in point.restore():
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
    elif 0 < (opened := context.records.journal_bytes[0]) < (was := int(saved.parts.get("journal_bytes", 0))):
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
        by_load_path=by_load_path or None,
        branch=manager.lineage.branch,
        lineage=manager.lineage,
        interventions_kept=held if by_load_path else None,
        passed_over=[{"name": each.name, "step": each.step, "why": each.why} for each in rejected] or None,
        seconds=time.perf_counter() - began,
    )
    manager.quarantine_abandoned(f"the run resumed from step {point.step}")
    log.warning(
        "holdfast: resumed from %s at step %d%s",
        manifest.name,
        point.step,
        f" (not usable: {_listed(rejected)})" if rejected else "",
    )
    engine.load_saved_windows(point.detectors, point.step)


def _listed(rejected: list[RejectedCheckpoint]) -> str:
    return "; ".join(f"{each.name}: {each.why}" for each in rejected)
