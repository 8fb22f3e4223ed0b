"""One run for every leaf of the tree, with the verdict it must get. docs/diagnosis.md lists these runs.

`kinds` are the kinds of the leaf, that of the run first. `verdict` holds status, confidence, and the number of sentences for
and against the leaf and of unchecked questions. `trail` holds the questions on the way to the leaf, each with its answer:
+ yes, - no, ? unknown. `rivals` are the other causes in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from synthetic import N, cosine, episode, healthy_loss, healthy_norm, noise, put, run, table

from holdfast.diagnosis.model.episode import INCIDENT_KINDS, Episode
from holdfast.diagnosis.model.table import Table

NAN, INF = float("nan"), float("inf")
FP16, BF16, FP32 = ({"precision": name} for name in ("fp16", "bf16", "fp32"))
Build = Callable[[], tuple[Table, Episode | None]]


class LeafCase(NamedTuple):
    """Holds a run, and the verdict or note that it must get. A rule needs no episode."""

    run: str
    build: Build
    kinds: str
    verdict: str
    cause: str
    evidence: str
    trail: str
    rivals: str = ""


def rule(
    run_text: str, kind: str, verdict: str, cause: str, evidence: str, unchecked: int = 0, **changes: Any
) -> LeafCase:
    """Return a case for a whole-run rule: a healthy run with these changes, and no episode."""
    verdict = f"note {verdict}: 1 for, 0 against, {unchecked} unchecked"
    return LeafCase(run_text, lambda: (run(**changes), None), kind, verdict, cause, evidence, "")


def ends_in_nan(value: float = NAN, at: int = 300, **changes: Any) -> tuple[Table, Episode]:
    loss, norm = put(healthy_loss(), slice(at, None), value), put(healthy_norm(), slice(at, None), NAN)
    made = run(**{"loss": loss, "grad_norm": norm, **changes})
    return made, episode(made, "nan", at, N - 1)


def with_episode(kind: str, first: int, last: int, **changes: Any) -> tuple[Table, Episode]:
    made = run(**changes)
    return made, episode(made, kind, first, last)


def nan_at_300(grad_norm: float) -> tuple[Table, Episode]:
    loss, norm = put(healthy_loss(), 300, NAN), put(healthy_norm(), 300, grad_norm)
    return with_episode("nan", 300, 300, loss=loss, grad_norm=norm)


def bad_norm(value: float, at: slice = slice(300, 301), **changes: Any) -> tuple[Table, Episode]:
    norm = put(healthy_norm(), at, value)
    return with_episode("grad_nonfinite", at.start, at.stop - 1, grad_norm=norm, **changes)


def jump(first: int, last: int, height: float, kind: str, **changes: Any) -> tuple[Table, Episode]:
    loss = healthy_loss()
    loss[first : last + 1] += height
    return with_episode(kind, first, last, **{"loss": loss, **changes})


def repeated_batch() -> tuple[Table, Episode]:
    prints = np.arange(N) * 7919.0 + 2**30
    return jump(300, 300, 2.0, "spike_recovered", batch_fingerprint=put(prints, 300, prints[280]))


def scale_falls() -> tuple[Table, Episode]:
    scale = np.r_[np.full(300, 65536.0), 65536.0 / 2.0 ** np.arange(19), np.full(N - 319, 0.25)]
    norm = put(healthy_norm(), slice(300, 319), INF)
    return with_episode("scale_collapse", 300, 350, loss_scale=scale, grad_norm=norm)


def bloom() -> tuple[Table, Episode]:
    loss = np.r_[2.2 + noise(0.02, 3, 200), 2.20, 2.22, 2.60, 2.24, 2.35, 5.10, 6.0 + noise(0.1, 4, 50)]
    norm = np.r_[0.24 * np.exp(noise(0.1, 5, 200)), 0.24, 0.95, 2.4, 15.9, 145.0, 960.0, np.full(50, 20.0)]
    made = table(loss=loss, grad_norm=norm, lr=np.full(len(loss), 6e-5))
    return made, episode(made, "divergence", 202, len(loss) - 1)


def rises(**changes: Any) -> tuple[Table, Episode]:
    loss = healthy_loss()
    loss[200:] += np.linspace(0.0, 0.6, 200)
    return with_episode("silent_divergence", 210, N - 1, **{"loss": loss, **changes})


def ramp(start: float, end: float) -> np.ndarray:
    """Level for 200 records, then linear."""
    return np.r_[np.full(200, start), np.linspace(start, end, 200)]


OOM = (399, "oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
_OOM_SIZES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which "
    "1.50 GiB is free. Of the allocated memory {} GiB is allocated by PyTorch, and {} GiB is reserved by PyTorch but "
    "unallocated."
)
OOM_IN_PIECES, OOM_FULL = ((399, "oom", _OOM_SIZES.format(*sizes)) for sizes in (("61.00", "15.93"), ("76.50", "0.30")))
OOM_ON_HOST = (
    399, "oom", "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000000000 bytes.",
)  # fmt: skip
FLAT_20, FLAT_70 = 20.0 + noise(0.05, 9), 70.0 + noise(0.05, 10)


def hang(text: str) -> tuple[Table, Episode]:
    return with_episode("hang", 300, 300, events=[(300, "hang", text)])


def slower(**changes: Any) -> tuple[Table, Episode]:
    seconds = np.r_[0.5 + noise(0.01, 11, 250), 1.0 + noise(0.02, 12, 150)]
    made = run(seconds=seconds, **changes)
    return made, episode(made, "throughput_drop", 250, N - 1, before=0.5, after=1.0, ratio=2.0)


CURVE, MACHINE = "-is_machine_incident", "+is_machine_incident"
IS_NAN = f"{CURVE} +loss_nonfinite"
NAN_ENDS = f"{IS_NAN} ?nan_in_input -gradient_exactly_zero -nan_from_the_start ?nan_passes"
NO_CLIMB = f"{NAN_ENDS} -climbed_before_nan"
JUMPS = f"{CURVE} -loss_nonfinite +loss_jumped"
RETURNS = f"{JUMPS} +loss_recovered"
NO_RESTART = f"{RETURNS} -lr_jumped -at_restart"
SAME_SHAPE = f"{NO_RESTART} ?duplicate_batch ?batch_changed"
STAYS = f"{JUMPS} -loss_recovered -lr_jumped -at_restart"
NO_JUMP = f"{CURVE} -loss_nonfinite -loss_jumped"
BAD_NORM = f"{NO_JUMP} ?gradient_exploded +gradient_nonfinite"
NO_SCALE = f"{BAD_NORM} ?scale_collapsed ?scale_constant ?scaler_dynamic"
NO_SCALER = "-gradient_exploded -gradient_nonfinite ?scale_collapsed ?overflows_persist"
RISES = f"{NO_JUMP} {NO_SCALER} +loss_trends_up"
IS_DEAD = f"{CURVE} -loss_nonfinite ?loss_jumped {NO_SCALER} -loss_trends_up -loss_level"
NO_HANG = f"{MACHINE} -out_of_memory -hang_reported"

# fmt: off
CASES: dict[str, LeafCase] = {
    # ---- 1: the loss is NaN or Inf
    "nan_input": LeafCase(
        "loss NaN at step 300, input_nan = 12 there",
        lambda: ends_in_nan(input_nan=put(np.zeros(N), 300, 12.0)),
        "nan", "established 0.855: 2 for, 0 against, 0 unchecked",
        "NaN or Inf in the input data", "input_nan reaches 12",
        f"{IS_NAN} +nan_in_input",
        "fp16_forward_overflow bad_batch fp32_zero_over_zero fp32_log_zero_or_zero_over_zero"),
    "all_labels_ignored": LeafCase(
        "loss NaN at step 300 with gradient norm exactly 0, healthy before and after",
        lambda: nan_at_300(grad_norm=0.0),
        "nan", "supported 0.729: 2 for, 0 against, 1 unchecked",
        "a batch without labels", "the gradient norm is exactly 0 at all 1 of these losses",
        f"{IS_NAN} ?nan_in_input +gradient_exactly_zero",
        "bad_batch nan_input fp16_forward_overflow fp32_zero_over_zero"),
    "never_finite": LeafCase(
        "every loss NaN, from the first",
        lambda: with_episode("nan", 0, N - 1, loss=np.full(N, NAN), grad_norm=np.full(N, NAN)),
        "nan", "supported 0.567: 2 for, 0 against, 1 unchecked",
        "no loss was ever finite", "the first logged loss, at step 0, is NaN",
        f"{IS_NAN} ?nan_in_input -gradient_exactly_zero +nan_from_the_start",
        "nan_input fp16_forward_overflow bad_batch fp32_zero_over_zero"),
    "bad_batch": LeafCase(
        "loss NaN at step 300 only, 2.0 before and after",
        lambda: nan_at_300(grad_norm=NAN),
        "nan", "supported 0.608: 4 for, 0 against, 1 unchecked",
        "single batches give a non-finite loss", "the loss is back at 2.01 within 50 records",
        f"{IS_NAN} ?nan_in_input -gradient_exactly_zero -nan_from_the_start +nan_passes",
        "nan_input fp16_forward_overflow fp32_zero_over_zero fp32_log_zero_or_zero_over_zero"),
    "explosion_to_nan": LeafCase(
        "gradient norm 3, 30, 300 in the records before NaN",
        lambda: ends_in_nan(
            grad_norm=np.r_[healthy_norm()[:297], 3.0, 30.0, 300.0, np.full(N - 300, NAN)]),
        "nan", "supported 0.437: 3 for, 1 against, 2 unchecked",
        "training diverged and ended in NaN", "the gradient norm to 1038 times its median",
        f"{NAN_ENDS} +climbed_before_nan",
        "nan_input fp16_forward_overflow bad_batch fp32_zero_over_zero"),
    "bf16_overflow": LeafCase(
        "loss NaN from step 300, no climb, precision bf16",
        lambda: ends_in_nan(facts=BF16),
        "nan", "hypothesis 0.328: 3 for, 0 against, 2 unchecked",
        "NaN in bf16", "precision bf16: the log says precision = bf16",
        f"{NO_CLIMB} -is_fp16 +is_bf16",
        "nan_input bad_batch persistent_overflow"),
    "fp32_log_zero": LeafCase(
        "loss Inf at step 300, no climb, precision fp32",
        lambda: ends_in_nan(INF, facts=FP32),
        "nan", "supported 0.51: 4 for, 0 against, 2 unchecked",
        "log(0) in the loss: a probability", "the first bad loss is Inf",
        f"{NO_CLIMB} -is_fp16 -is_bf16 +is_fp32 +first_is_inf",
        "fp32_log_zero_or_zero_over_zero fp32_zero_over_zero nan_input bad_batch"),
    "fp32_zero_over_zero": LeafCase(
        "loss NaN at step 300, no climb, precision fp32",
        lambda: ends_in_nan(facts=FP32),
        "nan", "hypothesis 0.401: 4 for, 0 against, 2 unchecked",
        "0/0 in fp32", "the first bad loss is NaN, not Inf",
        f"{NO_CLIMB} -is_fp16 -is_bf16 +is_fp32 -first_is_inf",
        "fp32_log_zero_or_zero_over_zero nan_input bad_batch persistent_overflow"),
    "fp32_log_zero_or_zero_over_zero": LeafCase(
        "the same in a log of window means",
        lambda: ends_in_nan(facts=FP32, limits=["averaged"]),
        "nan", "hypothesis 0.328: 3 for, 0 against, 3 unchecked",
        "log(0) or 0/0 in the loss", "precision fp32: the log says precision = fp32",
        f"{NO_CLIMB} -is_fp16 -is_bf16 +is_fp32 ?first_is_inf",
        "nan_input fp32_zero_over_zero fp32_log_zero bad_batch"),
    "nan_origin_open": LeafCase(
        "loss NaN from step 300, no climb, precision not logged",
        ends_in_nan,
        "nan", "unknown 0.9: 4 for, 0 against, 3 unchecked",
        "not established", "ruled out: the gradient norm there is NaN, not 0",
        f"{NO_CLIMB} ?is_fp16",
        "nan_input fp16_forward_overflow bad_batch fp32_zero_over_zero"),
    # ---- 3: mixed precision
    "fp16_forward_overflow": LeafCase(
        "loss NaN from step 300, fp16, loss scale steady at 65536",
        lambda: ends_in_nan(facts=FP16, loss_scale=np.full(N, 65536.0)),
        "nan", "hypothesis 0.437: 4 for, 0 against, 2 unchecked",
        "an activation above 65504", "the loss scale was not cut",
        f"{NO_CLIMB} +is_fp16 -scale_collapsed",
        "nan_input bad_batch"),
    "persistent_overflow": LeafCase(
        "loss scale halved from 65536 to 1/4 in a row",
        scale_falls,
        "scale_collapse grad_nonfinite nan", "supported 0.72: 3 for, 0 against, 0 unchecked",
        "overflows continue", "19 overflows in 51 records, 19 in a row: they continue",
        f"{NO_JUMP} -gradient_exploded +gradient_nonfinite +scale_collapsed"),
    "scaler_not_engaged": LeafCase(
        "gradient norm Inf in 30 records, loss scale 1024 in all 400",
        lambda: bad_norm(INF, slice(300, 330), loss_scale=np.full(N, 1024.0)),
        "grad_nonfinite scale_collapse", "supported 0.689: 2 for, 0 against, 1 unchecked",
        "dynamic loss scaling is off", "the loss scale is 1024 in all 400 records",
        f"{BAD_NORM} -scale_collapsed +scale_constant",
        "fp16_gradient_overflow"),
    "scaler_finds_level": LeafCase(
        "one Inf gradient norm, loss scale halved once",
        lambda: with_episode(
            "grad_nonfinite", 290, 310, loss_scale=np.r_[np.full(300, 65536.0), np.full(N - 300, 32768.0)],
            grad_norm=put(healthy_norm(), 300, INF)),
        "grad_nonfinite scale_collapse", "note supported 0.765: 3 for, 0 against, 0 unchecked",
        "a dynamic loss scale settles", "1 overflows in 21 records, 1 in a row",
        f"{NO_JUMP} -gradient_exploded +gradient_nonfinite -scale_collapsed -scale_constant -overflows_persist",
        "fp16_gradient_overflow"),
    "fp16_gradient_overflow": LeafCase(
        "gradient norm Inf at step 300, fp16, loss scale not logged",
        lambda: bad_norm(INF, facts=FP16),
        "grad_nonfinite", "hypothesis 0.325: 2 for, 0 against, 4 unchecked",
        "fp16 gradients overflow", "precision fp16: the log says precision = fp16",
        f"{NO_SCALE} +is_fp16",
        "scaler_not_engaged"),
    "backward_nonfinite": LeafCase(
        "gradient norm NaN at step 300, loss finite, bf16",
        lambda: bad_norm(NAN, facts=BF16),
        "grad_nonfinite", "hypothesis 0.295: 2 for, 0 against, 4 unchecked",
        "the backward pass gives NaN", "precision bf16, not fp16",
        f"{NO_SCALE} -is_fp16",
        "scaler_not_engaged persistent_overflow"),
    "grad_nonfinite_open": LeafCase(
        "gradient norm NaN at step 300, precision not logged",
        lambda: bad_norm(NAN),
        "grad_nonfinite", "unknown 0.9: 1 for, 0 against, 5 unchecked",
        "not established", "1 of 1 gradient norms here are not finite",
        f"{NO_SCALE} ?is_fp16",
        "scaler_not_engaged fp16_gradient_overflow persistent_overflow"),
    # ---- 2: the loss jumps
    "schedule_jump": LeafCase(
        "learning rate times 10 at step 300, loss +3 from there",
        lambda: jump(300, 340, 3.0, "spike_recovered", lr=put(cosine(), slice(300, None), 10 * cosine()[300:])),
        "spike_recovered spike divergence", "supported 0.765: 3 for, 0 against, 0 unchecked",
        "the learning rate jumped", "jumps from 4.48e-05 to 0.000439 at step 300",
        f"{RETURNS} +lr_jumped",
        "loader_repeats batch_shape_changed epoch_turn"),
    "restart_shock": LeafCase(
        "the step count goes from 300 back to 250, loss +2 there",
        lambda: jump(300, 320, 2.0, "spike_recovered", step=np.r_[0:300, 250:350]),
        "spike_recovered spike divergence", "supported 0.63: 4 for, 0 against, 0 unchecked",
        "an incomplete restart", "the step count goes back to 250",
        f"{RETURNS} -lr_jumped +at_restart",
        "loader_repeats batch_shape_changed epoch_turn"),
    "loader_repeats": LeafCase(
        "fingerprint of step 300 is that of step 280, loss +2",
        repeated_batch,
        "spike_recovered", "supported 0.675: 4 for, 0 against, 0 unchecked",
        "the loader repeated a batch", "1 of these 1 batches were already served",
        f"{NO_RESTART} +duplicate_batch",
        "batch_shape_changed epoch_turn"),
    "batch_shape_changed": LeafCase(
        "sequence length 1024 to 2048 at step 300, loss +1",
        lambda: jump(
            300, 310, 1.0, "spike_recovered", sequence_length=put(np.full(N, 1024.0), slice(300, None), 2048.0)),
        "spike_recovered", "supported 0.527: 4 for, 0 against, 1 unchecked",
        "the batch size or the sequence length changed",
        "sequence_length goes from 1024 to 2048",
        f"{NO_RESTART} ?duplicate_batch +batch_changed",
        "loader_repeats epoch_turn"),
    "explosion_recovered": LeafCase(
        "gradient norm 2, 8, 30 over three records, then loss +4, back after 10",
        lambda: jump(300, 310, 4.0,
        "spike_recovered", grad_norm=put(healthy_norm(), slice(297, 300), [2.0, 8.0, 30.0])),
        "spike_recovered", "supported 0.547: 4 for, 0 against, 2 unchecked",
        "a gradient explosion that the run survived",
        "above 3 times its median for 3 records before the loss jumps",
        f"{SAME_SHAPE} +gradient_leads",
        "survived_instability long_tail_batch loader_repeats batch_shape_changed"),
    "survived_instability": LeafCase(
        "loss +2 for 12 records with gradient norm 12 (40 times its mean) at its start, then back",
        lambda: jump(300, 311, 2.0, "spike_recovered", grad_norm=put(healthy_norm(), 300, 12.0)),
        "spike_recovered", "supported 0.437: 6 for, 0 against, 2 unchecked",
        "an instability that the run survived", "the loss is high for 12 records",
        f"{SAME_SHAPE} -gradient_leads +spike_lasts",
        "long_tail_batch loader_repeats batch_shape_changed epoch_turn"),
    "long_tail_batch": LeafCase(
        "loss +5 and gradient norm 30 (100 times its mean) in one record",
        lambda: jump(300, 300, 5.0, "spike_recovered", grad_norm=put(healthy_norm(), 300, 30.0)),
        "spike_recovered", "supported 0.51: 5 for, 0 against, 2 unchecked",
        "a rare token or sample", "the gradient norm reaches 30, 102.3 times its mean",
        f"{SAME_SHAPE} -gradient_leads -spike_lasts +grad_norm_far_above",
        "loader_repeats batch_shape_changed epoch_turn"),
    "epoch_turn": LeafCase(
        "loss +1 when epoch 3 begins, gradient norm as usual",
        lambda: jump(300, 302, 1.0, "spike_recovered", epoch=(np.arange(N) + 1) / 100.0),
        "spike_recovered", "hypothesis 0.365: 4 for, 0 against, 2 unchecked",
        "the start of an epoch", "a new epoch begins there (2.98 to 3.01)",
        f"{SAME_SHAPE} -gradient_leads -spike_lasts -grad_norm_far_above +at_epoch_boundary",
        "loader_repeats batch_shape_changed"),
    "hard_batch": LeafCase(
        "loss +2 in one record, gradient norm and learning rate as usual",
        lambda: jump(300, 300, 2.0, "spike_recovered"),
        "spike_recovered", "hypothesis 0.295: 6 for, 0 against, 3 unchecked",
        "an unusual batch", "the gradient norm reaches 1.199 times its mean",
        f"{SAME_SHAPE} -gradient_leads -spike_lasts -grad_norm_far_above ?at_epoch_boundary",
        "loader_repeats batch_shape_changed epoch_turn"),
    "spike_open": LeafCase(
        "loss +2 in one record, only the loss is logged",
        lambda: jump(300, 300, 2.0, "spike_recovered", grad_norm=None, lr=None),
        "spike_recovered", "unknown 0.9: 4 for, 0 against, 5 unchecked",
        "not established", "ruled out: the loss is high for 1 record only",
        f"{RETURNS} ?lr_jumped -at_restart ?duplicate_batch ?batch_changed ?gradient_leads -spike_lasts "
        "?grad_norm_far_above",
        "schedule_jump loader_repeats explosion_recovered long_tail_batch"),
    "gradient_explosion": LeafCase(
        "BLOOM 176B: gradient norm 0.24, 0.95, 2.4, 15.9, 145, 960; loss 2.20 to 5.10",
        bloom,
        "divergence spike", "supported 0.689: 4 for, 0 against, 3 unchecked",
        "divergence by gradient explosion", "and reaches 607.6 times its median",
        f"{STAYS} ?loss_at_uniform +gradient_leads",
        "one_update_too_far collapse_to_uniform"),
    "one_update_too_far": LeafCase(
        "gradient norm 30 and loss +3 in one record; the loss stays high",
        lambda: jump(300, N - 1, 3.0, "spike", grad_norm=put(healthy_norm(), 300, 30.0)),
        "spike divergence", "supported 0.527: 4 for, 0 against, 3 unchecked",
        "one update was too large", "the gradient norm reaches 30, 102.3 times its mean",
        f"{STAYS} ?loss_at_uniform -gradient_leads +grad_norm_far_above",
        "collapse_to_uniform"),
    "collapse_to_uniform": LeafCase(
        "loss to 10.8 = ln(50257) and level there",
        lambda: with_episode(
            "divergence", 300, N - 1, loss=put(healthy_loss(), slice(300, None), 10.82 + noise(0.02, 6, 100)),
            facts={"vocab_size": 50257}),
        "divergence spike", "supported 0.72: 3 for, 0 against, 2 unchecked",
        "the model collapsed to a uniform output", "ln(50257) = 10.82",
        f"{STAYS} +loss_at_uniform"),
    "persistent_elevation": LeafCase(
        "loss +1 to the end, gradient norm and learning rate as usual",
        lambda: jump(300, N - 1, 1.0, "spike"),
        "spike divergence", "hypothesis 0.405: 5 for, 0 against, 3 unchecked",
        "model and optimizer moments are in a worse region",
        "the loss does not return by step 399",
        f"{STAYS} ?loss_at_uniform -gradient_leads -grad_norm_far_above",
        "collapse_to_uniform"),
    "elevation_open": LeafCase(
        "loss +1 to the end, only the loss is logged",
        lambda: jump(300, N - 1, 1.0, "spike", grad_norm=None, lr=None),
        "spike divergence", "unknown 0.9: 3 for, 0 against, 5 unchecked",
        "not established", "3.009 at the end, 2.047 before",
        f"{JUMPS} -loss_recovered ?lr_jumped -at_restart ?loss_at_uniform ?gradient_leads",
        "schedule_jump gradient_explosion collapse_to_uniform one_update_too_far"),
    "gradient_without_loss": LeafCase(
        "gradient norm 300 (1000 times) for three records, loss as usual",
        lambda: with_episode("grad_explosion", 300, 302, grad_norm=put(healthy_norm(), slice(300, 303), 300.0)),
        "grad_explosion", "supported 0.54: 3 for, 0 against, 1 unchecked",
        "the gradient exploded", "the gradient norm reaches 300 (median before: 0.2919)",
        f"{NO_JUMP} +gradient_exploded"),
    # ---- 4: silent divergence
    "schedule_rises": LeafCase(
        "loss +30% over 200 steps, learning rate 1e-4 to 6e-4",
        lambda: rises(lr=ramp(1e-4, 6e-4)),
        "silent_divergence", "supported 0.583: 2 for, 0 against, 6 unchecked",
        "the schedule is wrong", "from 0.0001 to 0.0006",
        f"{RISES} +lr_rising",
        "weight_decay_low weight_decay_high"),
    "weight_decay_low": LeafCase(
        "loss +30%, weight norm 100 to 300",
        lambda: rises(weight_norm=ramp(100.0, 300.0)),
        "silent_divergence", "supported 0.51: 3 for, 0 against, 6 unchecked",
        "the weights grow without bound", "from 108.5 to 290.5",
        f"{RISES} -lr_rising +weight_norm_grew"),
    "weight_decay_high": LeafCase(
        "loss +30%, weight norm 100 to 30",
        lambda: rises(weight_norm=ramp(100.0, 30.0)),
        "silent_divergence", "supported 0.51: 3 for, 0 against, 6 unchecked",
        "the weights shrink", "from 97.01 to 33.34",
        f"{RISES} -lr_rising -weight_norm_grew +weight_norm_fell"),
    "learning_rate_or_data": LeafCase(
        "loss +30%, gradient norm 0.3 to 0.9",
        lambda: rises(grad_norm=healthy_norm() * ramp(1.0, 3.0)),
        "silent_divergence", "hypothesis 0.325: 3 for, 0 against, 8 unchecked",
        "the run leaves its minimum", "the gradient norm changes by +100.1%",
        f"{RISES} -lr_rising ?weight_norm_grew ?weight_norm_fell +grad_norm_trends_up",
        "weight_decay_low weight_decay_high"),
    "silent_flat_gradient": LeafCase(
        "loss +30%, gradient norm level",
        rises,
        "silent_divergence", "hypothesis 0.266: 3 for, 0 against, 8 unchecked",
        "the loss rises a little while the gradient is level",
        "no upward trend: the gradient norm changes by +2.8%",
        f"{RISES} -lr_rising ?weight_norm_grew ?weight_norm_fell -grad_norm_trends_up",
        "weight_decay_low weight_decay_high"),
    "silent_open": LeafCase(
        "loss +30%, gradient norm not logged",
        lambda: rises(grad_norm=None),
        "silent_divergence", "unknown 0.9: 2 for, 0 against, 11 unchecked",
        "not established", "ruled out: the learning rate does not rise",
        f"{NO_JUMP} ?gradient_exploded ?gradient_nonfinite ?scale_collapsed ?overflows_persist +loss_trends_up -lr_rising "
        "?weight_norm_grew ?weight_norm_fell ?grad_norm_trends_up",
        "weight_decay_low weight_decay_high learning_rate_or_data"),
    "plateau": LeafCase(
        "loss level at 2.0 over 200 steps",
        lambda: with_episode("silent_divergence", 200, N - 1, loss=2.0 + noise(0.03, 7)),
        "silent_divergence plateau", "note supported 0.51: 1 for, 0 against, 6 unchecked",
        "a plateau, not a divergence", "the loss is level at 1.997 over 201 records",
        f"{NO_JUMP} {NO_SCALER} -loss_trends_up +loss_level",
        "weight_decay_low weight_decay_high"),
    # ---- 5: a run that learns nothing
    "dead_zero": LeafCase(
        "loss, gradient norm and learning rate all 0.0",
        lambda: with_episode("dead_run", 0, N - 1, loss=np.zeros(N), grad_norm=np.zeros(N), lr=np.zeros(N)),
        "dead_run", "established 0.59: 1 for, 0 against, 6 unchecked",
        "a dead run that looks perfect",
        "loss, gradient norm and learning rate are exactly 0",
        f"{IS_DEAD} +all_zero",
        "dead_constant"),
    "dead_constant": LeafCase(
        "loss 6.931 in every record, learning rate 0",
        lambda: with_episode("dead_run", 0, N - 1, loss=np.full(N, 6.931), lr=np.zeros(N)),
        "dead_run", "supported 0.492: 2 for, 0 against, 6 unchecked",
        "the run learns nothing", "the loss is 6.931 in all 400 records",
        f"{IS_DEAD} -all_zero +loss_constant"),
    "none_of_these": LeafCase(
        "a falling loss called dead: no question fits",
        lambda: with_episode("dead_run", 0, N - 1),
        " ".join(["dead_run", *(INCIDENT_KINDS.keys() - {"dead_run"})]), "unknown 0.9: 0 for, 0 against, 6 unchecked",
        "not established", "the logged values are constant or all zero",
        f"{IS_DEAD} -all_zero -loss_constant"),
    # ---- 6, 7, 8: memory, ranks, speed
    "leak": LeafCase(
        "allocated 20 to 32 GB over 400 steps, then out of memory",
        lambda: with_episode("oom", 40, N - 1, memory_allocated=20.0 + 0.03 * np.arange(N) + noise(0.1, 8), events=[OOM]),
        "oom memory_leak", "supported 0.72: 2 for, 0 against, 1 unchecked",
        "a memory leak", "memory_allocated goes from 22.29 to 30.91 GB",
        f"{MACHINE} +out_of_memory +allocated_rises",
        "fragments fragments_by_text"),
    "fragments": LeafCase(
        "allocated level at 20 GB, reserved 24 to 36 GB",
        lambda: with_episode(
            "fragmentation", 40, N - 1, memory_allocated=FLAT_20, memory_reserved=FLAT_20 + 4.0 + 0.03 * np.arange(N)),
        "fragmentation oom", "supported 0.547: 2 for, 0 against, 2 unchecked",
        "fragmentation", "reserved minus allocated goes from 6.265 to 14.91 GB",
        f"{NO_HANG} ?steps_slower ?one_rank_slow -allocated_rises +reserved_grows_apart"),
    "capacity": LeafCase(
        "allocated level at 70 GB, out of memory at step 399",
        lambda: with_episode(
            "oom", N - 1, N - 1, memory_allocated=FLAT_70, memory_reserved=FLAT_70 + 4.0, events=[OOM]),
        "oom", "supported 0.527: 3 for, 0 against, 1 unchecked",
        "the batch does not fit", "memory_allocated goes from 69.99 to 70 GB",
        f"{MACHINE} +out_of_memory -allocated_rises -reserved_grows_apart ?fits_in_pieces", "fragments_by_text"),
    "fragments_by_text": LeafCase(
        "out of memory, 2 GiB asked, 1.5 GiB free, 15.9 GiB reserved but unallocated",
        lambda: with_episode("oom", N - 1, N - 1, events=[OOM_IN_PIECES]),
        "oom", "supported 0.608: 2 for, 0 against, 1 unchecked",
        "fragmentation", "17.10 GB reserved but unallocated",
        f"{MACHINE} +out_of_memory ?allocated_rises +fits_in_pieces", "leak fragments"),
    "full_by_text": LeafCase(
        "out of memory, 2 GiB asked, 1.5 GiB free, 0.3 GiB reserved but unallocated",
        lambda: with_episode("oom", N - 1, N - 1, events=[OOM_FULL]),
        "oom", "supported 0.486: 2 for, 0 against, 1 unchecked",
        "capacity", "the memory is in use",
        f"{MACHINE} +out_of_memory ?allocated_rises -fits_in_pieces", "leak fragments"),
    "host_full": LeafCase(
        "DefaultCPUAllocator cannot allocate 40 GB",
        lambda: with_episode("oom", N - 1, N - 1, events=[OOM_ON_HOST]),
        "oom", "supported 0.51: 2 for, 0 against, 2 unchecked",
        "the host ran out of memory", "40.00 GB asked",
        f"{MACHINE} +out_of_memory ?allocated_rises ?fits_in_pieces +host_out_of_memory",
        "leak fragments fragments_by_text"),
    "oom_open": LeafCase(
        "out of memory, memory not logged",
        lambda: with_episode("oom", N - 1, N - 1, events=[OOM]),
        "oom", "unknown 0.9: 2 for, 0 against, 2 unchecked",
        "not established", "the log says: torch.OutOfMemoryError: CUDA out of memory",
        f"{MACHINE} +out_of_memory ?allocated_rises ?fits_in_pieces -host_out_of_memory",
        "leak fragments fragments_by_text"),
    "rank_took_other_branch": LeafCase(
        "NCCL health check failed at step 300",
        lambda: hang("NCCL health check failed at step 300 - stopping"),
        "hang", "supported 0.63: 2 for, 0 against, 0 unchecked",
        "ranks took different branches", "the log says: NCCL health check failed",
        f"{MACHINE} -out_of_memory +hang_reported +ranks_disagree"),
    "rank_absent": LeafCase(
        "watchdog caught a collective operation timeout",
        lambda: hang("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=712, OpType=ALLREDUCE)"),
        "hang", "supported 0.585: 2 for, 0 against, 0 unchecked",
        "a collective without all ranks", "the log says: Watchdog caught collective",
        f"{MACHINE} -out_of_memory +hang_reported -ranks_disagree +collective_timed_out"),
    "hang_open": LeafCase(
        "the log says that the job hangs, and nothing more",
        lambda: hang("no progress for 1800 s, giving up"),
        "hang", "unknown 0.9: 3 for, 0 against, 0 unchecked",
        "not established", "the log says: no progress for 1800 s",
        f"{MACHINE} -out_of_memory +hang_reported -ranks_disagree -collective_timed_out"),
    "slower_by_shape": LeafCase(
        "step time 0.5 to 1.0 s when the sequence length doubles",
        lambda: slower(sequence_length=put(np.full(N, 1024.0), slice(250, None), 2048.0)),
        "throughput_drop", "note supported 0.72: 2 for, 0 against, 1 unchecked",
        "steps take longer because", "sequence_length goes from 1024 to 2048",
        f"{NO_HANG} +steps_slower +batch_changed",
        "slower_by_data straggling_rank"),
    "slower_by_data": LeafCase(
        "step time 0.5 to 1.0 s, data_time 0.05 to 0.5 s",
        lambda: slower(data_time=put(np.full(N, 0.05), slice(250, None), 0.5)),
        "throughput_drop", "supported 0.648: 2 for, 0 against, 2 unchecked",
        "the run became input bound", "90% of the added time is waiting for data",
        f"{NO_HANG} +steps_slower ?batch_changed +data_wait_grew",
        "straggling_rank"),
    "slower_after_restart": LeafCase(
        "step time 0.5 to 1.0 s after 'resuming from checkpoint'",
        lambda: slower(
            events=[(249, "restart", "resuming from checkpoint step_249")], data_time=np.full(N, 0.05)),
        "throughput_drop", "hypothesis 0.486: 3 for, 0 against, 2 unchecked",
        "slower since a restart", "the log reports a restart at step 249",
        f"{NO_HANG} +steps_slower ?batch_changed -data_wait_grew +at_restart",
        "straggling_rank"),
    "straggling_rank": LeafCase(
        "rank 3 takes 1.0 s a step, the others 0.5 s",
        lambda: with_episode("straggler", 0, N - 1, **{
            f"rank{r}_seconds": np.full(N, 1.0 if r == 3 else 0.5) + noise(0.01, 20 + r) for r in range(4)}),
        "straggler throughput_drop", "supported 0.648: 1 for, 0 against, 1 unchecked",
        "one rank is slower than the rest", "rank 3 takes 2.002 times as long",
        f"{NO_HANG} ?steps_slower +one_rank_slow"),
    "slow_open": LeafCase(
        "step time 0.5 to 1.0 s, nothing else is logged",
        slower,
        "throughput_drop", "unknown 0.9: 2 for, 0 against, 4 unchecked",
        "not established", "the step time goes from 0.5 to 1: 2 times slower",
        f"{NO_HANG} +steps_slower ?batch_changed ?data_wait_grew -at_restart ?one_rank_slow",
        "slower_by_data straggling_rank"),
    # ---- 9, 10: rules for the whole run
    "vanishing_gradients": rule(
        "gradient norm of layer 0 is 1e-5, of layer 11 0.1", "gradients_vanish", "supported 0.7",
        "gradients vanish towards",
        "layer 0 has gradient norm 1e-05, layer 11 has 0.1",
        **{"grad_norm/layers.0": np.full(N, 1e-5), "grad_norm/layers.11": np.full(N, 0.1)}),
    "exploding_layers": rule(
        "gradient norm of layer 0 is 50, of layer 11 0.1", "layers_explode", "supported 0.7", "gradients grow towards",
        "layer 0 has gradient norm 50, layer 11 has 0.1: 500 times",
        **{"grad_norm/layers.0": np.full(N, 50.0), "grad_norm/layers.11": np.full(N, 0.1)}),
    "updates_large": rule(
        "update_ratio 0.3", "update_ratio", "supported 0.7", "updates are far too large",
        "the median of update_ratio is 0.3",
        update_ratio=np.full(N, 0.3)),
    "updates_small": rule(
        "update_ratio 1e-10", "update_ratio", "supported 0.7", "updates are too small",
        "the median of update_ratio is 1e-10",
        update_ratio=np.full(N, 1e-10)),
    "parameters_frozen": rule(
        "12 unchanged parameters", "parameters_unchanged", "supported 0.7", "some parameters are not trained",
        "the median of unchanged_parameters is 12", unchanged_parameters=np.full(N, 12.0)),
    "replicas_drift": rule(
        "replica_difference 3e-4", "replicas_differ", "supported 0.75", "replicas differ",
        "the median of replica_difference is 0.0003",
        replica_difference=np.full(N, 3e-4)),
    "gradients_not_zeroed": rule(
        "gradient norm grows from 0.3 to 120 linearly, loss level at 5", "gradients_pile_up", "hypothesis 0.55",
        "gradients are not zeroed", "the gradient norm grows linearly to 37.19 times its start",
        loss=5.0 + noise(0.05, 13), grad_norm=0.3 * np.arange(1, N + 1)),
    "ranks_share_data": rule(
        "4 batches shared between ranks in every record", "ranks_same_data", "supported 0.75", "wrong seeding",
        "shared_batches is 4 or more", shared_batches=np.full(N, 4.0)),
    "lr_jump": rule(
        "learning rate 1e-4 to 1e-3 at step 200", "lr_jumped", "supported 0.7",
        "the learning rate jumps up in one record",
        "jumps from 0.0001 to 0.001 at step 200", lr=put(np.full(N, 1e-4), slice(200, None), 1e-3)),
    "frozen_schedule": rule(
        "learning rate 3e-4 throughout, schedule cosine", "lr_frozen", "supported 0.75",
        "the learning rate never changes",
        "the schedule is cosine", lr=np.full(N, 3e-4), facts={"lr_scheduler_type": "cosine"}),
    "zero_schedule": rule(
        "learning rate 0 throughout", "lr_zero", "hypothesis 0.5", "the learning rate is 0, or the log rounds it",
        "the learning rate is 0 in all 400 records", lr=np.zeros(N)),
    "unusual_rate": rule(
        "learning rate peaks at 0.5", "lr_range", "hypothesis 0.4", "an unusual learning rate for Adam",
        "the learning rate peaks at 0.5",
        lr=cosine() * 0.5 / 3e-4),
    "input_not_finite": rule(
        "input_nan = 3 at step 100, loss finite", "nan_in_input", "established 0.9", "NaN or Inf in the input data",
        "input_nan reaches 3",
        input_nan=put(np.zeros(N), 100, 3.0)),
    "mostly_padding": rule(
        "pad_share 0.8", "padding", "supported 0.7", "most of a batch is padding",
        "pad_share is 0.8 or more", pad_share=np.full(N, 0.8)),
    "negative_loss": rule(
        "every loss is negative", "loss_negative", "hypothesis 0.4", "a negative loss",
        "100% of the losses are negative",
        loss=-healthy_loss()),
    "huge_loss": rule(
        "median loss 20000", "loss_huge", "hypothesis 0.4", "a huge loss",
        "the median loss is 2.109e+04", loss=1e4 * healthy_loss()),
    "leaked_labels": rule(
        "perplexity 1.01", "perplexity", "hypothesis 0.55", "a perplexity near 1", "the perplexity ends at 1.01",
        perplexity=np.full(N, 1.01)),
    "validation_leaks": rule(
        "eval_loss half the training loss", "val_better_than_train", "hypothesis 0.5",
        "validation is much better than training",
        "eval_loss is 50% below the training loss",
        evals={"eval_loss": (np.arange(20, N, 20), 0.5 * healthy_loss()[20::20])}),
    "overfitting": rule(
        "eval_loss from 0% to 60% above the training loss", "overfitting", "supported 0.8", "overfitting",
        "eval_loss is 58% above the training loss",
        evals={"eval_loss": (np.arange(20, N, 20), healthy_loss()[20::20] * np.linspace(1.0, 1.6, 19))}),
    "loss_fine_eval_worse": rule(
        "eval_accuracy 0.6 at its best, 0.4 at the end; the loss falls", "eval_worse", "hypothesis 0.6",
        "the loss is fine and the evaluation is worse", "eval_accuracy was 0.6 at its best and ends at 0.4",
        unchecked=1, evals={"eval_accuracy": ([100, 150, 200, 250, 300, 350], [0.5, 0.6, 0.55, 0.42, 0.4, 0.4])}),
    "bad_initialisation": rule(
        "layer_variance_ratio 50 in the first steps", "layer_variance", "supported 0.65",
        "layers start at very different scales",
        "layer_variance_ratio is 50", layer_variance_ratio=np.full(N, 50.0)),
    "dead_units": rule(
        "70% of the units dead", "dead_units", "supported 0.65", "more than half of the units never fire",
        "the median of dead_units is 0.7", dead_units=np.full(N, 0.7)),
    "attention_collapse": rule(
        "attention entropy falls to 0.001", "attention_entropy", "supported 0.65",
        "attention collapsed to single tokens",
        "attention_entropy falls to 4.37e-05", attention_entropy=np.linspace(3.0, 0.001, N) ** 3),
    "router_collapse": rule(
        "one expert takes 97% of the tokens", "router", "supported 0.65", "the router sends nearly all tokens",
        "the median of router_max_load is 0.97", router_max_load=np.full(N, 0.97)),
    "loss_not_normalised": rule(
        "accumulation 1 to 4 at step 200, loss times 4", "accumulation", "supported 0.75",
        "the loss depends on the accumulation setting",
        "changes by a factor of 3.918",
        loss=healthy_loss() * np.repeat([1.0, 4.0], 200), grad_accum=np.repeat([1.0, 4.0], 200)),
    "slow_steps": rule(
        "8 of 400 steps take 30 s instead of 0.5 s", "straggler_steps", "hypothesis 0.5",
        "single steps take far longer",
        "8 of 400 steps take more than 30 sigma longer", seconds=put(0.5 + noise(0.01, 14), slice(40, N, 50), 30.0)),
    "input_bound": rule(
        "0.4 of 0.5 s a step is waiting for data", "input_bound", "supported 0.75", "the run is input bound",
        "80% of a step is waiting for data", seconds=0.5 + noise(0.01, 15), data_time=0.4 + noise(0.01, 16)),
    "cpu_bound": rule(
        "CPU at 98%, GPU at 4%", "cpu_bound", "supported 0.7", "the CPU is busy and the GPU is idle",
        "CPU at 98%, GPU at 4%",
        cpu_utilization=np.full(N, 98.0), gpu_utilization=np.full(N, 4.0)),
}
# fmt: on
