"""What recoveries have laid over the schedule of a run, in order, so that a restart from before them does it again.

A rollback that cut the LR is part of the run from then on. A later life that goes on from a checkpoint older than the cut
comes to the same step again, and there the same cut must be made, or it would be another run. The saved state counts how
many it holds (`Interventions.turns`); the journal has them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.core.base.types import CutLR, TightenClip
from holdfast.core.checkpoints.lineage import Lineage

Intervention = CutLR | TightenClip


class Turn(msgspec.Struct, frozen=True):
    """One intervention, made when `step` steps were committed."""

    step: int
    action: Intervention
    incident: int | None = None
    reason: str = ""


class History:
    """The interventions on the way to where the run stands."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.branches = 0
        """the highest number a branch has been given"""
        self.lineage: Lineage | None = None
        """the branches the run has come through, where it ever went back"""

    def rebuild(self, events: Iterable[dict[str, Any]]) -> None:
        """From the journal of earlier lives."""
        for event in events:
            self.branches = max(self.branches, _whole(event.get("branch")))
            if event.get("lineage") is not None:
                with contextlib.suppress(msgspec.ValidationError):
                    self.lineage = msgspec.convert(event["lineage"], Lineage)
            kind, action = event.get("event"), event.get("action")
            if kind == "begun_anew":
                self.turns.clear()
            elif kind == "resumed" and event.get("turns") is not None:
                self.turned_back(_whole(event["turns"]), ())
            elif kind == "action" and action == "rollback":
                self.turned_back(_whole(event.get("turns")), _turns(event.get("then")))
            elif kind == "action" and action in ("cut_lr", "tighten_clip") and not event.get("part"):
                self.turns.extend(_turns([event.get("turn")]))

    def state_dict(self) -> dict[str, Any]:
        return {
            "turns": msgspec.to_builtins(self.turns),
            "branches": self.branches,
            "lineage": msgspec.to_builtins(self.lineage),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = msgspec.convert(state["turns"], list[Turn])
        self.branches = state["branches"]
        self.lineage = msgspec.convert(state["lineage"], Lineage | None)

    def turned_back(self, kept: int, then: Sequence[Turn]) -> None:
        """A rollback: the state it returned to holds the first `kept`; `then` are those that came with it."""
        self.turns = [*self.turns[:kept], *then]

    def due(self, held: int, step: int) -> list[Turn]:
        """Those that the state does not hold although the run has come to their step."""
        return [t for t in self.turns[held:] if t.step <= step]


def _turns(values: Any) -> list[Turn]:
    found = []
    for value in values if isinstance(values, list) else []:
        try:
            found.append(msgspec.convert(value, Turn))
        except msgspec.ValidationError:  # written by another version: then it is not done again, and only that
            continue
    return found


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
