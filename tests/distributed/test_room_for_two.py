"""Room for exactly two copies on one of two ranks: all ranks keep two, and a rollback is exact."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.parametrize(
    "case", ["ddp-host", "ddp-host-shares", *slow("fsdp-device", "ddp-device", "ddp-device-shares", "fsdp-host")]
)
def test_rollback_is_exact_with_room_for_two_copies_on_one_rank(run, case):
    run(f"{case}/snapshot_programs.room_for_two:2")
