"""Skip data: a window of the stream around the onset is quarantined and passed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.base.types import Plan, SkipData
from holdfast.runtime.data.source import Position

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run


class Window(NamedTuple):
    """`batches` batches from batch `first` of an epoch on."""

    epoch: int
    first: int
    batches: int
    start: Position


def window(run: Run, action: SkipData, positions: dict[int, Position], here: Position) -> Window:
    """`action.batches` batches, half of them before the data of step `around`, none before `here`."""
    assert run.source is not None
    onset = positions.get(action.around, here)
    start = here
    if onset.epoch > here.epoch:
        start = _back(onset, action.batches // 2, floor=0)
    elif onset.epoch == here.epoch:
        start = _back(onset, action.batches // 2, floor=here.batch)
    # Of several ranks one may have gone further back than another, and remember less: the first one's word holds.
    start = Position(*run.ranks.broadcast_object(list(start)))
    epoch, first = run.source.locate(start)
    return Window(epoch, first, action.batches, start)


def perform(run: Run, plan: Plan, window: Window) -> None:
    """Exclude it. The run stands where the rollback has put it."""
    assert run.source is not None
    run.engine.write(
        "action",
        durable=True,
        action="skip_data",
        incident=plan.incident,
        step=run.step,
        batches=window.batches,
        start=window.start,
        exact=run.source.exact,
        reason=plan.reason,
    )
    run.source.exclude(window.start, window.batches, plan.reason)


def _back(position: Position, batches: int, floor: int) -> Position:
    return position._replace(batch=max(floor, position.batch - batches))
