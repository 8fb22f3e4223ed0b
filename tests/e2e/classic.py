"""Loops that people have: a classic one with `guard.step(loss)`, and one that keeps its own lines under `Guard.wrap`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cases import Case, Run
from plain import plain_loop

import holdfast


def classic(case: Case, run_dir: Path, hooks: Any = ()) -> Run:
    """Five lines become two: `loss.backward()` and `guard.step(loss)`."""
    parts = case.build()
    interval = "eval" if case.scheduler == "plateau" else case.interval
    guard = holdfast.Guard(
        **parts, scheduler_interval=interval, clip_grad_norm=case.clip, run_dir=run_dir, config=case.config, hooks=hooks
    )
    losses, parts_drawn = [], 0
    with guard:
        for _ in range(case.epochs):
            for batch in guard.data(guard_loader(guard, case), max_steps=case.max_steps):
                loss = case.loss(parts["model"], batch)
                losses.append(loss.item())
                part = loss / case.accumulate if case.accumulate > 1 else loss
                (part if parts["scaler"] is None else parts["scaler"].scale(part)).backward()
                parts_drawn += 1
                is_updated = guard.step(loss, update=parts_drawn % case.accumulate == 0) is not None
                if case.scheduler == "plateau" and is_updated and guard.landed and guard.step % case.eval_every == 0:
                    guard.report_eval(case.evaluate(parts["model"]))
    return Run(parts, losses, guard, run_dir)


def guard_loader(guard: Any, case: Case) -> Any:
    """The same loader in every epoch."""
    if not hasattr(guard, "loader_of_test"):
        guard.loader_of_test = case.loader()
    return guard.loader_of_test


def wrap(case: Case, run_dir: Path, hooks: Any = ()) -> Run:
    """The very lines of the plain loop."""
    parts = case.build()
    guard = holdfast.Guard.wrap(**parts, run_dir=run_dir, config=case.config, hooks=hooks)
    try:
        losses = plain_loop(case, guard.data(case.loader(), max_steps=case.max_steps), **parts, clip=case.clip)
    finally:
        guard.close()
    return Run(parts, losses, guard, run_dir)


LOOPS = {"classic": classic, "wrap": wrap}


class InfGradient:
    """An Inf in one gradient, once: a tensor hook puts it there in the backward of one step."""

    def __init__(self, step: int) -> None:
        self.step, self.guard, self.is_done = step, None, False

    def on_train_begin(self, guard: Any) -> None:
        self.guard = guard
        parameter = next(p for _, m in guard._state.modules for p in m.parameters())
        parameter.register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.is_done or self.guard.step + 1 != self.step:
            return None
        self.is_done = True
        return gradient * float("inf")


class ScaledWeights:
    """Weights that something else in memory scales, once, after a step."""

    def __init__(self, step: int, factor: float) -> None:
        self.step, self.factor, self.is_done = step, factor, False

    def on_train_begin(self, guard: Any) -> None:
        self.model = guard._state.modules[0][1]

    def on_step_end(self, outcome: Any) -> None:
        if outcome.step == self.step and not self.is_done:
            self.is_done = True
            with torch.no_grad():
                self.model.last.weight.mul_(self.factor)
