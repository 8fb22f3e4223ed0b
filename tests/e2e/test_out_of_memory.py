"""A step that runs out of memory is undone and served again in parts: the run ends as if it had fitted.

The limit counts the bytes of real tensors and raises torch's own error, inside forward, backward, update or snapshot.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.diagnosis.model.run_journal import read_run_journal
from holdfast.drill.memory_limit import MemoryLimit

BOUND = 1e-6
SAMPLES, LENGTH, STEPS = 96, 32, 8


class Rows(Dataset):
    """Sequences with as many ignored labels as the row says."""

    def __init__(self, ignored=lambda n: 0, make=lambda x, y: (x, y), dyadic=False):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, LENGTH, 4, generator=generator)
        if dyadic:  # sums of such numbers are exact in any order
            self.x = torch.randint(-2, 3, self.x.shape, generator=generator).float()
        self.y = torch.randint(0, 5, (SAMPLES, LENGTH), generator=generator)
        for n in range(SAMPLES):
            self.y[n, : ignored(n)] = -100
        self.make = make

    def __len__(self):
        return SAMPLES

    def __getitem__(self, n):
        return self.make(self.x[n], self.y[n])


def token_loss(model, batch):
    x, y = (batch["x"], batch["labels"]) if isinstance(batch, dict) else (batch[0], batch[1])
    logits = model(x)
    flat = logits.view(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, y.reshape(-1))


class Run(NamedTuple):
    parameters: list[torch.Tensor]
    losses: list[float]
    limit: MemoryLimit
    summary: object
    sizes: list[list[int]]
    """the samples of each part that is trained on, step by step"""
    statuses: list[str]
    guard: holdfast.Guard


def train(
    nbytes=None,
    *,
    when=lambda step, part: True,
    rows=None,
    loss=token_loss,
    model=None,
    accumulate=1,
    parts=1,
    config=None,
    batch_size=8,
    optimizer=None,
    scaler=None,
    weight=None,
    setup=lambda guard: None,
    run_dir=None,
    steps=STEPS,
    collate=None,
    workers=0,
):
    """Train with so many bytes for the tensors of forward and backward, in the parts that `when` names."""
    torch.manual_seed(0)
    model = model() if model else nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = optimizer(model) if optimizer else torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(rows or Rows(), batch_size=batch_size, shuffle=True, collate_fn=collate, num_workers=workers)
    limit = MemoryLimit()
    guard = holdfast.Guard(
        model, optimizer, scheduler=scheduler, scaler=scaler, clip_grad_norm=1.0, config=config, run_dir=run_dir
    )
    setup(guard)
    sizes, statuses, losses = [], [], []
    with guard:
        for step in guard.steps(loader, max_steps=steps, accumulate=accumulate):
            sizes.append([])
            with step:
                for number, batch in enumerate(step.microbatches(parts)):
                    limit.nbytes = nbytes if when(step.number, number) else None
                    if torch.is_grad_enabled():
                        sizes[-1].append(len(batch["x"] if isinstance(batch, dict) else batch[0]))
                    with limit:
                        value = loss(model, batch)
                        step.backward(value, None if weight is None else weight(batch))
            statuses.append(str(step.outcome.status))
            if statuses[-1] == "committed":
                losses.append(step.outcome.signal.loss)
    return Run([p.detach().clone() for p in model.parameters()], losses, limit, guard.summary(), sizes, statuses, guard)


def difference(run, other):
    pairs = zip(run.parameters, other.parameters, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def assert_close(run, other):
    assert difference(run, other) < BOUND
    assert run.losses == pytest.approx(other.losses, rel=BOUND)


@pytest.fixture(scope="module")
def whole():
    return train()


@pytest.mark.parametrize(
    ("share", "where", "parts"),
    [(0.95, "backward", [4, 4]), (0.65, "forward", [4, 4]), (0.3, "forward", [2] * 4)],
)
def test_memory_that_runs_out_in_forward_or_backward_costs_one_retry(whole, tmp_path, share, where, parts):
    run = train(int(share * whole.limit.peak), run_dir=tmp_path / "run")
    assert_close(run, whole)
    splits = [e for e in journal(tmp_path / "run") if e.get("action") == "split"]
    assert splits[0]["where"] == where and splits[0]["step"] == 1
    assert [e["parts"] for e in splits] == [2, 4][: len(splits)] and run.limit.raised == len(splits)
    assert run.statuses == ["replayed"] * len(splits) + ["committed"] * STEPS
    assert run.sizes[-1] == parts  # learned: no further step runs out of memory
    assert run.summary.splits == len(splits) and run.summary.status == "recovered"
    assert "out of memory: micro-batches split" in str(run.summary)
    told = read_run_journal(str(tmp_path / "run")).action_lines()
    assert told[0].startswith("served micro-batches of shape 8x32x4,8x32 in 2 parts from step 1 on (out of memory in")


def test_no_memory_of_the_failed_forward_is_kept(whole):
    """The loop's own variables hold the failed forward. With it kept alive, half a batch would not fit either."""
    run = train(int(0.55 * whole.limit.peak))
    assert run.limit.raised == 1 and run.sizes[1] == [4, 4]


def test_third_of_four_micro_batches(whole):
    plain = train(accumulate=4, steps=5)
    run = train(int(0.6 * whole.limit.peak), accumulate=4, steps=5, when=lambda step, part: step == 3 and part == 2)
    assert_close(run, plain)
    assert run.limit.raised == 1
    assert run.sizes[2] == [8, 8, 8] and run.sizes[3] == [4] * 8


def test_twice_running(whole):
    """In one step, and in the step right after it."""
    run = train(int(0.35 * whole.limit.peak), when=lambda step, part: step in (2, 3))
    assert_close(run, whole)
    assert run.limit.raised == 2 and run.sizes[:4] == [[8], [8], [4], [2] * 4]
    nbytes = int(0.65 * whole.limit.peak)
    run = train(nbytes, when=lambda step, part: step in (2, 3), config={"oom": {"grow_after_steps": 1}})
    assert_close(run, whole)
    assert run.limit.raised == 2 and run.statuses[:5] == ["committed", "replayed", "committed", "replayed", "committed"]


def test_split_sums_bit_for_bit_like_the_same_parts_of_a_plain_run(whole):
    """The same parts in the same order: no bit differs from a run that asked for two parts by itself."""
    run = train(int(0.6 * whole.limit.peak))
    assert difference(run, train(parts=2)) == 0.0


def test_exact_sums_give_the_bits_of_the_whole_batch():
    """If no sum rounds, a split changes no bit at all."""

    def linear():
        model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        return model

    def loss(model, batch):
        return (model(batch[0]) * (batch[0].sum(-1, keepdim=True))).mean()

    options = {
        "rows": Rows(dyadic=True),
        "model": linear,
        "loss": loss,
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
    }
    plain = train(**options)
    run = train(int(0.7 * plain.limit.peak), **options)
    assert run.limit.raised and difference(run, plain) == 0.0


def test_one_sample_at_a_time_ends_with_advice(caplog):
    with pytest.raises(torch.OutOfMemoryError) as raised, caplog.at_level(logging.ERROR, "holdfast"):
        train(300)
    (note,) = raised.value.__notes__
    assert "with one sample at a time: the micro-batch cannot be split further" in note
    assert "activation checkpointing" in note and "nothing was applied" in note
    assert note.removeprefix("holdfast: ") in caplog.text


def test_ignored_labels_are_weighted_by_what_counts(whole):
    """Parts with 1 and 31 valid labels: a mean of means would be far off."""
    rows = Rows(ignored=lambda n: (n * 13) % LENGTH)
    plain = train(rows=rows)
    run = train(int(0.5 * whole.limit.peak), rows=rows)
    assert run.limit.raised and difference(run, plain) < BOUND


def test_part_without_any_valid_label_counts_nothing(whole):
    rows = Rows(ignored=lambda n: LENGTH if n % 2 else 0)
    plain = train(rows=rows, batch_size=2)
    run = train(int(0.2 * whole.limit.peak), rows=rows, batch_size=2, when=lambda step, part: True)
    assert run.limit.raised and difference(run, plain) < BOUND


def test_weight_of_the_loop_is_that_of_the_part(whole):
    rows = Rows(ignored=lambda n: (n * 13) % LENGTH)
    options = {"rows": rows, "accumulate": 2, "steps": 5, "weight": lambda batch: float((batch[1] != -100).sum())}
    plain = train(**options)
    run = train(int(0.5 * whole.limit.peak), **options)
    assert run.limit.raised and difference(run, plain) < BOUND


def test_sum_losses_add_up(whole):
    def loss(model, batch):
        return token_loss(model, batch) * batch[1].numel() / 100

    plain = train(loss=loss)
    run = train(int(0.5 * whole.limit.peak), loss=loss, config={"oom": {"loss": "sum"}})
    assert run.limit.raised
    assert_close(run, plain)


@dataclass
class Batch:
    x: torch.Tensor
    labels: torch.Tensor
    name: str = "batch"


class Pair(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor


def stack(items, make):
    return make(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))


@pytest.mark.parametrize(
    "make",
    [lambda x, y: {"x": x, "labels": y, "length": LENGTH}, Batch, Pair, lambda x, y: [x, y]],
    ids=["dict", "dataclass", "namedtuple", "list"],
)
def test_batches_of_any_kind_are_split(whole, make):
    def loss(model, batch):
        if isinstance(batch, dict | list):
            return token_loss(model, batch)
        assert not isinstance(batch, Batch) or batch.name == "batch"
        return token_loss(model, {"x": batch.x, "labels": batch.labels})

    rows, collate = Rows(ignored=lambda n: n % 7), lambda items: stack(items, make)
    sizes = []

    def measured(model, batch):
        x = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch.x
        if torch.is_grad_enabled():
            sizes.append(len(x))
        return loss(model, batch)

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = MemoryLimit(int(0.6 * whole.limit.peak))
    guard = holdfast.Guard(model, optimizer)
    with guard:
        for step in guard.steps(DataLoader(rows, batch_size=8, collate_fn=collate), max_steps=2):
            with step:
                for batch in step.microbatches():
                    with limit:
                        step.backward(measured(model, batch))
    assert sizes == [8, 4, 4, 4, 4]


def test_batch_whose_first_dimension_is_not_the_sample_is_refused_without_a_splitter(whole):
    """Cutting sequences in time instead of samples would train something else."""

    def time_first(items):
        return torch.stack([x for x, _ in items], 1), torch.stack([y for _, y in items], 1)

    def by_sample(batch, n):
        return list(zip(batch[0].tensor_split(n, 1), batch[1].tensor_split(n, 1), strict=True))

    nbytes = int(0.6 * whole.limit.peak)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(nbytes, collate=time_first)
    assert "it is not known where to split it" in raised.value.__notes__[0]
    plain = train(collate=time_first)
    run = train(nbytes, collate=time_first, setup=lambda guard: guard.set_splitter(by_sample))
    assert run.limit.raised and difference(run, plain) < BOUND


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(LENGTH), nn.Linear(8, 5))

    def forward(self, x):
        return self.inner(x)


class WithDropout(nn.Module):
    """Draws without a module that shows it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 5)

    def forward(self, x):
        return nn.functional.dropout(self.inner(x), 0.2)


@pytest.mark.parametrize(
    ("model", "named"), [(WithBatchNorm, "statistics of the micro-batch"), (WithDropout, "random")]
)
def test_what_cannot_be_exact_is_said_once_and_can_be_forbidden(caplog, model, named):
    plain = train(model=model)
    nbytes = int(0.6 * plain.limit.peak)
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(nbytes, model=model)
    loud = [r.message for r in caplog.records if "A SPLIT MICRO-BATCH IS NOT EXACT HERE" in r.message]
    assert len(loud) == 1 and named in loud[0]
    with pytest.raises((torch.OutOfMemoryError, holdfast.StepError)) as raised:
        train(nbytes, model=model, config={"oom": {"allow_inexact": False}})
    text = "".join(getattr(raised.value, "__notes__", [])) + str(raised.value)
    assert "allow_inexact = false" in text


def contrastive(model, batch):
    """Compare the samples of a micro-batch with each other."""
    z = nn.functional.normalize(model(batch[0]).mean(1), dim=-1)
    return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


def test_a_loss_that_its_parts_do_not_add_up_to_is_said_once_and_can_be_forbidden(caplog):
    """A backward that failed leaves the loss of the whole: the parts must give the same."""
    plain = train(loss=contrastive)
    nbytes = int(0.95 * plain.limit.peak)
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(nbytes, loss=contrastive)
    loud = [r.message for r in caplog.records if "A SPLIT MICRO-BATCH IS NOT EXACT HERE" in r.message]
    assert len(loud) == 1 and "the parts give a loss of" in loud[0]
    with pytest.raises(holdfast.StepError, match="allow_inexact = false"):
        train(nbytes, loss=contrastive, config={"oom": {"allow_inexact": False}})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_its_parts_add_up_to_is_not_reported(caplog, accumulate):
    rows = Rows(ignored=lambda n: n % 7)
    plain = train(rows=rows, accumulate=accumulate, steps=4)
    with caplog.at_level(logging.WARNING, "holdfast"):
        run = train(int(0.95 * plain.limit.peak), rows=rows, accumulate=accumulate, steps=4)
    assert run.limit.raised and difference(run, plain) < BOUND and "NOT EXACT" not in caplog.text


class ToyCausalLM(nn.Module):
    """Predicts the next label of each position, as the causal models of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 5)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.inner(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_labels_of_a_causal_model_inside_other_modules_count_without_the_first():
    rows = Rows(ignored=lambda n: (n * 13) % LENGTH)
    options = {
        "rows": rows,
        "model": lambda: nn.ModuleDict({"outer": nn.ModuleDict({"lm": ToyCausalLM()})}),
        "loss": lambda model, batch: model["outer"]["lm"](*batch),
    }
    plain = train(**options)
    run = train(int(0.6 * plain.limit.peak), **options)
    assert run.limit.raised and difference(run, plain) < BOUND


def test_buffers_and_random_state_are_those_before_the_step():
    """A failed forward has moved BatchNorm's statistics and drawn a mask: neither may count twice."""

    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(LENGTH), nn.Dropout(0.3), nn.Linear(8, 5))

    plain = train(model=model)
    seen = []

    class Once:
        """Memory runs out behind the last layer, once, and the whole fits after that."""

        def __call__(self, net, batch):
            value = token_loss(net, batch)
            if not seen:
                seen.append(net[1].num_batches_tracked.item())
                raise torch.OutOfMemoryError("out of memory: injected behind the last layer")
            seen.append(net[1].num_batches_tracked.item())
            return value

    def keep_whole(guard):
        guard._run.pipeline.oom._recovery.snapshots.release_device_memory = lambda: "nothing needed"

    run = train(model=model, loss=Once(), setup=keep_whole)
    assert seen[:2] == [1, 1]
    assert difference(run, plain) == 0.0


def test_policy_can_forbid_it(whole):
    for config in ({"oom": {"action": "stop"}}, {"recover": {"mode": "observe"}}):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            train(int(0.6 * whole.limit.peak), config=config)
        assert "the policy forbids a retry" in raised.value.__notes__[0]


def test_split_grows_back_and_waits_longer_after_a_failure(whole, tmp_path):
    config = {"oom": {"grow_after_steps": 3}}
    run = train(
        int(0.6 * whole.limit.peak),
        when=lambda step, part: step < 10,
        steps=24,
        config=config,
        run_dir=tmp_path / "run",
    )
    splits = [(e["step"], e["parts"]) for e in journal(tmp_path / "run") if e.get("action") == "split"]
    # Steps 1 to 3 in two parts; step 4 is tried whole and fails; six clean steps; from step 10 on it fits.
    assert splits == [(1, 2), (3, 1), (4, 2), (9, 1)] and run.summary.splits == 2
    assert run.sizes[-1] == [8] and difference(run, train(steps=24)) < BOUND


def test_split_is_saved_in_checkpoints_and_holds_for_larger_shapes(whole, tmp_path):
    nbytes = int(0.6 * whole.limit.peak)
    first = train(nbytes, run_dir=tmp_path / "run", steps=4)
    assert first.limit.raised == 1
    (tmp_path / "run/journal.jsonl").unlink()  # what the checkpoint holds must do
    second = train(nbytes, run_dir=tmp_path / "run", steps=STEPS)
    assert second.limit.raised == 0 and second.sizes[0] == [4, 4]
    assert_close(second._replace(losses=first.losses + second.losses), train())
    assert second.guard._state.splits.parts_for("9x32x4,9x32") == 2
    assert second.guard._state.splits.parts_for("7x32x4,7x32") == 1


def test_loss_scale_and_accumulated_gradients_are_those_before_the_step(whole):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

    plain = train(accumulate=2, scaler=scaler(), steps=5)
    scales = scaler()
    run = train(int(0.6 * whole.limit.peak), accumulate=2, scaler=scales, steps=5)
    assert run.limit.raised and difference(run, plain) < BOUND
    assert scales.get_scale() == 256.0 * 2


def test_epoch_borders_inside_and_before_the_step(whole):
    options = {"batch_size": 20, "accumulate": 2, "steps": 12}  # batches of 20 and 16, five an epoch
    plain = train(**options)
    for failing in range(1, 8):
        run = train(int(plain.limit.peak * 0.6), when=lambda step, part, n=failing: step == n, **options)
        assert run.limit.raised and difference(run, plain) < BOUND, failing


def test_workers_serve_the_same_batches_again(whole):
    plain = train(workers=1, steps=4)
    run = train(int(0.6 * whole.limit.peak), workers=1, steps=4, when=lambda step, part: step == 3)
    assert run.limit.raised == 1 and difference(run, plain) < BOUND


@pytest.mark.parametrize(("failing", "room"), [(1, 1000), (7, 300)])
def test_update_that_runs_out_of_memory_leaves_no_half_of_it(failing, room, caplog):
    """torch updates one parameter after the other: memory runs out at the third of them."""
    limit, steps, moved = MemoryLimit(), [], []

    class OneByOne(torch.optim.AdamW):
        def step(self, closure=None):
            steps.append(len(steps))
            limit.nbytes = limit.live_bytes() + room if len(steps) == failing and is_starved else None
            before = [p.detach().clone() for p in self.param_groups[0]["params"]]
            try:
                with limit:
                    return super().step()
            except torch.OutOfMemoryError:
                after = self.param_groups[0]["params"]
                moved.extend(bool((a != b).any()) for a, b in zip(after, before, strict=True))
                raise

    options = {
        "optimizer": lambda model: OneByOne(model.parameters(), lr=1e-2, foreach=False),
        "config": {"snapshot": {"every_steps": 2, "certify_after": 1}},
    }
    is_starved = False
    plain = train(**options)
    is_starved, steps = True, []
    with caplog.at_level(logging.WARNING, "holdfast"):
        run = train(**options)
    assert limit.raised == 1 and moved[0] and not moved[-1]
    assert "rolled_back" in run.statuses and difference(run, plain) == 0.0
    assert "out of memory in optimizer.step(), which may have updated a part of the parameters" in caplog.text


def test_snapshot_that_runs_out_of_memory_is_left_out(caplog):
    plain = train(config={"snapshot": {"every_steps": 2}})
    limit = MemoryLimit(100)

    def starve(guard):
        snapshots = guard._run.parts.snapshots
        taking = snapshots._placement.copy

        def copy(tensors, layout, reason, begun):
            with limit if guard.step == 4 else contextlib.nullcontext():
                snapshots._copier._pools.clear()
                snapshots._copier._layouts.clear()
                return taking(tensors, None, reason, begun)

        snapshots._placement.copy = copy

    with caplog.at_level(logging.WARNING, "holdfast"):
        run = train(config={"snapshot": {"every_steps": 2}}, setup=starve)
    assert limit.raised == 2  # it is tried twice
    assert difference(run, plain) == 0.0
    assert "memory ran out while a snapshot of step 4 was taken: it is left out" in caplog.text
    assert run.statuses == ["committed"] * STEPS


def test_guard_gives_its_own_memory_back_before_anything_is_split(whole, tmp_path):
    """Snapshots on the device go first; the newest good one moves to the host, and a rollback from there is exact."""
    config = {"snapshot": {"place": "device", "every_steps": 1, "certify_after": 1}}
    limit, calls = MemoryLimit(), []

    class Starved(torch.optim.AdamW):
        def step(self, closure=None):
            calls.append(len(calls))
            limit.nbytes = limit.live_bytes() + 300 if len(calls) == 6 else None
            with limit:
                return super().step()

    run = train(
        int(0.65 * whole.limit.peak),
        when=lambda step, part: step == 5,
        config=config,
        run_dir=tmp_path / "run",
        optimizer=lambda model: Starved(model.parameters(), lr=1e-2, foreach=False),
    )
    actions = [e for e in journal(tmp_path / "run") if e["event"] == "action"]
    assert [(e["action"], e.get("parts")) for e in actions] == [("split", 1), ("split", 2), ("rollback", None)]
    assert "snapshots leave the device" in actions[0]["reason"] and run.summary.splits == 1
    assert actions[2]["to_step"] == 3 and actions[2]["restored_from"] == "memory"
    assert_close(run._replace(losses=[]), whole._replace(losses=[]))


def test_probe_finds_the_split_before_the_first_step_and_leaves_no_trace(whole):
    rows = Rows()
    longest = torch.utils.data.default_collate([rows[n] for n in range(8)])
    limit, probes = MemoryLimit(), []

    def probe(guard):
        model = guard._state.modules[0][1]
        model[0].weight.grad = torch.ones_like(model[0].weight)
        before = [torch.get_rng_state(), *(t.clone() for t in guard._state.update_tensors().values())]

        def loss_fn(net, batch):
            with limit:
                value = token_loss(net, batch)
            value.register_hook(lambda gradient: gradient)
            return value

        for share in (2.0, 0.5, 0.001):
            limit.nbytes = int(share * whole.limit.peak)
            probes.append(guard.probe_memory(loss_fn, longest))
        after = [torch.get_rng_state(), *guard._state.update_tensors().values()]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight)) and model[2].weight.grad is None
        model[0].weight.grad = None

    run = train(int(0.65 * whole.limit.peak), setup=probe)
    assert [p.parts for p in probes] == [1, 2, 0] and [p.fits for p in probes] == [True, False, False]
    assert probes[0].state_bytes == 2 * sum(p.numel() * 4 for p in run.parameters)
    assert "fits in 2 parts, and is served so" in probes[1].message
    assert "not even one sample at a time" in probes[2].message
    assert run.limit.raised == 0 and run.sizes[0] == [4, 4]
    assert_close(run, whole)


def test_classic_loop_says_that_it_cannot_be_served_again(caplog):
    model = nn.Linear(4, 5)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(torch.OutOfMemoryError), caplog.at_level(logging.ERROR, "holdfast"), guard:
        for batch in guard.data(DataLoader(Rows(), batch_size=8)):
            with MemoryLimit(100):
                token_loss(model, batch).backward()
    assert "an error leaves a loop over guard.data() or of Guard.wrap" in caplog.text


def journal(run_dir):
    return [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
