"""Settings changed between two lives hold from then on; without a change the resumed run is the uninterrupted one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.record import journal

SCHEDULERS = {
    "none": lambda optimizer, steps: None,
    "lambda": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 10)),
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "exponential": lambda optimizer, steps: lr_scheduler.ExponentialLR(optimizer, 0.97),
}


def live(folder, stop, *, lr=1e-2, schedule="none", steps=40, **options):
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
    scheduler = SCHEDULERS[schedule](optimizer, steps)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
    guard = holdfast.Guard(model, optimizer, scheduler=scheduler, run_dir=folder)
    with guard:
        guard.fit(lambda m, batch: m(batch[0]).square().mean(), loader, max_steps=stop)
    lrs = {e["step"]: e["lr"] for e in journal.read_rows(folder / "metrics.jsonl").events}
    return optimizer, lrs, model


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_lower_learning_rate_holds_and_keeps_its_place_in_the_schedule(schedule, tmp_path):
    _, whole, _ = live(tmp_path / "whole", 30, schedule=schedule)
    live(tmp_path / "run", 15, schedule=schedule)
    _, lrs, _ = live(tmp_path / "run", 30, schedule=schedule, lr=2e-3)
    for step in range(16, 31):
        assert lrs[step] == pytest.approx(whole[step] / 5, rel=1e-6), step
    notes = [e["message"] for e in journal.read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "note"]
    assert any("the new ones apply: lr" in note for note in notes)


def test_other_decay_betas_and_length_of_the_schedule_hold(tmp_path):
    live(tmp_path / "run", 15, schedule="cosine")
    optimizer, lrs, _ = live(
        tmp_path / "run", 20, schedule="cosine", steps=80, weight_decay=0.3, betas=(0.8, 0.99), foreach=False
    )
    group = optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["foreach"]) == (0.3, (0.8, 0.99), False)
    assert lrs[20] > live(tmp_path / "other", 20, schedule="cosine")[1][20], "a longer cosine falls more slowly"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_without_a_change_nothing_is_put_over_what_was_saved(schedule, tmp_path):
    _, whole, model = live(tmp_path / "whole", 30, schedule=schedule)
    for stop in (11, 12, 30):
        _, lrs, resumed = live(tmp_path / "run", stop, schedule=schedule)
    assert lrs == whole
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    notes = [e["message"] for e in journal.read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "note"]
    assert notes == []
