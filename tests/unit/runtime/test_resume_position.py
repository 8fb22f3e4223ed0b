"""A data position in another process: the exact next sample, under other batches, workers and ranks, or a clear refusal."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.open import open_source
from holdfast.runtime.data.source import Position
from holdfast.runtime.data.world import world_size_problem
from holdfast.runtime.state.rng import Rng, RngState
from marks import slow


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(int(i))


class Seeded(Sampler):
    """order = f(seed, epoch), by set_epoch."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        order = list(range(self.count))
        random.Random(1000 * self.seed + self.epoch).shuffle(order)
        return iter(order)


class Buckets:
    """Batches of varying size, of the user's own making."""

    def __init__(self, count: int, sizes: tuple[int, ...] = (2, 5, 3)) -> None:
        self.count, self.sizes = count, sizes

    def __iter__(self):
        start, n = 0, 0
        while start < self.count:
            size = self.sizes[n % len(self.sizes)]
            yield list(range(start, min(self.count, start + size)))
            start, n = start + size, n + 1

    def __len__(self) -> int:
        return self.count


class Lazy(Sampler):
    """Draws from the global generator each time it is asked: its order depends on all that is drawn in between."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        for _ in range(self.count):
            yield int(torch.randint(self.count, ()))


def seeded(seed: int = 5) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Life:
    """One process: a source, its random streams, and training that draws from them between two batches."""

    def __init__(self, loader: Any, epochs: int | None = 3, quarantine: Quarantine | None = None) -> None:
        self.rng, self.ended = Rng(), []
        self.quarantine = quarantine or Quarantine()
        self.excluded: list[Span] = []
        self.source = open_source(
            loader,
            rng=self.rng,
            quarantine=self.quarantine,
            epochs=epochs,
            first_epoch=0,
            on_epoch_end=self.ended.append,
            before_iter=lambda: None,
            on_exclusion=lambda span, *_: self.excluded.append(span),
        )
        self.notes: list[str] = []

    def draw(self) -> list[int]:
        batch = self.source.draw().batch
        torch.rand(3), random.random(), np.random.rand()
        return batch.reshape(-1).tolist()

    def draws(self, count: int) -> list[list[int]]:
        return [self.draw() for _ in range(count)]

    def rest(self, most: int = 10_000) -> list[list[int]]:
        found = []
        for _ in range(most):
            try:
                found.append(self.draw())
            except StopIteration:
                break
        return found

    def save(self) -> tuple[dict[str, Any], RngState]:
        before = self.rng.capture()
        saved = self.source.save()
        assert before.same(self.rng.capture())
        return through_a_file(saved), before

    @classmethod
    def resumed(cls, saved: tuple[dict[str, Any], RngState], loader: Any, **about: Any) -> Life:
        """As a new process would: streams of its own, then the position, then the streams that were saved."""
        seeded(99)
        life = cls(loader, **about)
        stood = life.rng.capture()
        life.notes = life.source.resume(saved[0])
        assert stood.same(life.rng.capture()), "resuming draws nothing"
        life.rng.restore(saved[1])
        return life


def through_a_file(saved: Any) -> Any:
    """Plain values and tensors only, as JSON and tensors would bring them back."""
    tensors: list[torch.Tensor] = []

    def out(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.clone())
            return {"tensor": len(tensors) - 1}
        if isinstance(value, dict):
            assert all(type(k) is str for k in value)
            return {k: out(v) for k, v in value.items()}
        if isinstance(value, list):
            return [out(v) for v in value]
        assert value is None or type(value) in (str, int, float, bool), value
        return value

    def back(value: Any) -> Any:
        if isinstance(value, dict):
            return tensors[value["tensor"]] if value.keys() == {"tensor"} else {k: back(v) for k, v in value.items()}
        return [back(v) for v in value] if isinstance(value, list) else value

    return back(json.loads(json.dumps(out(saved))))


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS = {
    "sequential": lambda n, **how: DataLoader(Numbers(n), batch_size=4, **how),
    "shuffle": lambda n, **how: DataLoader(Numbers(n), batch_size=4, shuffle=True, **how),
    "shuffle, drop_last": lambda n, **how: DataLoader(Numbers(n), batch_size=4, shuffle=True, drop_last=True, **how),
    "a generator": lambda n, **how: DataLoader(Numbers(n), batch_size=4, shuffle=True, generator=generator(), **how),
    "a generator of the sampler": lambda n, **how: DataLoader(
        Numbers(n), batch_size=4, sampler=RandomSampler(range(n), generator=generator()), **how
    ),
    "with replacement, from a generator": lambda n, **how: DataLoader(
        Numbers(n),
        batch_size=4,
        sampler=RandomSampler(range(n), replacement=True, num_samples=3 * n, generator=generator()),
        **how,
    ),
    "three passes from a generator": lambda n, **how: DataLoader(
        Numbers(n), batch_size=4, sampler=RandomSampler(range(n), num_samples=3 * n, generator=generator()), **how
    ),
    "subset": lambda n, **how: DataLoader(Numbers(n), batch_size=4, sampler=SubsetRandomSampler(range(0, n, 2)), **how),
    "weighted": lambda n, **how: DataLoader(
        Numbers(n), batch_size=4, sampler=WeightedRandomSampler(torch.ones(n), n), **how
    ),
    "distributed": lambda n, **how: DataLoader(
        Numbers(n), batch_size=4, sampler=DistributedSampler(range(n), num_replicas=2, rank=1), **how
    ),
    "seed and epoch": lambda n, **how: DataLoader(Numbers(n), batch_size=4, sampler=Seeded(n), **how),
    "batches of one's own": lambda n, **how: DataLoader(Numbers(n), batch_sampler=Buckets(n), **how),
    "a batch sampler": lambda n, **how: DataLoader(
        Numbers(n), batch_sampler=BatchSampler(RandomSampler(range(n)), 4, drop_last=False), **how
    ),
    "one by one": lambda n, **how: DataLoader(Numbers(n), batch_size=None, sampler=RandomSampler(range(n)), **how),
    "lists, not collated": lambda n, **how: DataLoader(
        Rows(n), batch_size=None, sampler=BatchSampler(RandomSampler(range(n)), 4, False), **how
    ),
}


class Rows(Numbers):
    def __getitem__(self, i: Any) -> torch.Tensor:
        return torch.tensor(i)


def whole_course(make: Any, epochs: int = 3) -> list[tuple[list[int], RngState]]:
    """Every batch of a run that is never interrupted, and where the streams stand after it."""
    seeded()
    life, course = Life(make(), epochs=epochs), []
    while True:
        try:
            course.append((life.draw(), life.rng.capture()))
        except StopIteration:
            life.source.close()
            return course


# ---- the same program again


EVERY_CUT = ("shuffle", "distributed")


@pytest.mark.parametrize(
    ("kind", "count"), [*((kind, 14) for kind in sorted(LOADERS)), ("shuffle", 12), ("distributed", 12)]
)
def test_resumed_anywhere_every_batch_and_every_stream_is_as_if_never_interrupted(kind, count):
    make = lambda: LOADERS[kind](count)  # noqa: E731
    course = whole_course(make)
    cuts = range(len(course) + 1)
    for cut in cuts if kind in EVERY_CUT else [*cuts[::3], len(course)]:
        seeded()
        life = Life(make())
        life.draws(cut)
        saved = life.save()
        rest = Life.resumed(saved, make())
        for batch, stood in course[cut:]:
            assert rest.draw() == batch
            assert rest.rng.capture().same(stood)
        with pytest.raises(StopIteration):
            rest.draw()
        assert rest.ended[-1] == 2


@pytest.mark.parametrize(
    "kind",
    [
        "shuffle",
        *slow("a generator", "with replacement, from a generator", "three passes from a generator"),
        "distributed",
    ],
)
def test_with_workers_what_was_asked_for_ahead_is_asked_for_again(kind):
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    make = lambda: LOADERS[kind](22, **workers)  # noqa: E731
    course = whole_course(make, epochs=2)
    for cut in (1, len(course) // 2 - 1, len(course) // 2, len(course) // 2 + 1):
        seeded()
        life = Life(make(), epochs=2)
        life.draws(cut)
        saved = life.save()
        life.source.close()
        rest = Life.resumed(saved, make(), epochs=2)
        assert rest.rest() == [batch for batch, _ in course[cut:]]
        assert rest.rng.capture().same(course[-1][1])
        rest.source.close()


@pytest.mark.parametrize("kind", ["shuffle", "a generator", "seed and epoch", "with replacement, from a generator"])
def test_resumed_again_and_again_it_is_the_same_run(kind):
    make = lambda: LOADERS[kind](22)  # noqa: E731
    course = whole_course(make)
    seeded()
    life, found = Life(make()), []
    while len(found) < len(course):
        found += life.draws(min(2, len(course) - len(found)))
        life.source.forget_before(life.source.position)
        life = Life.resumed(life.save(), make())
        life = Life.resumed(life.save(), make())  # and once more before anything is drawn
    assert found == [batch for batch, _ in course]


def test_saved_before_anything_was_drawn_it_begins_at_the_beginning():
    course = whole_course(lambda: LOADERS["shuffle"](22))
    seeded()
    life = Life(LOADERS["shuffle"](22))
    rest = Life.resumed(life.save(), LOADERS["shuffle"](22))
    assert rest.rest() == [batch for batch, _ in course]


def test_saved_after_a_return_the_order_and_the_generators_are_those_of_the_return():
    make = lambda: LOADERS["with replacement, from a generator"](22)  # noqa: E731
    course = whole_course(make)
    seeded()
    life = Life(make())
    life.draws(2)
    position, stood = life.source.position, life.rng.capture()
    life.draws(9)
    life.source.seek(position)
    life.rng.restore(stood)
    rest = Life.resumed(life.save(), make())
    assert rest.rest() == [batch for batch, _ in course[2:]]


def test_epochs_asked_for_one_at_a_time_begin_with_those_of_the_life_before():
    seeded()
    life = Life(LOADERS["seed and epoch"](8), epochs=1)
    first = life.rest()
    life.source.allow_epochs(1)
    life.draws(1)
    rest = Life.resumed(life.save(), LOADERS["seed and epoch"](8), epochs=1)
    assert rest.rest() == []
    rest.source.allow_epochs(1)
    assert len(rest.rest()) == 1
    rest.source.allow_epochs(1)
    assert sorted(flat(rest.rest())) == sorted(flat(first))
    assert (life.ended, rest.ended) == ([0], [1, 2])


def test_saved_after_the_last_epoch_the_next_one_begins_and_no_epoch_ends_twice():
    seeded()
    life = Life(LOADERS["shuffle"](8), epochs=2)
    life.rest()
    rest = Life.resumed(life.save(), LOADERS["shuffle"](8), epochs=3)
    again = Life.resumed(rest.save(), LOADERS["shuffle"](8), epochs=3)
    position = again.source.position
    for one in (rest, again):
        assert sorted(flat(one.rest())) == list(range(8))
        assert one.ended == [2]
    again.source.seek(position)
    again.ended.clear()
    assert sorted(flat(again.rest())) == list(range(8))
    assert again.ended == [2]


def test_saving_is_quick_asks_the_sampler_nothing_and_is_not_changed_by_what_follows():
    import time

    seeded()
    loader = DataLoader(Numbers(200_000), batch_size=256, shuffle=True)
    life = Life(loader)
    for _ in range(300):
        life.source.draw()
    asked = len(life.source._order._batches)
    best = min(_timed(life.source.save, time) for _ in range(20))
    assert best < 1e-3
    assert len(life.source._order._batches) == asked
    saved = life.source.save()
    kept = through_a_file(saved)
    life.draws(50)
    life.source.forget_before(life.source.position)
    assert json.dumps(kept["order"]["deals"]) == json.dumps(saved["order"]["deals"])
    assert torch.equal(kept["order"]["streams"]["torch"], saved["order"]["streams"]["torch"])


def _timed(call: Any, time: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["shuffle", "a generator", "with replacement, from a generator"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_in_use_goes_back_to_what_was_saved(kind, workers):
    """As when a run returns to a checkpoint that its memory no longer reaches."""
    about = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    make = lambda: LOADERS[kind](14, **about)  # noqa: E731
    course = [batch for batch, _ in whole_course(make)]
    seeded()
    life = Life(make())
    saved = {}
    for cut in range(len(course)):
        saved[cut] = life.save()
        life.source.draw()
        torch.rand(3), random.random(), np.random.rand()
    for cut in (len(course) - 1, 5, 3, 4, 1, 0):
        life.source.resume(saved[cut][0])
        life.rng.restore(saved[cut][1])
        assert life.draws(3 if cut + 3 <= len(course) else 1) == course[cut : cut + 3]
    life.source.close()


def test_a_window_that_was_to_be_excluded_in_a_life_that_ended_first_is_left_out_of_the_epoch_it_stands_in():
    life = Life(DataLoader(Numbers(40), batch_size=4), epochs=1)
    life.draws(3)
    quarantine = Quarantine()
    quarantine.add_ahead(0, 2, 3, "from the journal")
    rest = Life.resumed(life.save(), DataLoader(Numbers(40), batch_size=4), epochs=1, quarantine=quarantine)
    assert flat(rest.rest()) == list(range(20, 40))
    assert quarantine.spans() == [Span(0, 12, 20)]
    assert quarantine.ahead(0) == quarantine.ahead(1) == []


# ---- refused


def test_an_order_that_cannot_be_made_again_is_refused():
    seeded()
    life = Life(DataLoader(Numbers(40), batch_size=4, sampler=Lazy(40)))
    life.draws(3)
    with pytest.raises(
        DataError, match="sample 12 of epoch 0.*another order than the one on record.*function of seed and epoch"
    ):
        Life.resumed(life.save(), DataLoader(Numbers(40), batch_size=4, sampler=Lazy(40)))


@pytest.mark.parametrize("swapped", [(0, 1), (3, 9), (10, 11)])
def test_one_sample_in_another_place_is_seen_however_long_ago_it_came(swapped):
    order = list(range(20))
    life = Life(DataLoader(Numbers(20), batch_size=4, sampler=list(order)))
    for _ in range(3):
        life.draw()
        life.source.forget_before(life.source.position)
    a, b = swapped
    order[a], order[b] = order[b], order[a]
    with pytest.raises(DataError, match="another order"):
        Life.resumed(life.save(), DataLoader(Numbers(20), batch_size=4, sampler=order))


def test_another_seed_is_refused_and_named():
    make = lambda seed: DataLoader(Numbers(20), batch_size=4, sampler=DistributedSampler(range(20), 2, 0, seed=seed))  # noqa: E731
    life = Life(make(0))
    life.draws(1)
    with pytest.raises(DataError, match="its seed was 0, it is 1"):
        Life.resumed(life.save(), make(1))


def test_less_data_than_was_consumed_is_refused():
    life = Life(DataLoader(Numbers(20), batch_size=4))
    life.draws(4)
    with pytest.raises(DataError, match="ends after 10 samples.*its length was 20, it is 10"):
        Life.resumed(life.save(), DataLoader(Numbers(10), batch_size=4))


def test_batches_of_ones_own_go_on_at_a_border_of_theirs_and_nowhere_else():
    life = Life(DataLoader(Numbers(40), batch_sampler=Buckets(40, (2, 5, 3))), epochs=1)
    life.draws(3)
    rest = Life.resumed(life.save(), DataLoader(Numbers(40), batch_sampler=Buckets(40, (5,))), epochs=1)
    assert rest.rest()[0] == [10, 11, 12, 13, 14]
    with pytest.raises(DataError, match="no border there: one of its batches ends at sample 12"):
        Life.resumed(life.save(), DataLoader(Numbers(40), batch_sampler=Buckets(40, (4,))))


def test_position_of_a_stream_is_not_one_of_indexed_data():
    life = Life(DataLoader(Numbers(8), batch_size=4))
    life.draws(1)
    saved, _ = life.save()
    with pytest.raises(DataError, match="drew from a stream, this one draws from a map-style"):
        life.source.resume({**saved, "kind": "stream"})
    with pytest.raises(DataError, match="version 9"):
        life.source.resume({**saved, "version": 9})


# ---- other batches


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "a generator", "seed and epoch", "distributed"])
@pytest.mark.parametrize("after", [1, 3, 8, 50, None])
def test_another_batch_size_goes_on_at_the_exact_next_sample(kind, after):
    seeded()
    first = Life(LOADERS[kind](22), epochs=1)
    order = flat(first.rest())
    for cut in range(len(order) // 4 + 1):
        seeded()
        life = Life(LOADERS[kind](22), epochs=1)
        had = flat(life.draws(cut))
        base = LOADERS[kind](22)
        sampler = base.sampler
        loader = DataLoader(base.dataset, batch_size=after, sampler=sampler, generator=base.generator)
        rest = Life.resumed(life.save(), loader, epochs=1)
        batches = rest.rest()
        assert had + flat(batches) == order
        if after and cut:
            assert [len(b) for b in batches[:-1]] == [after] * (len(batches) - 1)
            assert "exact next one" in rest.notes[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("after", [4, 7])
@pytest.mark.parametrize("cut", [0, 3, 8, 11, 16])
def test_another_number_of_workers_changes_no_sample(workers, after, cut):
    def make(size, n):
        context = "fork" if n else None
        return DataLoader(Numbers(30), batch_size=size, shuffle=True, num_workers=n, multiprocessing_context=context)

    order = flat([batch for batch, _ in whole_course(lambda: make(4, 0), epochs=2)])
    seeded()
    life = Life(make(4, workers[0]), epochs=2)
    had = flat(life.draws(cut))
    saved = life.save()
    life.source.close()
    rest = Life.resumed(saved, make(after, workers[1]), epochs=2)
    had += flat(rest.rest())
    rest.source.close()
    # This epoch to its end; the next has the same order too where training drew as much in between.
    end = 30 if cut <= 8 and after != 4 else 60
    assert had[:end] == order[:end]
    assert Counter(had) == Counter(order)
    assert f"num_workers was {workers[0]}, it is {workers[1]}" in rest.notes[-1]


# ---- other ranks


def ranks_of(
    world: int, count: int, batch: int, kind: str = "distributed", seed: int = 3, **about: Any
) -> list[DataLoader]:
    """One loader for each of `world` ranks."""
    if world == 1 and kind != "distributed":
        order = SequentialSampler(range(count)) if kind == "sequential" else RandomSampler(range(count))
        return [DataLoader(Numbers(count), batch_size=batch, sampler=order)]
    shuffle = kind != "sequential"
    return [
        DataLoader(
            Numbers(count),
            batch_size=batch,
            sampler=DistributedSampler(range(count), world, rank, shuffle=shuffle, seed=seed, **about),
        )
        for rank in range(world)
    ]


def moved(lives: list[Life], loaders: list[DataLoader], epochs: int) -> list[Life]:
    """Every new rank goes on from what some old rank saved; which one makes no difference."""
    saved = [life.save() for life in lives]
    same = len(lives) == len(loaders)
    return [
        Life.resumed(saved[rank if same else (rank + 1) % len(lives)], loader, epochs=epochs)
        for rank, loader in enumerate(loaders)
    ]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_over_an_epoch_every_sample_comes_once_whatever_the_ranks_and_batches(data):
    """Twice resumed, anywhere, with other batches, accumulation and ranks: each id once, but for torch's padding."""
    count = data.draw(st.integers(1, 40))
    kind = data.draw(st.sampled_from(["distributed", "sequential", "random"]))
    epochs, lives, had, ended = 2, None, Counter(), []
    seeded(data.draw(st.integers(0, 5)))
    worlds = []
    for _ in range(3):
        world = data.draw(st.integers(1, 4))
        loaders = ranks_of(world, count, data.draw(st.integers(1, 9)), kind)
        worlds.append(world)
        lives = [Life(one, epochs=epochs) for one in loaders] if lives is None else moved(lives, loaders, epochs)
        accumulate = data.draw(st.integers(1, 3))
        for _ in range(accumulate * data.draw(st.integers(0, 6))):
            if not take_one(lives, had):
                break
        ended += lives[0].ended
        lives[0].ended.clear()
    while take_one(lives, had):
        pass
    assert ended + lives[0].ended == [*range(epochs)]
    for epoch in range(epochs):
        seen = Counter({i: n for (e, i), n in had.items() if e == epoch})
        assert set(seen) == set(range(count))
        padding = sum(seen.values()) - count
        assert 0 <= padding < max(worlds)


def take_one(lives: list[Life], had: Counter) -> bool:
    """One batch on every rank: all have one, equally large and at the same place, or none has."""
    drawn = []
    for life in lives:
        try:
            drawn.append(life.source.draw())
        except StopIteration:
            continue
    assert len(drawn) in (0, len(lives))
    assert len({(d.span, d.samples) for d in drawn}) <= 1
    had.update((d.span.epoch, i) for d in drawn for i in d.batch.tolist())
    return bool(drawn)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_other_ranks_take_up_the_rest_of_the_same_order_and_the_next_epoch_as_usual(before, after):
    loaders = ranks_of(before, 26, 2)
    lives = [Life(one, epochs=2) for one in loaders]
    for life in lives:
        life.draws(3)
    new = moved(lives, ranks_of(after, 26, 2), 2)
    alone = list(ranks_of(1, 26, 2)[0].sampler)
    gone = 3 * 2 * before
    assert {life.source.position.sample for life in new} == {gone}
    for rank, life in enumerate(new):
        left = alone[gone:][rank::after]
        mine = flat(life.draws(-(-len(left) // 2)))
        assert mine[: len(left)] == left
        fresh = ranks_of(after, 26, 2)[rank]
        fresh.sampler.set_epoch(1)
        assert flat(life.rest())[-len(fresh.sampler) :] == list(fresh.sampler)
        assert f"is dealt out to {after} ranks instead of {before}" in life.notes[0]


def test_with_drop_last_no_rank_gets_more_than_another():
    lives = [Life(one, epochs=1) for one in ranks_of(2, 23, 2, drop_last=True)]
    for life in lives:
        life.draws(2)
    new = moved(lives, ranks_of(4, 23, 2, drop_last=True), 1)
    assert [len(flat(life.rest())) for life in new] == [3, 3, 3, 3]  # 15 are left


def test_another_seed_under_other_ranks_is_refused_and_named():
    lives = [Life(one) for one in ranks_of(2, 24, 2)]
    for life in lives:
        life.draws(2)
    with pytest.raises(DataError, match="its seed was 3, it is 4"):
        moved(lives, ranks_of(3, 24, 2, seed=4), 3)
    with pytest.raises(DataError, match="its length was 24, it is 30"):
        moved(lives, ranks_of(3, 30, 2), 3)


def test_a_digest_of_any_rank_is_compared_under_other_ranks():
    lives = [Life(one) for one in ranks_of(2, 24, 2)]
    for life in lives:
        life.draws(2)
    saved, rng = lives[1].save()
    saved["order"]["deals"][0][3] = "0" * 32
    with pytest.raises(DataError, match="differs from what rank 1 of 2 had on record"):
        Life.resumed((saved, rng), ranks_of(3, 24, 2)[0])


def test_a_sampler_of_ones_own_does_not_move_to_other_ranks():
    class Own(Seeded):
        num_replicas = 2

    life = Life(DataLoader(Numbers(20), batch_size=4, sampler=Own(20)))
    life.draws(2)
    other = Own(20)
    other.num_replicas = 3
    with pytest.raises(DataError, match="its replicas was 2, it is 3.*as many ranks as before"):
        Life.resumed(life.save(), DataLoader(Numbers(20), batch_size=4, sampler=other))
    with pytest.raises(DataError, match="was Own, it is distributed"):
        Life.resumed(life.save(), ranks_of(2, 20, 4)[0])


def test_whether_data_can_move_to_other_ranks_is_known_before_it_is_tried():
    def saved(loader):
        life = Life(loader)
        life.draws(1)
        return life.save()[0]

    assert world_size_problem(saved(ranks_of(2, 20, 2)[0]), then=2, now=3) is None
    assert world_size_problem(saved(LOADERS["shuffle"](20)), then=1, now=3) is None
    assert world_size_problem(saved(LOADERS["seed and epoch"](20)), then=2, now=2) is None
    assert "not a Seeded" in world_size_problem(saved(LOADERS["seed and epoch"](20)), then=2, now=3)
    assert "use a DistributedSampler" in world_size_problem(saved(LOADERS["shuffle"](20)), then=2, now=3)


# ---- with stretches left out


def test_a_window_excluded_before_the_save_is_left_out_sample_by_sample_under_other_batches(tmp_path):
    seeded()
    life = Life(DataLoader(Numbers(40), batch_size=4), epochs=1, quarantine=Quarantine(tmp_path / "q.json"))
    life.draws(3)
    position = life.source.position
    life.draws(3)
    life.source.seek(position)
    life.source.exclude(Position(0, 4, 16), 3, "a window")
    assert life.draws(1) == [[12, 13, 14, 15]]
    rest = Life.resumed(
        life.save(), DataLoader(Numbers(40), batch_size=6), epochs=1, quarantine=Quarantine(tmp_path / "q.json")
    )
    assert flat(rest.rest()) == list(range(28, 40))
    other = Life(DataLoader(Numbers(40), batch_size=6), epochs=1, quarantine=Quarantine(tmp_path / "q.json"))
    assert other.rest()[:5] == [[*range(6)], [*range(6, 12)], [*range(12, 16)], [28, 29], [*range(30, 36)]]


def test_a_window_that_reaches_into_the_next_epoch_is_counted_in_samples_when_batches_change(tmp_path):
    life = Life(DataLoader(Numbers(20), batch_size=4), epochs=2, quarantine=Quarantine(tmp_path / "q.json"))
    life.draws(3)
    life.source.seek(life.source.position)
    life.source.exclude(Position(0, 4, 16), 3, "a window")  # the last batch, and two of the next epoch
    life.draws(1)
    rest = Life.resumed(
        life.save(), DataLoader(Numbers(20), batch_size=3), epochs=2, quarantine=Quarantine(tmp_path / "q.json")
    )
    assert flat(rest.rest()) == list(range(8, 20))
    assert Span(1, 0, 8) in rest.excluded
    assert rest.quarantine.ahead(1) == []


def test_excluded_stretches_and_ids_mean_the_same_under_other_ranks():
    quarantine = Quarantine()
    lives = [Life(one, epochs=1, quarantine=quarantine) for one in ranks_of(2, 36, 3, "sequential")]
    for life in lives:
        life.draws(2)
    quarantine.add_spans([Span(0, 18, 24)], "the fourth batch of both ranks")
    quarantine.add_samples([30], "broken")
    had = Counter()
    loaders = ranks_of(3, 36, 2, "sequential")
    new = [
        Life.resumed(lives[rank % 2].save(), one, epochs=1, quarantine=quarantine) for rank, one in enumerate(loaders)
    ]
    for life in new:
        had.update(flat(life.rest()))
    assert had == Counter(set(range(12, 36)) - set(range(18, 24)) - {30})


def test_where_a_stretch_ends_inside_a_row_of_ranks_the_whole_row_is_left_out_on_all():
    quarantine = Quarantine()
    quarantine.add_spans([Span(0, 4, 11)], "recorded under another number of ranks")
    lives = [Life(one, epochs=1, quarantine=quarantine) for one in ranks_of(4, 16, 1, "sequential")]
    assert [flat(life.rest()) for life in lives] == [[0, 12], [1, 13], [2, 14], [3, 15]]
