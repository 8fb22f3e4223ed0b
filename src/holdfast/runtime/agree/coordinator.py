"""Coordinate with the other ranks: agree on a step's numbers, exchange requests, share decisions.

A healthy step takes one collective. A request of one rank (stop, a signal, an expected shift, samples to quarantine,
non-finite state, a checkpoint that is due by time, a rejected snapshot) is announced by a flag in that rank's row. A second
exchange then carries it to all ranks, and all act on it alike.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from holdfast.core.base.config import Config
from holdfast.core.base.errors import PolicyStop, RanksDisagree
from holdfast.core.base.types import Finding, Flag, Kind, Plan, Severity, Signal
from holdfast.core.detectors.stragglers import Stragglers
from holdfast.runtime.agree.attribution import Origin, find_origin
from holdfast.runtime.agree.rows import AgreedStep, Column, HostFields, LocalMeasurements, Rows, agree
from holdfast.runtime.ports.hooks import Hooks
from holdfast.runtime.ports.ranks import Ranks
from holdfast.runtime.snapshots.manager import NonfiniteSnapshot

log = logging.getLogger("holdfast")


_SEVERAL_GROUPS = "several groups"
"""the group of a step to which ranks bring losses of different groups"""


class Requests(NamedTuple):
    """What any rank has asked for, in the order of ranks."""

    stop: tuple[int, str] | None
    """the asking rank and its reason"""
    shifts: list[str]
    quarantines: list[tuple[int, list[int], str]]
    """rank, sample ids, reason"""
    is_checkpoint_due: bool
    """the time between two checkpoints is over, by the clock of rank 0"""
    notes: list[str]
    snapshots: list[tuple[int, dict[str, Any]]]
    """rank, and what it announces about its snapshots"""
    shutdown: tuple[int, str] | None
    """the first rank that received a signal, and which"""
    tier_step: int | None
    """the certified snapshot to write to shared memory, by its step"""
    splits: list[dict[str, Any]]
    """micro-batches that did not fit into a rank's memory"""
    findings: list[Finding]
    """notes of single ranks, one of each kind"""


class RankCoordinator:
    """Exchanges with the ranks of a run. One process exchanges nothing."""

    def __init__(self, ranks: Ranks, config: Config, hosts: Sequence[str] = ()) -> None:
        self._ranks, self._config = ranks, config
        self.is_distributed = ranks.size > 1
        self._stragglers = Stragglers(hosts, ranks.size) if self.is_distributed and config.detect.advisory else None
        self._requests: list[dict[str, Any]] = []
        self._decisions = 0
        """checksum of every plan so far; ranks compare it at each step"""
        self._alarms: list[tuple[int, NonfiniteSnapshot]] = []

    # ---- at every step

    def agree(self, host: HostFields, local: LocalMeasurements) -> AgreedStep:
        """Return the step's numbers over all ranks, by one collective."""
        host = host._replace(decisions=self._decisions, has_requests=bool(self._requests))
        return agree(self._ranks, host, local)

    def read_rows(self, extra: Tensor | None, scaled_optimizers: int) -> Rows | None:
        """Return the rows of all ranks on the host. RanksDisagree if the ranks are not at the same step.

        For one process they hold its own integrity checks, or nothing.
        """
        if extra is None and not self.is_distributed:
            return None
        rows = Rows(extra, self._ranks.size, found_inf=scaled_optimizers)
        if self.is_distributed:
            rows.check_lockstep()
        return rows

    def merge_signal(self, signal: Signal, rows: Rows | None) -> Signal:
        """Return the signal with the numbers that only the host knew taken over all ranks."""
        if not self.is_distributed or rows is None:
            return signal
        lowest, loss_limit, grad_limit = rows.lowest, rows.lowest[Column.LOSS_LIMIT], rows.lowest[Column.GRAD_LIMIT]
        return msgspec.structs.replace(
            signal,
            batch=None if lowest[Column.BATCH] < 0 else zlib.crc32(rows.column(Column.BATCH).tobytes()),
            samples=None if lowest[Column.SAMPLES] < 0 else _count_samples(rows),
            length=rows.common_value(Column.LENGTH),
            seconds=rows.highest[Column.SECONDS],
            loss_limit=loss_limit if loss_limit < math.inf else None,
            grad_limit=grad_limit if grad_limit < math.inf else None,
            group=signal.group if lowest[Column.GROUP] == rows.highest[Column.GROUP] else _SEVERAL_GROUPS,
        )

    def find_stragglers(self, step: int, rows: Rows, note: Callable[[str], None]) -> list[Finding]:
        """Return the ranks found slow at this step. `note` is called for each that is slow no longer."""
        if self._stragglers is None:
            return []
        findings, notes = self._stragglers.observe(step, rows.phases())
        for message in notes:
            note(message)
        return findings

    def next_unit(self, rows: Rows, parts: int) -> float | None:
        """Return the weight of a part for the next step: the mean of this one, rounded to a power of two."""
        mean = sum(rows.values(Column.WEIGHT)) / (self._ranks.size * parts)
        return math.ldexp(1.0, round(math.log2(mean))) if mean > 0 and math.isfinite(mean) else None

    def add_decision(self, signal: Signal, plan: Plan | None) -> None:
        """Add a plan to the checksum that the ranks compare at the next step."""
        if self.is_distributed and plan is not None:
            decision = msgspec.json.encode([signal.step, signal.attempt, plan.actions, plan.incident])
            self._decisions = zlib.crc32(decision, self._decisions)

    # ---- requests of one rank

    def request(self, what: str, value: Any) -> None:
        """Queue a request of this rank until the next exchange."""
        self._requests.append({"what": what, "value": value})

    def request_alarm(self, alarm: NonfiniteSnapshot) -> None:
        """Queue what only this rank knows: one of its snapshots holds NaN or Inf."""
        self.request("alarm", alarm._asdict())

    def drain_requests(self) -> Requests:
        """Exchange the queued requests of all ranks. Alarms are kept for `nonfinite_state`."""
        queued, self._requests = self._requests, []
        stop: tuple[int, str] | None = None
        shifts: list[str] = []
        quarantines: list[tuple[int, list[int], str]] = []
        is_checkpoint_due = False
        notes: list[str] = []
        snapshots: list[tuple[int, dict[str, Any]]] = []
        shutdown: tuple[int, str] | None = None
        tier_step: int | None = None
        splits: list[dict[str, Any]] = []
        findings: dict[str, Finding] = {}
        for rank, requests in enumerate(self._ranks.all_gather_object(queued)):
            for request in requests:
                what, value = request["what"], request["value"]
                if what == "stop":
                    stop = stop or (rank, value)
                elif what == "shutdown":
                    shutdown = shutdown or (rank, value)
                elif what == "shift" and value not in shifts:
                    shifts.append(value)
                elif what == "quarantine":
                    quarantines.append((rank, value["samples"], value["reason"]))
                elif what == "checkpoint":
                    is_checkpoint_due = True
                elif what == "tier":
                    tier_step = value
                elif what == "note" and value not in notes:
                    notes.append(value)
                elif what == "finding":
                    findings.setdefault(value["kind"], msgspec.convert(value, Finding))
                elif what == "snapshots":
                    snapshots += [(rank, news) for news in value]
                elif what == "split":
                    splits.append({**value, "rank": rank})
                elif what == "alarm":
                    self._alarms.append((rank, NonfiniteSnapshot(**value)))
        return Requests(
            stop,
            shifts,
            quarantines,
            is_checkpoint_due,
            notes,
            snapshots,
            shutdown,
            tier_step,
            splits,
            list(findings.values()),
        )

    # ---- decisions that all ranks share

    def share_plan(self, plan: Plan | None) -> Plan | None:
        """Return rank 0's plan on every rank."""
        if not self.is_distributed:
            return plan
        shared = self._ranks.broadcast_object(None if plan is None else msgspec.to_builtins(plan))
        return None if shared is None else msgspec.convert(shared, Plan)

    def share_metric(self, metric: float) -> float:
        """Return an evaluation result over all ranks: their common value, or their mean."""
        if not self.is_distributed:
            return metric
        metrics = [float(value) for value in self._ranks.all_gather_object(metric)]
        return metrics[0] if len(set(metrics)) == 1 else sum(metrics) / len(metrics)

    def first_reason(self, reason: str | None) -> str | None:
        """Return why any rank cannot do something, with its rank; None if all can."""
        if not self.is_distributed:
            return reason
        reasons = enumerate(self._ranks.all_gather_object(reason))
        return next((f"rank {rank}: {why}" for rank, why in reasons if why is not None), None)

    def run_on_all(self, action: Callable[[], None]) -> None:
        """Run `action` on every rank. If one rank refuses, every rank raises: its own error, or the other rank's."""
        if not self.is_distributed:
            action()
            return
        local: BaseException | None = None
        try:
            action()
        except Exception as error:
            local = error
        code = local.code if isinstance(local, PolicyStop) else None
        refusals = self._ranks.all_gather_object(None if local is None else [f"{type(local).__name__}: {local}", code])
        if local is not None:
            raise local
        for rank, refusal in enumerate(refusals):
            if refusal is not None:
                message = f"rank {rank}: {refusal[0]}"
                if refusal[1] is None:
                    raise RanksDisagree(message)
                log.error(
                    "holdfast: %s", message
                )  # an `except Exception` around the loop would hide the stop otherwise
                raise PolicyStop(message, refusal[1])

    def compare_loops(self, loop: dict[str, Any], hooks: Hooks) -> tuple[str | None, str | None, bool]:
        """Compare the loops of all ranks and match their hooks.

        Returns the difference in words or None, a warning or None, and whether any rank has queued requests.
        """
        loop = {**loop, "the policy's checksum": _shared_config_checksum(self._config)}
        gathered = self._ranks.all_gather_object(
            [loop, hooks.runs_between_steps, hooks.has_plan_hook, bool(self._requests)]
        )
        for key in loop:
            values = [each[0].get(key) for each in gathered]
            if any(value != values[0] for value in values):
                return f"{key} is {', '.join(map(str, values[:16]))} in the order of ranks", None, False
        warning = hooks.match_ranks([each[1] for each in gathered], [each[2] for each in gathered])
        return None, warning, any(each[3] for each in gathered)

    # ---- when something is wrong

    @property
    def has_alarms(self) -> bool:
        """Return whether a rank has reported a snapshot with NaN or Inf."""
        return bool(self._alarms)

    def nonfinite_state(self, tensor: str | None, onset: int, how: str, signal: Signal) -> list[Finding]:
        """Return a finding if the state of any rank holds NaN or Inf: found now on this rank, or reported before."""
        tensors = enumerate(self._ranks.all_gather_object(tensor))
        places = [(rank, NonfiniteSnapshot(onset, name), how) for rank, name in tensors if name is not None]
        places += [(rank, alarm, "found in a snapshot") for rank, alarm in self._alarms]
        self._alarms = []
        if not places:
            return []
        rank, alarm, how = places[0]
        evidence: dict[str, Any] = {"tensor": alarm.tensor, "how": how, "loss": signal.loss}
        if self.is_distributed:
            evidence["ranks"] = sorted({place[0] for place in places})
        return [
            Finding(
                kind=Kind.NONFINITE_STATE,
                severity=Severity.ROLLBACK,
                step=signal.step,
                onset=max(1, alarm.step),
                detector="state",
                message=f"{alarm.tensor} holds NaN or Inf" + (f" on rank {rank}" if self.is_distributed else ""),
                evidence=evidence,
            )
        ]

    def find_origin(self, rows: Rows, signal: Signal, describe_data: Callable[[bool], dict[str, Any]]) -> Origin:
        """Return the ranks and samples a vetoed step came from. Every rank describes its own data."""
        is_nonfinite = bool(signal.flags & (Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE))
        accounts = self._ranks.all_gather_object(
            describe_data(is_nonfinite and self._config.quarantine.nonfinite_samples)
        )
        return find_origin(rows, accounts, signal.flags, signal.loss_limit)


def _count_samples(rows: Rows) -> int:
    """Return how many samples all ranks read; ranks that read the same batch count once."""
    samples, batches = rows.column(Column.SAMPLES), rows.column(Column.BATCH)
    if rows.lowest[Column.BATCH] < 0:  # a rank without a fingerprint counts as one with its own data
        batches = np.where(batches < 0, -1.0 - np.arange(rows.size), batches)
    ordered = batches.copy()
    ordered.sort()
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        samples = samples[np.unique(batches, return_index=True)[1]]
    return int(np.add.reduce(samples))


def _shared_config_checksum(config: Config) -> int:
    """Return a checksum of the sections all ranks must share. Memory and output settings may differ by rank."""
    shared = (
        *(config.detect, config.recover, config.quarantine, config.integrity, config.liveness, config.checkpoint),
        config.oom,
    )
    return zlib.crc32(msgspec.json.encode(shared))
