"""What this rank brings to the others at every step, and what it takes from them. One process meets nobody.

A healthy step takes one collective. What a rank alone has to say (stop, a shift to expect, samples to leave out, broken
state) is announced by a flag in that step's row, and told in a second round on every rank; it holds from then on, on all
alike.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from torch import Tensor

from holdfast.core.base.config import Config
from holdfast.core.base.errors import PolicyStop, RanksDisagree
from holdfast.core.base.types import Finding, Flag, Incident, Kind, Plan, Severity, Signal
from holdfast.core.decide.engine import Limits
from holdfast.runtime.agree import attribution
from holdfast.runtime.agree.rows import Agreed, Column, Host, Measured, Rows, agree, alone
from holdfast.runtime.ports.ranks import Ranks
from holdfast.runtime.snapshots.manager import NonfiniteSnapshot
from holdfast.runtime.tensors.norms import Norm

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step


class Meeting:
    """One run's dealings with the ranks it trains with."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self._run, self.ranks = run, ranks
        self.several = ranks.size > 1
        self._asks: list[dict[str, Any]] = []
        self._history = 0
        self._alarms: list[tuple[int, NonfiniteSnapshot]] = []

    # ---- at every step

    def agree(
        self, step: Step, loss: Tensor, norm: Norm, found: Sequence[Tensor], limits: Limits, checks: Tensor | None
    ) -> Agreed:
        """The step's numbers, over all ranks."""
        run, scaler = self._run, self._run.state.scaler
        self._raise_alarm()
        own = Measured(
            loss,
            norm,
            None if scaler is None else scaler.scale_tensor(),
            found,
            run.leaving.sense_update_share(loss) if self.several else None,
            run.leaving.sense_weights(step, loss),
            run.witness.pop() if self.several else None,
            checks,
        )
        return agree(self.ranks, self._host(step, limits), own) if self.several else alone(limits, own)

    def _host(self, step: Step, limits: Limits) -> Host:
        fingerprint = step.fingerprint
        return Host(
            step.number,
            step.attempt,
            self._history,
            bool(self._asks),
            step.seconds,
            None if fingerprint is None else fingerprint.checksum,
            step.samples,
            None if fingerprint is None else fingerprint.sequence_length,
            step.weight,
            step.weighted,
            limits,
        )

    def _raise_alarm(self) -> None:
        """What a snapshot of this rank alone was found to hold, the others do not know yet."""
        if self.several and (alarm := self._run.snapshots.pop_nonfinite()) is not None:
            self.ask("alarm", alarm._asdict())

    def read(self, step: Step, extra: Tensor | None) -> bool:
        """The rows are on the host: see that all ranks are in step, and hear what they ask for. Returns whether the level of
        the loss is to be learned anew. Once a step."""
        if step.rows is not None or (extra is None and not self.several):
            return False
        step.rows = Rows(extra, self.ranks.size, found=self._run.leaving.scaled_optimizers)
        if not self.several:
            return False
        step.rows.check_lockstep()
        return self.hear(step.number) if step.rows.asking() else False

    def over_all(self, signal: Signal, step: Step) -> Signal:
        """The signal's other numbers, over all ranks."""
        rows = step.rows
        if not self.several or rows is None:
            return signal
        least, loss_limit, grad_limit = rows.least, rows.least[Column.LOSS_LIMIT], rows.least[Column.GRAD_LIMIT]
        return msgspec.structs.replace(
            signal,
            batch=None if least[Column.BATCH] < 0 else zlib.crc32(rows.column(Column.BATCH).tobytes()),
            samples=None if least[Column.SAMPLES] < 0 else _samples(rows),
            length=rows.one(Column.LENGTH),
            seconds=rows.most[Column.SECONDS],
            loss_limit=loss_limit if loss_limit < math.inf else None,
            grad_limit=grad_limit if grad_limit < math.inf else None,
        )

    def weigh(self, step: Step) -> None:
        """The step stands: what its parts weighed on average is what the next one's are weighed by."""
        if self.several and step.weighted and step.rows is not None:
            mean = sum(step.rows.of(Column.WEIGHT)) / (self.ranks.size * (step.parts or 1))
            if mean > 0 and math.isfinite(mean):
                self._run.state.interventions.weight_unit = math.ldexp(1.0, round(math.log2(mean)))

    def decided(self, signal: Signal, plan: Plan | None) -> None:
        """What was decided goes into the checksum that the ranks compare at the next step."""
        if self.several and plan is not None:
            told = msgspec.json.encode([signal.step, signal.attempt, plan.actions, plan.incident])
            self._history = zlib.crc32(told, self._history)

    # ---- what one rank alone has to say

    def ask(self, what: str, value: Any) -> None:
        self._asks.append({"what": what, "value": value})

    def hear(self, number: int) -> bool:
        """What any rank has asked for since the last time, on all of them alike: it holds from step `number` on."""
        asked, self._asks = self._asks, []
        told = [(rank, ask) for rank, asks in enumerate(self.ranks.all_gather_object(asked)) for ask in asks]
        run, shifts = self._run, []
        for rank, ask in told:
            what, value = ask["what"], ask["value"]
            if what == "stop" and run.stopping is None:
                run.stopping = value
                run.engine.write("stop_requested", step=number, reason=value, rank=rank)
            elif what == "shift" and value not in shifts:
                shifts.append(value)
                run.engine.shift(value, number - 1)
            elif what == "quarantine":
                run.leave_samples_out(value["samples"], value["reason"], rank=rank)
            elif what == "alarm":
                self._alarms.append((rank, NonfiniteSnapshot(**value)))
        return bool(shifts)

    def share_plan(self, incident: Incident, own: Plan | None) -> Plan | None:
        """The first rank's hook decides for all."""
        if not self.several:
            return own
        said = self.ranks.broadcast_object(None if own is None else msgspec.to_builtins(own))
        return None if said is None else msgspec.convert(said, Plan)

    def share_metric(self, metric: float) -> float:
        """An evaluation's result over all ranks: the one that all have, or their mean."""
        if not self.several:
            return metric
        metrics = [float(m) for m in self.ranks.all_gather_object(metric)]
        return metrics[0] if len(set(metrics)) == 1 else sum(metrics) / len(metrics)

    def reason(self, why: str | None) -> str | None:
        """Why something cannot be done on one of the ranks: then none does it."""
        if not self.several:
            return why
        return next((f"rank {r}: {w}" for r, w in enumerate(self.ranks.all_gather_object(why)) if w is not None), None)

    def together(self, do: Callable[[], None]) -> None:
        """Something that every rank does, and that may be refused on one of them: then it is on all."""
        if not self.several:
            do()
            return
        mine: BaseException | None = None
        try:
            do()
        except Exception as error:
            mine = error
        code = mine.code if isinstance(mine, PolicyStop) else None
        told = self.ranks.all_gather_object(None if mine is None else [f"{type(mine).__name__}: {mine}", code])
        if mine is not None:
            raise mine
        for rank, said in enumerate(told):
            if said is not None:
                why = f"rank {rank}: {said[0]}"
                raise RanksDisagree(why) if said[1] is None else PolicyStop(why, said[1])

    def same_loop(self, about: dict[str, Any]) -> str | None:
        """What of two ranks' loops differs, in words; None where all are alike."""
        if not self.several:
            return None
        run, hooks = self._run, self._run.hooks
        about = {**about, "the policy's checksum": _checksum(run.config), "the gate on the device": run.gate.on_device}
        told = self.ranks.all_gather_object([about, hooks.runs_between_steps, hooks.has_plan_hook, bool(self._asks)])
        for key in about:
            values = [t[0].get(key) for t in told]
            if any(v != values[0] for v in values):
                return f"{key} is {', '.join(map(str, values[:16]))} in the order of ranks"
        # A hook may be on one rank alone (the first one logs, say); when steps settle, and who is asked, is alike on all.
        if (warning := hooks.match_ranks([t[1] for t in told], [t[2] for t in told])) is not None:
            run.tell(warning)
        if any(t[3] for t in told):  # before anything is drawn
            self.hear(run.step + 1)
        return None

    # ---- when something is wrong

    def broken_state(self, name: str | None, onset: int, how: str, signal: Signal) -> list[Finding]:
        """Non-finite state on any rank, found now or told of."""
        names = [(rank, found) for rank, found in enumerate(self.ranks.all_gather_object(name)) if found is not None]
        found = [(rank, NonfiniteSnapshot(onset, tensor), how) for rank, tensor in names]
        found += [(rank, alarm, "found in a snapshot") for rank, alarm in self._alarms]
        self._alarms = []
        if not found:
            return []
        rank, alarm, how = found[0]
        where = f" on rank {rank}" if self.several else ""
        evidence: dict[str, Any] = {"tensor": alarm.tensor, "how": how, "loss": signal.loss}
        if self.several:
            evidence["ranks"] = sorted({r for r, _, _ in found})
        return [
            Finding(
                kind=Kind.NONFINITE_STATE,
                severity=Severity.ROLLBACK,
                step=signal.step,
                onset=max(1, alarm.step),
                detector="state",
                message=f"{alarm.tensor} holds NaN or Inf{where}",
                evidence=evidence,
            )
        ]

    @property
    def alarmed(self) -> bool:
        return bool(self._alarms)

    def blame(self, step: Step, signal: Signal) -> attribution.Blame | None:
        """Whose doing a vetoed step was; None for one process, and for a step that passed."""
        if not self.several or not signal.flags or step.rows is None:
            return None
        broken = bool(signal.flags & (Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE))
        accounts = self.ranks.all_gather_object(
            attribution.account(step, rows=broken and self._run.config.quarantine.nonfinite_samples)
        )
        return attribution.blame(step.rows, accounts, signal.flags, signal.loss_limit)


def _samples(rows: Rows) -> int:
    """What all ranks read together; those that read the same (see attribution.readers) count once."""
    samples, batches = rows.column(Column.SAMPLES), rows.column(Column.BATCH)
    if rows.least[Column.BATCH] < 0:  # not looked at: data of its own
        batches = np.where(batches < 0, -1.0 - np.arange(rows.size), batches)
    ordered = batches.copy()
    ordered.sort()
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        samples = samples[np.unique(batches, return_index=True)[1]]
    return int(np.add.reduce(samples))


def _checksum(config: Config) -> int:
    """Of what ranks must have in common. What they may keep in memory, and write of it, may differ."""
    common = (config.detect, config.recover, config.quarantine, config.integrity, config.liveness, config.checkpoint)
    return zlib.crc32(msgspec.json.encode(common))
