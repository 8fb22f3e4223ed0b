"""A bundle made on a GPU replays on a machine without one. Skipped without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.runtime.incidents import watch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BATCH, BAD = 8, 21


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 32), nn.Dropout(0.1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, scale = batch
    penalty = torch.log(scale).mean()  # the line of the fault
    return model(x).square().mean() - 0.1 * penalty


def replay_entry() -> Any:
    return Net(), step


LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line of the" in line)


def train(folder: Path, *, gate: str, flip_at: int = 0, **replay: Any) -> list[dict[str, Any]]:
    """Train on the GPU, with a logarithm of zero in row BAD, or a bit flipped once in an activation."""
    torch.manual_seed(0)
    model = Net().cuda()
    fused = gate == "device"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    generator = torch.Generator().manual_seed(3)
    x, scale = torch.randn(48, 6, generator=generator), torch.rand(48, generator=generator) + 0.5
    scale[BAD] = 0.5 if flip_at else 0.0
    calls = [0]

    def flip(module: nn.Module, args: Any, output: Tensor) -> None:
        calls[0] += 1
        if calls[0] == flip_at:
            output.data.view(torch.int32).view(-1)[3] ^= 0x40000000

    model.last.register_forward_hook(flip)
    config = {"detect": {"gate": gate}, "replay": {"entry": f"{__file__}:replay_entry", **replay}}
    guard = holdfast.Guard(model, optimizer, run_dir=folder, config=config)
    with guard:
        for each in guard.steps(DataLoader(TensorDataset(x, scale), BATCH), epochs=1):
            with each:
                for batch in each.microbatches():
                    each.backward(step(model, [part.cuda() for part in batch]))
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch):
    """Steps here are short, and the first ones load kernels."""
    monkeypatch.setattr(watch, "_MIN_SECONDS", 30.0)


def verdicts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "replay" and event["result"] == "verdict"]


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_bundle_of_a_gpu_replays_without_one(tmp_path, gate):
    (verdict,) = verdicts(train(tmp_path / "run", gate=gate, keep_batch=True))
    assert verdict["line"] == LINE and verdict["cause"] == "structural"
    words = [sys.executable, "-m", "holdfast", "replay", str(tmp_path / "run"), "--device", "cpu", "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["verdict"]["cause"], answer["origin"]["line"]) == ("structural", LINE)
    assert answer["sample_id"] == BAD
    assert any("random state of 1 CUDA devices is not used on cpu" in note for note in answer["notes"])


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_bit_flipped_once_on_the_gpu_is_transient(tmp_path, gate):
    (verdict,) = verdicts(train(tmp_path / "run", gate=gate, flip_at=3, act=True))
    assert verdict["cause"] == "transient" and verdict["device"].startswith("GPU-")
