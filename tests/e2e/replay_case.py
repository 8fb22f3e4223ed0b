"""A small training program with a fault in its data or its code, and the entry by which `holdfast replay` runs it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast

BAD, BATCH, COUNT = 21, 8, 48
BAD_STEP = BAD // BATCH + 1


class Rows(Dataset):
    """Rows of noise; `fault` is in row BAD: a NaN, a zero that the loss takes the logarithm of, or nothing."""

    def __init__(self, fault: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(COUNT, 6, generator=generator)
        self.scale = torch.rand(COUNT, generator=generator) + 0.5
        if fault == "nan_row":
            self.x[BAD, 2] = float("nan")
        elif fault == "log_zero":
            self.scale[BAD] = 0.0
        elif fault == "large_row":
            self.x[BAD] = 400.0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "scale": self.scale[i]}


class Square(nn.Module):
    """Overflows in half precision: the square of 300 is above the largest float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squared = x * x
        return squared / squared.sum(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 1)
        self.square = Square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


class HalfNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = self.square(self.first(x))
            return self.last(hidden)


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    predicted = model(batch["x"])
    penalty = torch.log(batch["scale"]).mean()  # the line of the fault
    return predicted.float().square().mean() - 0.1 * penalty


_LINES = Path(__file__).read_text().splitlines()
FAULT_LINE = next(n for n, line in enumerate(_LINES, 1) if line.endswith("# the line of the fault"))
UPDATE_LINE = next(n for n, line in enumerate(_LINES, 1) if line.endswith("# the line of the update"))


class ZeroDivision(torch.optim.SGD):
    """Makes finite gradients into an update that is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad / (p.grad - p.grad))  # the line of the update


def build(net: type[Net] = Net, width: int = 16) -> Net:
    torch.manual_seed(0)
    return net(width)


def replay_entry() -> Any:
    return build(), loss_fn


def wide_entry() -> Any:
    return build(width=60_000), loss_fn


def not_the_model() -> Any:
    return nn.Sequential(nn.Linear(6, 3)), loss_fn


class Trained:
    """A finished run: its folder, its model, and its journal."""

    def __init__(self, folder: Path, model: Net, forwards: int) -> None:
        self.folder, self.model, self.forwards = folder, model, forwards
        self.events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]

    def replays(self, result: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == "replay" and e["result"] == result]

    def statuses(self) -> list[str]:
        return [e["status"] for e in self.events if e["event"] == "outcome"]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]


def train(
    folder: Path, fault: str = "", *, loop: str = "steps", left_out: tuple[int, ...] = (), model: Net | None = None,
    epochs: int = 2, accumulate: int = 1, workers: int = 0, hooks: Any = (), gate: str = "auto", optimizer: Any = None,
    **replay: Any,
) -> Trained:  # fmt: skip
    """Train for some epochs over the rows, in one of the loops that people have."""
    model = build() if model is None else model
    torch.manual_seed(1)
    forwards = [0]
    model.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=gate == "device")
    else:
        optimizer = optimizer(model.parameters())
    loader = DataLoader(Rows(fault), BATCH // accumulate, num_workers=workers)
    policy = {
        "replay": replay, "checkpoint": {"every_steps": 1, "certify_after": 1}, "snapshot": {"every_steps": 1},
        "detect": {"gate": gate},
    }  # fmt: skip
    guard = holdfast.Guard(model, optimizer, run_dir=folder, config=policy, hooks=hooks)
    with guard:
        if left_out:
            guard.quarantine(left_out, "left out from the start")
        if loop == "steps":
            for step in guard.steps(loader, epochs=epochs, accumulate=accumulate):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_fn(model, batch))
        else:
            for _ in range(epochs):
                for batch in guard.data(loader):
                    loss = loss_fn(model, batch)
                    loss.backward()
                    guard.step(loss)
    return Trained(folder, model, forwards[0])
