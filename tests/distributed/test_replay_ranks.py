"""Where a bad step came from, on several ranks."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.parametrize("kind", ["ddp", *slow("fsdp")])
def test_a_nan_on_one_rank_is_judged_alike_on_all_and_bundled_by_that_rank(run, kind):
    run(f"{kind}/replay_programs.one_rank:2")
