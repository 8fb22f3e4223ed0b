"""Lightning runs out of memory: the step is undone and served again in parts, and the run ends as if it had fitted."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch")
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.drill.memory_limit import MemoryLimit
from marks import slow

BOUND = 1e-6
STEPS = 6


class Sequences(Dataset):
    """Sequences of which more and more labels are ignored."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(n)
        labels = torch.randint(0, 5, (24,), generator=generator)
        labels[24 - n % 17 :] = -100
        return torch.randn(24, 4, generator=generator), labels


class Module(pl.LightningModule):
    """Has so many bytes for the tensors of forward and backward, in micro-batches that `when` names."""

    def __init__(self, nbytes: int | None, when: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 5))
        self.limit, self.nbytes, self.when, self.calls = MemoryLimit(), nbytes, when, 0
        self.outputs: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.calls += 1
        self.limit.nbytes = self.nbytes if self.when(self.calls) else None
        with self.limit:
            logits = self.layers(batch[0])
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with self.limit:
            super().backward(loss, *args, **kwargs)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Run(NamedTuple):
    module: Module
    trainer: Any

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def train(folder, nbytes=None, when=lambda call: True, config=None, steps=STEPS, **arguments) -> Run:
    torch.manual_seed(0)
    module = Module(nbytes, when)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[holdfast.lightning.GuardCallback(run_dir=folder / "run", config=config)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **arguments,
    )
    trainer.fit(module, DataLoader(Sequences(), batch_size=8, shuffle=True))
    return Run(module, trainer)


def splits(folder) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "run/journal.jsonl").read_text().splitlines()]
    return [event for event in events if event.get("action") == "split"]


def assert_close(run: Run, whole: Run) -> None:
    for a, b in zip(run.parameters(), whole.parameters(), strict=True):
        assert float((a - b).norm() / b.norm()) < BOUND
    assert run.module.outputs == pytest.approx(whole.module.outputs, rel=BOUND)
    assert run.trainer.global_step == whole.trainer.global_step == STEPS


@pytest.mark.parametrize("accumulate", [1, *slow(3)])
@pytest.mark.parametrize(("share", "parts", "where"), [(0.97, [2], "backward"), (0.35, [2, 4], "forward")])
@pytest.mark.parametrize("clip", [None, *slow(0.1)])
def test_the_run_ends_as_if_the_batch_had_fitted(accumulate, share, parts, where, clip, tmp_path):
    setting = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    whole = train(tmp_path / "whole", **setting)
    run = train(tmp_path / "split", nbytes=int(share * whole.module.limit.peak), **setting)
    assert_close(run, whole)
    found = splits(tmp_path / "split")
    assert [each["parts"] for each in found] == parts and run.module.limit.raised == len(parts)
    assert found[0]["where"] == where


def test_a_later_micro_batch_of_a_step_undoes_the_step(tmp_path):
    whole = train(tmp_path / "whole", accumulate_grad_batches=2)
    nbytes = int(0.6 * whole.module.limit.peak)
    run = train(tmp_path / "split", nbytes=nbytes, when=lambda call: call == 8, accumulate_grad_batches=2)
    assert_close(run, whole)
    (split,) = splits(tmp_path / "split")
    assert (split["step"], split["parts"]) == (4, 2)


def test_one_sample_that_does_not_fit_ends_the_run_with_advice(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, nbytes=100)
    assert "cannot be split further" in caught.value.__notes__[0]


def test_the_policy_may_forbid_it(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, nbytes=1000, config={"oom": {"action": "stop"}})
    assert "the policy forbids a retry" in caught.value.__notes__[0]


@pytest.mark.parametrize("share", [0.97, 0.6], ids=["backward", "forward"])
def test_a_loss_that_is_no_mean_is_found_by_the_loss_of_smaller_parts(share, tmp_path, caplog, monkeypatch):
    def summed(self, batch: Any, _: int) -> torch.Tensor:
        self.limit.nbytes = self.nbytes
        with self.limit:
            logits = self.layers(batch[0])
            return 1e-3 * nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")

    monkeypatch.setattr(Module, "training_step", summed)
    whole = train(tmp_path / "whole")
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(tmp_path / "split", nbytes=int(share * whole.module.limit.peak))
    assert "So the loss is no mean over what the parts are weighted by" in caplog.text
