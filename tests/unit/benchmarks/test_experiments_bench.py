"""The experiments' benchmark: what it measures in a run, and what it takes for harm."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.experiments import clean, faults, held_back, tasks, workloads
from benchmarks.experiments.training import train

ROW = {
    "experiments": 0, "skipped": 0, "left_out": 0, "samples": 0, "cut_steps": 0, "stopped_at": None,
    "guarded": 1.0, "unguarded": 1.0, "noise": 0.01, "identical": True,
}  # fmt: skip
FAULTY = {
    "stopped": None, "uninformed": 4.0, "calm": 1.0, "unguarded": 1.2, "guarded": 1.0, "exact": True, "at": 700,
    "expected": "transient", "incidents": 1,
}  # fmt: skip


def test_a_clean_run_that_is_left_alone_misses_no_bar() -> None:
    row = clean.measure("triplet", 3, 40, None)
    assert row["missed"] == "" and row["identical"] and row["guarded"] == row["unguarded"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", clean.EVERY_KIND)
def test_a_kind_is_the_same_for_the_same_seed(kind: str) -> None:
    one, again, other = (train(workloads.build(kind, seed, clean.EVERY_KIND), 20, None) for seed in (3, 3, 4))
    assert one.digest == again.digest != other.digest
    assert len(one.losses) == 20 and all(math.isfinite(loss) for loss in one.losses.values())


def test_kinds_held_back_run_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--kinds", "wgan"], ["--held-back", "--kinds", "gan"]):
        with pytest.raises(SystemExit):
            clean.main(words)
        assert f"--kinds: unknown {words[-1]}" in capsys.readouterr().err
    assert not set(held_back.KINDS) & set(workloads.KINDS)


@pytest.mark.parametrize(
    ("changed", "bar"),
    [
        ({"stopped_at": 12}, "stopped"),
        ({"left_out": 1, "experiments": 1}, "data"),
        ({"cut_steps": 1}, "LR"),
        ({"experiments": 2}, "experiments"),
        ({"identical": False}, "loss"),
        ({"experiments": 1, "guarded": 1.1}, "loss"),
    ],
)
def test_harm_to_a_clean_run_is_a_missed_bar(changed: dict[str, Any], bar: str) -> None:
    assert clean.missed({**ROW, **changed}) == [bar]


@pytest.mark.parametrize("model", [pytest.param("lm", marks=pytest.mark.slow), "cnn", "mlp"])
def test_a_nan_in_the_data_ends_the_unguarded_run_only(model: str) -> None:
    reference = faults.calm(model, False, 3, 60)
    row = faults.measure(model, "nan_batch", 3, 60, None, reference)
    assert math.isnan(row["unguarded"])
    assert row["guarded"] == pytest.approx(row["calm"], rel=0.05) and row["incidents"] == 1


@pytest.mark.parametrize("name", ["garbage_30", "shuffled_labels", "weights_x50", "bit_flip", "lr_x100_50_steps"])
def test_a_fault_changes_nothing_before_its_step(name: str) -> None:
    at = faults.first_step(name, 3, 60)
    calm, _ = faults.run(tasks.build("mlp", 3, 60), None, 3, 60, None)
    hit, _ = faults.run(faults.prepare("mlp", name, 3, 60), name, 3, 60, None)
    differ = [n for n in calm.losses if calm.losses[n] != hit.losses[n]]
    assert min(differ) - at in (0, 1)  # an LR shows in the loss one step later


@pytest.mark.parametrize(
    ("changed", "outcome", "bars"),
    [
        ({}, "healed", []),
        ({"exact": False}, "healed", ["not exact"]),
        ({"guarded": 1.3}, "harmed", ["harmed", "worse"]),
        ({"guarded": 1.3, "at": 1}, "harmed", ["harmed", "worse"]),
        ({"guarded": 1.2, "at": 1}, "as unguarded", []),
        ({"guarded": float("nan")}, "dead", ["dead", "worse"]),
        ({"stopped": "why"}, "stopped wrongly", ["stopped wrongly"]),
        ({"stopped": "why", "unguarded": float("nan"), "guarded": 9.0}, "stopped", []),
    ],
)
def test_what_became_of_a_fault(changed: dict[str, Any], outcome: str, bars: list[str]) -> None:
    row: dict[str, Any] = {**FAULTY, **changed}
    row["outcome"] = faults.outcome(row)
    assert row["outcome"] == outcome
    assert faults.missed(row) == bars


def test_the_last_cause_of_the_first_incident_since_the_fault_counts() -> None:
    events: list[dict[str, Any]] = [
        {"event": "incident_opened", "incident": 1, "step": 50, "kind": "loss_spike"},
        {"event": "incident_opened", "incident": 2, "step": 101, "kind": "loss_spike"},
        {"event": "cause", "incident": 2, "step": 120, "cause": "not_established"},
        {"event": "cause", "incident": 2, "step": 140, "cause": "data"},
        {"event": "incident_opened", "incident": 3, "step": 300, "kind": "loss_spike"},
        {"event": "cause", "incident": 3, "step": 310, "cause": "lr"},
    ]
    assert faults.named_cause(events, 100) == "data"
    assert faults.named_cause(events[:2], 100) == "none (loss_spike)"
    assert faults.named_cause([], 100) is None
