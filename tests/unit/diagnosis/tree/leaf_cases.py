"""One run for every leaf of the tree: the numbers that lead there. The table of coverage in the docs is made of this."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from made import N, cosine, episode, healthy_loss, healthy_norm, noise, put, run, table

from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table

NAN, INF = float("nan"), float("inf")
FP16, BF16, FP32 = ({"precision": name} for name in ("fp16", "bf16", "fp32"))


class Case(NamedTuple):
    """A run, and the incident in it; a rule needs none."""

    table: Table
    episode: Episode | None
    says: str


CASES: dict[str, Callable[[], Case]] = {}


def leads_to(leaf: str, says: str) -> Callable[[Callable[[], tuple[Table, Episode | None]]], Callable[[], Case]]:
    """Register a maker of a case. `says` is what the run shows, for the table in the docs."""

    def register(make: Callable[[], tuple[Table, Episode | None]]) -> Callable[[], Case]:
        def case() -> Case:
            return Case(*make(), says)

        assert leaf not in CASES, leaf
        CASES[leaf] = case
        return case

    return register


def ends_in_nan(value: float = NAN, at: int = 300, **changes: object) -> tuple[Table, Episode]:
    made = run(
        loss=put(healthy_loss(), slice(at, None), value), grad_norm=put(healthy_norm(), slice(at, None), NAN), **changes
    )
    return made, episode(made, "nan", at, N - 1)


def jump(first: int, last: int, height: float, kind: str, **changes: object) -> tuple[Table, Episode]:
    loss = healthy_loss()
    loss[first : last + 1] += height
    made = run(**{"loss": loss, **changes})
    return made, episode(made, kind, first, last)


# ---- 1: NaN


@leads_to("nan_input", "loss NaN at step 300, input_nan = 12 there")
def _():
    return ends_in_nan(input_nan=put(np.zeros(N), 300, 12.0))


@leads_to("all_labels_ignored", "loss NaN at step 300 with gradient norm exactly 0, then on as before")
def _():
    made = run(loss=put(healthy_loss(), 300, NAN), grad_norm=put(healthy_norm(), 300, 0.0))
    return made, episode(made, "nan", 300, 300)


@leads_to("never_finite", "every loss NaN, from the first")
def _():
    made = run(loss=np.full(N, NAN), grad_norm=np.full(N, NAN))
    return made, episode(made, "nan", 0, N - 1)


@leads_to("bad_batch", "loss NaN at step 300 only, 2.0 before and after")
def _():
    made = run(loss=put(healthy_loss(), 300, NAN), grad_norm=put(healthy_norm(), 300, NAN))
    return made, episode(made, "nan", 300, 300)


@leads_to("explosion_to_nan", "gradient norm 3, 30, 300 in the records before NaN")
def _():
    made, where = ends_in_nan()
    made.columns["grad_norm"][297:300] = [3.0, 30.0, 300.0]
    return made, where


@leads_to("bf16_overflow", "loss NaN from step 300, no climb, precision bf16")
def _():
    return ends_in_nan(facts=BF16)


@leads_to("fp32_log_zero", "loss Inf at step 300, no climb, precision fp32")
def _():
    return ends_in_nan(INF, facts=FP32)


@leads_to("fp32_zero_over_zero", "loss NaN at step 300, no climb, precision fp32")
def _():
    return ends_in_nan(facts=FP32)


@leads_to("fp32_log_zero_or_zero_over_zero", "the same in a log of window means")
def _():
    return ends_in_nan(facts=FP32, limits=["averaged"])


@leads_to("nan_origin_open", "loss NaN from step 300, no climb, precision not on record")
def _():
    return ends_in_nan()


# ---- 3: mixed precision


@leads_to("fp16_forward_overflow", "loss NaN from step 300, fp16, loss scale steady at 65536")
def _():
    return ends_in_nan(facts=FP16, loss_scale=np.full(N, 65536.0))


@leads_to("persistent_overflow", "loss scale halved from 65536 to 1/4 in a row")
def _():
    scale = np.full(N, 65536.0)
    scale[300:319] = 65536.0 / 2.0 ** np.arange(19)
    scale[319:] = 0.25
    made = run(loss_scale=scale, grad_norm=put(healthy_norm(), slice(300, 319), INF))
    return made, episode(made, "scale_collapse", 300, 350)


@leads_to("scaler_not_engaged", "gradient norm Inf in 30 records, loss scale 1024 in all 400")
def _():
    made = run(loss_scale=np.full(N, 1024.0), grad_norm=put(healthy_norm(), slice(300, 330), INF))
    return made, episode(made, "grad_nonfinite", 300, 329)


@leads_to("scaler_finds_level", "one Inf gradient norm, loss scale halved once")
def _():
    made = run(loss_scale=put(np.full(N, 65536.0), slice(300, None), 32768.0), grad_norm=put(healthy_norm(), 300, INF))
    return made, episode(made, "grad_nonfinite", 290, 310)


@leads_to("fp16_gradient_overflow", "gradient norm Inf at step 300, fp16, no loss scale on record")
def _():
    made = run(facts=FP16, grad_norm=put(healthy_norm(), 300, INF))
    return made, episode(made, "grad_nonfinite", 300, 300)


@leads_to("backward_nonfinite", "gradient norm NaN at step 300, loss finite, bf16")
def _():
    made = run(facts=BF16, grad_norm=put(healthy_norm(), 300, NAN))
    return made, episode(made, "grad_nonfinite", 300, 300)


@leads_to("grad_nonfinite_open", "gradient norm NaN at step 300, precision not on record")
def _():
    made = run(grad_norm=put(healthy_norm(), 300, NAN))
    return made, episode(made, "grad_nonfinite", 300, 300)


# ---- 2: jumps


@leads_to("schedule_jump", "learning rate times 10 at step 300, loss +3 from there")
def _():
    return jump(300, 340, 3.0, "spike_recovered", lr=put(cosine(), slice(300, None), 10 * cosine()[300:]))


@leads_to("restart_shock", "the step count goes from 300 back to 250, loss +2 there")
def _():
    return jump(300, 320, 2.0, "spike_recovered", step=np.r_[0:300, 250:350])


@leads_to("loader_repeats", "fingerprint of step 300 is that of step 280, loss +2")
def _():
    prints = np.arange(N) * 7919.0 + 2**30
    return jump(300, 300, 2.0, "spike_recovered", batch_fingerprint=put(prints, 300, prints[280]))


@leads_to("batch_shape_changed", "sequence length 1024 to 2048 at step 300, loss +1")
def _():
    return jump(300, 310, 1.0, "spike_recovered", sequence_length=put(np.full(N, 1024.0), slice(300, None), 2048.0))


@leads_to("explosion_recovered", "gradient norm 2, 8, 30 over three records, then loss +4, back after 10")
def _():
    return jump(300, 310, 4.0, "spike_recovered", grad_norm=put(healthy_norm(), slice(297, 300), [2.0, 8.0, 30.0]))


@leads_to(
    "survived_instability", "loss +2 for 12 records with gradient norm 12 (40 times its mean) at its start, then back"
)
def _():
    return jump(300, 311, 2.0, "spike_recovered", grad_norm=put(healthy_norm(), 300, 12.0))


@leads_to("long_tail_batch", "loss +5 and gradient norm 30 (100 times its mean) in one record")
def _():
    return jump(300, 300, 5.0, "spike_recovered", grad_norm=put(healthy_norm(), 300, 30.0))


@leads_to("epoch_turn", "loss +1 where epoch 3 begins, gradient norm as usual")
def _():
    return jump(300, 302, 1.0, "spike_recovered", epoch=(np.arange(N) + 1) / 100.0)


@leads_to("hard_batch", "loss +2 in one record, gradient norm and learning rate as usual")
def _():
    return jump(300, 300, 2.0, "spike_recovered")


@leads_to("spike_open", "loss +2 in one record, nothing but the loss on record")
def _():
    return jump(300, 300, 2.0, "spike_recovered", grad_norm=None, lr=None)


@leads_to("gradient_explosion", "BLOOM 176B: gradient norm 0.24, 0.95, 2.4, 15.9, 145, 960; loss 2.20 to 5.10")
def _():
    loss = np.r_[2.2 + noise(0.02, 3, 200), 2.20, 2.22, 2.60, 2.24, 2.35, 5.10, 6.0 + noise(0.1, 4, 50)]
    norm = np.r_[0.24 * np.exp(noise(0.1, 5, 200)), 0.24, 0.95, 2.4, 15.9, 145.0, 960.0, np.full(50, 20.0)]
    made = table(loss=loss, grad_norm=norm, lr=np.full(len(loss), 6e-5))
    return made, episode(made, "divergence", 202, len(loss) - 1)


@leads_to("one_update_too_far", "gradient norm 30 and loss +3 in one record; the loss stays up")
def _():
    return jump(300, N - 1, 3.0, "spike", grad_norm=put(healthy_norm(), 300, 30.0))


@leads_to("collapse_to_uniform", "loss to 10.8 = ln(50257) and level there")
def _():
    made = run(loss=put(healthy_loss(), slice(300, None), 10.82 + noise(0.02, 6, 100)), facts={"vocab_size": 50257})
    return made, episode(made, "divergence", 300, N - 1)


@leads_to("persistent_elevation", "loss +1 for good, gradient norm and learning rate as usual")
def _():
    return jump(300, N - 1, 1.0, "spike")


@leads_to("elevation_open", "loss +1 for good, nothing but the loss on record")
def _():
    return jump(300, N - 1, 1.0, "spike", grad_norm=None, lr=None)


@leads_to("gradient_without_loss", "gradient norm 300 (1000 times) for three records, loss as usual")
def _():
    made = run(grad_norm=put(healthy_norm(), slice(300, 303), 300.0))
    return made, episode(made, "grad_explosion", 300, 302)


# ---- 4: silent divergence


def rises(**changes: object) -> tuple[Table, Episode]:
    loss = healthy_loss()
    loss[200:] += np.linspace(0.0, 0.6, 200)
    made = run(**{"loss": loss, **changes})
    return made, episode(made, "silent_divergence", 210, N - 1)


@leads_to("schedule_rises", "loss +30% over 200 steps, learning rate 1e-4 to 6e-4")
def _():
    return rises(lr=np.r_[np.full(200, 1e-4), np.linspace(1e-4, 6e-4, 200)])


@leads_to("weight_decay_low", "loss +30%, weight norm 100 to 300")
def _():
    return rises(weight_norm=np.r_[np.full(200, 100.0), np.linspace(100.0, 300.0, 200)])


@leads_to("weight_decay_high", "loss +30%, weight norm 100 to 30")
def _():
    return rises(weight_norm=np.r_[np.full(200, 100.0), np.linspace(100.0, 30.0, 200)])


@leads_to("learning_rate_or_data", "loss +30%, gradient norm 0.3 to 0.9")
def _():
    return rises(grad_norm=healthy_norm() * np.r_[np.ones(200), np.linspace(1.0, 3.0, 200)])


@leads_to("silent_flat_gradient", "loss +30%, gradient norm level")
def _():
    return rises()


@leads_to("silent_open", "loss +30%, no gradient norm on record")
def _():
    return rises(grad_norm=None)


@leads_to("plateau", "loss level at 2.0 over 200 steps")
def _():
    made = run(loss=2.0 + noise(0.03, 7))
    return made, episode(made, "silent_divergence", 200, N - 1)


@leads_to("dead_zero", "loss, gradient norm and learning rate all 0.0")
def _():
    made = run(loss=np.zeros(N), grad_norm=np.zeros(N), lr=np.zeros(N))
    return made, episode(made, "dead_run", 0, N - 1)


@leads_to("dead_constant", "loss 6.931 in every record, learning rate 0")
def _():
    made = run(loss=np.full(N, 6.931), lr=np.zeros(N))
    return made, episode(made, "dead_run", 0, N - 1)


@leads_to("none_of_these", "a falling loss called dead: no question fits")
def _():
    made = run()
    return made, episode(made, "dead_run", 0, N - 1)


# ---- memory, ranks, speed

OOM = (399, "oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")


@leads_to("leak", "allocated 20 to 32 GB over 400 steps, then out of memory")
def _():
    made = run(memory_allocated=20.0 + 0.03 * np.arange(N) + noise(0.1, 8), events=[OOM])
    return made, episode(made, "oom", 40, N - 1)


@leads_to("fragments", "allocated level at 20 GB, reserved 24 to 36 GB")
def _():
    flat = 20.0 + noise(0.05, 9)
    made = run(memory_allocated=flat, memory_reserved=flat + 4.0 + 0.03 * np.arange(N))
    return made, episode(made, "fragmentation", 40, N - 1)


@leads_to("capacity", "allocated level at 70 GB, out of memory at step 399")
def _():
    flat = 70.0 + noise(0.05, 10)
    made = run(memory_allocated=flat, memory_reserved=flat + 4.0, events=[OOM])
    return made, episode(made, "oom", N - 1, N - 1)


@leads_to("oom_open", "out of memory, no memory figures on record")
def _():
    made = run(events=[OOM])
    return made, episode(made, "oom", N - 1, N - 1)


@leads_to("rank_took_other_branch", "NCCL health check failed at step 300")
def _():
    made = run(events=[(300, "hang", "NCCL health check failed at step 300 - stopping")])
    return made, episode(made, "hang", 300, 300)


@leads_to("rank_absent", "watchdog caught a collective operation timeout")
def _():
    made = run(
        events=[(300, "hang", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=712, OpType=ALLREDUCE)")]
    )
    return made, episode(made, "hang", 300, 300)


@leads_to("hang_open", "the log says that the job hangs, and nothing more")
def _():
    made = run(events=[(300, "hang", "no progress for 1800 s, giving up")])
    return made, episode(made, "hang", 300, 300)


def slower(**changes: object) -> tuple[Table, Episode]:
    seconds = np.r_[0.5 + noise(0.01, 11, 250), 1.0 + noise(0.02, 12, 150)]
    made = run(seconds=seconds, **changes)
    return made, episode(made, "throughput_drop", 250, N - 1, before=0.5, after=1.0, ratio=2.0)


@leads_to("slower_by_shape", "step time 0.5 to 1.0 s where the sequence length doubles")
def _():
    return slower(sequence_length=put(np.full(N, 1024.0), slice(250, None), 2048.0))


@leads_to("slower_by_data", "step time 0.5 to 1.0 s, data_time 0.05 to 0.5 s")
def _():
    return slower(data_time=put(np.full(N, 0.05), slice(250, None), 0.5))


@leads_to("slower_after_restart", "step time 0.5 to 1.0 s after 'resuming from checkpoint'")
def _():
    return slower(events=[(249, "restart", "resuming from checkpoint step_249")])


@leads_to("straggling_rank", "rank 3 takes 1.0 s a step, the others 0.5 s")
def _():
    ranks = {f"rank{r}_seconds": np.full(N, 1.0 if r == 3 else 0.5) + noise(0.01, 20 + r) for r in range(4)}
    made = run(**ranks)
    return made, episode(made, "straggler", 0, N - 1)


@leads_to("slow_open", "step time 0.5 to 1.0 s, nothing else on record")
def _():
    return slower()


# ---- rules for the whole run


@leads_to("vanishing_gradients", "gradient norm of layer 0 is 1e-5, of layer 11 0.1")
def _():
    return run(**{"grad_norm/layers.0": np.full(N, 1e-5), "grad_norm/layers.11": np.full(N, 0.1)}), None


@leads_to("exploding_layers", "gradient norm of layer 0 is 50, of layer 11 0.1")
def _():
    return run(**{"grad_norm/layers.0": np.full(N, 50.0), "grad_norm/layers.11": np.full(N, 0.1)}), None


@leads_to("updates_large", "update_ratio 0.3")
def _():
    return run(update_ratio=np.full(N, 0.3)), None


@leads_to("updates_small", "update_ratio 1e-10")
def _():
    return run(update_ratio=np.full(N, 1e-10)), None


@leads_to("parameters_frozen", "12 unchanged parameters")
def _():
    return run(unchanged_parameters=np.full(N, 12.0)), None


@leads_to("replicas_drift", "replica_difference 3e-4")
def _():
    return run(replica_difference=np.full(N, 3e-4)), None


@leads_to("gradients_not_zeroed", "gradient norm grows from 0.3 to 120 in a straight line, loss level at 5")
def _():
    return run(loss=5.0 + noise(0.05, 13), grad_norm=0.3 * np.arange(1, N + 1)), None


@leads_to("ranks_share_data", "4 batches shared between ranks in every record")
def _():
    return run(shared_batches=np.full(N, 4.0)), None


@leads_to("lr_jump", "learning rate 1e-4 to 1e-3 at step 200")
def _():
    return run(lr=put(np.full(N, 1e-4), slice(200, None), 1e-3)), None


@leads_to("frozen_schedule", "learning rate 3e-4 throughout, schedule cosine")
def _():
    return run(lr=np.full(N, 3e-4), facts={"lr_scheduler_type": "cosine"}), None


@leads_to("zero_schedule", "learning rate 0 throughout")
def _():
    return run(lr=np.zeros(N)), None


@leads_to("unusual_rate", "learning rate peaks at 0.5")
def _():
    return run(lr=cosine() * 0.5 / 3e-4), None


@leads_to("input_not_finite", "input_nan = 3 at step 100, loss finite")
def _():
    return run(input_nan=put(np.zeros(N), 100, 3.0)), None


@leads_to("mostly_padding", "pad_share 0.8")
def _():
    return run(pad_share=np.full(N, 0.8)), None


@leads_to("negative_loss", "every loss is negative")
def _():
    return run(loss=-healthy_loss()), None


@leads_to("huge_loss", "median loss 20000")
def _():
    return run(loss=1e4 * healthy_loss()), None


@leads_to("leaked_labels", "perplexity 1.01")
def _():
    return run(perplexity=np.full(N, 1.01)), None


@leads_to("validation_leaks", "eval_loss half the training loss")
def _():
    steps = np.arange(20, N, 20)
    return run(evals={"eval_loss": (steps, 0.5 * healthy_loss()[steps])}), None


@leads_to("overfitting", "eval_loss from 0% to 60% above the training loss")
def _():
    steps = np.arange(20, N, 20)
    return run(evals={"eval_loss": (steps, healthy_loss()[steps] * np.linspace(1.0, 1.6, len(steps)))}), None


@leads_to("loss_fine_eval_worse", "eval_accuracy 0.6 at its best, 0.4 at the end; the loss falls")
def _():
    made = run(evals={"eval_accuracy": ([100, 150, 200, 250, 300, 350], [0.5, 0.6, 0.55, 0.42, 0.4, 0.4])})
    return made, None


@leads_to("bad_initialisation", "layer_variance_ratio 50 in the first steps")
def _():
    return run(layer_variance_ratio=np.full(N, 50.0)), None


@leads_to("dead_units", "70% of the units dead")
def _():
    return run(dead_units=np.full(N, 0.7)), None


@leads_to("attention_collapse", "attention entropy falls to 0.001")
def _():
    return run(attention_entropy=np.linspace(3.0, 0.001, N) ** 3), None


@leads_to("router_collapse", "one expert takes 97% of the tokens")
def _():
    return run(router_max_load=np.full(N, 0.97)), None


@leads_to("loss_not_normalised", "accumulation 1 to 4 at step 200, loss times 4")
def _():
    setting = np.r_[np.ones(200), np.full(200, 4.0)]
    return run(loss=healthy_loss() * setting, grad_accum=setting), None


@leads_to("slow_steps", "8 of 400 steps take 30 s instead of 0.5 s")
def _():
    return run(seconds=put(0.5 + noise(0.01, 14), slice(40, N, 50), 30.0)), None


@leads_to("input_bound", "0.4 of 0.5 s a step is waiting for data")
def _():
    return run(seconds=0.5 + noise(0.01, 15), data_time=0.4 + noise(0.01, 16)), None


@leads_to("cpu_bound", "CPU at 98%, GPU at 4%")
def _():
    return run(cpu_utilization=np.full(N, 98.0), gpu_utilization=np.full(N, 4.0)), None
