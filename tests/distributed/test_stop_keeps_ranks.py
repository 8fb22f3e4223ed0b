"""Several ranks keep the same certified state at a stop, and save the same steps by time."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.parametrize("kind", ["ddp", *slow("fsdp")])
def test_ranks_agree_on_the_state_that_a_stop_keeps_and_on_the_steps_saved_by_time(run, kind):
    run(f"{kind}/stop_programs.everything:2")
