"""One guarded run: opening, resuming, requests of the loop, checkpoints on demand, and the end.

The steps themselves are in `pipeline.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import Generator, OutOfMemoryError

from holdfast.core.base.errors import HoldfastError, PolicyStop, RanksDisagree, SetupError, Shutdown, StepError
from holdfast.core.decide.repeated_failure import describe_error, is_counted
from holdfast.core.hang.heartbeat import SAVE
from holdfast.core.record.restart_time import RestartTime
from holdfast.core.record.tally import Summary
from holdfast.runtime import effects
from holdfast.runtime.checkpoint.manager import END
from holdfast.runtime.checkpoint.resume import ResumedRun, resume
from holdfast.runtime.context import Context
from holdfast.runtime.profile.speed_watch import SpeedWatch
from holdfast.runtime.step.pipeline import GuardedPipeline, Parts

log = logging.getLogger("holdfast")
_ANOTHER_LOADER = (
    "another loader than before: a rollback does not reach back beyond this step, and a process that resumes begins the "
    "epoch again; if it is the same data, make the loader once"
)
_NOT_SERVED_AGAIN = (
    "in code that the guard cannot run again: an error leaves a loop over guard.data() or of Guard.wrap, and is not caught "
    "outside of forward and backward. Use guard.steps(), guard.fit() or a guarded Hugging Face or Lightning trainer, which "
    "serve the step again in smaller parts, or make the batch smaller"
)


class GuardedRun:
    """Holds a pipeline from `open` to `close`."""

    def __init__(self, context: Context, parts: Parts, clip: float | None, speed: SpeedWatch | None = None) -> None:
        self.context, self.parts, self._speed = context, parts, speed
        self.pipeline = GuardedPipeline(context, parts, clip)
        self._is_distributed = parts.coordinator.is_distributed
        self._saving = threading.Lock()
        """held while the end of the run is saved"""
        self._restart_time = RestartTime()
        self._has_noted_loader = False

    def open(self, about: dict[str, Any]) -> None:
        """Open the run directory on every rank. PolicyStop if an earlier process was stopped by policy."""
        context, parts = self.context, self.parts
        self._restart_time.end("groups")
        parts.watchdog.start()
        parts.hang_watch.prepare()
        if context.ranks.rank > 0:
            log.addFilter(_keep_errors)
        try:
            parts.coordinator.run_on_all(lambda: self._open_records(about))
        except BaseException:
            self._release(may_restart=True)
            raise
        try:
            parts.checkpoints.open()
        except BaseException as error:
            context.records.close()
            self.pipeline.report_failure(error, "opening the run directory")
            self._release()
            raise
        parts.incidents.open()
        context.state.optimizers.forbid_foreign_steps(_foreign_step_error)
        parts.first_steps.open()
        self.pipeline.open()
        if self._speed is not None:
            self._speed.open(self._call_after_commit)
        progress = self.pipeline.progress
        parts.signals.register(self._save_last_resort, self._saving.locked, lambda: progress.step)

    def _call_after_commit(self, call: Callable[[], None]) -> bool:
        """Have the training thread call it once, after the next commit. Return False if another call waits."""
        if self.pipeline.on_next_commit is not None:
            return False
        self.pipeline.on_next_commit = call
        return True

    def _open_records(self, about: dict[str, Any]) -> None:
        context = self.context
        if context.state.optimizers.is_in_use():
            raise SetupError(
                "the optimizer belongs to another Guard of this process that is still open: close that one first, with "
                "guard.close() or by using it in `with guard:`"
            )
        context.records.open(context.engine, about, context.history)

    def attach(
        self,
        loader: Iterable[Any],
        epochs: int | None,
        accumulate: int,
        max_steps: int | None,
        start: tuple[int, int] | None = None,
    ) -> bool:
        """Take batches from `loader` from now on. The first loop resumes the run; the same loader again continues.

        Return whether it has restored the state of an earlier process.
        start: the epoch and the number of its batches after which a new run begins.
        """
        self.pipeline.flush()
        self._compare_loops(loader, epochs, accumulate, max_steps)
        context, parts, pipeline = self.context, self.parts, self.pipeline
        step, is_first = pipeline.progress.step, not parts.feeder.is_attached
        if not parts.feeder.attach(loader, epochs, context.records.quarantine, self._before_workers_start):
            pipeline.begin_loop(step, is_new_loader=False)
            return False
        engine, is_exact = context.engine, parts.feeder.source.exact
        engine.experiments.can_serve_again = engine.policy.can_serve_again = is_exact
        if not is_first:
            context.engine.shift("another loader", step)
            if not self._has_noted_loader:
                self._has_noted_loader = True
                pipeline.note(_ANOTHER_LOADER)
        elif not parts.feeder.source.exact:
            message = "the loader has no resumable position: its data is drawn and dropped"
            context.engine.write("note", step=0, message=message)
            pipeline.check_sample_ids()
        is_trusted, is_restored = True, False
        if start is not None:
            parts.feeder.source.start_at(*start)
        if is_first:
            resumed = resume(parts.checkpoints, parts.snapshots, parts.feeder.source)
            step, is_trusted, is_restored = resumed.step, resumed.is_trusted, resumed.is_restored
            if is_restored:
                self._restart_time.end("restore")
                pipeline.on_next_commit = lambda: self._report_restart(resumed)
            effects.interrupted.end(context, step)
            effects.interventions.repeat_due(context, step)
            pipeline.oom.begin(context.records.splits)
        pipeline.begin_loop(step, is_new_loader=True)
        pipeline.note(parts.snapshots.begin_run(step, trusted=is_trusted))
        return is_restored

    def _report_restart(self, resumed: ResumedRun) -> None:
        self._restart_time.end("first_step")
        self._restart_time.report(self.context.engine.write, resumed.step, resumed.source)

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
        self.pipeline.note(parts.snapshots.take_postponed())
        if parts.checkpoints.store is None or not parts.feeder.is_attached:
            return None
        is_returned = self.pipeline.return_data(served)
        before = context.heartbeat.enter(SAVE)
        try:
            if parts.checkpoints.is_needed_now(progress.step):
                buffers = context.state.buffers.capture()
                parts.snapshots.take_now(progress.step, reason, buffers, parts.feeder.source, context.engine.state_dict)
            return parts.checkpoints.finish_now(progress.step, reason)
        finally:
            context.heartbeat.enter(before)
            if is_returned and served is not None:
                self.pipeline.redraw(served)

    def load_checkpoint(self, path: str) -> None:
        """Resume from this checkpoint when the first loop begins."""
        if self.parts.feeder.is_attached:
            raise StepError("load(): call it before guard.steps()")
        self.parts.checkpoints.set_load_path(path)

    def _save_last_resort(self) -> str | None:
        """Write the newest certified snapshot, whatever the training thread does. Return what was written, if anything.

        After it has returned something the process ends. It does nothing while the training thread saves.
        """
        if not self._saving.acquire(blocking=False):
            return None
        name = self.parts.checkpoints.save_without_training_thread(self.parts.snapshots)
        if name is None:
            self._saving.release()
            return None
        return f"{name} was written from memory"

    def close(self, error: BaseException | None) -> None:
        """Settle the pending step, record the end and release everything. Never hides the user's own error.

        After a signal an error may follow from it, such as a loader whose workers have ended. Then what is certified is
        saved, and the error is the cause of a Shutdown.
        """
        progress, parts, context = self.pipeline.progress, self.parts, self.context
        problem: BaseException | None = None
        if isinstance(error, Shutdown):
            error = None
        elif self._follows_from_signal(error) and self._save_last_resort() is not None:
            problem = Shutdown(f"{parts.signals.reason}, and {type(error).__name__}: {error}")
        if error is not None:
            self.pipeline.report_failure(error, "between two steps")
            if isinstance(error, OutOfMemoryError) and not getattr(error, "__notes__", None):
                log.error("holdfast: step %d: out of memory %s", progress.step + 1, _NOT_SERVED_AGAIN)
        served = self.pipeline.forget_served()
        has_ended = False
        try:
            if not self.pipeline.has_failed:  # ranks that are going down settle nothing more
                self.pipeline.note(parts.snapshots.take_postponed())
                if self.pipeline.flush() and parts.feeder.is_attached:
                    self.pipeline.return_data(served)
                parts.watchdog.get().wait_for_others_to_finish(progress.step)
                if self._is_distributed:
                    self.pipeline.apply_requests(progress.step + 1)
                is_orderly = (
                    error is None and context.engine.stopped_by is None
                )  # the loop may have caught a PolicyStop
                if is_orderly and (context.config.checkpoint.at_end or progress.is_shutdown) and progress.step > 0:
                    with self._saving:
                        self.save_checkpoint(END)
                has_ended = is_orderly or context.engine.stopped_by is not None
        except Exception as caught:  # ours, or a user hook's: everything is released first
            problem = caught
            self.pipeline.report_failure(caught, "at the end of the run")
        if error is None and problem is None:
            context.engine.forget_failure()
        elif error is not None and not isinstance(problem, Shutdown) and not self._is_distributed and is_counted(error):
            # On several ranks the next process counts it: rank 0 may be ended before it can write to the journal.
            self.pipeline.gives_up = context.engine.count_failure(progress.step + 1, describe_error(error))
        releases: tuple[Callable[[], None], ...] = (
            *self._hooks_to_remove(),
            lambda: parts.checkpoints.close(is_orderly=has_ended),
            parts.incidents.close,
            parts.snapshots.close,
            parts.feeder.close,
            *(() if self._speed is None else (context.records.flush, self._speed.close)),
            lambda: self._write_end(error or problem),
            context.records.close,
            lambda: self._release(may_restart=error is not None or progress.is_shutdown),
            parts.signals.finish,
        )
        for release in releases:
            try:
                release()
            except Exception as caught:  # a disk that fails: the rest is released all the same
                problem = problem or caught
        if problem is not None and (error is None or isinstance(problem, Shutdown)):
            raise problem from error
        if self.pipeline.gives_up is not None:
            message = context.records.describe_stop(self.pipeline.gives_up)
            log.error("%s", message, exc_info=error)  # a SystemExit ends the process without a traceback
            raise PolicyStop(message) from error

    def _follows_from_signal(self, error: BaseException | None) -> bool:
        """Return whether the signal may be what the error comes from. Several ranks would have to fail alike to save."""
        is_foreign = isinstance(error, Exception) and not isinstance(error, HoldfastError)
        return is_foreign and self.parts.signals.reason is not None and not self._is_distributed

    def detach(self) -> None:
        """Let go of model and optimizers. It is all that a forked child does at its end: the record is the parent's."""
        for remove in self._hooks_to_remove():
            remove()

    def _hooks_to_remove(self) -> tuple[Callable[[], None], ...]:
        parts = self.parts
        return (
            lambda: parts.gradient_sync.before_forward(is_last=True),
            parts.local_grad_norms.close,
            self.context.state.optimizers.remove_hooks,
            parts.first_steps.close,
            self.pipeline.end,
        )

    def _write_end(self, cause: BaseException | None) -> None:
        engine = self.context.engine
        engine.write(
            "run_end",
            durable=True,
            step=self.pipeline.progress.step,
            policy=engine.policy_state(),
            error=None if cause is None else describe_error(cause),
            stopped=self.pipeline.progress.stopping,
            summary=self.summary(),
        )

    def _release(self, *, may_restart: bool = False) -> None:
        self.parts.hang_watch.close()
        self.parts.watchdog.get().close(may_restart=may_restart)
        log.removeFilter(_keep_errors)


def _foreign_step_error() -> Exception:
    return StepError(
        "optimizer.step() was called while the guard is in charge of it: keep your own lines with Guard.wrap(...), or "
        "remove optimizer.step(), scaler.step() and scheduler.step(): guard.step(loss), or leaving `with step:`, clips, "
        "steps and schedules (clip_grad_norm=, scaler= and scheduler= are arguments of Guard)"
    )


def _keep_errors(record: logging.LogRecord) -> bool:
    """Keep errors on ranks other than 0, and everything when debugging: all ranks agree on the rest."""
    return record.levelno >= logging.ERROR or log.isEnabledFor(logging.DEBUG)
