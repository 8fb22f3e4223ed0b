"""The run that is killed: small, and everything in it that a resume could lose.

Dropout, BatchNorm, AdamW, a schedule, a shuffled loader over several epochs, accumulation, an average of the weights, a
diary of what was trained on; a row that holds NaN (skipped) and rows far out (a rollback each time one comes by). So saves,
marks, prunes, skips and rollbacks fill its few dozen steps.

Two more runs have the default policy and a longer, calmer course: a stretch of garbage rows in one of them, weights scaled
once in the other. The experiments find out which it was.

The step a rollback returns to does not depend on the checkpoint a process resumed from: a checkpoint takes at least as many
healthy steps to become good as a snapshot in memory, so no process begins later than a rollback returns to.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast import CutLR, Plan, Rollback, SkipData
from holdfast.core.base.types import Finding, Kind, Severity, Signal, family

WIDTH = 6
ROWS = 96
BATCH, ACCUMULATE, EPOCHS = 4, 2, 3
RETURNS = {
    "recover": {"max_consecutive": 1, "rollback_margin": 2},
    "quarantine": {"nonfinite_samples": False},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "host": {"fused": False, "gate": "host", "far": (45, 86)},
    "device": {"fused": True, "gate": "device", "far": (45, 86)},
    "again": {"fused": False, "gate": "host", "far": (48, 70)},
    "released": {"fused": False, "gate": "host", "nan": (58, 16), "config": RETURNS},
    "garbage": {"fused": False, "gate": "host", "garbage": range(480, 544)},
    "garbage_device": {"fused": True, "gate": "device", "garbage": range(480, 544)},
    "scaled": {"fused": False, "gate": "host", "scaled_at": 61},
}
"""again: a second spike soon after the first rollback, which has to go back further than that one did
released: two bad steps in a row, so that the run returns and the skipped data is put back; then it fails again
garbage: eight steps of rows that are finite and far out
scaled: the weights are multiplied by 50 once in the life of the run, whatever the number of its processes"""


class Rows(Dataset):
    """Row i is a function of i, plus noise from the three global generators; some rows are bad."""

    def __init__(self, far: tuple[int, ...] = (), nan: tuple[int, ...] = (17, 40)) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(ROWS, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.x[list(nan)] = float("nan")
        self.y[list(far)] = 1e4

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = 0.05 * torch.randn(WIDTH) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return self.x[i] + noise, self.y[i], i


class Descent(Dataset):
    """960 rows of a target that is easy to learn, so that the loss descends; some rows are garbage."""

    def __init__(self, garbage: Iterable[int] = ()) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(960, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + 0.05 * torch.randn(960, 1, generator=generator)
        self.x[list(garbage)] = 30.0

    def __len__(self) -> int:
        return 960

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = 0.01 * torch.randn(WIDTH) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return self.x[i] + noise, self.y[i], i


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Average:
    """An average of the weights, moved at the end of every committed step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mean = {n: p.detach().clone() for n, p in model.named_parameters()}

    def on_step_end(self, outcome: Any) -> None:
        for name, value in self.model.named_parameters():
            self.mean[name].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {n: t.clone() for n, t in self.mean.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = {n: t.clone() for n, t in state.items()}


class Diary:
    """What every committed step of the lineage was trained on, and its loss. It goes back with the run."""

    def __init__(self) -> None:
        self.lines: list[list[Any]] = []
        self.ids: list[int] = []

    def on_step_end(self, outcome: Any) -> None:
        self.lines.append([outcome.step, outcome.signal.loss, outcome.signal.lr, list(self.ids)])

    def state_dict(self) -> dict[str, Any]:
        return {"lines": [list(line) for line in self.lines]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lines = [list(line) for line in state["lines"]]


class HighLoss:
    """Reports each loss that a far row makes. It has no state, so every process sees the same."""

    name = "high_loss"

    def limits(self) -> dict[str, float]:
        return {}

    def observe(self, signal: Signal) -> Finding | None:
        if not 1e4 < signal.loss < float("inf"):
            return None
        about = {"step": signal.step, "onset": signal.step, "detector": self.name, "message": "a far row"}
        return Finding(kind=Kind.LOSS_SPIKE, severity=Severity.SKIP, **about)

    def rebaseline(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BackFromSpikes:
    """Every spike is rolled back, its data left out and the LR cut: the same answer whatever the process has seen so far."""

    def on_instability(self, incident: Any) -> Plan | None:
        step = incident.findings[-1].step
        if not any(f.step == step and family(f.kind) == "spike" for f in incident.findings):
            return None
        actions = (
            Rollback(before=max(0, step - 3), at_latest=step - 1),
            SkipData(batches=4, around=step),
            CutLR(factor=0.5, ramp_steps=5),
        )
        return Plan(actions=actions, reason="a spike")


def config(gate: str, more: dict[str, dict[str, Any]]) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {
        "snapshot": {"every_steps": 3, "certify_after": 2},
        "checkpoint": {"every_steps": 3, "certify_after": 2, "keep_last": 2},
        "detect": {"gate": gate, "warmup_steps": 6, "divergence": False, "grad_spike": False, "loss_spike": False},
        "recover": {
            "nan_action": "skip",
            "probation_steps": 2,
            "max_consecutive": 1000,
            "max_rollbacks_per_incident": 1000,
            "max_rollbacks_per_window": 1000,
        },
        "metrics": {"flush_seconds": 0.0},
    }
    return {name: {**sections.get(name, {}), **more.get(name, {})} for name in {**sections, **more}}


def default_policy(gate: str) -> dict[str, Any]:
    """What to do about an excursion of the loss is left to the defaults; only the run is short.

    Every process that dies in an experiment spends returns, so many of them are allowed.
    """
    return {
        "recover": {"max_rollbacks_per_incident": 1000, "max_rollbacks_per_window": 1000},
        "snapshot": {"every_steps": 5, "certify_after": 5},
        "checkpoint": {"every_steps": 10, "certify_after": 5, "keep_last": 2},
        "detect": {"gate": gate, "warmup_steps": 20},
        "metrics": {"flush_seconds": 0.0},
    }


class GuardedRun:
    """One process's part of the run."""

    def __init__(self, run_dir: Path, variant: str, seed: int = 3) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        options = VARIANTS[variant]
        self._scaled_at, self._scaled = options.get("scaled_at"), run_dir / "scaled"
        watched: dict[str, Any]
        if "garbage" in options or self._scaled_at:
            self.model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 1))
            self.loader = DataLoader(Descent(options.get("garbage", ())), batch_size=BATCH)
            self._epochs, watched = 1, {"config": default_policy(options["gate"])}
        else:
            self.model = Net()
            rows = Rows(**{k: options[k] for k in ("far", "nan") if k in options})
            self.loader, self._epochs = DataLoader(rows, batch_size=BATCH, shuffle=True), EPOCHS
            watched = {"config": config(options["gate"], options.get("config", {})), "detectors": [HighLoss()]}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=options["fused"])
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 60 if self._epochs > 1 else 240)
        self.average, self.diary = Average(self.model), Diary()
        hooks = [self.average, self.diary, *([BackFromSpikes()] if "detectors" in watched else [])]
        self.guard = holdfast.Guard(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            clip_grad_norm=1.0,
            run_dir=run_dir,
            hooks=hooks,
            **watched,
        )
        self.guard.register("average", self.average)
        self.guard.register("diary", self.diary)

    def train(self, at: Callable[[str], None], opened: Callable[[], None]) -> dict[str, str]:
        """To the end, telling `at` where it stands; a digest of every part of what it ended as."""
        with self.guard:
            opened()
            for step in self.guard.steps(self.loader, accumulate=ACCUMULATE, epochs=self._epochs):
                at("step")
                self._scale_once(step.number)
                with step:
                    self.diary.ids = []
                    for x, y, ids in step.microbatches():
                        self.diary.ids += ids.tolist()
                        step.backward(nn.functional.mse_loss(self.model(x), y))
            at("closing")
        return self.digests()

    def _scale_once(self, step: int) -> None:
        if step == self._scaled_at and not self._scaled.exists():
            self._scaled.touch()
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(50)

    def digests(self) -> dict[str, str]:
        names = {id(p): n for n, p in self.model.named_parameters()}
        state = {names[id(p)]: s for p, s in self.optimizer.state.items()}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {
            "model": digest(self.model.state_dict()),
            "optimizer": digest([state, groups]),
            "scheduler": digest(self.scheduler.state_dict()),
            "torch's random stream": digest(torch.get_rng_state()),
            "Python's random stream": digest(random.getstate()),
            "NumPy's random stream": digest(np.random.get_state()[1].tolist()),
            "average": digest(self.average.state_dict()),
            "samples": digest([[line[0], line[3]] for line in self.diary.lines]),
            "losses": digest([line[:3] for line in self.diary.lines]),
        }


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
