"""Small real runs: a model, data, optimizer, schedule and precision; guarded, plain, and as the reference run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain import plain_loop
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

import holdfast

WIDTH = 8


class Points(Dataset):
    """Item i is a function of i, plus noise from the global generator where `augment`: a random augmentation.

    `faults` maps an index to a function of its x: the fault sits in the data. `linear`: easy to learn, the loss descends.
    """

    def __init__(
        self, count: int, augment: bool = False, faults: dict[int, Callable] | None = None, linear: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, WIDTH, generator=generator)
        total = self.x.sum(1, keepdim=True)
        self.y = (total if linear else total.sin()) + 0.05 * torch.randn(count, 1, generator=generator)
        self.augment, self.faults = augment, faults or {}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[i % len(self.x)]
        if self.augment:
            x = x + 0.05 * torch.randn(WIDTH) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        if int(i) in self.faults:
            x = self.faults[int(i)](x)
        return x, self.y[i % len(self.x)]


class Net(nn.Module):
    """Dropout, BatchNorm, a mask buffer of -inf, and a buffer that forward rebinds."""

    def __init__(self, dropout: float = 0.2, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(16, 1)
        self.register_buffer("mask", torch.tensor([0.0] * 15 + [float("-inf")]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen * 0.9 + x.detach().float().mean()
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(hidden * torch.sigmoid(self.mask))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}

L = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "cosine": lambda o: L.CosineAnnealingLR(o, 40),
    "lambda": lambda o: L.LambdaLR(o, lambda t: 1.0 / (1.0 + 0.1 * t)),
    "onecycle": lambda o: L.OneCycleLR(o, max_lr=2e-2, total_steps=400),
    "plateau": lambda o: L.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "exponential": lambda o: L.ExponentialLR(o, 0.98),
    "sequential": lambda o: L.SequentialLR(o, [L.LinearLR(o, 0.1, 1.0, 5), L.CosineAnnealingLR(o, 40)], [5]),
    "chained": lambda o: L.ChainedScheduler([L.LinearLR(o, 0.5, 1.0, 5), L.ExponentialLR(o, 0.97)]),
    "cyclic": lambda o: L.CyclicLR(o, 1e-3, 1e-2, step_size_up=7, cycle_momentum=False),
    "restarts": lambda o: L.CosineAnnealingWarmRestarts(o, 11),
    "multistep": lambda o: L.MultiStepLR(o, [6, 12, 20]),
}


@dataclass
class Case:
    """One way to train. `build` makes everything from the seed."""

    optimizer: str = "adamw"
    scheduler: str = "cosine"
    interval: str = "step"
    precision: str = "fp32"
    init_scale: float = 2.0**16
    accumulate: int = 1
    clip: float | None = 1.0
    count: int = 96
    batch: int = 8
    epochs: int = 3
    max_steps: int | None = None
    workers: int = 0
    shuffle: str = "global"
    augment: bool = False
    linear: bool = False
    dropout: float = 0.2
    norm: bool = True
    compiled: bool = False
    eval_every: int = 5
    device: str = "cpu"
    seed: int = 3
    faults: dict[int, Callable] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def loader(self, excluded: Any = None, faults: bool = True) -> DataLoader:
        data = Points(self.count, self.augment, self.faults if faults else None, self.linear)
        generator = torch.Generator().manual_seed(11) if self.shuffle == "generator" else None
        if self.shuffle == "none":
            sampler: Sampler = SequentialSampler(data)
        elif self.shuffle in ("seeded", "unique"):
            sampler = Seeded(self.count, unique=self.shuffle == "unique")
        elif self.shuffle == "unique_generator":
            generator = torch.Generator().manual_seed(11)
            sampler = Drawn(self.count, generator)
        else:
            sampler = RandomSampler(data, generator=generator)
        batches: Any = BatchSampler(sampler, self.batch, drop_last=False)
        if excluded is not None:
            batches = Without(batches, excluded)
        return DataLoader(
            data,
            batch_sampler=batches,
            num_workers=self.workers,
            generator=generator,
            multiprocessing_context="fork" if self.workers else None,
        )

    def build(self) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        np.random.seed(self.seed)
        random.seed(self.seed)
        model: nn.Module = Net(self.dropout, self.norm).to(self.device)
        if self.compiled:
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        scaler = torch.amp.GradScaler(self.device, init_scale=self.init_scale, growth_interval=7) if self.fp16 else None
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": SCHEDULERS[self.scheduler](optimizer),
            "scaler": scaler,
        }

    @property
    def fp16(self) -> bool:
        return self.precision == "fp16"

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = (t.to(self.device) for t in batch)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.precision]
        with torch.autocast(self.device, dtype=dtype, enabled=self.precision != "fp32"):
            return nn.functional.mse_loss(model(x).float(), y)

    def evaluate(self, model: nn.Module) -> float:
        data = Points(16)
        model.eval()
        with torch.no_grad():
            value = self.loss(model, (data.x, data.y)).item()
        model.train()
        return value

    # ---- the three ways to run it

    def plain(self, excluded: Any = None, faults: bool = True, **interventions: Any) -> Run:
        parts = self.build()
        loader = self.loader(excluded, faults)
        losses = plain_loop(self, loader, **parts, clip=self.clip, **interventions)
        return Run(parts, losses)

    def guarded(self, run_dir: Path, hooks: Any = (), before_step: Callable | None = None, **more: Any) -> Run:
        parts = self.build()
        loader = self.loader()
        plateau = self.scheduler == "plateau"
        guard = holdfast.Guard(
            **parts,
            scheduler_interval="eval" if plateau else self.interval,
            clip_grad_norm=self.clip,
            run_dir=run_dir,
            config=self.config,
            hooks=[*hooks, *([_Plateau(self, parts["model"])] if plateau else [])],
            **more,
        )
        losses = []
        with guard:
            for hook in hooks:
                if hasattr(hook, "guard"):
                    hook.guard = guard
            if plateau:
                guard._hooks._hooks[-1].guard = guard
            for step in guard.steps(loader, accumulate=self.accumulate, epochs=self.epochs, max_steps=self.max_steps):
                if before_step is not None:
                    before_step(step, parts)
                with step:
                    for batch in step.microbatches():
                        loss = self.loss(parts["model"], batch)
                        losses.append(loss.item())
                        step.backward(loss)
        run = Run(parts, losses, guard, Path(run_dir))
        return run

    def reference(self, run: Run, faults: bool = True) -> Run:
        """The same program with the excluded stretches removed from the index stream, and the same interventions."""
        return self.plain(run.excluded(), faults, lr_factor=run.lr_factor(), max_norm=run.max_norm())


class _Plateau:
    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case, self.model, self.guard = case, model, None

    def on_step_end(self, outcome: Any) -> None:
        if outcome.step % self.case.eval_every == 0:
            self.guard.report_eval(self.case.evaluate(self.model))


def parts():
    """Return a model, its optimizer and a loader, the same each time."""
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(Points(64), batch_size=8)


def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


class Seeded(Sampler):
    """order = f(seed, epoch), by set_epoch. `unique`: every epoch has ids of its own, so a fault can sit in one of them."""

    def __init__(self, count: int, unique: bool = False) -> None:
        self.count, self.epoch, self.unique = count, 0, unique

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        yield from order_of(self.count, self.epoch, self.unique)


def order_of(count: int, epoch: int, unique: bool) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + epoch)
    return [i + unique * epoch * count for i in torch.randperm(count, generator=generator).tolist()]


class Drawn(Sampler):
    """Ids of its own for every epoch, in an order drawn from the user's generator."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count, self.generator, self.epoch = count, generator, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        order = torch.randperm(self.count, generator=self.generator).tolist()
        yield from (i + self.epoch * self.count for i in order)


class Without:
    """A batch sampler less some stretches of its stream, for the reference run; sets the epoch as a plain loop would."""

    def __init__(self, inner: BatchSampler, excluded: Any) -> None:
        self.inner, self.excluded, self.epoch = inner, excluded, 0

    def __iter__(self):
        epoch, position = self.epoch, 0
        self.epoch += 1
        if hasattr(self.inner.sampler, "set_epoch"):
            self.inner.sampler.set_epoch(epoch)
        for batch in self.inner:
            start, position = position, position + len(batch)
            if any(e == epoch and low <= start and position <= high for e, low, high in self.excluded["spans"]):
                continue
            kept = [i for i in batch if i not in self.excluded["samples"] or epoch < self.excluded["samples"][i]]
            if kept:
                yield kept


class Run:
    """What a run ended as."""

    def __init__(self, parts: dict[str, Any], losses: list[float], guard: Any = None, path: Path | None = None) -> None:
        self.model, self.optimizer = parts["model"], parts["optimizer"]
        self.scheduler, self.scaler = parts["scheduler"], parts["scaler"]
        self.losses, self.guard, self.path = losses, guard, path
        self.random = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
        self.cuda_random = torch.cuda.get_rng_state().tolist() if next(self.model.parameters()).is_cuda else None

    def journal(self) -> list[dict[str, Any]]:
        from holdfast.core.record.journal import read

        record = read(self.path / "journal.jsonl")
        assert record.torn == []
        return record.events

    def actions(self) -> list[str]:
        return [e["action"] for e in self.journal() if e["event"] == "action"]

    def excluded(self) -> dict[str, Any]:
        entries = []
        if (self.path / "quarantine.json").exists():
            entries = json.loads((self.path / "quarantine.json").read_text())["entries"]
        spans: dict[tuple[int, int, int], None] = {}
        for entry in entries:  # in order: what was put back may have been left out again
            spans.update({tuple(s): None for s in entry.get("spans", ())})
            for span in entry.get("released", ()):
                spans.pop(tuple(span), None)
        # A sample id is left out from the epoch after the one it was found in.
        samples = {i: 0 for e in entries for i in e.get("samples", ())}
        return {"spans": _joined(list(spans)), "samples": samples}

    def lr_factor(self) -> Callable[[int], float]:
        """The factor on the LR of the update made after `done` committed steps, by the journal alone."""
        laid = self._interventions()
        return lambda done: laid.get(done, (1.0, None))[0]

    def max_norm(self) -> Callable[[int, float | None], float | None]:
        laid = self._interventions()

        def limit(done: int, own: float | None) -> float | None:
            tight = laid.get(done, (1.0, None))[1]
            return own if tight is None else tight if own is None else min(tight, own)

        return limit

    def _interventions(self) -> dict[int, tuple[float, float | None]]:
        """What lay over the update made after so many committed steps: LR factor and clip. Both go back with a rollback."""
        used: dict[int, tuple[float, float | None]] = {}
        ramp: tuple[float, int, int] | None = None  # factor, steps, done
        clip: tuple[float, int] | None = None  # norm, steps left
        step, after = 0, {0: (ramp, clip)}

        def advance(to: int) -> None:
            nonlocal step, ramp, clip
            while step < to:
                factor = 1.0 if ramp is None else ramp[0] + (1.0 - ramp[0]) * (ramp[2] / ramp[1])
                used[step] = (factor, None if clip is None else clip[0])
                ramp = None if ramp is None or ramp[2] + 1 >= ramp[1] else (*ramp[:2], ramp[2] + 1)
                clip = None if clip is None or clip[1] <= 1 else (clip[0], clip[1] - 1)
                step += 1
                after[step] = (ramp, clip)

        for event in self.journal():
            if event.get("action") == "rollback":
                advance(event["from_step"])
                step = event["to_step"]
                ramp, clip = after[step]
            elif event.get("action") == "cut_lr":
                advance(event["step"])
                ramp = (event["factor"], event["ramp_steps"], 0)
            elif event.get("action") == "tighten_clip":
                advance(event["step"])
                clip = (event["max_norm"], event["steps"])
        advance(step + max(ramp[1] if ramp else 0, clip[1] if clip else 0))
        # What the last rollback left of the branch it gave up was never used.
        return {done: laid for done, laid in used.items() if done < step}


def _joined(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring stretches as one, so that a batch lies in one of them or in none."""
    joined: list[tuple[int, int, int]] = []
    for epoch, start, stop in sorted(spans):
        if joined and joined[-1][0] == epoch and start <= joined[-1][2]:
            joined[-1] = (epoch, joined[-1][1], max(stop, joined[-1][2]))
        else:
            joined.append((epoch, start, stop))
    return joined


def assert_same(a: Run, b: Run) -> None:
    """Bit for bit: parameters, buffers, optimizer state, groups, schedule, loss scale, random streams."""
    left, right = a.model.state_dict(), b.model.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert _equal(left[name], right[name]), f"{name} differs: {left[name]} / {right[name]}"
    for index, (p, q) in enumerate(zip(a.model.parameters(), b.model.parameters(), strict=True)):
        state, other = a.optimizer.state.get(p, {}), b.optimizer.state.get(q, {})
        assert state.keys() == other.keys(), f"optimizer state of parameter {index}"
        for key in state:
            assert _equal(state[key], other[key]), f"optimizer state {key} of parameter {index} differs"
    for group, other in zip(a.optimizer.param_groups, b.optimizer.param_groups, strict=True):
        for key in group:
            assert key == "params" or _equal(group[key], other[key]), f"group option {key} differs"
    if a.scheduler is not None:
        assert without_functions(a.scheduler.state_dict()) == without_functions(b.scheduler.state_dict())
    if a.scaler is not None:
        assert a.scaler.state_dict() == b.scaler.state_dict()
    assert torch.equal(a.random[0], b.random[0]), "the torch generator differs"
    assert a.cuda_random == b.cuda_random, "the CUDA generator differs"
    assert a.random[1] == b.random[1], "Python's generator differs"
    assert a.random[2] == b.random[2], "NumPy's generator differs"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return a == b


def without_functions(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: without_functions(v) for k, v in state.items() if not callable(v)}
    if isinstance(state, list):
        return [without_functions(v) for v in state if not callable(v)]
    return state
