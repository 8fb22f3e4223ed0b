"""The checks, the statistics of curves, and logs of other tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.diagnosis import rundiff
from holdfast.diagnosis.model.table import Series, Table
from holdfast.diagnosis.rundiff import curves, report
from holdfast.diagnosis.rundiff.checks import BY_ID, CHECKS, check_for_setting
from holdfast.diagnosis.rundiff.compared_run import ComparedRun, Recovery, flatten
from holdfast.diagnosis.rundiff.load import complete, from_table
from holdfast.diagnosis.rundiff.report import DiffReport


@pytest.mark.parametrize(
    ("key", "check"),
    [
        ("optimizer.lr", "lr_schedule"),
        ("learning_rate", "lr_schedule"),
        ("scheduler.warmup_steps", "lr_schedule"),
        ("lr_scheduler_type", "lr_schedule"),
        ("optimizer_groups.0.0.initial_lr", "lr_schedule"),
        ("optimizer.beta2", "optimizer"),
        ("optimizer_groups.0.1.weight_decay", "optimizer"),
        ("optimizer_groups.0.0.fused", "hardware"),
        ("adam_epsilon", "optimizer"),
        ("detect.warmup_steps", "policy"),
        ("train.steps", "length"),
        ("num_train_epochs", "length"),
        ("model.layers", "model"),
        ("model.z_loss", "model"),
        ("parameters", "model"),
        ("model.vocab_size", "vocab_size"),
        ("dataset.sources.0.weight", "mixture"),
        ("dataset.sources.0.path", "data"),
        ("dataset.eval_share", "evaluation"),
        ("dataset.workers", "housekeeping"),
        ("eval.every", "housekeeping"),
        ("eval.batches", "evaluation"),
        ("per_device_train_batch_size", "batch"),
        ("gradient_accumulation_steps", "batch"),
        ("max_grad_norm", "clip"),
        ("train.clip_grad_norm", "clip"),
        ("distributed.data", "world"),
        ("loss_scaler", "precision"),
        ("packages.torch", "packages"),
        ("code.revision", "code"),
        ("generation.top_p", "decode"),
        ("train.compile", "hardware"),
        ("something_else", "config"),
        ("train.run_dir", None),
        ("argv", None),
        ("global_step", None),
        ("planned_steps", "length"),
    ],
)
def test_setting_belongs_to(key, check):
    assert check_for_setting(key) == check


def test_table_is_whole():
    assert len(BY_ID) == len(CHECKS)
    for check in CHECKS:
        assert 0 < check.weight <= 1
        assert check.name and check.explains and check.confirm
        check.confirm.format(a="A", b="B")


def test_docs_list_every_check_with_its_weight():
    page = (Path(__file__).parents[3] / "docs" / "diff.md").read_text()
    for check in CHECKS:
        assert f"| {check.name} | {check.weight:g} | {check.explains} |" in page, check.id
    for kind in (
        DiffReport,
        report.RunSummary,
        report.Suspect,
        report.CurveComparison,
        report.EvalComparison,
        report.SettingDifference,
        report.DiffVerdict,
    ):
        assert all(f"`{name}`" in page for name in kind.__struct_fields__), kind.__name__


def test_flatten_names_every_leaf():
    assert flatten({"a": {"b": 1, "c": [1, 2]}, "d": [{"e": None}], "f": {}}) == {
        "a.b": 1,
        "a.c": [1, 2],
        "d.0.e": None,
        "f": {},
    }


# ---- curves


def side(values, *, seed=0, noise=0.05, tokens=64, name="side", lr=None) -> ComparedRun:
    steps = np.arange(1.0, len(values) + 1)
    columns = {"loss": values + np.random.default_rng(seed).normal(0, noise, len(values))}
    if lr is not None:
        columns["lr"] = lr
    return ComparedRun(name, "test", steps, columns, tokens=None if tokens is None else steps * tokens)


def falling(count=2000, end=2.0):
    return end + 3 * np.exp(-np.arange(count) / (count / 8))


@pytest.mark.parametrize("seed", range(20))
def test_two_draws_of_one_curve_do_not_part(seed):
    found = curves.compare(side(falling(), seed=2 * seed), side(falling(), seed=2 * seed + 1), "loss", "tokens")
    assert found is not None and not found.parted
    assert abs(found.gap) < 0.01
    assert found.noise == pytest.approx(0.05 / 2.0, rel=0.25)


@pytest.mark.parametrize("at", [400, 1000, 1600])
def test_curves_part_where_they_do(at):
    other = falling()
    other[at:] += 0.05
    found = curves.compare(side(falling(), seed=1), side(other, seed=2), "loss", "steps")
    assert found is not None and found.parted
    assert found.parts_at_step == pytest.approx(at, abs=120)
    assert found.gap == pytest.approx(0.025, abs=0.01)


def test_curves_with_other_batches_are_laid_over_each_other_at_equal_tokens():
    small, large = falling(4000), falling(1000)
    one, two = side(small, seed=1, tokens=64), side(large, seed=2, tokens=256)
    assert curves.common_axis(one, two) == ("tokens", None)
    found = curves.compare(one, two, "loss", "tokens")
    assert found is not None and not found.parted


def test_without_tokens_runs_are_compared_at_equal_steps():
    axis, note = curves.common_axis(side(falling()), side(falling(), tokens=None))
    assert axis == "steps"
    assert note == "compared at equal steps: no tokens per step recorded for B"


def test_no_common_stretch_is_no_comparison():
    early, late = side(falling(100)), side(falling(100))
    late.step += 1000
    assert curves.compare(early, late, "loss", "steps") is None


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (lambda p: np.ones_like(p), "constant"),
        (lambda p: 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * p)), "cosine decay"),
        (lambda p: 1 - p, "linear decay"),
        (lambda p: np.where(p < 0.8, 1.0, 1 - (p - 0.8) / 0.2), "stable, then decay"),
        (lambda p: 1 / np.sqrt(1 + 99 * p), "inverse square root"),
        (lambda p: np.where(p < 0.5, 1.0, 0.1), "another shape"),
    ],
)
def test_shape_of_a_schedule_has_a_name(shape, name):
    progress = np.linspace(0, 1, 900)
    lr = 3e-4 * np.concatenate([np.linspace(0.01, 1, 100), shape(progress)])
    found = curves.lr_schedule(side(falling(1000), lr=lr))
    assert found is not None
    assert (found.shape, found.peak) == (name, pytest.approx(3e-4))
    assert found.warmup == pytest.approx(100, abs=2)
    assert found.integral == pytest.approx(lr.sum())


def test_what_a_recovery_took_off_the_lr_is_put_back():
    planned = np.full(400, 3e-4)
    taken = planned.copy()
    taken[100:150] *= 0.5 + 0.5 * np.arange(50) / 50
    taken[120:220] = 3e-4 * (0.25 + 0.75 * np.arange(100) / 100)
    recovered = side(falling(400), lr=taken)
    recovered.recoveries = [
        Recovery("cut_lr", 101, 150, "LR x 0.5", 0.5),
        Recovery("rollback", 121, 140, "back"),
        Recovery("cut_lr", 121, 220, "LR x 0.25", 0.25),
    ]
    clean = side(falling(400), lr=planned, seed=1)
    clean.recoveries = []
    found, expected = curves.lr_schedule(recovered), curves.lr_schedule(clean)
    assert found is not None and expected is not None
    assert found[:4] == pytest.approx(expected[:4]) and found.shape == expected.shape == "constant"
    compared_runs = rundiff.compare(clean, recovered)
    assert [s.check for s in compared_runs.suspects] == ["recovered"]
    assert "A is clean" in compared_runs.suspects[0].reason


# ---- other tools' logs


def table(path="log", *, lr=3e-4, seed=0, facts=None, tokens=None):
    steps = np.arange(1.0, 401)
    columns = {
        "loss": falling(400) + np.random.default_rng(seed).normal(0, 0.02, 400),
        "lr": lr * (1 - np.arange(400) / 400),
    }
    if tokens:
        columns["tokens"] = tokens * steps
    made = log(steps, **columns)
    made.path, made.facts = path, facts or {}
    made.evals["eval/accuracy"] = Series(np.array([400.0]), np.array([0.5 if lr == 3e-4 else 0.4]))
    return made


def log(steps, **columns):
    """A table in which every column has a value in every row."""
    values = {name: np.asarray(column, dtype=float) for name, column in columns.items()}
    return Table("log", "csv", np.asarray(steps, dtype=float), values, {n: np.isfinite(v) for n, v in values.items()})


def compared(a, b):
    sides = [from_table(one) for one in (a, b)]
    for one in sides:
        complete(one)
    return rundiff.compare(*sides)


def test_log_with_a_lower_lr():
    report = compared(table("a"), table("b", lr=1e-4, seed=1))
    assert report.suspects[0].check == "lr_schedule"
    assert report.axis == "steps" and "recorded for A and B" in report.axis_note
    assert report.verdict.worse == "b"
    missing = {entry.check for entry in report.not_compared}
    assert {"tokenizer", "mixture", "recovered", "seed", "grad_norm", "precision"} <= missing
    assert not missing & {"config", "housekeeping"}


def test_settings_of_other_tools_are_understood():
    one = {"args": {"learning_rate": 3e-4, "seed": 1, "bf16": True, "block_size": 1024, "adam_beta2": 0.95}}
    two = {"args": {"learning_rate": 3e-4, "seed": 1, "fp16": True, "block_size": 2048, "adam_beta2": 0.999}}
    report = compared(table("a", facts=one), table("b", facts=two, seed=1))
    assert {"sequence_length", "precision", "optimizer"} <= {s.check for s in report.suspects}
    assert "seed" in report.same


def csv(path, lr, seed):
    noise = np.random.default_rng(seed).normal(0, 0.02, 400)
    rows = [
        f"{i + 1},{v + n:.6f},{lr * (1 - i / 400):.8f}"
        for i, (v, n) in enumerate(zip(falling(400), noise, strict=True))
    ]
    path.write_text("\n".join(["step,loss,lr", *rows]) + "\n")
    return path


def test_csv_against_csv(tmp_path):
    a, b = csv(tmp_path / "a.csv", 3e-4, 0), csv(tmp_path / "b.csv", 1e-4, 1)
    report = rundiff.compare(rundiff.load(a), rundiff.load(b))
    assert report.suspects[0].check == "lr_schedule"
    assert "the peak is 0.0003 in A and 0.0001 in B" in report.suspects[0].reason
    assert report.axis == "steps"
    assert not next(curve for curve in report.curves if curve.signal == "loss").parted


def test_csv_against_itself_under_another_name(tmp_path):
    a, b = csv(tmp_path / "a.csv", 3e-4, 0), csv(tmp_path / "b.csv", 3e-4, 0)
    report = rundiff.compare(rundiff.load(a), rundiff.load(b))
    assert report.verdict.identical
    assert "Not compared: evaluation results, tokenizer" in report.verdict.text


def test_tokens_of_a_log_are_its_axis():
    report = compared(table("a", tokens=1000), table("b", tokens=2000, seed=1))
    assert report.axis == "tokens"
    assert {"batch", "length"} <= {s.check for s in report.suspects}


def test_column_of_zeros_is_no_count_of_tokens():
    steps = np.arange(1, 50)
    read = from_table(log(steps, loss=1.0 / steps, tokens=np.zeros(49)))
    assert read.tokens is None


def test_rows_of_a_step_logged_twice_count_once():
    read = from_table(log([1, 2, 2, 3], loss=[3.0, 9.0, 2.5, 2.0]))
    assert (read.step.tolist(), read.columns["loss"].tolist()) == ([1, 2, 3], [3.0, 2.5, 2.0])


def test_log_without_a_single_number_in_common_is_all_unknown():
    report = compared(log([1], accuracy=[0.1]), table())
    assert {"loss", "lr"} <= {entry.check for entry in report.not_compared}
    assert report.verdict.text.startswith("No comparable setting differs")
