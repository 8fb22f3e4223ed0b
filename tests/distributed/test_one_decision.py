"""All ranks take the same decision: with DDP, FSDP2, tensor parallel, and FSDP2 over tensor parallel."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.shows("steps", "ranks")
@pytest.mark.parametrize(
    ("case", "size"),
    [
        *(("ddp-host", 2), ("fsdp-device", 2)),
        *slow(("ddp-device", 2), ("fsdp-host", 2), ("tp-host", 2), ("tp-device", 2)),
        *slow(("fsdp_tp-host", 4), ("fsdp_tp-device", 4)),
    ],
)
def test_guarded_run_is_bit_identical_and_all_ranks_handle_a_fault_alike(run, case, size):
    run(f"{case}/agreement_programs.everything:{size}")
