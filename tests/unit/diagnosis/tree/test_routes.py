"""Branches of the tree that no run in leaf_cases takes: each run must take them and end at its leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from leaf_cases import BF16, FP16, INF, NAN, OOM, bad_norm, ends_in_nan, jump, rises, slower, with_episode
from synthetic import N, cosine, episode, healthy_loss, healthy_norm, noise, put, table

from holdfast.diagnosis.tree import walk
from holdfast.diagnosis.tree.load import load_tree

SIGNS = {"yes": "+", "no": "-", "unknown": "?"}
FLAT, GROWS = 20.0 + noise(0.05, 9), 20.0 + 0.03 * np.arange(N)
EQUAL_RANKS = {f"rank{r}_seconds": 0.5 + noise(0.01, 20 + r) for r in range(4)}
SLOW_RANK = {**EQUAL_RANKS, "rank3_seconds": 1.0 + noise(0.01, 23)}


def short(count: int) -> tuple[Any, Any]:
    made = table(loss=2.0 + noise(0.03, 7, count))
    return made, episode(made, "silent_divergence", 0, count - 1)


def logged_until(stop: int, column: str, case: tuple[Any, Any], start: int = 0) -> tuple[Any, Any]:
    """Remove the values of a column outside start..stop."""
    case[0].present[column] = (np.arange(N) >= start) & (np.arange(N) < stop)
    return case


def nan_then_high() -> tuple[Any, Any]:
    loss = put(put(healthy_loss(), slice(311, None), 9.0), slice(300, 311), NAN)
    return with_episode("nan", 300, 310, loss=loss, grad_norm=None)


def overflow_messages(count: int) -> tuple[Any, Any]:
    events = [(300 + i, "overflow", "overflow, skipping the step") for i in range(count)]
    return bad_norm(INF, slice(300, 330), events=events) if count > 1 else bad_norm(INF, events=events)


def scale_run(*halvings: int, last: float = 0.0) -> tuple[Any, Any]:
    scale = np.full(N, 65536.0)
    for row in halvings:
        scale[row:] /= 2.0
    return with_episode("scale_collapse", 300, 350, loss_scale=put(scale, slice(320, None), last) if last else scale)


ROUTES: dict[str, tuple[str, str, Callable[[], tuple[Any, Any]]]] = {
    "no loss": ("gradient_without_loss", "?loss_nonfinite ?loss_jumped +gradient_exploded", lambda: with_episode(
        "grad_explosion", 300, 302, loss=None, grad_norm=put(healthy_norm(), slice(300, 303), 300.0))),
    "NaN without a loss": (
        "nan_origin_open", "?nan_from_the_start ?nan_passes ?climbed_before_nan ?is_fp16",
        lambda: with_episode("nan", 300, 310, loss=None)),
    "finite input": (
        "nan_origin_open",
        "-nan_in_input -gradient_exactly_zero -nan_from_the_start ?nan_passes -climbed_before_nan ?is_fp16",
        lambda: ends_in_nan(input_nan=np.zeros(N))),
    "NaN without a gradient norm": (
        "nan_origin_open", "?gradient_exactly_zero -nan_from_the_start ?nan_passes -climbed_before_nan ?is_fp16",
        lambda: ends_in_nan(grad_norm=None)),
    "NaN, then a high loss": (
        "nan_origin_open", "-nan_from_the_start -nan_passes -climbed_before_nan ?is_fp16", nan_then_high),
    "NaN after 5 records": ("nan_origin_open", "?climbed_before_nan ?is_fp16", lambda: ends_in_nan(at=5)),
    "NaN in fp16, scale below 1": (
        "persistent_overflow", "+is_fp16 +scale_collapsed", lambda: ends_in_nan(facts=FP16, loss_scale=np.full(N, 0.5))),
    "NaN in fp16, no scale": ("fp16_forward_overflow", "+is_fp16 ?scale_collapsed", lambda: ends_in_nan(facts=FP16)),
    "scale below 1, finite gradient": (
        "persistent_overflow", "-gradient_nonfinite +scale_collapsed", lambda: scale_run(300, last=0.5)),
    "scale halved 12 times": (
        "persistent_overflow", "-gradient_nonfinite -scale_collapsed +overflows_persist",
        lambda: scale_run(*range(301, 313))),
    "scale halved once": (
        "none_of_these", "-gradient_nonfinite -scale_collapsed -overflows_persist -loss_trends_up -loss_level -all_zero "
        "-loss_constant", lambda: scale_run(310)),
    "one overflow message": (
        "scaler_finds_level", "?scale_constant +scaler_dynamic -overflows_persist", lambda: overflow_messages(1)),
    "30 overflow messages": (
        "persistent_overflow", "?scale_constant +scaler_dynamic +overflows_persist", lambda: overflow_messages(30)),
    "constant scale in 50 records": (
        "fp16_gradient_overflow", "?scale_constant -scaler_dynamic +is_fp16",
        lambda: logged_until(310, "loss_scale", bad_norm(INF, loss_scale=np.full(N, 1024.0)), 260)),
    "divergence at a jump of the LR": (
        "schedule_jump", "-loss_recovered +lr_jumped",
        lambda: jump(300, N - 1, 3.0, "divergence", lr=put(cosine(), slice(300, None), 10 * cosine()[300:]))),
    "spike at a restart that stays": (
        "restart_shock", "-loss_recovered -lr_jumped +at_restart",
        lambda: jump(300, N - 1, 2.0, "spike", step=np.r_[0:300, 250:350])),
    "new batch": (
        "hard_batch", "-duplicate_batch ?batch_changed -gradient_leads -spike_lasts -grad_norm_far_above ?at_epoch_boundary",
        lambda: jump(300, 300, 2.0, "spike_recovered", batch_fingerprint=np.arange(N) * 7919.0 + 2**30)),
    "constant batch size": (
        "hard_batch", "-batch_changed -gradient_leads -spike_lasts -grad_norm_far_above ?at_epoch_boundary",
        lambda: jump(300, 300, 2.0, "spike_recovered", batch_size=np.full(N, 32.0))),
    "inside an epoch": ("hard_batch", "-grad_norm_far_above -at_epoch_boundary", lambda: jump(
        300, 300, 2.0, "spike_recovered", epoch=(np.arange(N) + 50) / 100.0)),
    "spike in the first record": (
        "spike_open", "?gradient_leads ?spike_lasts ?grad_norm_far_above", lambda: jump(0, 0, 2.0, "spike_recovered")),
    "not uniform": (
        "persistent_elevation", "-loss_at_uniform -gradient_leads -grad_norm_far_above",
        lambda: jump(300, N - 1, 1.0, "spike", facts={"vocab_size": 50257})),
    "gradient norm logged until the spike": (
        "elevation_open", "?loss_at_uniform -gradient_leads ?grad_norm_far_above",
        lambda: logged_until(298, "grad_norm", jump(300, N - 1, 1.0, "spike"))),
    "5 records": ("none_of_these", "?loss_trends_up ?all_zero ?loss_constant", lambda: short(5)),
    "50 records": ("none_of_these", "-loss_trends_up ?loss_level -all_zero -loss_constant", lambda: short(50)),
    "rise without an LR": (
        "silent_flat_gradient", "+loss_trends_up ?lr_rising ?weight_norm_grew ?weight_norm_fell -grad_norm_trends_up",
        lambda: rises(lr=None)),
    "rise with level weights": (
        "silent_flat_gradient", "-lr_rising -weight_norm_grew -weight_norm_fell -grad_norm_trends_up",
        lambda: rises(weight_norm=np.full(N, 100.0))),
    "out of memory by fragmentation": (
        "fragments", "+out_of_memory -allocated_rises +reserved_grows_apart",
        lambda: with_episode("oom", 40, N - 1, memory_allocated=FLAT, memory_reserved=FLAT + GROWS, events=[OOM])),
    "out of memory, reserved not logged": (
        "capacity", "+out_of_memory -allocated_rises ?reserved_grows_apart ?fits_in_pieces",
        lambda: with_episode("oom", 40, N - 1, memory_allocated=FLAT, events=[OOM])),
    "straggler at constant speed": (
        "straggling_rank", "-steps_slower +one_rank_slow",
        lambda: with_episode("straggler", 0, N - 1, seconds=0.5 + noise(0.01, 4), **SLOW_RANK)),
    "slower, constant batch": (
        "slow_open", "+steps_slower -batch_changed ?data_wait_grew -at_restart ?one_rank_slow",
        lambda: slower(batch_size=np.full(N, 32.0))),
    "slower, one rank slow": (
        "straggling_rank", "+steps_slower ?batch_changed ?data_wait_grew -at_restart +one_rank_slow",
        lambda: slower(**SLOW_RANK)),
    "slower, one rank named in the journal": (
        "straggling_rank", "+steps_slower ?batch_changed ?data_wait_grew -at_restart +one_rank_slow",
        lambda: slower(events=[(900, "finding", "finding: straggler: rank 3 (node7) has been slow in data")])),
    "slower, equal ranks": (
        "slow_open", "+steps_slower ?batch_changed ?data_wait_grew -at_restart -one_rank_slow",
        lambda: slower(**EQUAL_RANKS)),
    "leak without running out of memory": (
        "leak", "?steps_slower -one_rank_slow +allocated_rises",
        lambda: with_episode("memory_leak", 40, N - 1, memory_allocated=GROWS, **EQUAL_RANKS)),
    "no memory columns": (
        "none_of_these", "?steps_slower ?one_rank_slow ?allocated_rises ?reserved_grows_apart",
        lambda: with_episode("memory_leak", 40, N - 1)),
    "level memory": (
        "none_of_these", "-allocated_rises -reserved_grows_apart",
        lambda: with_episode("memory_leak", 40, N - 1, memory_allocated=FLAT, memory_reserved=FLAT + 4.0)),
    "gradient NaN in bf16 with a constant scale": (
        "scaler_not_engaged", "-scale_collapsed +scale_constant",
        lambda: bad_norm(NAN, facts=BF16, loss_scale=np.full(N, 1024.0))),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
def test_run_takes_route(name):
    leaf, route, build = ROUTES[name]
    conclusion = walk.walk(load_tree(), *build())
    trail = " ".join(SIGNS[step.answer] + step.question for step in conclusion.trail)
    assert (conclusion.id, trail[-len(route) :]) == (leaf, route), trail
