"""The transformer: it does not look ahead, positions count by their distance, and its options do what they say."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from torch.nn import functional as F

from holdfast.reference.config import PACKAGED, ModelSection, load
from holdfast.reference.model import Transformer, flops_per_token, next_token_loss, rotate

SMALL = ModelSection(vocab_size=61, context=24, layers=2, heads=2, width=16)


def build(config: ModelSection = SMALL, scale: float = 10.0) -> Transformer:
    """A model whose weights are large enough for every part of it to matter."""
    torch.manual_seed(0)
    model = Transformer(config).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(scale)
    return model


def some_tokens(batch: int = 3, length: int = 24, vocab_size: int = 61) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def with_(**changes) -> ModelSection:
    return msgspec.structs.replace(SMALL, **changes)


# ---- what depends on what


@pytest.mark.parametrize("config", [SMALL, with_(qk_norm=True), with_(tie_embeddings=False, heads=4)])
@pytest.mark.parametrize("changed", [1, 11, 23])
def test_later_token_does_not_change_earlier_logits(config, changed):
    model, tokens = build(config), some_tokens()
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 61
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).any(-1).all()  # and every later one does change


def test_sequences_of_a_batch_do_not_see_each_other():
    model, tokens = build(), some_tokens()
    torch.testing.assert_close(model(tokens)[1:2], model(tokens[1:2]), rtol=1e-12, atol=1e-12)


def test_logits_of_a_prefix_are_those_of_the_whole():
    model, tokens = build(), some_tokens()
    torch.testing.assert_close(model(tokens)[:, :10], model(tokens[:, :10]), rtol=1e-12, atol=1e-12)


def test_order_of_the_tokens_matters():
    model, tokens = build(), some_tokens()
    swapped = tokens.clone()
    swapped[:, [2, 7]] = tokens[:, [7, 2]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], rtol=1e-6)


# ---- RoPE


def angles(length: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    model = Transformer(with_(context=length)).double()
    return model.cos, model.sin


def test_score_of_two_rotated_vectors_depends_on_their_distance_only():
    cos, sin = angles()
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    at = [rotate(v.expand(24, 8), cos, sin) for v in (q, k)]
    scores = at[0] @ at[1].T
    for distance in range(-20, 21):
        diagonal = torch.diagonal(scores, distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert scores.std() > 0.1  # and on that it does depend


def test_rotation_keeps_lengths_and_leaves_the_first_position_alone():
    cos, sin = angles()
    x = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(turned[0], x[0])
    assert not torch.allclose(turned[1:], x[1:], atol=1e-3)


def test_rotation_keeps_the_dtype():
    cos, sin = angles()
    assert rotate(torch.ones(24, 8, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16


# ---- options


def test_qk_norm_makes_attention_independent_of_the_size_of_queries_and_keys():
    tokens = some_tokens()
    for qk_norm in (False, True):
        model = build(with_(qk_norm=qk_norm))
        before = model(tokens)
        with torch.no_grad():
            for block in model.blocks:
                block.attention.qkv.weight[: 2 * 16] *= 100  # queries and keys, not values
        same = torch.allclose(before, model(tokens), rtol=1e-3, atol=1e-3)
        assert same is qk_norm


def test_qk_norm_adds_two_trained_vectors_a_block():
    count = [sum(p.numel() for p in Transformer(with_(qk_norm=on)).parameters()) for on in (False, True)]
    assert count[1] - count[0] == 2 * 2 * (16 // 2)


def test_tied_embeddings_share_their_storage_and_are_counted_once():
    tied, apart = Transformer(SMALL), Transformer(with_(tie_embeddings=False))
    assert tied.head.weight is tied.embedding.weight
    assert apart.head.weight.data_ptr() != apart.embedding.weight.data_ptr()
    count = [sum(p.numel() for p in m.parameters()) for m in (tied, apart)]
    assert count[1] - count[0] == 61 * 16


def test_hidden_size_defaults_to_eight_thirds_of_the_width():
    assert Transformer(SMALL).blocks[0].feed_forward.down.in_features == 64
    assert Transformer(with_(width=96)).blocks[0].feed_forward.down.in_features == 256
    assert Transformer(with_(hidden=10)).blocks[0].feed_forward.down.in_features == 10


def test_same_seed_is_the_same_model_and_another_is_not():
    models = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        models.append(Transformer(SMALL))
    a, b, c = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_untrained_model_has_the_loss_of_a_uniform_guess():
    model = Transformer(SMALL)
    tokens = some_tokens(length=24)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:], torch.ones(3))
    assert float(loss.detach()) == pytest.approx(math.log(61), rel=0.05)


def test_every_parameter_gets_a_gradient():
    for config in (SMALL, with_(qk_norm=True, tie_embeddings=False)):
        model, tokens = Transformer(config), some_tokens()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:], torch.ones(3)).backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


# ---- the loss


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(6)
    return torch.randn(4, 9, 61, generator=generator), torch.randint(0, 61, (4, 9), generator=generator)


def test_loss_with_weights_of_one_is_cross_entropy(logits):
    found = next_token_loss(*logits, torch.ones(4))
    torch.testing.assert_close(found, F.cross_entropy(logits[0].view(-1, 61), logits[1].view(-1)))


def test_weight_of_a_sequence_weighs_its_loss(logits):
    each = torch.stack([F.cross_entropy(row, targets) for row, targets in zip(*logits, strict=True)])
    weights = torch.tensor([0.0, 1.0, 2.0, 0.5])
    torch.testing.assert_close(next_token_loss(*logits, weights), (each * weights).mean())


def test_nan_weight_makes_the_loss_nan(logits):
    assert next_token_loss(*logits, torch.tensor([1.0, math.nan, 1.0, 1.0])).isnan()


def test_z_loss_adds_the_mean_squared_log_partition(logits):
    plain, with_z = (next_token_loss(*logits, torch.ones(4), z) for z in (0.0, 0.01))
    torch.testing.assert_close(with_z - plain, 0.01 * logits[0].logsumexp(-1).square().mean())
    assert with_z > plain


def test_z_loss_pulls_the_logits_towards_a_partition_of_one(logits):
    x = (logits[0] + 5).requires_grad_()
    next_token_loss(x, logits[1], torch.ones(4), 1.0).backward()
    assert x.grad is not None
    assert (x.grad.sum(-1) > 0).all()  # a step down the gradient lowers every partition


def test_loss_of_half_precision_logits_is_computed_in_full(logits):
    assert next_token_loss(logits[0].bfloat16(), logits[1], torch.ones(4), 1e-4).dtype == torch.float32


# ---- sizes


@pytest.mark.parametrize(
    ("name", "least", "most"), [("tiny", 0.8e6, 1e6), ("160m", 120e6, 200e6), ("1.4b", 1.2e9, 1.6e9)]
)
def test_shipped_configuration_has_about_the_parameters_of_its_name(name, least, most):
    config = load(PACKAGED / f"{name}.toml", []).model
    with torch.device("meta"):
        model = Transformer(config)
    assert least < sum(p.numel() for p in model.parameters()) < most


def test_flops_count_every_matrix_once_and_the_attention_scores():
    blocks = 2 * (4 * 16 * 16 + 3 * 16 * 64)
    scores = 6.0 * 2 * 24 * 16
    for config in (SMALL, with_(tie_embeddings=False)):
        assert flops_per_token(Transformer(config), config) == 6.0 * (blocks + 61 * 16) + scores
