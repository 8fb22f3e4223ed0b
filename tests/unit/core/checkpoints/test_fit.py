"""Whether a checkpoint fits the run: each thing that can differ, and how much it weighs."""

from __future__ import annotations

import copy
import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.config import Config
from holdfast.core.checkpoints.fit import NOT_ON_RECORD, Difference, compare, describe, refusal
from marks import examples

OFTEN = settings(max_examples=examples(200), deadline=None, derandomize=True)
SHA = "sha256:" + "5" * 64
OTHER = "sha256:" + "5" * 63 + "6"


def about():
    """What a run of the reference trainer says of itself."""
    return {
        "holdfast": "0.1.0", "python": "3.11.4", "torch": "2.13.0", "platform": "Linux", "cuda": None,
        "started": "2026-11-15T08:00:00+0000", "argv": ["holdfast", "train", "a.toml"],
        "packages": {"holdfast": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
        "code": {"revision": "1" * 40, "script": SHA},
        "config": {
            **msgspec.to_builtins(Config()),
            "model": {"vocab_size": 256, "context": 128, "layers": 4, "qk_norm": False, "z_loss": 0.0},
            "dataset": {"sources": [{"path": "a.tok", "weight": 1.0}], "stages": [], "eval_share": 0.05},
            "train": {"run_dir": "runs/a", "steps": 400, "batch_size": 16, "seed": 0, "clip_grad_norm": 1.0},
            "optimizer": {"lr": 3e-3, "beta2": 0.95},
            "scheduler": {"kind": "cosine", "warmup_steps": 40},
        },
        "model": ["GPT"], "parameters": 1000, "trained": 1000, "dtypes": {"float32": 1000}, "devices": ["cpu"],
        "optimizers": ["AdamW"],
        "optimizer_groups": [[
            {"parameters": 900, "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
            {"parameters": 100, "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0},
        ]],
        "schedulers": [{"class": "LambdaLR", "base_lrs": [3e-3, 3e-3]}],
        "clip_grad_norm": 1.0, "loss_scaler": False, "world_size": 1, "seed": 0,
        "data": [{"name": "a.tok", "tokens": 10_000, "tokenizer": "bytes", "fingerprint": SHA}],
        "precision": "fp32", "tokens_per_step": 2048, "trainer": "holdfast reference",
        "facts": {
            "tokenizer": {"a.tok": "bytes, 256 tokens"}, "data": {"a.tok": SHA}, "sources": {"a.tok": 1.0}, "stages": [],
            "vocab_size": 256, "sequence_length": 128, "precision": "fp32", "seed": 0, "tokens_per_step": 2048,
            "loop": {"accumulate": 1, "batch_size": 16}, "eval": {"loss": 2.0}, "colour": "blue",
        },
    }  # fmt: skip


def changed(path, value):
    """The same run with one thing changed; `path` is dotted, numbers are places in a list."""
    made = copy.deepcopy(about())
    *way, last = (int(word) if word.isdigit() else word for word in path.split("."))
    place = made
    for key in way:
        place = place[key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return made


def only(found):
    assert len(found) == 1, found
    return found[0]


def test_same_run_has_no_differences():
    assert compare(about(), about()) == []
    assert refusal([]) is None
    assert describe([]) == []


def test_record_read_back_from_json_is_the_same_run():
    assert compare(json.loads(json.dumps(about())), about()) == []


def test_configuration_may_be_a_struct():
    assert compare({"config": msgspec.to_builtins(Config())}, {"config": Config()}) == []


REFUSED = [
    ("model", ["MLP"]), ("parameters", 1001), ("dtypes", {"bfloat16": 1000}), ("dtypes", {"float32": 900, "bfloat16": 100}),
    ("config.model.layers", 5), ("config.model.qk_norm", True), ("config.model.vocab_size", 512),
    ("optimizers", ["SGD"]), ("optimizers", ["AdamW", "AdamW"]),
    ("optimizer_groups", [[{"parameters": 1000, "lr": 3e-3}]]), ("optimizer_groups.0.0.parameters", 800),
    ("loss_scaler", True), ("facts.data", {"a.tok": OTHER}), ("facts.data", {"a.tok": SHA, "b.tok": OTHER}), ("data", OTHER),
    ("facts.tokenizer", {"a.tok": "bpe, 256 tokens"}), ("facts.vocab_size", 257),
]  # fmt: skip
WARNED = [
    ("optimizer_groups.0.0.lr", 1e-3), ("optimizer_groups.0.1.betas", (0.9, 0.99)),
    ("optimizer_groups.0.1.weight_decay", 0.1), ("config.optimizer.lr", 1e-3), ("trained", 900),
    ("schedulers.0.class", "CosineAnnealingLR"), ("schedulers.0.base_lrs", [1e-3, 1e-3]), ("schedulers", []),
    ("config.scheduler.warmup_steps", 80), ("config.train.steps", 800), ("config.train.seed", 1),
    ("clip_grad_norm", None), ("clip_grad_norm", 0.5), ("seed", 1), ("facts.seed", 1), ("world_size", 8),
    ("facts.loop.accumulate", 2), ("facts.loop.batch_size", 32), ("facts.tokens_per_step", 4096),
    ("facts.sequence_length", 256), ("config.model.context", 256), ("config.model.z_loss", 1e-4),
    ("facts.precision", "bf16"), ("facts.sources", {"a.tok": 0.5}), ("facts.stages", [{"from_step": 9}]),
    ("config.dataset.sources.0.weight", 2.0), ("config.dataset.eval_share", 0.1),
    ("config.detect.loss_z", 9.0), ("config.recover.ladder", ["skip", "stop"]), ("facts.colour", "red"),
    ("facts.mixed_in", True),
]  # fmt: skip
NOTED = [
    ("code.revision", "2" * 40), ("code.revision", None), ("code.script", OTHER), ("torch", "2.11.0"), ("python", "3.12.1"),
    ("holdfast", "0.2.0"), ("packages.numpy", "2.0.0"), ("packages.triton", "3.0"), ("devices", ["NVIDIA H200"]),
    ("platform", "Linux 6"), ("argv", ["x"]), ("config.train.run_dir", "runs/b"), ("config.checkpoint.every_steps", 50),
    ("config.checkpoint.keep_last", 9), ("config.snapshot.every_steps", 5), ("config.dataset.sources.0.path", "/b/a.tok"),
    ("config.metrics.flush_seconds", 2.0), ("trainer", "other"), ("facts.data", {"b.tok": SHA}), ("something_new", 1),
]  # fmt: skip
PASSING = [("started", "2027"), ("facts.eval", {"loss": 1.9}), ("facts.tokens_per_source", {"a.tok": 9}), ("run", "ab")]


def weighed(path, value):
    found = compare(about(), changed(path, value))
    assert all(one.why for one in found)
    return {one.weight for one in found}


@pytest.mark.parametrize(("path", "value"), REFUSED)
def test_state_of_another_run_is_refused(path, value):
    found = compare(about(), changed(path, value))
    assert only(found).weight == "refuse"
    message = refusal(found)
    assert found[0].what in message
    assert message.endswith(
        'name another run_dir for another run, or set [checkpoint] resume = "never" to start over here'
    )


@pytest.mark.parametrize(("path", "value"), WARNED)
def test_run_that_goes_on_differently_is_warned_of(path, value):
    assert weighed(path, value) == {"warn"}
    assert refusal(compare(about(), changed(path, value))) is None


@pytest.mark.parametrize(("path", "value"), NOTED)
def test_what_is_around_the_run_is_noted(path, value):
    assert weighed(path, value) == {"note"}


@pytest.mark.parametrize(("path", "value"), PASSING)
def test_what_moves_with_every_life_is_no_difference(path, value):
    assert compare(about(), changed(path, value)) == []


@pytest.mark.parametrize("path", sorted({path for path, _ in REFUSED if "config" not in path}))
def test_what_one_side_does_not_have_on_record_is_never_refused(path):
    less = changed(path, KeyError)
    then, now = compare(less, about()), compare(about(), less)
    assert {d.weight for d in (*then, *now)} <= {"warn", "note"}
    assert then and now
    told = [d for d in then if d.what == path]
    assert all(d.was == NOT_ON_RECORD and "not on record then" in d.why for d in told)


def test_old_checkpoint_that_says_nothing_of_itself_is_not_refused():
    assert refusal(compare({}, about())) is None
    assert refusal(compare(about(), {})) is None


def test_nan_is_nan_and_one_is_one_but_true_is_not_one():
    assert compare({"x": math.nan, "y": 1, "z": [math.nan]}, {"x": float("nan"), "y": 1.0, "z": (math.nan,)}) == []
    assert only(compare({"loss_scaler": True}, {"loss_scaler": 1})).weight == "refuse"
    assert only(compare({"x": math.nan}, {"x": 1.0})).weight == "note"


def test_what_is_said_twice_is_told_once():
    now = changed("facts.seed", 7)
    now["seed"] = 7
    assert [d.what for d in compare(about(), now)] == ["seed"]
    now = changed("facts.data", {"a.tok": OTHER})
    now["data"][0]["fingerprint"] = OTHER
    assert len(compare(about(), now)) == 1


def test_other_number_of_groups_is_one_difference():
    found = only(compare(about(), changed("optimizer_groups", [[{"parameters": 1000, "lr": 1.0}]])))
    assert (found.what, found.was, found.now) == ("optimizer_groups", [2], [1])


def test_lines_are_worst_first_with_both_values():
    now = changed("torch", "2.11.0")
    now.update(world_size=8, parameters=2000)
    assert describe(compare(about(), now)) == [
        "refuse: parameters: 1000 then, 2000 now (another model: its weights do not fit)",
        "warn: world_size: 1 then, 8 now (other ranks: the state is resharded, and sums round differently)",
        "note: torch: 2.13.0 then, 2.11.0 now (another version: kernels and defaults may differ)",
    ]


def test_refusal_lists_everything_that_refuses():
    now = changed("facts.tokenizer", "other")
    now.update(parameters=2000, world_size=8)
    message = refusal(compare(about(), now))
    assert "parameters: 1000 then, 2000 now" in message
    assert "facts.tokenizer:" in message
    assert "world_size" not in message


def test_long_values_are_cut_where_they_differ_and_steer_no_terminal():
    line = describe([Difference("x", "a" * 500 + "b", "a" * 500 + "c\x1b[2J", "note", "why")])[0]
    assert len(line) < 200
    assert "b then" in line and "c?[2J now" in line
    assert "\x1b" not in line


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*about(), *about()["facts"], "a.b", ""]) | st.text(max_size=4)
records = st.dictionaries(names, values, max_size=6)


@OFTEN
@given(records, records)
def test_anything_compares_with_anything(a, b):
    for found in (compare(a, b), compare(b, a)):
        assert len(describe(found)) == len(found)
        assert (refusal(found) is None) == all(d.weight != "refuse" for d in found)
    assert compare(a, a) == []
    assert compare(a, copy.deepcopy(a)) == []
