"""The choice of the checkpoint to resume from: the newest that is good, on the lineage of the run, and verifies.

The lineage is that of the state saved last. The journal may have a newer branch, after a
rollback or resume without a save. Then abandoned states count as quarantined, as the next process will mark them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.lost import lost_checkpoints, usable_by_journal
from holdfast.core.checkpoints.manifest import MANIFEST, is_name
from holdfast.core.checkpoints.recovery_history import RecoveryHistory
from holdfast.core.checkpoints.verify import verify as verify_bytes
from holdfast.core.record import facts, journal

log = logging.getLogger("holdfast")

Check = Callable[[CheckpointEntry], str | None]
CHECKPOINTS = "checkpoints"
JOURNAL = "journal.jsonl"
_ABANDONED = "the journal says that the run left its branch"
_GONE = "its folder is gone, but the journal has it as usable"


class RejectedCheckpoint(NamedTuple):
    """A checkpoint that was not chosen, and why."""

    name: str
    step: int
    why: str
    damaged: bool = False
    """it differs from what was saved, or cannot be trusted"""
    in_memory: bool = False
    """it is in the memory tier"""


def choose(folder: Folder, run: str | None) -> tuple[CheckpointEntry | None, list[RejectedCheckpoint]]:
    """Return the newest checkpoint that may be restored, and each rejected newer one, newest first.

    run: the identity of the run; None accepts any.
    The lineage is that of the state saved last: of the highest branch, and on it the highest step, among checkpoints that
    are neither damaged nor quarantined. So a run that leaves a branch must quarantine its states there before it saves
    on the next one: step numbers do not tell them apart, and the lineage of a damaged manifest cannot be read.
    """
    return pick(folder.entries(), run, verify_bytes)


def pick(
    entries: Sequence[CheckpointEntry], run: str | None, check: Check
) -> tuple[CheckpointEntry | None, list[RejectedCheckpoint]]:
    """Choose among listed checkpoints; see `choose`. Of two with the same name, the first listed is tried first."""
    lineage = _last_lineage(entries, run)
    rejected: list[RejectedCheckpoint] = []
    for entry in sorted(entries, key=lambda e: (e.step, e.branch), reverse=True):
        why = _why_not(entry, run, lineage, entries)
        if why is None:
            why = check(entry)
        if why is None:
            return entry, rejected
        rejected.append(RejectedCheckpoint(entry.name, entry.step, why, in_memory=entry.in_memory))
    return None, rejected


def _last_lineage(entries: Sequence[CheckpointEntry], run: str | None) -> Lineage | None:
    """Return the lineage of the state that was saved last."""
    trusted = [e for e in entries if e.damage is None and e.health is not Health.QUARANTINED and _belongs_to(e, run)]
    last = max(trusted, key=lambda e: (e.branch, e.step), default=None)
    return last.manifest.lineage if last is not None and last.manifest is not None else None


def _belongs_to(entry: CheckpointEntry, run: str | None) -> bool:
    return entry.manifest is not None and (run is None or entry.manifest.run == run)


def _why_not(
    entry: CheckpointEntry, run: str | None, lineage: Lineage | None, entries: Sequence[CheckpointEntry]
) -> str | None:
    """Return why a checkpoint may not be restored, judging by its small files alone."""
    manifest = entry.manifest
    if entry.damage is not None or manifest is None:
        return entry.damage or f"{MANIFEST} is missing"
    if not _belongs_to(entry, run):
        return f"it belongs to run {manifest.run}, not to {run}"
    if entry.health in (Health.QUARANTINED, Health.BAD):
        return f"{entry.health}: {entry.why}" if entry.why else str(entry.health)
    if lineage is None or not lineage.holds(entry.branch, entry.step):
        return "it is on a branch that the run has abandoned"
    if entry.health is Health.GOOD:
        return None
    if not entry.handover:
        return f"{entry.health}: too few healthy steps have followed it" + (f" ({entry.why})" if entry.why else "")
    if (later := next((e for e in entries if _descends_from(e, entry, run)), None)) is not None:
        return f"{entry.health}: saved at an orderly stop, but the run continued from it to {later.name}"
    return None


def _descends_from(later: CheckpointEntry, entry: CheckpointEntry, run: str | None) -> bool:
    """Return whether `later` descends from `entry`; if that cannot be read, whether it may."""
    if later.manifest is None:
        return (later.branch, later.step) > (entry.branch, entry.step)
    saved = later.manifest
    after = (saved.branch, saved.step) > (entry.branch, entry.step)
    return after and _belongs_to(later, run) and saved.lineage.holds(entry.branch, entry.step)


def resolve_resume_path(
    run_dir: str | os.PathLike[str], load_path: str | os.PathLike[str] | None = None, *, verify: bool = True
) -> Path | None:
    """Return the checkpoint to resume from; None if the run has to start from the beginning.

    run_dir: the run directory; its newest checkpoint that is good and verifies is chosen. Raises RunDirError if there are
    checkpoints but none can be trusted, with the reason for each, or if they belong to another run: a run never starts
    over on top of them.
    load_path: a checkpoint; or a run directory or checkpoints folder, for its newest good one. It takes precedence, and
    the log tells what run_dir would have given. It may belong to another run, be a candidate, or be quarantined; raises
    RunDirError if it is bad or does not verify.
    verify: read and compare every byte. False trusts the manifest.
    """
    check: Check = verify_bytes if verify else _trust
    if load_path is None:
        return _newest(Path(run_dir), check)
    path = _explicit(Path(load_path).resolve(), check)
    automatic = _automatic(Path(run_dir))
    log.info("holdfast: resuming from %s, as given by load_path; automatic resume would use %s", path, automatic)
    return path


def _trust(entry: CheckpointEntry) -> str | None:
    return None


def _automatic(run_dir: Path) -> str:
    try:
        path = _newest(run_dir, _trust, quiet=True)
    except RunDirError as error:
        return f"nothing: {error}"
    return str(path) if path is not None else "nothing: the run would start from the beginning"


class Survey(NamedTuple):
    """The checkpoints of a run directory as a starting process sees them, and what it would do."""

    entries: list[CheckpointEntry]
    """by step and branch; those that the journal has as abandoned are quarantined here, whatever is on disk"""
    run: str | None
    """the identity of the run; None if it is not recorded and all checkpoints belong to one run"""
    lineage: Lineage | None
    """the branches of the run, by the journal and the last save; None if neither has them"""
    chosen: CheckpointEntry | None
    rejected: list[RejectedCheckpoint]
    refusal: str | None
    """why the run can neither resume nor start"""


def survey(run_dir: Path, check: Check = verify_bytes) -> Survey:
    """Choose as resolve_resume_path does, but report unusable checkpoints in the result and log nothing."""
    folder = Folder(run_dir / CHECKPOINTS)
    events = _journal_events(run_dir)
    journaled, usable = _lineage_of(events), usable_by_journal(events)
    entries = [_with_journal(e, journaled) for e in folder.entries()]
    if not entries:
        return Survey([], None, journaled, None, list_gone(usable, [], None), None)
    try:
        run = _identity(run_dir, entries)
    except RunDirError as error:
        return Survey(entries, None, journaled, None, [], str(error))
    saved = _last_lineage(entries, run)
    lineage = saved if journaled is None or (saved is not None and saved.branch > journaled.branch) else journaled
    chosen, rejected = pick(entries, run, check)
    rejected = [*list_gone(usable, entries, chosen), *rejected]
    refusal = None
    if chosen is None and any(e.damage is not None or e.health in (Health.BAD, Health.GOOD) for e in entries):
        refusal = (
            f"{folder.path}: none of {len(entries)} checkpoints is usable; restore a copy of a good one, name another with "
            f"load_path, or choose another run_dir to start over{_listed('', rejected)}"
        )
    return Survey(entries, run, lineage, chosen, rejected, refusal)


def list_gone(
    usable: Mapping[str, int], entries: Sequence[CheckpointEntry], chosen: CheckpointEntry | None
) -> list[RejectedCheckpoint]:
    """Return the checkpoints newer than the chosen one that the journal has as usable and the disk has not."""
    lost = lost_checkpoints(usable, {entry.name for entry in entries}, -1 if chosen is None else chosen.step)
    return [RejectedCheckpoint(name, step, _GONE) for name, step in lost]


def _journal_events(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return journal.read(run_dir / JOURNAL).events
    except OSError:
        return []


def _lineage_of(events: Sequence[dict[str, Any]]) -> Lineage | None:
    """Return the branches of the run by its journal; None if it has none."""
    history = RecoveryHistory()
    history.rebuild(events)
    return history.lineage


def is_left(lineage: Lineage | None, branch: int, step: int) -> bool:
    """Return whether the run had abandoned a state when it reached this lineage.

    Branches are numbered in order: a branch with a higher number began later, and this lineage tells nothing about it.
    """
    return lineage is not None and branch <= lineage.branch and not lineage.holds(branch, step)


def _with_journal(entry: CheckpointEntry, journaled: Lineage | None) -> CheckpointEntry:
    trusted = entry.damage is None and entry.health in (Health.GOOD, Health.CANDIDATE)
    if trusted and is_left(journaled, entry.branch, entry.step):
        return entry._replace(health=Health.QUARANTINED, why=_ABANDONED, handover=False)
    return entry


def _newest(run_dir: Path, check: Check, *, quiet: bool = False) -> Path | None:
    """Return the newest good checkpoint of a run directory; None if there is none yet."""
    result = survey(run_dir, check)
    if result.refusal is not None:
        raise RunDirError(result.refusal)
    if result.chosen is not None:
        if not quiet:
            log.info("holdfast: resuming from %s%s", result.chosen.path, _listed("; passed over", result.rejected))
        return result.chosen.path
    if result.rejected and not quiet:
        where, rejected = run_dir / CHECKPOINTS, _listed("", result.rejected)
        log.warning("holdfast: %s has no usable checkpoint: the run starts from the beginning%s", where, rejected)
    return None


def _listed(head: str, rejected: Sequence[RejectedCheckpoint]) -> str:
    return (head + "".join(f"\n  - {r.name}: {r.why}" for r in rejected)) if rejected else ""


def _identity(run_dir: Path, entries: Sequence[CheckpointEntry]) -> str | None:
    """Return the identity of the run, by run.json; None if that has none and all checkpoints belong to one run."""
    about = facts.read_run_json(run_dir / "run.json") or {}
    run = about.get("run")
    runs = sorted({e.manifest.run for e in entries if e.manifest is not None and e.damage is None})
    if isinstance(run, str) and run:
        if runs and run not in runs:
            raise RunDirError(
                f"{run_dir} is run {run}, but the checkpoints in it belong to another run ({', '.join(runs)}); restore "
                f"their run.json, pass one as load_path to start from it, or choose another run_dir"
            )
        return run
    if len(runs) > 1:
        raise RunDirError(
            f"{run_dir} has checkpoints of {len(runs)} runs ({', '.join(runs)}) and no run.json that tells which it is; "
            f"pass one as load_path, or restore the run.json"
        )
    return None


def _explicit(path: Path, check: Check) -> Path:
    """Return the checkpoint at load_path, or the newest good one of the run directory at load_path."""
    if not os.path.isdir(path):
        raise RunDirError(
            f"load_path {path}: no such folder; name a checkpoint, such as RUN/{CHECKPOINTS}/step_00001000"
        )
    if is_name(path.name) or os.path.lexists(path / MANIFEST):
        return _check_one(path, check)
    inside = os.path.isdir(path / CHECKPOINTS)
    if not inside and path.name != CHECKPOINTS:
        raise RunDirError(
            f"load_path {path} is neither a checkpoint nor a run directory: it has no {MANIFEST} and no {CHECKPOINTS}; "
            f"name one, such as RUN/{CHECKPOINTS}/step_00001000"
        )
    newest = _newest(path if inside else path.parent, check, quiet=True)
    if newest is None:
        raise RunDirError(f"load_path {path} has no good checkpoint; name the one to use, a candidate if need be")
    return newest


def _check_one(path: Path, check: Check) -> Path:
    if not is_name(path.name):
        raise RunDirError(f"load_path {path} is not the name of a checkpoint; rename it to the name in its {MANIFEST}")
    entry = read_entry(path)
    why = "there is no such folder" if entry is None else entry.damage
    if why is None and entry is not None:
        why = f"{entry.health}: {entry.why}" if entry.health is Health.BAD else check(entry)
        if why is None and entry.health is not Health.GOOD:
            health = f"{entry.health} ({entry.why or 'no reason'})"
            log.warning("holdfast: %s is %s, but is used because load_path names it", path, health)
    if why is not None:
        raise RunDirError(f"load_path {path} cannot be used: {why}; name another, or restore a complete copy")
    return path
