"""What a requeued job needs: the Slurm job it is in, the time it has left, and the checkpoint to resume from."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.base.clean import CleanRecords
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints import resume
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.manifest import MANIFEST, is_name

log = logging.getLogger("holdfast").getChild("resilience.elastic")
log.addFilter(CleanRecords())
log.setLevel(logging.INFO)  # what these functions log is the reason to call them

_STEP = re.compile(r"step_([0-9]+)")

ASK_SECONDS = 5.0
"""how long Slurm may take to answer a command: a busy controller must not use up the time that is left"""


@dataclass
class SLURMInfo:
    """Describes the Slurm job that this process is part of."""

    job_id: str
    job_name: str
    node_list: str
    num_nodes: int
    ntasks_per_node: int
    restart_count: int
    partition: str
    array_task_id: str | None
    """None if the job is not part of an array"""
    array_job_id: str | None = None

    @property
    def name_for_commands(self) -> str:
        """The job as squeue and scontrol take it. One task of each array has the array's own ID as its job_id: by that
        number those commands would mean every task."""
        if self.array_job_id is None or self.array_task_id is None:
            return self.job_id
        return f"{self.array_job_id}_{self.array_task_id}"

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has requeued the job."""
        return self.restart_count > 0


def get_slurm_info() -> SLURMInfo | None:
    """Return the job by its environment variables; None outside Slurm. A malformed number counts as not set."""
    if not is_slurm_job():
        return None
    return SLURMInfo(
        job_id=os.environ["SLURM_JOB_ID"],
        job_name=os.environ.get("SLURM_JOB_NAME", ""),
        node_list=os.environ.get("SLURM_JOB_NODELIST", ""),
        num_nodes=_read_count(1, "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        ntasks_per_node=_read_count(1, "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        restart_count=_read_count(0, "SLURM_RESTART_COUNT"),
        partition=os.environ.get("SLURM_JOB_PARTITION", ""),
        array_task_id=os.environ.get("SLURM_ARRAY_TASK_ID"),
        array_job_id=os.environ.get("SLURM_ARRAY_JOB_ID"),
    )


def is_slurm_job() -> bool:
    """Return whether this process is part of a Slurm job."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def is_slurm_requeue() -> bool:
    """Return whether Slurm has requeued the job, by SLURM_RESTART_COUNT."""
    return _read_count(0, "SLURM_RESTART_COUNT") > 0


def seconds_left() -> float | None:
    """Return the seconds until Slurm kills this job; None outside Slurm and if they cannot be learned.

    squeue knows of a limit that was changed and of a preemption, whose grace time is the end of the job. Once Slurm is
    ending the job, KillWait is left. Only if squeue does not answer, SLURM_JOB_END_TIME counts: it is the end as it was
    when the job began. May take twice ASK_SECONDS.
    """
    info = get_slurm_info()
    if info is None:
        return None
    state, _, end = _ask("squeue", "-h", "-j", info.name_for_commands, "-o", "%T %e").partition(" ")
    if state == "COMPLETING":
        wait = re.search(r"^KillWait *= *([0-9]{1,9}) sec", _ask("scontrol", "show", "config"), re.MULTILINE)
        return float(wait[1]) if wait else None
    end = end or os.environ.get("SLURM_JOB_END_TIME", "").strip()
    return max(0.0, int(end) - time.time()) if re.fullmatch(r"[0-9]{1,12}", end) else None


def _ask(*command: str) -> str:
    """Return what a command of Slurm prints, times in seconds of the epoch; "" if it cannot be run or fails."""
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_SECONDS, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("holdfast: %s cannot be asked: %s", command[0], error)
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


def _read_count(default: int, *names: str) -> int:
    """Return the number that the first of these variables with one starts with: 4 for `4(x2)`, 4 tasks on 2 nodes."""
    for name in names:
        text = os.environ.get(name, "").strip()
        if number := re.match(r"[0-9]{1,9}(?![0-9a-zA-Z.])", text):
            return int(number[0])
        if text:
            log.warning("holdfast: %s is %r, not a number: it is ignored", name, text)
    return default


def log_job_info() -> None:
    """Log the Slurm job, or that there is none."""
    info = get_slurm_info()
    if info is None:
        log.info("holdfast: Not running under SLURM")
        return
    log.info(
        "holdfast: SLURM job: id=%s, name=%s, nodes=%d, tasks/node=%d, partition=%s, restart_count=%d",
        info.job_id,
        info.job_name,
        info.num_nodes,
        info.ntasks_per_node,
        info.partition,
        info.restart_count,
    )
    if info.is_requeued:
        log.info("holdfast: the job was requeued (restart #%d)", info.restart_count)


def resolve_resume_path(checkpoint_dir: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint to resume from; None if there is none yet.

    In a run directory or checkpoints folder of Holdfast it is the newest good one, every byte verified, as for the Guard;
    RunDirError if there are checkpoints but none can be trusted. In other folders it is the target of the link `latest`;
    else the folder step_N with the highest N. Such a folder is passed over if its save did not finish: it holds shards of
    torch.distributed.checkpoint but no .metadata. An empty one is used only if all are.
    """
    base = Path(checkpoint_dir)
    if not base.is_dir():
        return None
    if (base / resume.CHECKPOINTS).is_dir():
        return resume.resolve_resume_path(base)
    if any(is_name(child.name) and os.path.lexists(child / MANIFEST) for child in base.iterdir()):
        return _resolve_holdfast(base)
    latest = base / "latest"
    if latest.is_dir():
        log.info("holdfast: resuming from %s, the target of the link %s", latest.resolve(), latest)
        return latest.resolve()
    return _highest_step(base)


def _resolve_holdfast(base: Path) -> Path | None:
    if base.resolve().name == resume.CHECKPOINTS:
        return resume.resolve_resume_path(base.resolve().parent)
    chosen, rejected = resume.choose(Folder(base), None)
    if chosen is None:
        reasons = "".join(f"\n  - {each.name}: {each.why}" for each in rejected)
        raise RunDirError(f"{base}: none of its checkpoints is usable; restore a copy of a good one{reasons}")
    log.info("holdfast: resuming from %s", chosen.path)
    return chosen.path


def _highest_step(base: Path) -> Path | None:
    best: tuple[bool, int] | None = None
    path: Path | None = None
    for child in base.iterdir():
        number = _STEP.fullmatch(child.name)
        if number is None or not child.is_dir():
            continue
        names = os.listdir(child)
        if ".metadata" not in names and any(name.endswith(".distcp") for name in names):
            log.warning(
                "holdfast: %s is passed over: it has shards but no .metadata, so its save did not finish", child
            )
            continue
        rank = bool(names), int(number[1])
        if best is None or rank > best:
            best, path = rank, child
    if path is not None:
        log.info("holdfast: resuming from %s, the highest step in %s", path, base)
    return path
