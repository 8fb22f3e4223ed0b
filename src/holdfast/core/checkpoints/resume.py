"""Which checkpoint a run goes on from: the newest that is good, on the run's lineage, and verifies.

The lineage is that of the state saved last. Where the journal knows of a branch begun since, a rollback or a resume that
nothing was saved after, what was left there counts as quarantined, as the next life of the run will mark it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import MANIFEST, is_name
from holdfast.core.checkpoints.recovery_history import RecoveryHistory
from holdfast.core.checkpoints.verify import verify as verify_bytes
from holdfast.core.record import facts, journal

log = logging.getLogger("holdfast")

Check = Callable[[CheckpointEntry], str | None]
CHECKPOINTS = "checkpoints"
JOURNAL = "journal.jsonl"
_LEFT = "the journal says that the run left its branch"


class RejectedCheckpoint(NamedTuple):
    """A checkpoint that was not taken."""

    name: str
    step: int
    why: str
    damaged: bool = False
    """it is not what was saved, or cannot be trusted"""


def choose(
    folder: Folder, run: str | None, *, check: Check = verify_bytes, at_most: int | None = None
) -> tuple[CheckpointEntry | None, list[RejectedCheckpoint]]:
    """The newest checkpoint that may be restored, and each newer one with why it was passed over, newest first.

    run: the identity of the run; None takes those of any. at_most: no later step than this.
    The lineage followed is that of the state saved last: of the highest branch, and there of the highest step, among those
    that are neither damaged nor quarantined. So whoever leaves a branch must have quarantined what it leaves before it
    saves on the next one: a step number cannot tell them apart, and the lineage of a damaged manifest cannot be read.
    """
    return pick(folder.entries(), run, check, at_most)


def pick(
    entries: Sequence[CheckpointEntry], run: str | None, check: Check, at_most: int | None = None
) -> tuple[CheckpointEntry | None, list[RejectedCheckpoint]]:
    """`choose` among checkpoints already listed."""
    lineage = _followed(entries, run)
    passed: list[RejectedCheckpoint] = []
    for entry in sorted(entries, key=lambda e: (e.step, e.branch), reverse=True):
        why = _barred(entry, run, lineage, entries)
        if why is None and at_most is not None and entry.step > at_most:
            why = f"it is later than step {at_most}"
        if why is None:
            why = check(entry)
        if why is None:
            return entry, passed
        passed.append(RejectedCheckpoint(entry.name, entry.step, why))
    return None, passed


def _followed(entries: Sequence[CheckpointEntry], run: str | None) -> Lineage | None:
    """The lineage of the state that was saved last."""
    trusted = [e for e in entries if e.damage is None and e.health is not Health.QUARANTINED and _is_of(e, run)]
    last = max(trusted, key=lambda e: (e.branch, e.step), default=None)
    return last.manifest.lineage if last is not None and last.manifest is not None else None


def _is_of(entry: CheckpointEntry, run: str | None) -> bool:
    return entry.manifest is not None and (run is None or entry.manifest.run == run)


def _barred(
    entry: CheckpointEntry, run: str | None, lineage: Lineage | None, entries: Sequence[CheckpointEntry]
) -> str | None:
    """Why it may not be restored, by its small files alone."""
    manifest = entry.manifest
    if entry.damage is not None or manifest is None:
        return entry.damage or f"{MANIFEST} is missing"
    if not _is_of(entry, run):
        return f"it belongs to run {manifest.run}, not to {run}"
    if entry.health in (Health.QUARANTINED, Health.BAD):
        return f"{entry.health}: {entry.why}" if entry.why else str(entry.health)
    if lineage is None or not lineage.holds(entry.branch, entry.step):
        return "it is on a branch that the run has left"
    if entry.health is Health.GOOD:
        return None
    if not entry.handover:
        return f"{entry.health}: too few healthy steps have followed it" + (f" ({entry.why})" if entry.why else "")
    if (later := next((e for e in entries if _went_through(e, entry, run)), None)) is not None:
        return f"{entry.health}: saved at an orderly stop, but the run went on from it to {later.name}"
    return None


def _went_through(later: CheckpointEntry, entry: CheckpointEntry, run: str | None) -> bool:
    """Whether the run came to `later` from `entry`; where that cannot be read, whether it may have."""
    if later.manifest is None:
        return (later.branch, later.step) > (entry.branch, entry.step)
    saved = later.manifest
    after = (saved.branch, saved.step) > (entry.branch, entry.step)
    return after and _is_of(later, run) and saved.lineage.holds(entry.branch, entry.step)


def resolve_resume_path(
    run_dir: str | os.PathLike[str], load_path: str | os.PathLike[str] | None = None, *, verify: bool = True
) -> Path | None:
    """The checkpoint to go on from; None where the run has to begin.

    run_dir: the run's folder; the newest checkpoint in it that is good and verifies is taken. RunDirError where there are
    some and none can be trusted, with each and why, and where they are another run's: a run never begins anew over them.
    load_path: a checkpoint, or a run directory or its checkpoints folder for the newest good one in there. It wins, and
    the log says what would have been taken. A person asked for it, so it may be of another run, a candidate, or
    quarantined; RunDirError where it is bad or does not verify.
    verify: read and compare every byte. False believes the manifest.
    """
    check: Check = verify_bytes if verify else _believe
    if load_path is None:
        return _newest(Path(run_dir), check)
    path = _explicit(Path(load_path).resolve(), check)
    log.info(
        "resuming from %s, as load_path says; automatic resume would have taken %s", path, _otherwise(Path(run_dir))
    )
    return path


def _believe(entry: CheckpointEntry) -> str | None:
    return None


def _otherwise(run_dir: Path) -> str:
    try:
        path = _newest(run_dir, _believe, quiet=True)
    except RunDirError as error:
        return f"nothing: {error}"
    return str(path) if path is not None else "nothing: the run would have begun anew"


class Survey(NamedTuple):
    """The checkpoints of a run directory as a start of the run would see them, and what it would do."""

    entries: list[CheckpointEntry]
    """by step and then branch; what the journal says was left is quarantined here, whatever is on disk"""
    run: str | None
    """whose they must be; None where that is not on record, and none is of another run than the others"""
    lineage: Lineage | None
    """the branches the run has come through, by the journal and by what was saved last; None where neither says"""
    taken: CheckpointEntry | None
    passed: list[RejectedCheckpoint]
    refusal: str | None
    """why the run can neither go on nor begin"""


def survey(run_dir: Path, check: Check = verify_bytes) -> Survey:
    """See resolve_resume_path; nothing is raised for checkpoints that cannot be gone on from, and nothing is logged."""
    folder = Folder(run_dir / CHECKPOINTS)
    noted = journal_lineage(run_dir)
    entries = [_as_noted(e, noted) for e in folder.entries()]
    if not entries:
        return Survey([], None, noted, None, [], None)
    try:
        run = _identity(run_dir, entries)
    except RunDirError as error:
        return Survey(entries, None, noted, None, [], str(error))
    followed = _followed(entries, run)
    lineage = followed if noted is None or (followed is not None and followed.branch > noted.branch) else noted
    taken, passed = pick(entries, run, check)
    refusal = None
    if taken is None and any(e.damage is not None or e.health in (Health.BAD, Health.GOOD) for e in entries):
        refusal = (
            f"{folder.path}: none of {len(entries)} checkpoints can be gone on from; put a copy of a good one back, name "
            f"another with load_path, or choose another run_dir to begin anew{_listed('', passed)}"
        )
    return Survey(entries, run, lineage, taken, passed, refusal)


def journal_lineage(run_dir: Path) -> Lineage | None:
    """The branches the run has come through, by its journal; None where that does not say, or cannot be read."""
    history = RecoveryHistory()
    try:
        history.rebuild(journal.read(run_dir / JOURNAL).events)
    except OSError:
        return None
    return history.lineage


def is_left(lineage: Lineage | None, branch: int, step: int) -> bool:
    """Whether the run had left that state when it came to this lineage.

    Branches are numbered as they begin: one with a higher number than any here began later, and is not judged by it.
    """
    return lineage is not None and branch <= lineage.branch and not lineage.holds(branch, step)


def _as_noted(entry: CheckpointEntry, noted: Lineage | None) -> CheckpointEntry:
    trusted = entry.damage is None and entry.health in (Health.GOOD, Health.CANDIDATE)
    if trusted and is_left(noted, entry.branch, entry.step):
        return entry._replace(health=Health.QUARANTINED, why=_LEFT, handover=False)
    return entry


def _newest(run_dir: Path, check: Check, *, quiet: bool = False) -> Path | None:
    """The newest good one of a run directory; None where there is none yet."""
    found = survey(run_dir, check)
    if found.refusal is not None:
        raise RunDirError(found.refusal)
    if found.taken is not None:
        if not quiet:
            log.info("resuming from %s%s", found.taken.path, _listed("; passed over", found.passed))
        return found.taken.path
    if found.entries and not quiet:
        place = run_dir / CHECKPOINTS
        log.warning("%s has no checkpoint to go on from: the run begins%s", place, _listed("", found.passed))
    return None


def _listed(head: str, passed: Sequence[RejectedCheckpoint]) -> str:
    return (head + "".join(f"\n  - {p.name}: {p.why}" for p in passed)) if passed else ""


def _identity(run_dir: Path, entries: Sequence[CheckpointEntry]) -> str | None:
    """Whose checkpoints to take: as run.json says; where it does not say, those of the one run there is."""
    about = facts.read_run_json(run_dir / "run.json") or {}
    run = about.get("run")
    found = sorted({e.manifest.run for e in entries if e.manifest is not None and e.damage is None})
    if isinstance(run, str) and run:
        if found and run not in found:
            raise RunDirError(
                f"{run_dir} is run {run}, and the checkpoints in it are another run's ({', '.join(found)}); put the "
                f"run.json that belongs to them back, pass one as load_path to begin from it, or choose another run_dir"
            )
        return run
    if len(found) > 1:
        raise RunDirError(
            f"{run_dir} has checkpoints of {len(found)} runs ({', '.join(found)}) and no run.json that says which it is; "
            f"pass one as load_path, or put the run.json back"
        )
    return None


def _explicit(path: Path, check: Check) -> Path:
    """The checkpoint that load_path names, or the newest good one of the run it names."""
    if not os.path.isdir(path):
        raise RunDirError(
            f"load_path {path}: no such folder; name a checkpoint, such as RUN/{CHECKPOINTS}/step_00001000"
        )
    if is_name(path.name) or os.path.lexists(path / MANIFEST):
        return _one(path, check)
    inside = os.path.isdir(path / CHECKPOINTS)
    if not inside and path.name != CHECKPOINTS:
        raise RunDirError(
            f"load_path {path} is neither a checkpoint nor a run directory: it has no {MANIFEST} and no {CHECKPOINTS}; "
            f"name one, such as RUN/{CHECKPOINTS}/step_00001000"
        )
    newest = _newest(path if inside else path.parent, check, quiet=True)
    if newest is None:
        raise RunDirError(
            f"load_path {path} has no checkpoint that is good; name the one to take, a candidate if need be"
        )
    return newest


def _one(path: Path, check: Check) -> Path:
    if not is_name(path.name):
        raise RunDirError(f"load_path {path} is not the name of a checkpoint; give it the name in its {MANIFEST} back")
    entry = read_entry(path)
    why = "there is no such folder" if entry is None else entry.damage
    if why is None and entry is not None:
        why = f"{entry.health}: {entry.why}" if entry.health is Health.BAD else check(entry)
        if why is None and entry.health is not Health.GOOD:
            log.warning(
                "%s is %s (%s), and is taken as load_path says so", path, entry.health, entry.why or "no reason"
            )
    if why is not None:
        raise RunDirError(f"load_path {path} cannot be gone on from: {why}; name another, or put a whole copy back")
    return path
