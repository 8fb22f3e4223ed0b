"""Loops of the user's own on two ranks: harmless, and exact after a fault on one of them."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.shows("ranks")
@pytest.mark.parametrize(
    ("kind", "loop"), [("ddp", "wrap"), *slow(("ddp", "classic"), ("fsdp", "wrap"), ("fsdp", "classic"))]
)
def test_loops_of_ones_own_are_exact_on_two_ranks(run, kind, loop):
    run(f"{kind}-{loop}/own_loop_programs.exact:2")
