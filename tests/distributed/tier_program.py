"""Trains ranks of which one is killed in the first attempt. torchrun restarts all of them, or the test does.

FOLDER/shm is the shared memory of the host; of several hosts each has one of its own, FOLDER/shm-NAME.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from layouts import Layout, loss_of

import holdfast
from holdfast.runtime.checkpoint import memory_tier

NEWEST = "step_00000012"
"""the state in shared memory for which the last rank waits before it is killed"""


def main(folder: Path, kind: str, is_killed: bool) -> None:
    memory_tier.MAX_SHARE = float("inf")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kind, _, room = kind.partition("-")
    mode = "auto" if "TORCHELASTIC_RUN_ID" in os.environ else "on"
    layout = Layout(kind, rank, size)
    config = {
        "checkpoint": {"every_steps": 1000, "rank_timeout_seconds": 30, "memory_tier": mode},
        "snapshot": {"every_steps": 4, "certify_after": 2},
        "liveness": {"poll_seconds": 0.1},
    }
    if room == "shares":
        config["snapshot"] |= {"memory_gb": 7.8e-6}  # no two whole snapshots
    guard = holdfast.Guard(layout.model, layout.optimizer, clip_grad_norm=1.0, run_dir=folder / "run", config=config)
    with guard:
        for step in guard.steps(layout.loader(), epochs=1):
            if step.number >= 12:
                # A write or a removal that is still under way would take the place of the write that begins next.
                tier = guard._run.parts.checkpoints.tier
                tier.wait()
                tier._poll()
                tier.wait()
                dist.barrier()
            may_die = is_killed and attempt == 0 and rank == size - 1 and step.number >= 16
            if may_die and (has_newest(folder) or step.number == 19):
                wait_for_newest(folder)
                os.kill(os.getpid(), signal.SIGKILL)
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(layout.model, batch))
    state = [t.tolist() for t in layout.state()]
    (folder / f"end-{rank}.json").write_text(json.dumps({"attempt": attempt, "step": guard.step, "state": state}))
    dist.destroy_process_group()


def has_newest(folder: Path) -> bool:
    """Return whether every host has published the state."""
    return all(list(each.glob(f"holdfast-*/*/checkpoints/{NEWEST}")) for each in folder.glob("shm*"))


def wait_for_newest(folder: Path) -> None:
    ends = time.monotonic() + 100
    while not has_newest(folder):
        assert time.monotonic() < ends, "no state was written to shared memory"
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "killed")
