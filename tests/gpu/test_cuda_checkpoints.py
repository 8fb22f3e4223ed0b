"""Checkpoints from a GPU are written while it trains, and a run resumes from them bit for bit. Skipped without a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.types import Severity
from holdfast.core.checkpoints.verify import verify
from holdfast.core.record.journal import Journal
from users_detector import FindsOnce

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]
STEPS = 40


class Attempt:
    """Runs one process of a run: builds everything from the seed, then trains until `stop`."""

    def __init__(
        self,
        folder: Path,
        *,
        fused: bool,
        precision: str,
        stop: int = STEPS,
        copy_at: int = 0,
        config: dict[str, Any] | None = None,
        detectors: Sequence[Any] = (),
    ) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 1)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0) if precision == "fp16" else None
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        data = TensorDataset(torch.randn(200, 32), torch.randn(200, 1))
        self.guard = holdfast.Guard(
            self.model,
            self.optimizer,
            scheduler=scheduler,
            scaler=scaler,
            clip_grad_norm=1.0,
            run_dir=folder,
            config=config or {"checkpoint": {"every_steps": 3, "certify_after": 2}},
            detectors=detectors,
        )
        with self.guard:
            for step in self.guard.steps(DataLoader(data, batch_size=16, shuffle=True), max_steps=stop):
                if copy_at and step.number == copy_at:
                    self.guard.flush()
                    self.guard._run.parts.checkpoints.store.wait()
                    shutil.copytree(folder, folder.with_name("copy"))
                with step:
                    for x, y in step.microbatches():
                        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                            loss = nn.functional.mse_loss(self.model(x.cuda()).float(), y.cuda())
                        step.backward(loss)

    def state(self) -> list[torch.Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *moments, torch.cuda.get_rng_state(), torch.get_rng_state()]


def assert_same(one: Attempt, other: Attempt) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.state(), other.state(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_stopped_and_resumed_run_equals_an_uninterrupted_one(fused, precision, tmp_path):
    whole = Attempt(tmp_path / "whole", fused=fused, precision=precision)
    for stop in (7, 8, 26, STEPS):
        stopped = Attempt(tmp_path / "stopped", fused=fused, precision=precision, stop=stop)
    assert_same(stopped, whole)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("at", [3, 20, 33])
def test_run_resumes_from_the_files_of_any_instant(fused, at, tmp_path):
    whole = Attempt(tmp_path / "run", fused=fused, precision="fp16", copy_at=at)
    assert_same(Attempt(tmp_path / "copy", fused=fused, precision="fp16"), whole)
    assert all(verify(path) is None for path in (tmp_path / "copy" / "checkpoints").iterdir())


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_stop_keeps_the_newest_certified_snapshot_wherever_it_is(fused, place, tmp_path):
    config = {"snapshot": {"every_steps": 4, "certify_after": 2, "place": place}, "recover": {"rollback_margin": 2}}
    whole = Attempt(tmp_path / "whole", fused=fused, precision="fp16", config=config)
    stop = FindsOnce("stops", Severity.STOP, 30, 28)
    with pytest.raises(holdfast.PolicyStop, match="the newest good checkpoint: step_00000024"):
        Attempt(tmp_path / "run", fused=fused, precision="fp16", config=config, detectors=[stop])
    assert all(verify(path) is None for path in (tmp_path / "run" / "checkpoints").iterdir())
    journal = Journal(tmp_path / "run" / "journal.jsonl")
    journal.write("ack", durable=True)
    journal.close()
    assert_same(Attempt(tmp_path / "run", fused=fused, precision="fp16", config=config), whole)


def test_a_run_moves_from_the_gpu_to_the_cpu_and_back(tmp_path):
    saved = Attempt(tmp_path / "run", fused=True, precision="fp32", stop=9)
    restored = Attempt(tmp_path / "run", fused=False, precision="fp32", stop=9)
    for a, b in zip(saved.model.parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_scheduled_save_adds_no_synchronisation(tmp_path):
    """The copy runs on a side stream and the writing on a thread."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(TensorDataset(torch.randn(400, 64)), batch_size=4)
    config = {"checkpoint": {"every_steps": 5, "certify_after": 2}, "metrics": {"enabled": False}}
    guard = holdfast.Guard(model, optimizer, run_dir=tmp_path / "run", config=config)
    with guard:
        for step in guard.steps(loader, max_steps=60):
            with step:
                for (x,) in step.microbatches():
                    loss = model(x.cuda(non_blocking=True)).square().mean()
                    step.backward(loss)
                if step.number > 20:
                    torch.cuda.set_sync_debug_mode("error")
            torch.cuda.set_sync_debug_mode("default")
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) >= 3
