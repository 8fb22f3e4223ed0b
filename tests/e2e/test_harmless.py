"""With no fault, a guarded run is bit-identical to the same loop in plain torch."""

from __future__ import annotations

import json

import pytest
import torch
from cases import OPTIMIZERS, SCHEDULERS, Case, assert_same

import holdfast
from marks import slow
from row_columns import without_times

# Plain torch leaves the momentum of fused SGD uninitialised when the first step overflows: nothing to compare with.
FIRST_STEP_FITS = 256.0


def check(case: Case, tmp_path) -> None:
    guarded = case.guarded(tmp_path / "run")
    assert guarded.guard.summary().status == "clean", str(guarded.guard.summary())
    plain = case.plain()
    assert_same(guarded, plain)
    assert guarded.losses == plain.losses
    assert len(guarded.losses) > 20


@pytest.mark.shows("steps", "harmless")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_foreach", "adamw_fused", "sgd", "sgd_fused", "adafactor"])
def test_optimizers_precisions_and_accumulation(optimizer, precision, accumulate, tmp_path):
    case = Case(optimizer=optimizer, precision=precision, accumulate=accumulate, augment=True)
    if optimizer == "sgd_fused":
        case.init_scale = FIRST_STEP_FITS
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"adamw", "adamw_foreach", "adamw_fused", "sgd"}))
def test_every_other_torch_optimizer(optimizer, tmp_path):
    check(Case(optimizer=optimizer), tmp_path)


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_schedulers(scheduler, optimizer, tmp_path):
    check(Case(scheduler=scheduler, optimizer=optimizer), tmp_path)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_scheduler_per_epoch(accumulate, tmp_path):
    check(Case(scheduler="exponential", interval="epoch", epochs=4, accumulate=accumulate), tmp_path)


@pytest.mark.slow
@pytest.mark.shows("steps", "harmless")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", ["global", "generator", "none", "seeded"])
def test_loaders(workers, shuffle, tmp_path):
    case = Case(workers=workers, shuffle=shuffle, augment=True, epochs=2)
    guarded = case.guarded(tmp_path / "run")
    plain = case.plain(excluded={"spans": [], "samples": {}} if shuffle == "seeded" else None)
    assert_same(guarded, plain)
    assert guarded.losses == plain.losses


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd_fused", "adagrad_fused"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_device_gate_changes_nothing_either(optimizer, precision, accumulate, tmp_path):
    case = Case(optimizer=optimizer, precision=precision, accumulate=accumulate, augment=True)
    case.config = {"detect": {"gate": "device"}}
    if optimizer == "sgd_fused":
        case.init_scale = FIRST_STEP_FITS
    check(case, tmp_path)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_fp16_calibration_overflows_are_as_torch_has_them(gate, tmp_path):
    case = Case(
        optimizer="adamw_fused", precision="fp16", init_scale=2.0**40, epochs=4, config={"detect": {"gate": gate}}
    )
    guarded = case.guarded(tmp_path / "run")
    plain = case.plain()
    assert_same(guarded, plain)
    summary = guarded.guard.summary()
    assert summary.overflowed >= 8
    assert summary.status == "clean"


def test_ends_at_max_steps_in_the_middle_of_an_epoch(tmp_path):
    check(Case(max_steps=29, epochs=9), tmp_path)


def test_a_short_last_batch(tmp_path):
    check(Case(count=100), tmp_path)


@pytest.mark.slow
def test_a_compiled_model(tmp_path):
    check(Case(compiled=True), tmp_path)


def test_observe_mode_changes_nothing_even_when_the_run_dies(tmp_path):
    case = Case(faults={5: lambda x: x * float("nan")}, config={"recover": {"mode": "observe"}})
    guarded = case.guarded(tmp_path / "run")
    plain = case.plain()
    assert_same(guarded, plain)
    assert guarded.guard.summary().status == "observed"
    assert guarded.actions() == []
    assert not torch.isfinite(guarded.model.first.weight).all()


def test_holdfast_off_is_the_same_loop_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    cases = [Case(), Case(accumulate=4, precision="fp16"), Case(scheduler="exponential", interval="epoch")]
    for n, case in enumerate(cases):
        guarded = case.guarded(tmp_path / f"run{n}")
        assert_same(guarded, case.plain())
        assert guarded.guard.summary().status == "off"
        assert not (tmp_path / f"run{n}").exists()


def test_recording_facts_changes_nothing(tmp_path):
    case = Case(optimizer="adamw", precision="fp16", accumulate=2, augment=True, scheduler="cosine")

    class Recorder:
        def __init__(self):
            self.guard = None

        def on_train_begin(self, guard):
            self.guard = guard
            holdfast.record(guard, tokenizer=holdfast.fingerprint({"a": 0}), sources={"web": 0.7, "code": 0.3})

        def on_step_end(self, outcome):
            holdfast.record(self.guard, step=outcome.step, eval={"mmlu": outcome.signal.loss}, seed=outcome.step)

    recorder = Recorder()
    guarded = case.guarded(tmp_path / "run", hooks=[recorder])
    holdfast.record(recorder.guard, decode={"temperature": 0})
    plain = case.plain()
    assert_same(guarded, plain)
    assert guarded.losses == plain.losses
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["facts"]
    assert facts["decode"] == {"temperature": 0}
    assert facts["seed"] == guarded.guard.step > 10


SENSORS_OFF = {"update_spike": False, "advisory": False}


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "precision", "gate"),
    [
        ("adamw", "fp32", "host"),
        ("adamw_fused", "fp16", "device"),
        ("sgd", "fp32", "host"),
        *slow(("adamw_foreach", "bf16", "host")),
        *slow(("adamw_fused", "fp16", "host"), ("adamw_fused", "fp32", "device")),
        *slow(("nadam", "fp32", "host"), ("rmsprop", "fp32", "host")),
    ],
)
def test_sensing_more_or_less_changes_nothing(optimizer, precision, gate, accumulate, tmp_path):
    """Long enough for every sensor to have looked, the weight norm too."""
    case = Case(optimizer=optimizer, precision=precision, accumulate=accumulate, augment=True, epochs=10)
    case.config = {"detect": {"gate": gate}}
    check(case, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("weight_norm" in row for row in rows)
    assert any("update_rms" in row for row in rows) == (optimizer != "sgd")
    without = Case(**{**vars(case), "config": {"detect": {"gate": gate, **SENSORS_OFF}}})
    assert_same(case.guarded(tmp_path / "again"), without.guarded(tmp_path / "without"))
    bare = [json.loads(line) for line in (tmp_path / "without" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("update_rms", None)
        row.pop("weight_norm", None)
    assert list(map(without_times, rows)) == list(map(without_times, bare))
