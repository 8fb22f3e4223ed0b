"""How batches reach a step: loaders of every kind, parts of a batch, weights, windows over epochs, one loop or several."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cases import Case, Net, Points, Run, Without, assert_same
from test_exact import NAN, Heals, at, check, quick
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import holdfast
from holdfast.core.record.journal import read, read_rows
from marks import slow

mse = nn.functional.mse_loss


def small(seed=0, dropout=0.2):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = Net(dropout)
    # Not Adam: it makes large steps of the rounding errors in gradients near zero.
    return model, torch.optim.SGD(model.parameters(), lr=3e-2, momentum=0.9)


def assert_same_weights(a, b, exactly=True):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q) if exactly else torch.allclose(p, q, rtol=1e-4, atol=1e-6), name


def events(run_dir, kind):
    return [e for e in read(run_dir / "journal.jsonl").events if e["event"] == kind]


# ---- loaders


@dataclass
class Drawing(Case):
    """Batches drawn with replacement from a generator of the user's, which the loader's own seeds come from too."""

    def loader(self, excluded=None, faults=True):
        data = Points(2000, self.augment, self.faults if faults else None)
        generator = torch.Generator().manual_seed(11)
        sampler = RandomSampler(data, replacement=True, num_samples=self.count, generator=generator)
        batches = BatchSampler(sampler, self.batch, drop_last=False)
        return DataLoader(
            data,
            batch_sampler=batches if excluded is None else Without(batches, excluded),
            num_workers=self.workers,
            generator=generator,
            multiprocessing_context="fork" if self.workers else None,
        )


def order_without_loading(case):
    """The batches of a loader, by the indices alone; the base seed is drawn as making an iterator would."""
    loader = case.loader(faults=False)
    order = []
    for epoch in range(case.epochs):
        sampler = loader.batch_sampler.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        order += list(loader.batch_sampler)
    return order


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("faults", [[8], [9, 10, 11], *slow([], [4], [21, 22, 23])])
def test_a_sampler_that_draws_from_the_users_generator_as_it_goes(workers, faults, tmp_path):
    """RandomSampler with replacement draws 32 indices at a time, workers ask for them ahead: nothing is drawn twice."""
    case = Drawing(workers=workers, augment=True, count=192, epochs=2, config=quick(max_consecutive=2, skip_batches=12))
    order = order_without_loading(case)
    case.faults = {order[b][0]: NAN["nan"] for b in faults}
    run = case.guarded(tmp_path / "run")
    again = ["replay", "skip"]
    expected = [[], again, [], [*again * 2, "replay", "rollback", *again, "skip", "skip"]][len(faults)]
    assert run.actions()[: len(expected)] == expected
    assert_same(run, case.reference(run))


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("adamw_fused", "device")])
@pytest.mark.parametrize("faults", [[4], [15, 16, 17], *slow([12])])
def test_workers_and_a_shuffle_from_a_generator(optimizer, gate, faults, tmp_path):
    """RandomSampler draws once more at its end, which workers reach while earlier batches are still being trained on."""
    case = Case(optimizer=optimizer, workers=2, augment=True, count=64, epochs=3)
    case.shuffle = "generator" if len(faults) == 1 else "unique_generator"
    case.config = quick(gate, max_consecutive=2, skip_batches=3)
    order = order_without_loading(case)
    case.faults = {order[b][0]: NAN["nan"] for b in faults}
    check(case, tmp_path, "skip" if len(faults) == 1 else "rollback")


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("faults", [[3], [13, 14, 15]])
@pytest.mark.parametrize("used_before", [False, True])
def test_persistent_workers(faults, used_before, tmp_path):
    """Also where a batch was looked at before: those workers ask the user's sampler, not ours."""

    @dataclass
    class Persistent(Case):
        def loader(self, excluded=None, faults=True):
            loader = super().loader(excluded, faults)
            loader.__dict__["persistent_workers"] = True
            if used_before:
                kept = torch.get_rng_state()
                next(iter(loader))
                torch.set_rng_state(kept)
                if excluded is not None:
                    loader.batch_sampler.epoch = 0
            return loader

    case = Persistent(workers=2, shuffle="unique", count=64, epochs=3, config=quick(max_consecutive=2, skip_batches=3))
    case.augment = not used_before  # what those workers drew is not known
    case.faults = at(Case(shuffle="unique", count=64, epochs=3), *faults)
    check(case, tmp_path, "skip" if len(faults) == 1 else "rollback")


class Ahead(DataLoader):
    """A loader of the user's own: has the next batch ready before it hands one out."""

    def __iter__(self):
        held = None
        for batch in super().__iter__():
            if held is not None:
                yield held
            held = batch
        if held is not None:
            yield held


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("adamw_fused", "device")])
@pytest.mark.parametrize("faults", [[], [0], [3], [7, 8], [13, 14, 15]])
def test_a_loader_that_loads_one_batch_ahead(optimizer, gate, faults, tmp_path):
    @dataclass
    class Early(Case):
        def loader(self, excluded=None, faults=True):
            loader = super().loader(excluded, faults)
            loader.__class__ = Ahead
            return loader

    case = Early(optimizer=optimizer, shuffle="unique", count=64, epochs=3, config=quick(gate, max_consecutive=3))
    case.faults = at(Case(shuffle="unique", count=64, epochs=3), *faults)
    run = case.guarded(tmp_path / "run")
    assert run.guard.summary().skipped >= min(1, len(faults))
    assert_same(run, case.reference(run))


class Shards(torch.utils.data.Dataset):
    """Item i is a whole batch; their sizes differ."""

    def __init__(self, broken=()):
        self.points, self.broken = Points(200), broken

    def __len__(self):
        return 12

    def __getitem__(self, i):
        size = 4 + 4 * (i % 2)
        x = self.points.x[i * 8 : i * 8 + size]
        return x * float("nan") if i in self.broken else x, self.points.y[i * 8 : i * 8 + size]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loader_of_whole_batches(accumulate, tmp_path):
    """batch_size=None: a skipped one is left out, and each counts by its samples."""
    losses, models = [], []
    for broken in ((), (6, 7)):
        model, optimizer = small()
        guard = holdfast.Guard(model, optimizer, run_dir=tmp_path / f"{broken}", config=quick())
        order = [i for i in range(12) if broken or i not in (6, 7)]
        loader = DataLoader(Shards(broken), batch_size=None, sampler=order)
        guard.fit(lambda m, b: mse(m(b[0]), b[1]), loader, accumulate=accumulate, epochs=2)
        models.append(model)
        losses.append(guard.summary())
    assert losses[0].status == "clean"
    assert losses[1].skipped == 4 // accumulate
    assert_same_weights(*models)
    model, optimizer = small()
    kept = DataLoader(Shards(), batch_size=None, sampler=[i for i in range(12) if i not in (6, 7)])
    for _ in range(2):
        items = list(kept)
        for k in range(0, len(items), accumulate):
            window = items[k : k + accumulate]
            total = sum(len(x) for x, _ in window)
            for x, y in window:
                (mse(model(x), y) * (len(x) / total)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(models[0], model, exactly=accumulate == 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("faults", [[], [4, 5, 6]])
def test_a_stock_loader_with_a_short_last_batch(drop_last, faults, tmp_path):
    @dataclass
    class Stock(Case):
        def loader(self, excluded=None, faults=True):
            data = Points(self.count, False, self.faults if faults else None)
            loader = DataLoader(data, batch_size=self.batch, shuffle=False, drop_last=drop_last)
            if excluded is not None:
                loader.__dict__["batch_sampler"] = Without(loader.batch_sampler, excluded)
            return loader

    case = Stock(count=61, epochs=3, config=quick(max_consecutive=2, skip_batches=3))
    case.faults = {8 * b: NAN["nan"] for b in faults}
    run = check(case, tmp_path, *(["rollback"] if faults else []))
    assert (run.guard.step == 3 * (7 + (not drop_last))) == (not faults)


# ---- parts of a batch


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_equal_parts_are_the_loop_written_by_hand(parts, accumulate, tmp_path):
    data = Points(64)
    model, optimizer = small()
    guard = holdfast.Guard(model, optimizer, clip_grad_norm=1.0, run_dir=tmp_path / "run")
    loader = DataLoader(data, batch_size=8)
    guard.fit(lambda m, b: mse(m(b[0]), b[1]), loader, accumulate=accumulate, microbatches=parts, epochs=2)
    plain, optimizer = small()
    for _ in range(2):
        for number, (x, y) in enumerate(loader, 1):
            for part, target in zip(torch.tensor_split(x, parts), torch.tensor_split(y, parts), strict=True):
                loss = mse(plain(part), target)
                (loss / (parts * accumulate) if parts * accumulate > 1 else loss).backward()
            if number % accumulate == 0:
                nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(model, plain)


@pytest.mark.parametrize(("batch", "parts"), [(9, 4), (9, 2), (3, 8), (1, 2)])
def test_unequal_parts_give_the_gradient_of_the_whole_batch(batch, parts, tmp_path):
    """9 rows in 4 parts are 3, 2, 2 and 2; 3 rows in 8 parts are 3."""
    seen = []

    def loss(model, b):
        seen.append(len(b[0]))
        return mse(model.last(torch.tanh(model.first(b[0]))), b[1])

    model, optimizer = small(dropout=0.0)
    loader = DataLoader(Points(batch * 6), batch_size=batch)
    guard = holdfast.Guard(model, optimizer, clip_grad_norm=1.0, run_dir=tmp_path / "run")
    guard.fit(loss, loader, microbatches=parts, epochs=1)
    assert seen[: min(parts, batch)] == [len(t) for t in torch.tensor_split(torch.empty(batch), min(parts, batch))]
    plain, optimizer = small(dropout=0.0)
    for b in loader:
        loss(plain, b).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(model, plain, exactly=False)
    # And what the detectors saw is the mean over all samples.
    metrics = [e["loss"] for e in read_rows(tmp_path / "run" / "metrics.jsonl").events]
    again, optimizer = small(dropout=0.0)
    assert metrics[0] == pytest.approx(loss(again, next(iter(loader))).item(), rel=1e-5)


def test_batches_of_different_sizes_in_one_window_count_by_their_samples(tmp_path):
    """5 batches of 8 and one of 3, two a step: equal sizes bit for bit as loss / 2, the last pair by samples."""
    data = Points(43)
    model, optimizer = small()
    guard = holdfast.Guard(model, optimizer, run_dir=tmp_path / "run")
    guard.fit(lambda m, b: mse(m(b[0]), b[1]), DataLoader(data, batch_size=8), accumulate=2, epochs=1)
    plain, optimizer = small()
    batches = list(DataLoader(data, batch_size=8))
    for k in (0, 2, 4):
        pair = batches[k : k + 2]
        total = sum(len(x) for x, _ in pair)
        before = [p.detach().clone() for p in plain.parameters()]
        for x, y in pair:
            loss = mse(plain(x), y)
            (loss / 2 if total == 16 else loss * (len(x) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), before, strict=True))
    assert guard.step == 3
    assert_same_weights(model, plain, exactly=False)


def weighted(weights, losses=None, run_dir=None, scaler=None):
    """One step of three batches with the weights given; the model after it, and the guard."""
    model, optimizer = small(dropout=0.0)
    guard = holdfast.Guard(model, optimizer, scaler=scaler, run_dir=run_dir)
    with guard:
        for step in guard.steps(DataLoader(Points(24), batch_size=8), accumulate=3, max_steps=1, epochs=1):
            with step:
                for n, (x, y) in enumerate(step.microbatches()):
                    loss = mse(model.last(model.first(x)), y)
                    if losses is not None:
                        loss = loss * losses[n]
                    step.backward(loss, weight=None if weights is None else weights[n])
    return model, guard


def by_hand(weights):
    model, optimizer = small(dropout=0.0)
    for w, (x, y) in zip(weights, DataLoader(Points(24), batch_size=8), strict=True):
        if w:
            (mse(model.last(model.first(x)), y) * (w / sum(weights))).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("weights", [(10, 20, 30), (7, 0, 3), (0, 4, 4), (0, 0, 5), (1e-3, 1e3, 1.0)])
def test_token_weights_make_the_mean_over_all_tokens(weights, tmp_path):
    model, guard = weighted(weights, run_dir=tmp_path / "run")
    assert guard.step == 1
    assert_same_weights(model, by_hand(weights), exactly=False)


def test_equal_weights_are_bit_for_bit_no_weights():
    assert_same_weights(weighted((5, 5, 5))[0], weighted(None)[0])


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_part_that_counts_nothing_may_have_a_loss_that_is_no_number(where, tmp_path):
    """Every label ignored: the loss is NaN, the tokens are 0."""
    weights = [4, 4, 4]
    weights[where] = 0
    losses = [1.0, 1.0, 1.0]
    losses[where] = float("nan")
    model, guard = weighted(weights, losses, tmp_path / "run")
    assert guard.step == 1
    assert guard.summary().status == "clean"
    assert_same_weights(model, by_hand(weights), exactly=False)


def test_a_step_in_which_nothing_counts_is_skipped(tmp_path):
    model, guard = weighted((0, 0, 0), run_dir=tmp_path / "run")
    assert guard.step == 0
    assert guard.summary().skipped == 1
    assert_same_weights(model, small()[0])


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense(weight):
    with pytest.raises(holdfast.StepError, match="finite number, not negative"):
        weighted((1, weight, 1))


# ---- batches of other shapes


def as_dict(pairs):
    x, y = torch.utils.data.default_collate(pairs)
    return {"inputs": {"x": x}, "y": y, "note": "for all", "ids": list(range(len(x)))}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_batches_as_dicts(parts, tmp_path):
    models = []
    for collate in (None, as_dict):
        model, optimizer = small()
        guard = holdfast.Guard(model, optimizer)

        def loss(m, b):
            if not isinstance(b, dict):
                return mse(m(b[0]), b[1])
            assert b["note"] == "for all" and len(b["ids"]) == len(b["y"])
            return mse(m(b["inputs"]["x"]), b["y"])

        guard.fit(loss, DataLoader(Points(64), batch_size=8, collate_fn=collate), microbatches=parts, epochs=2)
        models.append(model)
    assert_same_weights(*models)


class Graph:
    """Something that cannot be cut along a dimension."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    @staticmethod
    def collate(pairs):
        return Graph(*torch.utils.data.default_collate(pairs))

    @staticmethod
    def cut(graph, parts):
        pairs = zip(torch.tensor_split(graph.x, parts), torch.tensor_split(graph.y, parts), strict=True)
        return (Graph(x, y) for x, y in pairs)


def fit_graphs(model, optimizer, splitter, parts, **more):
    guard = holdfast.Guard(model, optimizer, **more)
    with guard:
        for step in guard.steps(DataLoader(Points(64), batch_size=8, collate_fn=Graph.collate), epochs=2):
            with step:
                for graph in step.microbatches(parts, splitter=splitter):
                    step.backward(mse(model(graph.x), graph.y))
    return model


def test_a_splitter_of_the_users_own():
    plain, optimizer = small()
    holdfast.Guard(plain, optimizer).fit(
        lambda m, b: mse(m(b[0]), b[1]), DataLoader(Points(64), batch_size=8), microbatches=2, epochs=2
    )
    assert_same_weights(fit_graphs(*small(), Graph.cut, 2), plain)


def test_what_cannot_be_cut_asks_for_a_splitter():
    with pytest.raises(holdfast.StepError, match="holds no tensor to split.*splitter"):
        fit_graphs(*small(), None, 2)
    with pytest.raises(holdfast.StepError, match="returned 3 parts instead of 2"):
        fit_graphs(*small(), lambda graph, parts: [graph] * 3, 2)


# ---- windows over epochs


def without_remainder(run):
    """What was excluded, and what was left over at the end: neither was trained on."""
    excluded = run.excluded()
    excluded["spans"] += [tuple(s) for e in run.journal() if e["event"] == "remainder" for s in e["data"]]
    return excluded


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("adamw_fused", "device")])
@pytest.mark.parametrize("faults", [[], [8], [13], [13, 15, 16]])
def test_windows_that_cross_the_border_of_an_epoch(faults, optimizer, gate, interval, tmp_path):
    """8 batches an epoch, 5 a step; a schedule by epochs moves at the border, before the update of the step across it."""
    case = Case(optimizer=optimizer, scheduler="exponential", interval=interval, shuffle="unique", count=64, epochs=5)
    case.accumulate, case.config = 5, quick(gate, max_consecutive=1, skip_batches=5)
    case.faults = at(case, *faults)
    run = case.guarded(tmp_path / "run")
    assert ("rollback" in run.actions(), "skip" in run.actions()) == (len(faults) > 2, len(faults) > 0)
    assert_same(run, case.plain(without_remainder(run), lr_factor=run.lr_factor()))


@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("adamw_fused", "device")])
def test_a_remainder_is_journalled_and_not_trained_on(optimizer, gate, tmp_path):
    """8 batches an epoch, 3 a step, 2 epochs: 5 steps and one batch over."""
    case = Case(optimizer=optimizer, scheduler="exponential", interval="epoch", shuffle="unique", count=64, epochs=2)
    case.accumulate, case.config = 3, quick(gate)
    run = case.guarded(tmp_path / "run")
    assert run.guard.step == 5
    (left,) = [e for e in run.journal() if e["event"] == "remainder"]
    assert left["batches"] == 1
    assert left["data"] == [[1, 56, 64]]
    assert all(p.grad is None for p in run.model.parameters())
    assert_same(run, case.plain(excluded={"spans": [(1, 56, 64)], "samples": {}}))


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_rollback_found_when_only_a_remainder_is_left_goes_on_to_the_end(gate, tmp_path):
    """The last whole step is bad: under the device gate that is known only after the remainder was drawn."""
    case = Case(optimizer="adamw_fused", shuffle="unique", count=64, epochs=2, accumulate=3)
    case.config = quick(gate, ladder=["rollback", "stop"])
    heals = Heals(returns=1)
    case.faults = at(case, 13, how=heals)
    run = case.guarded(tmp_path / "run", hooks=[heals])
    assert run.actions() == ["rollback"]
    assert run.guard.step == 5
    assert [e["batches"] for e in run.journal() if e["event"] == "remainder"] == [1]
    assert_same(run, case.plain(without_remainder(run), lr_factor=run.lr_factor()))


# ---- one loop or several


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("adamw_fused", "device")])
@pytest.mark.parametrize("faults", [[], [7, 8], [17, 18, 19]])
def test_a_loop_per_epoch_is_one_loop_over_all(faults, optimizer, gate, interval, tmp_path):
    case = Case(optimizer=optimizer, scheduler="exponential", interval=interval, shuffle="unique", count=64, epochs=4)
    case.config = quick(gate, max_consecutive=3)
    case.faults = at(case, *faults)
    parts = case.build()
    guard = holdfast.Guard(
        **parts, scheduler_interval=interval, clip_grad_norm=case.clip, run_dir=tmp_path / "run", config=case.config
    )
    loader, losses = case.loader(), []
    with guard:
        for _epoch in range(case.epochs):
            for step in guard.steps(loader, epochs=1):
                with step:
                    for batch in step.microbatches():
                        loss = case.loss(parts["model"], batch)
                        losses.append(loss.item())
                        step.backward(loss)
    run = Run(parts, losses, guard, tmp_path / "run")
    assert run.guard.summary().skipped >= min(1, len(faults))
    assert_same(run, case.reference(run))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_with_a_remainder_in_every_epoch_the_schedule_still_moves_once_an_epoch(accumulate, tmp_path):
    case = Case(scheduler="exponential", interval="epoch", count=64, accumulate=accumulate)
    parts = case.build()
    guard = holdfast.Guard(**parts, scheduler_interval="epoch", run_dir=tmp_path / "run")
    loader = case.loader()
    with guard:
        for epoch in range(3):
            for step in guard.steps(loader, accumulate=accumulate, epochs=1):
                with step:
                    for batch in step.microbatches():
                        step.backward(case.loss(parts["model"], batch))
            assert parts["scheduler"].last_epoch == epoch + 1
    assert guard.step == 3 * (8 // accumulate)
    assert len(events(tmp_path / "run", "remainder")) == (0 if accumulate == 1 else 3)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_another_loader_from_the_middle_of_an_epoch_on(gate, tmp_path):
    """The run with both loaders and faults in each equals the one without the faulty batches; none is drawn twice."""

    def train(run_dir, broken):
        model, optimizer = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        guard = holdfast.Guard(model, optimizer, run_dir=run_dir, config=quick(gate, max_consecutive=9))
        seen = []

        def run(loader, until):
            for step in guard.steps(loader, max_steps=until):
                with step:
                    for x, y in step.microbatches():
                        seen.append(x[0, 0].item())
                        step.backward(mse(model(x), y))

        def loader(start, rows, bad):
            data = Points(400)
            x, y = data.x[start : start + rows].clone(), data.y[start : start + rows]
            keep = [k for k in range(rows // 8) if broken or k not in bad]
            for k in bad if broken else ():
                x[8 * k] = float("nan")
            return DataLoader(TensorDataset(x, y), batch_sampler=[list(range(8 * k, 8 * k + 8)) for k in keep])

        with guard:
            run(loader(0, 80, (1, 5)), 6)
            run(loader(200, 40, (0, 2, 4)), 11)
        return model, guard, seen

    model, guard, _ = train(tmp_path / "bad", broken=True)
    clean, other, _ = train(tmp_path / "clean", broken=False)
    assert (guard.step, other.step) == (11, 11)
    # The second loader has 5 batches an epoch, three of them bad in every epoch.
    assert guard.summary().skipped == 2 + 7
    assert_same_weights(model, clean)
    assert [e["reason"] for e in events(tmp_path / "bad", "shift")] == ["another loader"]


def test_the_epoch_the_user_set_is_the_one_that_is_drawn(tmp_path):
    """A script that goes on at epoch 5 sets it on its sampler: the guard counts from there."""
    case = Case(shuffle="seeded", epochs=2)
    run_loader = case.loader()
    run_loader.batch_sampler.sampler.set_epoch(5)
    case.loader = lambda *_: run_loader
    run = case.guarded(tmp_path / "run")
    plain = Case(shuffle="seeded", epochs=2)
    loader = plain.loader(excluded={"spans": [], "samples": {}})
    loader.batch_sampler.epoch = 5
    plain.loader = lambda *_: loader
    assert_same(run, plain.plain())


@pytest.mark.parametrize("shuffle", ["seeded", "generator", "global"])
def test_taken_out_by_holdfast_off_the_same_loops_give_the_same_run(shuffle, tmp_path, monkeypatch):
    def train():
        case = Case(shuffle=shuffle, scheduler="exponential", interval="epoch", accumulate=5, count=64)
        parts, loader = case.build(), case.loader()
        guard = holdfast.Guard(**parts, scheduler_interval="epoch", clip_grad_norm=1.0)
        with guard:
            for more in ({"max_steps": 2}, {"epochs": 3}, {"epochs": 5}):
                for step in guard.steps(loader, accumulate=5, **more):
                    with step:
                        for batch in step.microbatches():
                            step.backward(case.loss(parts["model"], batch))
        return Run(parts, [], guard), guard.step

    on, steps = train()
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    off, others = train()
    assert steps == others == 16
    for p, q in zip(on.model.parameters(), off.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert on.scheduler.state_dict() == off.scheduler.state_dict()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
def test_an_error_that_the_script_survives_loses_the_batch_and_nothing_else(gate, stream, tmp_path):
    """Out of memory in one forward, caught around the step: on record, and the epoch still moves the schedule."""
    model, _ = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    guard = holdfast.Guard(
        model, optimizer, scheduler=scheduler, scheduler_interval="epoch", run_dir=tmp_path / "run", config=quick(gate)
    )
    loader, seen = DataLoader(Points(64), batch_size=8), 0
    with guard:
        for step in guard.steps(list(loader) if stream else loader, epochs=3):
            try:
                with step:
                    for x, y in step.microbatches():
                        seen += 1
                        if seen in (4, 9, 24):
                            raise MemoryError
                        step.backward(mse(model(x), y))
            except MemoryError:
                with pytest.raises(holdfast.StepError, match="an error came out of it"):
                    _ = step.outcome
    assert guard.step == 21
    assert scheduler.last_epoch == 3
    assert [e["data"] for e in events(tmp_path / "run", "abandoned")] == [[[0, 24, 32]], [[1, 0, 8]], [[2, 56, 64]]]


def test_a_step_that_runs_out_of_memory_frees_the_staging_memory_of_copies(tmp_path):
    model, optimizer = small()
    guard = holdfast.Guard(model, optimizer, run_dir=tmp_path / "run", config=quick("auto"))
    snapshots = guard._run.parts.snapshots
    snapshots._copier._staging[torch.device("cuda")] = type("Some", (), {"nbytes": 1 << 20, "note": None})()
    with guard:
        for n, step in enumerate(guard.steps(DataLoader(Points(64), batch_size=8), epochs=1)):
            with contextlib.suppress(torch.OutOfMemoryError), step:
                for x, y in step.microbatches():
                    if n in (3, 5):
                        raise torch.OutOfMemoryError
                    step.backward(mse(model(x), y))
    splits = [e for e in events(tmp_path / "run", "action") if e["action"] == "split"]
    assert "snapshots are not staged in device memory any more" in splits[0]["reason"]
    assert [e["parts"] for e in splits] == [1, 2], "the step is served as it was, with the memory given back first"
    assert guard.step == 8
