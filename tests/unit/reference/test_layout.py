"""[distributed] resolved for a number of ranks."""

from __future__ import annotations

import pytest

from holdfast.core.base.errors import ConfigError
from holdfast.reference.config import parse
from holdfast.reference.layout import ParallelLayout, resolve_layout


def fitted(size, rank=0, batch_size=16, **distributed):
    return resolve_layout(
        parse({"distributed": distributed, "train": {"batch_size": batch_size}}, "mine.toml"), size, rank
    )


def test_default_layout_is_one_copy_per_rank():
    assert fitted(1) == ParallelLayout() and fitted(1).size == 1
    assert fitted(4, 3) == ParallelLayout(data=4, rank=3)


def test_number_of_copies_is_derived_from_shard_and_tensor():
    assert fitted(8, shard=2, tensor=2) == ParallelLayout(data=2, shard=2, tensor=2)
    assert fitted(4, shard=2, tensor=2) == ParallelLayout(data=1, shard=2, tensor=2)


def test_consecutive_ranks_form_a_tensor_group_and_read_the_same_share():
    layouts = [fitted(8, rank, shard=2, tensor=2) for rank in range(8)]
    assert [layout.share for layout in layouts] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {layout.shares for layout in layouts} == {4}


@pytest.mark.parametrize(
    ("size", "distributed", "expected"),
    [
        (
            2,
            {"data": 4},
            "[distributed] data = 4 x shard = 1 x tensor = 1 is 4 ranks, but there are 2: start 4, or set data = 0 to "
            "derive it",
        ),
        (
            1,
            {"shard": 2, "tensor": 2},
            "[distributed] shard = 2 x tensor = 2 is 4 ranks, but there is 1: start a multiple of 4, or "
            "reduce shard or tensor",
        ),
        (
            6,
            {"tensor": 4},
            "[distributed] shard = 1 x tensor = 4 is 4 ranks, but there are 6: start a multiple of 4, or "
            "reduce shard or tensor",
        ),
        (
            6,
            {"tensor": 2},
            "[train] batch_size = 16 counts all ranks, and cannot be split evenly over 3 (data 3 x shard 1): make it a "
            "multiple of 3",
        ),
    ],
)
def test_layout_that_does_not_fit_the_ranks_is_refused_with_its_numbers_and_the_cure(size, distributed, expected):
    with pytest.raises(ConfigError) as refused:
        fitted(size, **distributed)
    assert refused.value.errors == [expected]


def test_layout_is_printed_without_dimensions_of_one():
    assert str(ParallelLayout()) == "one rank"
    assert str(ParallelLayout(data=2, tensor=4)) == "data 2 x tensor 4"
