"""Steps are served from the user's loader: where their data begins, what stood then, and back again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from holdfast.core.base.errors import RanksDisagree
from holdfast.runtime.data.fingerprint import BatchFingerprint
from holdfast.runtime.data.open import open_source
from holdfast.runtime.data.source import BatchSource
from holdfast.runtime.state.buffers import BufferCapture
from holdfast.runtime.step.step import Step

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run


class Serving:
    """One run's data, a step at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.source: BatchSource | None = None
        self._loader: Any = None
        self.ended_epochs = 0
        """epochs that ended since the step before was served"""

    # ---- where from

    def attach(self, loader: Iterable[Any], epochs: int | None) -> bool:
        """Take batches from `loader` from here on. The same one again goes on where it stands. Whether it is another."""
        run = self._run
        if self.source is not None and loader is self._loader:
            self.source.allow_epochs(epochs)
            return False
        source = open_source(
            loader,
            rng=run.rng,
            quarantine=run.records.quarantine,
            epochs=epochs,
            first_epoch=0 if self.source is None else self.source.next_epoch,
            on_epoch_end=self._epoch_ended,
            before_iter=self._before_iter,
            on_exclusion=run.excluded,
            keep_batch_size=run.meeting.several,
        )
        if self.source is not None:
            self.source.close()
            run.engine.shift("another loader", run.step)
        elif not source.exact:
            message = "the loader has no resumable position: its data is drawn and dropped"
            run.engine.write("note", step=0, message=message)
        self.source, self._loader = source, loader
        return True

    def _before_iter(self) -> None:
        """The loader may fork workers: no thread of ours runs meanwhile."""
        self._run.snapshots.wait_until_idle()
        if getattr(self._loader, "num_workers", 0):
            self._run.records.idle()

    def same_loop(self, loader: Iterable[Any], epochs: int | None, accumulate: int, max_steps: int | None) -> None:
        """Ranks that take a different number of steps would wait for each other at the end: refused at the beginning."""
        if not self._run.meeting.several:
            return
        try:
            batches: int | None = len(loader)  # type: ignore[arg-type]
        except Exception:  # an iterable has no length, or one that is not known
            batches = None
        about = {"accumulate": accumulate, "max_steps": max_steps, "epochs": epochs, "batches of the loader": batches}
        why = self._run.meeting.same_loop(about)
        if why is not None:
            raise RanksDisagree(
                f"steps(): the ranks' loops differ: {why}; ranks step together, so give each the same, with a "
                "DistributedSampler (which deals out equally many samples to each) for the data"
            )

    def close(self) -> None:
        self._loader = None
        if self.source is not None:
            self.source.close()

    # ---- forward

    def serve(self, accumulate: int) -> Step | None:
        """The next step, or None when the data has ended."""
        run = self._run
        assert self.source is not None
        while True:
            buffers = self._next_begins()
            try:
                first = self.source.draw()
                break
            except StopIteration:
                if run.pending is None:
                    run.step_epochs(self.ended_epochs)
                    return None
                # The last step settles first; it may be undone. Then the data ends again, or there is more of it.
                self.source.defer_epoch_ends(self.ended_epochs)
                run.flush()
        number = run.step + 1 + (run.pending is not None)
        attempt = 1 if run.pending is not None else run.attempt
        step = Step(run, number, attempt, accumulate, first, buffers)
        step.fingerprint = BatchFingerprint(fingerprint=run.config.detect.advisory)
        if run.pending is None:
            run.step_epochs(self.ended_epochs)
        else:
            step.epochs_before = self.ended_epochs
        run.current = step
        return step

    def _next_begins(self) -> BufferCapture:
        """What a snapshot of the step before still lacks, and the buffers to come back to."""
        run = self._run
        assert self.source is not None
        buffers = run.state.buffers.capture()
        run.tell(run.snapshots.on_step_begin(run.rng.capture, buffers, self.source, run.engine.state_dict))
        self.ended_epochs = 0
        return buffers

    def draw_more(self, step: Step) -> bool:
        """One more batch for a step in progress; False where the data has ended inside it."""
        assert self.source is not None
        self.ended_epochs = 0
        try:
            step.draws.append(self.source.draw())
        except StopIteration:
            step.data_ended = True
        step.ended_epochs += self.ended_epochs
        return not step.data_ended

    def _epoch_ended(self, epoch: int) -> None:
        self.ended_epochs += 1

    # ---- and back

    def serve_anew(self, step: Step) -> None:
        """The step has been served but not entered, and the one before it was undone: other data, same object."""
        assert self.source is not None
        step.buffers = self._next_begins()
        try:
            step.draws = [self.source.draw()]
        except StopIteration:
            step.draws, step.data_ended = [], True
        step.number, step.attempt, step.epochs_before = self._run.step + 1, self._run.attempt, 0
        self._run.step_epochs(self.ended_epochs)

    def unserve(self, step: Step | None) -> bool:
        """A step that was served and never entered gives its data back: the run stands right before it."""
        if step is None or step.entered or not step.draws or self.source is None or not self.source.exact:
            return False
        self._run.step_epochs(step.epochs_before)
        step.epochs_before = 0
        self._run.rewind(step)
        self.source.seek(step.draws[0].begin)
        return True
