"""Wrong user code: `mypy --strict` must report the error that each comment names. It is type-checked, never run."""

from __future__ import annotations

import torch
from torch import nn

import holdfast

model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)


class NoCallback:
    def on_step_ended(self, outcome: holdfast.Outcome) -> None: ...


class WrongArgument:
    def on_step_end(self, outcome: int) -> None: ...


class WrongOverride(holdfast.Hook):
    def on_eval_end(self, metric: str) -> None: ...  # error: override


class NoObserve:
    name = "no_observe"

    def limits(self) -> dict[str, float]:
        return {}


holdfast.Guard(42, optimizer)  # error: arg-type
holdfast.Guard(model, "adamw")  # error: arg-type
holdfast.Guard(model)  # error: call-arg
holdfast.Guard(model, optimizer, scheduler="cosine")  # error: arg-type
holdfast.Guard(model, optimizer, scheduler=scheduler, scheduler_interval="batch")  # error: arg-type
holdfast.Guard(model, optimizer, scaler=1024.0)  # error: arg-type
holdfast.Guard(model, optimizer, clip_grad_norm="1.0")  # error: arg-type
holdfast.Guard(model, optimizer, run_dir=3)  # error: arg-type
holdfast.Guard(model, optimizer, config=["recover"])  # error: arg-type
holdfast.Guard(model, optimizer, hooks=[42])  # error: list-item
holdfast.Guard(model, optimizer, hooks=[NoCallback()])  # error: list-item
holdfast.Guard(model, optimizer, hooks=[WrongArgument()])  # error: list-item
holdfast.Guard(model, optimizer, detectors=[NoObserve()])  # error: list-item
holdfast.Guard(model, optimizer, clock=None)  # error: call-arg
print(holdfast.Gaurd)  # error: attr-defined

guard = holdfast.Guard(model, optimizer)
guard.steps(42, max_steps=10)  # error: arg-type
guard.steps([], max_steps="10")  # error: arg-type
guard.fit(len, [], max_steps=1)  # error: arg-type
guard.register("ema", 42)  # error: arg-type
guard.quarantine(["a"], reason="bad")  # error: list-item
print(guard.summary().comitted)  # error: attr-defined
for step in guard.steps([], max_steps=1):
    step.backward(0.5)  # error: arg-type
    print(step.nubmer)  # error: attr-defined
