"""The reference trainer reads the same data and has the same losses on any number of ranks, in any layout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_programs import BATCH, LAYOUTS, LEGS, STEPS, name_of

from holdfast.core.record import journal

WAIT_SECONDS = 60
TOLERANCE = 1e-5
"""for sums in another order; 2e-7 was measured"""

SAME = ("curve", "eval_loss", "seconds")


def reports(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def names(ranks: int) -> list[str]:
    return [name_of(ranks, layout) for layout in LAYOUTS[ranks]]


def assert_one_run(ranks: list[dict[str, Any]], alone: dict[str, Any], name: str) -> None:
    """Assert that every rank has the losses of a single-rank run, and that together they read the same data at each step."""
    for rank in ranks:
        assert rank["curve"] == pytest.approx(alone["curve"], rel=TOLERANCE), name
        assert rank["eval_loss"] == pytest.approx(alone["eval_loss"], rel=TOLERANCE), name
        assert [rank[key] for key in ("parameters", "rollbacks")] == [alone["parameters"], alone["rollbacks"]], name
        assert [rank[key] for key in SAME] == [ranks[0][key] for key in SAME], f"{name}: all ranks have one result"
    shares: dict[int, list[int]] = {}
    for rank in ranks:
        assert shares.setdefault(rank["share"], rank["served"]) == rank["served"], (
            f"{name}: ranks of one tensor group read the same data"
        )
    each = BATCH // len(shares)
    for step in range(len(alone["served"]) // BATCH):
        together = [n for served in shares.values() for n in served[step * each : (step + 1) * each]]
        assert sorted(together) == alone["served"][step * BATCH : (step + 1) * BATCH], f"{name}, step {step + 1}"


def evaluations(run_dir: Path) -> list[float]:
    events = journal.read(run_dir / "journal.jsonl").events
    return [e["facts"]["eval"]["eval_loss"] for e in events if e["event"] == "facts" and "eval" in e["facts"]]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_loss_curve_does_not_depend_on_the_layout_before_and_after_a_recovery(run, tmp_path, ranks):
    run("trainer_programs.curves:1", f"trainer_programs.curves:{ranks}")
    (alone,) = reports(tmp_path, "1", 1)
    assert alone["rollbacks"] == 1 and len(alone["curve"]) == STEPS + 1, "one step is repeated"
    assert len(evaluations(tmp_path / "1")) == 3
    for name, layout in zip(names(ranks), LAYOUTS[ranks], strict=True):
        each = reports(tmp_path, name, ranks)
        assert_one_run(each, alone, name)
        cut = layout.get("shard", 1) * layout.get("tensor", 1)
        assert all(rank["held"] <= 1.05 * alone["held"] / cut for rank in each), f"{name}: only norms are not sharded"
        assert evaluations(tmp_path / name) == pytest.approx(evaluations(tmp_path / "1"), rel=TOLERANCE), name


@pytest.mark.slow
def test_unguarded_loss_curve_does_not_depend_on_the_layout(run, tmp_path):
    run("trainer_programs.unguarded:1", "trainer_programs.unguarded:2")
    (alone,) = reports(tmp_path, "off-1", 1)
    for name in names(2):
        assert_one_run(reports(tmp_path, f"off-{name}", 2), alone, name)


@pytest.mark.slow
def test_run_resumed_in_another_layout_has_the_losses_of_an_uninterrupted_run(run, tmp_path):
    run("trainer_programs.uninterrupted:1", *(f"trainer_programs.leg:{ranks}" for ranks in LEGS))
    (alone,) = reports(tmp_path, "uninterrupted", 1)
    legs = [reports(tmp_path, f"leg-{ranks}", ranks) for ranks in LEGS]
    for rank in range(4):
        joined = [loss for leg in legs for loss in leg[rank % len(leg)]["curve"]]
        assert joined == pytest.approx(alone["curve"], rel=TOLERANCE)
    assert legs[-1][0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=TOLERANCE)


def test_stage_boundaries_count_the_samples_of_all_ranks(run, tmp_path):
    run("trainer_programs.staged:2")
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


def start(folder: Path, arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    merged = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=merged, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        streams = [process.communicate(timeout=WAIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, streams, strict=True)]


@pytest.mark.slow
def test_program_exits_alike_on_every_rank_and_resumes_under_torchrun(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["-m", "holdfast", "train", "small.toml"]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [start(tmp_path, [*command, "--stop-at", "6"], RANK=r, LOCAL_RANK=r, **group) for r in ("0", "1")]
    first, second = wait_for(ranks)
    assert first[0] == second[0] == 75, first[2] + second[2]
    assert "on 2 ranks (data 2) of" in first[2]
    assert (
        first[2].splitlines()[-1].startswith("stopped at step 6: asked to stop at step 6; the same command resumes it")
    )
    assert second[1:] == ("", ""), "only rank 0 prints"

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command, "--json"]
    ((status, out, err),) = wait_for([start(tmp_path, launcher)])
    assert status == 0, err
    result = json.loads(out)
    assert (result["steps"], result["steps_now"], result["stopped"]) == (12, 6, None)
