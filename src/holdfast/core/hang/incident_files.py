"""The files of a hang: `hang/SESSION-01/` in the run directory.

    rank_00000.json    what the sidecar of its node found out about a rank: phase, stacks, flight record
    verdict.json       who hangs, where and since when
    verdict.txt        the same, to read

Every node writes the files of its own ranks. The first node that finds the hang makes the folder; the others join.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.base import durable
from holdfast.core.base.clean import clean_lines
from holdfast.core.base.masking import mask
from holdfast.core.hang.verdict import HangVerdict, RankReport, render, to_report

FOLDER = "hang"
VERDICT = "verdict.json"
_RANK = re.compile(r"rank_(\d{5,7})\.json")
_NAME = re.compile(r"[0-9a-f]{1,32}-\d{2,9}")
_MAX_BYTES = 300 << 20


def incident_path(run_dir: Path, session: str, number: int) -> Path:
    return run_dir / FOLDER / f"{session}-{number:02d}"


def make(path: Path) -> bool:
    """Make the folder of an incident. Return False if another node has made it."""
    durable.make_folder_inside(path.parent.parent, path.parent)
    try:
        durable.make_new_folder(path)
    except FileExistsError:
        durable.refuse_links(path.parent.parent, path)
        return False
    return True


def write_report(path: Path, report: RankReport) -> None:
    _write(path / f"rank_{report.rank:05d}.json", report)


def write_verdict(path: Path, verdict: HangVerdict, **more: Any) -> None:
    _write(path / VERDICT, {**msgspec.to_builtins(verdict), **more})
    durable.replace_file(path / "verdict.txt", (mask(clean_lines(render(verdict))) + "\n").encode())


def _write(path: Path, content: Any) -> None:
    text = json.dumps(msgspec.to_builtins(content), default=str)
    durable.replace_file(path, (mask(text) + "\n").encode("utf-8", "replace"))


def read_reports(path: Path) -> list[RankReport]:
    """Return the reports of an incident that can be read, by rank."""
    reports: list[RankReport] = []
    for name in sorted(os.listdir(path)):
        if _RANK.fullmatch(name):
            try:
                reports.append(to_report(json.loads(durable.read_file(path / name, _MAX_BYTES))))
            except Exception:  # damaged, or still being written on a file system without atomic renames
                continue
    return reports


def read_verdict(path: Path) -> dict[str, Any] | None:
    """Return what verdict.json holds; None if there is none that can be read."""
    try:
        content = json.loads(durable.read_file(path / VERDICT, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def list_incidents(run_dir: Path) -> list[Path]:
    """Return the folders of the hangs of a run, the oldest first."""
    folder = run_dir / FOLDER
    try:
        durable.refuse_links(run_dir, folder)
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
        return sorted((folder / name for name in names), key=lambda path: os.lstat(path).st_mtime)
    except OSError:
        return []
