"""Controlled real runs: the reference model on a CPU, watched and not healed, with one fault put in at a step.

Whether a fault did harm is not taken on faith: each run has a twin with the same seed and data and no fault. A run whose
loss never leaves its twin's is shown as harmless and counts for nothing. Where the fault has no step of its own (a bad
beta2), the twin gives the onset. Runs without a fault are for false alarms.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.detectors.contenders import Contender
from benchmarks.detectors.healthy_run import Curve, Event
from benchmarks.detectors.scoring import judge
from holdfast.core.base.types import Outcome, Signal

STEPS = 260
NEAR = 60
"""an alarm this many steps after the onset still finds it"""
_MORE = ("update_rms", "weight_norm", "loss_scale")
SIZE = {"layers": 2, "width": 64, "heads": 4, "context": 64}
"""of the model: that of configs/tiny.toml takes a minute a run, this one a few seconds"""


class Plan(NamedTuple):
    """One run to make: what is wrong with it, at which step, and what differs from the twin."""

    name: str
    seed: int
    fault: tuple[str, tuple[Any, ...]] | None = None
    keys: tuple[str, ...] = ()
    """overrides of the configuration that the twin has too"""
    bad: tuple[str, ...] = ()
    """and those that it has not"""

    @property
    def at(self) -> int | None:
        """The entry of the curve that the fault strikes at: steps count from 1, entries from 0."""
        return None if self.fault is None else int(self.fault[1][0]) - 1

    @property
    def twin(self) -> Plan:
        return Plan("clean", self.seed, None, self.keys)

    @property
    def clean(self) -> bool:
        return self.fault is None and not self.bad


FP16 = ("train.precision=fp16",)
CLEAN = tuple(
    Plan("clean", seed, None, keys)
    for seed, keys in (
        (0, ()),
        (1, ()),
        (2, ("scheduler.kind=wsd",)),
        (3, ("scheduler.kind=constant", "optimizer.lr=1e-3")),
        (4, ("train.batch_size=4",)),
        (5, ("optimizer.lr=1e-2", "scheduler.warmup_steps=10")),
    )
)
FAULTS = (
    *(Plan(f"LR x{factor:g}", seed, ("LrTimes", (150, factor))) for seed, factor in ((0, 10.0), (1, 30.0), (0, 100.0))),
    Plan("LR x300 once", 1, ("LrJump", (180,))),
    Plan("beta2 0.9999", 0, None, (), ("optimizer.beta2=0.9999", "scheduler.warmup_steps=2", "optimizer.lr=2e-2")),
    Plan("shuffled labels", 0, ("ShuffledLabels", (120,))),
    Plan("shuffled labels", 1, ("ShuffledLabels", (220,))),
    Plan("repeated n-grams", 0, ("RepeatedNgrams", (150, 30))),
    Plan("repeated n-grams", 1, ("RepeatedNgrams", (200, 10, 2))),
    *(
        Plan(f"bit {bit} flips", seed, ("BitFlips", (140, count, bit)))
        for seed, count, bit in ((0, 1, 30), (1, 4000, 25))
    ),
    Plan("garbage data", 0, ("GarbageData", (160,))),
    Plan("corrupted optimizer", 1, ("CorruptOptimizer", (130,))),
    Plan("NaN batch", 0, ("NanBatch", (100,))),
    Plan("Inf gradient", 1, ("InfGradient", (170,))),
    Plan("fp16 overflow", 0, ("ForwardOverflow", (150,)), FP16),
)


def rows(
    contenders: Iterable[Contender], workers: int, quick: bool
) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """Make the runs, score everyone on them; rows of the table and the numbers behind them."""
    faults, clean = (FAULTS[::4], CLEAN[:2]) if quick else (FAULTS, CLEAN)
    curves = record([*clean, *faults], workers)
    table: dict[str, dict[str, str]] = {}
    data: dict[str, Any] = {"runs": {_title(plan, curve): len(curve) for plan, curve in curves}, "detectors": {}}
    for contender in contenders:
        detector, into = contender.build(), {}
        hits, events, false = 0, 0, [0, 0]
        for plan, curve in curves:
            verdict = judge(curve, detector.run(curve))
            if plan.clean:
                false[0] += verdict.false_costly
                false[1] += verdict.false_cheap
                continue
            title = _title(plan, curve)
            if verdict.found:
                events += 1
                latency = into[title] = verdict.found[0].any
                hits += latency is not None
                cell = "missed" if latency is None else str(latency)
            else:
                cell = "alarm" if verdict.false_costly or verdict.false_cheap else "quiet"
            table.setdefault(f"run: {title}", {})[contender.name] = cell
        table.setdefault(f"runs: found of {events}", {})[contender.name] = str(hits)
        steps = sum(len(curve) for plan, curve in curves if plan.clean)
        title = f"runs: false in {steps} clean steps, costly/cheap"
        table.setdefault(title, {})[contender.name] = f"{false[0]}/{false[1]}"
        data["detectors"][contender.name] = {"latency": into, "found": hits, "events": events, "false": false}
    return table, data


def _title(plan: Plan, curve: Curve) -> str:
    return f"{plan.name}, seed {plan.seed}" + ("" if plan.clean or curve.events else " (harmless)")


def record(plans: list[Plan], workers: int) -> list[tuple[Plan, Curve]]:
    """Every run and, once each, the twins they need; in the order of the plans."""
    needed = list(dict.fromkeys([*plans, *(plan.twin for plan in plans)]))
    # An executor says so when a worker dies of a signal; a Pool would wait for it for ever.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = dict(zip(needed, pool.map(make, needed), strict=True))
    return [(plan, label(plan, made[plan], made[plan.twin])) for plan in plans]


def label(plan: Plan, curve: Curve, twin: Curve) -> Curve:
    """The run with its event, if its fault did harm."""
    if plan.clean:
        return curve
    onset = harmed(curve, twin, plan.at)
    if onset is not None:
        start = onset if plan.at is None else plan.at
        curve.events.append(Event(plan.name, start, min(len(curve) - 1, onset + NEAR)))
    return curve


def harmed(curve: Curve, twin: Curve, since: int | None) -> int | None:
    """The first step where the run is worse than its twin, by a tenth and by far more than they differed before.

    In means of five steps: one bad batch of a run that goes on as its twin does is no harm.

    A step with a number that is not finite, or an overflow, is worse by itself.
    """
    begin, n = since or 0, min(len(curve), len(twin))
    broken = ~np.isfinite(curve.loss) | ~np.isfinite(curve.grad_norm)
    loss = _smooth(np.nan_to_num(curve.loss[:n], posinf=1e9), 5)
    usual_loss = _smooth(twin.loss[:n], 5)
    apart = loss - usual_loss
    usual = np.std(apart[max(0, begin - 50) : begin]) if since else 0.0
    worse = apart > np.maximum(0.1 * usual_loss, 6 * usual)
    # A worse start is not an instability: without a step of its own, a fault has to undo what was learned.
    if since is None:
        worse &= loss > 1.25 * np.minimum.accumulate(loss)
    first = [int(np.argmax(part)) for part in (broken[begin:], worse[begin:]) if part.any()]
    return begin + min(first) if first else None


def _smooth(values: Any, steps: int) -> Any:
    padded = np.concatenate([np.full(steps - 1, values[0]), values])
    return np.convolve(padded, np.ones(steps) / steps, mode="valid")


def make(plan: Plan) -> Curve:
    """Train once, in observe mode, and return what was measured. Entry i is step i + 1 of the run."""
    import torch

    from holdfast.drill.fault_schedule import FaultSchedule
    from holdfast.reference.trainer import build

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = _config(plan, Path(folder) / "run")
        schedule = None if plan.fault is None else FaultSchedule([_fault(plan.fault)], config.train.batch_size)
        ears = _Ears()
        build(config, faults=schedule).run(hooks=[ears])
    return curve_of(plan.name, plan.seed, ears.signals)


def _config(plan: Plan, run_dir: Path) -> Any:
    from holdfast.core.base.config import override, read_toml
    from holdfast.reference.config import PACKAGED, parse

    data = read_toml(PACKAGED / "tiny.toml")
    data["model"] = {**data.get("model", {}), **SIZE}
    data["train"] = {**data["train"], "run_dir": str(run_dir), "steps": STEPS, "batch_size": 8, "threads": 1}
    data["train"]["seed"] = plan.seed
    data["eval"] = {"every": 0, "batches": 1}
    data["recover"] = {"mode": "observe"}
    data["snapshot"] = {"enabled": False}
    return parse(override(data, [*plan.keys, *plan.bad]), "benchmark")


def _fault(named: tuple[str, tuple[Any, ...]]) -> Any:
    from benchmarks.detectors import faults
    from holdfast.drill import fault_schedule

    name, arguments = named
    return (getattr(faults, name, None) or getattr(fault_schedule, name))(*arguments)


class _Ears:
    """Collects every settled step's numbers."""

    def __init__(self) -> None:
        self.signals: list[Signal] = []

    def on_step_end(self, outcome: Outcome) -> None:
        self.signals.append(outcome.signal)


def curve_of(kind: str, seed: int, signals: Sequence[Signal]) -> Curve:
    """Return a run as a curve. Entry i is signal i."""

    def column(name: str) -> Any:
        return np.array([getattr(s, name) for s in signals], dtype=float)

    # As objects: None stays apart from NaN. Weight norms are rarely measured, and a NaN among them is a state jump.
    more = {name: np.array([getattr(s, name) for s in signals], dtype=object) for name in _MORE}
    more = {name: values for name, values in more.items() if any(value is not None for value in values)}
    overflow = np.array([s.overflow for s in signals]) if "loss_scale" in more else None
    return Curve(kind, seed, column("loss"), column("grad_norm"), column("lr"), more=more, overflow=overflow)
