"""The data order depends on sample number and seed alone, has exact shares, and repeats nothing within a pass."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.errors import DataError
from holdfast.reference.mixture import BLOCK, Mixture, MixtureStage, block_quotas
from holdfast.reference.tokens import Tokens
from marks import examples

CONTEXT = 8


def source(sequences: int, number: int = 0, eval_tokens: int = CONTEXT + 1) -> Tokens:
    """Tokens that all differ: token t of source s is s * 1,000,000 + t, so a sample shows its source."""
    size = sequences * CONTEXT + 1 + eval_tokens
    return Tokens(f"source {number}", number * 1_000_000 + np.arange(size, dtype=np.uint32), 2**32, "numbers")


def mixture(*sequences: int, weights: tuple[float, ...] | None = None, seed: int = 0, stages=(), share=1e-9) -> Mixture:
    sources = [source(count, number) for number, count in enumerate(sequences)]
    first = MixtureStage(0, block_quotas(weights or (1.0,) * len(sources)))
    return Mixture(sources, CONTEXT, 10**9, seed, [first, *stages], share)


def start(sample) -> tuple[int, int]:
    """The source of a sample, and which of its sequences it is."""
    token = int(sample["tokens"][0])
    assert token % 1_000_000 % CONTEXT == 0
    return token // 1_000_000, token % 1_000_000 // CONTEXT


# ---- a function of the number and the seed


def test_sample_does_not_depend_on_earlier_reads():
    a, b = mixture(50, 70, 90, weights=(1, 2, 3)), mixture(50, 70, 90, weights=(1, 2, 3))
    numbers = [0, 1, 999, 1000, 1001, 5555, 12_345]
    forwards = [a[n] for n in numbers]
    for n in (17, 12_346, 4000):
        b[n]
    backwards = [b[n] for n in reversed(numbers)][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert torch.equal(one["targets"], other["targets"])
        assert one["source"] == other["source"]


def test_other_seed_gives_another_order():
    orders = [[start(mixture(40, seed=seed)[n])[1] for n in range(40)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_each_pass_has_a_new_order():
    data = mixture(40)
    passes = [[start(data[n])[1] for n in range(k * 40, (k + 1) * 40)] for k in range(3)]
    assert len({tuple(p) for p in passes}) == 3
    assert all(sorted(p) == list(range(40)) for p in passes)
    assert passes[0] != sorted(passes[0])


def test_sources_of_equal_length_have_different_orders():
    data = mixture(40, 40)
    taken: dict[int, list[int]] = {0: [], 1: []}
    for n in range(200):
        where, sequence = start(data[n])
        taken[where].append(sequence)
    assert taken[0][:40] != taken[1][:40]


def test_targets_are_the_tokens_one_later():
    sample = mixture(20)[3]
    assert sample["tokens"].shape == sample["targets"].shape == (CONTEXT,)
    assert torch.equal(sample["targets"], sample["tokens"] + 1)
    assert sample["tokens"].dtype == torch.int64
    assert float(sample["weight"]) == 1.0


def test_length_is_the_samples_asked_for():
    assert len(Mixture([source(3)], CONTEXT, 77, 0, [MixtureStage(0, block_quotas((1.0,)))], 0.1)) == 77


# ---- shares

amounts = st.floats(min_value=1e-6, max_value=1e6, allow_nan=False)


@settings(max_examples=examples(300), derandomize=True, deadline=None)
@given(st.lists(amounts, min_size=1, max_size=12).map(tuple))
def test_quotas_add_up_and_are_off_by_less_than_one(weights):
    shares = block_quotas(weights)
    assert sum(shares) == BLOCK
    total = sum(weights)
    assert all(abs(share - BLOCK * w / total) < 1 for share, w in zip(shares, weights, strict=True))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((1.0,), (1000,)),
        ((1.0, 1.0, 1.0), (334, 333, 333)),
        ((0.8, 0.2), (800, 200)),
        ((0.0, 3.0), (0, 1000)),
        ((1.0, 998.5, 0.5), (1, 999, 0)),
        ((1e-300, 1e-300), (500, 500)),
    ],
)
def test_quotas_are_these(weights, shares):
    assert block_quotas(weights) == shares


@settings(max_examples=15, derandomize=True, deadline=None)
@given(
    st.lists(st.floats(min_value=0.001, max_value=1000), min_size=1, max_size=5).map(tuple),
    st.integers(min_value=0, max_value=50),
    st.integers(min_value=0, max_value=3),
)
def test_every_block_has_exactly_its_quotas(weights, block, seed):
    data = mixture(*(30 + 7 * i for i in range(len(weights))), weights=weights, seed=seed)
    counts = Counter(data.locate(n)[0] for n in range(block * BLOCK, (block + 1) * BLOCK))
    assert tuple(counts[i] for i in range(len(weights))) == block_quotas(weights)


@settings(max_examples=10, derandomize=True, deadline=None)
@given(st.lists(st.floats(min_value=0.1, max_value=10), min_size=1, max_size=4).map(tuple), st.integers(0, 3))
def test_samples_of_a_source_are_counted_without_gaps(weights, seed):
    other = MixtureStage(1, block_quotas(weights[::-1]))
    data = mixture(*(30,) * len(weights), weights=weights, seed=seed, stages=[other])
    seen = [0] * len(weights)
    for n in range(3 * BLOCK):
        where, k = data.locate(n)
        assert k == seen[where]
        seen[where] += 1


def test_every_sequence_of_a_source_is_seen_once_before_any_is_seen_twice():
    data = mixture(37, 211, weights=(0.3, 0.7))
    passes: dict[int, list[int]] = {0: [], 1: []}
    for n in range(2500):
        where, sequence = start(data[n])
        passes[where].append(sequence)
    for where, count in ((0, 37), (1, 211)):
        order = passes[where]
        assert len(order) > 2 * count
        for begin in range(0, len(order) - count, count):
            assert sorted(order[begin : begin + count]) == list(range(count))


# ---- stages


def test_stage_changes_the_mix_from_its_block_on_and_not_before():
    stages = [MixtureStage(2, block_quotas((0.0, 1.0))), MixtureStage(5, block_quotas((0.5, 0.5)))]
    data = mixture(50, 50, weights=(0.9, 0.1), stages=stages)
    mixes = [Counter(data.locate(n)[0] for n in range(b * BLOCK, (b + 1) * BLOCK))[0] for b in range(7)]
    assert mixes == [900, 900, 0, 0, 0, 500, 500]


def test_stage_does_not_change_earlier_samples():
    plain = mixture(50, 50, weights=(0.9, 0.1))
    staged = mixture(50, 50, weights=(0.9, 0.1), stages=[MixtureStage(2, block_quotas((0.0, 1.0)))])
    assert [plain.locate(n) for n in range(0, 2 * BLOCK, 7)] == [staged.locate(n) for n in range(0, 2 * BLOCK, 7)]


# ---- held out


def tokens_of(batches) -> set[int]:
    return {int(t) for batch in batches for rows in (batch["tokens"], batch["targets"]) for t in rows.flatten()}


@pytest.mark.parametrize("share", [1e-9, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("sequences", [(2,), (60,), (61, 100, 7)])
def test_held_out_sequences_never_overlap_training_sequences(sequences, share):
    sources = [source(count, number, eval_tokens=1 + 25 * CONTEXT) for number, count in enumerate(sequences)]
    data = Mixture(sources, CONTEXT, 10**6, 0, [MixtureStage(0, block_quotas((1.0,) * len(sources)))], share)
    held = tokens_of(data.held_out_batches(batch_size=16, batches=8))
    trained = tokens_of([data[n] for n in range(2500)])
    assert held.isdisjoint(trained)
    assert {t // 1_000_000 for t in held} == set(range(len(sources)))


def test_held_out_sequences_are_the_same_each_time_and_for_every_seed():
    first = mixture(60, 90).held_out_batches(4, 3)
    second = mixture(60, 90, seed=5).held_out_batches(4, 3)
    assert len(first) == 3
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
        assert a["tokens"].shape == (4, CONTEXT)
        assert torch.equal(a["targets"], a["tokens"] + 1)
        assert torch.equal(a["weight"], torch.ones(4))


@pytest.mark.parametrize("held", [97, 128, 7918, 7919, 2 * 7919])
def test_no_held_out_sequence_repeats_before_all_are_used(held):
    tokens = source(20, eval_tokens=held * CONTEXT + 1)
    share = (held * CONTEXT + 1.5) / len(tokens)
    data = Mixture([tokens], CONTEXT, 10**6, 0, [MixtureStage(0, (BLOCK,))], share)
    starts = [int(row[0]) for batch in data.held_out_batches(16, 6) for row in batch["tokens"]]
    assert len(set(starts)) == 96


# ---- refusals


@pytest.mark.parametrize("tokens", [0, 1, 2 * CONTEXT, 2 * CONTEXT + 1])
def test_source_too_short_for_a_training_sequence_is_refused(tokens):
    short = Tokens("short.tokens", np.arange(tokens, dtype=np.uint32), 2**32, "numbers")
    with pytest.raises(DataError, match=rf"short.tokens: {tokens} tokens are too few .* shorter \[model\] context"):
        Mixture([source(50), short], CONTEXT, 100, 0, [MixtureStage(0, (500, 500))], 0.05)


def test_shortest_source_that_can_be_used_gives_its_one_sequence():
    data = Mixture([source(1)], CONTEXT, 100, 0, [MixtureStage(0, (BLOCK,))], 1e-9)
    assert [start(data[n]) for n in range(5)] == [(0, 0)] * 5
    assert tokens_of(data.held_out_batches(2, 1)).isdisjoint(tokens_of([data[0]]))
