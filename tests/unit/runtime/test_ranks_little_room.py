"""Ranks with different room hold the same snapshots, of which one is good on all of them, whatever befalls which rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ranks_agree import RECOVER, Rank, Table, expand, run_together, silence

from holdfast.core.base.types import Health
from marks import slow

__all__ = ["silence"]

STEPS = 24
FAULTS = ("torn_copy", "nan_data", "explosion", "nan_state", "spoilt_snapshots")
schedules = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, STEPS), st.sampled_from(FAULTS)), min_size=1, max_size=5
)


class LimitedRank(Rank):
    """A rank that records its snapshots at every step, and whose copies may be torn."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: list[tuple[int, list[int]]] = []
        self.good: list[set[int]] = []
        self.copies = 0

    def _before(self, now: set[str]) -> None:
        snapshots = self.guard._run.parts.snapshots
        if "torn_copy" in now:
            for snapshot in snapshots.ring:
                if snapshot.health is Health.CANDIDATE:
                    snapshot.copy._torn = True
        super()._before(now)
        self.held.append((self.guard.step, [s.step for s in snapshots.ring]))
        self.good.append({s.step for s in snapshots.ring if s.health is Health.GOOD})
        self.copies = max(self.copies, snapshots._copier.count("update_tensors", on_host=True))


def run_with(rooms: list[int], faults: list[dict[int, list[str]]], gate: str, nbytes: int) -> list[LimitedRank]:
    """Run one rank for each of `rooms`, the number of copies that fit on it."""
    table, ranks = Table(len(rooms)), []
    for rank, room in enumerate(rooms):
        config = {
            "detect": {"gate": gate, "warmup_steps": 2},
            "recover": {**RECOVER, "ladder": ["skip", "rollback", "stop"]},
            "snapshot": {"every_steps": 2, "certify_after": 2, "memory_gb": (room * nbytes + 1) / 1e9},
            "integrity": {"replicas_every": 0, "between_updates_every": 0},
        }
        ranks.append(LimitedRank(rank, table, faults[rank], config, STEPS))
    return run_together(ranks)


@pytest.fixture(scope="module")
def nbytes() -> int:
    """The bytes of one snapshot with the optimizer's state."""
    (rank, _) = run_with([1000, 1000], [{}, {}], "host", 1000)
    buffer = rank.guard._run.parts.snapshots.ring.snapshots[-1].copy.buffer
    assert buffer is not None
    return buffer.layout.nbytes


@pytest.mark.parametrize("gate", ["host", "device"])
def test_the_rank_with_the_least_room_decides_for_all(gate, nbytes):
    ranks = run_with([5, 2, 100], [{}, {}, {}], gate, nbytes)
    assert [r.ended for r in ranks] == ["done"] * 3
    for rank in ranks:
        assert rank.held == ranks[0].held
        assert rank.copies == 2
        assert rank.guard._run.parts.snapshots.ring.max_snapshots() == 2
    assert ranks[0].held[-1][1][0] >= STEPS - 8, "the newest ones"


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "count"), [("host", 5), ("device", 5), *slow(("host", 80), ("device", 80))])
def test_ranks_hold_the_same_snapshots_and_one_is_good_on_all(gate, count, nbytes):
    seen: set[str] = set()

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(schedule=schedules, rooms=st.lists(st.integers(2, 6), min_size=2, max_size=3))
    def agree(schedule: list[tuple[int, int, str]], rooms: list[int]) -> None:
        ranks = run_with(rooms, expand(schedule, len(rooms)), gate, nbytes)
        first = ranks[0]
        for rank in ranks:
            assert rank.ended == first.ended
            assert rank.outcomes == first.outcomes
            assert rank.copies <= min(rooms)
            if "spoilt_snapshots" not in {fault for _, _, fault in schedule}:
                assert rank.held == first.held
        if "spoilt_snapshots" not in {fault for _, _, fault in schedule}:
            common = [set.intersection(*good) for good in zip(*(rank.good for rank in ranks), strict=True)]
            assert all(itertools.dropwhile(lambda steps: not steps, common)), common
        seen.add(first.ended.partition(":")[0])

    agree()
    assert "done" in seen
