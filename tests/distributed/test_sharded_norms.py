"""Sharded gradients are measured and clipped exactly as torch does, and on several meshes, which torch refuses."""

from __future__ import annotations


def test_two_ranks_clip_as_torch_does_and_their_shares_add_up(run):
    run("norm_programs.norms_of_two:2")


def test_four_ranks_clip_on_one_mesh_and_on_several(run):
    run("norm_programs.norms_of_four:4")
