"""Learning-rate schedulers, and the two interventions laid over them: an LR factor with a ramp, and a tighter clip.

The factor is put on right before `optimizer.step()` and taken off right after, so that no scheduler ever reads it:
scaling `lr` under a chainable scheduler compounds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.core.base.errors import SetupError, StepError

Interval = Literal["step", "epoch", "eval"]


class Schedulers:
    """Steps each scheduler at its interval, and notices when somebody else did."""

    def __init__(self, schedulers: Sequence[LRScheduler], intervals: Sequence[Interval]) -> None:
        self._pairs = list(zip(schedulers, intervals, strict=True))
        self._stands = [_stand(s) for s, _ in self._pairs]
        for scheduler, interval in self._pairs:
            if isinstance(scheduler, ReduceLROnPlateau) and interval != "eval":
                raise SetupError(
                    f"ReduceLROnPlateau needs a metric, so scheduler_interval={interval!r} cannot drive it; "
                    "use scheduler_interval='eval' and call guard.report_eval(metric)"
                )

    def step(self, interval: Interval, metric: float | None = None) -> None:
        """Move every scheduler of this interval on by one."""
        self.check()
        for scheduler, own in self._pairs:
            if own != interval:
                continue
            if isinstance(scheduler, ReduceLROnPlateau):
                assert metric is not None, "only report_eval drives a plateau scheduler"
                scheduler.step(metric)
            else:
                scheduler.step()
        self.stand()

    @property
    def all(self) -> list[Any]:
        return [scheduler for scheduler, _ in self._pairs]

    def stand(self) -> None:
        """The guard itself has changed them."""
        self._stands = [_stand(s) for s, _ in self._pairs]

    def has(self, interval: Interval) -> bool:
        return any(own == interval for _, own in self._pairs)

    def check(self) -> None:
        """StepError where a scheduler has moved without the guard."""
        for (scheduler, interval), stood in zip(self._pairs, self._stands, strict=True):
            if _stand(scheduler) != stood:
                name = type(scheduler).__name__
                raise StepError(
                    f"{name}.step() was called outside the guard, which steps it itself (interval {interval!r}): "
                    "remove your own call, or do not pass the scheduler to Guard"
                )

    def state_dict(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(s.state_dict()) for s, _ in self._pairs]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for (scheduler, _), state in zip(self._pairs, states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        self.stand()


def _stand(scheduler: Any) -> Any:
    return getattr(scheduler, "last_epoch", None)


class Ramp(msgspec.Struct):
    """An LR factor that returns to 1 linearly over `steps` committed steps."""

    factor: float
    steps: int
    done: int = 0

    def now(self) -> float:
        return self.factor + (1.0 - self.factor) * (self.done / self.steps)


class Interventions(msgspec.Struct):
    """What a recovery has laid over the schedule. Part of a run's state: it goes back with a rollback."""

    ramp: Ramp | None = None
    clip: float | None = None
    clip_left: int = 0
    turns: int = 0
    """how many interventions the state holds, of those on the way to it"""
    unit: float = 1.0
    """what several ranks weigh their parts by: about what the parts of the last step weighed, a power of two, so that it
    changes no bit of the result"""

    def commit(self) -> None:
        """A step was committed: everything is one step nearer to normal."""
        if self.ramp is not None:
            self.ramp.done += 1
            if self.ramp.done >= self.ramp.steps:
                self.ramp = None
        if self.clip is not None:
            self.clip_left -= 1
            if self.clip_left <= 0:
                self.clip = None

    def factor(self) -> float:
        return 1.0 if self.ramp is None else self.ramp.now()

    def max_norm(self, own: float | None) -> float | None:
        """The clip in force: the tighter of the user's and the recovery's."""
        if self.clip is None:
            return own
        return self.clip if own is None else min(own, self.clip)

    def state_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loaded = msgspec.convert(state, Interventions)
        self.ramp, self.clip, self.clip_left = loaded.ramp, loaded.clip, loaded.clip_left
        self.turns, self.unit = loaded.turns, loaded.unit


@contextmanager
def scaled(groups: Sequence[dict[str, Any]], factor: float) -> Iterator[None]:
    """Every `lr` times `factor` inside, exactly what it was outside."""
    kept = [g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in groups]
    try:
        for group in groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] = group["lr"] * factor
        yield
    finally:
        for group, lr in zip(groups, kept, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr
