"""Facts about a run: before the guard opens, while it is open, after its end; checked, merged, on record."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.base.errors import ConfigError, RunDirError
from holdfast.core.record import journal
from holdfast.runtime.record.environment import revision


def parts():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)


def guard(run_dir, **options):
    model, optimizer, scheduler = parts()
    return holdfast.Guard(model, optimizer, scheduler=scheduler, run_dir=run_dir, **options)


LOADER = torch.utils.data.DataLoader([torch.ones(4)] * 12, batch_size=3)


def loss(model, batch):
    return model(batch).mean()


def about(run):
    return json.loads((run / "run.json").read_text())


def facts(run):
    return about(run)["facts"]


def said(run):
    record = journal.read(run / "journal.jsonl")
    assert record.torn == []
    return [e for e in record.events if e["event"] == "facts"]


# ---- when


def test_before_the_guard_opens_it_is_kept_and_written_at_the_opening(tmp_path):
    one = guard(tmp_path / "run")
    holdfast.record(one, vocab_size=256, sources={"web": 0.7, "code": 0.3})
    assert not (tmp_path / "run").exists()
    with one:
        assert facts(tmp_path / "run") == {"vocab_size": 256, "sources": {"web": 0.7, "code": 0.3}}
    assert said(tmp_path / "run")[0]["facts"] == facts(tmp_path / "run")


def test_while_it_is_open_results_carry_the_step(tmp_path):
    run = tmp_path / "run"
    with guard(run) as one:
        for step in one.steps(LOADER, max_steps=4):
            with step:
                for batch in step.microbatches():
                    step.backward(one._run.context.state.modules[0][1](batch).mean())
            holdfast.record(one, eval={"hellaswag": 0.1 * step.number})
        holdfast.record(one, step=400, eval={"hellaswag": 0.4, "mmlu": torch.tensor(0.25)})
    results = [(e["step"], e["facts"]["eval"]) for e in said(run) if "eval" in e["facts"]]
    assert [step for step, _ in results] == [1, 2, 3, 4, 400]
    assert results[-1][1] == {"hellaswag": 0.4, "mmlu": 0.25}
    assert facts(run)["eval"] == {"hellaswag": 0.4, "mmlu": 0.25}


def test_same_score_at_a_later_step_is_a_result_of_its_own(tmp_path):
    with guard(tmp_path) as one:
        for step in (10, 20):
            one.record(step=step, eval={"mmlu": 0.25})
    assert [e["step"] for e in said(tmp_path)] == [10, 20]


def test_after_the_end_through_the_guard_or_by_path(tmp_path):
    one = guard(tmp_path)
    one.fit(loss, LOADER, max_steps=2)
    holdfast.record(one, eval={"mmlu": 0.2})
    holdfast.record(tmp_path, decode={"temperature": 0})
    holdfast.record(str(tmp_path), eval={"hellaswag": 0.4})
    assert facts(tmp_path)["eval"] == {"mmlu": 0.2, "hellaswag": 0.4}
    assert facts(tmp_path)["decode"] == {"temperature": 0}
    assert len(said(tmp_path)) == 4, "the loop's own and three"


def test_run_in_progress_is_recorded_through_its_guard(tmp_path):
    with (
        guard(tmp_path),
        pytest.raises(RunDirError, match=r"is in use .* record through its Guard: holdfast.record\(guard"),
    ):
        holdfast.record(tmp_path, vocab_size=3)


def test_run_of_another_process_says_which(tmp_path, start):
    one = guard(tmp_path)
    one.fit(loss, LOADER, max_steps=1)
    source = """
import sys
from holdfast.core.record.rundir import RunDir
folder = RunDir(sys.argv[1]); folder.acquire(); print("held", flush=True); sys.stdin.read()
"""
    other = start(source, tmp_path)
    assert other.line() == "held"
    with pytest.raises(
        RunDirError, match=f"in use by process {other.pid} on .*; while it runs, record through its Guard"
    ):
        holdfast.record(tmp_path, vocab_size=3)


def test_restart_goes_on_with_what_was_recorded(tmp_path):
    for value in (1, 1, 2):
        one = guard(tmp_path)
        holdfast.record(one, seed=value)
        one.fit(loss, LOADER, max_steps=2)
    changes = [(e["facts"], e.get("previous")) for e in said(tmp_path) if "seed" in e["facts"]]
    assert changes == [({"seed": 1}, None), ({"seed": 2}, {"seed": 1})]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"facts": 7}', None])
def test_lost_run_json_is_made_again_from_the_journal(tmp_path, damage, caplog):
    one = guard(tmp_path)
    holdfast.record(one, vocab_size=512)
    one.fit(loss, LOADER, max_steps=2)
    if damage is None:
        (tmp_path / "run.json").unlink()
    else:
        (tmp_path / "run.json").write_text(damage)
        with pytest.raises(RunDirError, match="run.json .* JSON object; move it away"):
            holdfast.record(tmp_path, seed=1)
    guard(tmp_path).fit(loss, LOADER, max_steps=2)
    assert facts(tmp_path)["vocab_size"] == 512
    assert about(tmp_path)["torch"] == torch.__version__


def test_guard_without_a_folder_or_taken_out_keeps_nothing(tmp_path, monkeypatch):
    one = guard(None)
    one.record(vocab_size=3)
    one.fit(loss, LOADER, max_steps=1)
    one.record(vocab_size=4)
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    off = guard(tmp_path / "off")
    off.record(vocab_size=3)
    off.fit(loss, LOADER, max_steps=1)
    off.record(vocab_size=4)
    assert not (tmp_path / "off").exists()
    with pytest.raises(ConfigError):
        off.record(vocab_size="many")


# ---- what


def test_later_calls_merge_and_only_changes_are_written(tmp_path):
    with guard(tmp_path) as one:
        one.record(precision="bf16", sources={"web": 0.7, "code": 0.3})
        one.record(precision="bf16")
        one.record(sources={"web": 1.0})
        one.record(note="x", precision=None)
    assert facts(tmp_path) == {"sources": {"web": 1.0}, "note": "x"}
    events = said(tmp_path)
    assert len(events) == 3
    assert events[1]["previous"] == {"sources": {"web": 0.7, "code": 0.3}}
    assert events[2]["facts"] == {"note": "x", "precision": None}


def test_nan_is_written_as_nan(tmp_path):
    with guard(tmp_path) as one:
        one.record(eval={"perplexity": math.nan})
    assert "NaN" in (tmp_path / "run.json").read_text()
    assert math.isnan(facts(tmp_path)["eval"]["perplexity"])


def test_numbers_of_other_libraries_are_numbers(tmp_path):
    with guard(tmp_path) as one:
        one.record(seed=np.int64(3), eval={"a": np.float32(0.5), "b": torch.tensor([0.25])}, sizes=(1, 2))
    assert facts(tmp_path) == {"seed": 3, "eval": {"a": 0.5, "b": 0.25}, "sizes": [1, 2]}


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "no facts given; name some"),
        ({"vocab_size": 0}, "vocab_size = 0: must be a whole number from 1"),
        ({"vocab_size": True}, "vocab_size = True: must be a whole number"),
        ({"sources": {"web": -1}}, "sources = {'web': -1}: must be a dict of names and numbers"),
        ({"sources": ["web"]}, "sources = "),
        ({"eval": {"mmlu": "good"}}, "eval = {'mmlu': 'good'}: must be a dict of metrics and numbers"),
        ({"eval": {}}, "eval = {}"),
        ({"decode": "greedy"}, "decode = 'greedy': must be a dict of settings"),
        ({"precision": 16}, "precision = 16: must be text"),
        ({"seed": "x"}, "seed = 'x'"),
        ({"sources": {1: 0.5}}, "the key 1 is not text; write str(1)"),
        ({"tokenizer": object()}, "a object is not plain JSON data; record holdfast.fingerprint(...) of it"),
        ({"loop_of": LOOP}, "deeper than 16 levels, or it contains itself"),
        ({"vocabulary": {str(n): n for n in range(40_000)}}, "record its holdfast.fingerprint() instead"),
        ({"x": {1, 2}}, "a set is not plain JSON data"),
        ({"x": torch.ones(3)}, "a Tensor is not plain JSON data"),
        ({"step": -1, "x": 1}, "step = -1: expected a whole number from 0"),
        ({"step": "3", "x": 1}, "step = '3'"),
    ],
)
def test_bad_facts_are_refused_with_the_cure_and_change_nothing(tmp_path, wrong, words):
    with guard(tmp_path) as one:
        before = (tmp_path / "run.json").read_bytes()
        with pytest.raises(ConfigError) as error:
            holdfast.record(one, **wrong)
        assert words in str(error.value)
        assert (tmp_path / "run.json").read_bytes() == before
    assert said(tmp_path) == []


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as error:
        holdfast.record("runs/a", vocab_size=-1, decode=3, seed="x")
    assert len(error.value.errors) == 3


@pytest.mark.parametrize("run", [None, 3, object()])
def test_run_must_be_a_guard_or_a_path(run):
    with pytest.raises(ConfigError, match="pass a holdfast.Guard or the path of a run directory"):
        holdfast.record(run, seed=1)


def test_path_must_be_a_run(tmp_path):
    with pytest.raises(RunDirError, match="no such folder"):
        holdfast.record(tmp_path / "none", seed=1)
    with pytest.raises(RunDirError, match="is not a run directory: it has no run.json"):
        holdfast.record(tmp_path, seed=1)
    assert list(tmp_path.iterdir()) == []


def test_path_form_needs_no_torch(tmp_path):
    guard(tmp_path).fit(loss, LOADER, max_steps=1)
    source = "import sys, holdfast; holdfast.record(sys.argv[1], seed=1); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
    assert facts(tmp_path)["seed"] == 1


# ---- what the guard sees for itself


def test_guard_writes_down_what_it_was_given(tmp_path):
    one = guard(tmp_path, clip_grad_norm=2.0)
    one.fit(loss, LOADER, accumulate=2, max_steps=2)
    seen = about(tmp_path)
    (group,) = seen["optimizer_groups"][0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.01, [0.8, 0.9], 0.01, 1e-8)
    assert seen["schedulers"][0]["class"] == "CosineAnnealingLR" and seen["schedulers"][0]["T_max"] == 50
    assert (seen["clip_grad_norm"], seen["dtypes"], seen["devices"]) == (2.0, {"float32": 5}, ["cpu"])
    assert seen["packages"]["torch"] == torch.__version__ and seen["packages"]["numpy"] == np.__version__
    assert facts(tmp_path) == {"loop": {"accumulate": 2, "batch_size": 3}}
    assert {"holdfast", "python", "torch", "config", "model", "parameters", "seed", "optimizers"} <= seen.keys()


def test_revision_is_read_from_the_repository_s_files(tmp_path):
    assert revision(Path(tmp_path.anchor)) is None
    git = tmp_path / ".git"
    git.mkdir()
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (git / "HEAD").write_text("1" * 40 + "\n")
    assert revision(inner) == "1" * 40
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert revision(inner) is None, "no commit yet"
    (git / "packed-refs").write_text(f"# pack-refs\n{'2' * 40} refs/heads/main\n")
    assert revision(inner) == "2" * 40
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("3" * 40 + "\n")
    assert revision(inner) == "3" * 40
    tree = git / "worktrees" / "w"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/main\n")
    (tree / "commondir").write_text("../..\n")
    (inner / ".git").write_text(f"gitdir: {tree}\n")
    assert revision(inner) == "3" * 40


# ---- fingerprints


class Words:
    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: n for n, word in enumerate(self.words)}


class Fast(Words):
    """As the tokenizers package has them: its text says more than the vocabulary."""

    def __init__(self, *words, merges=(), padding=None):
        super().__init__(*words)
        self.rules = {"model": {"vocab": self.get_vocab(), "merges": list(merges)}, "padding": padding}

    def to_str(self):
        return json.dumps(self.rules)


def test_fingerprint_is_of_the_content_and_stable():
    print_ = holdfast.fingerprint
    assert print_({"b": 1, "a": [1, 2]}) == print_({"a": (1, 2), "b": 1})
    assert print_({"a": 1}) == "sha256:01cb9fbb85e2621a3bc901c3457e37de2597e14b8f92607ec21b72b736683458"
    assert print_(Words("a", "b")) == print_(Words("a", "b")) != print_(Words("b", "a"))
    assert print_(Fast("a", merges=["x"])) != print_(Fast("a"))
    assert print_(Fast("a", padding={"length": 8})) == print_(Fast("a")), "encoding a batch changes that"
    assert print_(b"a") != print_(b"b")
    assert print_(np.arange(3)) != print_(np.arange(3.0)) != print_(np.arange(4.0))
    things = [b"a", {"a": 1}, {"a": 1.5}, [1], None, Words("a"), np.arange(3)]
    assert len({print_(thing) for thing in things}) == len(things)
    assert all(len(print_(thing)) == 71 for thing in things)


def test_fingerprint_of_paths(tmp_path):
    file, folder = tmp_path / "a.txt", tmp_path / "folder"
    file.write_text("one")
    folder.mkdir()
    (folder / "x").write_text("1")
    first, whole = holdfast.fingerprint(file), holdfast.fingerprint(folder)
    assert holdfast.fingerprint(str(file)) == first
    file.rename(tmp_path / "b.txt")
    assert holdfast.fingerprint(tmp_path / "b.txt") == first, "the name of a file is not its content"
    (folder / "x").rename(folder / "y")
    assert holdfast.fingerprint(folder) != whole, "the names in a folder are"
    with pytest.raises(ConfigError, match=r"no such file or folder; for a text itself pass bytes: text.encode\(\)"):
        holdfast.fingerprint("none")


def test_fingerprint_is_the_same_in_another_process():
    source = "import holdfast; print(holdfast.fingerprint({'a': {'x', 'y', 'z'}, 'b': [1, 2.5, None]}))"
    done = [
        subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60).stdout
        for _ in range(3)
    ]
    assert len(set(done)) == 1 and done[0].startswith("sha256:")


@pytest.mark.parametrize(
    "thing", [object(), lambda: 1, torch.ones(2, requires_grad=True), {"a": object()}, {(1, 2): 3}]
)
def test_fingerprint_refuses_what_it_would_have_to_run(thing):
    with pytest.raises(ConfigError, match="fingerprint"):
        holdfast.fingerprint(thing)
