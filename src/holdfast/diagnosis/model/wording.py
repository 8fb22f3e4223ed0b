"""Words an episode as one sentence that a person would say."""

from __future__ import annotations

from holdfast.diagnosis.model.answers import fmt, fmt_steps
from holdfast.diagnosis.model.episode import INCIDENT_KINDS, Episode


def headline(episode: Episode, unit: str) -> str:
    """Return what happened, when, and by how much."""
    evidence, kind = episode.evidence, episode.kind
    at, over = f"{unit} {fmt(episode.start)}", fmt_steps(episode.start, episode.end, unit)
    column = evidence.get("column")
    if said := evidence.get("said"):
        return f"the log says at {at}: {said}"
    if kind == "nan":
        when = f"at {at}" if episode.start == episode.end else f"from {at} to {fmt(episode.end)}"
        return f"{column or 'the loss'} is NaN or Inf {f'from {at} on' if evidence.get('lasts') else when}"
    if kind == "dead_run" and column:
        return f"{column} is 0 in every record, but {fmt(float(evidence['held_out']))} on held-out data"
    if column == "reward":
        best, now = fmt(float(evidence["level"])), fmt(float(evidence["extreme"]))
        return f"the reward falls from {best} to {now} at {at} and stays low"
    level, peak = evidence.get("level"), evidence.get("peak")
    if isinstance(level, float) and isinstance(peak, float) and peak > level:
        values = f"from {fmt(level)} to {fmt(peak)}"
        endings = {
            "spike_recovered": f"the loss jumps {values} at {at} and returns by {fmt(episode.end)}",
            "spike": f"the loss jumps {values} at {at} and does not return to its level",
            "divergence": f"the loss rises {values} from {at} on and stays high",
            "silent_divergence": f"the loss creeps up {values} over {over}, without a jump",
        }
        if kind in endings:
            return endings[kind]
    ratio = evidence.get("ratio")
    if kind == "grad_explosion" and isinstance(ratio, float):
        return f"the gradient norm rises to {fmt(ratio)} times its usual value at {over}"
    return f"{INCIDENT_KINDS.get(kind, kind)} at {over}"
