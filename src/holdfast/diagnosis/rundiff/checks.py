"""The checks, as data: name, weight, what each explains, and how to confirm it.

`weight` is how often a large difference of this kind explains a worse evaluation with a normal loss: 1 nearly always, 0
never. `keys` matches the settings of the check; a setting belongs to the first check that matches. `acts` says whether the
difference acts on the training or only on the evaluation. If the training losses are bit-identical, a difference that acts
on training cannot be the cause.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple


class DifferenceCheck(NamedTuple):
    """Holds one way in which two runs can differ."""

    id: str
    name: str
    weight: float
    keys: str
    explains: str
    confirm: str
    acts: Literal["training", "evaluation", "both"] = "training"


# Settings about the place, time and progress of a run. They do not change the training.
IGNORED = re.compile(
    r"(^|[._])(run_dir|output_dir|logging_dir|run_name|run_id|save_dir|out_dir|log_dir|started|argv|masked|hostname|trainer|"
    r"report_to|wandb\w*|resume\w*|disable_tqdm|push_to_hub|hub_\w+|epoch|"
    r"global_step|total_flos|best_\w+|logged_every|num_input_tokens_seen)$"
)

CHECKS: tuple[DifferenceCheck, ...] = (
    DifferenceCheck(
        "housekeeping", "logging and housekeeping", 0.01,
        r"(^|[._])(log_every|log_interval|logging_\w+|save_\w+|eval_steps|eval_interval|threads|(num_)?workers|"
        r"dataloader_\w+|flush_seconds|verbose)$|^eval\.every$|^checkpoint\.\w+$",
        "nothing that is trained",
        "nothing to do",
    ),
    DifferenceCheck(
        "policy", "guard policy", 0.05,
        r"^(detect|recover|snapshot|checkpoint|quarantine|oom|liveness|preemption|metrics|profile|journal|run)\.",
        "how a fault would have been handled; nothing without a fault",
        "inspect the recoveries of both runs: holdfast diagnose {b}",
    ),
    DifferenceCheck(
        "world", "world size", 0.25, r"world_size|^distributed|n_gpus?|nproc|num_nodes|(data|tensor|pipeline)_parallel",
        "a different global batch, or a different order of summation",
        "compare the batch size in tokens, and the sharding of the data",
    ),
    DifferenceCheck(
        "tokenizer", "tokenizer", 1.0, r"tokeniz(er|ation)",
        "training loss stays normal, while generation and benchmarks decode to other text",
        "encode one text with both tokenizers and compare the ids; evaluate {b} with the tokenizer it was trained with",
        "both",
    ),
    DifferenceCheck(
        "vocab_size", "vocabulary size", 0.98, r"vocab",
        "untrained tokens, or ids with another meaning at evaluation: normal loss, meaningless benchmarks",
        "compare vocab_size of model, tokenizer and data, for {a} and for {b}",
        "both",
    ),
    DifferenceCheck(
        "decode", "decode settings", 0.92,
        r"(^|[._])(decod(e|ing)|generation|temperature|top_p|top_k|repetition_penalty|num_beams|max_new_tokens|do_sample)",
        "a benchmark number depends on sampling as much as on the weights",
        "evaluate the checkpoints of both runs with the same decode settings",
        "evaluation",
    ),
    DifferenceCheck(
        "evaluation", "evaluation set-up", 0.7,
        r"(^|[._])eval(uation)?([._]|$)|eval_share|few_?shot|limit_val|val_(split|batches|set)",
        "two numbers that measure different things",
        "evaluate both checkpoints with the same set-up",
        "evaluation",
    ),
    DifferenceCheck(
        "mixture", "data mixture", 0.9,
        r"sources\.\d+\.weight|mixture|(^|[._])stages|data_?mix|blend|sampling_weights|(^|[._])weights\b",
        "loss on the mixed data can match although the data for the benchmark was seen less often",
        "evaluate the checkpoint of {a} at the same token count; if it is better, retrain {b} with the weights of {a}",
    ),
    DifferenceCheck(
        "model", "model", 0.88,
        r"^model(\.|$)|(^|[._])(n_)?(layers?|heads?|width|hidden|n_embd|embd|d_model|ffn\w*|qk_norm|z_loss|tie_\w+|rope\w*|"
        r"dropout|architectures?|parameters|trained)(\.|_|$)",
        "a different model: capacity, inductive bias, the meaning of its loss",
        "retrain {b} for a tenth of its steps with the model of {a}",
    ),
    DifferenceCheck(
        "sequence_length", "sequence length", 0.72,
        r"seq(uence)?_?len|max_seq|block_size|(^|[._])context|max_(position|length)|packing",
        "long-context tasks; the loss is a mean over other positions",
        "evaluate both at the shorter length, by position in the sequence",
    ),
    DifferenceCheck(
        "lr_schedule", "LR schedule", 0.86,
        r"(^|[._])(lr|learning_rate|initial_lr|base_lrs?|max_lr|min_lr|peak_lr|lr_\w+)(\.|$)|scheduler|warmup|decay_share|"
        r"decay_(steps|iters|type)|floor$",
        "a lower peak or a shorter decay often gives a normal training loss and a worse evaluation",
        "retrain {b} for a tenth of its steps with the schedule of {a} and compare: holdfast diff {a} NEW",
    ),
    DifferenceCheck(
        "batch", "batch size in tokens", 0.6, r"batch|accumul|tokens_per_step|(^|[._])loop\.",
        "fewer, less noisy updates for the same tokens; the LR usually needs an adjustment",
        "compare at equal tokens, and retrain {b} for a tenth of its steps with the batch of {a}",
    ),
    DifferenceCheck(
        "length", "training length", 0.84,
        r"(^|[._])(steps|max_steps|num_steps|epochs|num_train_epochs|max_epochs|max_iters|train_iters|(total|planned)_steps)$",
        "one run has seen more data; the schedule ends elsewhere",
        "compare the checkpoints of both runs at equal tokens",
    ),
    DifferenceCheck(
        "data", "data", 0.8,
        r"(^|[._])(data|dataset|datasets|corpus|train_files?|data_path|shards?)([._]|$)",
        "different content, another version, duplicates or leaks under the same names",
        "compare token counts and a sample of documents of both sources",
    ),
    DifferenceCheck(
        "clip", "gradient clipping", 0.35, r"clip|max_grad_norm",
        "a clip that is active at every step acts as a lower LR",
        "count the steps with a gradient norm above the clip, in both runs",
    ),
    DifferenceCheck(
        "optimizer", "optimizer settings", 0.62,
        r"beta|(^|[._])(adam_)?eps(ilon)?$|weight_decay|momentum|amsgrad|maximize|nesterov|"
        r"optim(izer|izers)?(?!\w*groups\.\d+\.\d+\.(foreach|fused|capturable|differentiable))",
        "regularisation and the effective step size",
        "retrain {b} for a tenth of its steps with the settings of {a}",
    ),
    DifferenceCheck(
        "precision", "precision", 0.55,
        r"precision|dtypes?$|(^|[._])(bf16|fp16|fp8|tf32|amp)|loss_scal|grad_scal",
        "small updates lost to rounding, steps skipped by overflow; the effect appears late and grows",
        "replay a hundred steps of {b} in fp32 from a checkpoint",
    ),
    DifferenceCheck(
        "recovered", "recoveries", 0.5, r"$^",
        "skipped data and a temporary LR cut; afterwards the run should follow the clean one",
        "holdfast diagnose {b}",
    ),
    DifferenceCheck(
        "seed", "seed", 0.15, r"seed",
        "chance: seeds usually differ by a few tenths of a percent",
        "train a second seed of {a}; a gap of the same size is chance",
    ),
    DifferenceCheck(
        "restarts", "settings changed at a restart", 0.6, r"$^",
        "a run that continues with other settings is two runs",
        "compare the restart events of the journal with run.json",
    ),
    DifferenceCheck(
        "code", "code version", 0.4, r"^code[._]|revision|git_|commit",
        "anything; even a small change to loss, masking or data order counts",
        "git diff between the two revisions; run the revision of {a} with the settings of {b} for a tenth of its steps",
    ),
    DifferenceCheck(
        "packages", "package versions", 0.3, r"^packages\.|^(python|torch|holdfast|cuda)$|(^|[._])version",
        "changed defaults and kernels; rarely, a bug in a release",
        "run a hundred steps with both sets of packages from the same checkpoint",
    ),
    DifferenceCheck(
        "hardware", "hardware and kernels", 0.12,
        r"(^|[._])devices?(\.|$)|^platform|compile|foreach|fused|capturable|differentiable",
        "rounding: other kernels sum in a different order",
        "run a hundred steps on both from the same checkpoint",
    ),
    DifferenceCheck(
        "config", "other settings", 0.3, r"",
        "depends on the setting",
        "retrain {b} for a tenth of its steps with the value of {a}",
    ),
)  # fmt: skip

BY_ID = {check.id: check for check in CHECKS}
_PATTERNS = tuple((check.id, re.compile(check.keys)) for check in CHECKS)


@lru_cache(maxsize=4096)
def check_for_setting(key: str) -> str | None:
    """Return the id of the check for a setting; None for a setting that does not affect the training."""
    name = key.lower()
    if IGNORED.search(name):
        return None
    return next(id for id, pattern in _PATTERNS if pattern.search(name))
