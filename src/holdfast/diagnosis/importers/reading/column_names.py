"""What a log calls a thing, and what it is called here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice

STEP = (
    "step", "global_step", "trainer_global_step", "iteration", "iter", "current_steps", "num_updates", "steps", "it",
    "global_steps", "train_step", "optimizer_step", "update", "updates", "itr", "n_iter", "iterations", "batch", "index",
)  # fmt: skip
"""names of the step, the likelier first"""

_LOSS = (
    "loss", "lm_loss", "loss_train_total", "total_loss", "loss_step", "train_loss", "loss_total", "mean_loss", "avg_loss",
    "loss_mean", "lm_loss_value", "ce_loss", "cross_entropy", "cross_entropy_loss", "nll", "nll_loss", "objective",
    "loss_avg", "batch_loss", "step_loss", "loss_tok", "actor_loss", "act_loss", "policy_loss", "loss_epoch",
)  # fmt: skip
_OTHERS: dict[str, tuple[str, ...]] = {
    "grad_norm": ("grad_norm", "gnorm", "gradient_norm", "global_grad_norm", "gradnorm", "total_grad_norm", "grad_norm_step",
                  "grads_norm", "l2_norm_grad_global", "optim_total_grad_norm", "loss_metrics_grad_norm", "norm_grad"),
    "lr": ("lr", "learning_rate", "lrate", "current_lr", "lr_0", "optim_learning_rate_group0", "learningrate"),
    "loss_scale": ("loss_scale", "scale", "grad_scale", "scaler_scale", "lossscale", "amp_scale"),
    "update_rms": ("update_rms", "rms_update"),
    "weight_norm": ("weight_norm", "param_norm", "params_norm", "parameter_norm", "total_param_norm"),
    "seconds": ("seconds", "step_time", "time_per_step", "iter_time", "sec_per_step", "step_time_sec", "seconds_per_step",
                "time_per_iteration", "iteration_time", "step_time_s", "time_metrics_end_to_end_s"),
    "tokens_per_second": ("tokens_per_second", "tokens_per_sec", "tps", "wps", "tok_s", "tok_sec", "tok_per_sec",
                          "samples_per_second", "samples_per_sec", "throughput", "throughput_tokens_per_sec", "toks_per_s"),
    "tokens": ("tokens", "num_input_tokens_seen", "total_tokens", "consumed_tokens", "tokens_seen", "num_tokens",
               "consumed_samples", "n_tokens", "train_tokens", "time_token"),
    "memory_allocated": ("memory_allocated", "gpu_allocated_gb", "memory_allocated_gb", "memory_current_allocated_mem"),
    "memory_reserved": ("memory_reserved", "gpu_reserved_gb", "memory_reserved_gb", "memory_max_reserved_gib",
                        "memory_current_reserved_mem"),
    "memory_peak": ("memory_peak", "gpu_peak_gb", "peak_memory_gb", "memory_max_active_gib", "peak_mem_gb",
                    "memory_peak_allocated_mem"),
    "batch_size": ("batch_size", "global_batch_size"),
    "sequence_length": ("sequence_length", "seq_len", "seqlen", "seq_length"),
    "epoch": ("epoch", "epochs"),
    "skipped": ("skipped", "skipped_steps", "number_of_skipped_iterations", "skipped_iterations", "skipped_step"),
}  # fmt: skip
_MILLISECONDS = {"step_time_ms", "dt", "dt_ms", "iter_time_ms", "ms_per_step", "time_ms"}
_EVAL = re.compile(
    r"(^|[/_\-. ])(val|valid|validation|eval|evaluation|test|dev|predict|prediction|heldout|ppl_eval)([/_\-. ]|\d|$)"
    r"|^(val|eval|test|valid)(loss|acc)|^va_|^te_",
    re.IGNORECASE,
)
_TRAIN = re.compile(r"^(train|training|trainer|trn|tr)_(?=.)|^metrics_train_|_(train|training)$")
_OTHER = re.compile(r"[^a-z0-9]+")


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """Lower case, words joined by `_`."""
    return _OTHER.sub("_", name[:200].lower()).strip("_")


@lru_cache(maxsize=4096)
def is_eval(name: str) -> bool:
    """Whether a column is measured on data that is not trained on, as far as its name tells."""
    return _EVAL.search(name[:200]) is not None


def is_step(name: str) -> bool:
    return plain(name) in STEP or plain(name).removeprefix("train_") in STEP or name == "_step"


@lru_cache(maxsize=4096)
def column(name: str) -> tuple[str, float]:
    """The column a training metric belongs to, and the factor to its unit. Its own name where it is none of ours."""
    short = _TRAIN.sub("", plain(name))
    for canonical, known in _OTHERS.items():
        if short in known:
            return canonical, 1.0
    if short in _MILLISECONDS:
        return "seconds", 1e-3
    if re.match(r"^(lr|learning_rate)_", short):
        return "lr", 1.0
    if loss_rank(name) is not None:
        return "loss", 1.0
    return name, 1.0


@lru_cache(maxsize=4096)
def loss_rank(name: str) -> int | None:
    """How likely a name is that of the training loss; 0 is likeliest, None is not at all."""
    if is_eval(name):
        return None
    full = plain(name)
    short = _TRAIN.sub("", full)
    if full in _LOSS:
        return _LOSS.index(full)
    if short in _LOSS:
        return _LOSS.index(short) + 1
    return None


def pick_loss(names: Iterable[str]) -> str | None:
    """The training loss among these columns. Failing a known name, the only one that ends in `loss`."""
    names = list(names)
    ranked = sorted((rank, i, name) for i, name in enumerate(names) if (rank := loss_rank(name)) is not None)
    if ranked:
        return ranked[0][2]
    others = [name for name in names if plain(name).endswith("loss") and not is_eval(name)]
    return others[0] if len(others) == 1 else None


def pick_step(names: Iterable[str]) -> str | None:
    """The step among these columns."""
    by_name: dict[str, str] = {}
    for name in names:
        key = "step" if name == "_step" else plain(name)
        by_name.setdefault(key, name)
        by_name.setdefault(key.removeprefix("train_"), name)
    for key in STEP:
        if key in by_name:
            return by_name[key]
    return None


class NoSuchColumn(ValueError):
    """The user maps a signal to a column that the log does not have."""

    def __init__(self, ours: str, theirs: str, names: Iterable[str]) -> None:
        some = ", ".join(name[:80] for name in islice(names, 20)) or "none"
        super().__init__(f"--map {ours}={theirs}: the log has no column {theirs!r}; its columns: {some}")


class Columns:
    """Where each column of a log goes: the step, a training column, or an evaluation. `mapping` has the last word.

    `strict`: a mapping to a column that is not there raises NoSuchColumn.
    """

    def __init__(self, names: Iterable[str], mapping: Mapping[str, str] | None = None, *, strict: bool = True) -> None:
        names = list(names)
        mapping = dict(mapping or {})
        if strict and names:
            for ours, theirs in mapping.items():
                if theirs not in names:
                    raise NoSuchColumn(ours, theirs, names)
        wanted = {theirs: ours for ours, theirs in mapping.items()}
        self.step = mapping.get("step") or pick_step(name for name in names if name not in wanted)
        self.loss = mapping.get("loss") or pick_loss(name for name in names if name not in wanted)
        self.train: dict[str, tuple[str, float]] = {}
        self.evals: list[str] = []
        taken = {"loss"}
        for name in names:
            if name in wanted and wanted[name] != "step":
                self.train[name] = (wanted[name], 1.0)
                taken.add(wanted[name])
        for name in names:
            if name in self.train or name == self.step:
                continue
            if name == self.loss:
                self.train[name] = ("loss", 1.0)
            elif is_eval(name):
                self.evals.append(name)
            else:
                ours, factor = column(name)
                if ours in taken:
                    ours, factor = name, 1.0
                taken.add(ours)
                self.train[name] = (ours, factor)
