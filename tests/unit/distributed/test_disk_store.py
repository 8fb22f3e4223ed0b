"""Two ranks save together: one that fails stops the other at once, and only unsafe state counts as refused."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
from holdfast.distributed.world import World
from holdfast.runtime.ports.checkpoint_store import CheckpointContents, CheckpointLabel, CopyInspection, StoreEvent
from holdfast.runtime.tensors.inspect import checksums

LABEL = CheckpointLabel("scheduled", False, Health.CANDIDATE, "", {}, {})


def contents(nonfinite: str | None = None, wait: Callable[[str], None] = lambda name: None) -> CheckpointContents:
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(4)}
    inspection = CopyInspection(checksums(tensors), nonfinite, False)
    return CheckpointContents(
        1, Lineage(), {"step": 1}, tensors, wait, lambda: inspection, lambda name: False, lambda: None
    )


def save_on_two_ranks(run_dir: Path, rank1: CheckpointContents) -> list[StoreEvent]:
    stores = [DiskCheckpointStore(run_dir, World(rank, 2), 30.0) for rank in range(2)]
    for store, each in zip(stores, (contents(), rank1), strict=True):
        store.save(each, LABEL)
    for store in stores:
        store.wait()
        store.close()
    return [event for store in stores for event in store.events]


def test_both_ranks_report_the_published_checkpoint(tmp_path: Path) -> None:
    events = save_on_two_ranks(tmp_path, contents())
    assert [event.status for event in events] == ["saved", "saved"]
    assert events[0].path == events[1].path is not None and events[0].path.is_dir()


def test_write_error_on_one_rank_is_a_failure_and_not_unsafe_state(tmp_path: Path) -> None:
    def disk_full(name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    events = save_on_two_ranks(tmp_path, contents(wait=disk_full))
    assert [event.status for event in events] == ["failed", "failed"]
    assert all(event.why.startswith("rank 1: ") and "No space left" in event.why for event in events)


def test_bug_on_one_rank_does_not_make_the_other_wait_for_the_timeout(tmp_path: Path) -> None:
    events = save_on_two_ranks(tmp_path, contents()._replace(parts={"step": object()}))
    assert [event.status for event in events] == ["failed", "failed"]


def test_no_rank_waits_for_a_run_directory_that_was_removed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    store = DiskCheckpointStore(tmp_path / "run", World(1, 2), 30.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "barrier", lambda self, timeout: None)  # rank 0 is not there
        store.open("a", lambda: None)
    (tmp_path / "run").rmdir()
    store.save(contents(), LABEL)
    store.wait()
    store.close()
    assert [(event.status, event.why) for event in store.events] == [("failed", f"{tmp_path / 'run'} was removed")]


def test_nonfinite_state_on_one_rank_is_refused_and_names_the_tensor_first(tmp_path: Path) -> None:
    events = save_on_two_ranks(tmp_path, contents(nonfinite="t1"))
    assert [event.status for event in events] == ["refused", "refused"]
    assert all(event.why == "t1 holds NaN or Inf on rank 1" for event in events)
