"""Correct user code. `mypy --strict` must accept every line. It is type-checked, never run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

Batch = dict[str, Tensor]

model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
scaler = torch.amp.GradScaler("cpu")


class Ema(holdfast.Hook):
    late = True

    def on_step_end(self, outcome: holdfast.Outcome) -> None:
        if outcome.status is holdfast.Status.COMMITTED:
            print(outcome.signal.step)

    def on_train_end(self, summary: holdfast.Summary) -> None:
        print(summary.committed, summary)


class Begin(holdfast.Hook):
    def on_train_begin(self, guard: holdfast.Guard) -> None:
        print(guard.step)

    def on_instability(self, incident: holdfast.Incident) -> holdfast.Plan | None:
        return None


class Plain:
    def on_step_end(self, outcome: holdfast.Outcome) -> None:
        print(outcome.signal.loss)


class Counts:
    def on_step_end(self, done: holdfast.Outcome) -> int:
        return done.signal.step


class LossCeiling:
    name = "loss_ceiling"

    def limits(self) -> dict[str, float]:
        return {"loss": 12.0}

    def observe(self, signal: holdfast.Signal) -> holdfast.Finding | None:
        if signal.loss < 12.0:
            return None
        return holdfast.Finding(
            kind=holdfast.Kind.LOSS_SPIKE,
            severity=holdfast.Severity.SKIP,
            step=signal.step,
            onset=signal.step,
            detector=self.name,
            message=f"loss {signal.loss} is above 12",
        )

    def rebaseline(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class NamedCeiling(LossCeiling):
    name: str = "named_ceiling"


detector: holdfast.Detector = NamedCeiling()
guard = holdfast.Guard(
    model,
    optimizer,
    scheduler=scheduler,
    scaler=scaler,
    scheduler_interval="epoch",
    clip_grad_norm=1.0,
    run_dir=Path("runs/a"),
    config={"recover": {"mode": "heal"}},
    hooks=[Ema(), Begin(), Plain(), Counts()],
    detectors=[LossCeiling(), detector],
    about={"data": "mixture 3"},
)
holdfast.Guard([model], [optimizer], hooks=[Plain()], config="holdfast.toml", run_dir="runs/b")
holdfast.Guard(
    {"a": model}, (optimizer,), scheduler=[scheduler, plateau], scheduler_interval=["step", "eval"], hooks=(Ema(),)
)
holdfast.Guard(model, [optimizer], scheduler=plateau, config=Path("holdfast.toml"), hooks=[Ema()])
modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
holdfast.Guard(
    modules, optimizers, config=holdfast.Config(), scheduler=[torch.optim.lr_scheduler.StepLR(optimizer, 10)]
)
holdfast.Guard(nn.ModuleList(modules), optimizer)
holdfast.Guard({"generator": nn.Linear(1, 1), "critic": nn.Sequential()}, optimizer)
my_hooks: list[holdfast.Hook] = [Ema()]
holdfast.Guard(model, optimizer, hooks=my_hooks)


class Curriculum:
    def state_dict(self) -> dict[str, int]:
        return {"level": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Corpus:
    def __iter__(self) -> Iterator[Batch]:
        yield {"x": torch.ones(2, 4), "y": torch.ones(2, 1)}


batches: list[Batch] = list(Corpus())
tensors = DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), batch_size=2)

with guard as g:
    entered: holdfast.Guard = g
    for step in g.steps(batches, accumulate=2, max_steps=10):
        with step as same:
            for batch in step.microbatches(2):
                step.backward(nn.functional.mse_loss(model(batch["x"]), batch["y"]), weight=3.0)
        typed: holdfast.Step = step
        loss: float = same.loss
        number: int = step.number
        outcome: holdfast.Outcome = step.outcome
        data: tuple[holdfast.Span, ...] = step.data
    g.stop("enough")
    g.report_eval(0.5)
    g.record(step=3, eval={"loss": 1.0})
    path: str | None = g.checkpoint("before surgery")
    g.quarantine(range(3), reason="corrupt")
    g.expect_shift("new mixture")
    g.register("generator", torch.Generator())
    g.register("ema", nn.Linear(4, 1))
    g.register("averaged", torch.optim.swa_utils.AveragedModel(model))
    g.register("curriculum", Curriculum())
    g.flush()
    stopping: str | None = g.stopping


def first_pass(loop: holdfast.Guard) -> int:
    for step in loop.steps(tensors, epochs=1):
        with step:
            for x, y in step.microbatches():
                step.backward((model(x) - y).square().mean())
    return loop.step


def loss_fn(module: nn.Module, batch: Batch) -> Tensor:
    out = module(batch["x"])
    assert isinstance(out, Tensor)
    return (out - batch["y"]).square().mean()


summary: holdfast.Summary = guard.fit(loss_fn, Corpus(), max_steps=10)
guard.fit(lambda module, batch: module(batch["x"]).mean(), batches, epochs=2, microbatches=2)
incidents: int = len(summary.incidents)
guard.load(holdfast.resolve_resume_path("runs/a") or "")


class MyGuard(holdfast.Guard):
    def hello(self) -> str:
        return "hello"


with MyGuard(model, optimizer) as mine:
    mine.hello()

try:
    guard.close()
except holdfast.PolicyStop as stop:
    print(stop.code)
except holdfast.ConfigError as error:
    print(error.errors)
