"""Finite spikes: the first module whose activations, attention logits or gradients grew out of proportion."""

from __future__ import annotations

import linecache
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.core.origin.report import ModuleRow, OriginReport, Phase
from holdfast.runtime.origin.observe import StepObserver

_RATIO = 10.0
"""a range that is this many times that of a healthy step has left its course"""


def _calls(path: Sequence[ModuleRow]) -> Iterator[tuple[tuple[str, int], ModuleRow]]:
    """Yield each row with its module's name and how often that was called before."""
    counts = Counter[str]()
    for row in path:
        yield (row.module, counts[row.module]), row
        counts[row.module] += 1


def find_growth(
    path: Sequence[ModuleRow], healthy: Sequence[ModuleRow], *, of_gradients: bool = False
) -> list[tuple[str, float]]:
    """Return each module and how many times larger its output is than in a healthy step, in execution order.

    With `of_gradients` the same of the gradients, in the order of the backward.
    """
    bad, good = (
        {key: row.gradient if of_gradients else row.output for key, row in _calls(each)} for each in (path, healthy)
    )
    pairs = [(key[0], each, good.get(key)) for key, each in bad.items()]
    ratios = [(m, _ratio(a.largest, b.largest)) for m, a, b in pairs if a is not None and b is not None]
    return ratios[::-1] if of_gradients else ratios


def _ratio(value: float, healthy: float) -> float:
    return value / healthy if healthy > 0 and math.isfinite(healthy) else 1.0


def describe_spike(fine: StepObserver, healthy: Sequence[ModuleRow], *, loss_is_high: bool) -> OriginReport:
    """Return the module that left its course first, and within it the op with the largest growth."""
    path = fine.path
    forward = next(((m, r) for m, r in find_growth(path, healthy) if r >= _RATIO and m != "loss"), None)
    backward = next(((m, r) for m, r in find_growth(path, healthy, of_gradients=True) if r >= _RATIO), None)
    explosion = fine.largest_growth()
    phase: Phase = "forward" if forward is not None or loss_is_high else "backward"
    module, detail = "", ""
    if forward is not None or backward is not None:
        module, ratio = forward or backward or ("", 1.0)
        what = "output" if forward is not None else "gradient"
        what = "attention logits" if module.endswith("(attention logits)") else what
        module = module.removesuffix("(attention logits)").strip()
        detail = f"the first {what} that left its course: {ratio:.3g} times that of a healthy step"
    if explosion is not None and (phase == "backward" or not module) and explosion.gain > 1e4:
        phase = "backward" if explosion.phase == "backward" else "forward"
        module = explosion.place.module
    growth = fine.largest_growth(phase, module) or (fine.largest_growth(phase) if not module else None)
    report = replace(fine.report(), phase=phase, module=module, is_spike=True, detail=detail)
    if growth is None:
        return report
    file, line, _ = growth.place
    return replace(
        report,
        op=growth.name,
        file=file,
        line=line,
        source=linecache.getline(file, line).strip(),
        inputs=growth.inputs,
        outputs=growth.outputs,
        gain=growth.gain,
        detail="; ".join(filter(None, (detail, f"the op's result is {growth.gain:.3g} times its largest argument"))),
    )
