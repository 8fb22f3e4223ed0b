"""How many snapshots of a model that is not started yet fit into memory, by the rule that a run uses."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.base.config import SnapshotSection
from holdfast.core.checkpoints.snapshot_rule import (
    MIN_COPIES,
    SnapshotAges,
    SnapshotRoom,
    SnapshotRule,
    ages,
    describe_room,
    should_share,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
DEFAULT_RANKS_PER_HOST = 8


class PlannedModel(NamedTuple):
    """A model and where it is to be trained."""

    parameters: int
    ranks: int = 1
    ranks_per_host: int = 1
    host_nbytes: int = 0
    """free memory of a host"""
    dtype: str = "float32"
    """of the parameters that the optimizer updates"""
    optimizer_states: int = 2
    """tensors as large as the parameters that the optimizer keeps: 2 for Adam"""
    state_dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters and the optimizer's state."""
        states = self.optimizer_states * DTYPE_BYTES[self.state_dtype]
        return self.parameters * (DTYPE_BYTES[self.dtype] + states)


class SnapshotPlan(NamedTuple):
    """What is kept if the state is held in one way: `replicated` on every rank (DDP), or `sharded` over all (FSDP).

    If each rank keeps a share of a replicated state, `room` is that for shares.
    """

    state: str
    room: SnapshotRoom
    kept: int
    """copies at once, the one in the making included; 0: snapshots are off"""
    wanted: int
    ages: SnapshotAges | None
    note: str | None


def plan_snapshots(model: PlannedModel, config: SnapshotSection) -> list[SnapshotPlan]:
    """Return what is kept on each rank, replicated and sharded; for one rank there is no difference."""
    allowed = int(config.memory_gb * 1e9) if config.memory_gb > 0 else model.host_nbytes // model.ranks_per_host // 4
    plans: list[SnapshotPlan] = []
    for state, shards in {"replicated": 1, "sharded": model.ranks}.items():
        if shards == model.ranks == 1 and plans:
            break
        room = SnapshotRoom(-(-model.nbytes // shards), 0, allowed)
        rule = SnapshotRule(config.every_steps, config.reach_steps)
        if state == "replicated" and model.ranks > 1 and config.shared == "auto":
            room = room._replace(share=-(-model.nbytes // model.ranks))
            room = room.as_share() if should_share([room], rule.full_count()) else room
        rule = rule._replace(copies=room.copies)
        is_on = room.copies >= MIN_COPIES
        plans.append(
            SnapshotPlan(
                state,
                room,
                min(room.copies, rule.full_count()) if is_on else 0,
                rule.full_count(),
                ages(rule, config.certify_after, ranks=model.ranks) if is_on else None,
                describe_room([room], rule, config.certify_after, model.ranks),
            )
        )
    return plans
