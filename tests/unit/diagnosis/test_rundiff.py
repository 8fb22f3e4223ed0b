"""Two real runs that differ in one thing: that difference ranks first, and nothing untested counts as equal."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from small_runs import STEPS, train

import holdfast
from holdfast.core.base.errors import HoldfastError
from holdfast.diagnosis import rundiff
from holdfast.drill.fault_schedule import FaultSchedule
from holdfast.drill.faults import NanBatch
from holdfast.reports.diff_page import build_diff_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def base(folder):
    return train(folder, "base")


@pytest.fixture(scope="module")
def mixed(folder):
    return train(folder, "mixed", weights=(0.3, 0.7))


def compared(a, b):
    return rundiff.compare(rundiff.load(a), rundiff.load(b))


def copied(run, to):
    """Copy a run, to record other facts for it."""
    shutil.copytree(run, to)
    return to


def suspects(report) -> list[str]:
    return [s.check for s in report.suspects]


def names(report) -> set[str]:
    return {entry.check for entry in report.not_compared}


# ---- one thing changed


def test_mixture_weights_rank_first(base, mixed):
    report = compared(base, mixed)
    first = report.suspects[0]
    assert first.check == "mixture"
    assert "web.tokens has 70.0% of the weight in A and 30.0% in B" in first.reason
    assert report.verdict.suspect == "mixture"
    assert "Most likely cause of" in report.verdict.text and "data mixture" in report.verdict.text
    assert set(suspects(report)) == {"mixture"}
    assert {"tokenizer", "vocab_size", "sequence_length", "lr_schedule", "seed", "data"} <= set(report.same)


def test_later_stage_counts_as_mixture(folder, base):
    staged = train(
        folder, "staged", dataset={"stages": [{"from_step": 2, "weights": [0.0, 1.0]}]}, train={"steps": 250}
    )
    report = compared(train(folder, "unstaged", train={"steps": 250}), staged)
    assert suspects(report)[0] == "mixture"
    assert "stages differ" in report.suspects[0].reason
    assert report.suspects[0].a and "code.tokens" in report.suspects[0].reason


def test_lower_peak_lr_ranks_first(folder, base):
    report = compared(base, train(folder, "slow", optimizer={"lr": 0.0005}))
    first = report.suspects[0]
    assert first.check == "lr_schedule"
    assert "the peak is 0.003 in A and 0.0005 in B" in first.reason
    assert report.verdict.worse == "b"
    assert [s.key for s in report.settings] == ["optimizer.lr"]
    loss = next(c for c in report.curves if c.signal == "loss")
    assert loss.parted and loss.gap > 0 and loss.parts_at_step < STEPS
    assert (report.axis, report.axis_note) == ("tokens", None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "constant"}, "cosine decay in A, constant in B"),
        ({"warmup_steps": 60}, "warm-up takes 10 steps in A and 60 in B"),
        ({"floor": 0.8}, "it ends at 10% of the peak in A and at 80% in B"),
        ({"kind": "wsd"}, "cosine decay in A, stable, then decay in B"),
    ],
    ids=["kind", "warm-up", "floor", "wsd"],
)
def test_schedule_shape_ranks_first(folder, base, changes, words):
    name = "-".join(changes) + str(next(iter(changes.values())))
    report = compared(base, train(folder, name, scheduler={"warmup_steps": 10, **changes}))
    assert suspects(report) == ["lr_schedule"]
    assert words in report.suspects[0].reason


def test_vocabulary_size_ranks_first(folder, base):
    report = compared(base, train(folder, "vocabulary", model={"vocab_size": 512}))
    assert suspects(report)[0] == "vocab_size"
    assert "256 in A and 512 in B" in report.suspects[0].reason
    assert "model" not in suspects(report), "more parameters follow from it"


def test_sequence_length_ranks_first(folder, base):
    report = compared(base, train(folder, "longer", model={"context": 32}, train={"batch_size": 4}))
    assert suspects(report)[0] == "sequence_length"


def test_precision_is_the_only_suspect(folder, base):
    report = compared(base, train(folder, "half", train={"precision": "bf16"}))
    assert suspects(report) == ["precision"]


def test_weight_decay_is_the_only_suspect(folder, base):
    report = compared(base, train(folder, "decayed", optimizer={"weight_decay": 0.5}))
    assert suspects(report) == ["optimizer"]
    assert report.suspects[0].reason == "optimizer.weight_decay: 0.1 in A, 0.5 in B"


def test_different_batch_is_compared_at_equal_tokens(folder, base):
    report = compared(base, train(folder, "larger", train={"batch_size": 16, "steps": STEPS // 2}))
    assert suspects(report) == ["batch"]
    assert report.suspects[0].reason == "A takes 128 tokens a step and B 256"
    (entry,) = report.evals
    assert (entry.a_step, entry.b_step) == (STEPS, STEPS // 2), "results are laid side by side at equal tokens too"
    assert report.axis == "tokens"
    assert "length" in report.same, "both have seen as much"


def test_shorter_run_and_its_schedule_rank_first(folder, base):
    report = compared(base, train(folder, "short", train={"steps": STEPS // 3}, scheduler={"kind": "constant"}))
    assert {"length", "lr_schedule"} <= set(suspects(report)[:2])


def test_seed_alone_is_a_weak_suspect(folder, base):
    report = compared(base, train(folder, "seed", train={"seed": 8}))
    assert suspects(report) == ["seed"]
    assert report.suspects[0].score < 0.2
    assert "No recorded difference usually makes an evaluation worse" in report.verdict.text


def test_recovery_is_the_only_suspect_against_a_clean_run(folder, base):
    stormy = train(folder, "stormy", faults=FaultSchedule([NanBatch(30)], 8))
    report = compared(base, stormy)
    assert suspects(report) == ["recovered"]
    assert "skip at step 30" in report.suspects[0].reason
    assert report.suspects[0].reason.endswith("A is clean")
    assert (report.a.status, report.b.status) == ("clean", "recovered")
    loss = next(c for c in report.curves if c.signal == "loss")
    assert loss.identical_steps == 29


def test_setting_changed_at_a_restart_is_the_only_suspect(folder, base):
    parted = train(folder, "parted", stop_at=60)
    train(folder, "parted", optimizer={"weight_decay": 0.9})
    report = compared(base, parted)
    assert suspects(report) == ["restarts"]
    assert report.suspects[0].reason == "B restarted with optimizer.weight_decay 0.9"


def test_stopped_and_resumed_run_is_identical(folder, base):
    parted = train(folder, "resumed", stop_at=60)
    train(folder, "resumed")
    assert compared(base, parted).verdict.identical


def test_mixture_ranks_above_seed_and_housekeeping(folder, base):
    other = train(folder, "several", weights=(0.2, 0.8), train={"seed": 9, "log_every": 5}, recover={"mode": "observe"})
    report = compared(base, other)
    assert suspects(report) == ["mixture", "seed", "policy", "housekeeping"]


# ---- what the loop itself has recorded


def test_decode_settings_of_two_equal_runs(folder, base):
    a, b = copied(base, folder / "greedy"), copied(base, folder / "sampled")
    holdfast.record(a, decode={"temperature": 0}, eval={"hellaswag": 0.41})
    holdfast.record(b, decode={"temperature": 0.8}, eval={"hellaswag": 0.36})
    report = compared(a, b)
    assert suspects(report) == ["decode"]
    assert report.suspects[0].reason == "the decode setting differs in temperature: 0 in A, 0.8 in B"
    assert report.verdict.worse == "b"
    assert "the worse hellaswag of B (0.41 in A, 0.36 in B)" in report.verdict.text
    assert report.not_compared == []


def test_tokenizer_of_the_same_size_is_the_only_suspect(folder, base):
    class Tokenizer:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self):
            return {word: i for i, word in enumerate(self.words)}

    a, b = copied(base, folder / "one"), copied(base, folder / "two")
    holdfast.record(a, tokenizer=holdfast.fingerprint(Tokenizer("a", "b")))
    holdfast.record(b, tokenizer=holdfast.fingerprint(Tokenizer("b", "a")))
    report = compared(a, b)
    assert suspects(report) == ["tokenizer"]
    assert report.suspects[0].reason.startswith("the tokenizer is sha256:")


def test_bit_identical_training_counts_against_training_differences(folder, base):
    a, b = copied(base, folder / "said"), copied(base, folder / "otherwise")
    holdfast.record(b, sources={"web.tokens": 0.1, "code.tokens": 0.9}, decode={"temperature": 1})
    holdfast.record(a, decode={"temperature": 0})
    report = compared(a, b)
    assert suspects(report) == ["decode", "mixture"]
    assert "bit-identical" in report.suspects[1].against[0]


def test_code_and_packages_are_suspects(folder, base):
    b = copied(base, folder / "upgraded")
    about = json.loads((b / "run.json").read_text())
    about["packages"]["torch"] = "9.9"
    about["code"]["revision"] = "f" * 40
    (b / "run.json").write_text(json.dumps(about))
    report = compared(base, b)
    assert set(suspects(report)) == {"code", "packages"}


def test_different_results_of_identical_training_point_at_the_evaluation(folder, base):
    a, b = copied(base, folder / "here"), copied(base, folder / "there")
    holdfast.record(a, eval={"mmlu": 0.30})
    holdfast.record(b, eval={"mmlu": 0.25})
    report = compared(a, b)
    assert report.suspects == []
    assert "compare how they were evaluated" in report.verdict.text
    assert not report.verdict.identical


# ---- the same, and the unknown


def test_repeated_run_is_identical(folder, base):
    report = compared(base, train(folder, "again"))
    assert report.verdict.identical
    assert report.verdict.text.startswith("The runs are identical")
    assert report.suspects == [] and report.settings == []


def test_unrecorded_fact_does_not_count_as_equal(folder, base):
    report = compared(base, train(folder, "twice"))
    assert "decode" in names(report)
    assert "decode" not in report.same


def test_run_without_facts_is_compared_by_its_curves(folder, base):
    bare = copied(base, folder / "bare")
    about = json.loads((bare / "run.json").read_text())
    del about["facts"], about["config"], about["tokens_per_step"]
    (bare / "run.json").write_text(json.dumps(about))
    report = compared(base, bare)
    assert {"tokenizer", "vocab_size", "mixture", "sequence_length", "decode"} <= names(report)
    assert "B does not record" in next(m.why for m in report.not_compared if m.check == "tokenizer")
    assert report.axis == "samples"
    assert report.axis_note is not None and "equal samples" in report.axis_note
    assert "lr_schedule" in report.same, "the curve says it"


def test_damaged_run_is_compared_as_far_as_it_is_readable(folder, base):
    torn = copied(base, folder / "torn")
    (torn / "run.json").write_text("{")
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step":121,"loss":NaN,"status":"committed"}\n{"step": 12')
    with (torn / "journal.jsonl").open("a") as file:
        file.write('{"event":"facts","fa')
    report = compared(base, torn)
    assert report.b.points == STEPS + 1
    assert any("run.json" in limit for limit in report.b.limits)
    assert any("1 lines of metrics.jsonl" in limit for limit in report.b.limits)
    (torn / "metrics.jsonl").unlink()
    (torn / "journal.jsonl").unlink()
    (torn / "run.json").write_text("{}")
    bare = compared(base, torn)
    assert {"loss", "grad_norm", "lr", "recovered"} <= names(bare)


def test_rolled_back_steps_are_not_compared(folder, base):
    back = copied(base, folder / "back")
    rows = (back / "metrics.jsonl").read_text().splitlines()
    wild = [json.dumps({**json.loads(row), "loss": 99.0}) for row in rows[50:60]]
    (back / "metrics.jsonl").write_text("\n".join([*rows[:50], *wild, *rows[50:]]) + "\n")
    report = compared(base, back)
    assert report.b.points == STEPS
    assert report.verdict.identical


def test_nan_result_is_worse_and_stays_nan(folder, base):
    a, b = copied(base, folder / "number"), copied(base, folder / "none")
    holdfast.record(a, eval={"hellaswag": 0.4})
    holdfast.record(b, eval={"hellaswag": math.nan})
    (entry,) = [e for e in compared(a, b).evals if e.metric == "hellaswag"]
    assert math.isnan(entry.b) and entry.worse == "b"


@pytest.mark.parametrize(
    ("first", "second", "worse", "label"),
    [
        (2.0, math.nan, "b", "B is worse"),
        (math.inf, 2.0, "a", "A is worse"),
        (3.0, 2.0, "a", "A is worse"),
        (2.0, 2.0, None, "No worse run"),
        (math.nan, math.nan, None, "No worse run"),
        (None, None, None, "No result to compare"),
    ],
)
def test_a_run_whose_loss_ends_higher_or_not_finite_is_worse_in_every_headline(tmp_path, first, second, worse, label):
    rng = np.random.default_rng(3)
    for name, end in (("a.csv", first), ("b.csv", second)):
        column = "lr" if end is None else "loss"
        ends = [2.0] * 50 + [2.0 if end is None else end] * 250
        rows = [f"{n},{value + 5 / n + 0.01 * rng.standard_normal()}\n" for n, value in enumerate(ends, 1)]
        (tmp_path / name).write_text(f"step,{column}\n{''.join(rows)}")
    a, b = rundiff.load(tmp_path / "a.csv"), rundiff.load(tmp_path / "b.csv")
    report = rundiff.compare(a, b)
    verdict = build_diff_page(report, a, b).verdict
    assert (report.verdict.worse, verdict.label) == (worse, label)
    assert (verdict.tone == "good") == (first == second == 2.0)
    is_finite = all(end is None or math.isfinite(end) for end in (first, second))
    assert is_finite == ("is NaN or Inf from step 51 on" not in verdict.text)


def test_results_over_time_are_compared_at_the_last_common_step(folder, base):
    short = train(folder, "stopped", train={"steps": 80}, scheduler={"kind": "constant"})
    (entry,) = [e for e in compared(base, short).evals if e.metric == "eval_loss"]
    assert (entry.a_step, entry.b_step) == (80, 80)


def test_every_suspect_has_a_reason_and_a_confirmation(base, mixed):
    report = compared(base, mixed)
    for suspect in report.suspects:
        assert suspect.reason and suspect.explains and suspect.confirm
        assert 0 < suspect.score <= suspect.weight <= 1
    assert report.next


def test_missing_path_is_refused(tmp_path):
    with pytest.raises(HoldfastError, match="no such file or folder"):
        rundiff.load(tmp_path / "none")
