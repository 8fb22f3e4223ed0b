"""Where the bundle of an incident is: RUN/incidents/0001/bundle/rank_00000/step_00000012.

The innermost folder has the format of a checkpoint: the same manifest, the same checksums, the same files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.manifest import MANIFEST, is_name
from holdfast.core.checkpoints.verify import verify
from holdfast.core.record.rundir import suggest_run

BUNDLE, INCIDENTS, INCIDENT, ANSWER = "bundle", "incidents", "incident.json", "replay.json"
KIND = "incident bundle"
"""`kind` in the manifest of every bundle"""
_MAX_BYTES = 64 << 20
_NUMBER = re.compile(r"\d{4,9}")
_RANK = re.compile(r"rank_\d{5,7}")


def bundle_folder(run_dir: Path, incident: int, rank: int) -> Path:
    return run_dir / INCIDENTS / f"{incident:04d}" / BUNDLE / f"rank_{rank:05d}"


def incident_folder(bundle: Path) -> Path:
    """Return the folder of a bundle's incident; of a bundle that was moved, the folder it is in."""
    folder = bundle.parent
    return folder.parent.parent if folder.parent.name == BUNDLE else folder


def read_answer(run_dir: Path, incident: int) -> dict[str, Any] | None:
    """Return what `holdfast replay` wrote about an incident, with the fields of a journal event; None if nothing."""
    folder = run_dir / INCIDENTS / f"{incident:04d}"
    try:
        durable.refuse_links(run_dir, folder)
        content = json.loads(durable.read_file(folder / ANSWER, _MAX_BYTES))
        verdict, origin = content["verdict"], content["origin"]
        places = {key: origin.get(key) for key in ("phase", "module", "op", "file", "line")}
        reasons = {"for": list(verdict["evidence_for"]), "against": list(verdict["evidence_against"])}
        return {
            "cause": str(verdict["cause"]),
            "text": str(verdict["sentence"]),
            "fix": verdict["fix"],
            **reasons,
            **places,
        }
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def read_verdicts_of_run(folder: Path) -> list[dict[str, Any]]:
    """Return the verdicts that the run itself gave in an incident, in order; none if its file cannot be read."""
    try:
        content = json.loads(durable.read_file(folder / INCIDENT, _MAX_BYTES))
        events = [each["replay"] for each in content["events"] if isinstance(each, dict) and "replay" in each]
        return [each for each in events if isinstance(each, dict) and each.get("result") == "verdict"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, RunDirError):
        return []


def prune(run_dir: Path, rank: int, keep: int) -> None:
    """Remove the bundles of this rank, except those of the `keep` newest incidents. What cannot be removed stays."""
    incidents = [name for name in _names(run_dir / INCIDENTS) if _NUMBER.fullmatch(name)]
    held = [p for name in incidents if (p := bundle_folder(run_dir, int(name), rank)).is_dir()]
    for folder in sorted(held)[:-keep]:
        with contextlib.suppress(OSError):
            durable.refuse_links(run_dir, folder)
            durable.remove_tree(folder)


def find_bundle(path: Path, rank: int | None = None) -> CheckpointEntry:
    """Return the bundle in a run directory (of its newest incident), an incident folder, or a bundle's own folder.

    Raises RunDirError if there is none, or if its small files are damaged.
    """
    shown = clean(str(path))
    if not path.exists():
        raise RunDirError(f"{shown}: no such folder; name a run directory, one of its incidents, or a bundle")
    found = _candidates(path.absolute(), rank)
    if not found:
        present = _ranks(path.absolute())
        if rank is not None and present:
            ranks = ", ".join(map(str, present))
            raise RunDirError(f"{shown} holds no bundle of rank {rank}; it has bundles of ranks: {ranks}")
        cure = (
            "a run writes one for a numerical incident, unless [replay] when is "
            '"off" or max_bundle_mb is 0, and removes those of older incidents ([replay] keep)'
        )
        raise RunDirError(f"{shown} holds no bundle: {suggest_run(path, cure)}")
    entry = read_entry(found[-1])
    if entry is None:
        raise RunDirError(f"{clean(str(found[-1]))} is not a folder; name the folder of a bundle")
    if (damage := verify(entry, contents=False)) is not None:
        raise RunDirError(f"the bundle {clean(str(entry.path))} is damaged: {damage}; copy it again from the run")
    assert entry.manifest is not None, "verify has read it"
    if entry.manifest.about.get("kind") != KIND:
        raise RunDirError(f"{shown} is a checkpoint, not a bundle; name a run directory or one of its incidents")
    return entry


def _candidates(path: Path, rank: int | None) -> list[Path]:
    """Return the folders that may be bundles, the newest incident last; of one incident, the lowest rank."""
    if is_name(path.name) or os.path.lexists(path / MANIFEST):
        return [path]
    for folder in _bundle_folders(path):
        ranks = [name for name in _names(folder) if _RANK.fullmatch(name)]
        chosen = [name for name in ranks if rank is None or int(name[5:]) == rank]
        steps = [folder / name / step for name in chosen[:1] for step in _names(folder / name) if is_name(step)]
        if steps:
            return steps
    return [path / name for name in _names(path) if is_name(name)]


def _ranks(path: Path) -> list[int]:
    """Return the ranks that have a bundle."""
    return sorted({int(n[5:]) for folder in _bundle_folders(path) for n in _names(folder) if _RANK.fullmatch(n)})


def _bundle_folders(path: Path) -> list[Path]:
    incidents = path / INCIDENTS if (path / INCIDENTS).is_dir() else path
    numbers = sorted((n for n in _names(incidents) if _NUMBER.fullmatch(n)), key=int, reverse=True)
    return [path, path / BUNDLE, *(incidents / number / BUNDLE for number in numbers)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(durable.retry_interrupted(os.listdir, folder))
    except OSError:
        return []
