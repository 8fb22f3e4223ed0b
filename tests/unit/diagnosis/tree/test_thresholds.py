"""Every threshold of tree.toml has a run just below and a run just above it, with different answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from leaf_cases import INF, NAN, jump, put, with_episode
from synthetic import N, episode, noise, run, table

from holdfast.diagnosis.diagnose import find_machine_episodes
from holdfast.diagnosis.model.trend import Trend, fit_trend
from holdfast.diagnosis.tree.load import load_tree

ROWS = np.arange(N)
RIPPLE = 1.9 + 0.1 * (ROWS % 3)  # median 2, standard deviation 0.148 from the median absolute deviation
QUIET_NORM = np.full(N, 0.3)
ORDERED, INVERTED = [1, 2, 3, 4, 5, 6, 7, 8], [2, 1, 4, 3, 6, 5, 8, 7]  # Mann-Kendall z: 3.3 and 2.4


def full(x: float, n: int = N) -> np.ndarray:
    return np.full(n, float(x))


def from_row(row: int, before: Any, after: Any) -> np.ndarray:
    return np.where(row > ROWS, before, after)


def spike_at_300(**columns: Any) -> tuple[Any, Any]:
    return with_episode("spike", 300, 300, **columns)


def slow(name: str, values: Any, first: int = 0) -> tuple[Any, Any]:
    made = table(loss=np.full(len(values), 2.0), **{name: values}) if name != "loss" else table(loss=values)
    return made, episode(made, "silent_divergence", first, len(values) - 1)


def ramped(x: float, n: int = 200) -> np.ndarray:
    """Level 1 in the middle, and a rise of x from first to last."""
    return 1.0 + x * (np.arange(n) / (n - 1) - 0.5)


def few_logged(count: int, **columns: Any) -> Any:
    made = run(**columns)
    for name in columns:
        if name in made.present:
            made.present[name] = count > ROWS
    return made


def sparse(name: str, records: int, end: float = 3.0) -> tuple[Any, Any]:
    """100 steps between records, and a change in the last `records`: many steps, but few records."""
    values = np.r_[full(1.0, 100 - records), np.linspace(1.0, end, records)]
    made, where = slow(name, values, first=98)
    made.step = 100.0 * np.arange(100)
    where.start, where.end = 9800.0, 9900.0
    return made, where


def climb_before_nan(loss: Any = RIPPLE, norm: Any = QUIET_NORM, at: int = 390) -> tuple[Any, Any]:
    return with_episode("nan", at, N - 1, loss=put(loss, slice(at, None), NAN), grad_norm=norm)


def lr_before_300(rates: list[float]) -> tuple[Any, Any]:
    return spike_at_300(lr=np.r_[full(rates[0], 301 - len(rates)), rates, full(rates[-1], 99)])


def lead(*norms: float, baseline: np.ndarray = QUIET_NORM) -> tuple[Any, Any]:
    return jump(300, 310, 4.0, "spike_recovered", loss=from_row(300, 2.0, 6.0), grad_norm=put(
        baseline, slice(300 - len(norms), 300), norms))  # fmt: skip


def evaluations(values: Any) -> Any:
    steps = np.linspace(100, 390, len(values))
    return run(loss=full(2.0), evals={"eval_loss": (steps, 2.0 * np.asarray(values))})


def accuracy(*values: float) -> Any:
    return run(evals={"eval_accuracy": (np.linspace(100, 390, len(values)), values)})


def duplicate(distance: int) -> tuple[Any, Any]:
    prints = np.arange(3000) * 7919.0 + 2**30
    made = table(loss=full(2.0, 3000), batch_fingerprint=put(prints, 2500, prints[2500 - distance]))
    return made, episode(made, "spike_recovered", 2500, 2500)


def ranks(x: float, records: int = N) -> Any:
    columns = {f"rank{r}_seconds": full(x if r == 2 else 1.0) for r in range(3)}
    return few_logged(records, **columns)


def drops(x: float, length: int = 200, before: int = 180) -> str:
    seconds = np.r_[full(0.5, before + 20), full(0.5 * x, length), full(0.5, 60)]
    found = find_machine_episodes(table(seconds=seconds), load_tree())
    return "yes" if [e.kind for e in found] == ["throughput_drop"] else "no"


def memory(x: float) -> np.ndarray:
    return 20.0 * (1.0 + x * ROWS / N)


def stepped(k: int) -> np.ndarray:
    """Return a steady rise under a saw-tooth of k records: only one pair of records in k shows the rise."""
    return memory(10.0) + 300.0 * (ROWS % k)


def drifting(scale: float, measure: Callable[[Trend], float], target: float) -> np.ndarray:
    """Return noise with the smallest drift whose trend measures at least `target`."""
    base, line = 1.0 + noise(scale, 1, 120), np.linspace(-0.5, 0.5, 120)
    drifts = (base + drift * line for drift in scale * np.linspace(-3.0, 3.0, 601))
    return next(values for values in drifts if measure(fit_trend(values)) >= target)


BOUNDARIES: list[tuple[str, str, Callable[[Any], Any], dict[Any, str]]] = [
    ("nan_passes", "records", lambda k: with_episode(
        "nan", 300, 300, loss=put(put(RIPPLE, 300, NAN), 300 + k, NAN)), {40: "no", 60: "yes"}),
    ("climbed_before_nan", "loss_sigmas", lambda x: climb_before_nan(
        put(RIPPLE, slice(385, 390), 2.0 + x * 0.14826)), {6.5: "no", 9.5: "yes"}),
    ("climbed_before_nan", "grad_ratio", lambda x: climb_before_nan(
        norm=put(QUIET_NORM, 389, 0.3 * x)), {8: "no", 12: "yes"}),
    ("climbed_before_nan", "rise", lambda x: climb_before_nan(RIPPLE * from_row(200, 1.0, 1.0 + x)),
     {0.15: "no", 0.4: "yes"}),
    ("climbed_before_nan", "records", lambda k: climb_before_nan(RIPPLE + from_row(390 - k, 0.0, 1.0)),
     {25: "no", 40: "yes"}),
    ("scale_collapsed", "least", lambda x: run(loss_scale=full(x)), {1.2: "no", 0.8: "yes"}),
    ("scale_constant", "records", lambda n: few_logged(n, loss_scale=full(1024)), {80: "unknown", 120: "yes"}),
    ("overflows_persist", "in_a_row", lambda n: run(
        loss_scale=full(1024), grad_norm=put(QUIET_NORM, slice(100, 100 + n), INF)), {8: "no", 12: "yes"}),
    ("overflows_persist", "share", lambda n: run(
        loss_scale=full(1024), grad_norm=put(QUIET_NORM, slice(0, 2 * n, 2), INF)), {30: "no", 60: "yes"}),
    ("lr_jumped", "ratio", lambda x: lr_before_300([1e-4] * 20 + [x * 1e-4]), {1.4: "no", 1.6: "yes"}),
    ("lr_jumped", "times_usual", lambda x: lr_before_300([1e-6 * i for i in range(3, 13)] + [1e-6 * (12 + x)]),
     {8: "no", 12: "yes"}),
    ("lr_jumped", "steady", lambda k: lr_before_300([1e-3] * 10 + [5e-4] * k + [1e-3]), {6: "no", 12: "yes"}),
    ("lr_jumped", "records", lambda k: spike_at_300(lr=from_row(300 - k, 1e-4, 1e-3)), {35: "no", 18: "yes"}),
    ("at_restart", "records", lambda k: spike_at_300(step=ROWS - from_row(300 - k, 0, 50)), {5: "no", 2: "yes"}),
    ("duplicate_batch", "records", duplicate, {1200: "no", 900: "yes"}),
    ("batch_changed", "share", lambda x: spike_at_300(batch_size=from_row(300, 100, 100 * (1 + x))),
     {0.15: "no", 0.25: "yes"}),
    ("batch_changed", "records", lambda k: spike_at_300(batch_size=from_row(300 - k, 100, 200)), {15: "no", 8: "yes"}),
    ("gradient_leads", "ratio", lambda x: lead(0.3 * x, 6.0), {2.5: "no", 3.5: "yes"}),
    ("gradient_leads", "lead", lambda n: lead(*[6.0] * n), {1: "no", 2: "yes"}),
    ("gradient_leads", "growth", lambda x: lead(2.0, 0.3 * x), {8: "no", 12: "yes"}),
    ("gradient_leads", "records", lambda k: lead(6.0, 6.0, baseline=from_row(280 - k, 3.0, 0.3)), {30: "no", 70: "yes"}),
    ("spike_lasts", "records", lambda n: jump(300, 310, 0.0, "spike_recovered", loss=put(
        RIPPLE, slice(300, 300 + n), 6.0)), {4: "no", 6: "yes"}),
    ("grad_norm_far_above", "ratio", lambda x: spike_at_300(grad_norm=put(QUIET_NORM, 300, 0.3 * x)),
     {25: "no", 35: "yes"}),
    ("grad_norm_far_above", "records", lambda k: spike_at_300(grad_norm=put(from_row(300 - k, 3.0, 0.3), 300, 30.0)),
     {60: "no", 97: "yes"}),
    ("at_epoch_boundary", "records", lambda k: spike_at_300(epoch=from_row(300 - k, 0.9, 1.1)), {5: "no", 2: "yes"}),
    ("loss_at_uniform", "share", lambda x: spike_at_300(
        loss=full(math.log(50257) * (1 + x)), facts={"vocab_size": 50257}), {0.04: "no", 0.02: "yes"}),
    ("loss_trends_up", "rise", lambda x: slow("loss", ramped(x)), {0.004: "no", 0.007: "yes"}),
    ("loss_trends_up", "z", lambda values: slow("loss", np.array(values)), {tuple(INVERTED): "no", tuple(ORDERED): "yes"}),
    ("loss_trends_up", "steps", lambda k: slow("loss", np.r_[full(1, 399 - k), ramped(1.0, k)], 395),
     {60: "no", 150: "yes"}),
    ("loss_trends_up", "least", lambda n: sparse("loss", n), {6: "no", 10: "yes"}),
    ("grad_norm_trends_up", "rise", lambda x: slow("grad_norm", ramped(x)), {0.08: "no", 0.13: "yes"}),
    ("grad_norm_trends_up", "z", lambda values: slow("grad_norm", np.array(values)),
     {tuple(INVERTED): "no", tuple(ORDERED): "yes"}),
    ("grad_norm_trends_up", "steps", lambda k: slow("grad_norm", np.r_[full(1, 399 - k), ramped(1.0, k)], 395),
     {60: "no", 150: "yes"}),
    ("grad_norm_trends_up", "least", lambda n: sparse("grad_norm", n), {6: "no", 10: "yes"}),
    ("lr_rising", "rise", lambda x: slow("lr", ramped(x)), {0.015: "no", 0.03: "yes"}),
    ("lr_rising", "z", lambda values: slow("lr", np.array(values)), {tuple(INVERTED): "no", tuple(ORDERED): "yes"}),
    ("lr_rising", "steps", lambda k: slow("lr", np.r_[full(1, 399 - k), ramped(1.0, k)], 395), {60: "no", 150: "yes"}),
    ("lr_rising", "least", lambda n: sparse("lr", n), {6: "no", 10: "yes"}),
    ("weight_norm_grew", "ratio", lambda x: slow("weight_norm", np.geomspace(1, x, 200)), {1.7: "no", 2.6: "yes"}),
    ("weight_norm_grew", "steps", lambda k: slow("weight_norm", np.r_[full(1, 399 - k), full(3, k)], 395),
     {250: "no", 150: "yes"}),
    ("weight_norm_grew", "least", lambda n: sparse("weight_norm", n), {30: "no", 15: "yes"}),
    ("weight_norm_fell", "ratio", lambda x: slow("weight_norm", np.geomspace(x, 1, 200)), {1.7: "no", 2.6: "yes"}),
    ("weight_norm_fell", "steps", lambda k: slow("weight_norm", np.r_[full(3, 399 - k), full(1, k)], 395),
     {250: "no", 150: "yes"}),
    ("weight_norm_fell", "least", lambda n: sparse("weight_norm", n, 0.45), {30: "no", 15: "yes"}),
    ("loss_level", "rise", lambda x: slow("loss", drifting(0.05, lambda trend: trend.relative_rise, x)),
     {0.008: "yes", 0.013: "no"}),
    ("loss_level", "z", lambda x: slow("loss", drifting(0.001, lambda trend: trend.z, x)), {1.5: "yes", 2.5: "no"}),
    ("loss_level", "least", lambda n: slow("loss", drifting(0.05, lambda trend: trend.relative_rise, 0.0)[:n]),
     {80: "unknown", 110: "yes"}),
    ("all_zero", "records", lambda n: few_logged(n, loss=full(0), grad_norm=full(0), lr=full(0)),
     {8: "unknown", 12: "yes"}),
    ("loss_constant", "records", lambda n: few_logged(n, loss=full(3)), {15: "unknown", 25: "yes"}),
    ("allocated_rises", "share", lambda x: run(memory_allocated=memory(x)), {0.05: "no", 0.08: "yes"}),
    ("allocated_rises", "z", lambda k: few_logged(130, memory_allocated=stepped(k)), {5: "no", 3: "yes"}),
    ("allocated_rises", "records", lambda n: few_logged(n, memory_allocated=memory(1.0)), {80: "unknown", 120: "yes"}),
    ("reserved_grows_apart", "share", lambda x: run(memory_allocated=full(20), memory_reserved=20 + memory(x)),
     {0.1: "no", 0.16: "yes"}),
    ("reserved_grows_apart", "z", lambda k: few_logged(130, memory_allocated=full(20), memory_reserved=stepped(k)),
     {5: "no", 3: "yes"}),
    ("reserved_grows_apart", "records", lambda n: few_logged(n, memory_allocated=full(20), memory_reserved=memory(1.0)),
     {80: "unknown", 120: "yes"}),
    ("data_wait_grew", "share", lambda x: with_episode(
        "throughput_drop", 200, N - 1, seconds=from_row(200, 1.0, 2.0), data_time=from_row(200, 0.1, 0.1 + x)),
     {0.4: "no", 0.6: "yes"}),
    ("one_rank_slow", "ratio", ranks, {1.4: "no", 1.6: "yes"}),
    ("one_rank_slow", "records", lambda n: ranks(3.0, n), {15: "no", 25: "yes"}),
    ("gradients_vanish", "mean_abs", lambda x: run(grad_abs_mean=full(x)), {1.5e-7: "no", 0.7e-7: "yes"}),
    ("gradients_vanish", "ratio", lambda x: run(**{"grad/layers.0": full(x), "grad/layers.9": full(1)}),
     {1.5e-3: "no", 0.7e-3: "yes"}),
    ("layers_explode", "ratio", lambda x: run(**{"grad/layers.0": full(x), "grad/layers.9": full(1)}),
     {60: "no", 80: "yes"}),
    ("updates_too_large", "most", lambda x: run(update_ratio=full(x)), {0.08: "no", 0.12: "yes"}),
    ("updates_too_small", "least", lambda x: run(update_ratio=full(x)), {1.5e-8: "no", 0.7e-8: "yes"}),
    ("parameters_unchanged", "most", lambda x: run(unchanged_parameters=full(x)), {0: "no", 1: "yes"}),
    ("replicas_differ", "most", lambda x: run(replica_difference=full(x)), {0: "no", 1e-6: "yes"}),
    ("ranks_same_data", "most", lambda x: run(shared_batches=full(x)), {0: "no", 1: "yes"}),
    ("gradients_pile_up", "rise", lambda x: run(loss=RIPPLE, grad_norm=1.0 + (x - 1.0) * ROWS / (N - 1)),
     {8: "no", 14: "yes"}),
    ("gradients_pile_up", "records", lambda n: few_logged(n, loss=RIPPLE, grad_norm=1.0 + ROWS), {40: "unknown", 60: "yes"}),
    ("gradients_pile_up", "fit", lambda p: run(loss=RIPPLE, grad_norm=0.01 + (ROWS / N) ** p), {4: "no", 1.2: "yes"}),
    ("lr_frozen", "records", lambda n: few_logged(n, lr=full(1e-3), facts={"scheduler": "cosine"}),
     {80: "unknown", 120: "yes"}),
    ("lr_zero", "records", lambda n: few_logged(n, lr=full(0)), {15: "unknown", 25: "yes"}),
    ("lr_out_of_range", "high", lambda x: run(lr=full(x)), {0.8e-2: "no", 1.3e-2: "yes"}),
    ("lr_out_of_range", "low", lambda x: run(lr=full(x)), {1.3e-7: "no", 0.8e-7: "yes"}),
    ("lr_out_of_range", "records", lambda n: few_logged(n, lr=full(1.0)), {15: "unknown", 25: "yes"}),
    ("padding_share", "share", lambda x: run(pad_share=full(x)), {0.4: "no", 0.6: "yes"}),
    ("loss_negative", "share", lambda x: run(loss=np.where(x * N > ROWS, -1.0, 1.0)), {0.08: "no", 0.12: "yes"}),
    ("loss_negative", "records", lambda n: few_logged(n, loss=full(-1)), {15: "unknown", 25: "yes"}),
    ("loss_huge", "most", lambda x: run(loss=full(x)), {800: "no", 1300: "yes"}),
    ("loss_huge", "records", lambda n: few_logged(n, loss=full(1e4)), {15: "unknown", 25: "yes"}),
    ("perplexity_too_good", "least", lambda x: run(perplexity=full(x)), {1.07: "no", 1.03: "yes"}),
    ("val_better_than_train", "gap", lambda x: evaluations([1 - x] * 9), {0.3: "no", 0.5: "yes"}),
    ("val_better_than_train", "evaluations", lambda n: evaluations([0.2] * n), {2: "unknown", 4: "yes"}),
    ("gap_grows", "gap", lambda x: evaluations(np.linspace(1.0, 1.0 + x, 12)), {0.08: "no", 0.15: "yes"}),
    ("gap_grows", "z", lambda values: evaluations(1.0 + np.array(values) / 10),
     {(1, 5, 2, 7, 3, 8, 4, 6): "no", tuple(INVERTED): "yes"}),
    ("gap_grows", "evaluations", lambda n: evaluations(np.linspace(1.0, 1.6, n)), {7: "unknown", 9: "yes"}),
    ("eval_worse", "share", lambda x: accuracy(*np.linspace(0.5, 0.5 * (1 - x), 8), *[0.5 * (1 - x)] * 2),
     {0.08: "no", 0.12: "yes"}),
    ("eval_worse", "evaluations", lambda n: accuracy(*np.linspace(0.5, 0.1, n)), {3: "unknown", 5: "yes"}),
    ("layer_variance", "most", lambda x: run(layer_variance_ratio=full(x)), {8: "no", 12: "yes"}),
    ("layer_variance", "records", lambda k: run(layer_variance_ratio=np.where(k > ROWS, 50, 1)), {8: "no", 12: "yes"}),
    ("units_dead", "share", lambda x: run(dead_units=full(x)), {0.4: "no", 0.6: "yes"}),
    ("attention_collapsed", "least", lambda x: run(attention_entropy=full(x)), {0.06: "no", 0.04: "yes"}),
    ("attention_collapsed", "records", lambda k: run(attention_entropy=from_row(N - k, 1.0, 0.001)), {4: "no", 8: "yes"}),
    ("router_saturated", "most", lambda x: run(router_max_load=full(x)), {0.85: "no", 0.95: "yes"}),
    ("accumulation_dependence", "share", lambda x: run(
        loss=from_row(200, 1.0, 4.0 * (1 + x)), grad_accum=from_row(200, 1, 4)), {0.12: "no", 0.08: "yes"}),
    ("steps_straggle", "sigmas", lambda x: run(seconds=put(full(1), slice(0, N, 40), 1.0 + 0.01 * x)),
     {25: "no", 35: "yes"}),
    ("steps_straggle", "share", lambda n: few_logged(300, seconds=put(full(1), slice(0, 10 * n, 10), 30.0)),
     {1: "no", 3: "yes"}),
    ("steps_straggle", "records", lambda n: few_logged(n, seconds=put(full(1), slice(0, N, 10), 30.0)),
     {80: "unknown", 120: "yes"}),
    ("waits_for_data", "share", lambda x: run(seconds=full(1), data_time=full(x)), {0.28: "no", 0.38: "yes"}),
    ("waits_for_data", "records", lambda n: few_logged(n, seconds=full(1), data_time=full(0.9)), {15: "unknown", 25: "yes"}),
    ("cpu_busy_gpu_idle", "cpu", lambda x: run(cpu=full(x), gpu=full(1)), {85: "no", 95: "yes"}),
    ("cpu_busy_gpu_idle", "gpu", lambda x: run(cpu=full(99), gpu=full(x)), {12: "no", 8: "yes"}),
    ("steps_slower", "ratio", drops, {1.5: "no", 1.8: "yes"}),
    ("steps_slower", "stays", lambda n: drops(3.0, n), {35: "no", 75: "yes"}),
    ("steps_slower", "records", lambda n: drops(3.0, before=n), {35: "no", 75: "yes"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("question", "threshold", "build", "answers"), BOUNDARIES, ids=[f"{row[0]}-{row[1]}" for row in BOUNDARIES]
)
def test_answer_changes_at_the_threshold(question, threshold, build, answers):
    assert threshold in load_tree().question[question].thresholds
    given = {}
    for value in answers:
        case = build(value)
        if not isinstance(case, str):
            made, where = case if isinstance(case, tuple) else (case, None)
            case = load_tree().ask(question, made, where).value
        given[value] = case
    assert given == answers


def test_every_threshold_has_a_boundary():
    thresholds = {(name, key) for name, spec in load_tree().question.items() for key in spec.thresholds}
    # The first two change only the sentence; the window of the third never matters beside `least`.
    others = {("loss_jumped", "records"), ("loss_recovered", "records"), ("loss_level", "steps")}
    assert thresholds - {(question, threshold) for question, threshold, _, _ in BOUNDARIES} == others
