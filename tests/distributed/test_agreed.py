"""Many ranks, one decision: data parallel, fully sharded, tensor parallel, and both together."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("fsdp", 2), ("tp", 2), ("fsdp_tp", 4)])
def test_guarded_is_bit_identical_and_a_fault_on_one_rank_is_met_alike_by_all(run, kind, size):
    run(f"{kind}/agreed.everything:{size}")
