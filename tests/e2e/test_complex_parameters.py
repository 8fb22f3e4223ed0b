"""Complex parameters are clipped, guarded, saved and resumed bit for bit, as docs/loop.md says."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast

STEPS, BATCH, BAD_BATCH = 20, 8, 5


def data(is_bad: bool = False) -> DataLoader:
    x = torch.randn(256, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    if is_bad:
        x[BAD_BATCH * BATCH : (BAD_BATCH + 1) * BATCH] = complex(0.0, float("nan"))
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, dtype=torch.complex64)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).abs().square().mean()


def guarded(run_dir, steps=STEPS, is_bad=False):
    model, optimizer = build()
    guard = holdfast.Guard(model, optimizer, run_dir=run_dir, clip_grad_norm=0.5)
    guard.fit(loss_of, data(is_bad), max_steps=steps)
    return model.weight


def plain(without: int | None = None) -> torch.Tensor:
    model, optimizer = build()
    for batch in [b for n, b in enumerate(data()) if n != without][:STEPS]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.weight


def test_a_healthy_run_equals_the_plain_loop(tmp_path):
    assert torch.equal(guarded(tmp_path / "run"), plain())


def test_a_resumed_run_equals_the_plain_loop(tmp_path):
    guarded(tmp_path / "run", steps=9)
    assert torch.equal(guarded(tmp_path / "run"), plain())


def test_a_nan_in_an_imaginary_part_is_skipped(tmp_path):
    assert torch.equal(guarded(tmp_path / "run", is_bad=True), plain(without=BAD_BATCH))
