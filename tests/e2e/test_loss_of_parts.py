"""The loss of the parts is compared with that of smaller ones. So what is no mean is found, and a wrong splitter."""

from __future__ import annotations

import logging

import pytest
import torch
from test_out_of_memory import BOUND, LENGTH, Rows, assert_close, contrastive, difference, token_loss, train
from torch import nn

import holdfast
from holdfast.diagnosis.model.run_journal import read_run_journal
from holdfast.runtime.data.pieces import misplaced_samples
from holdfast.runtime.step.pipeline import GuardedPipeline


def class_weighted(model, batch):
    return nn.functional.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten(), torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0])
    )


def summed(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum") / 100


def over_a_mask(model, batch):
    losses = nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    mask = torch.arange(LENGTH) < 1 + batch[0][:, 0, 0].abs().mul(9).long()[:, None]
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize("loss", [class_weighted, summed, over_a_mask, contrastive])
def test_loss_that_is_no_mean_is_found_if_memory_runs_out_in_the_forward(loss, caplog):
    plain = train(loss=loss)
    nbytes = int(0.6 * plain.limit.peak)
    with caplog.at_level(logging.WARNING, "holdfast"):
        run = train(nbytes, loss=loss)
    assert run.limit.raised == 1 and run.statuses[:2] == ["replayed", "committed"]
    loud = [r.message for r in caplog.records if "A SPLIT MICRO-BATCH IS NOT EXACT HERE" in r.message]
    assert len(loud) == 1 and "the parts give a loss of" in loud[0]
    with pytest.raises(holdfast.StepError, match="allow_inexact = false"):
        train(nbytes, loss=loss, config={"oom": {"allow_inexact": False}})


def smoothed(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=0.1)


def centred(model, batch):
    """Give a loss of about zero, as a policy gradient does: its parts differ from it by more than itself."""
    return (model(batch[0]).mean((1, 2)) * (1e-4 + torch.arange(len(batch[0])).float().fmod(2) - 0.5)).mean()


@pytest.mark.parametrize("loss", [smoothed, centred])
def test_loss_that_is_a_mean_is_not_reported(loss, caplog):
    rows = Rows(ignored=lambda n: n % 7 if loss is smoothed else 0)
    plain = train(loss=loss, rows=rows)
    with caplog.at_level(logging.WARNING, "holdfast"):
        run = train(int(0.6 * plain.limit.peak), loss=loss, rows=rows, config={"oom": {"allow_inexact": False}})
    assert run.limit.raised and difference(run, plain) < BOUND
    assert "NOT EXACT" not in caplog.text and "not verified" not in caplog.text


def first_twice(batch, n):
    return [tuple(t[: len(t) // n] for t in batch)] * n


def other_labels(batch, n):
    return list(zip(batch[0].chunk(n), batch[1].flip(0).chunk(n), strict=True))


def without_the_rest(batch, n):
    size = (len(batch[0]) - 1) // n
    return [tuple(t[i * size : (i + 1) * size] for t in batch) for i in range(n)]


@pytest.mark.parametrize("splitter", [first_twice, other_labels, without_the_rest])
def test_splitter_that_is_wrong_ends_the_run_before_it_trains(splitter):
    model = []

    def made():
        model.append(nn.Linear(4, 5))
        return model[-1]

    nbytes = int(0.6 * train(model=made, steps=1).limit.peak)
    with pytest.raises(holdfast.StepError, match="nothing was applied"):
        train(nbytes, model=made, setup=lambda guard: guard.set_splitter(splitter))
    torch.manual_seed(0)
    assert torch.equal(model[1].weight, nn.Linear(4, 5).weight)


def test_the_trial_leaves_no_trace(tmp_path):
    """Buffers, registered counters and random state are those before it, and its in-place changes reach no part."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    def run(nbytes):
        seen, models = [], []

        def loss(model, batch):
            models.append(model)
            batch[0].mul_(0.5)
            seen[0].samples += len(batch[0])
            return token_loss(model, batch)

        def setup(guard):
            seen.append(guard.counters(samples=0))

        ended = train(nbytes, model=Counting, loss=loss, setup=setup, when=lambda step, part: step == 2, steps=4)
        return ended, int(models[-1].calls), seen[0].samples

    plain, calls, samples = run(None)
    split, split_calls, split_samples = run(int(0.6 * plain.limit.peak))
    assert split.limit.raised == 1 and difference(split, plain) < BOUND
    assert (calls, split_calls) == (4, 4 + 3)  # steps 2 to 4 have two parts
    assert split_samples == samples + 8  # of the try that failed


def test_loop_that_needs_gradients_in_its_forward_is_served_again_without_a_trial(caplog):
    def penalized(model, batch):
        loss = token_loss(model, batch)
        (gradient,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
        return loss + gradient.square().sum()

    plain = train(loss=penalized, steps=3)
    with caplog.at_level(logging.WARNING, "holdfast"):
        run = train(int(0.6 * plain.limit.peak), loss=penalized, steps=3)
    assert "That is not verified: cut otherwise, and without gradients, it fails: element 0 of tensors" in caplog.text
    assert run.statuses == ["replayed", "replayed", *["committed"] * 3] and run.sizes[-1] == [4, 4]
    assert torch.is_grad_enabled()


def test_labels_taken_out_of_the_batch_do_not_hide_its_shape(tmp_path):
    def loss(model, batch):
        labels = batch.pop("labels")
        return token_loss(model, (batch["x"], labels))

    options = {"rows": Rows(make=lambda x, y: {"x": x, "labels": y}), "loss": loss}
    plain = train(**options)
    run = train(int(0.6 * plain.limit.peak), run_dir=tmp_path / "run", **options)
    assert run.limit.raised == 1
    assert_close(run, plain)
    assert "of shape 8x32x4,8x32 in 2 parts" in read_run_journal(str(tmp_path / "run")).action_lines()[0]


def test_error_that_comes_with_a_part_says_so():
    """Offsets into a flattened tensor are cut like samples, and the loop fails."""

    def collate(items):
        return torch.cat([x for x, _ in items]), torch.arange(len(items)) * LENGTH, torch.stack([y for _, y in items])

    def loss(model, batch):
        x, offsets, labels = batch
        rows = torch.stack([x[start : start + LENGTH] for start in offsets - offsets[0]])
        if int(offsets[0]):
            raise ValueError("the first offset must be 0")
        return token_loss(model, (rows, labels))

    plain = train(loss=loss, collate=collate, steps=2)
    with pytest.raises(ValueError) as raised:
        train(int(0.6 * plain.limit.peak), loss=loss, collate=collate)
    assert "this was a part (256x4,4,4x32) of a micro-batch that does not fit" in raised.value.__notes__[0]


@pytest.mark.parametrize("as_item", [lambda x, y: x, lambda x, y: {"x": x}], ids=["tensors", "dicts"])
def test_samples_of_any_length_are_kept_whole_and_count_alike(as_item):
    """Some are as long as there are samples in the batch: they are no columns."""

    def collate(items):
        lengths = range(5, 5 + len(items))
        inputs = [as_item(x[:length], y) for length, (x, y) in zip(lengths, items, strict=True)]
        return inputs, [y[:length].numpy() for length, (x, y) in zip(lengths, items, strict=True)]

    def loss(model, batch):
        inputs = [each["x"] if isinstance(each, dict) else each for each in batch[0]]
        pairs = zip(inputs, batch[1], strict=True)
        return sum(nn.functional.cross_entropy(model(x), torch.from_numpy(y)) for x, y in pairs) / len(inputs)

    config = {"oom": {"allow_inexact": False}}
    plain = train(loss=loss, collate=collate)
    run = train(int(0.7 * plain.limit.peak), loss=loss, collate=collate, config=config)
    assert run.limit.raised and difference(run, plain) < BOUND


def test_arrays_in_a_batch_are_split():
    def collate(items):
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]).numpy()

    def loss(model, batch):
        return token_loss(model, (batch[0], torch.from_numpy(batch[1])))

    plain = train(loss=loss, collate=collate)
    run = train(int(0.6 * plain.limit.peak), loss=loss, collate=collate)
    assert run.limit.raised and difference(run, plain) < BOUND


def strided(batch, parts):
    return [{name: value[i::parts] for name, value in batch.items()} for i in range(parts)]


def test_splitter_that_puts_samples_into_another_order_may_leave_equal_rows_alike():
    def collate(items):
        x, y = (torch.stack([item[i] for item in items]) for i in range(2))
        return {"x": x, "labels": y, "attention_mask": torch.ones(x.shape[:2], dtype=torch.long)}

    plain = train(collate=collate)
    run = train(int(0.6 * plain.limit.peak), collate=collate, setup=lambda guard: guard.set_splitter(strided))
    assert run.limit.raised and difference(run, plain) < BOUND


def test_offsets_of_packed_samples_have_one_more_in_each_part():
    batch = {"tokens": torch.arange(12), "offsets": torch.tensor([0, 3, 6, 9, 12])}
    cuts = [{"tokens": batch["tokens"][k : k + 6], "offsets": torch.tensor([0, 3, 6])} for k in (0, 6)]
    assert misplaced_samples(batch, cuts, 4) is None
    assert misplaced_samples({"x": torch.arange(4)}, [{"x": torch.arange(2)}, {"x": torch.arange(1)}], 4) is not None


def test_memory_that_runs_out_before_the_comparison_costs_no_further_split(monkeypatch, caplog):
    plain = train()
    nbytes, capture = int(0.6 * plain.limit.peak), GuardedPipeline.capture_between_steps

    def fail(self, **options):
        monkeypatch.setattr(GuardedPipeline, "capture_between_steps", capture)
        raise torch.OutOfMemoryError("no room for copies")

    monkeypatch.setattr(GuardedPipeline, "capture_between_steps", fail)
    with caplog.at_level(logging.WARNING, "holdfast"):
        run = train(nbytes)
    assert difference(run, plain) < BOUND
    assert [r.message for r in caplog.records if "That is not verified" in r.message]
    assert not [r.message for r in caplog.records if "in 4 parts" in r.message]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_samples_of_a_type_that_has_no_order_are_not_judged(dtype):
    batch = {"x": torch.arange(4.0).to(dtype)}
    assert misplaced_samples(batch, [{"x": batch["x"][2:]}, {"x": batch["x"][:2]}], 4) is None
