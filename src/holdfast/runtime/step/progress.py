"""Hold how far a run has come. Only the pipeline writes it; everyone else reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.runtime.data.source import Position
from holdfast.runtime.effects.attempt import StepAttempt


@dataclass(slots=True)
class Progress:
    """Counts committed steps and names the attempts in flight."""

    step: int = 0
    """committed steps"""
    attempt: int = 1
    """the number of the next try of the next step, counted from 1"""
    pending: StepAttempt | None = None
    """submitted, not settled"""
    served: StepAttempt | None = None
    """the attempt drawn last"""
    positions: dict[int, Position] = field(default_factory=dict)
    """data position at which each committed step began, as far back as a rollback may reach"""
    stopping: str | None = None
    """why the run was asked to stop"""
    is_shutdown: bool = False
    """a signal asked for it: the process is to end"""
    exhausted: bool = False
    """the data has ended"""
