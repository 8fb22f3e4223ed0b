"""The branches of a run: which saved states led to the current one, and which were abandoned.

A run is one branch until it goes back: a rollback, or a restart from an older state, begins a new branch at that step.
From then on step numbers are ambiguous: step 950 of the abandoned branch is not the step 950 that is trained again.
"""

from __future__ import annotations

import msgspec


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Branch `branch` began with the state after step `step` of the branch before it in the lineage."""

    branch: int
    step: int


class Lineage(msgspec.Struct, frozen=True):
    """The branches that led to a state, first to last. The first begins at step 0."""

    forks: tuple[Fork, ...] = (Fork(0, 0),)

    def __post_init__(self) -> None:
        branches, steps = [fork.branch for fork in self.forks], [fork.step for fork in self.forks]
        if not self.forks or steps[0] != 0 or sorted(steps) != steps or len(set(branches)) != len(branches):
            raise ValueError(
                f"forks {self.forks!r:.200}: a lineage begins at step 0, never goes back, and has each branch once; "
                "fork the lineage of the restored state, not that of the run"
            )

    @property
    def branch(self) -> int:
        return self.forks[-1].branch

    def holds(self, branch: int, step: int) -> bool:
        """Return whether this lineage passes through the state after `step` of `branch`."""
        for fork, following in zip(self.forks, (*self.forks[1:], None), strict=True):
            if fork.branch == branch:
                return fork.step <= step and (following is None or step <= following.step)
        return False

    def forked(self, branch: int, step: int) -> Lineage:
        """Return the lineage of a new branch that begins after `step` of this one."""
        return Lineage((*self.forks, Fork(branch, step)))
