"""What the user sees."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.core.base import config as configuration
from holdfast.core.base.clock import Clock, SystemClock
from holdfast.core.base.config import Config
from holdfast.core.base.errors import HoldfastError, SetupError, StepError
from holdfast.core.detectors.base import Detector
from holdfast.core.record import facts as said
from holdfast.core.record.tally import Summary
from holdfast.runtime.guard.loop import Steps
from holdfast.runtime.guard.off import OffRun
from holdfast.runtime.guard.setup import build_state
from holdfast.runtime.ports.checkpoint_store import CheckpointStore
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.ports.hooks import Hooks
from holdfast.runtime.record.environment import described, loop_of
from holdfast.runtime.record.records import Records
from holdfast.runtime.step.run import Run


class Wired(NamedTuple):
    """Where a run writes on this rank, where its checkpoints go, and whom it trains with."""

    run_dir: str | os.PathLike[str] | None
    tier: CheckpointStore | None
    company: DistributedContext


class Guard:
    """Keeps a training loop alive and honest.

        guard = holdfast.Guard(model, optimizer, scheduler=scheduler, scaler=scaler, run_dir="runs/a")
        with guard:
            for step in guard.steps(loader, accumulate=4, max_steps=10_000):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_fn(model(batch["x"]), batch["y"]))

    The guard clips (`clip_grad_norm`), steps the optimizers, the scaler and the schedulers; the loop must not.

    model: a module, or a list or dict of them; every parameter the optimizers update must belong to one.
    optimizer, scheduler: one or several. scheduler_interval: "step", "epoch" or "eval", one or one for each.
    run_dir: where the journal, metrics and incidents go; None keeps no record.
    config: a path to a policy file, a mapping of its sections, or None for the defaults.
    hooks: objects with any of the methods listed in `holdfast.runtime.ports.hooks`.
    detectors: detectors of your own, beside the built-in ones.
    about: further facts for run.json (data, code, whatever tells this run from another).

    HOLDFAST_OFF=1 in the environment takes the guard out: the same loop, unguarded, writing nothing.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        scheduler_interval: str | Sequence[str] | None = None,
        clip_grad_norm: float | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        hooks: Sequence[Any] = (),
        detectors: Sequence[Detector] = (),
        about: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        checked = configuration.load(config)
        if clip_grad_norm is not None and not (_is_number(clip_grad_norm) and clip_grad_norm > 0):
            raise SetupError(f"Guard(clip_grad_norm={clip_grad_norm!r}): a maximum norm is a positive number, or None")
        for detector in detectors:
            if not isinstance(detector, Detector):
                raise SetupError(
                    f"Guard(detectors=...): {type(detector).__name__} is not a detector; it needs name, limits, observe, "
                    "rebaseline, state_dict and load_state_dict"
                )
        state = build_state(model, optimizer, scheduler, scaler, scheduler_interval)
        self._hooks = Hooks(hooks)
        self._clock = clock or SystemClock()
        self._run: Run | OffRun
        wired = self._wire(run_dir, checked)
        if os.environ.get("HOLDFAST_OFF", "") not in ("", "0"):
            self._run = OffRun(state, clip=clip_grad_norm, hooks=self._hooks, clock=self._clock, company=wired.company)
        else:
            self._run = Run(
                state,
                checked,
                clip=clip_grad_norm,
                hooks=self._hooks,
                detectors=detectors,
                records=Records(wired.run_dir, checked, self._clock),
                clock=self._clock,
                tier=wired.tier,
                company=wired.company,
            )
        self._facts = dict(about or {})
        several = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        self._schedulers = [s for s in several if s is not None]
        self._clip = clip_grad_norm
        self._phase = "new"

    def _wire(self, run_dir: str | os.PathLike[str] | None, config: Config) -> Wired:
        """What belongs to layers above: `holdfast.Guard` knows of disks and of other ranks, this one of neither."""
        return Wired(run_dir, None, DistributedContext())

    # ---- life

    def __enter__(self) -> Guard:
        self._open()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def _open(self) -> None:
        if self._phase == "open":
            return
        if self._phase == "closed":
            raise StepError("this guard is closed; make a new Guard to train on")
        if isinstance(self._run, Run):
            self._run.open(self._about())
        self._phase = "open"
        try:
            self._hooks.call("on_train_begin", self)
        except BaseException as error:  # `with guard:` is not entered then, so nobody else would let the folder go
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Settle what is pending and end the record. `with guard:` does it; calling it twice does no harm."""
        if self._phase != "open":
            return
        self._phase = "closed"
        try:
            if isinstance(self._run, Run):
                self._run.close(error)
        finally:
            self._hooks.call("on_train_end", self.summary())

    def _about(self) -> dict[str, Any]:
        return {**described(self._run.state, self._schedulers, self._clip), **self._facts}

    # ---- the loop

    def steps(
        self,
        loader: Iterable[Any],
        *,
        accumulate: int = 1,
        max_steps: int | None = None,
        epochs: int | None = None,
    ) -> Steps:
        """Steps of `accumulate` batches each, until `max_steps` are committed or `epochs` passes over the loader are done.

        Epochs follow one another without a border: a step may take its batches from two of them.
        """
        for name, value in (("accumulate", accumulate), ("max_steps", max_steps), ("epochs", epochs)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise StepError(
                    f"steps({name}={value!r}): a whole number from 1{'' if name == 'accumulate' else ', or None'}"
                )
        if max_steps is None and epochs is None:
            raise StepError("steps(): say how long to train, with max_steps= or epochs=")
        self._open()
        self.record(loop=loop_of(loader, accumulate))
        self._run.attach(loader, epochs, accumulate, max_steps)
        return Steps(self._run, accumulate, max_steps)

    def fit(
        self,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        loader: Iterable[Any],
        *,
        accumulate: int = 1,
        max_steps: int | None = None,
        epochs: int | None = None,
        microbatches: int = 1,
    ) -> Summary:
        """The loop in one call. `loss_fn(model, batch)` returns the mean loss of the batch."""
        modules = self._run.state.wrapped_modules
        model = modules[0][1] if len(modules) == 1 else dict(modules)
        owns = self._phase == "new"
        self._open()
        error: BaseException | None = None
        try:
            for step in self.steps(loader, accumulate=accumulate, max_steps=max_steps, epochs=epochs):
                with step:
                    for batch in step.microbatches(microbatches):
                        step.backward(loss_fn(model, batch))
        except BaseException as problem:
            error = problem
            raise
        finally:
            if owns:
                self.close(error)
        return self.summary()

    # ---- what a loop may say

    def register(self, name: str, thing: Any) -> None:
        """Add an object with state (EMA, a curriculum, a replay buffer): it goes back with every rollback."""
        if self._run.step > 0 or (isinstance(self._run, Run) and self._run.current is not None):
            raise SetupError(
                f"register({name!r}, ...): register before the first step, so that every snapshot holds it"
            )
        if isinstance(thing, torch.Generator):
            if isinstance(self._run, Run):
                self._run.rng.include(thing)
            return
        self._run.state.register(name, thing)

    def expect_shift(self, reason: str) -> None:
        """The loss is about to change level on purpose: detectors learn the new one instead of alarming.

        Of several ranks any may say so: it holds on all of them from the next step on."""
        if isinstance(self._run, Run):
            self._run.expect_shift(reason)

    def stop(self, reason: str = "guard.stop()") -> None:
        """End the loop after the current step, cleanly. Of several ranks any may say so: all end after the same step,
        which is the next one where this one is over."""
        self._run.stop(reason)

    def report_eval(self, metric: float) -> None:
        """An evaluation result: drives schedulers with scheduler_interval='eval' (ReduceLROnPlateau)."""
        value = float(metric)
        if math.isnan(value):
            raise HoldfastError("report_eval(nan): the evaluation gave no number; schedulers cannot be driven by it")
        self._run.report_eval(value)

    def record(self, *, step: int | None = None, **facts: Any) -> None:
        """The same as `holdfast.record(guard, ...)`: facts for run.json, evaluation results for the journal.

        Results are of the step the guard stands at, where no other `step` is given.
        """
        if step is None and "eval" in facts and self._phase == "open":
            step = self._run.step
        checked = said.check_facts(facts, step)
        if isinstance(self._run, OffRun):
            return
        records = self._run.records
        if self._phase == "closed" and records.rundir is not None:
            said.record_in_folder(records.rundir.path, checked, step)
        else:
            records.record(self._run.engine, checked, step)

    def flush(self) -> None:
        """Settle the last step now, so that the model is what it will be. Waits for the device."""
        self._run.flush()

    def checkpoint(self, reason: str = "asked for") -> str | None:
        """Write the run to disk as it stands, between two steps, and wait until it is there: its path.

        None where it could not be written (the journal says why), or where the run keeps no checkpoints.
        """
        return self._run.checkpoints.now(reason) if isinstance(self._run, Run) else None

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from this checkpoint, whatever the run directory holds: the same as `[checkpoint] load_path`.

        Call it before `steps`, with the same model and optimizer. A run directory stands for its newest good one.
        """
        if isinstance(self._run, Run):
            if self._run.source is not None:
                raise StepError("load(): call it before guard.steps()")
            self._run.checkpoints.load_path(os.fspath(path))

    def quarantine(self, samples: Iterable[int], reason: str) -> None:
        """Never draw these sample ids again, in this run or after a restart of it."""
        if isinstance(self._run, Run):
            self._open()
            self._run.quarantine(samples, reason)

    # ---- what it knows

    @property
    def step(self) -> int:
        """Steps committed."""
        return self._run.step

    @property
    def stopping(self) -> str | None:
        """Why the run was asked to stop, or None."""
        return self._run.stopping

    def summary(self) -> Summary:
        """Clean or recovered, what was done, what it cost."""
        if isinstance(self._run, OffRun):
            return Summary(status="off", committed=self._run.step)
        return self._run.engine.summary(self._run.step)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
