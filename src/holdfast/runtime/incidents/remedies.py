"""Lets a verdict pick the action, if the policy allows it, and notes whether the outcome confirms the verdict.

Every rank has the same verdict, so every rank picks the same action.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from holdfast.core.base.types import FP32_MODULE, WITHOUT_ROWS, Plan, Replay, Signal, Skip, Stop
from holdfast.runtime.context import Context
from holdfast.runtime.incidents.fp32 import Fp32Modules

log = logging.getLogger("holdfast")

_REGISTERED = "holdfast.fp32_modules"


class Remedies:
    """Changes a plan by a verdict: serves a batch without its bad rows, runs a module in fp32, or stops the run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._fp32: Fp32Modules | None = None
        if context.config.replay.fp32_modules:
            self._fp32 = Fp32Modules(context.state.modules)
            context.state.register(_REGISTERED, self._fp32)

    @property
    def fp32_names(self) -> list[str]:
        """Return the modules that run in fp32 by now."""
        return [] if self._fp32 is None else self._fp32.names

    def amend(self, plan: Plan, verdict: dict[str, Any], signal: Signal) -> Plan:
        """Return what to do instead of skipping the batch. A plan of a hook, a rollback or a stop stays as it is."""
        if plan.first(Skip) is None:
            return plan
        cause, engine = verdict["cause"], self._context.engine
        is_perhaps_data = verdict["rows"] or verdict["outlying"]
        if cause == "structural" and not is_perhaps_data:
            reason = f"{verdict['text']}; {verdict['fix'] or 'change the code'}"
            return msgspec.structs.replace(plan, actions=(Stop(reason),), reason="[replay] act: a structural fault")
        if cause == "data_row" and verdict["samples"] and engine.may_quarantine_samples(signal.step, 1):
            shown = ", ".join(map(str, verdict["samples"][:8]))
            reason = f"the batch runs again without samples {shown}"
            return msgspec.structs.replace(plan, actions=(Replay(),), reason=reason, experiment=WITHOUT_ROWS)
        # While training nothing has run in fp32: an op in half precision is tried, and the outcome decides.
        is_likely = cause == "dtype_overflow" or (cause == "not_established" and verdict["is_low"])
        if is_likely and self._fp32 is not None:
            if (why := self._fp32.why_not(verdict["module"])) is not None:
                engine.note(signal.step, f"no module is moved to fp32: {why}")
                return plan
            reason = f"the step runs again with {verdict['module']} in fp32"
            return msgspec.structs.replace(plan, actions=(Replay(),), reason=reason, experiment=FP32_MODULE)
        return plan

    def apply(self, plan: Plan, verdict: dict[str, Any], signal: Signal) -> None:
        """Make the change that the next attempt runs with. It is in the journal before the attempt begins."""
        engine, incident = self._context.engine, plan.incident
        if plan.experiment == WITHOUT_ROWS:
            reason = "the row holds NaN or Inf"
            engine.write(
                "quarantine",
                durable=True,
                samples=verdict["samples"],
                reason=reason,
                incident=incident,
                step=signal.step,
            )
            self._context.records.quarantine.add_samples(verdict["samples"], reason, incident=incident)
        elif plan.experiment == FP32_MODULE and self._fp32 is not None:
            fields = {"action": "fp32_module", "module": verdict["module"], "reason": plan.reason}
            engine.write("action", durable=True, incident=incident, step=signal.step, **fields)
            self._fp32.add(verdict["module"])

    def conclude(self, plan: Plan, verdict: dict[str, Any], signal: Signal, *, is_bad: bool) -> None:
        """Record whether the attempt with the change confirms the verdict. A module goes back if fp32 did not help."""
        result = "refuted" if is_bad else "confirmed"
        is_fp32 = plan.experiment == FP32_MODULE
        what = f"with {verdict['module']} in fp32" if is_fp32 else "without its bad rows"
        text = f"the step is {'still not ' if is_bad else ''}finite {what}"
        fields = {"result": result, "cause": verdict["cause"], "text": text, "module": verdict["module"] or None}
        self._context.engine.write(
            "replay", durable=True, incident=plan.incident, step=signal.step, attempt=signal.attempt, **fields
        )
        log.warning("holdfast: step %d: %s: %s", signal.step, text, result)
        if is_bad and is_fp32 and self._fp32 is not None:
            self._fp32.remove(verdict["module"])

    def close(self) -> None:
        """Take the hooks off the user's modules."""
        for name in self.fp32_names:
            assert self._fp32 is not None
            self._fp32.remove(name)
