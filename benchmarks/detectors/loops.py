"""Clean losses of real training loops: how often each rule alarms on them, and how often the guard would return.

The loops are those of benchmarks/experiments. They run in observe mode: the guard measures and judges every step and
changes nothing, so the signals are those of the unguarded run. Nothing is wrong in any of them: every alarm is false. An
alarm alone changes nothing in a guarded run either. It costs something if it leads to a return: the first experiment, or the
answer to a state jump.

Nothing is disarmed in observe mode. A guarded run disarms a loss whose rise it has accepted, so it returns less often.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.detectors.bars import Bar
from benchmarks.detectors.contenders import OURS, Contender
from benchmarks.detectors.curves import SEEDS
from benchmarks.detectors.runs import curve_of
from benchmarks.detectors.scoring import Score, judge, latched
from benchmarks.experiments.training import run_all, run_folder, train
from benchmarks.experiments.workloads import build

KINDS = ("multi_task", "gan", "dqn", "policy_gradient", "vae", "triplet", "moe", "curriculum", "continual", "rlhf")
STEPS = 4000
OBSERVE = {"recover": {"mode": "observe"}, "snapshot": {"enabled": False}}


def measure(kind: str, seed: int, steps: int, contenders: tuple[Contender, ...]) -> dict[str, Any]:
    """Train one loop. Return the verdict of every rule and what the guard would have done."""
    with run_folder(None) as folder:
        result = train(build(kind, seed), steps, folder, OBSERVE)
    curve = curve_of(kind, seed, list(result.signals.values()))
    plans = [(event["step"], would_do(event)) for event in result.events if event.get("by") == "observe"]
    return {
        "kind": kind,
        "seed": seed,
        "finite_steps": sum(math.isfinite(loss) for loss in curve.loss.tolist()),
        "verdicts": {contender: judge(curve, contender.build().run(curve)) for contender in contenders},
        "returns": latched(step for step, action in plans if action == "rollback"),
        "other_actions": sorted({action for _, action in plans} - {"rollback"}),
        "note": f"{result.seconds:.1f} s",
    }


def would_do(event: Mapping[str, Any]) -> str:
    """Return the actions of a plan of observe mode, from its reason: `observe only; would rollback: ...`."""
    return str(event["reason"]).removeprefix("observe only; would ").partition(":")[0]


def rows(
    contenders: Iterable[Contender], workers: int, seeds: str, quick: bool, steps: int = STEPS
) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """Train all loops; rows of the table, in alarms per 1,000 steps, and the numbers behind them."""
    entered, chosen = tuple(contenders), SEEDS[seeds]["loop"][: 1 if quick else None]
    found = run_all(measure, [(kind, seed, steps, entered) for kind in KINDS for seed in chosen], workers)
    table, kinds = tabulate(found, entered)
    return table, {"steps": steps, "seeds": list(chosen), "kinds": kinds}


def tabulate(
    loops: Sequence[Mapping[str, Any]], contenders: Iterable[Contender]
) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """Return the rows of the table and the numbers of each kind. Alarms within 50 steps of the one before count once."""
    table: dict[str, dict[str, str]] = {}
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(row["kind"] for row in loops):
        own = [row for row in loops if row["kind"] == kind]
        alarms: dict[str, dict[str, float]] = {}
        for contender in contenders:
            score = Score(contender.name, verdicts=[row["verdicts"][contender] for row in own])
            sorts = {"costly": True, "cheap": False}
            alarms[contender.name] = {sort: score.false(costly).value / 10 for sort, costly in sorts.items()}
        cells = {name: f"{sum(rates.values()):.2f}" for name, rates in alarms.items()}
        if OURS in alarms:
            cells[f"{OURS} costly"] = f"{alarms[OURS]['costly']:.2f}"
        returns = [row["returns"] for row in own]
        table[f"loop {kind}: alarms/1k ({sum(returns)} returns)"] = cells
        kinds[kind] = {
            "alarms_per_1000": alarms,
            "returns": returns,
            "finite_steps": [row["finite_steps"] for row in own],
            "other_actions": sorted({action for row in own for action in row["other_actions"]}),
        }
    return table, kinds


def bars(data: Mapping[str, Any]) -> list[Bar]:
    """The loops are what they claim to be, and the guard would answer their alarms by returns alone."""
    kinds = data["kinds"]
    short = [kind for kind in kinds if set(kinds[kind]["finite_steps"]) != {data["steps"]}]
    other = [f"{kind}: {', '.join(kinds[kind]['other_actions'])}" for kind in kinds if kinds[kind]["other_actions"]]
    return [
        Bar("clean loops: all steps recorded, all losses finite", "; ".join(short) or "all", not short),
        Bar("clean loops: no skip, LR cut or stop would follow", "; ".join(other) or "none", not other),
    ]
