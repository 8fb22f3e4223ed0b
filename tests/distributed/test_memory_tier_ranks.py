"""One rank is killed, torchrun restarts all of them, and they resume from the newest certified state in shared memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torchrun_job
from tier_program import NEWEST

from holdfast.core.checkpoints.memory_folder import ROOT_VARIABLE

pytestmark = pytest.mark.in_memory


def launch(folder: Path, kind: str, fate: str, ranks: int) -> tuple[int, str]:
    """Train under torchrun, with shared memory in FOLDER/shm. Return its status and what it logged."""
    (folder / "shm").mkdir(parents=True)
    # torchrun ends the other ranks at once: they have no time to clear the addresses that the restarted ranks would find in
    # its store (https://github.com/pytorch/pytorch/issues/135712).
    variables = {ROOT_VARIABLE: str(folder / "shm"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return torchrun_job.launch("tier_program.py", folder, kind, fate, ranks=ranks, restarts=2, **variables)


def ends(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 4), ("ddp-shares", 4), ("fsdp", 4)])
def test_killed_rank_is_restarted_from_memory_bit_for_bit(kind, ranks, tmp_path):
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    status, log = launch(reference, kind, "spared", ranks)
    assert status == 0, log
    status, log = launch(killed, kind, "killed", ranks)
    assert status == 0, log
    assert f"resumed from memory, {NEWEST}, at step 12" in log, log
    assert ("so each rank keeps a share" in log) == (kind == "ddp-shares")
    events = [json.loads(line) for line in (killed / "run/journal.jsonl").read_text().splitlines()]
    (resumed,) = [e for e in events if e["event"] == "resumed"]
    assert resumed["step"] == 12 and resumed["restored_from"] == "memory"
    assert [(e["attempt"], e["step"]) for e in ends(killed, ranks)] == [(1, 20)] * ranks
    assert [e["state"] for e in ends(killed, ranks)] == [e["state"] for e in ends(reference, ranks)]
    for folder in (reference, killed):
        assert list((folder / "shm").iterdir()) == [], "an orderly end leaves nothing"
