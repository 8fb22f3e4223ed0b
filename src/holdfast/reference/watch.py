"""The trainer's own hook: when it evaluates, how fast it is, what a person is shown, and what a run came to."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from holdfast.compose import Guard
from holdfast.core.base.types import Outcome
from holdfast.core.record.tally import Summary
from holdfast.reference.config import TrainConfig
from holdfast.reference.mixture import Drawn

if TYPE_CHECKING:
    from holdfast.reference.trainer import Trainer


class View(Protocol):
    """Something that shows a run to a person."""

    def begin(self, config: TrainConfig, about: dict[str, Any]) -> None: ...
    def step(self, outcome: Outcome, tokens_per_second: float) -> None: ...
    def evaluated(self, step: int, loss: float) -> None: ...
    def recovered(self, outcome: Outcome) -> None: ...
    def end(self, result: Result) -> None: ...


class Result(msgspec.Struct, kw_only=True):
    """What a run came to."""

    eval_loss: float
    steps: int
    """committed, over all lives of the run"""
    steps_now: int = 0
    """of these, in this life"""
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    stopped: str | None
    """why it ended before its last step, or None"""
    checkpoint: str | None = None
    """what the next life goes on from"""
    run_dir: str
    summary: Summary


class Watch:
    """The trainer's own hook: evaluation at its intervals, speed, and what the view is told."""

    late = True
    """it only looks, so on a GPU it may be told a step later"""

    def __init__(self, trainer: Trainer, view: View | None) -> None:
        self._trainer, self._view = trainer, view
        self.guard: Guard | None = None
        self._began = self._first = time.perf_counter()
        self._steps = self._timed = 0
        self._recent = self._began
        self._drawn = Drawn()

    def on_step_end(self, outcome: Outcome) -> None:
        now = time.perf_counter()
        self._steps += 1
        self._drawn.add(outcome.step, [(span.start, span.stop) for span in outcome.signal.data])
        if self._steps == 5:
            # The first steps compile and warm up: speed is that of the rest.
            self._first, self._timed = now, self._steps
        if self._view is not None:
            speed = self._trainer.tokens_per_step / max(1e-9, now - self._recent)
            self._view.step(outcome, speed)
        self._recent = time.perf_counter()
        every = self._trainer.config.eval.every
        if every and outcome.step % every == 0 and outcome.step < self._trainer.config.train.steps:
            loss = self._trainer.evaluate()
            if self.guard is not None:
                self.guard.record(
                    step=outcome.step, eval={"eval_loss": loss}, tokens_per_source=self.tokens_per_source()
                )
            if self._view is not None:
                self._view.evaluated(outcome.step, loss)

    def on_recovery(self, outcome: Outcome) -> None:
        if self._view is not None:
            self._view.recovered(outcome)

    def tokens_per_source(self) -> dict[str, int]:
        """Tokens trained on so far, of each source: worked out when asked for, not counted on the way."""
        trainer = self._trainer
        samples = self._drawn.of_each_source(trainer.mixture)
        return dict(zip(trainer.source_names, [n * trainer.config.model.context for n in samples], strict=True))

    def result(self, summary: Summary, stop_at: int | None) -> Result:
        trainer, now = self._trainer, time.perf_counter()
        assert self.guard is not None
        stopped = self.guard.stopping or f"asked to stop at step {stop_at}"
        timed = self._steps - self._timed
        speed = timed * trainer.tokens_per_step / max(1e-9, now - self._first) if timed > 0 else 0.0
        peak = peak_flops(trainer.device, trainer.config.train.precision)
        return Result(
            eval_loss=math.nan,
            steps=summary.committed,
            steps_now=self._steps,
            tokens=self._steps * trainer.tokens_per_step,
            seconds=now - self._began,
            tokens_per_second=speed,
            mfu=None if peak is None else speed * trainer.flops / (peak * trainer.layout.size),
            # Asked to stop at its last step, or interrupted in it, a run is complete all the same.
            stopped=stopped if summary.committed < trainer.config.train.steps else None,
            run_dir=trainer.config.train.run_dir,
            summary=summary,
        )


def peak_flops(device: torch.device, precision: str) -> float | None:
    """What the device can do at the most, dense; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, half in (("H200", 989e12), ("H100", 989e12), ("A100", 312e12)):
        if key in name:
            return half if precision != "fp32" else half / 2
    return None
