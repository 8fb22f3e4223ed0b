"""One guarded run: opening, resuming, requests of the loop, checkpoints on demand, and the end.

The steps themselves are in `pipeline.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import Generator

from holdfast.core.base.errors import RanksDisagree, SetupError, StepError
from holdfast.core.record.tally import Summary
from holdfast.runtime import effects
from holdfast.runtime.checkpoint.manager import END
from holdfast.runtime.checkpoint.resume import resume
from holdfast.runtime.context import Context
from holdfast.runtime.step.pipeline import GuardedPipeline, Parts

log = logging.getLogger("holdfast")


class GuardedRun:
    """Holds a pipeline from `open` to `close`."""

    def __init__(self, context: Context, parts: Parts, clip: float | None) -> None:
        self.context, self.parts = context, parts
        self.pipeline = GuardedPipeline(context, parts, clip)
        self._is_distributed = parts.coordinator.is_distributed

    def open(self, about: dict[str, Any]) -> None:
        """Open the run directory on every rank. PolicyStop if an earlier process was stopped by policy."""
        context, parts = self.context, self.parts
        parts.watchdog.start()
        if context.ranks.rank > 0:
            log.addFilter(_keep_errors)
        try:
            parts.coordinator.run_on_all(lambda: self._open_records(about))
        except BaseException:
            self._release()
            raise
        try:
            parts.checkpoints.open()
        except BaseException as error:
            context.records.close()
            self.pipeline.report_failure(error, "opening the run directory")
            self._release()
            raise
        context.state.optimizers.forbid_foreign_steps(_foreign_step_error)
        parts.first_steps.open()

    def _open_records(self, about: dict[str, Any]) -> None:
        context = self.context
        if context.state.optimizers.is_in_use():
            raise SetupError(
                "the optimizer belongs to another Guard of this process that is still open: close that one first, with "
                "guard.close() or by using it in `with guard:`"
            )
        context.records.open(context.engine, about, context.history)

    def attach(self, loader: Iterable[Any], epochs: int | None, accumulate: int, max_steps: int | None) -> None:
        """Take batches from `loader` from now on. The first loop resumes the run; the same loader again continues."""
        self.pipeline.flush()
        self._compare_loops(loader, epochs, accumulate, max_steps)
        context, parts, pipeline = self.context, self.parts, self.pipeline
        step, is_first = pipeline.progress.step, not parts.feeder.is_attached
        if not parts.feeder.attach(loader, epochs, context.records.quarantine, self._before_workers_start):
            pipeline.begin_loop(step, is_new_loader=False)
            return
        engine, is_exact = context.engine, parts.feeder.source.exact
        engine.experiments.can_serve_again = engine.policy.can_serve_again = is_exact
        if not is_first:
            context.engine.shift("another loader", step)
        elif not parts.feeder.source.exact:
            message = "the loader has no resumable position: its data is drawn and dropped"
            context.engine.write("note", step=0, message=message)
        is_trusted = True
        if is_first:
            step, is_trusted = resume(parts.checkpoints, parts.snapshots, parts.feeder.source)
            effects.interrupted.end(context, step)
            effects.interventions.repeat_due(context, step)
        pipeline.begin_loop(step, is_new_loader=True)
        pipeline.note(parts.snapshots.begin_run(step, trusted=is_trusted))

    def _before_workers_start(self, loader: Any) -> None:
        """Stop the guard's threads: the loader may fork workers now."""
        self.parts.snapshots.wait_until_idle()
        if getattr(loader, "num_workers", 0):
            self.context.records.stop_threads()

    def _compare_loops(self, loader: Any, epochs: int | None, accumulate: int, max_steps: int | None) -> None:
        """Refuse loops that differ by rank: ranks that take different numbers of steps would wait for each other."""
        if not self._is_distributed:
            return
        try:
            batches: int | None = len(loader)
        except Exception:  # an iterable has no length, or an unknown one
            batches = None
        loop = {"accumulate": accumulate, "max_steps": max_steps, "epochs": epochs, "batches of the loader": batches}
        loop["the gate on the device"] = self.parts.gate.on_device
        why, warning, has_requests = self.parts.coordinator.compare_loops(loop, self.context.hooks)
        if why is not None:
            raise RanksDisagree(
                f"steps(): the ranks' loops differ: {why}; ranks step together, so give each the same, with a "
                "DistributedSampler (which gives every rank equally many samples) for the data"
            )
        self.pipeline.note(warning)
        if has_requests:
            self.pipeline.apply_requests(self.pipeline.progress.step + 1)

    def report_eval(self, metric: float) -> None:
        """Drive the evaluation schedulers by a metric, the mean over all ranks."""
        self.pipeline.flush()
        metric = self.parts.coordinator.share_metric(metric)
        self.pipeline.step_schedulers("eval", metric)
        self.context.hooks.call("on_eval_end", metric)

    def stop(self, reason: str) -> None:
        """Stop after the current step; on several ranks, after the next step they agree on."""
        if self._is_distributed:
            self.parts.coordinator.request("stop", reason)
        else:
            self.pipeline.request_stop(reason)
            self.context.engine.write("stop_requested", step=self.pipeline.progress.step, reason=reason)

    def expect_shift(self, reason: str) -> None:
        """Have the detectors learn a new level of the loss."""
        if self._is_distributed:
            self.parts.coordinator.request("shift", reason)
        else:
            self.pipeline.flush()
            self.context.engine.declare_shift(reason, self.pipeline.progress.step)

    def quarantine(self, samples: Iterable[int], reason: str) -> None:
        """Exclude sample ids from all further draws."""
        if self._is_distributed:
            value = {"samples": [int(i) for i in samples], "reason": reason}
            self.parts.coordinator.request("quarantine", value)
        else:
            self.pipeline.quarantine_samples(samples, reason)

    def register(self, name: str, thing: Any) -> None:
        """Add an object or a random generator to the state of the run."""
        if isinstance(thing, Generator):
            self.context.rng.include(thing)
        else:
            self.context.state.register(name, thing)

    def record(self, facts: dict[str, Any], step: int | None) -> None:
        """Write facts into the journal and run.json."""
        self.context.records.record(self.context.engine, facts, step)

    def summary(self) -> Summary:
        """Return what the run has done so far."""
        return self.context.engine.summary(self.pipeline.progress.step)

    def save_checkpoint(self, reason: str) -> str | None:
        """Write the present state, between two steps, and wait. Return its path, or None if it could not be written."""
        progress, parts, context = self.pipeline.progress, self.parts, self.context
        served = progress.served
        if served is not None and served.is_open:
            raise StepError(
                f"checkpoint(): step {served.number} is under way, and half a step cannot be saved: call it between two "
                "steps, or in on_step_end"
            )
        self.pipeline.flush()
        if parts.checkpoints.store is None or not parts.feeder.is_attached:
            return None
        is_returned = self.pipeline.return_data(served)
        try:
            if parts.checkpoints.is_needed_now(progress.step):
                buffers = context.state.buffers.capture()
                parts.snapshots.take_now(progress.step, reason, buffers, parts.feeder.source, context.engine.state_dict)
            return parts.checkpoints.finish_now(progress.step, reason)
        finally:
            if is_returned and served is not None:
                self.pipeline.redraw(served)

    def load_checkpoint(self, path: str) -> None:
        """Resume from this checkpoint when the first loop begins."""
        if self.parts.feeder.is_attached:
            raise StepError("load(): call it before guard.steps()")
        self.parts.checkpoints.set_load_path(path)

    def close(self, error: BaseException | None) -> None:
        """Settle the pending step, record the end and release everything. Never hides the user's own error."""
        progress, parts, context = self.pipeline.progress, self.parts, self.context
        problem: BaseException | None = None
        if error is not None:
            self.pipeline.report_failure(error, "between two steps")
        served = self.pipeline.forget_served()
        try:
            if not self.pipeline.has_failed:  # ranks that are going down settle nothing more
                if self.pipeline.flush() and parts.feeder.is_attached:
                    self.pipeline.return_data(served)
                parts.watchdog.get().wait_for_others_to_finish(progress.step)
                if self._is_distributed:
                    self.pipeline.apply_requests(progress.step + 1)
                is_orderly = (
                    error is None and context.engine.stopped_by is None
                )  # the loop may have caught a PolicyStop
                if is_orderly and context.config.checkpoint.at_end and progress.step > 0:
                    self.save_checkpoint(END)
        except Exception as caught:  # ours, or a user hook's: everything is released first
            problem = caught
            self.pipeline.report_failure(caught, "at the end of the run")
        releases: tuple[Callable[[], None], ...] = (
            lambda: parts.gradient_sync.before_forward(is_last=True),
            parts.local_grad_norms.close,
            context.state.optimizers.remove_hooks,
            parts.first_steps.close,
            self.pipeline.end,
            parts.checkpoints.close,
            parts.snapshots.close,
            parts.feeder.close,
            lambda: self._write_end(error or problem),
            context.records.close,
            self._release,
        )
        for release in releases:
            try:
                release()
            except Exception as caught:  # a disk that fails: the rest is released all the same
                problem = problem or caught
        if problem is not None and error is None:
            raise problem

    def _write_end(self, cause: BaseException | None) -> None:
        engine = self.context.engine
        engine.write(
            "run_end",
            durable=True,
            step=self.pipeline.progress.step,
            policy=engine.policy_state(),
            error=None if cause is None else f"{type(cause).__name__}: {cause}",
            stopped=self.pipeline.progress.stopping,
            summary=self.summary(),
        )

    def _release(self) -> None:
        self.parts.watchdog.get().close()
        log.removeFilter(_keep_errors)


def _foreign_step_error() -> Exception:
    return StepError(
        "optimizer.step() was called while the guard is in charge of it: remove your own optimizer.step(), "
        "scaler.step() and scheduler.step(); leaving `with step:` clips, steps and schedules (clip_grad_norm=, "
        "scaler= and scheduler= are arguments of Guard)"
    )


def _keep_errors(record: logging.LogRecord) -> bool:
    """Keep errors on ranks other than 0, and everything when debugging: all ranks agree on the rest."""
    return record.levelno >= logging.ERROR or log.isEnabledFor(logging.DEBUG)
