"""Keep settings that a person changed between two processes of a run.

A checkpoint holds the options of optimizers and schedulers. If the program starts with the options it was saved with, the
saved ones continue, bit for bit. If a person changed the learning rate, the weight decay or the schedule's length, the new
value applies from here on, and the learning rate keeps its place in the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from holdfast.runtime.state.run_state import RunState

_LEARNING_RATES = ("lr", "initial_lr")
_NOT_SETTINGS = ("parameters", *_LEARNING_RATES)


def apply_overrides(state: RunState, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Write the current settings over the restored ones where the two differ. Return the names of those changed."""
    names: list[str] = []
    saved_groups, current_groups = saved.get("optimizer_groups") or [], current.get("optimizer_groups") or []
    for optimizer, old, new in zip(state.optimizers.all, saved_groups, current_groups, strict=False):
        for n, (group, before, now) in enumerate(zip(optimizer.param_groups, old, new, strict=False)):
            names += _apply_to_group(group, before, now)
            if (ratio := _lr_ratio(before, now)) != 1.0:
                _scale_base_lrs(state, optimizer, n, ratio)
    pairs = zip(saved.get("schedulers") or [], current.get("schedulers") or [], strict=False)
    for scheduler, (old, new) in zip(state.schedulers.all, pairs, strict=False):
        names += _apply_to_scheduler(scheduler, old, new)
    state.schedulers.record_positions()
    return sorted(set(names))


def _apply_to_group(group: dict[str, Any], saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    names = []
    for name, value in current.items():
        if name in _NOT_SETTINGS or name not in group or name not in saved or _is_same(saved[name], value):
            continue
        group[name] = tuple(value) if isinstance(group[name], tuple) else value
        names.append(name)
    if (ratio := _lr_ratio(saved, current)) != 1.0:
        for name in _LEARNING_RATES:
            if isinstance(group.get(name), Tensor):
                group[name].mul_(ratio)
            elif name in group:
                group[name] = group[name] * ratio
        names.append("lr")
    return names


def _is_same(saved: Any, current: Any) -> bool:
    """Compare two values of which one has been through JSON, which has no tuples."""
    is_sequence = isinstance(current, list | tuple) and isinstance(saved, list | tuple)
    return saved == current or (is_sequence and list(saved) == list(current))


def _lr_ratio(saved: Mapping[str, Any], current: Mapping[str, Any]) -> float:
    """Return the factor by which the learning rate changed: its peak, if a scheduler recorded that."""
    for name in ("initial_lr", "lr"):
        if saved.get(name) and current.get(name):
            return float(current[name]) / float(saved[name])
    return 1.0


def _scale_base_lrs(state: RunState, optimizer: Any, group: int, ratio: float) -> None:
    """Scale the base learning rate from which the schedulers of `optimizer` compute."""
    for scheduler in state.schedulers.all:
        base_lrs = getattr(scheduler, "base_lrs", None)
        if getattr(scheduler, "optimizer", None) is optimizer and isinstance(base_lrs, list) and group < len(base_lrs):
            base_lrs[group] = base_lrs[group] * ratio


def _apply_to_scheduler(scheduler: Any, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    if saved.get("class") != current.get("class"):
        return []
    names = []
    for name, value in current.items():
        is_setting = name not in ("class", "base_lrs") and name in saved and hasattr(scheduler, name)
        if not is_setting or _is_same(saved[name], value):
            continue
        setattr(scheduler, name, type(getattr(scheduler, name))(value) if isinstance(value, list) else value)
        names.append(name)
    return names
