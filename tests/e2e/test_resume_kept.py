"""What is kept of a run's checkpoints, at every step of it."""

from __future__ import annotations

import pytest
from ended import faulty, often
from resumed import (
    Dies,
    assert_continued,
    entries_of,
    health_of,
    idle,
    live,
)


def test_retention_through_rollbacks_and_a_kill(tmp_path):
    """At every step: a good one on the lineage, and never fewer than the last good one was."""
    r = faulty(checkpoint={"keep_last": 2, "keep_bad": 1})
    path, seen = tmp_path / "run", []

    def look(guard, parts, step):
        idle(guard)
        entries = entries_of(path)
        lineage = guard._run.parts.checkpoints.lineage
        good = [e for e in entries.values() if e.health == "good" and lineage.holds(e.branch, e.step)]
        assert good, f"step {step.number}: {health_of(path)}"
        assert max(e.step for e in good) <= guard.step
        seen.append(health_of(path))

    dies = Dies(tmp_path, 21)

    def between(guard, parts, step):
        look(guard, parts, step)
        dies(guard, parts, step)

    whole = live(r, path, between=between)
    assert "rollback" in whole.actions()
    assert any("quarantined" in health.values() for health in seen)
    left = entries_of(path)
    lineage = whole.guard._run.parts.checkpoints.lineage
    assert all(lineage.holds(e.branch, e.step) for e in left.values()), "the abandoned branch is gone"
    assert 2 <= len([e for e in left.values() if e.health == "good"]) <= 3
    path = dies.died[21]
    assert_continued(live(r, path, between=look), whole, seen=False)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_last": 1}, {27, 30}),
        ({"keep_last": 3}, {21, 24, 27, 30}),
        ({"keep_last": 1, "keep_every": 6}, {0, 6, 12, 18, 24, 27, 30}),
        ({"keep_last": 1, "keep_powers_of_two": True}, None),
    ],
)
def test_what_is_kept(rules, kept, tmp_path):
    r = often(epochs=6, checkpoint=rules)
    live(r, tmp_path / "run", between=lambda guard, parts, step: idle(guard))
    steps = {e.step for e in entries_of(tmp_path / "run").values()}
    if kept is None:
        assert {0, 27, 30} <= steps and 4 <= len(steps) <= 8, steps
    else:
        assert steps == kept
