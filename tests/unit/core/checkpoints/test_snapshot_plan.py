"""What fits of a planned model, and the tables of docs/snapshots.md. HOLDFAST_WRITE_DOCS=1 writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.cli.plan_memory import kept_columns
from holdfast.core.base.config import SnapshotSection
from holdfast.core.checkpoints.snapshot_plan import PlannedModel, SnapshotPlan, plan_snapshots
from holdfast.core.checkpoints.snapshot_rule import SnapshotRule, ages, format_gb

PAGE = Path(__file__).parents[4] / "docs" / "snapshots.md"
BEGIN, END = "<!-- {}: written by tests/unit/core/checkpoints/test_snapshot_plan.py -->", "<!-- end of {} -->"
CURE = "run HOLDFAST_WRITE_DOCS=1 pytest tests/unit/core/checkpoints/test_snapshot_plan.py"
MEASURED = (2, 3, 4, 6)
"""copies with which tests/e2e/test_little_room.py measures the same in real runs, with the default settings too"""
HOST_GB, PER_HOST = 1000, 8
SIZES, RANKS = (1, 3, 7, 13, 30, 70), (1, 8, 16, 64)


def expect(name: str, table: str) -> None:
    """Compare a table of the page, or write it."""
    begin, end = BEGIN.format(name), END.format(name)
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(begin)
    wanted = f"{head}{begin}\n{table}{end}{rest.partition(end)[2]}"
    if os.environ.get("HOLDFAST_WRITE_DOCS"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == wanted, CURE


def table(*rows: tuple[str, ...]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def test_table_of_copies_is_up_to_date():
    config = SnapshotSection()
    wanted = SnapshotRule(config.every_steps, config.reach_steps).full_count()
    rows = [("copies that fit", "good ones at once", "newest good, at most", "a rollback in memory reaches", "")]
    rows.append(("0, 1", "none", "", "checkpoints only", "computed"))
    for copies in range(2, wanted + 1):
        found = ages(SnapshotRule(config.every_steps, config.reach_steps, copies), config.certify_after)
        (fewest, most), (least, oldest) = found.good, found.reach
        rows.append(
            (
                f"{copies}" + (" or more" if copies == wanted else ""),
                f"{fewest}" if fewest == most else f"{fewest} to {most}",
                f"{found.newest} steps",
                f"{least:,} to {oldest:,} steps",
                "measured" if copies in MEASURED else "computed",
            )
        )
    expect("copies", table(*rows))


def planned(billions: int, ranks: int) -> list[SnapshotPlan]:
    model = PlannedModel(billions * 10**9, ranks, min(ranks, PER_HOST), HOST_GB * 10**9)
    return plan_snapshots(model, SnapshotSection())


def held(plan: SnapshotPlan) -> str:
    """Return what a rank keeps of a snapshot."""
    way = "share" if plan.room.whole else "shard" if plan.state == "sharded" else "whole"
    return f"{way}, {format_gb(plan.room.nbytes)}"


def test_table_of_models_is_up_to_date():
    rows = [("parameters", "state", "ranks", "memory of a rank", "DDP", "kept", "FSDP", "kept")]
    for billions in SIZES:
        for ranks in RANKS:
            plans = planned(billions, ranks)
            cells = [cell for plan in plans for cell in (held(plan), kept_columns(plan)[0])]
            cells += ["", ""] * (len(plans) == 1)
            state = format_gb(plans[0].room.whole or plans[0].room.nbytes)
            rows.append((f"{billions}B", state, f"{ranks}", format_gb(plans[0].room.allowed), *cells))
    expect("models", table(*rows))


def test_sharding_divides_the_state_and_not_the_memory_of_a_rank():
    model = PlannedModel(7 * 10**9, 16, PER_HOST, HOST_GB * 10**9)
    replicated, sharded = plan_snapshots(model, SnapshotSection(shared="off"))
    assert replicated.room.nbytes == 84 * 10**9
    assert sharded.room.nbytes == 84 * 10**9 // 16
    assert replicated.room.allowed == sharded.room.allowed == HOST_GB * 10**9 // PER_HOST // 4
    assert (replicated.kept, replicated.ages) == (0, None)
    assert sharded.kept == 5


def test_ranks_of_a_replicated_state_keep_shares_if_whole_ones_do_not_all_fit():
    replicated, sharded = planned(7, 16)
    assert (replicated.room.whole, replicated.room.nbytes) == (84 * 10**9, 84 * 10**9 // 16)
    assert (replicated.kept, replicated.ages) == (sharded.kept, sharded.ages) == (5, sharded.ages)
    assert replicated.note is not None and "0 fit whole, so each rank keeps a share of 5.25 GB" in replicated.note


def test_whole_copies_are_planned_if_all_of_them_fit():
    (alone,) = planned(1, 1)
    fits = plan_snapshots(PlannedModel(10**9, 8), SnapshotSection(memory_gb=12 * 11))[0]
    assert (alone.room.whole, fits.room.whole, fits.note) == (0, 0, None)
    almost = plan_snapshots(PlannedModel(10**9, 8), SnapshotSection(memory_gb=12 * 11 - 1))[0]
    assert (almost.room.whole, almost.kept, almost.wanted) == (12 * 10**9, 11, 11)
    assert almost.note is not None and "all 11 snapshots fit; set [snapshot] memory_gb = 132" in almost.note


@pytest.mark.parametrize(("allowed", "copies"), [(60, 3), (90, 5), (34, 2), (33, 1)])
def test_seventeen_gigabytes_of_state(allowed, copies):
    """A state of 17 GB with 60 GB allowed had no snapshot at all, and with 90 GB one every 640 steps."""
    (plan,) = plan_snapshots(PlannedModel(17 * 10**9 // 12), SnapshotSection(memory_gb=allowed))
    assert plan.room.copies == copies
    assert plan.kept == (copies if copies >= 2 else 0)
    assert plan.ages is None or plan.ages.newest == 19
