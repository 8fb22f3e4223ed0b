"""The Guard: what the user constructs, calls and reads."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

from torch import Generator, Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.core.base import config as configuration
from holdfast.core.base.clock import Clock, SystemClock
from holdfast.core.base.config import Config, MetricsSection
from holdfast.core.base.errors import HoldfastError, SetupError, Shutdown, StepError
from holdfast.core.base.types import Outcome
from holdfast.core.detectors.base import Detector
from holdfast.core.hang.heartbeat import Heartbeat
from holdfast.core.record.facts import check_facts, record_in_folder
from holdfast.core.record.sink_thread import Sink
from holdfast.core.record.tally import Summary
from holdfast.runtime.guard.build import build_run
from holdfast.runtime.guard.loop import (
    CommittedSteps,
    Counters,
    DrivenLoop,
    GuardedData,
    PlainData,
    close_at_exit,
    is_batch_function,
)
from holdfast.runtime.guard.memory_probe import MemoryProbe, probe_memory
from holdfast.runtime.guard.setup import build_state
from holdfast.runtime.guard.steps import Steps, check_loss
from holdfast.runtime.guard.unguarded import UnguardedRun
from holdfast.runtime.guard.wrap import OwnLines
from holdfast.runtime.ports.bundle_store import BundleStore
from holdfast.runtime.ports.checkpoint_store import CheckpointStore, MemoryStore
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.ports.hang_watch import HangWatch, NoHangWatch
from holdfast.runtime.ports.hooks import AnyHook, Hooks
from holdfast.runtime.ports.shutdown import NoSignals, ShutdownSignals
from holdfast.runtime.record.environment import describe_loop, describe_run
from holdfast.runtime.record.records import Records
from holdfast.runtime.state.schedule import Interval
from holdfast.runtime.state.wrappers import scaler_inside
from holdfast.runtime.step.interface import Run
from holdfast.runtime.step.pipeline import GuardedPipeline
from holdfast.runtime.step.progress import Progress

log = logging.getLogger("holdfast")

_NO_BATCH = (
    "the loop has trained without its guard: nothing was checked or saved; draw the batches from it: "
    "for batch in guard.data(loader)"
)


class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> object: ...


class Wiring(NamedTuple):
    """Where a run writes on this rank, where its checkpoints go, and which ranks it trains with."""

    run_dir: str | os.PathLike[str] | None
    store: CheckpointStore | None
    distributed: DistributedContext
    signals: ShutdownSignals = NoSignals()
    memory: MemoryStore | None = None
    hang_watch: HangWatch = NoHangWatch()
    bundles: BundleStore | None = None
    make_sinks: Callable[[MetricsSection], Sequence[Sink]] | None = None


class GuardBase:
    """Keeps a training loop alive and honest.

        guard = holdfast.Guard(model, optimizer, scheduler=scheduler, scaler=scaler, run_dir="runs/a")
        with guard:
            for step in guard.steps(loader, accumulate=4, max_steps=10_000):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_fn(model(batch["x"]), batch["y"]))

    The guard clips (`clip_grad_norm`) and steps the optimizers, the scaler and the schedulers; the loop must not.

    model: a module, or a list or dict of them; every parameter the optimizers update must belong to one.
    optimizer, scheduler: one or several. scheduler_interval: "step", "epoch" or "eval", one or one for each.
    run_dir: the folder for journal, metrics, incidents and checkpoints; None keeps no record.
    config: a path to a policy file, a mapping of its sections, or None for the defaults.
    hooks: objects with any of the methods of `holdfast.Hook`.
    detectors: detectors of your own, in addition to the built-in ones.
    about: further facts for run.json (data, code, anything that tells this run from another).

    HOLDFAST_OFF=1 in the environment switches the guard off: the same loop, unguarded, writing nothing.
    """

    _clock: ClassVar[Clock] = SystemClock()

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        scheduler_interval: Interval | Sequence[Interval] | None = None,
        clip_grad_norm: float | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        hooks: Sequence[AnyHook] = (),
        detectors: Sequence[Detector] = (),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        policy = configuration.load(config)
        is_number = isinstance(clip_grad_norm, int | float) and not isinstance(clip_grad_norm, bool)
        if clip_grad_norm is not None and not (is_number and 0 < clip_grad_norm < math.inf):
            raise SetupError(f"Guard(clip_grad_norm={clip_grad_norm!r}): a maximum norm is a positive number, or None")
        for name, value in (("hooks", hooks), ("detectors", detectors)):
            if not isinstance(value, Iterable):
                raise SetupError(f"Guard({name}={value!r}): expected a list; write {name}=[...]")
        for detector in detectors:
            if not isinstance(detector, Detector):
                raise SetupError(
                    f"Guard(detectors=...): {type(detector).__name__} is not a detector; it needs name, limits, observe, "
                    "rebaseline, state_dict and load_state_dict"
                )
        scaler = scaler_inside(optimizer) if scaler is None else scaler
        state = build_state(model, optimizer, scheduler, scaler, scheduler_interval)
        self._state, self._hooks, self._heartbeat = state, Hooks(hooks), Heartbeat()
        wiring = self._wire(run_dir, policy)
        self._records = Records(wiring.run_dir, policy, self._clock, wiring.make_sinks)
        self._run: Run
        if os.environ.get("HOLDFAST_OFF", "") not in ("", "0"):
            self._run = UnguardedRun(state, self._hooks, wiring.distributed, clip_grad_norm)
        else:
            self._run = build_run(
                state,
                policy,
                clip=clip_grad_norm,
                hooks=self._hooks,
                detectors=detectors,
                records=self._records,
                clock=self._clock,
                store=wiring.store,
                bundles=wiring.bundles,
                memory=wiring.memory,
                distributed=wiring.distributed,
                signals=wiring.signals,
                heartbeat=self._heartbeat,
                hang_watch=wiring.hang_watch,
            )
        self._clip, self._about = clip_grad_norm, dict(about or {})
        self.handles_signals = (
            policy.shutdown.enabled and not isinstance(wiring.signals, NoSignals) and not self._is_off
        )
        """whether a signal ends the run with a checkpoint, once the guard is open"""
        self._phase: Literal["new", "open", "closed"] = "new"
        self._loop = DrivenLoop(self._run, self._clock)
        self._own_lines: OwnLines | None = None
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None

    @classmethod
    def wrap(
        cls,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Optimizer,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        *,
        scaler: GradScaler | None = None,
        **options: Any,
    ) -> Self:
        """Return a guard for a loop that keeps its own lines: `optimizer.step()` asks the guard whether the update lands.

            guard = holdfast.Guard.wrap(model, optimizer, scheduler, run_dir="runs/a")
            for batch in guard.data(loader):
                loss = loss_fn(model, batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            guard.close()

        The loss is what the loop calls backward on. The other arguments are those of Guard.
        """
        if isinstance(optimizer, Sequence):
            raise SetupError(
                f"Guard.wrap(optimizer=[{len(optimizer)} optimizers]): it follows one optimizer.step() in each step; with "
                "several, use Guard(model, [a, b]) and guard.step(loss)"
            )
        intervals: Any = None if scheduler is None else "loop"
        guard = cls(model, optimizer, scheduler=scheduler, scaler=scaler, scheduler_interval=intervals, **options)
        guard._own_lines = OwnLines(guard._loop, guard._state.optimizers, guard._scaler)
        close_at_exit(guard)
        return guard

    def _wire(self, run_dir: str | os.PathLike[str] | None, config: Config) -> Wiring:
        """Return the ports to disk and to other ranks. `holdfast.Guard` overrides it; this class has neither."""
        return Wiring(run_dir, None, DistributedContext())

    # ---- begin and end

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _open(self) -> None:
        if self._phase == "open":
            self._run.pipeline.require_own_process()
            return
        if self._phase == "closed":
            raise StepError("this guard is closed; make a new Guard to continue training")
        # Not described earlier: until now the caller may have added parameter groups.
        self._run.open({**describe_run(self._state, self._clip), **self._about})
        self._phase = "open"
        if self._own_lines is not None:
            self._own_lines.open(self._run.count_step if isinstance(self._run, UnguardedRun) else None)
        try:
            self._hooks.call("on_train_begin", self)
        except BaseException as error:  # `with guard:` is not entered then, so __exit__ would not release the folder
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Settle the pending step and end the record. `with guard:` does it. A second call does nothing.

        In a forked child it only lets go of model and optimizers: the run is the parent's.
        """
        if self._phase != "open":
            if self._phase == "new" and not self._is_off and self._own_lines and self._own_lines.pop_missed_updates():
                log.error("holdfast: %s", _NO_BATCH)
            return
        self._phase = "closed"
        if self._own_lines is not None:
            self._own_lines.close()
        if self._run.pipeline.is_forked:
            self._run.detach()
            return
        try:
            self._run.close(error)
        finally:
            self._hooks.call("on_train_end", self.summary())

    # ---- the loop

    def steps(
        self,
        loader: Iterable[Any],
        *,
        accumulate: int = 1,
        max_steps: int | None = None,
        epochs: int | None = None,
    ) -> Steps:
        """Return an iterator of steps of `accumulate` batches each.

        It ends when `max_steps` are committed or `epochs` passes over the loader are done. Epochs follow one another
        without a border: a step may take its batches from two of them.
        """
        for name, value in (("accumulate", accumulate), ("max_steps", max_steps), ("epochs", epochs)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise StepError(
                    f"steps({name}={value!r}): a whole number from 1{'' if name == 'accumulate' else ', or None'}"
                )
        if max_steps is None and epochs is None:
            raise StepError("steps(): say how long to train, with max_steps= or epochs=")
        self._open()
        self._records.total_steps = max_steps
        self.record(loop=describe_loop(loader, accumulate))
        self._loop.begin(is_resumed=self._run.attach(loader, epochs, accumulate, max_steps))
        return Steps(self._run.pipeline, self._clock, accumulate, max_steps, self._loop, self.close)

    def fit(
        self,
        loss_fn: Callable[[Any, Any], Tensor],
        loader: Iterable[Any],
        *,
        accumulate: int = 1,
        max_steps: int | None = None,
        epochs: int | None = None,
        microbatches: int = 1,
    ) -> Summary:
        """Run the loop in one call. `loss_fn(model, batch)` returns the mean loss of the batch."""
        modules = self._state.wrapped_modules
        model = modules[0][1] if len(modules) == 1 else dict(modules)
        is_owner = self._phase == "new"
        self._open()
        error: BaseException | None = None
        try:
            for step in self.steps(loader, accumulate=accumulate, max_steps=max_steps, epochs=epochs):
                with step:
                    for batch in step.microbatches(microbatches):
                        step.backward(loss_fn(model, batch))
        except BaseException as caught:
            error = caught
            raise
        finally:
            if is_owner:
                self.close(error)
        return self.summary()

    def data(
        self, loader: Iterable[Any] | Callable[[int], Any], *, max_steps: int | None = None
    ) -> GuardedData | PlainData:
        """Return the batches of a loader for a loop of your own. The first call resumes the run.

            for epoch in range(epochs):
                for batch in guard.data(loader):
                    loss = loss_fn(model, batch)
                    loss.backward()
                    guard.step(loss)

        Each `for` runs to the end of its own epoch; epochs that an earlier process has finished end at once. An update that
        does not land changes nothing, and the batches after it are what the run continues with.

        loader: a DataLoader or another iterable; or a function that returns the batch of a number, counted from 0.
        max_steps: the data ends when so many steps are committed.
        """
        self._open()
        loop, is_function = self._loop, is_batch_function(loader)
        if self._is_off and self._own_lines is not None:
            return PlainData(loader, lambda: max_steps is not None and self.step >= max_steps)
        self.record(loop=describe_loop(loader, 1))
        close_at_exit(self)

        def begin() -> None:
            loop.leave_epoch()
            loop.attach(loader, None if is_function else 1)

        def draw() -> Any:
            self._open()  # StepError if it is closed
            try:
                return loop.next_batch(max_steps)
            except Shutdown as error:
                self.close(error)
                raise

        begin()
        return GuardedData(loader, begin, draw)

    def _end_step(self, loss: Tensor, *, update: bool = True) -> Outcome | None:
        """End the step of a classic loop: clip, step, schedule and clear the gradients, or do none of it.

        Call it after `loss.backward()`, with the loss itself. `update=False` counts the loss of one part of a step and
        leaves the gradients to accumulate.
        """
        check_loss(loss, needs_graph=False)
        self._own_run()
        self._loop.add_loss(loss)
        return self._loop.update() if update else None

    @property
    def landed(self) -> bool:
        """Whether the last update was applied: count only then what is not in `guard.counters()`."""
        return self._loop.landed

    def counters(self, **start: float) -> Counters:
        """Return numbers that go back with the run: `seen = guard.counters(tokens=0)`, then `seen.tokens += n`."""
        counters = Counters(**start)
        self.register("counters", counters)
        return counters

    # ---- requests

    def register(self, name: str, thing: Stateful | Generator) -> None:
        """Add an object with state (EMA, a curriculum, a replay buffer) or a torch.Generator: rollbacks restore it."""
        if self.step > 0 or self._progress.served is not None:
            raise SetupError(
                f"register({name!r}, ...): register before the first step, so that every snapshot holds it"
            )
        self._run.register(name, thing)

    def expect_shift(self, reason: str) -> None:
        """Announce that the loss is about to change level on purpose: detectors learn the new level.

        On several ranks any rank may call it: it applies to all of them from the next step on.
        """
        self._own_run().expect_shift(reason)

    def stop(self, reason: str = "guard.stop()") -> None:
        """End the loop cleanly after the current step. On several ranks any may call it; all end after the same step."""
        self._own_run().stop(reason)

    def report_eval(self, metric: float) -> None:
        """Report an evaluation result: drives schedulers with scheduler_interval='eval' (ReduceLROnPlateau)."""
        value = float(metric)
        if math.isnan(value):
            raise HoldfastError("report_eval(nan): the evaluation gave no number; schedulers cannot be driven by it")
        self._own_run().report_eval(value)

    def record(self, *, step: int | None = None, **facts: Any) -> None:
        """Record facts in run.json and evaluation results in the journal, like `holdfast.record(guard, ...)`.

        Results belong to the guard's current step unless `step` is given.
        """
        if step is None and "eval" in facts and self._phase == "open":
            step = self.step
        checked = check_facts(facts, step)
        run = self._own_run()
        rundir = self._records.rundir
        if self._phase == "closed" and rundir is not None and not self._is_off:
            record_in_folder(rundir.path, checked, step)
        else:
            run.record(dict(checked), step)

    def flush(self) -> None:
        """Settle the last step now, so that the model holds its final values. Waits for the device."""
        self._own_run().pipeline.flush()

    def checkpoint(self, reason: str = "asked for") -> str | None:
        """Write the run to disk as it is between two steps, wait for it, and return its path.

        Returns None if it could not be written (the journal says why), or if the run keeps no checkpoints.
        """
        return self._own_run().save_checkpoint(reason)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Resume from this checkpoint, whatever the run directory holds: the same as `[checkpoint] load_path`.

        Call it before `steps`, with the same model and optimizer. A run directory means its newest good checkpoint.
        """
        self._run.load_checkpoint(os.fspath(path))

    def set_splitter(
        self, splitter: Callable[[Any, int], list[Any]] | None, *, weight: Callable[[Any], float] | None = None
    ) -> None:
        """Say how a micro-batch that does not fit into memory is split: `splitter(batch, n)` returns a list of n batches.

        weight: returns what a part counts in the mean loss, such as its valid labels. Without it the guard counts labels
        that are not ignored, or samples. None as splitter: along the first dimension.
        """
        for name, value in (("splitter", splitter), ("weight", weight)):
            if value is not None and not callable(value):
                raise SetupError(f"set_splitter({name}={value!r}): expected a function")
        if (oom := self._run.pipeline.oom) is not None:
            oom.splitter, oom.weigh = splitter, weight

    def probe_memory(self, loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> MemoryProbe:
        """Find out before the first step whether the largest batch fits, with the optimizer's state to come.

            probe = guard.probe_memory(loss_fn, longest_batch)

        loss_fn: returns the mean loss, as for `fit`. Runs forward and backward and leaves no trace of them. If the batch
        does not fit, micro-batches of its shape are served in as many parts as it fits in. Call it on every rank.
        """
        modules = self._state.wrapped_modules
        model = modules[0][1] if len(modules) == 1 else dict(modules)
        self._open()
        pipeline = self._own_run().pipeline
        if not isinstance(pipeline, GuardedPipeline):
            return MemoryProbe(1, 0, 0, "HOLDFAST_OFF is set: nothing was probed")
        return probe_memory(pipeline, model, loss_fn, batch)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Declare what the loop does: `with guard.phase("eval"):`. Time in it counts for that phase when hangs are sought.

        name: "eval", "save", "compile", "data" or "user".
        """
        return self._heartbeat.during(name)

    def quarantine(self, samples: Iterable[int], reason: str) -> None:
        """Exclude these sample ids from this run, also after a restart."""
        self._open()
        self._run.quarantine(samples, reason)

    # ---- state

    def _own_run(self) -> Run:
        """Return the run. StepError in a forked child."""
        self._run.pipeline.require_own_process()
        return self._run

    @property
    def _progress(self) -> Progress:
        return self._run.pipeline.progress

    @property
    def _is_off(self) -> bool:
        return isinstance(self._run, UnguardedRun)

    @property
    def step(self) -> CommittedSteps:
        """Committed steps. In a classic loop, `guard.step(loss)` ends the step."""
        return CommittedSteps(self._progress.step, self._end_step)

    @property
    def stopping(self) -> str | None:
        """Why the run was asked to stop, or None."""
        return self._progress.stopping

    def summary(self) -> Summary:
        """Return whether the run is clean or recovered, what was done, and what it cost."""
        return self._run.summary()
