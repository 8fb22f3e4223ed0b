"""A small run through Accelerate: everything is prepared, and the loop is the one of Accelerate's own examples."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from cases import Case, Run
from torch import nn

import holdfast


@dataclass
class AccelerateCase(Case):
    """The same small run, driven by Accelerate's lines."""

    seedable: bool = False
    stateful: bool = False
    split: bool = False
    """a batch of the loader is shared among the ranks, instead of one for each"""

    def prepare(self, excluded: Any = None, faults: bool = True) -> dict[str, Any]:
        """Return the accelerator and what it has prepared. Every call begins as a new process would."""
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        parts = self.build()
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=self.accumulate,
            mixed_precision="bf16" if self.precision == "bf16" else "no",
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=self.seedable, use_stateful_dataloader=self.stateful, split_batches=self.split
            ),
        )
        if self.fp16:  # Accelerate makes a scaler for a GPU only; with this one its code is the same
            accelerator.scaler, accelerator.native_amp = parts["scaler"], True
            accelerator.state._mixed_precision = "fp16"
        loader = self.loader(excluded, faults)
        if self.split:
            loader.batch_sampler.batch_size = self.batch
        model, optimizer, scheduler, loader = accelerator.prepare(
            parts["model"], parts["optimizer"], parts["scheduler"], loader
        )
        return {
            "accelerator": accelerator,
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
        }

    def train(self, data: Any, prepared: dict[str, Any], before_step: Any = None) -> list[float]:
        accelerator, model = prepared["accelerator"], prepared["model"]
        optimizer, scheduler, losses = prepared["optimizer"], prepared["scheduler"], []
        flags, state = prepared.setdefault("flags", []), accelerator.gradient_state
        for _ in range(self.epochs):
            for x, y in data:
                with accelerator.accumulate(model):
                    if before_step is not None:
                        before_step(prepared)
                    loss = nn.functional.mse_loss(model(x).float(), y)
                    losses.append(loss.item())
                    flags.append((state.end_of_dataloader, state.remainder, state.sync_gradients))
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and self.clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), self.clip)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        return losses

    def plain(self, excluded: Any = None, faults: bool = True, **interventions: Any) -> Run:
        prepared = self.prepare(excluded, faults)
        return ended(prepared, self.train(prepared["loader"], prepared))

    def guarded(self, run_dir: Path, hooks: Any = (), before_step: Any = None, **more: Any) -> Run:
        prepared = self.prepare()
        guard = holdfast.Guard.wrap(
            prepared["model"],
            prepared["optimizer"],
            prepared["scheduler"],
            run_dir=run_dir,
            config=self.config,
            hooks=hooks,
        )
        losses = self.train(guard.data(prepared["loader"]), prepared, before_step)
        guard.close()
        return ended(prepared, losses, guard, Path(run_dir))


def ending(run: Run) -> dict[str, Any]:
    """Return what a process leaves for another one to compare."""
    parts = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    return {name: part.state_dict() for name, part in parts.items()} | {"random": run.random, "losses": run.losses}


def ended(prepared: dict[str, Any], losses: list[float], *guard_and_path: Any) -> Run:
    optimizer = prepared["optimizer"]
    parts = {
        "model": prepared["model"],
        "optimizer": optimizer.optimizer,
        "scheduler": prepared["scheduler"].scheduler,
        "scaler": optimizer.scaler,
    }
    run = Run(parts, losses, *guard_and_path)
    run.step, run.flags = prepared["accelerator"].step, prepared["flags"]
    return run


class SteppedCase(Case):
    """A run through `guard.steps`, over a loader that Accelerate has prepared."""

    def loader(self, excluded: Any = None, faults: bool = True) -> Any:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        return Accelerator(cpu=True).prepare(super().loader(excluded, faults))
