"""Learning-rate schedulers, and the two interventions over them: an LR factor with a ramp, and a tighter clip.

The factor is applied right before `optimizer.step()` and removed right after, so that no scheduler reads it: scaling `lr`
under a chainable scheduler compounds.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.core.base.errors import SetupError, StepError
from holdfast.core.base.types import CutLR, HoldLR, TightenClip
from holdfast.runtime.state.optimizers import Optimizers, with_wrapped
from holdfast.runtime.tensors.nested_state import can_replace

Interval = Literal["step", "epoch", "eval", "loop"]
"""when the guard steps a scheduler; "loop": the loop does"""
_FALLS_BACK = 0.67
"""an LR that is at most this share of the one a step before has jumped down"""


class Schedulers:
    """Steps each scheduler at its interval, and notices when someone else has."""

    def __init__(self, schedulers: Sequence[LRScheduler], intervals: Sequence[Interval]) -> None:
        self._pairs = list(zip(schedulers, intervals, strict=True))
        self.all: list[Any] = list(schedulers)
        self.record_positions()
        for scheduler, interval in self._pairs:
            if isinstance(scheduler, ReduceLROnPlateau) and interval not in ("eval", "loop"):
                raise SetupError(
                    f"ReduceLROnPlateau needs a metric, so scheduler_interval={interval!r} cannot drive it; "
                    "use scheduler_interval='eval' and call guard.report_eval(metric)"
                )

    def step(self, interval: Interval, metric: float | None = None) -> None:
        """Step every scheduler of this interval. Raise StepError if one was stepped outside the guard."""
        self.check_positions()
        for scheduler, its_interval in self._pairs:
            if its_interval != interval:
                continue
            if isinstance(scheduler, ReduceLROnPlateau):
                assert metric is not None, "only report_eval drives a plateau scheduler"
                scheduler.step(metric)
            else:
                scheduler.step()
        self.record_positions()

    def record_positions(self) -> None:
        """Take the schedulers' positions as the guard's own doing."""
        self._positions = [_position(scheduler) for scheduler in self.all]

    def has_interval(self, interval: Interval) -> bool:
        return any(its_interval == interval for _, its_interval in self._pairs)

    def check_positions(self) -> None:
        """Raise StepError if a scheduler was stepped outside the guard."""
        for (scheduler, interval), position in zip(self._pairs, self._positions, strict=True):
            if interval != "loop" and _position(scheduler) != position:
                name = type(scheduler).__name__
                raise StepError(
                    f"{name}.step() was called outside the guard, which steps it itself (interval {interval!r}): "
                    "remove your own call, or do not pass the scheduler to Guard"
                )

    def state_dict(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(s.state_dict()) for s, _ in self._pairs]

    def find_mismatch(self, states: list[dict[str, Any]]) -> str | None:
        """Return why these schedulers cannot have saved this; None if they can."""
        if len(states) != len(self._pairs):
            return f"it was saved with {len(states)} schedulers, and there are {len(self._pairs)}"
        for (scheduler, _), state in zip(self._pairs, states, strict=True):
            now = scheduler.state_dict()
            for name in state.keys() & now.keys():
                if not can_replace(state[name], now[name]):
                    what = f"{type(scheduler).__name__}.{name}"
                    return f"{what} was {state[name]!r:.80} when it was saved, and is {now[name]!r:.80} now"
        return None

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load the states. torch sets every name as an attribute, so that names the schedulers do not have are left out."""
        for (scheduler, _), state in zip(self._pairs, states, strict=True):
            known = {name: value for name, value in state.items() if _is_own(name, scheduler)}
            scheduler.load_state_dict(copy.deepcopy(known))
        self.record_positions()


def _is_own(name: str, scheduler: Any) -> bool:
    """Return whether a name in a saved state may be set: the scheduler has it, or is the user's own and makes it later."""
    if type(scheduler).__module__.startswith("torch.optim."):
        return name in scheduler.state_dict()
    return not callable(getattr(scheduler, name, None)) or name in scheduler.state_dict()


def _position(scheduler: Any) -> Any:
    return getattr(scheduler, "last_epoch", None)


class UnknownSchedulers:
    """Notices LR schedulers that the loop steps and the guard does not know: no rollback and no resume restores them."""

    def __init__(self, optimizers: Optimizers, known: Schedulers) -> None:
        self._optimizers, self._known = optimizers, known
        self.watched: list[tuple[Any, Any]] = []
        """the ones found, with their positions then"""
        self._is_first, self._may_search = True, True

    def check(self, *, has_lr_changed: bool) -> str | None:
        """Return what to report before an update; None if nothing. `has_lr_changed` leaves out what the guard changed.

        Searches all objects of the process, at most twice: at the first update, if a param group shows that a scheduler
        was built on it, and when the LR changes for the first time.
        """
        if self._is_first:
            self._is_first = False
            outer = [getattr(s, "optimizer", None) for s in self._known.all]  # or a wrapper of it, as Accelerate's
            driven = with_wrapped([o for o in outer if isinstance(o, Optimizer)])
            has_traces = any("initial_lr" in o.param_groups[0] for o in self._optimizers.all if o not in driven)
        else:
            has_traces = has_lr_changed and self._may_search and not self._known.has_interval("loop")
            self._may_search = self._may_search and not has_lr_changed
        if has_traces:
            watched = [s for s, _ in self.watched]
            self.watched += [(s, _position(s)) for s in self._search() if s not in watched]
        stepped = [(s, position) for s, position in self.watched if _position(s) != position]
        if not stepped:
            return None
        self.watched = []
        names = ", ".join(f"{type(s).__name__} (from position {before} to {_position(s)})" for s, before in stepped)
        return (
            f"the loop steps a scheduler that the guard does not know: {names}; neither a rollback nor a resume restores "
            "it; pass it as Guard(scheduler=...) and remove your own scheduler.step()"
        )

    def _search(self) -> list[Any]:
        """Return the schedulers that drive the optimizers, except the known ones and those inside them."""
        known = list(self._known.all)
        for scheduler in known:  # grows: SequentialLR holds others
            for value in vars(scheduler).values():
                members = value if isinstance(value, list | tuple) else [value]
                known += [m for m in members if isinstance(m, LRScheduler) and m not in known]
        found = [o for o in gc.get_objects() if issubclass(type(o), LRScheduler) and o not in known]
        return [s for s in found if getattr(s, "optimizer", None) in self._optimizers.all]


class LrRamp(msgspec.Struct):
    """Holds an LR factor that returns to 1 linearly over `steps` committed steps."""

    factor: float
    steps: int
    steps_done: int = msgspec.field(default=0, name="done")

    def value(self) -> float:
        """Return the factor for the next step."""
        return self.factor + (1.0 - self.factor) * (self.steps_done / self.steps)


class Interventions(msgspec.Struct):
    """Holds what recoveries have changed about the schedule. It is part of the run's state, so a rollback restores it.

    The names given to `msgspec.field` are the keys in checkpoint files.
    """

    lr_ramp: LrRamp | None = msgspec.field(default=None, name="ramp")
    tightened_clip: float | None = msgspec.field(default=None, name="clip")
    clip_steps_left: int = msgspec.field(default=0, name="clip_left")
    hold: HoldLR | None = None
    """the LR before a jump, or a lower one than a run began with"""
    last_lr: float = 0.0
    """the LR that was set at the last step of a hold"""
    applied: int = msgspec.field(default=0, name="turns")
    """how many of the run's interventions this state includes"""
    weight_unit: float = msgspec.field(default=1.0, name="unit")
    """the divisor of micro-batch weights, the same on all ranks: about the weight of a micro-batch in the last step. It is a
    power of two, so it changes no bit of the result"""

    def apply(self, action: CutLR | HoldLR | TightenClip) -> None:
        """Apply one intervention from the next update on."""
        if isinstance(action, CutLR):
            self.lr_ramp = LrRamp(action.factor, action.ramp_steps)
        elif isinstance(action, HoldLR):
            self.hold, self.last_lr = action, 0.0
        else:
            self.tightened_clip, self.clip_steps_left = action.max_norm, action.steps
        self.applied += 1

    def commit(self, lr: float, step: int) -> None:
        """Count committed step `step`. `lr` is the LR that was set: a hold ends when it falls back in one step."""
        if self.hold is not None:
            if self._has_fallen_back(self.hold, lr, step):
                self.hold = None
            self.last_lr = lr
        if self.lr_ramp is not None:
            self.lr_ramp.steps_done += 1
            if self.lr_ramp.steps_done >= self.lr_ramp.steps:
                self.lr_ramp = None
        if self.tightened_clip is not None:
            self.clip_steps_left -= 1
            if self.clip_steps_left <= 0:
                self.tightened_clip = None

    def lr_factor(self, lr: float, step: int) -> float:
        """Return the factor for the update of `step`, given the LR that is set."""
        factor = 1.0 if self.lr_ramp is None else self.lr_ramp.value()
        hold = self.hold
        if hold is not None and step >= hold.from_step and not self._has_fallen_back(hold, lr, step):
            factor *= hold.ratio
        return factor

    def _has_fallen_back(self, hold: HoldLR, lr: float, step: int) -> bool:
        return step > hold.from_step and lr <= _FALLS_BACK * self.last_lr and lr <= 1.05 * hold.max_lr

    def max_norm(self, configured: float | None) -> float | None:
        """Return the clip norm in force: the tighter of the configured one and the recovery's."""
        if self.tightened_clip is None:
            return configured
        return self.tightened_clip if configured is None else min(configured, self.tightened_clip)

    def state_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loaded = msgspec.convert(state, Interventions)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(loaded, name))


@contextmanager
def scaled_lr(groups: Sequence[dict[str, Any]], factor: float) -> Iterator[None]:
    """Multiply every `lr` by `factor` inside the context, and restore exactly the old values after it."""
    groups = [g for g in groups if g["lr"] is not None]  # None: the optimizer finds its own
    before = [g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in groups]
    try:
        for group in groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] = group["lr"] * factor
        yield
    finally:
        for group, lr in zip(groups, before, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr
