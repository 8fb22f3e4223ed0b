"""Small real runs of Lightning's Trainer: plain, guarded, and without some of the data, compared bit for bit."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning_data import CONFIG, WIDTH, Order, Points, Without, ids_of, same, scaled, seed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import MeanMetric

import holdfast


class ShorterEpochs(pl.Callback):
    """Tells the Trainer how long an epoch is, for the reference run: it reads the length of a loader only once."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.fit_loop._combined_loader.limits = [float("inf")]
        trainer.fit_loop.max_batches = trainer.val_check_batch = len(trainer.train_dataloader)


class Log(Logger):
    """Keeps every logged row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = version = "log"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, dict(metrics)))


class Module(pl.LightningModule):
    """Dropout, BatchNorm, a torchmetric, a number of its own, and a schedule for each step or epoch."""

    def __init__(
        self, interval: str = "step", faults: dict[int, Callable[[Any], None]] | None = None, norm: bool = True
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 1)
        self.norm: nn.Module = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.drop = nn.Dropout(0.2)
        self.mean = MeanMetric()
        self.seen, self.smooth = 0, None
        self.interval, self.faults = interval, faults or {}

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return nn.functional.mse_loss(self.last(hidden).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        fault = self.faults.pop(self.trainer.global_step, None)
        if fault is not None:
            fault(self)
        loss = self.loss(batch)
        self.seen += len(batch[0])
        value = loss.detach()
        self.smooth = value if self.smooth is None else 0.9 * self.smooth + 0.1 * value
        self.mean(value)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("smooth", self.smooth)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


class Seen(pl.Callback):
    """Notes the step and the random state at every end of a batch, and how the parameters are then."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)
        assert all(torch.isfinite(p).all() for p in module.parameters())


class Fit:
    """One `fit`, and what it ended as."""

    def __init__(
        self,
        tmp: Path,
        *,
        guard: Any = None,
        count: int = 96,
        workers: int = 0,
        augment: bool = False,
        without: Any = (),
        bad: Any = (),
        how: Callable[[Any], Any] = lambda x: x * float("nan"),
        seeded: bool = True,
        faults: dict[int, Callable[[Any], None]] | None = None,
        interval: str = "step",
        norm: bool = True,
        loader: Any = None,
        callbacks: Any = (),
        library: Any = pl,
        module: Any = None,
        fit: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        seed()
        self.module = Module(interval, dict(faults or {}), norm) if module is None else module
        data = Points(count, augment, dict.fromkeys(ids_of(bad, count), how))
        context = "fork" if workers else None
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        batches: Any = BatchSampler(Order(count, seeded, rank, ranks), 8, drop_last=False)
        if without:
            batches, callbacks = Without(batches, without), [*callbacks, ShorterEpochs()]
        self.loader = (
            loader
            if loader is not None
            else DataLoader(data, batch_sampler=batches, num_workers=workers, multiprocessing_context=context)
        )
        self.log, self.seen, self.guard = Log(), Seen(), guard
        self.checkpoint = library.callbacks.ModelCheckpoint(dirpath=tmp, filename="end", save_top_k=1)
        self.trainer = library.Trainer(
            **{
                "max_epochs": 3,
                "accelerator": "cpu",
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "log_every_n_steps": 1,
                "gradient_clip_val": 1.0,
                "logger": self.log,
                "use_distributed_sampler": False,
                **options,
            },
            callbacks=[self.seen, self.checkpoint, *callbacks, *([guard] if guard is not None else [])],
        )
        self.trainer.fit(self.module, self.loader, DataLoader(Points(16), batch_size=8), **(fit or {}))
        self.random = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
        path = self.checkpoint.best_model_path
        self.saved = torch.load(path, weights_only=False) if os.path.isfile(path) else {}

    def actions(self) -> list[str]:
        from holdfast.core.record.journal import read

        if self.guard is None or self.trainer.global_rank > 0:
            return []
        record = read(self.guard.guard._records.rundir.path / "journal.jsonl")
        return [e["action"] for e in record.events if e["event"] == "action"]


def guarded(folder: Path, config: Any = CONFIG, **options: Any) -> Fit:
    callback = holdfast.lightning.GuardCallback(run_dir=folder / "run", config=config)
    return Fit(folder / "guarded", guard=callback, **options)


def assert_same(a: Fit, b: Fit, logs: bool = True) -> None:
    """Compare bit for bit: parameters, optimizer, schedule, counters, random state, log, saved checkpoint."""
    assert a.trainer.global_step == b.trainer.global_step
    same(a.module.state_dict(), b.module.state_dict(), "model")
    same(a.trainer.callback_metrics, b.trainer.callback_metrics, "metrics")
    assert a.module.seen == b.module.seen
    same(a.module.smooth, b.module.smooth, "smooth")
    assert a.random == b.random
    if logs:
        assert len(a.log.rows) == len(b.log.rows)
        for one, other in zip(a.log.rows, b.log.rows, strict=True):
            assert one == other
    assert a.saved.keys() == b.saved.keys()
    for name in a.saved.keys() - {"callbacks"}:
        same(a.saved[name], b.saved[name], name)


class Sharded(Module):
    """Its layers are sharded by FSDP2."""

    def configure_model(self) -> None:
        for layer in (self.first, self.last):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Killed(pl.Callback):
    """Ends the process after this step of the Trainer."""

    def __init__(self, step: int, number: int = signal.SIGKILL) -> None:
        self.step, self.number = step, number

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def main(folder: Path, kill: int, options: str, number: int = signal.SIGKILL) -> None:
    """Run until it is killed, or to the end, and write what it ended as."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    config = {"checkpoint": {"every_steps": 3}, "snapshot": {"certify_after": 2}}
    arguments = eval(f"dict({options})", {"CONFIG": CONFIG, "scaled": scaled})
    if arguments.pop("sharded", False):
        seed()
        strategy = pl.strategies.ModelParallelStrategy(2, 1)
        arguments |= {"module": Sharded(norm=False), "strategy": strategy, "gradient_clip_val": None}
    if arguments.pop("plain", False):
        run = Fit(folder / "plain", **arguments)
    else:
        run = guarded(folder, arguments.pop("config", config), callbacks=[Killed(kill, number)], **arguments)
    state = run.module.state_dict().items()
    model = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state}
    ended = {"model": model, "random": run.random, "rows": run.log.rows}
    ended["saved"] = {name: value for name, value in run.saved.items() if name != "callbacks"}
    ended["actions"] = run.actions()
    torch.save(ended, folder / f"ended{run.trainer.global_rank or ''}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
