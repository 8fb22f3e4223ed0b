"""Runs made of more than one model and one optimizer: guarded, and as the plain loop that they are compared with."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Case, without_functions
from cases import Run as Written
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import holdfast


@dataclass
class Parts:
    """Everything one run is made of. Each run makes its own."""

    model: Any
    optimizers: list[torch.optim.Optimizer]
    loss: Callable[[Any], torch.Tensor]
    schedulers: list[Any] = field(default_factory=list)
    intervals: list[str] = field(default_factory=list)
    scaler: Any = None
    registered: dict[str, Any] = field(default_factory=dict)
    committed: Callable[[int], None] | None = None
    """what belongs to a committed step: EMA, logging"""
    metric: Callable[[], float] | None = None
    eval_every: int = 5

    def modules(self) -> list[nn.Module]:
        if isinstance(self.model, nn.Module):
            return [self.model]
        return list(self.model.values() if isinstance(self.model, dict) else self.model)

    def trained(self) -> list[torch.Tensor]:
        """In the model's order, as `clip_grad_norm_(model.parameters())` would take them."""
        owned = {id(p) for o in self.every_optimizer() for g in o.param_groups for p in g["params"]}
        seen: dict[int, torch.Tensor] = {}
        for module in self.modules():
            seen |= {id(p): p for p in module.parameters() if id(p) in owned and id(p) not in seen}
        return list(seen.values())

    def every_optimizer(self) -> list[torch.optim.Optimizer]:
        inner = [v for o in self.optimizers for v in vars(o).values() if isinstance(v, torch.optim.Optimizer)]
        return [*self.optimizers, *inner]

    def groups(self) -> list[dict[str, Any]]:
        return list({id(g): g for o in self.every_optimizer() for g in o.param_groups}.values())


def everything(parts: Parts) -> dict[str, Any]:
    """All that two runs must agree on, copied."""
    state = {
        "modules": [dict(m.state_dict()) for m in parts.modules()],
        "unsaved buffers": [{n: b for n, b in m.named_buffers() if b.layout is torch.strided} for m in parts.modules()],
        "gradients": [p.grad is None for m in parts.modules() for p in m.parameters()],
        "optimizers": [
            [{str(k): v for k, v in o.state.get(p, {}).items()} for g in o.param_groups for p in g["params"]]
            for o in parts.every_optimizer()
        ],
        "optimizers' own": [
            {k: v for k, v in o.state.items() if not isinstance(k, torch.Tensor)} for o in parts.every_optimizer()
        ],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in parts.groups()],
        "schedulers": [without_functions(s.state_dict()) for s in parts.schedulers],
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "registered": {
            k: v.get_state() if isinstance(v, torch.Generator) else dict(v.state_dict())
            for k, v in parts.registered.items()
        },
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1],
    }
    return copy.deepcopy(state)


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """The same structure and the same bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{where}: {a.dtype} {a.shape} / {b.dtype} {b.shape}"
        assert torch.equal(a.isnan(), b.isnan()), f"{where}: NaN in one of them only"
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{where} differs: {a.flatten()[:3]} / {b.flatten()[:3]}"
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), f"{where} differs"
    elif isinstance(a, dict):
        assert isinstance(b, dict) and a.keys() == b.keys(), f"{where}: {list(a)} / {list(b)}"
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{where}: {len(a)} / {len(b)}"
        for i, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_equal(left, right, f"{where}[{i}]")
    else:
        assert type(a) is type(b) and (a == b or a != a), f"{where} differs: {a!r} / {b!r}"


class Done(Written):
    """A finished run: its parts, all its state, and the journal's word on what was done."""

    def __init__(self, parts: Parts, losses: list[float], guard: Any = None, path: Path | None = None) -> None:
        self.parts, self.losses, self.guard, self.path = parts, losses, guard, path
        self.state = everything(parts)


class Recipe:
    """`make()` builds the parts from a seed; the data, its faults and its order are those of a `Case`."""

    def __init__(self, make: Callable[[], Parts], case: Case) -> None:
        self._make, self.case = make, case

    def make(self) -> Parts:
        torch.manual_seed(self.case.seed)
        np.random.seed(self.case.seed)
        random.seed(self.case.seed)
        return self._make()

    def guarded(self, run_dir: Path, hooks: Any = (), in_the_loop: Callable | None = None, **more: Any) -> Done:
        case, parts = self.case, self.make()
        mine = [_Committed(parts)] if parts.committed or parts.metric else []
        guard = holdfast.Guard(
            parts.model,
            parts.optimizers if len(parts.optimizers) > 1 else parts.optimizers[0],
            scheduler=parts.schedulers or None,
            scheduler_interval=parts.intervals or None,
            scaler=parts.scaler,
            clip_grad_norm=case.clip,
            run_dir=run_dir,
            config=case.config,
            hooks=[*mine, *hooks],
            **more,
        )
        for hook in mine:
            hook.guard = guard
        for name, thing in parts.registered.items():
            guard.register(name, thing)
        losses: list[float] = []
        with guard:
            for step in guard.steps(
                case.loader(), accumulate=case.accumulate, epochs=case.epochs, max_steps=case.max_steps
            ):
                if in_the_loop is not None:
                    in_the_loop(step, parts, guard)
                with step:
                    for batch in step.microbatches():
                        loss = parts.loss(batch)
                        losses.append(loss.item())
                        step.backward(loss)
        return Done(parts, losses, guard, Path(run_dir))

    def plain(self, excluded: Any = None, lr_factor: Any = None, max_norm: Any = None) -> Done:
        """The same in plain torch: no line of Holdfast runs."""
        case, parts = self.case, self.make()
        loader = case.loader(excluded or {"spans": [], "samples": {}})
        losses: list[float] = []
        step = window = 0
        for _ in range(case.epochs):
            for batch in loader:
                loss = parts.loss(batch)
                losses.append(loss.item())
                loss = loss / case.accumulate if case.accumulate > 1 else loss
                (loss if parts.scaler is None else parts.scaler.scale(loss)).backward()
                window += 1
                if window % case.accumulate:
                    continue
                clip = case.clip if max_norm is None else max_norm(step, case.clip)
                if self._update(parts, clip, 1.0 if lr_factor is None else lr_factor(step)):
                    step += 1
                    for scheduler, interval in zip(parts.schedulers, parts.intervals, strict=True):
                        if interval == "step":
                            scheduler.step()
                    if parts.committed is not None:
                        parts.committed(step)
                    if parts.metric is not None and step % parts.eval_every == 0:
                        self._evaluated(parts, parts.metric())
                    if step == case.max_steps:
                        return Done(parts, losses)
            for scheduler, interval in zip(parts.schedulers, parts.intervals, strict=True):
                if interval == "epoch":
                    scheduler.step()
        return Done(parts, losses)

    def _update(self, parts: Parts, clip: float | None, factor: float) -> bool:
        """Clip, step every optimizer, clear. False after an overflow."""
        for optimizer in parts.optimizers if parts.scaler is not None else ():
            parts.scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parts.trained(), clip)
        scheduled = [g["lr"] for g in parts.groups()]
        if factor != 1.0:
            for group in parts.groups():
                group["lr"] = group["lr"] * factor
        overflowed = False
        if parts.scaler is None:
            for optimizer in parts.optimizers:
                optimizer.step()
        else:
            before = parts.scaler.get_scale()
            for optimizer in parts.optimizers:
                parts.scaler.step(optimizer)
            parts.scaler.update()
            overflowed = parts.scaler.get_scale() < before
        for group, lr in zip(parts.groups(), scheduled, strict=True):
            if factor != 1.0:
                group["lr"] = lr
        for p in parts.trained():
            p.grad = None
        return not overflowed

    def _evaluated(self, parts: Parts, metric: float) -> None:
        for scheduler, interval in zip(parts.schedulers, parts.intervals, strict=True):
            if interval == "eval":
                scheduler.step(metric) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()

    def reference(self, run: Done) -> Done:
        return self.plain(run.excluded(), run.lr_factor(), run.max_norm())


class _Committed:
    def __init__(self, parts: Parts) -> None:
        self.parts, self.guard = parts, None

    def on_step_end(self, outcome: Any) -> None:
        if self.parts.committed is not None:
            self.parts.committed(outcome.step)
        if self.parts.metric is not None and outcome.step % self.parts.eval_every == 0:
            self.guard.report_eval(self.parts.metric())
