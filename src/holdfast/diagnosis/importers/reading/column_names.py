"""Maps the column names of a log to Holdfast's names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice

STEP_NAMES = (
    "step", "global_step", "trainer_global_step", "iteration", "iter", "current_steps", "num_updates", "steps", "it",
    "global_steps", "train_step", "optimizer_step", "update", "updates", "itr", "n_iter", "iterations", "iters", "num_iters",
    "training_iteration", "learning_iteration", "env_step", "up", "batch", "batch_i", "batch_id",
    "batch_idx", "minibatch", "batches", "index", "total_t",
)  # fmt: skip
"""Names of the step column, most likely first."""
COARSE_STEPS = {
    "epoch": "epoch", "epochs": "epoch", "e": "epoch", "ep": "epoch", "progress_tick": "tick", "tick": "tick",
    "episode": "step", "episodes": "step", "episode_num": "step", "game": "step", "round": "step", "generation": "step",
    "s": "step",
}  # fmt: skip
"""Columns that count the records of a log without a step, and the unit that they count."""

_LOSS_NAMES = (
    "loss", "lm_loss", "loss_train_total", "total_loss", "loss_step", "train_loss", "loss_total", "mean_loss", "avg_loss",
    "loss_mean", "lm_loss_value", "ce_loss", "cross_entropy", "cross_entropy_loss", "nll", "nll_loss", "objective",
    "loss_avg", "batch_loss", "step_loss", "loss_tok", "main_loss", "loss_loss", "crossentropyloss", "xent", "loss_epoch",
    "running_loss", "smoothed_loss", "average_loss", "train_crossentropyloss", "train_ce_loss", "cost", "reduced_train_loss",
    "logloss", "learn",
)  # fmt: skip
_COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "grad_norm": ("grad_norm", "gnorm", "gradient_norm", "global_grad_norm", "gradnorm", "total_grad_norm", "grad_norm_step",
                  "grads_norm", "l2_norm_grad_global", "optim_total_grad_norm", "loss_metrics_grad_norm", "norm_grad",
                  "grad", "grdn"),
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
    "epoch": ("epoch", "epochs", "ep"),
    "nan_iterations": ("nan_iterations", "number_of_nan_iterations"),
    "skipped": ("skipped", "skipped_steps", "number_of_skipped_iterations", "skipped_iterations", "skipped_step"),
}  # fmt: skip
_MILLISECOND_NAMES = {"step_time_ms", "dt", "dt_ms", "iter_time_ms", "ms_per_step", "time_ms"}
EVAL_WORDS = (
    "val|vali|valid|validate|validating|validation|vld|eval|evaluate|evaluating|evaluation|evl|test|testing|tst|dev"
    "|held[-_]?out|holdout"
)
_EVAL_NAME = re.compile(
    rf"(^|_)({EVAL_WORDS}|predict|prediction)(?<!std_dev)(_|\d|$)|^(val|vl|vld|eval|test|tst|dev|valid)(loss|acc)|^(va|te|cv)_|^tel$"
)
_LETTERED = re.compile(r"^(?:(tr?|va?|te|vl)_?)?(loss|acc|accuracy|err|error|nll|ppl|mse)(?:_(tr?|va?|te))?$")
_POLICY = re.compile(r"(^|_)(p|pg|pi|policy|actor|critic|entropy|vf|q|td|kl|rew|reward)(_|$)")
_MIN_BESIDE = 3
"""`v_loss`, `v_kl`, `v_recons` beside `loss`, `kl`, `recons`: so many are no policy"""
_REWARD_NAME = re.compile(
    r"(^|_)(ep_?rew_?mean|averageepret|epret|ep_ret|rew|(success|win)_rate|rewards?(_mean|_score)?|returns?(_mean)?|(mean|avg|average|episode|ep)_score)$"
)
_NOT_REWARD = re.compile(r"min|max|std|int_|intrinsic|signal|model|loss|func|best")
_LOSS_BY_CUSTOM = re.compile(
    r"^(total|train|trl|learn|objf|energy|l_pix|(\w+_)?(rmse|mse|mae|err|error|bce|xent|cross_entropy|smooth_?l1))$"
)
_PART_BY_CUSTOM = re.compile(
    r"(^|_)(d|g|gen|disc|err_?[dg]|gan|adv|real|fake|cycle|cyc|idt|identity|l1|l2|rec|recon\w*|kl|kld|ce|box|obj|cls|dfl|mel|fm|vgg)"
    r"(_|$)"
)
_STATISTIC = re.compile(r"(^|_)(stats?|mean|std|min|max|acc|accuracy|norm|lr|prob|score|time)(_|$)")
_PERPLEXITY = re.compile(r"(^|_)(ppl|perplexity)$")
_LOSS_WORD = re.compile(r"(^|_)(loss(?!_?scale)|losspi|lossv|lossq|nll)(_|$)|loss$")
_TOTAL = re.compile(r"^((total|all|whole|full|overall|sum|joint|combined)_loss(es)?|loss(es)?_(all|sum|overall|full))$")
_RATIO_OF_LOSS = re.compile(
    r"scale|weight|coef|num(_|$)|std$|delta|best|time|count|ratio|lambda|alpha|beta|gamma|type|power|class(es)?$|factor"
)
_TRAIN_AFFIX = re.compile(
    r"^(train|training|trainer|trn|tra|tr)_(?=.)|^(train|trn|tr)(?=loss)|^metrics_train_|_(train|training|trn)$"
)
_COUNTER_PATH = re.compile(r"^(?:train|trainer|training|total|progress|counters?)[/.]", re.I)
_HUMP = re.compile(r"(?<=[a-z\d])(?=[A-Z])")
_SEPARATORS = re.compile(r"[^a-z0-9]+")


@lru_cache(maxsize=4096)
def snake_case(name: str) -> str:
    return _SEPARATORS.sub("_", name[:200].lower()).strip("_")


@lru_cache(maxsize=4096)
def _words(name: str) -> str:
    """Return the words of a name: `trainLoss` is `train_loss`."""
    return snake_case(_HUMP.sub("_", name[:200]))


@lru_cache(maxsize=4096)
def is_eval(name: str) -> bool:
    """Return whether the name says that the column is measured on held-out data."""
    return _EVAL_NAME.search(_words(name)) is not None


def lettered_names(names: Iterable[str]) -> dict[str, str]:
    """Return the full names of columns of which only a letter tells the data: `t_loss` beside `v_loss`.

    The `v_loss` of a policy is the loss of its value function.
    """
    keys = {name: _words(name) for name in names}
    found = {
        name: (match[1] or match[3] or "", match[2]) for name, key in keys.items() if (match := _LETTERED.match(key))
    }
    beside = {name for name, key in keys.items() if key.startswith("v_") and key[2:] in keys.values()}
    if len(beside) >= _MIN_BESIDE:
        return {name: f"val_{name[2:]}" for name in beside}
    if any(_POLICY.search(key) or re.search("^loss_[a-su]$", key) for key in keys.values()):
        return {}
    trained = {metric for letter, metric in found.values() if letter[:1] in ("", "t") and letter != "te"}
    held_out = {metric for letter, metric in found.values() if letter[:1] == "v" or letter == "te"} & trained
    return {
        name: f"val_{metric}" if letter[0] == "v" or letter == "te" else f"train_{metric}"
        for name, (letter, metric) in found.items()
        if letter and metric in held_out
    }


def _step_key(name: str) -> str:
    """Return the name of a step without the part of the program that counts it: `total/steps`, `train_step`."""
    return snake_case(_COUNTER_PATH.sub("", name)).removeprefix("train_")


def is_step(name: str) -> bool:
    return snake_case(name) in STEP_NAMES or _step_key(name) in STEP_NAMES


@lru_cache(maxsize=4096)
def canonical_column(name: str) -> tuple[str, float]:
    """Return Holdfast's name for a training metric, and the factor to its unit. Unknown metrics keep their name."""
    key = _TRAIN_AFFIX.sub("", snake_case(name))
    for column, known_names in _COLUMN_NAMES.items():
        if key in known_names:
            return column, 1.0
    if key in _MILLISECOND_NAMES:
        return "seconds", 1e-3
    if re.match(r"^(lr|learning_rate)_", key):
        return "lr", 1.0
    return ("loss" if loss_rank(name) is not None else name), 1.0


@lru_cache(maxsize=4096)
def loss_rank(name: str) -> int | None:
    """Return how likely a column is the training loss: 0 is most likely. None if it is not a loss."""
    if is_eval(name):
        return None
    key = snake_case(name)
    if key in _LOSS_NAMES:
        return _LOSS_NAMES.index(key)
    key = _TRAIN_AFFIX.sub("", _words(name))
    return _LOSS_NAMES.index(key) + 1 if key in _LOSS_NAMES else None


@lru_cache(maxsize=4096)
def is_part_of_loss(name: str) -> bool:
    """Return whether the name says that the column is a training loss, or one of its parts."""
    key = _words(name)
    return not is_eval(name) and _LOSS_WORD.search(key) is not None and _RATIO_OF_LOSS.search(key) is None


@lru_cache(maxsize=4096)
def is_perplexity(name: str) -> bool:
    return _PERPLEXITY.search(snake_case(name)) is not None


def pick_customary_losses(names: Iterable[str]) -> list[str]:
    """Return the columns that are losses by custom, though no name says so: a total such as the error, or parts."""
    keys = {name: _TRAIN_AFFIX.sub("", snake_case(name)) for name in names if not is_eval(name)}
    keys = {name: key for name, key in keys.items() if not _STATISTIC.search(key)}
    totals = [name for name, key in keys.items() if _LOSS_BY_CUSTOM.search(key)]
    totals.sort(key=lambda name: _TRAIN_AFFIX.search(_words(name)) is None)
    parts = [name for name, key in keys.items() if _PART_BY_CUSTOM.search(key)]
    return totals[:1] or (parts if len(parts) > 1 else [])


def pick_training_error(names: Iterable[str]) -> list[str]:
    """Return the column of a table that is a loss by custom and says that it is measured on the training data."""
    return [name for name in pick_customary_losses(names)[:1] if _TRAIN_AFFIX.search(_words(name))]


def pick_total(parts: Iterable[str]) -> list[str]:
    """Return the only name that says that it is the whole loss: `actor/loss` beside `actor/kl_loss`, or `all_loss`."""
    totals = [name for name in parts if re.search(r"[/.](total_)?loss$", name) or _TOTAL.search(_words(name))]
    return totals if len(totals) == 1 else []


def pick_loss(names: Iterable[str]) -> str | None:
    """Return the training loss among these columns. Without a known name, the only name that holds `loss`."""
    names = list(names)
    ranked = sorted((rank, i, name) for i, name in enumerate(names) if (rank := loss_rank(name)) is not None)
    if ranked:
        return ranked[0][2]
    candidates = [name for name in names if is_part_of_loss(name)]
    return next(iter(pick_total(candidates) or candidates[: len(candidates) == 1]), None)


def pick_reward(names: Iterable[str]) -> str | None:
    """Return the mean reward or return of an episode among these columns, a mean first."""
    keys = {name: snake_case(name) for name in names}
    is_game = not {"episode", "episodes", "game"}.isdisjoint(keys.values())
    found = [n for n, key in keys.items() if is_game and key == "score"]
    found += [
        n for n, key in keys.items() if _REWARD_NAME.search(key) and not _NOT_REWARD.search(key) and not is_eval(n)
    ]
    return min(found, key=lambda n: ("rate" in keys[n], not re.search("mean|av", keys[n]), len(n)), default=None)


def pick_step(names: Iterable[str]) -> str | None:
    by_key: dict[str, str] = {}
    for name in names:
        by_key.setdefault(snake_case(name), name)
        by_key.setdefault(_step_key(name), name)
    return next((by_key[key] for key in STEP_NAMES if key in by_key), None)


def columns_and_hint(columns: Iterable[str], evals: Iterable[str] = ()) -> str:
    """Return, for a log without a known training loss, its columns and a --map option to try."""
    columns, evals = list(columns), list(evals)
    if not columns and not evals:
        return "No column holds numbers"
    names = [*columns, *evals]
    wanted = ("loss", "nll", "ppl", "perplexity", "cost", "objective", "error", "reward", "return")
    metrics = [
        name
        for name in names
        if not re.search("time|epoch|step|date|lr", name.lower()) and canonical_column(name)[0] != "grad_norm"
    ]
    fallback = metrics[0] if len(metrics) == 1 else "COLUMN"
    candidate = next((name for word in wanted for name in names if word in name.lower()), fallback)
    return f"Columns: {_listed(names)}. Try --map {shlex.quote(f'loss={candidate[:80]}')}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name[:80] for name in islice(names, 20)) or "none"


class NoSuchColumn(ValueError):
    """The user maps a signal to a column that the log does not have."""

    def __init__(self, signal: str, column: str, names: Iterable[str]) -> None:
        super().__init__(f"--map {signal}={column}: the log has no column {column!r}. Columns: {_listed(names)}")


class ColumnRoles:
    """Holds the role of each column of a log: the step, a training column, or an evaluation.

    `mapping` (signal to column) overrides the names. If `strict`, a mapped column that does not exist raises NoSuchColumn.
    """

    def __init__(self, names: Iterable[str], mapping: Mapping[str, str] | None = None, *, strict: bool = True) -> None:
        names = list(names)
        mapping = dict(mapping or {})
        if strict and names:
            for signal, column in mapping.items():
                if column not in names:
                    raise NoSuchColumn(signal, column, names)
        mapped = {column: signal for signal, column in mapping.items()}
        full_names = lettered_names(names)
        unmapped = {full_names.get(name, name): name for name in names if name not in mapped}
        self.step = mapping.get("step") or pick_step(unmapped.values())
        self.loss = mapping.get("loss") or unmapped.get(pick_loss(unmapped) or "")
        self.train: dict[str, tuple[str, float]] = {
            name: (mapped[name], 1.0) for name in names if name in mapped and mapped[name] != "step"
        }
        """column of the log -> (Holdfast's column, factor to its unit)"""
        self.evals: list[str] = []
        reward = pick_reward(unmapped.values())
        if reward is not None and "reward" not in mapping:
            self.train[reward] = ("reward", 1.0)
        used = {"loss", *(signal for signal, _ in self.train.values())}
        for name in names:
            if name in self.train or name == self.step:
                continue
            if name == self.loss:
                self.train[name] = ("loss", 1.0)
            elif is_eval(full_names.get(name, name)):
                self.evals.append(name)
            else:
                column, factor = canonical_column(full_names.get(name, name))
                if column in used:
                    column, factor = (name if name not in used else f"{name} (log)"), 1.0
                used.add(column)
                self.train[name] = (column, factor)
