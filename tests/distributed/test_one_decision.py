"""All ranks take the same decision: with DDP, FSDP2, tensor parallel, and FSDP2 over tensor parallel."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.parametrize(
    ("kind", "size"),
    [("ddp", 2), ("fsdp", 2), *slow(("fsdp_tp", 4), ("tp", 2))],
)
def test_guarded_run_is_bit_identical_and_all_ranks_handle_a_fault_alike(run, kind, size):
    run(f"{kind}/agreement_programs.everything:{size}")
