"""The loops that are compared: a model trained bare, and the same under a guard, a block of steps at a time."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import holdfast
from benchmarks.blocks import allow_turns, synchronize
from benchmarks.gpt import GPT, Size, loader, text

CLIP = 1.0
LEARNT = 45
"""steps after which the detectors have learnt a run's course (warmup_steps of the policy), and a few more"""
QUIET: dict[str, Any] = {"snapshot": {"enabled": False}, "checkpoint": {"enabled": False}}
"""everything is on but copies of the run: sensing, gate, all detectors, journal and metrics"""
OPTIMIZERS = ("fused", "foreach", "default", "sgd")


class Case:
    """What is trained, and how: everything but who looks after it."""

    def __init__(
        self,
        name: str,
        *,
        device: str,
        mode: str = "eager",
        precision: str = "bf16",
        optimizer: str = "fused",
        lr: float = 1e-4,
        backend: str = "inductor",
    ) -> None:
        self.name, self.device, self.lr = name, device, lr
        self.mode, self.precision, self.optimizer, self.backend = mode, precision, optimizer, backend

    def __str__(self) -> str:
        return f"{self.name} {self.mode} {self.precision} {self.optimizer}"

    def described(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "mode", "precision", "optimizer", "lr")}

    def model(self) -> nn.Module:
        """From a batch on the device to its loss. From the seed: the same for everybody who asks."""
        raise NotImplementedError

    def batches(self) -> DataLoader[Tensor]:
        """In the same order for everybody who asks."""
        raise NotImplementedError

    def sample(self) -> Tensor:
        """A batch's shape, on the device."""
        batch: Tensor = next(iter(self.batches()))
        return batch.to(self.device)


class Training(Case):
    """A GPT on tokens in memory."""

    def __init__(
        self, name: str, size: Size, *, batch: int | None = None, length: int | None = None, **how: Any
    ) -> None:
        super().__init__(name, lr=size.lr, **how)
        self.size, self.batch, self.length = size, batch or size.batch, length or size.length
        rows = max(64 * self.batch, 2**23 // self.length)
        self.rows = text(max(self.batch, min(rows, 1 << 14)), self.length, size.vocabulary)

    def __str__(self) -> str:
        return f"{self.name} {self.batch}x{self.length} {self.mode} {self.precision} {self.optimizer}"

    def described(self) -> dict[str, Any]:
        return {**super().described(), "batch": self.batch, "length": self.length, "size": self.size._asdict()}

    def model(self) -> nn.Module:
        with torch.device(self.device):
            return GPT(self.size, self.length, self.precision, cache=self.mode != "graphed")

    def batches(self) -> DataLoader[Tensor]:
        return loader(self.rows, self.batch, pin=self.device == "cuda")


class Subject:
    """A model from the seed, its optimizer and its scaler. The same for everybody who makes one."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(5)
        self.core = self.model = case.model()
        if case.mode == "compile":
            self.model = torch.compile(self.core, fullgraph=True, backend=case.backend)  # type: ignore[assignment]
        elif case.mode == "graphed":
            self.model = torch.cuda.make_graphed_callables(self.core, (case.sample(),))  # type: ignore[assignment]
        self.parameters = list(self.core.parameters())
        self.optimizer = _optimizer(case, self.parameters)
        self.scaler = torch.amp.GradScaler(case.device) if case.precision == "fp16" else None

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch.to(self.case.device, non_blocking=True))
        return loss

    def nbytes(self) -> int:
        """Parameters and optimizer state: a snapshot's size. Before the first step the state is not there yet."""
        model = sum(p.nbytes for p in self.parameters)
        state = sum(v.nbytes for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        return model + (state or (1 if self.case.optimizer == "sgd" else 2) * model)

    def tensors(self) -> list[Tensor]:
        """All that an update changes."""
        found = [p.detach() for p in self.parameters]
        for p in self.parameters:
            found += [v for _, v in sorted(self.optimizer.state[p].items()) if isinstance(v, Tensor)]
        if self.scaler is not None and self.scaler._scale is not None:
            found.append(self.scaler._scale)
        return found


def _optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=case.lr, momentum=0.9, fused=True)
    if case.optimizer == "default":
        return torch.optim.AdamW(parameters, lr=case.lr)
    how: dict[str, Any] = {case.optimizer: True}
    return torch.optim.AdamW(parameters, lr=case.lr, **how)


class Loop:
    """The loop without a guard. Others put their own work into `before_update` and `after_update`."""

    every = 10
    """steps after which what it does repeats"""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.done = 0
        self.notes: list[str] = []
        self._batches = self._forever()

    def _forever(self) -> Iterator[Tensor]:
        batches = self.subject.case.batches()
        while True:
            yield from batches

    def warm_up(self) -> None:
        self.block(5)

    def block(self, steps: int) -> None:
        subject, parameters, optimizer = self.subject, self.subject.parameters, self.subject.optimizer
        scaler: Any = subject.scaler
        for _ in range(steps):
            loss = subject.loss(next(self._batches))
            if scaler is None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            self.before_update(loss, norm)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            self.after_update(loss, norm)
            self.done += 1

    def before_update(self, loss: Tensor, norm: Tensor) -> None: ...

    def after_update(self, loss: Tensor, norm: Tensor) -> None: ...

    def extra_ms(self) -> float:
        """What a step costs beyond what blocks show."""
        return 0.0

    def between(self) -> None:
        """After a block, outside of its time."""

    def problems(self) -> list[str]:
        return []

    def close(self) -> None: ...


class Guarded(Loop):
    """The same loop under a guard, open all the time: a block takes its next steps."""

    late = True

    def __init__(self, subject: Subject, folder: Path, config: dict[str, Any] | None = None, every: int = 10) -> None:
        super().__init__(subject)
        self.folder, self.every = folder, every
        self.config = {**QUIET, **(config or {})}
        self.snapshots = 0
        self._unexpected: str | None = None
        self.fill_seconds = 0.0
        self._settled = 0.0
        self.guard = holdfast.Guard(
            subject.model,
            subject.optimizer,
            clip_grad_norm=CLIP,
            scaler=subject.scaler,
            run_dir=folder,
            config=self.config,
        )
        self.guard.__enter__()
        allow_turns(self.guard)
        ring = self._run.parts.snapshots.ring
        add = ring.add

        def noted(snapshot: Any) -> Any:  # counted and not kept: what the loop holds must not grow
            due = self.snapshots * self.snapshot_every
            if snapshot.step != due and self._unexpected is None:
                self._unexpected = f"a snapshot was taken at step {snapshot.step} where one was due at {due}"
            self.snapshots += 1
            return add(snapshot)

        ring.add = noted
        self._steps = self.guard.steps(subject.case.batches(), max_steps=10**9)

    @property
    def _run(self) -> Any:
        return self.guard._run

    def warm_up(self) -> None:
        """Until the detectors have learnt, the ring is full and a block's borders lie between two snapshots: what is copied
        at a border would be waited for."""
        began = time.perf_counter()
        slots = self._run.parts.snapshots.ring.max_snapshots() if self.takes_snapshots else 0
        least = max(LEARNT, (slots + 1) * self.every if slots else 0)
        self.block(-(-(least - self.every // 2) // self.every) * self.every + self.every // 2)
        synchronize(self.subject.case.device)
        self.between()
        self._settled, self.fill_seconds = 0.0, time.perf_counter() - began
        if slots:
            gb = self.subject.nbytes() / 1e9
            self.notes.append(f"{slots} slots of {gb:.2f} GB, filled in {self.fill_seconds:.1f} s ({self.done} steps)")

    @property
    def snapshot_every(self) -> int:
        return int(self.config["snapshot"].get("every_steps", 10))

    @property
    def takes_snapshots(self) -> bool:
        return bool(self.config["snapshot"].get("enabled", True))

    def block(self, steps: int) -> None:
        served, loss = self._steps, self.subject.loss
        for _ in range(steps):
            step = next(served)
            with step:
                for batch in step.microbatches():
                    step.backward(loss(batch))
        self.done += steps

    def between(self) -> None:
        """What is still being looked at or written is not to slow down the others."""
        began = time.perf_counter()
        self._run.parts.snapshots.wait_until_idle()
        if self._run.parts.checkpoints.store is not None:
            self._run.parts.checkpoints.store.wait()
        self._settled = max(self._settled, time.perf_counter() - began)

    def close(self) -> None:
        self.guard.close()

    def problems(self) -> list[str]:
        """Of a closed one: what did not go as configured."""
        said: list[str] = []
        summary = self.guard.summary()
        gone = {"skipped": summary.skipped, "replayed": summary.replayed, "rolled back": summary.rollbacks}
        said += [f"{count} steps {what}" for what, count in gone.items() if count]
        if summary.committed + summary.overflowed != self.done:
            said.append(f"{summary.committed} of {self.done} steps committed")
        if summary.overflowed and self.subject.scaler is None:
            said.append(f"{summary.overflowed} steps overflowed without a scaler")
        dead = next((e["step"] for e in self._journal() if e["event"] == "finding" and e["kind"] == "dead_run"), None)
        if dead is not None:
            said.append(f"nothing was trained any more at step {dead}")
        if summary.incidents:
            said.append(f"incidents: {', '.join(i.kind for i in summary.incidents)}")
        due = summary.committed // self.snapshot_every + 1 if self.takes_snapshots else 0
        if self._unexpected is not None:
            said.append(self._unexpected)
        # The last one may still have been in the making: it is whole when the step after it begins.
        elif self.snapshots not in (due, due - 1):
            said.append(f"{self.snapshots} snapshots taken where {due} were due")
        if self.config["checkpoint"].get("enabled", True):
            said += self._saves(summary.committed)
        return said

    def _saves(self, committed: int) -> list[str]:
        """What the journal says of checkpoints, as a note; and what of it is not as configured."""
        events = [e for e in self._journal() if e["event"] == "checkpoint"]
        saved = [e for e in events if e.get("status") == "saved"]
        total, seconds = sum(e["bytes"] for e in saved), sum(e["write_seconds"] for e in saved)
        speed = f"{total / 1e9:.2f} GB written at {total / 1e9 / max(seconds, 1e-9):.2f} GB/s"
        self.notes.append(f"{len(saved)} checkpoints, {speed}, waited for up to {self._settled:.1f} s after a block")
        due = committed // int(self.config["checkpoint"]["every_steps"])
        return [] if len(saved) == due else [f"{len(saved)} checkpoints written where {due} were due"]

    def _journal(self) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def let_go(device: str) -> None:
    """What the ways that are gone have held, on the device and in pinned memory."""
    gc.unfreeze()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()


def difference(ours: Subject, theirs: Subject) -> str | None:
    """Where the two are not the same, bit for bit."""
    pairs = zip(ours.tensors(), theirs.tensors(), strict=True)
    for number, (a, b) in enumerate(pairs):
        if a.shape != b.shape or not torch.equal(_bits(a), _bits(b)):
            return f"tensor {number} of {len(ours.tensors())} differs"
    return None


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
