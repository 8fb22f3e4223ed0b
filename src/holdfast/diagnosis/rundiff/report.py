"""What a comparison says, in the form `holdfast diff --json` prints it. docs/diff.md describes every field."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA = "holdfast.diff/1"


class Run(msgspec.Struct, kw_only=True):
    """One of the two."""

    path: str
    format: str
    points: int
    steps: float | None
    tokens: float | None
    status: str | None
    limits: list[str]


class Setting(msgspec.Struct, kw_only=True):
    """A setting that is not the same in both. None: not set there."""

    key: str
    a: Any
    b: Any
    check: str


class Suspect(msgspec.Struct, kw_only=True):
    """A difference, with how likely it is the reason for a worse evaluation."""

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


class Curve(msgspec.Struct, kw_only=True):
    """One signal of both runs, at equal tokens, samples or steps."""

    signal: str
    points: int
    a_end: float
    b_end: float
    gap: float
    """of the ends, B less A, as a share of A"""
    noise: float
    """of one step, as a share of A's level: median absolute deviation, as a standard deviation"""
    parted: bool
    parts_at_step: float | None
    """of A: from where on the gap stays beyond what noise explains"""
    parts_at_tokens: float | None
    identical_steps: int
    """steps at the beginning that are equal to the last bit"""


class Evaluation(msgspec.Struct, kw_only=True):
    """One metric, as last measured in each."""

    metric: str
    a: float | None
    b: float | None
    a_step: int | None
    b_step: int | None
    better: Literal["lower", "higher"]
    worse: Literal["a", "b"] | None
    change: float | None
    """B less A, as a share of A"""


class NotCompared(msgspec.Struct, kw_only=True):
    """What could not be looked at, which is not the same as equal."""

    check: str
    name: str
    why: str


class Verdict(msgspec.Struct, kw_only=True):
    """The answer in a few sentences."""

    text: str
    suspect: str | None
    worse: Literal["a", "b"] | None
    identical: bool


class Report(msgspec.Struct, kw_only=True):
    """All of it."""

    schema: str = SCHEMA
    a: Run
    b: Run
    verdict: Verdict
    suspects: list[Suspect]
    axis: Literal["tokens", "samples", "steps"]
    axis_note: str | None
    curves: list[Curve]
    evals: list[Evaluation]
    settings: list[Setting]
    same: list[str]
    not_compared: list[NotCompared]
    next: str
