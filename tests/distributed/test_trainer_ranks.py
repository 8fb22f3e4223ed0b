"""The reference trainer on several ranks is the run of one rank: the same data, the same losses, whatever the layout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trained_ranks import BATCH, LAYOUTS, LEGS, STEPS, name_of

from holdfast.core.record import journal

WAIT_SECONDS = 60
NEAR = 1e-5
"""sums of the same numbers in another order: 2e-7 was measured"""


SAME = ("curve", "eval_loss", "seconds")


def said(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def names(ranks: int) -> list[str]:
    return [name_of(ranks, layout) for layout in LAYOUTS[ranks]]


def assert_one_run(ranks: list[dict[str, Any]], alone: dict[str, Any], name: str) -> None:
    """Every rank saw the run that one rank alone saw, and together they read what it read, when it read it."""
    for rank in ranks:
        assert rank["curve"] == pytest.approx(alone["curve"], rel=NEAR), name
        assert rank["eval_loss"] == pytest.approx(alone["eval_loss"], rel=NEAR), name
        assert [rank[key] for key in ("parameters", "rollbacks")] == [alone["parameters"], alone["rollbacks"]], name
        assert [rank[key] for key in SAME] == [ranks[0][key] for key in SAME], f"{name}: one result on all ranks"
    shares: dict[int, list[int]] = {}
    for rank in ranks:
        assert shares.setdefault(rank["share"], rank["asked"]) == rank["asked"], (
            f"{name}: a tensor group reads the same"
        )
    each = BATCH // len(shares)
    for step in range(len(alone["asked"]) // BATCH):
        together = [n for asked in shares.values() for n in asked[step * each : (step + 1) * each]]
        assert sorted(together) == alone["asked"][step * BATCH : (step + 1) * BATCH], f"{name}, step {step + 1}"


def evaluations(run_dir: Path) -> list[float]:
    events = journal.read(run_dir / "journal.jsonl").events
    return [e["facts"]["eval"]["eval_loss"] for e in events if e["event"] == "facts" and "eval" in e["facts"]]


def test_loss_curve_does_not_depend_on_the_ranks_or_their_layout_before_and_after_a_recovery(run, tmp_path):
    run("trained_ranks.curves:1", "trained_ranks.curves:2", "trained_ranks.curves:4")
    (alone,) = said(tmp_path, "1", 1)
    assert alone["rollbacks"] == 1 and len(alone["curve"]) == STEPS + 1, "one step is done twice"
    assert len(evaluations(tmp_path / "1")) == 3
    for ranks in (2, 4):
        for name, layout in zip(names(ranks), LAYOUTS[ranks], strict=True):
            each = said(tmp_path, name, ranks)
            assert_one_run(each, alone, name)
            cut = layout.get("shard", 1) * layout.get("tensor", 1)
            assert all(rank["held"] <= 1.05 * alone["held"] / cut for rank in each), (
                f"{name}: norms are not cut, no more"
            )
            assert evaluations(tmp_path / name) == pytest.approx(evaluations(tmp_path / "1"), rel=NEAR), name


@pytest.mark.slow
def test_unguarded_ranks_have_the_same_curve_too_tied_and_accumulated(run, tmp_path):
    run("trained_ranks.unguarded:1", "trained_ranks.unguarded:2")
    (alone,) = said(tmp_path, "off-1", 1)
    for name in names(2):
        assert_one_run(said(tmp_path, f"off-{name}", 2), alone, name)


def test_run_goes_on_in_another_layout_with_the_losses_of_the_run_that_was_never_stopped(run, tmp_path):
    run("trained_ranks.whole:1", *(f"trained_ranks.leg:{ranks}" for ranks in LEGS))
    (alone,) = said(tmp_path, "whole", 1)
    legs = [said(tmp_path, f"leg-{ranks}", ranks) for ranks in LEGS]
    for rank in range(4):
        joined = [loss for leg in legs for loss in leg[rank % len(leg)]["curve"]]
        assert joined == pytest.approx(alone["curve"], rel=NEAR)
    assert legs[-1][0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=NEAR)


def test_stages_begin_at_samples_of_all_ranks_together(run, tmp_path):
    run("trained_ranks.staged:2")
    events = journal.read(tmp_path / "staged" / "journal.jsonl").events
    assert [(e["step"], e["reason"]) for e in events if e["event"] == "shift"] == [(4, "data stage 1")]


# ---- the program

SMALL = """
[model]
layers = 1
width = 16
heads = 2
context = 16
[train]
run_dir = "run"
steps = 12
batch_size = 4
device = "cpu"
threads = 1
log_every = 4
[scheduler]
warmup_steps = 2
[eval]
every = 0
batches = 1
"""


def started(folder: Path, words: list[str], **environment: str) -> subprocess.Popen[str]:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        said = [process.communicate(timeout=WAIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *streams) for process, streams in zip(processes, said, strict=True)]


def test_program_stops_with_one_status_on_every_rank_and_goes_on_under_torchrun(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ["-m", "holdfast", "train", "small.toml"]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [started(tmp_path, [*words, "--stop-at", "6"], RANK=r, LOCAL_RANK=r, **group) for r in ("0", "1")]
    first, second = ended(ranks)
    assert first[0] == second[0] == 75, first[2] + second[2]
    assert "on 2 ranks (data 2) of" in first[2]
    assert first[2].splitlines()[-1].startswith("stopped at step 6: asked to stop at step 6; the same command goes on")
    assert second[1:] == ("", ""), "only the first speaks"

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words, "--json"]
    ((status, out, err),) = ended([started(tmp_path, launcher)])
    assert status == 0, err
    result = json.loads(out)
    assert (result["steps"], result["steps_now"], result["stopped"]) == (12, 6, None)
