"""Settings that were changed between two lives of a run: the new ones hold.

A saved state holds the options of the optimizers and the settings of the schedulers too. Where the program was started with
the same as then, what was saved goes on, bit for bit. Where a person has written another learning rate, weight decay or
length of the schedule, that is what they want from here on; the learning rate keeps its place in the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from holdfast.runtime.state.run_state import RunState

_SCALED = ("lr", "initial_lr")
_NOT_SET = ("parameters", *_SCALED)


def hold(state: RunState, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Put what is given now over what was restored, where the two differ; the names of what was changed."""
    names: list[str] = []
    groups_then, groups_now = then.get("optimizer_groups") or [], now.get("optimizer_groups") or []
    for optimizer, old, new in zip(state.optimizers.all, groups_then, groups_now, strict=False):
        for n, (group, was, given) in enumerate(zip(optimizer.param_groups, old, new, strict=False)):
            names += _group(group, was, given)
            if (ratio := _ratio(was, given)) != 1.0:
                _scale_bases(state, optimizer, n, ratio)
    pairs = zip(then.get("schedulers") or [], now.get("schedulers") or [], strict=False)
    for scheduler, (old, new) in zip(state.schedulers.all, pairs, strict=False):
        names += _scheduler(scheduler, old, new)
    state.schedulers.record_positions()
    return sorted(set(names))


def _group(group: dict[str, Any], was: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    names = []
    for name, value in given.items():
        if name in _NOT_SET or name not in group or name not in was or _same(was[name], value):
            continue
        group[name] = tuple(value) if isinstance(group[name], tuple) else value
        names.append(name)
    if (ratio := _ratio(was, given)) != 1.0:
        for name in _SCALED:
            if isinstance(group.get(name), Tensor):
                group[name].mul_(ratio)
            elif name in group:
                group[name] = group[name] * ratio
        names.append("lr")
    return names


def _same(was: Any, value: Any) -> bool:
    """One of them has been through a file, where there are no tuples."""
    return was == value or (
        isinstance(value, list | tuple) and isinstance(was, list | tuple) and list(was) == list(value)
    )


def _ratio(was: Mapping[str, Any], given: Mapping[str, Any]) -> float:
    """By how much the learning rate was changed: of its peak where a scheduler has written that down."""
    for name in ("initial_lr", "lr"):
        if was.get(name) and given.get(name):
            return float(given[name]) / float(was[name])
    return 1.0


def _scale_bases(state: RunState, optimizer: Any, group: int, ratio: float) -> None:
    """What schedulers compute the learning rate from."""
    for scheduler in state.schedulers.all:
        bases = getattr(scheduler, "base_lrs", None)
        if getattr(scheduler, "optimizer", None) is optimizer and isinstance(bases, list) and group < len(bases):
            bases[group] = bases[group] * ratio


def _scheduler(scheduler: Any, was: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    if was.get("class") != given.get("class"):
        return []
    names = []
    for name, value in given.items():
        if name in ("class", "base_lrs") or name not in was or _same(was[name], value) or not hasattr(scheduler, name):
            continue
        setattr(scheduler, name, type(getattr(scheduler, name))(value) if isinstance(value, list) else value)
        names.append(name)
    return names
