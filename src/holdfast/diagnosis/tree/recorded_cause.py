"""Concludes from the journal: the cause that the experiments of a run established, or a finding that names one.

The tree judges by the curve alone. If the journal names the cause, only the tree's measurements are kept.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.base.types import Kind
from holdfast.core.record.tally import IncidentSummary, describe_data
from holdfast.diagnosis.model.answers import fmt
from holdfast.diagnosis.model.episode import INCIDENT_KINDS, Episode
from holdfast.diagnosis.model.run_journal import RunJournal, fmt_recorded
from holdfast.diagnosis.tree.load import Leaf
from holdfast.diagnosis.tree.walk import Conclusion

_ESTABLISHED, _SUPPORTED = 0.95, 0.85
"""confidence in a cause that experiments established, and in one that a finding suggests"""
_LR_JUMP_STEPS = 50
"""a jump of the learning rate at most this many steps before an incident counts as its cause"""
_STATE_KINDS = (Kind.NONFINITE_STATE, Kind.STATE_JUMP, Kind.STATISTICS_JUMP)
_MEASUREMENTS = {
    "loss_nonfinite", "gradient_nonfinite", "loss_jumped", "gradient_exploded", "grad_norm_far_above", "gradient_leads",
    "loss_trends_up", "spike_lasts",
}  # fmt: skip
"""questions whose answers fit any cause"""
_RUNGS = {
    "same_data": "the same data again, nothing changed",
    "leave_out_data": "without the data at the onset",
    "cut_lr": "at a lower learning rate",
    "hold_lr": "with the learning rate held at a lower one",
    "accept": "accepted, as the new course of the loss",
}
_NAMES = {"a transient fault", "the data", "the LR"}
"""how the sentence of a cause begins if it repeats the cause"""
_RESULTS = {"begun": "no result on record", "gone": "it did not come back", "came_back": "it came back"}
_ADVICE = {
    "data": ("Inspect {data}.", "the loss of this data from a checkpoint before step {start}: it is as bad again"),
    "transient": (
        "Nothing to do{exact}. If it repeats, check the hardware of the host.",
        "the memory and device tests of the host, such as dmesg and nvidia-smi -q",
    ),
    "precision": (
        "Keep that module in fp32, or train in bf16: loss scaling does not cure an overflow of the forward.",
        "holdfast replay on the bundle of the incident",
    ),
    "lr": (
        "Lower the learning rate, or look at the code that set it{rates}.",
        "the learning rates around step {start}, from the schedule alone",
    ),
    "objective": (
        "Accepted, nothing to heal. Declare such a change with guard.expect_shift(REASON); for a loss that does not "
        'descend, set [detect] objective = "wandering".',
        "what changes at step {start} in the loss function, the data or the environment",
    ),
    "not_established": (
        "Start from a checkpoint before step {start}, and try what is missing: {missing}.",
        "the steps after {start}, with one change at a time",
    ),
    "state": (
        "Look for what writes into it before step {start}: your own code, an update that overflows, the hardware.",
        "torch.isfinite of that tensor in the checkpoints around step {start}",
    ),
}
"""cause -> what to do next, and how to confirm the cause"""


def conclude(line: IncidentSummary, journal: RunJournal, episode: Episode, measured: Conclusion) -> Conclusion:
    """Return what the journal says about an incident. If it names no cause, return `measured`, the tree's conclusion."""
    findings = journal.findings(line.onset, journal.last_step(line))
    broken = [finding for finding in findings if finding.get("kind") in _STATE_KINDS]
    jumps = _lr_jumps(line, journal)
    if line.cause is not None:
        cause, text = line.cause, describe_cause(line)
    elif jumps:
        cause, text = "lr", str(jumps[-1].get("message"))
    elif broken or line.kind in _STATE_KINDS:
        state = str(broken[0].get("message")) if broken else INCIDENT_KINDS[line.kind]
        cause, text = "state", f"{state}; what wrote it is not established"
    else:
        return measured
    # The first finding of each kind. A jump of the learning rate would contradict any cause but itself.
    first = {str(f.get("kind")): f for f in reversed(findings) if f.get("severity") != "note"}
    shown = [*(jumps if cause == "lr" else []), *reversed(first.values())]
    trail = [step for step in measured.trail if step.question in _MEASUREMENTS and step.answer == "yes"]
    evidence = [f"online, step {finding['step']}: {finding.get('message')}" for finding in shown]
    evidence += [_describe_experiment(event, line) for event in journal.experiments(line.number)]
    evidence += [f"before, step {event.get('step')}: {event.get('text')}" for event in journal.earlier_causes(line)]
    evidence += [step.sentence for step in trail]
    action, confirm = advise(cause, line, journal)
    leaf = Leaf(
        kinds=[episode.kind],
        cause=text,
        status="established" if line.cause is not None else "supported",
        confidence=_ESTABLISHED if line.cause is not None else _SUPPORTED,
        action=action,
        confirm=confirm,
    )
    conclusion = Conclusion(
        id=f"journal_{cause}", leaf=leaf, trail=trail, confidence=leaf.confidence, evidence=evidence
    )
    conclusion.action, conclusion.confirm = action, confirm
    if cause == "not_established":
        conclusion.leaf = msgspec.structs.replace(leaf, status="unknown", abstains=True)
        conclusion.evidence = [*filter(None, [line.text]), *evidence]
        conclusion.unchecked = [f"not tried, or without a result: {rung}" for rung in _missing(line, journal)]
    return conclusion


def without_repeated_cause(cause: str | None, text: str) -> list[str]:
    """Return the cause, if there is one and the text does not begin with it, and the text."""
    return [text] if not cause or text.partition(": ")[0] in _NAMES else [cause, text]


def describe_cause(line: IncidentSummary) -> str:
    """Return the recorded cause with its sentence, and with the data if the sentence does not name it."""
    if line.cause == "not_established":
        return "not established"
    where = f" ({line.where})" if line.where and line.where not in line.text else ""
    name, _, text = line.text.partition(": ")
    return f"{line.cause}{where}: {text if name in _NAMES else line.text}".removesuffix(": ")


def advise(cause: str, line: IncidentSummary, journal: RunJournal) -> tuple[str, str]:
    """Return what to do next, and how to confirm the cause."""
    action, confirm = _ADVICE.get(cause, _ADVICE["not_established"])
    data = dict.fromkeys(filter(None, (line.where, describe_data(line.data, []))))
    facts = {
        "start": fmt(line.onset),
        "data": f"{', '.join(data) or 'the data of that step'}: {journal.describe_exclusion(line)}",
        "exact": ": the run is bit for bit as without it" if {"rollback", "replay"}.issuperset(line.actions) else "",
        "rates": _describe_rates(line, journal),
        "missing": "; ".join(_missing(line, journal)) or "nothing, every experiment has a result",
    }
    return action.format(**facts), confirm.format(**facts)


def _lr_jumps(line: IncidentSummary, journal: RunJournal) -> list[dict[str, Any]]:
    return journal.findings(line.onset - _LR_JUMP_STEPS, line.step, Kind.LR_JUMP)


def _describe_experiment(event: dict[str, Any], line: IncidentSummary) -> str:
    rung, result, text = str(event.get("rung")), str(event.get("result")), str(event.get("text") or "")
    text = f" ({text})" if text and text != line.text and result != "begun" else ""
    outcome = _RESULTS.get(result, result.replace("_", " "))
    return f"experiment at step {event.get('step')}, {_RUNGS.get(rung, rung)}: {outcome}{text}"


def _describe_rates(line: IncidentSummary, journal: RunJournal) -> str:
    texts = [f"{jump.get('message')} (step {jump['step']})" for jump in _lr_jumps(line, journal)]
    for action in journal.actions("cut_lr", "hold_lr"):
        if action.get("incident") == line.number:
            cut = f"cut from {fmt_recorded(action.get('lr_from'))} to {fmt_recorded(action.get('lr_to'))}"
            held = f"held at {fmt_recorded(action.get('max_lr'))}"
            texts.append(f"{held if action['action'] == 'hold_lr' else cut} at step {action.get('step')}")
    return f": {'; '.join(texts)}" if texts else ""


def _missing(line: IncidentSummary, journal: RunJournal) -> list[str]:
    """Return the experiments that would tell the causes apart and have no result."""
    events = journal.experiments(line.number)
    known = [event.get("rung") for event in events if event.get("result") in ("gone", "came_back")]
    return [_RUNGS[rung] for rung in ("same_data", "leave_out_data", "cut_lr") if rung not in known]
