"""End the experiment that a previous process began and did not end: put its data back, and take its LR change off."""

from __future__ import annotations

from holdfast.runtime.context import Context


def end(context: Context, step: int) -> None:
    """End it, unless this process resumed from the middle of it and continues. The run has resumed at `step`."""
    incident = context.engine.interrupted
    if incident is None:
        return
    kept = context.state.interventions.applied
    spans = context.records.quarantine.left_out_by(incident)
    if spans:
        why = "the experiment did not end"
        context.engine.write("released", durable=True, incident=incident, step=step, spans=spans, reason=why)
        context.records.quarantine.release(spans)
    context.history.rolled_back(kept, ())
    context.engine.end_interrupted(step, kept)
