"""How a run goes on: from the checkpoint that was named, from the newest good one, or from the beginning."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from holdfast.core.base.errors import RunDirError, SetupError, UnreadableError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints import fit
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.resume import RejectedCheckpoint, is_left
from holdfast.runtime.checkpoint.serialization import Found, on_disk
from holdfast.runtime.ports.checkpoint_store import CheckpointStore, RestoredCheckpoint

if TYPE_CHECKING:
    from holdfast.runtime.checkpoint.manager import Checkpoints
    from holdfast.runtime.step.run import Run

log = logging.getLogger("holdfast")


def resume(book: Checkpoints, tier: CheckpointStore, load_path: str) -> CheckpointEntry | None:
    """Put the run where it is to go on from: what that was. None where the run begins."""
    began = time.perf_counter()
    chosen, passed = (_named(book, tier, load_path), []) if load_path else _newest(book, tier)
    if chosen is None:
        _begin(book, tier, passed)
        return None
    entry, saved = chosen
    _compare(book.run, saved)
    _go_on(book, on_disk(book.run, saved, fresh=True), saved, passed, began, explicit=bool(load_path))
    return entry


def _named(book: Checkpoints, tier: CheckpointStore, load_path: str) -> tuple[CheckpointEntry, RestoredCheckpoint]:
    """The one a person asked for: it wins over what would have been taken, and says so."""
    named = tier.find(load_path)
    would, _ = tier.choose(lambda e: _left(book.run, e)) if book.config.resume == "auto" else (None, [])
    other = "nothing" if would is None else would.name
    if would is None or would.path != named.path:
        book.run.tell(f"load_path = {named.path} is gone on from; automatic resume would have taken {other}")
    return named, tier.load(named, book.run.state.target())


def _newest(
    book: Checkpoints, tier: CheckpointStore
) -> tuple[tuple[CheckpointEntry, RestoredCheckpoint] | None, list[RejectedCheckpoint]]:
    """The newest that is good and verifies; each that does not is condemned on the way."""
    if book.config.resume == "never":
        return None, []
    spoilt: dict[str, str] = {}
    while True:
        entry, passed = tier.choose(lambda e: spoilt.get(e.name) or _left(book.run, e))
        for over in passed:
            if over.damaged and over.name in book.known and book.known[over.name].health is not Health.BAD:
                log.warning("checkpoint %s cannot be used: %s", over.name, over.why)
                book.mark(book.known[over.name], Health.BAD, over.why)
        if entry is None:
            return None, passed
        try:
            return (entry, tier.load(entry, book.run.state.target())), passed
        except RunDirError as error:
            spoilt[entry.name] = str(error)
            log.warning("checkpoint %s cannot be used: %s", entry.name, error)
            if entry.name in book.known and not isinstance(error, UnreadableError):
                book.mark(book.known[entry.name], Health.BAD, str(error))


def _left(run: Run, entry: CheckpointEntry) -> str | None:
    left = is_left(run.history.lineage, entry.branch, entry.step)
    return "it is on a branch that the run has left" if left else None


def _begin(book: Checkpoints, tier: CheckpointStore, passed: list[RejectedCheckpoint]) -> None:
    """Nothing to go on from: refused where there should have been something, on record where a person wants it so."""
    run = book.run
    if book.config.resume == "never":
        if run.records.restarted:
            run.tell('[checkpoint] resume = "never": the run begins anew, whatever its run_dir holds')
            run.engine.write("started_over", durable=True)
            run.history.interventions.clear()
    elif any(e.damage is not None or e.health in (Health.BAD, Health.GOOD) for e in tier.entries()):
        listed = "; ".join(f"{p.name}: {p.why}" for p in passed)
        raise RunDirError(
            f"no checkpoint of {run.records.place} can be gone on from ({listed}); name one with [checkpoint] load_path, or "
            'begin anew with [checkpoint] resume = "never" or another run_dir'
        )
    if book.known or run.history.branches:
        book.fork(Lineage(), 0)
        book.leave_behind("the run began anew")


def _compare(run: Run, saved: RestoredCheckpoint) -> None:
    """What is other than when it was saved: refused where it is another run, said where it matters."""
    differences = fit.compare(saved.manifest.about, run.records.about())
    why = fit.refusal(differences)
    if why is not None:
        raise SetupError(f"checkpoint {saved.manifest.name}: {why}")
    for line in fit.describe([d for d in differences if d.weight != "note"]):
        run.tell(f"going on from {saved.manifest.name}, {line}")
    for line in fit.describe([d for d in differences if d.weight == "note"]):
        run.engine.write("note", step=saved.manifest.step, message=f"going on from {saved.manifest.name}, {line}")


def _go_on(
    book: Checkpoints,
    found: Found,
    saved: RestoredCheckpoint,
    passed: list[RejectedCheckpoint],
    began: float,
    *,
    explicit: bool,
) -> None:
    run, manifest = book.run, saved.manifest
    foreign = manifest.run != run.records.identity
    found.put_back()
    run.step = found.step
    book.fork(Lineage() if foreign else manifest.lineage, found.step)
    book.foreign = foreign
    if not foreign and not run.records.restarted:
        run.tell(
            "the journal of this run is lost: its budgets begin anew, and what recoveries excluded or laid over the "
            "schedule after this state is not known"
        )
    if foreign:
        run.tell(f"{manifest.name} is of another run ({manifest.run[:8]}): its quarantine and budgets stay with it")
        run.state.interventions.applied = 0
    if not saved.has_local_rng:
        run.tell("this rank was not there when it was saved: its random streams begin where they stand")
    held = run.state.interventions.applied
    if explicit:  # a person goes back: what recoveries did after that is not to be done again
        run.history.rolled_back(held, ())
    run.engine.write(
        "resumed",
        durable=True,
        step=run.step,
        checkpoint=manifest.name,
        by_load_path=explicit or None,
        branch=book.lineage.branch,
        lineage=book.lineage,
        interventions_kept=held if explicit else None,
        passed_over=[{"name": p.name, "step": p.step, "why": p.why} for p in passed] or None,
        seconds=time.perf_counter() - began,
    )
    book.leave_behind(f"the run went on from step {found.step}")
    over = "; ".join(f"{p.name}: {p.why}" for p in passed)
    log.warning("resumed from %s: step %d%s", manifest.name, run.step, f" (passed over: {over})" if over else "")
    run.engine.load_saved_windows(found.detectors, run.step)
