"""Processes of a run: made of fresh objects, ended at any instant, and compared with an uninterrupted run.

A run's directory copied between two steps, while nothing is being written, is what a kill at that instant leaves. So one
uninterrupted run gives the reference and any number of runs that died on the way.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import test_parts as made
import torch
from cases import Case, Points, Run, Seeded
from parts import Parts, Recipe, assert_equal, everything
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import holdfast
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.record.journal import read

FORK = multiprocessing.get_context("fork")


def config_of(gate: str = "host", checkpoint: dict[str, Any] | None = None, **recover: Any) -> dict[str, Any]:
    """Saved often, certified soon; a rollback goes a few steps back."""
    saved = {"every_steps": 3, "certify_after": 2, "keep_last": 3} | (checkpoint or {})
    back = {"rollback_margin": 2, "skip_batches": 3, "lr_ramp_steps": 5, "probation_steps": 6, "max_consecutive": 2}
    return {
        "checkpoint": saved,
        "snapshot": {"every_steps": 4, "certify_after": 3},
        "recover": back | recover,
        "detect": {"gate": gate, "warmup_steps": 6},
        "quarantine": {"nonfinite_samples": False},
        "journal": {"fsync": False},
        "metrics": {"flush_seconds": 0.0},
    }


@dataclass
class Loaded(Case):
    """A case whose loader is made as people make theirs."""

    way: str = ""
    drop_last: bool = False
    persistent: bool = False

    def loader(self, excluded: Any = None, faults: bool = True) -> DataLoader:
        if not self.way:
            return super().loader(excluded, faults)
        data = Points(self.count, self.augment, self.faults if faults else None)
        more: dict[str, Any] = {"num_workers": self.workers, "persistent_workers": self.persistent}
        more |= {"multiprocessing_context": "fork"} if self.workers else {}
        if self.way == "batch_sampler":
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), self.batch, self.drop_last), **more)
        more |= {"batch_size": self.batch, "drop_last": self.drop_last}
        if self.way == "generator":
            return DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(11), **more)
        samplers: dict[str, Callable[[], Any]] = {
            "sequential": lambda: SequentialSampler(data),
            "seeded": lambda: Seeded(self.count),
            "distributed": lambda: DistributedSampler(data, num_replicas=1, rank=0, seed=5),
        }
        if self.way in samplers:
            return DataLoader(data, sampler=samplers[self.way](), **more)
        return DataLoader(data, shuffle=True, **more)


def simple(gate: str = "host", make: Any = made.param_groups, **case: Any) -> Recipe:
    """Five batches an epoch, the last of them short; augmented, so that every sample draws."""
    case = {"way": "shuffle", "count": 37, "epochs": 4, "augment": True, "config": config_of(gate)} | case
    return Recipe(make if make in made.HOST else lambda: make(fused=gate == "device"), Loaded(**case))


@dataclass
class Life:
    """One process's worth of a run."""

    parts: Parts
    guard: Any
    path: Path
    fed: dict[int, list[tuple[bytes, float]]] = field(default_factory=dict)
    """the data and the losses of every committed step, as it was at last"""
    began: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    def journal(self) -> list[dict[str, Any]]:
        return events_of(self.path)

    def actions(self) -> list[str]:
        return actions_of(self.path)

    def resumed(self) -> dict[str, Any]:
        """What is on record of how this life began."""
        return [e for e in self.journal() if e["event"] == "resumed"][-1]

    def notes(self) -> list[str]:
        return [str(e.get("message")) for e in self.journal() if e["event"] == "note"]


Between = Callable[[Any, Parts, Any], None]


def live(
    recipe: Recipe,
    path: Path,
    *,
    between: Between | None = None,
    before: Between | None = None,
    begun: Callable[[Any, Parts], None] | None = None,
    hooks: Iterable[Any] = (),
    config: dict[str, Any] | None = None,
    evaluate: bool = True,
    **more: Any,
) -> Life:
    """Train to the end. `between(guard, parts, step)` stands after every step, `before` at the top of the loop."""
    case, parts = recipe.case, recipe.make()
    mine = [_Committed(parts)] if parts.committed else []
    guard = holdfast.Guard(
        parts.model,
        parts.optimizers if len(parts.optimizers) > 1 else parts.optimizers[0],
        scheduler=parts.schedulers or None,
        scheduler_interval=parts.intervals or None,
        scaler=parts.scaler,
        clip_grad_norm=case.clip,
        run_dir=path,
        config=case.config if config is None else config,
        hooks=[*mine, *hooks],
        **more,
    )
    for hook in hooks:
        if hasattr(hook, "guard"):
            hook.guard = guard
    for name, thing in parts.registered.items():
        guard.register(name, thing)
    if begun is not None:
        begun(guard, parts)
    life = Life(parts, guard, Path(path))
    with guard:
        steps = guard.steps(case.loader(), accumulate=case.accumulate, epochs=case.epochs, max_steps=case.max_steps)
        life.began = guard.step
        taken: list[tuple[Any, list[tuple[bytes, float]]]] = []
        for step in steps:
            if before is not None:
                before(guard, parts, step)
            fed = []
            with step:
                for batch in step.microbatches():
                    loss = parts.loss(batch)
                    fed.append((batch[0].numpy().tobytes(), loss.item()))
                    step.backward(loss)
            taken.append((step, fed))
            due = evaluate and parts.metric is not None and step.number % parts.eval_every == 0
            if due and step.outcome.status == "committed":
                guard.report_eval(parts.metric())
            if between is not None:
                between(guard, parts, step)
        life.state = state_of(life)
        for step, fed in taken:
            if step.outcome.status == "committed" and step.number <= guard.step:
                life.fed[step.number] = fed
    return life


class _Committed:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def on_step_end(self, outcome: Any) -> None:
        assert self.parts.committed is not None
        self.parts.committed(outcome.step)


def state_of(life: Life) -> dict[str, Any]:
    """Everything the run is at its end, the guard's own part too."""
    run = life.guard._run.pipeline
    run.flush()
    source, context = run.parts.feeder.source, run.context
    return copy.deepcopy(
        {
            **everything(life.parts),
            "detectors": context.engine.state_dict(),
            "interventions": context.state.interventions.state_dict(),
            "committed": run.progress.step,
            "position": tuple(source.position),
            "data's own": [g.get_state() for g in source._context.generators],
        }
    )


def assert_continued(life: Life, whole: Life, *, seen: bool = True) -> None:
    """The life ended as the uninterrupted run did, and was fed what that was fed from where it began.

    seen: both have seen the same batches. One that resumed from before a skip never loads what was skipped.
    """
    assert life.fed.keys() == {n for n in whole.fed if n > life.began}, f"steps {sorted(life.fed)} after {life.began}"
    for number, given in life.fed.items():
        assert [x for x, _ in given] == [x for x, _ in whole.fed[number]], f"step {number} had other data"
        assert [v for _, v in given] == [v for _, v in whole.fed[number]], f"step {number} had another loss"
    assert_equal(_compared(life.state, seen), _compared(whole.state, seen))


def _compared(state: dict[str, Any], seen: bool) -> dict[str, Any]:
    windows = {name: w for name, w in state["detectors"].items() if seen or name != "duplicate_batch"}
    if not seen:
        windows["experiments"] = {**windows["experiments"], "left_out": None}
    return {**state, "detectors": windows}


# ---- lives that end


def idle(guard: Any) -> None:
    """Nothing is being written."""
    parts = guard._run.parts
    parts.checkpoints.store.wait()
    if parts.incidents._store is not None:
        parts.incidents._store.close()  # waits; the next bundle starts another thread


class Dies:
    """Copies the run's directory after these steps, as a kill there would leave it."""

    def __init__(self, path: Path, *at: int) -> None:
        self.path, self.at = path, set(at)
        self.died: dict[int, Path] = {}

    def __call__(self, guard: Any, parts: Parts, step: Any) -> None:
        number = step.number
        if number in self.at and number not in self.died:
            self.died[number] = self.leave(guard, f"after{number}")

    def leave(self, guard: Any, name: str) -> Path:
        idle(guard)
        to = self.path / name
        shutil.copytree(guard._run.context.records.place, to, symlinks=True)
        return to


def killed(recipe: Recipe, path: Path, when: Callable[[Any, Parts, Any], bool], **more: Any) -> None:
    """A process of its own, ended by SIGKILL the first time `when` holds after a step. What it wrote is on disk or not."""

    def target() -> None:
        def between(guard: Any, parts: Parts, step: Any) -> None:
            if when(guard, parts, step):
                os.kill(os.getpid(), signal.SIGKILL)

        torch.set_num_threads(1)
        live(recipe, path, between=between, **more)

    child = FORK.Process(target=target)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL, f"the process ended with {child.exitcode}"


def copied(path: Path, to: Path) -> Path:
    shutil.copytree(path, to, symlinks=True)
    return to


# ---- what is on disk


def entries_of(path: Path) -> dict[str, CheckpointEntry]:
    return {e.name: e for e in Folder(path / "checkpoints").entries()}


def health_of(path: Path) -> dict[str, str]:
    return {name: str(e.health) for name, e in entries_of(path).items()}


def good_of(path: Path) -> list[CheckpointEntry]:
    """The good ones, newest first."""
    return sorted((e for e in entries_of(path).values() if e.health == "good"), key=lambda e: (e.step, e.branch))[::-1]


def events_of(path: Path) -> list[dict[str, Any]]:
    record = read(path / "journal.jsonl")
    assert record.torn == []
    return record.events


def actions_of(path: Path) -> list[str]:
    return [e["action"] for e in events_of(path) if e["event"] == "action"]


class Written(Run):
    """Return the journals of all processes as that of one: resuming from a checkpoint is rolling back to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def journal(self) -> list[dict[str, Any]]:
        return [_as_rollback(e) if e["event"] == "resumed" else e for e in events_of(self.path)]


def _as_rollback(event: dict[str, Any]) -> dict[str, Any]:
    return {"event": "action", "action": "rollback", "from_step": event["step"], "to_step": event["step"]}


def assert_as_written(recipe: Recipe, life: Life) -> None:
    """The run ended as the plain one that leaves out what was excluded and makes the same interventions."""
    reference = recipe.reference(Written(life.path))  # type: ignore[arg-type]
    assert_equal({name: life.state[name] for name in reference.state}, reference.state)


# ---- one run over many lives


class Ends:
    """Asks the run to end, in order, after these steps."""

    def __init__(self, at: int, then: Between | None = None) -> None:
        self.at, self.then = at, then

    def __call__(self, guard: Any, parts: Parts, step: Any) -> None:
        if self.then is not None:
            self.then(guard, parts, step)
        if step.number >= self.at:
            guard.flush()
            if guard.step >= self.at:
                guard.stop("enough for one life")


def relay(recipe: Recipe, path: Path, stops: Iterable[int], **more: Any) -> Life:
    """The same run in one life after the other, each ended in order after one of these steps; the last goes to the end."""
    fed: dict[int, list[tuple[bytes, float]]] = {}
    stands = 0
    for at in [*stops, None]:
        life = live(recipe, path, between=None if at is None else Ends(at), **more)
        assert life.began == stands, f"it resumed from step {life.began}, not from {stands}"
        stands = life.guard.step
        fed.update(life.fed)
    life.fed, life.began = fed, 0
    return life
