"""From a step's last backward to its update: measured, agreed on with the other ranks, let through or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from holdfast.core.base.errors import StepError
from holdfast.runtime.agree.rows import Agreed
from holdfast.runtime.state.optimizers import clear_gradients
from holdfast.runtime.step.step import discount
from holdfast.runtime.tensors.norms import Norm
from holdfast.runtime.tensors.torch_private import drop_accumulated_gradients
from holdfast.runtime.update.measurements import DeviceMeasurements
from holdfast.runtime.update.update_size import UpdateSamples, UpdateSize

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step

_WEIGH_EVERY = 50


class Left(NamedTuple):
    """What a step has left on this rank."""

    loss: Tensor
    norm: Norm
    found: dict[int, Tensor]
    """what the loss scaler found, by the optimizer's id"""


class Leaving:
    """One run's updates: `measure` a step, then `update`."""

    def __init__(self, run: Run, clip: float | None) -> None:
        self._run, self._clip = run, clip
        self.parameters: list[Tensor] = []
        self._ids: frozenset[int] | None = None
        self._update_size = UpdateSize(run.state.optimizers)
        self._ours = False
        self.hooked = False
        """the user's hooks have run since the last update"""

    def measure(self, step: Step) -> Left:
        """Enqueued where the step ran: nobody waits for it yet."""
        self.follow_groups()
        run, scaler = self._run, self._run.state.scaler
        if (factor := step.correction()) != 1.0:
            discount(self.parameters, factor)
        found = {} if scaler is None else scaler.unscale(run.state.optimizers.outer)
        norm = run.norms.gradient_norm(self.parameters, to_clip=self._max_norm() is not None)
        loss = step.mean_loss()
        assert loss is not None, "a complete step has a loss"
        return Left(loss, norm, found)

    def update(self, step: Step, left: Left) -> None:
        """Agree on the step, and clip and step the optimizers unless a flag says no."""
        run, state = self._run, self._run.state
        step.loss_limit, step.grad_limit = limits = run.engine.limits()
        checks = run.checking.before_update(step.number)
        agreed = run.meeting.agree(step, left.loss, left.norm, self._flags(left), limits, checks)
        own = left.norm.value if left.norm.is_total else agreed.norm
        if run.meeting.several and not run.gate.on_device and run.meeting.read(step, _to_host(agreed.extra)):
            step.loss_limit, step.grad_limit = limits = run.engine.limits()
            agreed = agreed._replace(limits=limits)
        run.watch.ping(step.number)  # not before it is known, where the host knows, that all are at the same step
        found = self._agree_on_overflow(left.found, agreed)
        agreed, own = self._weigh(step, agreed, own)
        sensed = DeviceMeasurements(
            agreed.loss,
            agreed.norm,
            agreed.limits,
            _any(agreed.found),
            None if state.scaler is None else state.scaler.scale_tensor(),
            None if run.meeting.several else self._look_at_update(),
            agreed.update,
            agreed.weights,
            agreed.differs,
            agreed.extra,
        )
        step.clip = self._max_norm()
        factor = state.interventions.lr_factor()
        step.lr = state.optimizers.lr() * factor
        run.snapshots.wait_for_copies()
        if self.hooked:  # they may have evaluated, and FSDP2 keeps what it gathered for that
            self.hooked = False
            state.reshard()
        self._ours = True  # inside, `optimizer.step()` is ours
        try:
            step.passage = run.gate.apply(sensed, self.parameters, found, step.clip, factor, local_norm=own)
        finally:
            self._ours = False
        run.checking.after_update(step.number)
        clear_gradients(self.parameters)

    def _max_norm(self) -> float | None:
        return self._run.state.interventions.max_norm(self._clip)

    def _flags(self, left: Left) -> list[Tensor]:
        """What the loss scaler found, an optimizer each, so that every rank has as many."""
        if self._run.state.scaler is None:
            return []
        return [left.found.get(id(o), left.loss.new_zeros(())) for o in self._run.state.optimizers.outer]

    def _agree_on_overflow(self, found: dict[int, Tensor], agreed: Agreed) -> dict[int, Tensor]:
        """An overflow that one rank found, all have."""
        scaler = self._run.state.scaler
        if scaler is None or not self._run.meeting.several:
            return found
        pairs = zip(self._run.state.optimizers.outer, agreed.found, strict=True)
        found = {id(o): flag for o, flag in pairs if id(o) in found}
        scaler.set_found_inf(found)
        return found

    def _weigh(self, step: Step, agreed: Agreed, own: Tensor) -> tuple[Agreed, Tensor]:
        """Gradients were weighed by a unit; now what all ranks weigh together is known."""
        unit = step.unit_total()
        if unit is None or agreed.weight is None:
            return agreed, own
        share = unit * self._run.ranks.size / agreed.weight
        discount(self.parameters, share.to(own.dtype))
        return agreed._replace(norm=agreed.norm * share), own * share.to(own.dtype)

    # ---- what is sensed

    @property
    def scaled_optimizers(self) -> int:
        """How many optimizers a loss scaler looks at."""
        return 0 if self._run.state.scaler is None else len(self._run.state.optimizers.outer)

    def _look_at_update(self) -> UpdateSamples | None:
        return self._update_size.sample() if self._run.config.detect.update_spike else None

    def sense_update_share(self, loss: Tensor) -> tuple[Tensor, float] | None:
        """This rank's part of the update's size. The optimizer's state comes into being on all ranks at once."""
        return self._update_size.sum_of_squares(loss.device) if self._run.config.detect.update_spike else None

    def sense_weights(self, step: Step, loss: Tensor) -> Norm | None:
        """Now and then: the weights as the step found them."""
        due = self._run.config.detect.advisory and step.number % _WEIGH_EVERY == 0
        return self._run.norms.weight_norm(self.parameters, loss.device) if due else None

    # ---- whose update it is

    def forbid_foreign_steps(self) -> None:
        self._run.state.optimizers.forbid_foreign_steps(lambda: self._ours, _foreign_step)

    # ---- gradients

    def follow_groups(self) -> None:
        """A group added on the way (gradual unfreezing): its gradients are clipped and cleared like the others."""
        ids = self._run.state.optimizers.parameter_ids()
        if ids is not self._ids:
            self._ids, self.parameters = ids, self._run.state.trained_parameters()
            self._update_size.reset()

    def drop_gradients(self) -> None:
        """A step that is not to be: nothing of it is left."""
        self.follow_groups()
        clear_gradients(self.parameters)
        for _, module in self._run.state.modules:
            drop_accumulated_gradients(module)
        if self._run.state.scaler is not None:
            self._run.state.scaler.reset_after_skip()


def _foreign_step() -> Exception:
    return StepError(
        "optimizer.step() was called while the guard is in charge of it: remove your own optimizer.step(), "
        "scaler.step() and scheduler.step(); leaving `with step:` clips, steps and schedules (clip_grad_norm=, "
        "scaler= and scheduler= are arguments of Guard)"
    )


def _to_host(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.cpu()


def _any(found: Sequence[Tensor]) -> Tensor | None:
    """Whether the scaler found Inf or NaN for any optimizer; None without a scaler."""
    total: Tensor | None = None
    for flag in found:
        total = flag if total is None else total + flag
    return total
