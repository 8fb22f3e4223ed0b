"""What others do to watch a run, in our own words, and Lightning's own SpikeDetection where it is installed."""

from __future__ import annotations

import copy
import time
import warnings
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.blocks import synchronize
from benchmarks.loops import Loop, Subject


class IsFinite(Loop):
    """Every gradient is asked whether it is finite; the host waits for each answer."""

    def before_update(self, loss: Tensor, norm: Tensor) -> None:
        for p in self.subject.parameters:
            if p.grad is not None and not bool(torch.isfinite(p.grad).all()):
                raise FloatingPointError("a gradient is not finite")


class Item(Loop):
    """Loss and norm as numbers, every step."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.seen: deque[tuple[float, float]] = deque(maxlen=100)

    def after_update(self, loss: Tensor, norm: Tensor) -> None:
        self.seen.append((loss.item(), norm.item()))


class Spike(Loop):
    """Lightning's SpikeDetection at the end of each batch, asked as Fabric asks it on one device; where Lightning is not
    there, the same questions: is the loss finite, is it better than the last one, how far is it from the mean of ten."""

    WINDOW, FACTOR = 10, 2.0

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._own: Any = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from lightning.fabric.utilities.spike import SpikeDetection

                self._own = SpikeDetection()
        except Exception as error:  # not installed, or without torchmetrics
            self.notes.append(f"own version: {type(error).__name__}: {error}"[:100])
        device = torch.device(subject.case.device)
        strategy = SimpleNamespace(root_device=device, barrier=lambda: None, reduce_boolean_decision=_as_it_is)
        self._fabric: Any = SimpleNamespace(strategy=strategy, global_rank=0)
        self._last: Tensor | None = None
        self._recent: deque[Tensor] = deque(maxlen=self.WINDOW)

    def after_update(self, loss: Tensor, norm: Tensor) -> None:
        if self._own is not None:
            self._own.on_train_batch_end(self._fabric, loss.detach(), None, self.done)
        elif self._is_spike(loss.detach()):
            raise FloatingPointError("a spike")

    def _is_spike(self, loss: Tensor) -> bool:
        spike = False
        if self._last is not None:
            mean = torch.stack(list(self._recent)).mean()
            if not torch.isfinite(loss):
                return True
            if not bool((loss - self._last <= 0).all()):
                spike = bool((loss - mean).abs() >= (self.FACTOR * mean).abs())
        self._recent.append(loss)
        self._last = loss
        return spike


def _as_it_is(decision: bool, all: bool = True) -> bool:
    return decision


class ArcStyle(Loop):
    """What arc-training's controller does in a step with its defaults: NaN and Inf asked of the loss, of every weight and of
    every gradient, a norm of each gradient on the host, every tenth step zeros and magnitudes of each weight; and a copy of
    model and optimizer in pageable memory, every 100 steps on a calm run. The copies are timed apart, since blocks are not
    all as long: a hundredth of one is in each step's time."""

    COPIES, LOOKS = 100, 10

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._copy: Any = None
        self._seconds: list[float] = []

    def warm_up(self) -> None:
        super().warm_up()
        self.between()
        self._seconds.clear()

    def before_update(self, loss: Tensor, norm: Tensor) -> None:
        if torch.isnan(loss) or torch.isinf(loss) or loss.item() > 100.0:
            raise FloatingPointError("the loss")
        total = 0.0
        for p in self.subject.parameters:
            if torch.isnan(p).any() or torch.isinf(p).any():
                raise FloatingPointError("a weight")
        if self.done % self.LOOKS == 0:
            for p in self.subject.parameters:
                total += (p.data == 0).sum().item() + p.data.abs().sum().item()
        for p in self.subject.parameters:
            if p.grad is not None:
                if torch.isnan(p.grad).any() or torch.isinf(p.grad).any():
                    raise FloatingPointError("a gradient")
                total += p.grad.norm(2).item() ** 2

    def between(self) -> None:
        """One copy, timed; at most three over a run."""
        if len(self._seconds) >= 3:
            return
        self._copy = None
        synchronize(self.subject.case.device)
        began = time.perf_counter()
        model = {name: value.cpu().clone() for name, value in self.subject.core.state_dict().items()}
        optimizer = copy.deepcopy(self.subject.optimizer.state_dict())
        for state in optimizer["state"].values():
            for name, value in state.items():
                state[name] = value.cpu() if isinstance(value, Tensor) else value
        self._seconds.append(time.perf_counter() - began)
        self._copy = (model, optimizer)

    def extra_ms(self) -> float:
        return sum(self._seconds) / max(1, len(self._seconds)) / self.COPIES * 1e3

    def close(self) -> None:
        self._copy = None
        gb = self.subject.nbytes() / 1e9
        seconds = self.extra_ms() * self.COPIES / 1e3
        self.notes.append(f"a copy of {gb:.2f} GB takes {seconds:.2f} s, {self.extra_ms():.2f} ms a step")
