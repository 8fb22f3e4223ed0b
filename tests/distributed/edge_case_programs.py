"""Programs in which one rank acts alone, or which combine features that are rarely combined."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import GLOBAL, QUICK, BackWithoutData, Data, Guarded, Layout, Model, loss_of, on_all, same, train_unguarded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import holdfast

BAD_STEP = 15
"""the step whose data is bad"""
HOST_GATE = {"detect": {"gate": "host", "warmup_steps": 8}}
DEVICE_GATE = {"detect": {"gate": "device", "warmup_steps": 8}}
CHECKPOINTS = {"checkpoint": {"every_steps": 4, "certify_after": 1, "rank_timeout_seconds": 20}}


@contextmanager
def time_limit(seconds: float = 20.0) -> Iterator[None]:
    """Dump the stacks and exit if the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def bad(layout: Layout) -> dict[int, str]:
    """Return a fault in a sample of BAD_STEP that data-parallel rank 1 reads."""
    return {(BAD_STEP - 1) * GLOBAL + layout.data[0] + 1: "nan"}


def train(
    layout: Layout,
    run_dir: Path | None,
    config: dict[str, Any],
    *,
    faults: dict[int, str] | None = None,
    loader: Any = None,
    after: Callable[[Any, Any], None] = lambda guard, step: None,
    each: Callable[[Any, Any], None] = lambda guard, step: None,
    parts: int = 1,
    accumulate: int = 1,
    epochs: int = 1,
    max_steps: int | None = None,
    **options: Any,
) -> holdfast.Guard:
    """Run a guarded loop. `each` is called inside a step, `after` between two."""
    guard = holdfast.Guard(
        layout.model, layout.optimizer, clip_grad_norm=1.0, run_dir=run_dir, config={**QUICK, **config}, **options
    )
    with guard:
        loader = layout.loader(faults) if loader is None else loader
        for step in guard.steps(loader, epochs=epochs, accumulate=accumulate, max_steps=max_steps):
            with step:
                for batch in step.microbatches(parts):
                    step.backward(loss_of(layout.model, batch))
                each(guard, step)
            after(guard, step)
    return guard


def quarantined_steps(run_dir: Path) -> set[int]:
    """Return the steps of the epoch whose data is quarantined."""
    dist.barrier()
    run = Guarded.__new__(Guarded)
    run.run_dir = run_dir
    return run.excluded()


class Logs:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, outcome: Any) -> None:
        self.seen.append(outcome.step)


class Plans:
    def on_instability(self, incident: Any) -> None:
        return None


# ---- one rank acts alone


def resume_and_roll_back_on_mesh_slices(folder: Path, rank: int, size: int) -> None:
    """FSDP2 x TP: parameters that are not parallelized are on slices of the mesh. Save, resume, and roll back to disk."""
    with time_limit(30):
        layout = Layout("fsdp_tp", rank, size)

        def stop(guard: Any, step: Any) -> None:
            if rank == size - 1 and step.number == 9:
                guard.stop("enough")

        train(layout, folder / "run", {**HOST_GATE, **CHECKPOINTS}, each=stop)

        def drop_snapshots(guard: Any, step: Any) -> None:
            if rank == 1 and step.number == BAD_STEP - 1:
                for snapshot in list(guard._run.parts.snapshots.ring):
                    guard._run.parts.snapshots.ring.drop(snapshot)

        layout = Layout("fsdp_tp", rank, size)
        guard = train(
            layout,
            folder / "run",
            {**HOST_GATE, **CHECKPOINTS},
            faults=bad(layout),
            each=drop_snapshots,
            hooks=[BackWithoutData()],
        )
        assert guard.summary().status == "recovered"
        same(layout.state(), train_unguarded(Layout("fsdp_tp", rank, size), 1.0, quarantined_steps(folder / "run")))


class FlattenedLayout(Layout):
    """FSDP2 over two mesh dimensions flattened into one, with tensor parallel."""

    def __init__(self, rank: int, size: int) -> None:
        torch.manual_seed(5)
        model = Model()
        self.kind, self.rank, self.size, self.data, self.model = "fsdp_tp", rank, size, (2, rank // 2), model
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        flat = mesh["replicate", "shard"]._flatten("dp")
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=flat)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def resume_on_flattened_slices(folder: Path, rank: int, size: int) -> None:
    with time_limit(30):
        train(FlattenedLayout(rank, size), folder / "run", {**HOST_GATE, **CHECKPOINTS}, max_steps=6)
        layout = FlattenedLayout(rank, size)
        guard = train(layout, folder / "run", {**HOST_GATE, **CHECKPOINTS})
        assert guard.step == 20
        same(layout.state(), train_unguarded(FlattenedLayout(rank, size), 1.0, set()))


def hooks_of_one_rank(folder: Path, rank: int, size: int) -> None:
    with time_limit():
        for n, (hook, owner) in enumerate(((Logs, 0), (Logs, 1), (Plans, 0), (Plans, 1))):
            layout = Layout("ddp", rank, size, "adamw_fused")
            hooks = [hook()] if rank == owner else []
            train(layout, folder / f"{n}", DEVICE_GATE, faults=bad(layout), hooks=hooks)
            same(layout.state(), train_unguarded(Layout("ddp", rank, size, "adamw_fused"), 1.0, {BAD_STEP}))


class EvaluatingHook:
    """Evaluates the model after every step; with the device gate, between the next step's backward and update."""

    late = True

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def on_step_end(self, outcome: Any) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(2, 8))
        self.model.train()


def late_hook_evaluates(folder: Path, rank: int, size: int) -> None:
    """FSDP2 keeps the root's gathered weights after an evaluation. The next forward must not use them after the update."""
    for optimizer, config in (("adamw_fused", DEVICE_GATE), ("adamw", HOST_GATE)):
        layout = Layout("fsdp", rank, size, optimizer)
        train(layout, folder / optimizer, config, hooks=[EvaluatingHook(layout.model)])
        layout.model.reshard()  # after the last evaluation the model has the gathered parameters
        same(layout.state(), train_unguarded(Layout("fsdp", rank, size, optimizer), 1.0, set()))


def random_draw_before_the_end(folder: Path, rank: int, size: int) -> None:
    """After the last step is saved, rank 0 alone draws a random number, as an evaluation would."""
    with time_limit():
        layout = Layout("ddp", rank, size)
        guard = holdfast.Guard(
            layout.model, layout.optimizer, run_dir=folder / "run", config={**QUICK, **HOST_GATE, **CHECKPOINTS}
        )
        with guard:
            for step in guard.steps(layout.loader(), epochs=1):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_of(layout.model, batch))
            if rank == 0:
                torch.rand(1)


def evaluates_alone(folder: Path, rank: int, size: int) -> None:
    def after(guard: Any, step: Any) -> None:
        if rank == 0 and step.number == 5:
            guard.report_eval(1.0)

    with time_limit():
        train(Layout("ddp", rank, size), folder / "run", HOST_GATE, after=after)


def reads_outcome_alone(folder: Path, rank: int, size: int) -> None:
    """Reading step.outcome commits the step, which needs all ranks if the step is bad."""

    def after(guard: Any, step: Any) -> None:
        if rank == 0:
            assert step.outcome.step

    with time_limit():
        layout = Layout("ddp", rank, size, "adamw_fused")
        train(layout, folder / "run", DEVICE_GATE, faults=bad(layout), after=after)


def guard_made_before_the_group(folder: Path, rank: int, size: int) -> None:
    dist.destroy_process_group()
    with time_limit():
        torch.manual_seed(5)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = holdfast.Guard(model, optimizer, run_dir=folder / f"run-{rank}", config=QUICK)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        parallel, loader = DistributedDataParallel(model), Layout("ddp", rank, size).loader()
        with pytest.raises(holdfast.HoldfastError, match="init_process_group"):
            guard.fit(lambda _, batch: loss_of(parallel, batch), loader, epochs=1)


def mean_over_no_tokens(folder: Path, rank: int, size: int) -> None:
    """A rank whose batch has no tokens gets a NaN mean and NaN gradients, which must be ignored."""
    with time_limit():
        for kind in ("ddp", "fsdp"):
            states = []
            for min_count in (0.0, 1.0):
                layout = Layout(kind, rank, size)
                guard = holdfast.Guard(
                    layout.model, layout.optimizer, clip_grad_norm=1.0, config={**QUICK, **HOST_GATE}
                )
                with guard:
                    for step in guard.steps(layout.loader(), epochs=1):
                        with step:
                            for batch in step.microbatches(2):
                                no_tokens = rank == 1 and step.number in (1, 7) and step.attempt == 1
                                mask = torch.full((2,), 0.0 if no_tokens else 1.0)
                                losses = (layout.model(batch["x"]) - batch["y"]).square().mean(1) * mask
                                step.backward(losses.sum() / mask.sum().clamp(min=min_count), weight=float(mask.sum()))
                assert guard.step == 20 and guard.summary().status == "clean", guard.summary()
                states.append(layout.state())
            same(*states)


def requests_of_one_rank(folder: Path, rank: int, size: int) -> None:
    """Declare a shift right after a bad step; quarantine samples before the first step and after the last."""
    with time_limit():
        layout = Layout("ddp", rank, size, "adamw_fused")

        def shift(guard: Any, step: Any) -> None:
            if rank == 1 and step.number == BAD_STEP and step.attempt == 1:
                guard.expect_shift("another stage")

        train(layout, folder / "shift", DEVICE_GATE, faults=bad(layout), after=shift)
        same(layout.state(), train_unguarded(Layout("ddp", rank, size, "adamw_fused"), 1.0, {BAD_STEP}))

        seen: list[int] = []
        layout = Layout("ddp", rank, size)
        guard = holdfast.Guard(
            layout.model, layout.optimizer, run_dir=folder / "samples", config={**QUICK, **HOST_GATE}
        )
        with guard:
            if rank == 1:
                guard.quarantine([0, 1], "known to be bad")
            for step in guard.steps(layout.loader(), max_steps=4):
                with step:
                    for batch in step.microbatches():
                        seen += batch["id"].tolist()
                        step.backward(loss_of(layout.model, batch))
            if rank == 1:
                guard.quarantine([77], "found to be bad")
        assert not {0, 1} & set(seen), seen
        dist.barrier()
        assert "77" in (folder / "samples" / "quarantine.json").read_text()


def checkpoint_events_arrive_earlier(folder: Path, rank: int, size: int) -> None:
    """One rank has pruned the checkpoint that rank 0 chooses, since it learned earlier that a newer one is good."""
    with time_limit():
        layout = Layout("ddp", rank, size)

        def each(guard: Any, step: Any) -> None:
            if step.number == BAD_STEP and step.attempt == 1:
                run = guard._run
                for snapshot in list(run.parts.snapshots.ring):
                    run.parts.snapshots.ring.drop(snapshot)
                if rank == 1:
                    good = [k for k in run.parts.checkpoints.records.values() if str(k.health) == "good"]
                    del run.parts.checkpoints.records[max(good, key=lambda k: k.step).name]

        config, hooks = {**HOST_GATE, **CHECKPOINTS}, [BackWithoutData()]
        train(layout, folder / "run", config, faults=bad(layout), each=each, hooks=hooks)
        same(layout.state(), train_unguarded(Layout("ddp", rank, size), 1.0, quarantined_steps(folder / "run")))


def loader_error_without_with_block(folder: Path, rank: int, size: int) -> None:
    """Without `with guard:`, and with a program that continues after the error, the others still exit."""

    class BrokenData(Data):
        def __getitem__(self, i: int) -> dict[str, Any]:
            if rank == 1 and i > 80:
                raise ValueError("the disk is gone")
            return super().__getitem__(i)

    with time_limit():
        layout, data = Layout("ddp", rank, size), BrokenData({})
        sampler = DistributedSampler(data, size, rank, shuffle=False)
        guard = holdfast.Guard(layout.model, layout.optimizer, run_dir=folder / "run", config={**QUICK, **HOST_GATE})
        try:
            for step in guard.steps(DataLoader(data, batch_size=4, sampler=sampler), epochs=1):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_of(layout.model, batch))
        except ValueError:
            time.sleep(60)


def every_sample_quarantined(folder: Path, rank: int, size: int) -> None:
    """One rank quarantines all data in the middle of the run: every rank ends with the error, or is ended by the others."""
    with time_limit():
        layout = Layout("ddp", rank, size)
        with holdfast.Guard(
            layout.model, layout.optimizer, run_dir=folder / "run", config={**QUICK, **HOST_GATE}
        ) as guard:
            for step in guard.steps(layout.loader(), max_steps=500):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_of(layout.model, batch))
                if rank == 1 and step.number == 3:
                    guard.quarantine(range(len(Data({}))), "all of it")


# ---- combinations


def combinations_on_two_ranks(folder: Path, rank: int, size: int) -> None:
    with time_limit(60):
        layout = Layout("fsdp", rank, size, "adamw_fused")
        options = {"faults": bad(layout), "parts": 2, "accumulate": 2, "hooks": [_Evaluates(layout), BackWithoutData()]}
        guard = train(layout, folder / "evaluates", {**DEVICE_GATE, **CHECKPOINTS}, **options)
        assert guard.summary().status == "recovered" and on_all(guard.step) == [9, 9], on_all(guard.step)
        _overflows(folder, rank, size)
        _workers(folder, rank, size)
        _single_rows(folder, rank, size)


class _Evaluates:
    """Runs the model between steps, after which FSDP2 keeps its gathered parameters."""

    def __init__(self, layout: Layout) -> None:
        self._model = layout.model

    def on_step_end(self, outcome: Any) -> None:
        with torch.no_grad():
            self._model(torch.ones(2, 8))


def _overflows(folder: Path, rank: int, size: int) -> None:
    """With fp16's loss scaler an overflow on one rank's shard counts on all, as in a loop without a guard."""
    for kind in ("ddp", "fsdp"):
        pair = []
        for guarded in (True, False):
            layout = Layout(kind, rank, size, "sgd")
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
            if guarded:
                guard = holdfast.Guard(
                    layout.model, layout.optimizer, scaler=scaler, clip_grad_norm=1.0, config={**QUICK, **HOST_GATE}
                )
                guard.fit(lambda model, batch: loss_of(model, batch) * 8, layout.loader(), epochs=1)
                assert 10 < guard.step < 20, guard.step
            else:
                for batch in layout.loader():
                    scaler.scale(loss_of(layout.model, batch) * 8).backward()
                    scaler.unscale_(layout.optimizer)
                    layout.clip(1.0)
                    scaler.step(layout.optimizer)
                    scaler.update()
                    layout.optimizer.zero_grad()
            pair.append((layout.state(), scaler.state_dict()))
        same(pair[0][0], pair[1][0])
        assert pair[0][1] == pair[1][1]


def _workers(folder: Path, rank: int, size: int) -> None:
    layout = Layout("fsdp", rank, size, "adamw_fused")
    data = Data(bad(layout))
    sampler = DistributedSampler(data, size, rank, shuffle=False)
    loader = DataLoader(data, GLOBAL // size, sampler=sampler, num_workers=1, persistent_workers=True)
    train(layout, folder / "workers", DEVICE_GATE, loader=loader, hooks=[BackWithoutData()])
    same(
        layout.state(),
        train_unguarded(Layout("fsdp", rank, size, "adamw_fused"), 1.0, quarantined_steps(folder / "workers")),
    )


def _single_rows(folder: Path, rank: int, size: int) -> None:
    """Batches of one row: a rank whose row is quarantined still takes as many steps as the others."""

    class FewSamples(Data):
        def __len__(self) -> int:
            return 20

    layout, data = Layout("ddp", rank, size), FewSamples({7: "nan", 11: "nan"})
    loader = DataLoader(data, sampler=DistributedSampler(data, size, rank, shuffle=True))
    guard = train(
        layout, folder / "rows", {**HOST_GATE, "quarantine": {"nonfinite_samples": True}}, loader=loader, epochs=3
    )
    assert on_all(guard.step) == [28, 28], on_all(guard.step)
    states = on_all([float(t.double().sum()) for t in layout.state()])
    assert states[0] == states[1]


def several_culprits(folder: Path, rank: int, size: int) -> None:
    """All culprits of one step are named, and no other rank."""
    with time_limit(60):
        first = (BAD_STEP - 1) * GLOBAL
        for name, faults, culprits, clip in (
            ("explosions", {first: "explosion", first + 3: "explosion"}, [0, 3], None),
            ("nans", {first + 6: "nan", first + 3: "nan"}, [2, 3], 1.0),
            ("mixed", {first + 1: "nan", first + 2: "spike"}, [1], 1.0),
        ):
            run = Guarded(Layout("ddp", rank, size), folder / name, faults=faults, clip=clip, config=HOST_GATE)
            if rank == 0:
                again, action = run.events("action")
                assert again["action"] == "replay" and action["ranks"] == culprits, (name, action)


def _notes(run_dir: Path) -> list[str]:
    dist.barrier()
    lines = (run_dir / "journal.jsonl").read_text().splitlines()
    return [e["message"] for e in map(json.loads, lines) if e["event"] == "note" and "the loop" in e["message"]]


def _steps_by_hand(layout: Layout) -> Callable[[Any, Any], None]:
    """Return a function that steps a scheduler and an optimizer that the guard does not know."""
    weight = torch.nn.Parameter(torch.ones(2))
    other = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(layout.optimizer, 1000)

    def after(guard: Any, step: Any) -> None:
        scheduler.step()
        weight.sum().backward()
        other.step()

    return after


def scheduler_of_one_rank(folder: Path, rank: int, size: int) -> None:
    """Rank 1 alone steps a scheduler and an optimizer that the guard does not know: all ranks note both, once."""
    with time_limit():
        for name, gate, kind in (("host", HOST_GATE, "adamw"), ("device", DEVICE_GATE, "adamw_fused")):
            layout = Layout("fsdp", rank, size, kind)
            by_hand = {"after": _steps_by_hand(layout)} if rank == 1 else {}
            guard = train(layout, folder / name, gate, max_steps=12, **by_hand)
            assert guard.step == 12 and guard.summary().status == "clean"
            first, second = sorted(_notes(folder / name))
            assert first.startswith("the loop steps SGD over 1 parameters") and "StepLR" in second
            same(layout.state(), train_unguarded(Layout("fsdp", rank, size, kind), 1.0, set(), 12))


class Idle(torch.optim.SGD):
    """Changes nothing."""

    def step(self, closure: Any = None) -> None: ...


def parameters_that_do_not_move(folder: Path, rank: int, size: int) -> None:
    """They are reported if they move on no rank, and not if they move on one."""
    with time_limit():
        for name, kind, idle in (("ddp", "ddp", (0, 1)), ("fsdp", "fsdp", (0, 1)), ("one", "fsdp", (1,))):
            layout = Layout(kind, rank, size, "sgd")
            if rank in idle:
                layout.optimizer = Idle(layout.model.parameters(), lr=1e-2)
            before = layout.state()[0].clone()
            run_dir = folder / name
            assert train(layout, run_dir, HOST_GATE, max_steps=12).step == 12
            assert torch.equal(layout.state()[0], before) == (rank in idle)
            dist.barrier()
            assert ("no bit of the 8 trained parameters" in (run_dir / "journal.jsonl").read_text()) == (len(idle) == 2)


def gradients_cleared_on_one_rank(folder: Path, rank: int, size: int) -> None:
    """Rank 1 clears its gradients inside a step."""
    layout = Layout("ddp", rank, size)
    train(layout, folder / "run", HOST_GATE, each=lambda *_: layout.optimizer.zero_grad() if rank == 1 else None)
