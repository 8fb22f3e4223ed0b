"""A model that grows while it trains: each checkpoint describes what it holds, and the grown model resumes from it."""

from __future__ import annotations

import pytest
import torch
from cases import Net
from ended import often
from parts import Parts
from resumed import Dies, assert_continued, copied, entries_of, good_of, idle, live
from test_parts import one
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from holdfast.core.base.errors import SetupError

GROWS_AT = 5


class Growing(Net):
    """A net that may get another block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + self.block(x) if hasattr(self, "block") else y


def small() -> Parts:
    model = Growing()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    made = one(model, optimizer)
    made.schedulers, made.intervals = [LambdaLR(optimizer, lambda s: 1 / (1 + s / 50))], ["step"]
    return made


def grow(parts: Parts, *, trained: bool = True) -> None:
    """Add a block with parameters, buffers that change, and a mask of -inf; it is the same in every process."""
    state = torch.get_rng_state()
    torch.manual_seed(7)
    width = parts.model.first.in_features
    parts.model.block = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    parts.model.block.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    torch.set_rng_state(state)
    if trained:
        parts.optimizers[0].add_param_group({"params": list(parts.model.block.parameters()), "lr": 3e-3})
        # A scheduler steps the groups that it knows; the new one keeps its rate.
        parts.schedulers[0].base_lrs.append(3e-3)
        parts.schedulers[0].lr_lambdas.append(lambda s: 1.0)
    else:
        parts.model.block.requires_grad_(False)


def large() -> Parts:
    parts = small()
    grow(parts)
    return parts


def grows(guard, parts, step):
    if step.number == GROWS_AT and not hasattr(parts.model, "block"):
        guard.flush()
        grow(parts)
    idle(guard)


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A run that grows after step 5, whole, and as a kill after step 11 leaves it."""
    folder = tmp_path_factory.mktemp("grown")
    dies = Dies(folder, 11)

    def between(guard, parts, step):
        grows(guard, parts, step)
        dies(guard, parts, step)

    return live(often(small), folder / "whole", between=between), dies.died[11]


def test_the_grown_model_resumes_bit_for_bit(grown, tmp_path):
    whole, path = grown
    life = live(often(large), copied(path, tmp_path / "run"))
    assert life.began == 9
    assert_continued(life, whole)


def test_the_grown_model_resumes_by_load_path_too(grown, tmp_path):
    whole, path = grown
    path = copied(path, tmp_path / "run")
    recipe = often(large, checkpoint={"load_path": str(path / "checkpoints" / "step_00000006")})
    life = live(recipe, path)
    assert life.began == 6
    assert_continued(life, whole)


@pytest.mark.parametrize("by_load_path", [False, True])
def test_the_smaller_model_is_refused_with_the_names_that_it_lacks(by_load_path, grown, tmp_path):
    path = copied(grown[1], tmp_path / "run")
    named = {"load_path": str(path / "checkpoints" / "step_00000009")} if by_load_path else {}
    with pytest.raises(
        SetupError, match=r"block\.0\.weight, block\.0\.bias.* and 2 more, which this model does not have"
    ):
        live(often(small, checkpoint=named), path)
    assert [e.name for e in good_of(path)][:2] == ["step_00000009", "step_00000006"], "nothing was marked"


def test_a_grown_model_is_refused_by_a_checkpoint_from_before(grown, tmp_path):
    path = copied(grown[1], tmp_path / "run")
    named = {"load_path": str(path / "checkpoints" / "step_00000003")}
    with pytest.raises(SetupError, match=r"block\.0\.weight, .* did not exist when it was saved"):
        live(often(large, checkpoint=named), path)


def test_the_smaller_model_resumes_from_before_and_grows_again(grown, tmp_path):
    whole, path = grown
    path = copied(path, tmp_path / "run")
    recipe = often(small, checkpoint={"load_path": str(path / "checkpoints" / "step_00000003")})
    life = live(recipe, path, between=grows)
    assert life.began == 3
    assert_continued(life, whole)


def test_each_manifest_describes_what_its_checkpoint_holds(grown):
    _, path = grown
    about = {e.step: e.manifest.about for e in entries_of(path).values()}
    assert [len(about[step]["optimizer_groups"][0]) for step in (0, 3, 6, 9)] == [1, 1, 2, 2]
    grown_by = sum(p.numel() for p in large().model.block.parameters())
    assert about[6]["parameters"] - about[3]["parameters"] == grown_by == about[9]["trained"] - about[0]["trained"]
    assert about[6]["optimizer_groups"][0][1]["lr"] == about[9]["optimizer_groups"][0][1]["lr"] == 3e-3
    assert about[9]["optimizer_groups"][0][0] == about[0]["optimizer_groups"][0][0]


def test_a_frozen_block_is_described_and_restored_too(tmp_path):
    def grows_frozen(guard, parts, step):
        if step.number == GROWS_AT and not hasattr(parts.model, "block"):
            guard.flush()
            grow(parts, trained=False)
        idle(guard)

    def with_frozen_block():
        parts = small()
        grow(parts, trained=False)
        return parts

    dies = Dies(tmp_path, 11)

    def between(guard, parts, step):
        grows_frozen(guard, parts, step)
        dies(guard, parts, step)

    whole = live(often(small), tmp_path / "whole", between=between)
    life = live(often(with_frozen_block), dies.died[11])
    assert life.began == 9
    assert_continued(life, whole)
