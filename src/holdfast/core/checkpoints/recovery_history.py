"""The LR and clip interventions of a run, in order, so that a restart from before one repeats it.

A rollback that cut the LR is part of the run from then on. A process that resumes from an older checkpoint
reaches that step again. It must make the same cut there, or it trains a different run. The saved state counts how
many interventions it includes (`Interventions.applied`); the journal has all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.core.base.types import CutLR, HoldLR, TightenClip
from holdfast.core.checkpoints.lineage import Lineage


class Intervention(msgspec.Struct, frozen=True):
    """Holds one intervention, made when `step` steps were committed."""

    step: int
    action: CutLR | HoldLR | TightenClip
    incident: int | None = None
    reason: str = ""


class RecoveryHistory:
    """Holds the interventions and branches that led to the current state of the run."""

    def __init__(self) -> None:
        self.interventions: list[Intervention] = []
        self.branches = 0
        """the highest branch number in use"""
        self.lineage: Lineage | None = None
        """the branches of the current state; None if the run never went back"""

    def rebuild(self, events: Iterable[dict[str, Any]]) -> None:
        """Read the history from the journal of earlier processes."""
        for event in events:
            self.branches = max(self.branches, event.get("branch") or 0)
            if event.get("lineage") is not None:
                with contextlib.suppress(msgspec.ValidationError):
                    self.lineage = msgspec.convert(event["lineage"], Lineage)
            name, action = event.get("event"), event.get("action")
            if name == "started_over":
                self.interventions.clear()
            elif name in ("resumed", "experiment") and event.get("interventions_kept") is not None:
                self.rolled_back(event["interventions_kept"], ())
            elif name == "action" and action == "rollback":
                self.rolled_back(event.get("interventions_kept") or 0, _interventions(event.get("interventions") or ()))
            elif (
                name == "action"
                and action in ("cut_lr", "hold_lr", "tighten_clip")
                and not event.get("part_of_rollback")
            ):
                self.interventions.extend(_interventions([event.get("intervention")]))

    def state_dict(self) -> dict[str, Any]:
        return {
            "interventions": msgspec.to_builtins(self.interventions),
            "branches": self.branches,
            "lineage": msgspec.to_builtins(self.lineage),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.interventions = msgspec.convert(state["interventions"], list[Intervention])
        self.branches = state["branches"]
        self.lineage = msgspec.convert(state["lineage"], Lineage | None)

    def rolled_back(self, kept: int, added: Sequence[Intervention]) -> None:
        """Keep the first `kept` interventions, which the restored state includes, and append those of the rollback."""
        self.interventions = [*self.interventions[:kept], *added]

    def add(self, intervention: Intervention) -> None:
        """Add an intervention that was applied without a rollback."""
        self.interventions.append(intervention)

    def clear_interventions(self) -> None:
        """Forget all interventions: the run starts over."""
        self.interventions.clear()

    def next_branch(self, branches: Iterable[int]) -> int:
        """Return a branch number higher than any given before, and than any of `branches`."""
        self.branches = 1 + max([self.branches, *branches])
        return self.branches

    def due(self, applied: int, step: int) -> list[Intervention]:
        """Return the interventions at or before `step` that a state with the first `applied` of them lacks."""
        return [i for i in self.interventions[applied:] if i.step <= step]


def _interventions(values: Iterable[Any]) -> list[Intervention]:
    interventions = []
    for value in values:
        with contextlib.suppress(msgspec.ValidationError):  # written by another version: only this one is not repeated
            interventions.append(msgspec.convert(value, Intervention))
    return interventions
