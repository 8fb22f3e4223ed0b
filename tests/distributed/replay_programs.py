"""A NaN in the data of one rank: all ranks reach the same verdict, and the bundle is that rank's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import GLOBAL, QUICK, STEPS, Layout, loss_of, on_all

import holdfast


def train(folder: Path, kind: str, rank: int, size: int, replay: dict[str, Any]) -> tuple[Layout, Any]:
    """Train one epoch with a NaN in the seventh step's data of the last rank."""
    layout = Layout(kind, rank, size)
    config = {**QUICK, "replay": replay}
    guard = holdfast.Guard(layout.model, layout.optimizer, run_dir=folder, config=config)
    with guard:
        for step in guard.steps(layout.loader({6 * GLOBAL + size - 1: "nan"}), epochs=1):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(layout.model, batch))
    dist.barrier()
    return layout, guard


def read_replays(folder: Path) -> dict[str, dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return {event["result"]: event for event in events if event["event"] == "replay"}


def one_rank(folder: Path, rank: int, size: int) -> None:
    """Rank 0 journals the verdict of the last rank, and only that one writes a bundle. With consent the row alone goes."""
    kind, last = folder.name, size - 1
    layout, guard = train(folder / "skip", kind, rank, size, {"keep_batch": True})
    assert on_all((int(guard.step), guard.summary().skipped)) == [(STEPS - 1, 1)] * size
    verdict = read_replays(folder / "skip")["verdict"]
    assert (verdict["rank"], verdict["cause"], verdict["samples"]) == (last, "data_row", [6 * GLOBAL + last])
    written = sorted(path.name for path in (folder / "skip").glob("incidents/0001/bundle/*"))
    assert written == [f"rank_{last:05d}"]
    (manifest,) = (folder / "skip").glob("incidents/0001/bundle/*/step_*/manifest.json")
    about = json.loads(manifest.read_text())["about"]
    assert about["rank"] == last and about["batch"] == "copied"
    assert ("part of the weights" in about["weights"]) == (kind == "fsdp"), about["weights"]
    layout, guard = train(folder / "act", kind, rank, size, {"act": True})
    assert on_all((int(guard.step), guard.summary().skipped)) == [(STEPS, 0)] * size
    assert read_replays(folder / "act")["confirmed"]["cause"] == "data_row"
    if kind == "ddp":
        whole = [torch.cat([p.detach().reshape(-1) for p in layout.model.parameters()]).tolist()]
        assert len({json.dumps(each) for each in on_all(whole)}) == 1, "the replicas have drifted"
