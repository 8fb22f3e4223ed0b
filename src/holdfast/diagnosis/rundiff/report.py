"""The result of a comparison, as `holdfast diff --json` prints it. docs/diff.md describes every field."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA = "holdfast.diff/1"


class RunSummary(msgspec.Struct, kw_only=True):
    """Holds one of the two runs."""

    path: str
    format: str
    points: int
    steps: float | None
    tokens: float | None
    status: str | None
    limits: list[str]


class SettingDifference(msgspec.Struct, kw_only=True):
    """Holds a setting that differs. None means not set."""

    key: str
    a: Any
    b: Any
    check: str


class Suspect(msgspec.Struct, kw_only=True):
    """Holds a difference, with a score for how likely it causes a worse evaluation."""

    check: str
    name: str
    score: float
    weight: float
    severity: float
    a: str
    b: str
    reason: str
    against: list[str]
    explains: str
    confirm: str


class CurveComparison(msgspec.Struct, kw_only=True):
    """Holds one signal of both runs, compared at equal tokens, samples or steps."""

    signal: str
    points: int
    a_end: float
    b_end: float
    gap: float
    """of the ends: B minus A, relative to A"""
    noise: float
    """standard deviation of one step, relative to the level of A, from the median absolute deviation"""
    parted: bool
    parts_at_step: float | None
    """step of A from which on the gap exceeds the noise"""
    parts_at_tokens: float | None
    identical_steps: int
    """number of first steps that are bit-identical"""


class EvalComparison(msgspec.Struct, kw_only=True):
    """Holds one metric of both runs."""

    metric: str
    a: float | None
    b: float | None
    a_step: int | None
    b_step: int | None
    better: Literal["lower", "higher"]
    worse: Literal["a", "b"] | None
    change: float | None
    """B minus A, relative to A"""


class NotCompared(msgspec.Struct, kw_only=True):
    """Holds a check that could not be made. The runs may or may not be equal in it."""

    check: str
    name: str
    why: str


class DiffVerdict(msgspec.Struct, kw_only=True):
    """Holds the answer in a few sentences."""

    text: str
    suspect: str | None
    worse: Literal["a", "b"] | None
    identical: bool


class DiffReport(msgspec.Struct, kw_only=True):
    """Holds the whole comparison."""

    schema: str = SCHEMA
    a: RunSummary
    b: RunSummary
    verdict: DiffVerdict
    suspects: list[Suspect]
    axis: Literal["tokens", "samples", "steps"]
    axis_note: str | None
    curves: list[CurveComparison]
    evals: list[EvalComparison]
    settings: list[SettingDifference]
    same: list[str]
    not_compared: list[NotCompared]
    next: str
