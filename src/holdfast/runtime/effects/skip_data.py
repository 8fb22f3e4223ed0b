"""Skip data: a window of the stream around the onset is quarantined and passed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.types import Plan, SkipData
from holdfast.runtime.data.source import Position

if TYPE_CHECKING:
    from holdfast.runtime.run import Run


def perform(run: Run, plan: Plan, action: SkipData, positions: dict[int, Position], here: Position) -> None:
    """Exclude `action.batches` batches, half of them before the data of step `around`, none before `here`."""
    assert run.source is not None
    onset = positions.get(action.around, here)
    start = here
    if onset.epoch > here.epoch:
        start = _back(onset, action.batches // 2, floor=0)
    elif onset.epoch == here.epoch:
        start = _back(onset, action.batches // 2, floor=here.batch)
    run.engine.write(
        "action",
        durable=True,
        action="skip_data",
        incident=plan.incident,
        step=run.step,
        batches=action.batches,
        start=start,
        exact=run.source.exact,
        reason=plan.reason,
    )
    run.source.exclude(start, action.batches, plan.reason)


def _back(position: Position, batches: int, floor: int) -> Position:
    return position._replace(batch=max(floor, position.batch - batches))
