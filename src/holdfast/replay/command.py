"""Runs the step of an incident again from its bundle, and writes what was found into the incident's folder."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from holdfast.core.base import durable
from holdfast.core.base.errors import HoldfastError, RunDirError, SetupError, describe_failure
from holdfast.core.base.masking import mask
from holdfast.core.checkpoints.bundles import ANSWER, read_verdicts_of_run
from holdfast.core.origin.report import Cause, Phase, ReplayReport
from holdfast.replay.bundle import Bundle
from holdfast.replay.entry import ReplayEntry, call_entry
from holdfast.replay.rerun import BundleStep
from holdfast.runtime.origin.analyse import analyse

SCHEMA = "holdfast.replay/1"


class ReplayAnswer(NamedTuple):
    """Holds what a replay found, and what was not as it was in training."""

    bundle: Bundle
    report: ReplayReport
    notes: list[str]
    sample_id: int | None
    """the index in the dataset of the sample that suffices"""
    written: Path | None
    """None if the folder of the incident cannot be written"""

    def to_dict(self) -> dict[str, Any]:
        """Return the answer for JSON."""
        return {
            "schema_version": SCHEMA,
            "bundle": str(self.bundle.path),
            "incident": self.bundle.incident,
            "rank": self.bundle.rank,
            "step": self.bundle.step,
            "notes": self.notes,
            "sample_id": self.sample_id,
            **self.report.to_dict(),
        }


def choose_device(name: str) -> torch.device:
    """Return the device of a replay. SetupError if it is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SetupError(f"--device {name!r} is no device of torch; write cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SetupError(f"--device {name}: torch finds no CUDA device here; use --device cpu")
    return device


def replay_incident(
    bundle: Bundle, entry: ReplayEntry | str, device: torch.device, seconds_limit: float | None
) -> ReplayAnswer:
    """Run the step again and judge it. SetupError if the user's code fails, RunDirError if the bundle does not fit."""
    called = call_entry(entry) if isinstance(entry, str) else entry
    step = BundleStep(bundle, called, device)
    try:
        report = analyse(
            step,
            observed_loss=bundle.measured("loss"),
            observed_grad_norm=bundle.measured("grad_norm"),
            failed_again=again if isinstance(again := bundle.about.get("failed_again"), bool) else None,
            differences=step.notes,
            seconds_limit=seconds_limit,
        )
    except HoldfastError:
        raise
    except Exception as error:
        raise SetupError(
            f"the step of the entry raised {describe_failure(error)}; on {device}, with the batch of the bundle"
        ) from None
    raised = {each.why_not for each in report.comparisons[:2] if each.why_not.startswith("raised ")}
    if raised and report.origin.phase == "none":
        raise SetupError(f"the step of the entry {min(raised)}; on {device}, with the batch of the bundle")
    report = _join_verdict_of_run(report, bundle.folder)
    answer = ReplayAnswer(bundle, report, step.notes, _sample_id(bundle, report), None)
    return answer._replace(written=_write(answer))


class _VerdictOfRun(msgspec.Struct):
    """Holds what the run saw when its steps ran again."""

    cause: Cause
    text: str
    phase: Phase = "none"
    fix: str = ""
    confidence: float = 0.0
    reasons: list[str] = msgspec.field(name="for", default_factory=list)
    module: str = ""
    op: str = ""
    file: str = ""
    line: int = 0
    source: str = ""


def _join_verdict_of_run(report: ReplayReport, folder: Path) -> ReplayReport:
    """Return the report with what the run saw make the state bad. A bundle has no optimizer state to repeat an update."""
    recorded = read_verdicts_of_run(folder)
    if report.verdict.cause != "bad_state" or not recorded or recorded[-1].get("cause") == "not_established":
        return report
    try:
        seen = msgspec.convert(recorded[-1], _VerdictOfRun)
    except msgspec.ValidationError:
        return report
    reasons = [*report.verdict.evidence_for, f"while training: {seen.text}", *seen.reasons]
    verdict = replace(report.verdict, evidence_for=reasons)
    if seen.cause in ("bad_state", "transient"):
        return replace(report, verdict=verdict)
    sentence = f"{report.verdict.sentence}; while training, {seen.text}"
    verdict = replace(verdict, cause=seen.cause, sentence=sentence, fix=seen.fix, confidence=seen.confidence)
    place = {name: getattr(seen, name) for name in ("phase", "module", "op", "file", "line", "source")}
    origin = replace(report.origin, **place, inputs=[], outputs=[], detail="seen when the run's steps ran again")
    return replace(report, origin=origin, verdict=verdict)


def _sample_id(bundle: Bundle, report: ReplayReport) -> int | None:
    """Return the dataset's index of the sample that suffices, if the bundle has the indices."""
    ids, parts = bundle.about.get("sample_ids"), bundle.about.get("parts")
    if report.sample is None or not isinstance(ids, list) or parts != 1:
        return None
    try:
        sample = ids[report.microbatch or 0][report.sample]
    except (IndexError, TypeError):
        return None
    return sample if isinstance(sample, int) else None


def _write(answer: ReplayAnswer) -> Path | None:
    """Write the answer beside the incident, for its post-mortem. Return None if the folder cannot be written."""
    path = answer.bundle.folder / ANSWER
    content = json.dumps({**answer.to_dict(), "time": time.time()}, indent=1, default=str)
    try:
        durable.replace_file(path, (mask(content) + "\n").encode())
    except (OSError, RunDirError):
        return None
    return path
