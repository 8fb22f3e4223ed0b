"""Trains the reference trainer in many layouts, in one set of processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from layouts import BackWithoutData
from torch.utils.data import Dataset

from holdfast.reference.config import parse
from holdfast.reference.trainer import Trainer, build

STEPS, BATCH = 10, 8
LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"data": 2}, {"shard": 2}, {"tensor": 2}],
    4: [{}, {"data": 2, "shard": 2}, {"shard": 2, "tensor": 2}, {"data": 2, "tensor": 2}],
}
"""the [distributed] sections to try for each number of ranks"""


def name_of(size: int, distributed: dict[str, int]) -> str:
    return "-".join([str(size), *(f"{key}{value}" for key, value in distributed.items())])


class Losses:
    late = True  # as the trainer's own evaluation is, which runs while the next step is under way

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, outcome: Any) -> None:
        self.seen.append(outcome.signal.loss)


class RecordingDataset(Dataset):
    """Records the samples it served; sample `bad` holds NaN."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.served: list[int] = []

    def wrap_dataset(self, dataset: Dataset) -> RecordingDataset:
        self._inner = dataset
        return self

    def before_step(self, number: int, model: Any, optimizer: Any) -> None: ...

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getitem__(self, n: int) -> Any:
        self.served.append(int(n))
        sample = self._inner[n]
        return {**sample, "weight": sample["weight"] * float("nan")} if n == self.bad else sample


def configuration(run_dir: Path, distributed: dict[str, int], **sections: dict[str, Any]) -> Any:
    small = {
        # Untied, with norms inside attention: every kind of weight.
        "model": {"layers": 2, "width": 32, "heads": 2, "context": 16, "qk_norm": True, "tie_embeddings": False},
        "train": {
            "run_dir": str(run_dir),
            "steps": STEPS,
            "batch_size": BATCH,
            "seed": 7,
            "device": "cpu",
            "threads": 1,
        },
        "scheduler": {"warmup_steps": 3},
        "eval": {"every": 4, "batches": 2},
        "distributed": distributed,
        "checkpoint": {"rank_timeout_seconds": 30},
    }
    return parse({name: {**small.get(name, {}), **sections.get(name, {})} for name in {**small, **sections}}, "test")


def trained(
    folder: Path,
    name: str,
    config: Any,
    *,
    stop_at: int | None = None,
    bad: int | None = None,
    hooks: tuple[Any, ...] = (),
) -> Trainer:
    """Train one run and write this rank's report to `name`-RANK.json."""
    recording, losses = RecordingDataset(bad), Losses()
    trainer = build(config, faults=recording)
    result = trainer.run(hooks=[losses, *hooks], stop_at=stop_at)
    curve = losses.seen
    if result.summary.status == "off":  # each rank has then seen its own losses only
        each: list[list[float]] = [[] for _ in range(trainer.layout.size)]
        dist.all_gather_object(each, curve)
        curve = [sum(at) / len(at) for at in zip(*each, strict=True)]
    report = {
        "curve": curve,
        "eval_loss": result.eval_loss,
        "served": recording.served,
        "share": trainer.layout.share,
        "parameters": trainer.parameter_count,
        "held": sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in trainer.model.parameters()),
        "seconds": result.seconds,
        "rollbacks": result.summary.rollbacks,
    }
    (folder / f"{name}-{trainer.layout.rank}.json").write_text(json.dumps(report))
    return trainer


def curves(folder: Path, rank: int, size: int) -> None:
    """Train every layout with a NaN in the sixth batch, which causes a rollback and skips two batches."""
    sections: dict[str, Any] = {
        "snapshot": {"every_steps": 1, "certify_after": 1},
        "detect": {"gate": "device"},
    }
    for distributed in LAYOUTS[size]:
        name = name_of(size, distributed)
        config = configuration(folder / name, distributed, **sections)
        trained(folder, name, config, bad=5 * BATCH + 3, hooks=(BackWithoutData(),))


def unguarded(folder: Path, rank: int, size: int) -> None:
    """Train without the guard, with tied embeddings and accumulation over two batches."""
    os.environ["HOLDFAST_OFF"] = "1"
    sections: dict[str, Any] = {"model": {"tie_embeddings": True}, "train": {"batch_size": BATCH // 2, "accumulate": 2}}
    for distributed in LAYOUTS[size]:
        name = f"off-{name_of(size, distributed)}"
        trainer = trained(folder, name, configuration(folder / name, distributed, **sections))
        bare = getattr(trainer.model, "module", trainer.model)
        assert bare.head.weight is bare.embedding.weight, "still tied"


LEGS = {1: ({}, 3), 2: ({"shard": 2}, 6), 4: ({"data": 2, "shard": 2}, None)}
"""[distributed] and the step to stop at, for each number of ranks"""


def uninterrupted(folder: Path, rank: int, size: int) -> None:
    trained(folder, "uninterrupted", configuration(folder / "uninterrupted", {}))


def leg(folder: Path, rank: int, size: int) -> None:
    """Train the next part of a run, in another layout than the part before."""
    distributed, stop_at = LEGS[size]
    trained(folder, f"leg-{size}", configuration(folder / "run", distributed), stop_at=stop_at)


def staged(folder: Path, rank: int, size: int) -> None:
    """Train with blocks of 1000 samples and 250 a step, so that the second stage begins with step 5."""
    config = configuration(
        folder / "staged",
        {},
        model={"layers": 1, "width": 8, "heads": 2, "context": 4},
        train={"steps": 6, "batch_size": 250},
        dataset={"stages": [{"from_step": 5, "weights": [2]}]},
    )
    trained(folder, "staged", config)
