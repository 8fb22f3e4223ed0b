"""Finite excursions of the loss on several ranks: every rank runs the same experiments and reaches the same result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import GLOBAL, QUICK, Data, Layout, loss_of, on_all, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import holdfast
from holdfast.core.record.quarantine import Quarantine

STEPS = 100
ONSET = 60
WINDOW = range(ONSET, ONSET + 5)
RECOVER = {**QUICK["recover"], "skip_batches": 12, "lr_factor": 0.5, "lr_ramp_steps": 20}
LayoutFault = Callable[[Layout, int], None]
LossFault = Callable[[Layout, int, Tensor], Tensor]


class LongData(Data):
    """Every step has samples of its own."""

    def __len__(self) -> int:
        return STEPS * GLOBAL


def loader_of(layout: Layout, faults: dict[int, str] | None) -> DataLoader:
    data = LongData(faults or {})
    sampler = DistributedSampler(data, num_replicas=layout.data[0], rank=layout.data[1], shuffle=False)
    return DataLoader(data, batch_size=GLOBAL // layout.data[0], sampler=sampler)


def unguarded(
    layout: Layout,
    faults: dict[int, str] | None = None,
    without: set[int] | None = None,
    alter: LossFault = lambda layout, batch, loss: loss,
) -> list[Tensor]:
    """Train without a guard, and without the batches in `without`, counted from 1."""
    for number, batch in enumerate(loader_of(layout, faults), 1):
        if number not in (without or set()):
            alter(layout, number, loss_of(layout.model, batch)).backward()
            layout.clip(1.0)
            layout.optimizer.step()
            layout.optimizer.zero_grad()
    return layout.state()


class Experiment:
    """A guarded run, the outcomes of its steps on this rank, and its decisions."""

    late = True

    def __init__(
        self,
        layout: Layout,
        run_dir: Path,
        gate: str,
        *,
        faults: dict[int, str] | None = None,
        before: LayoutFault = lambda layout, number: None,
        alter: LossFault = lambda layout, batch, loss: loss,
        watch_steps: int = 8,
    ) -> None:
        self.layout, self.run_dir = layout, run_dir
        self.outcomes: list[tuple[int, int, str]] = []
        recover = {**RECOVER, "watch_steps": watch_steps}
        config = {**QUICK, "recover": recover, "detect": {"gate": gate, "warmup_steps": 20}}
        guard = holdfast.Guard(
            layout.model, layout.optimizer, clip_grad_norm=1.0, run_dir=run_dir, config=config, hooks=[self]
        )
        with guard:
            for step in guard.steps(loader_of(layout, faults), epochs=1):
                with step:
                    before(layout, step.number)
                    for batch in step.microbatches():
                        number = int(batch["id"].min()) // GLOBAL + 1
                        step.backward(alter(layout, number, loss_of(layout.model, batch)))
            self.decisions = guard._run.parts.coordinator._decisions
        self.step = guard.step

    def on_step_end(self, outcome: Any) -> None:
        self.outcomes.append((outcome.step, outcome.signal.attempt, str(outcome.status)))

    on_recovery = on_step_end

    def check_agreed(self) -> None:
        """All ranks took the same decisions at the same steps, and there were some."""
        assert len({str(o) for o in on_all(self.outcomes)}) == 1, on_all(self.outcomes)
        assert len(set(on_all(self.decisions))) == 1 and self.decisions, on_all(self.decisions)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return these events of the journal, on every rank."""
        dist.barrier()
        lines = (self.run_dir / "journal.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] in names]

    def causes(self) -> list[str]:
        return [e["cause"] for e in self.events("cause")]

    def rungs(self) -> list[tuple[str, str]]:
        return [(e["rung"], e["result"]) for e in self.events("experiment")]

    def left_out(self) -> set[int]:
        """Return the steps whose data is left out."""
        dist.barrier()
        spans = Quarantine(self.run_dir / "quarantine.json").spans()
        return {n + 1 for n in range(STEPS) for _, a, b in spans if a < (n + 1) * GLOBAL and n * GLOBAL < b}


class Scale:
    """Multiplies the weights of some ranks by 50, once."""

    def __init__(self, ranks: set[int]) -> None:
        self._ranks, self._is_due = ranks, True

    def __call__(self, layout: Layout, number: int) -> None:
        if number == ONSET and self._is_due:
            self._is_due = False
            if layout.rank in self._ranks:
                with torch.no_grad():
                    for p in layout.model.parameters():
                        getattr(p, "_local_tensor", p).mul_(50.0)


OPTIMIZER = {"host": "adamw", "device": "adamw_fused"}


def scaled_weights(folder: Path, rank: int, size: int) -> None:
    """Weights times 50: all ranks return together, and the run ends as one that never had it."""
    kind, gate, struck = folder.name.split("-")
    layout = Layout(kind, rank, size, OPTIMIZER[gate])
    scale = Scale(set(range(size)) if struck == "all" else {size - 1})
    run = Experiment(layout, folder / "run", gate, before=scale)
    run.check_agreed()
    returns = [o for o in run.outcomes if o[2] == "rolled_back"]
    assert len(returns) == 1 and ONSET <= returns[0][0] < ONSET + 10, returns
    assert {o[2] for o in run.outcomes} == {"committed", "rolled_back"}, run.outcomes
    assert run.step == STEPS and not run.left_out()
    same(layout.state(), unguarded(Layout(kind, rank, size, OPTIMIZER[gate])))
    assert not {e["action"] for e in run.events("action")} - {"rollback"}
    (back,) = run.events("action")
    assert back["to_step"] < ONSET


def garbage_on_one_rank(folder: Path, rank: int, size: int) -> None:
    """Garbage in the samples of one rank, for a few steps: left out on all ranks, and nothing else is."""
    gate = folder.name
    faults = {(n - 1) * GLOBAL + i: "spike" for n in WINDOW for i in range(GLOBAL) if i % size == size - 1}
    # A clipped step of SGD leaves the state sound; one of AdamW does not, and the loss takes longer to come back.
    optimizer, watch_steps = {"host": ("adamw", 24), "device": ("sgd_fused", 8)}[gate]
    layout = Layout("ddp", rank, size, optimizer)
    run = Experiment(layout, folder / "run", gate, faults=faults, watch_steps=watch_steps)
    run.check_agreed()
    skips = [o for o in run.outcomes if o[2] == "skipped"]
    assert [step for step, _, _ in skips] == [ONSET] * len(WINDOW), skips
    assert run.left_out() == set(WINDOW), run.left_out()
    assert run.step == STEPS - len(WINDOW)
    same(layout.state(), unguarded(Layout("ddp", rank, size, optimizer), without=set(WINDOW)))
    assert run.causes() == ["data"], run.events("cause")
    assert run.rungs() == [("same_data", "begun"), ("leave_out_data", "begun"), ("leave_out_data", "gone")]


def jump_of_the_objective(folder: Path, rank: int, size: int) -> None:
    """The loss of one rank is redefined for good: all ranks accept it, and the run is as without a guard."""

    def alter(layout: Layout, batch: int, loss: Tensor) -> Tensor:
        return loss + 8.0 if batch >= ONSET and layout.rank == size - 1 else loss

    gate = folder.name
    layout = Layout("ddp", rank, size, OPTIMIZER[gate])
    run = Experiment(layout, folder / "run", gate, alter=alter)
    run.check_agreed()
    assert run.step == STEPS and not run.left_out()
    same(layout.state(), unguarded(Layout("ddp", rank, size, OPTIMIZER[gate]), alter=alter))
    assert run.causes()[-1] == "objective", run.events("cause")
    assert run.rungs()[-1][1] == "came_back", run.rungs()


class _NormData(torch.utils.data.Dataset):
    """A linear task of 60 steps an epoch. One sample, which the last rank reads, is 10,000 times larger."""

    batch = 64
    bad = 50 * batch - 1

    def __len__(self) -> int:
        return 60 * self.batch

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return (x * 1e4 if i == self.bad else x), x.sum()


def spoilt_statistics(folder: Path, rank: int, size: int) -> None:
    """One sample spoils the running statistics of one rank: all ranks leave its batch out, and it is not drawn again."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = DistributedSampler(_NormData(), num_replicas=size, rank=rank, shuffle=False)
    loader = DataLoader(_NormData(), batch_size=_NormData.batch // size, sampler=sampler)
    guard = holdfast.Guard(parallel, optimizer, run_dir=folder / "run", config=QUICK)
    with guard:
        for step in guard.steps(loader, epochs=3):
            with step:
                for x, y in step.microbatches():
                    step.backward(nn.functional.mse_loss(parallel(x).squeeze(1), y))
    events = [json.loads(line) for line in (folder / "run" / "journal.jsonl").read_text().splitlines()]
    (cause,) = {e["cause"] for e in events if e["event"] == "cause"}
    assert cause == "data", events
    assert Quarantine(folder / "run" / "quarantine.json").samples == {_NormData.bad}
    assert on_all(guard.step) == [guard.step] * size
