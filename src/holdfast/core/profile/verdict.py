"""Compares two traces, and names the cause of a slowdown from the comparison and what else is known about it."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.base.clean import clean
from holdfast.core.detectors.slowdown import Slowdown
from holdfast.core.profile.kernels import ATTENTION, CATEGORIES, COLLECTIVE, COPY, ELEMENTWISE, GEMM, OPTIMIZER, OTHER
from holdfast.core.profile.trace import TraceSummary

NOT_ESTABLISHED = "not_established"
ADVICE = {
    "network_degraded": "collectives take longer: check links and error counters of the nodes (ibstat, NCCL_DEBUG=INFO); if "
    " another rank may be late, compare the traces of two ranks",
    "parallelism_crosses_nodes": "collectives run in other process groups than before: keep tensor and expert parallelism "
    "inside a node",
    "host_device_copies": "tensors are copied or read on the host: keep them on the device, or read them every N steps",
    "framework_overhead": "the host issues more and smaller operations: look for a Python loop over tensors",
    "input_bound": "the step waits for data: more workers, prefetching, faster storage, less work for each sample",
    "one_slow_rank": "the other ranks wait for it: look at its clocks, its temperature, other processes, its storage",
    "clocks_throttled": "the same work takes longer: check clocks, temperature, power and other processes",
    "recompilation_storm": "torch.compile compiles again and again: pad inputs to a few shapes, or mark them dynamic "
    "(TORCH_LOGS=recompiles)",
    "checkpoint_interference": "steps are slow while a checkpoint is written: write it less often, or to another disk",
    NOT_ESTABLISHED: "nothing that was measured explains it: look at the profile",
}
"""cause -> what to do"""
_LEAST_GROWTH, _LEAST_PART = 0.05, 0.35
"""a step must take this share longer, and a cause must explain this part of it"""
_SAME_COUNT, _MORE_OPERATIONS = 0.05, 1.15
_UNIFORM_LEAST, _UNIFORM_BAND = 1.08, 0.5
_SEEN_DIRECTLY = ("recompilation_storm", "input_bound", "checkpoint_interference")
"""causes that the host's own events show; idle time of the device is no evidence for another one while they last"""
_WAITS = 0.5
"""the part of a late rank's longer work for which the other one must wait"""
_LEAST_NAMES, _SAME_NAMES, _ALIKE = 5, 0.8, 1.25
"""one program with a slowdown has nearly all the operators of the one without; as many times more work is alike"""
_SAVING_SLOW, _SAVING_BEFORE = 0.6, 0.3
_COMPILES_PER_STEP = 0.1


class Circumstances(msgspec.Struct, kw_only=True):
    """What else is known about the slow steps and those before."""

    saving_before: float = 0.0
    """share of the steps during which a checkpoint was written"""
    saving_after: float = 0.0
    compiles_per_step: float = 0.0
    """graphs that torch.compile made, for each slow step"""
    throttled: str = ""
    """why the device runs below its clocks, as the driver says"""
    new_lines: list[str] = []
    """lines of the program that call torch more often than before, most first"""
    new_copies: list[str] = []
    """lines that copy tensors or read them on the host, and did not before"""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One category in two traces, in ms of a step."""

    name: str
    before: float
    after: float
    count_before: float
    count_after: float


class SlowdownVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a slowdown, and what it follows from."""

    cause: str
    text: str
    evidence: dict[str, Any] = {}

    @property
    def advice(self) -> str:
        return ADVICE[self.cause]


def compare(before: TraceSummary, after: TraceSummary) -> list[Change]:
    """Return the difference of two traces by category, then idle time, exposed communication and host work."""

    def change(name: str, b: float, a: float, count_b: float = 0, count_a: float = 0) -> Change:
        return Change(
            name=name,
            before=before.per_step(b),
            after=after.per_step(a),
            count_before=count_b / max(1, before.steps),
            count_after=count_a / max(1, after.steps),
        )

    rows = [
        change(
            n, before.seconds.get(n, 0.0), after.seconds.get(n, 0.0), before.counts.get(n, 0), after.counts.get(n, 0)
        )
        for n in CATEGORIES
        if before.counts.get(n) or after.counts.get(n)
    ]
    rows.append(change("idle", before.idle, after.idle))
    if before.has_device or after.has_device:
        rows.append(change("exposed communication", before.exposed_collective, after.exposed_collective))
        rows.append(change("overlapped communication", before.overlapped_collective, after.overlapped_collective))
        rows.append(change("launch gaps", before.gaps, after.gaps, before.launches, after.launches))
        rows.append(change("host waits for device", before.sync, after.sync, before.transfers, after.transfers))
    rows.append(change("operators on the host", before.host, after.host, before.operators, after.operators))
    rows.append(change("data loader", before.loader, after.loader))
    rows.append(change("saving a checkpoint", before.saving, after.saving))
    rows.append(change("compilation", before.compile_time, after.compile_time, before.compiles, after.compiles))
    rows.append(change("step", before.span, after.span))
    return rows


def explain(
    slowdown: Slowdown | None,
    before: TraceSummary | None = None,
    after: TraceSummary | None = None,
    known: Circumstances | None = None,
) -> SlowdownVerdict:
    """Return the cause. What was observed directly counts before what the profiles suggest."""
    known = known or Circumstances()
    direct = None if slowdown is None else _explain_directly(slowdown, known)
    if direct is not None:
        return direct
    if before is not None and after is not None:
        verdict = _explain_profiles(before, after, known)
    else:
        verdict = _verdict(NOT_ESTABLISHED, "no measurement explains it")
    if verdict.cause == NOT_ESTABLISHED and slowdown is not None and slowdown.phase == "collective":
        return _verdict("network_degraded", "the wait in collectives has grown on all ranks")
    return verdict


def _verdict(cause: str, text: str, **evidence: Any) -> SlowdownVerdict:
    return SlowdownVerdict(cause=cause, text=text, evidence=evidence)


def _explain_directly(slowdown: Slowdown, known: Circumstances) -> SlowdownVerdict | None:
    if slowdown.rank is not None:
        return _verdict("one_slow_rank", f"rank {slowdown.rank} is slow in {slowdown.phase}", rank=slowdown.rank)
    if known.saving_after >= _SAVING_SLOW and known.saving_before <= _SAVING_BEFORE:
        text = f"a checkpoint was being written during {100 * known.saving_after:.0f}% of the slow steps"
        return _verdict("checkpoint_interference", text)
    if known.compiles_per_step >= _COMPILES_PER_STEP:
        text = f"torch.compile made new graphs, {known.compiles_per_step:.2g} a step"
        return _verdict("recompilation_storm", text)
    if slowdown.phase == "data":
        grown = slowdown.phases_after["data"] - slowdown.phases_before.get("data", 0.0)
        return _verdict("input_bound", f"the wait for a batch has grown by {1e3 * grown:.3g} ms")
    if slowdown.phase == "checkpoint":
        return _verdict("checkpoint_interference", "the step waits for a checkpoint")
    if known.throttled:
        return _verdict("clocks_throttled", f"the driver reports {clean(known.throttled)}")
    return None


def _explain_profiles(before: TraceSummary, after: TraceSummary, known: Circumstances) -> SlowdownVerdict:
    if before.has_device != after.has_device:
        return _verdict(NOT_ESTABLISHED, "only one of the two traces has kernels of a device")
    if before.rank is not None and after.rank is not None and before.rank != after.rank:
        late = _late_rank(before, after)
        if late is not None:
            return late
    step_before, step_after = before.per_step(before.span), after.per_step(after.span)
    growth = step_after - step_before
    if other := _other_program(before, after):
        return _verdict(NOT_ESTABLISHED, other)
    if growth < _LEAST_GROWTH * step_before:
        swapped = "; if it is the healthy one, give it first" if growth < -_LEAST_GROWTH * step_before else ""
        text = f"the second is not slower: {step_after:.4g} ms a step, and {step_before:.4g} ms before{swapped}"
        return _verdict(NOT_ESTABLISHED, text)
    parts = _parts(before, after)
    shares = {name: round(min(value, growth), 3) for name, value in parts.items() if value > 0}
    seen = {name: shares[name] for name in _SEEN_DIRECTLY if shares.get(name, 0.0) >= _LEAST_PART * growth}
    cause = max(seen or parts, key=lambda name: parts[name])
    if parts[cause] < _LEAST_PART * growth:
        largest = max(CATEGORIES, key=lambda name: _growth(before, after, name))
        text = f"no known cause explains {growth:.3g} ms a step; of the kernels, {largest} has grown most, by "
        return _verdict(NOT_ESTABLISHED, f"{text}{_growth(before, after, largest):.3g} ms", parts_ms=shares)
    if cause == "network_degraded" and before.group_sizes and set(before.group_sizes) != set(after.group_sizes):
        cause, shares["parallelism_crosses_nodes"] = "parallelism_crosses_nodes", shares.pop(cause)
    line = _line_of(cause, before, after, known)
    at = f", at {clean(line)}" if line else ""
    text = f"it explains {shares[cause]:.3g} of {growth:.3g} ms a step{at}"
    return _verdict(cause, text, parts_ms=shares, **({"line": line} if line else {}))


def _growth(before: TraceSummary, after: TraceSummary, name: str) -> float:
    """Return by how many ms of a step a category has grown."""
    return after.per_step(after.seconds.get(name, 0.0)) - before.per_step(before.seconds.get(name, 0.0))


def _count(summary: TraceSummary, number: float) -> float:
    return number / max(1, summary.steps)


def _parts(before: TraceSummary, after: TraceSummary) -> dict[str, float]:
    """Return how many ms of a step each cause would explain."""

    def grown(value_before: float, value_after: float) -> float:
        return after.per_step(value_after) - before.per_step(value_before)

    parts = {
        "network_degraded": grown(before.exposed_collective, after.exposed_collective),
        "recompilation_storm": grown(before.compile_time, after.compile_time)
        if after.compiles > before.compiles
        else 0.0,
        "input_bound": grown(before.loader, after.loader),
        "checkpoint_interference": grown(before.saving, after.saving),
    }
    idle = max(0.0, grown(before.idle, after.idle) - sum(max(0.0, parts[name]) for name in _SEEN_DIRECTLY))
    copies_before = _count(before, before.transfers if before.has_device else before.counts.get(COPY, 0))
    copies_after = _count(after, after.transfers if after.has_device else after.counts.get(COPY, 0))
    operations_before, operations_after = _count(before, before.operators), _count(after, after.operators)
    if copies_after > copies_before + 0.5:
        waits = max(0.0, grown(before.sync, after.sync)) + idle if after.has_device else 0.0
        is_loop = operations_after > 2 * operations_before and copies_after < 2 * copies_before
        parts["host_device_copies"] = 0.0 if is_loop else _growth(before, after, COPY) + waits
    if operations_after > _MORE_OPERATIONS * operations_before:
        small = sum(_growth(before, after, name) for name in (ELEMENTWISE, OTHER))
        small += 0.0 if after.has_device else _growth(before, after, OPTIMIZER)
        new_copies = (copies_after - copies_before) / max(1.0, operations_after - operations_before)
        if new_copies < 0.3 or "host_device_copies" not in parts:
            parts["framework_overhead"] = small + idle
    elif after.has_device and "host_device_copies" not in parts:
        # The device waits because the host takes longer for the same operations.
        parts["framework_overhead"] = min(idle, max(0.0, grown(before.host, after.host)))
    if _is_uniform(before, after):
        parts["clocks_throttled"] = sum(
            _growth(before, after, name) for name in (GEMM, ATTENTION, ELEMENTWISE, OPTIMIZER, OTHER)
        )
    return parts


def _late_rank(before: TraceSummary, after: TraceSummary) -> SlowdownVerdict | None:
    """Return the verdict on traces of two ranks, if one works longer, and the other waits for it in collectives."""
    fast, slow = sorted((before, after), key=lambda each: each.per_step(each.span - each.exposed_collective))
    longer = slow.per_step(slow.span - slow.exposed_collective) - fast.per_step(fast.span - fast.exposed_collective)
    waits = fast.per_step(fast.exposed_collective) - slow.per_step(slow.exposed_collective)
    if longer < _LEAST_GROWTH * fast.per_step(fast.span) or waits < _WAITS * longer:
        return None
    text = f"rank {slow.rank} works {longer:.3g} ms a step longer; rank {fast.rank} waits {waits:.3g} ms more in collectives"
    return _verdict("one_slow_rank", text, rank=slow.rank)


def _other_program(before: TraceSummary, after: TraceSummary) -> str:
    """Return why the traces cannot be compared: those of two programs differ in all that they do. "" if they can."""
    names_before, names_after = set(before.operator_names), set(after.operator_names)
    if len(names_before) >= _LEAST_NAMES and names_after:
        share = len(names_before & names_after) / len(names_before)
        if share < _SAME_NAMES:
            return (
                f"the second has {100 * share:.0f}% of the first one's operators only: it is another program or model"
            )
    products_before, products_after = (_count(each, each.counts.get(GEMM, 0)) for each in (before, after))
    if min(products_before, products_after) and products_after > _MORE_OPERATIONS * products_before:
        ratio = products_after / products_before
        all_before, all_after = (_count(each, each.operators or sum(each.counts.values())) for each in (before, after))
        if 1 / _ALIKE <= ratio * all_before / max(1.0, all_after) <= _ALIKE:
            marks = (
                ""
                if before.has_steps and after.has_steps
                else " (the traces do not both say how many steps they cover)"
            )
            return (
                f"it does more work of every kind, such as {products_after:.4g} matrix products a step instead of "
                f"{products_before:.4g}{marks}: other layers, micro-batches or steps"
            )
    if before.blocks and after.blocks:
        ratio = _count(after, after.blocks) / _count(before, before.blocks)
        if ratio > _MORE_OPERATIONS and all(
            abs(_count(after, after.counts.get(name, 0)) - _count(before, before.counts.get(name, 0)))
            <= _SAME_COUNT * _count(before, before.counts.get(name, 0))
            for name in (GEMM, ELEMENTWISE)
        ):
            return f"the same kernels have {ratio:.3g} times as many blocks: larger batches or longer sequences"
    return ""


def _is_uniform(before: TraceSummary, after: TraceSummary) -> bool:
    """Return whether the same kernels run as often as before, and all take longer by about the same factor."""
    ratios: list[float] = []
    products: list[float] = []
    for name in (GEMM, ATTENTION, ELEMENTWISE, OPTIMIZER):
        old, new = before.counts.get(name, 0) / max(1, before.steps), after.counts.get(name, 0) / max(1, after.steps)
        if abs(new - old) > _SAME_COUNT * max(old, new):
            return False
        time_before, time_after = (
            before.per_step(before.seconds.get(name, 0.0)),
            after.per_step(after.seconds.get(name, 0.0)),
        )
        if time_before > 0.1 * before.per_step(before.kernel_time):
            ratios.append(time_after / time_before)
            products += ratios[-1:] if name in (GEMM, ATTENTION) else []
    if not ratios or max(ratios) < _UNIFORM_LEAST:
        return False
    if min(ratios) >= _UNIFORM_LEAST and min(ratios) - 1 >= _UNIFORM_BAND * (max(ratios) - 1):
        return True
    # Lower clocks of the cores need not slow down what waits for memory. That the work is the same must then be known.
    is_same_work = before.blocks > 0 and _count(after, after.blocks) <= (1 + _SAME_COUNT) * _count(
        before, before.blocks
    )
    return is_same_work and bool(products) and min(products) >= _UNIFORM_LEAST and min(ratios) >= 1 - _SAME_COUNT


def _line_of(cause: str, before: TraceSummary, after: TraceSummary, known: Circumstances) -> str:
    if cause == "host_device_copies":
        if known.new_copies:
            return known.new_copies[0]
        grown = {
            name: seconds / max(1, after.steps) - before.copy_lines.get(name, (0.0, 0))[0] / max(1, before.steps)
            for name, (seconds, _) in after.copy_lines.items()
        }
        return max(grown, key=lambda name: grown[name]) if grown else ""
    if cause == "framework_overhead":
        return known.new_lines[0] if known.new_lines else ""
    return ""


def render(
    changes: list[Change], verdict: SlowdownVerdict | None = None, title: str = "Profile", steps: tuple[str, ...] = ()
) -> str:
    """Return a comparison as markdown. steps: of how many steps each profile is."""
    lines = [f"# {title}", ""]
    if verdict is not None:
        lines += [
            f"Cause: **{verdict.cause.replace('_', ' ')}**: {verdict.text}.",
            "",
            f"What to do: {verdict.advice}.",
            "",
        ]
    if steps:
        lines += [f"Steps: {steps[0]} before, {steps[1]} after.", ""]
    lines += [
        "| per step | before, ms | after, ms | change, ms | count before | after |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in changes:
        lines.append(
            f"| {row.name} | {row.before:.3f} | {row.after:.3f} | {row.after - row.before:+.3f} | {row.count_before:.1f} "
            f"| {row.count_after:.1f} |"
        )
    return "\n".join(lines) + "\n"


def render_summary(summary: TraceSummary) -> str:
    """Return one profile as markdown: the time of each category, and the longest kernels."""
    what = "kernels of the device" if summary.has_device else "operators on the host"
    lines = [f"# Profile of {summary.steps} steps: {what}", "", "| Category | Time (s) | % |", "|---|---:|---:|"]
    total = max(summary.kernel_time, 1e-9)
    for name, value in sorted(summary.seconds.items(), key=lambda item: -item[1]):
        lines.append(f"| {_TITLES[name]} | {value / 1e6:.3f} | {100 * value / total:.1f} |")
    lines += [f"| **Total** | {total / 1e6:.3f} | 100.0 |", ""]
    lines.append(
        f"Span {summary.span / 1e6:.3f} s, idle {summary.idle / 1e6:.3f} s; {summary.operators} operators on the host."
    )
    if summary.has_device:
        lines.append(
            f"Communication: {summary.exposed_collective / 1e6:.3f} s exposed, {summary.overlapped_collective / 1e6:.3f} s "
            f"overlapped; {summary.launches} launches."
        )
    lines += ["", "| Name | Time (ms) | Count |", "|---|---:|---:|"]
    for name, (value, count) in list(summary.names.items())[:15]:
        shown = clean(name).replace("|", "/")
        lines.append(f"| {shown[:100]} | {value / 1e3:.2f} | {count} |")
    return "\n".join(lines) + "\n"


_TITLES = {
    GEMM: "MatMul/GEMM",
    ATTENTION: "Attention",
    COLLECTIVE: "Communication (NCCL)",
    COPY: "Memory ops",
    OPTIMIZER: "Optimizer",
    ELEMENTWISE: "Elementwise",
    OTHER: "Other kernels",
}
