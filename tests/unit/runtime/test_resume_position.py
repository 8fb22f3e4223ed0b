"""A data position in another process: the exact next sample, with other batch sizes, workers or ranks, or an error."""

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
from holdfast.runtime.data.source import Position, SourceSetup
from holdfast.runtime.data.world import world_size_problem
from holdfast.runtime.state.rng import Rng, RngState
from marks import examples, slow


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
    """A user's batch sampler with batches of varying size."""

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
    """Draws from the global generator for every index: its order depends on all other draws."""

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


class Process:
    """One process: a source, its generators, and training that draws from them between two batches."""

    def __init__(self, loader: Any, epochs: int | None = 3, quarantine: Quarantine | None = None) -> None:
        self.rng, self.ended = Rng(), []
        self.quarantine = quarantine or Quarantine()
        self.excluded: list[Span] = []
        setup = SourceSetup(
            rng=self.rng,
            quarantine=self.quarantine,
            epochs=epochs,
            first_epoch=0,
            on_epoch_end=self.ended.append,
            before_iter=lambda: None,
            on_exclusion=lambda span, *_: self.excluded.append(span),
        )
        self.source = open_source(loader, setup)
        self.notes: list[str] = []

    def draw(self) -> list[int]:
        batch = self.source.draw().batch
        torch.rand(3), random.random(), np.random.rand()
        return batch.reshape(-1).tolist()

    def draws(self, count: int) -> list[list[int]]:
        return [self.draw() for _ in range(count)]

    def rest(self, limit: int = 10_000) -> list[list[int]]:
        found = []
        for _ in range(limit):
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
    def resumed(cls, saved: tuple[dict[str, Any], RngState], loader: Any, **about: Any) -> Process:
        """Resume like a new process: own random state first, then the position, then the saved random state."""
        seeded(99)
        process = cls(loader, **about)
        stood = process.rng.capture()
        process.notes = process.source.resume(saved[0])
        assert stood.same(process.rng.capture()), "resuming draws nothing"
        process.rng.restore(saved[1])
        return process


def through_a_file(saved: Any) -> Any:
    """Return plain values and tensors as they come back from a file."""
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
    """Return every batch of an uninterrupted run, and the random state after it."""
    seeded()
    process, course = Process(make(), epochs=epochs), []
    while True:
        try:
            course.append((process.draw(), process.rng.capture()))
        except StopIteration:
            process.source.close()
            return course


# ---- the same program again


EVERY_CUT = ("shuffle", "distributed")


@pytest.mark.parametrize(
    ("kind", "count"), [*((kind, 14) for kind in sorted(LOADERS)), ("shuffle", 12), ("distributed", 12)]
)
def test_resumed_anywhere_batches_and_random_state_equal_the_uninterrupted_run(kind, count):
    make = lambda: LOADERS[kind](count)  # noqa: E731
    course = whole_course(make)
    cuts = range(len(course) + 1)
    for cut in cuts if kind in EVERY_CUT else [*cuts[::3], len(course)]:
        seeded()
        process = Process(make())
        process.draws(cut)
        saved = process.save()
        rest = Process.resumed(saved, make())
        for batch, stood in course[cut:]:
            assert rest.draw() == batch
            assert rest.rng.capture().same(stood)
        with pytest.raises(StopIteration):
            rest.draw()
        assert rest.ended[-1] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "shuffle",
        *slow("a generator", "with replacement, from a generator", "three passes from a generator"),
        "distributed",
    ],
)
def test_with_workers_prefetched_batches_are_asked_for_again(kind):
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    make = lambda: LOADERS[kind](22, **workers)  # noqa: E731
    course = whole_course(make, epochs=2)
    for cut in (1, len(course) // 2 - 1, len(course) // 2, len(course) // 2 + 1):
        seeded()
        process = Process(make(), epochs=2)
        process.draws(cut)
        saved = process.save()
        process.source.close()
        rest = Process.resumed(saved, make(), epochs=2)
        assert rest.rest() == [batch for batch, _ in course[cut:]]
        assert rest.rng.capture().same(course[-1][1])
        rest.source.close()


@pytest.mark.parametrize("kind", ["shuffle", "a generator", "seed and epoch", "with replacement, from a generator"])
def test_resuming_many_times_gives_the_same_run(kind):
    make = lambda: LOADERS[kind](22)  # noqa: E731
    course = whole_course(make)
    seeded()
    process, found = Process(make()), []
    while len(found) < len(course):
        found += process.draws(min(2, len(course) - len(found)))
        process.source.forget_before(process.source.position)
        process = Process.resumed(process.save(), make())
        process = Process.resumed(process.save(), make())  # and once more before anything is drawn
    assert found == [batch for batch, _ in course]


def test_saved_before_the_first_draw_it_starts_at_the_beginning():
    course = whole_course(lambda: LOADERS["shuffle"](22))
    seeded()
    process = Process(LOADERS["shuffle"](22))
    rest = Process.resumed(process.save(), LOADERS["shuffle"](22))
    assert rest.rest() == [batch for batch, _ in course]


def test_saved_after_a_seek_order_and_generators_are_those_of_the_seek():
    make = lambda: LOADERS["with replacement, from a generator"](22)  # noqa: E731
    course = whole_course(make)
    seeded()
    process = Process(make())
    process.draws(2)
    position, stood = process.source.position, process.rng.capture()
    process.draws(9)
    process.source.seek(position)
    process.rng.restore(stood)
    rest = Process.resumed(process.save(), make())
    assert rest.rest() == [batch for batch, _ in course[2:]]


def test_epochs_asked_for_one_at_a_time_begin_with_those_of_the_previous_process():
    seeded()
    process = Process(LOADERS["seed and epoch"](8), epochs=1)
    first = process.rest()
    process.source.allow_epochs(1)
    process.draws(1)
    rest = Process.resumed(process.save(), LOADERS["seed and epoch"](8), epochs=1)
    assert rest.rest() == []
    rest.source.allow_epochs(1)
    assert len(rest.rest()) == 1
    rest.source.allow_epochs(1)
    assert sorted(flat(rest.rest())) == sorted(flat(first))
    assert (process.ended, rest.ended) == ([0], [1, 2])


def test_saved_after_an_epoch_the_next_one_begins_and_no_epoch_ends_twice():
    seeded()
    process = Process(LOADERS["shuffle"](8), epochs=2)
    process.rest()
    rest = Process.resumed(process.save(), LOADERS["shuffle"](8), epochs=3)
    again = Process.resumed(rest.save(), LOADERS["shuffle"](8), epochs=3)
    position = again.source.position
    for one in (rest, again):
        assert sorted(flat(one.rest())) == list(range(8))
        assert one.ended == [2]
    again.source.seek(position)
    again.ended.clear()
    assert sorted(flat(again.rest())) == list(range(8))
    assert again.ended == [2]


def test_saving_is_fast_does_not_ask_the_sampler_and_its_result_does_not_change():
    import time

    seeded()
    loader = DataLoader(Numbers(200_000), batch_size=256, shuffle=True)
    process = Process(loader)
    for _ in range(300):
        process.source.draw()
    asked = len(process.source._order._batches)
    best = min(_timed(process.source.save, time) for _ in range(20))
    assert best < 1e-3
    assert len(process.source._order._batches) == asked
    saved = process.source.save()
    kept = through_a_file(saved)
    process.draws(50)
    process.source.forget_before(process.source.position)
    assert json.dumps(kept["order"]["deals"]) == json.dumps(saved["order"]["deals"])
    assert torch.equal(kept["order"]["streams"]["torch"], saved["order"]["streams"]["torch"])


def _timed(call: Any, time: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["shuffle", "a generator", "with replacement, from a generator"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_in_use_resumes_a_saved_position(kind, workers):
    """As in a rollback to a checkpoint."""
    about = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    make = lambda: LOADERS[kind](14, **about)  # noqa: E731
    course = [batch for batch, _ in whole_course(make)]
    seeded()
    process = Process(make())
    saved = {}
    for cut in range(len(course)):
        saved[cut] = process.save()
        process.source.draw()
        torch.rand(3), random.random(), np.random.rand()
    for cut in (len(course) - 1, 5, 3, 4, 1, 0):
        process.source.resume(saved[cut][0])
        process.rng.restore(saved[cut][1])
        assert process.draws(3 if cut + 3 <= len(course) else 1) == course[cut : cut + 3]
    process.source.close()


def test_an_exclusion_that_a_dead_process_did_not_apply_is_applied_to_the_current_epoch():
    process = Process(DataLoader(Numbers(40), batch_size=4), epochs=1)
    process.draws(3)
    quarantine = Quarantine()
    quarantine.add_ahead(0, 2, 3, "from the journal")
    rest = Process.resumed(process.save(), DataLoader(Numbers(40), batch_size=4), epochs=1, quarantine=quarantine)
    assert flat(rest.rest()) == list(range(20, 40))
    assert quarantine.spans() == [Span(0, 12, 20)]
    assert quarantine.ahead(0) == quarantine.ahead(1) == []


# ---- refused


def test_an_order_that_cannot_be_reproduced_is_refused():
    seeded()
    process = Process(DataLoader(Numbers(40), batch_size=4, sampler=Lazy(40)))
    process.draws(3)
    with pytest.raises(
        DataError, match="sample 12 of epoch 0.*another order than the one on record.*function of seed and epoch"
    ):
        Process.resumed(process.save(), DataLoader(Numbers(40), batch_size=4, sampler=Lazy(40)))


@pytest.mark.parametrize("swapped", [(0, 1), (3, 9), (10, 11)])
def test_one_swapped_sample_is_detected_however_long_ago_it_was_served(swapped):
    order = list(range(20))
    process = Process(DataLoader(Numbers(20), batch_size=4, sampler=list(order)))
    for _ in range(3):
        process.draw()
        process.source.forget_before(process.source.position)
    a, b = swapped
    order[a], order[b] = order[b], order[a]
    with pytest.raises(DataError, match="another order"):
        Process.resumed(process.save(), DataLoader(Numbers(20), batch_size=4, sampler=order))


def test_another_seed_is_refused_by_name():
    make = lambda seed: DataLoader(Numbers(20), batch_size=4, sampler=DistributedSampler(range(20), 2, 0, seed=seed))  # noqa: E731
    process = Process(make(0))
    process.draws(1)
    with pytest.raises(DataError, match="its seed was 0, it is 1"):
        Process.resumed(process.save(), make(1))


def test_a_dataset_shorter_than_the_position_is_refused():
    process = Process(DataLoader(Numbers(20), batch_size=4))
    process.draws(4)
    with pytest.raises(DataError, match="ends after 10 samples.*its length was 20, it is 10"):
        Process.resumed(process.save(), DataLoader(Numbers(10), batch_size=4))


def test_a_users_batch_sampler_resumes_only_where_one_of_its_batches_ends():
    process = Process(DataLoader(Numbers(40), batch_sampler=Buckets(40, (2, 5, 3))), epochs=1)
    process.draws(3)
    rest = Process.resumed(process.save(), DataLoader(Numbers(40), batch_sampler=Buckets(40, (5,))), epochs=1)
    assert rest.rest()[0] == [10, 11, 12, 13, 14]
    with pytest.raises(DataError, match="no border there: one of its batches ends at sample 12"):
        Process.resumed(process.save(), DataLoader(Numbers(40), batch_sampler=Buckets(40, (4,))))


def test_a_position_of_a_stream_is_refused():
    process = Process(DataLoader(Numbers(8), batch_size=4))
    process.draws(1)
    saved, _ = process.save()
    with pytest.raises(DataError, match="drew from a stream, this one draws from a map-style"):
        process.source.resume({**saved, "kind": "stream"})
    with pytest.raises(DataError, match="version 9"):
        process.source.resume({**saved, "version": 9})


# ---- other batches


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "a generator", "seed and epoch", "distributed"])
@pytest.mark.parametrize("after", [1, 3, 8, 50, None])
def test_another_batch_size_continues_at_the_exact_next_sample(kind, after):
    seeded()
    first = Process(LOADERS[kind](22), epochs=1)
    order = flat(first.rest())
    for cut in range(len(order) // 4 + 1):
        seeded()
        process = Process(LOADERS[kind](22), epochs=1)
        had = flat(process.draws(cut))
        base = LOADERS[kind](22)
        sampler = base.sampler
        loader = DataLoader(base.dataset, batch_size=after, sampler=sampler, generator=base.generator)
        rest = Process.resumed(process.save(), loader, epochs=1)
        batches = rest.rest()
        assert had + flat(batches) == order
        if after and cut:
            assert [len(b) for b in batches[:-1]] == [after] * (len(batches) - 1)
            assert "exact next one" in rest.notes[0]


@pytest.mark.slow
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
    process = Process(make(4, workers[0]), epochs=2)
    had = flat(process.draws(cut))
    saved = process.save()
    process.source.close()
    rest = Process.resumed(saved, make(after, workers[1]), epochs=2)
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
    """Return one loader for each of `world` ranks."""
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


def moved(processes: list[Process], loaders: list[DataLoader], epochs: int) -> list[Process]:
    """Resume every new rank from what some old rank saved; which one makes no difference."""
    saved = [process.save() for process in processes]
    same = len(processes) == len(loaders)
    return [
        Process.resumed(saved[rank if same else (rank + 1) % len(processes)], loader, epochs=epochs)
        for rank, loader in enumerate(loaders)
    ]


@given(st.data())
@settings(max_examples=examples(50), deadline=None)
def test_every_sample_of_an_epoch_is_served_once_for_any_ranks_and_batch_sizes(data):
    """Resumed twice, anywhere, with other batch sizes and ranks: each id once, except for torch's padding."""
    count = data.draw(st.integers(1, 40))
    kind = data.draw(st.sampled_from(["distributed", "sequential", "random"]))
    epochs, processes, had, ended = 2, None, Counter(), []
    seeded(data.draw(st.integers(0, 5)))
    worlds = []
    for _ in range(3):
        world = data.draw(st.integers(1, 4))
        loaders = ranks_of(world, count, data.draw(st.integers(1, 9)), kind)
        worlds.append(world)
        processes = (
            [Process(one, epochs=epochs) for one in loaders] if processes is None else moved(processes, loaders, epochs)
        )
        accumulate = data.draw(st.integers(1, 3))
        for _ in range(accumulate * data.draw(st.integers(0, 6))):
            if not take_one(processes, had):
                break
        ended += processes[0].ended
        processes[0].ended.clear()
    while take_one(processes, had):
        pass
    assert ended + processes[0].ended == [*range(epochs)]
    for epoch in range(epochs):
        seen = Counter({i: n for (e, i), n in had.items() if e == epoch})
        assert set(seen) == set(range(count))
        padding = sum(seen.values()) - count
        assert 0 <= padding < max(worlds)


def take_one(processes: list[Process], had: Counter) -> bool:
    """Draw one batch on every rank: all have one, of one size and position, or none has."""
    drawn = []
    for process in processes:
        try:
            drawn.append(process.source.draw())
        except StopIteration:
            continue
    assert len(drawn) in (0, len(processes))
    assert len({(d.span, d.samples) for d in drawn}) <= 1
    had.update((d.span.epoch, i) for d in drawn for i in d.batch.tolist())
    return bool(drawn)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_other_ranks_continue_the_same_order_and_the_next_epoch_is_as_usual(before, after):
    loaders = ranks_of(before, 26, 2)
    processes = [Process(one, epochs=2) for one in loaders]
    for process in processes:
        process.draws(3)
    new = moved(processes, ranks_of(after, 26, 2), 2)
    alone = list(ranks_of(1, 26, 2)[0].sampler)
    gone = 3 * 2 * before
    assert {process.source.position.sample for process in new} == {gone}
    for rank, process in enumerate(new):
        left = alone[gone:][rank::after]
        mine = flat(process.draws(-(-len(left) // 2)))
        assert mine[: len(left)] == left
        fresh = ranks_of(after, 26, 2)[rank]
        fresh.sampler.set_epoch(1)
        assert flat(process.rest())[-len(fresh.sampler) :] == list(fresh.sampler)
        assert f"is dealt out to {after} ranks instead of {before}" in process.notes[0]


def test_with_drop_last_every_rank_gets_as_many_samples():
    processes = [Process(one, epochs=1) for one in ranks_of(2, 23, 2, drop_last=True)]
    for process in processes:
        process.draws(2)
    new = moved(processes, ranks_of(4, 23, 2, drop_last=True), 1)
    assert [len(flat(process.rest())) for process in new] == [3, 3, 3, 3]  # 15 are left


def test_another_seed_with_other_ranks_is_refused_by_name():
    processes = [Process(one) for one in ranks_of(2, 24, 2)]
    for process in processes:
        process.draws(2)
    with pytest.raises(DataError, match="its seed was 3, it is 4"):
        moved(processes, ranks_of(3, 24, 2, seed=4), 3)
    with pytest.raises(DataError, match="its length was 24, it is 30"):
        moved(processes, ranks_of(3, 30, 2), 3)


def test_the_digest_of_any_rank_is_compared_with_other_ranks():
    processes = [Process(one) for one in ranks_of(2, 24, 2)]
    for process in processes:
        process.draws(2)
    saved, rng = processes[1].save()
    saved["order"]["deals"][0][3] = "0" * 32
    with pytest.raises(DataError, match="differs from what rank 1 of 2 had on record"):
        Process.resumed((saved, rng), ranks_of(3, 24, 2)[0])


def test_a_users_sampler_cannot_be_redistributed():
    class Own(Seeded):
        num_replicas = 2

    process = Process(DataLoader(Numbers(20), batch_size=4, sampler=Own(20)))
    process.draws(2)
    other = Own(20)
    other.num_replicas = 3
    with pytest.raises(DataError, match="its replicas was 2, it is 3.*as many ranks as before"):
        Process.resumed(process.save(), DataLoader(Numbers(20), batch_size=4, sampler=other))
    with pytest.raises(DataError, match="was Own, it is distributed"):
        Process.resumed(process.save(), ranks_of(2, 20, 4)[0])


def test_world_size_problem_tells_in_advance_whether_data_can_be_redistributed():
    def saved(loader):
        process = Process(loader)
        process.draws(1)
        return process.save()[0]

    assert world_size_problem(saved(ranks_of(2, 20, 2)[0]), then=2, now=3) is None
    assert world_size_problem(saved(LOADERS["shuffle"](20)), then=1, now=3) is None
    assert world_size_problem(saved(LOADERS["seed and epoch"](20)), then=2, now=2) is None
    assert "not a Seeded" in world_size_problem(saved(LOADERS["seed and epoch"](20)), then=2, now=3)
    assert "use a DistributedSampler" in world_size_problem(saved(LOADERS["shuffle"](20)), then=2, now=3)


# ---- with stretches left out


def test_an_excluded_window_holds_sample_by_sample_with_another_batch_size(tmp_path):
    seeded()
    process = Process(DataLoader(Numbers(40), batch_size=4), epochs=1, quarantine=Quarantine(tmp_path / "q.json"))
    process.draws(3)
    position = process.source.position
    process.draws(3)
    process.source.seek(position)
    process.source.exclude(Position(0, 4, 16), 3, "a window")
    assert process.draws(1) == [[12, 13, 14, 15]]
    rest = Process.resumed(
        process.save(), DataLoader(Numbers(40), batch_size=6), epochs=1, quarantine=Quarantine(tmp_path / "q.json")
    )
    assert flat(rest.rest()) == list(range(28, 40))
    other = Process(DataLoader(Numbers(40), batch_size=6), epochs=1, quarantine=Quarantine(tmp_path / "q.json"))
    assert other.rest()[:5] == [[*range(6)], [*range(6, 12)], [*range(12, 16)], [28, 29], [*range(30, 36)]]


def test_a_window_into_the_next_epoch_is_converted_to_samples_if_the_batch_size_changes(tmp_path):
    process = Process(DataLoader(Numbers(20), batch_size=4), epochs=2, quarantine=Quarantine(tmp_path / "q.json"))
    process.draws(3)
    process.source.seek(process.source.position)
    process.source.exclude(Position(0, 4, 16), 3, "a window")  # the last batch, and two of the next epoch
    process.draws(1)
    rest = Process.resumed(
        process.save(), DataLoader(Numbers(20), batch_size=3), epochs=2, quarantine=Quarantine(tmp_path / "q.json")
    )
    assert flat(rest.rest()) == list(range(8, 20))
    assert Span(1, 0, 8) in rest.excluded
    assert rest.quarantine.ahead(1) == []


def test_excluded_spans_and_ids_mean_the_same_with_other_ranks():
    quarantine = Quarantine()
    processes = [Process(one, epochs=1, quarantine=quarantine) for one in ranks_of(2, 36, 3, "sequential")]
    for process in processes:
        process.draws(2)
    quarantine.add_spans([Span(0, 18, 24)], "the fourth batch of both ranks")
    quarantine.add_samples([30], "broken")
    had = Counter()
    loaders = ranks_of(3, 36, 2, "sequential")
    new = [
        Process.resumed(processes[rank % 2].save(), one, epochs=1, quarantine=quarantine)
        for rank, one in enumerate(loaders)
    ]
    for process in new:
        had.update(flat(process.rest()))
    assert had == Counter(set(range(12, 36)) - set(range(18, 24)) - {30})


def test_a_span_that_ends_inside_a_row_of_ranks_excludes_the_whole_row():
    quarantine = Quarantine()
    quarantine.add_spans([Span(0, 4, 11)], "recorded under another number of ranks")
    processes = [Process(one, epochs=1, quarantine=quarantine) for one in ranks_of(4, 16, 1, "sequential")]
    assert [flat(process.rest()) for process in processes] == [[0, 12], [1, 13], [2, 14], [3, 15]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after", "cut"), [(4, 8, 5), (8, 4, 2), (4, 3, 7), (5, 7, 6), (4, 8, 9), (4, 4, 5)])
def test_batches_left_are_counted_in_the_size_of_now(before, after, cut, drop_last):
    def make(size: int) -> Any:
        return DataLoader(Numbers(35), batch_size=size, shuffle=True, drop_last=drop_last)

    seeded()
    process = Process(make(before), epochs=1)
    process.draws(min(cut, 35 // before))
    rest = Process.resumed(process.save(), make(after), epochs=1)
    left = []
    for _ in range(20):
        left.append(rest.source.batches_left())
        if not rest.rest(1):
            break
    assert left == [*range(len(left) - 1, -1, -1)]
