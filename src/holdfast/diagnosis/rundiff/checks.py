"""The suspects, as data: what each is, how much it weighs, what it explains, and how to confirm it.

`weight` is how often a difference of this kind, large enough, turns out to be why one of two runs evaluates worse while
its loss looks fine: 1 nearly always, 0 never. `keys` are the settings that belong to the check; a setting goes to the
first check, in this order, that claims it. `acts` says where the difference works: on the training itself, or only on
the evaluation; what works on training cannot be the cause where the training losses are equal to the last bit.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple


class Check(NamedTuple):
    """One way in which two runs can differ."""

    id: str
    name: str
    weight: float
    keys: str
    explains: str
    confirm: str
    acts: Literal["training", "evaluation", "both"] = "training"


# Settings that tell where a run is kept, when it ran and how far it is, not what it is.
IGNORED = re.compile(
    r"(^|[._])(run_dir|output_dir|logging_dir|run_name|run_id|save_dir|out_dir|log_dir|started|argv|hostname|trainer|"
    r"report_to|wandb\w*|resume\w*|disable_tqdm|push_to_hub|hub_\w+|epoch|"
    r"global_step|total_flos|best_\w+|logged_every|num_input_tokens_seen)$"
)

CHECKS: tuple[Check, ...] = (
    Check(
        "housekeeping", "logging and housekeeping", 0.01,
        r"(^|[._])(log_every|log_interval|logging_\w+|save_\w+|eval_steps|eval_interval|threads|(num_)?workers|"
        r"dataloader_\w+|flush_seconds|verbose)$|^eval\.every$|^checkpoint\.\w+$",
        "nothing that is trained",
        "leave it",
    ),
    Check(
        "policy", "the guard's own policy", 0.05,
        r"^(detect|recover|snapshot|checkpoint|quarantine|oom|liveness|preemption|metrics|profile|journal)\.",
        "what would have been done about a fault; nothing where there was none",
        "look at the recoveries of both runs: holdfast diagnose {b}",
    ),
    Check(
        "world", "world size", 0.25, r"world_size|^distributed|n_gpus?|nproc|num_nodes|(data|tensor|pipeline)_parallel",
        "another global batch or another order of summation, where the batch was not kept",
        "compare the batch size in tokens, and how data is sharded",
    ),
    Check(
        "tokenizer", "tokenizer", 1.0, r"tokeniz(er|ation)",
        "training loss stays sensible, while generation and benchmarks are read as other text",
        "encode one text with both tokenizers and compare the ids; evaluate {b} with the tokenizer it was trained with",
        "both",
    ),
    Check(
        "vocab_size", "vocabulary size", 0.98, r"vocab",
        "tokens that are never trained, or ids that mean something else at evaluation: loss sensible, benchmarks nonsense",
        "compare the model's vocab_size with the tokenizer's and with the data's metadata, for {a} and for {b}",
        "both",
    ),
    Check(
        "decode", "decode settings", 0.92,
        r"(^|[._])(decod(e|ing)|generation|temperature|top_p|top_k|repetition_penalty|num_beams|max_new_tokens|do_sample)",
        "a benchmark number is set by sampling as much as by the weights",
        "evaluate the checkpoints of both runs with one and the same decode settings",
        "evaluation",
    ),
    Check(
        "evaluation", "evaluation set-up", 0.7,
        r"(^|[._])eval(uation)?([._]|$)|eval_share|few_?shot|limit_val|val_(split|batches|set)",
        "two numbers that do not measure the same thing",
        "evaluate both checkpoints with one evaluation set-up",
        "evaluation",
    ),
    Check(
        "mixture", "data mixture", 0.9,
        r"sources\.\d+\.weight|mixture|(^|[._])stages|data_?mix|blend|sampling_weights|(^|[._])weights\b",
        "loss on the mixed data can match while what the benchmark asks for was seen less often",
        "evaluate {a}'s checkpoint at the same token count; if that is better too, train {b} again with {a}'s weights",
    ),
    Check(
        "model", "model", 0.88,
        r"^model(\.|$)|(^|[._])(n_)?(layers?|heads?|width|hidden|n_embd|embd|d_model|ffn\w*|qk_norm|z_loss|tie_\w+|rope\w*|"
        r"dropout|architectures?|parameters|trained)(\.|_|$)",
        "another model: capacity, inductive bias, what its loss number means",
        "train {b} again for a tenth of its steps with {a}'s model",
    ),
    Check(
        "sequence_length", "sequence length", 0.72,
        r"seq(uence)?_?len|max_seq|block_size|(^|[._])context|max_(position|length)|packing",
        "long-context tasks; also what one loss number is a mean over",
        "evaluate both at the shorter length, by position in the sequence",
    ),
    Check(
        "lr_schedule", "LR schedule", 0.86,
        r"(^|[._])(lr|learning_rate|initial_lr|base_lrs?|max_lr|min_lr|peak_lr|lr_\w+)(\.|$)|scheduler|warmup|decay_share|"
        r"decay_(steps|iters|type)|floor$",
        "a lower peak or a shorter decay often gives a fine training loss and a worse evaluation",
        "train {b} again for a tenth of its steps with {a}'s schedule and compare: holdfast diff {a} NEW",
    ),
    Check(
        "batch", "batch size in tokens", 0.6, r"batch|accumul|tokens_per_step|(^|[._])loop\.",
        "fewer, less noisy updates for the same tokens; the LR usually has to follow",
        "compare at equal tokens, and train {b} again for a tenth of its steps with {a}'s batch",
    ),
    Check(
        "length", "training length", 0.84,
        r"(^|[._])(steps|max_steps|num_steps|epochs|num_train_epochs|max_epochs|max_iters|train_iters|(total|planned)_steps)$",
        "one run has simply seen more; a schedule that ends elsewhere",
        "compare the checkpoints of both runs at equal tokens",
    ),
    Check(
        "data", "data", 0.8,
        r"(^|[._])(data|dataset|datasets|corpus|train_files?|data_path|shards?)([._]|$)",
        "other content, another version, duplicates or leaks under the same names",
        "compare token counts and a sample of documents of both sources",
    ),
    Check(
        "clip", "gradient clipping", 0.35, r"clip|max_grad_norm",
        "a clip that binds at every step is a lower LR",
        "count the steps whose gradient norm is above the clip, in both",
    ),
    Check(
        "optimizer", "optimizer settings", 0.62,
        r"beta|(^|[._])(adam_)?eps(ilon)?$|weight_decay|momentum|amsgrad|maximize|nesterov|"
        r"optim(izer|izers)?(?!\w*groups\.\d+\.\d+\.(foreach|fused|capturable|differentiable))",
        "regularisation and the effective step size",
        "train {b} again for a tenth of its steps with {a}'s settings",
    ),
    Check(
        "precision", "precision", 0.55,
        r"precision|dtypes?$|(^|[._])(bf16|fp16|fp8|tf32|amp)|loss_scal|grad_scal",
        "small updates lost to rounding, overflows skipped; shows late and grows",
        "replay a hundred steps of {b} in fp32 from one checkpoint",
    ),
    Check(
        "recovered", "recovered stretches", 0.5, r"$^",
        "data left out and an LR cut for a while; after that the run should follow the clean one",
        "holdfast diagnose {b}",
    ),
    Check(
        "seed", "seed", 0.15, r"seed",
        "chance: differences of a few tenths of a percent between seeds are usual",
        "train a second seed of {a}; a gap that is no larger than theirs is chance",
    ),
    Check(
        "restarts", "settings changed at a restart", 0.6, r"$^",
        "a run that was continued with other settings than it began with is two runs",
        "compare the journal's restart events with run.json",
    ),
    Check(
        "code", "code version", 0.4, r"^code[._]|revision|git_|commit",
        "anything at all; the smallest change to loss, masking or data order counts",
        "git diff between the two revisions; run {a}'s revision with {b}'s settings for a tenth of its steps",
    ),
    Check(
        "packages", "package versions", 0.3, r"^packages\.|^(python|torch|holdfast|cuda)$|(^|[._])version",
        "changed defaults and kernels; rarely, a bug of a release",
        "run a hundred steps with both sets of packages from one checkpoint",
    ),
    Check(
        "hardware", "hardware and kernels", 0.12,
        r"(^|[._])devices?(\.|$)|^platform|compile|foreach|fused|capturable|differentiable",
        "rounding: other kernels sum in another order",
        "run a hundred steps on both from one checkpoint",
    ),
    Check(
        "config", "other settings", 0.3, r"",
        "whatever the setting does",
        "train {b} again for a tenth of its steps with {a}'s value",
    ),
)  # fmt: skip

BY_ID = {check.id: check for check in CHECKS}
_PATTERNS = tuple((check.id, re.compile(check.keys)) for check in CHECKS)


@lru_cache(maxsize=4096)
def claims(key: str) -> str | None:
    """The check a setting belongs to; None for one that says nothing of the run."""
    name = key.lower()
    if IGNORED.search(name):
        return None
    return next(id for id, pattern in _PATTERNS if pattern.search(name))
