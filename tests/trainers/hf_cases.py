"""Small real runs of the Hugging Face Trainer: plain, guarded, and as the reference run without the excluded data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import holdfast

WIDTH = 8
QUICK = {
    "detect": {"warmup_steps": 8},
    "snapshot": {"every_steps": 4, "certify_after": 3},
    "checkpoint": {"every_steps": 5, "certify_after": 2},
    "recover": {"rollback_margin": 2, "skip_batches": 6, "lr_ramp_steps": 7, "probation_steps": 8},
    "quarantine": {"nonfinite_samples": False},
}


class Points(Dataset):
    """Item i is a function of i; `faults` maps an index to a function of its x. `augment` draws random numbers."""

    def __init__(self, count: int, faults: dict[int, Callable] | None = None, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + 0.05 * torch.randn(count, 1, generator=generator)
        self.faults, self.augment = faults or {}, augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = self.x[i % len(self.x)]
        if self.augment:
            x = x + 0.05 * torch.randn(WIDTH) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return {"x": self.faults.get(int(i), lambda value: value)(x), "labels": self.y[i % len(self.x)]}


class Net(nn.Module):
    """Dropout, and a buffer that every forward changes. The loss is a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(WIDTH, 16), nn.Linear(16, 1), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen = self.seen * 0.9 + x.detach().float().mean()
        out = self.last(self.drop(torch.relu(self.first(x))))
        return {"loss": nn.functional.mse_loss(out.float(), labels), "logits": out}


class UniqueOrder(Sampler):
    """Ids of its own in every epoch, so that a fault can sit in one of them; less the excluded batches."""

    def __init__(self, count: int, batch: int, excluded: tuple[int, ...] = ()) -> None:
        self.count, self.batch, self.excluded, self.epoch = count, batch, excluded, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(1000 + epoch)
        return [i + epoch * self.count for i in torch.randperm(self.count, generator=generator).tolist()]

    def __iter__(self):
        order, per_epoch = self.order(self.epoch), self.count // self.batch
        for k in range(-(-self.count // self.batch)):
            if self.epoch * per_epoch + k not in self.excluded:
                yield from order[k * self.batch : (k + 1) * self.batch]


class Seen(TrainerCallback):
    """Notes what callbacks see."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[float] = []
        self.saves: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epochs.append(state.epoch)

    def on_save(self, args, state, control, **kwargs):
        self.saves.append(state.global_step)


@dataclass
class HFCase:
    """One way to train. `count / batch` batches an epoch; batches are counted over the whole run."""

    count: int = 48
    batch: int = 4
    epochs: int = 3
    unique: bool = True
    augment: bool = False
    faults: dict[int, Callable] = field(default_factory=dict)
    """by the batch of the run"""
    args: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=lambda: QUICK)
    on_model: Callable[[nn.Module], None] = lambda model: None
    callbacks: Callable[[], list[Any]] = list

    def trainer(self, folder: Path, excluded: tuple[int, ...] = (), faults: bool = True) -> Trainer:
        torch.manual_seed(3)
        model = Net()
        self.on_model(model)
        order = UniqueOrder(self.count, self.batch)
        per_epoch = self.count // self.batch
        at = {order.order(b // per_epoch)[b % per_epoch * self.batch]: how for b, how in self.faults.items()}
        data = Points(self.count, at if faults else None, self.augment)
        unique, batch = self.unique, self.batch

        class OwnOrder(Trainer):
            def _get_train_sampler(self, train_dataset=None):
                if not unique:
                    return super()._get_train_sampler(train_dataset)
                return UniqueOrder(len(self.train_dataset), batch, excluded)

        arguments = {
            "output_dir": str(folder / "out"),
            "per_device_train_batch_size": self.batch,
            "num_train_epochs": self.epochs,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "logging_steps": 3,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **self.args,
        }
        training_arguments = TrainingArguments(**arguments)
        if self.args.get("fsdp"):  # Accelerate shards on a GPU only; torch does so on the CPU too
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        trainer = OwnOrder(
            model=model,
            args=training_arguments,
            train_dataset=data,
            eval_dataset=Points(8),
            callbacks=self.callbacks(),
        )
        if self.args.get("fp16"):  # Accelerate makes a scaler on a GPU only; torch has one for the CPU too
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7)
            trainer.accelerator.native_amp = True
        trainer.remove_callback(PrinterCallback)
        return trainer

    def plain(self, folder: Path, excluded: tuple[int, ...] = (), faults: bool = False) -> Run:
        trainer = self.trainer(folder / "plain", excluded, faults)
        trainer.train()
        return Run(trainer)

    def guarded(self, folder: Path, **options: Any) -> Run:
        trainer = self.trainer(folder / "guarded")
        trainer = holdfast.hf.guard(trainer, run_dir=folder / "run", config=self.config, **options)
        trainer.train()
        return Run(trainer, folder / "run")


class Run:
    """What a run ended as."""

    def __init__(self, trainer: Trainer, run_dir: Path | None = None) -> None:
        self.trainer, self.run_dir = trainer, run_dir
        self.random = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    def actions(self) -> list[str]:
        return self.read_actions(self.run_dir)

    @staticmethod
    def read_actions(run_dir: Path) -> list[str]:
        lines = (run_dir / "journal.jsonl").read_text().splitlines()
        return [e["action"] for e in map(json.loads, lines) if e.get("event") == "action"]

    def log(self) -> list[dict[str, Any]]:
        """The log without times."""
        timed = ("runtime", "per_second")
        return [{k: v for k, v in e.items() if not any(t in k for t in timed)} for e in self.trainer.state.log_history]


def assert_same(run: Run, other: Run, random_state: bool = True) -> None:
    """Compare two runs bit for bit."""
    a, b = run.trainer, other.trainer
    assert a.state.global_step == b.state.global_step
    assert repr(run.log()) == repr(other.log())  # NaN equals NaN
    for (name, p), (_, q) in zip(a.model.state_dict().items(), b.model.state_dict().items(), strict=True):
        assert torch.equal(p, q), name
    for one, two in zip(a.optimizer.state.values(), b.optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(two[key])) for key in one)
    for key in ("last_epoch", "_last_lr"):
        assert getattr(a.lr_scheduler, key) == getattr(b.lr_scheduler, key)
    assert (a.state.epoch, a.state.total_flos) == (b.state.epoch, b.state.total_flos)
    if random_state:
        assert torch.equal(run.random[0], other.random[0])
        assert run.random[1:] == other.random[1:]
