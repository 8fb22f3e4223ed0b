"""Map-style loaders keep the user's order and draws; excluded samples are never loaded."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.indexed import IndexedSource
from holdfast.runtime.data.open import open_source
from holdfast.runtime.data.source import Position, SourceSetup
from holdfast.runtime.state.rng import Rng
from marks import examples


class Numbers(Dataset):
    """Item i is i. Counts loads."""

    def __init__(self, count: int = 48) -> None:
        self.count, self.loaded = count, Counter()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        self.loaded[int(i)] += 1
        return torch.tensor(int(i))


class Calls:
    """Records the callbacks of a source."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.excluded: list[tuple[Span, int, str]] = []


def source_of(loader, quarantine=None, epochs=2, first_epoch=0) -> tuple[IndexedSource, Calls, Quarantine]:
    calls, quarantine = Calls(), quarantine or Quarantine()
    setup = SourceSetup(
        rng=Rng(),
        quarantine=quarantine,
        epochs=epochs,
        first_epoch=first_epoch,
        on_epoch_end=calls.ended.append,
        before_iter=lambda: None,
        on_exclusion=lambda *about: calls.excluded.append(about),
    )
    source = open_source(loader, setup)
    assert isinstance(source, IndexedSource)
    return source, calls, quarantine


def drain(source: Any, limit: int = 10_000) -> list[list[int]]:
    """Return all remaining batches."""
    found = []
    for _ in range(limit):
        try:
            found.append(source.draw().batch.tolist())
        except StopIteration:
            break
    return found


def streams() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def seeded() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


SAMPLERS = {
    "sequential": lambda data: {},
    "shuffle": lambda data: {"shuffle": True},
    "generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=70)},
    "replacement from a generator": lambda data: {
        "sampler": RandomSampler(data, replacement=True, num_samples=70, generator=torch.Generator().manual_seed(1))
    },
    "weighted": lambda data: {"sampler": WeightedRandomSampler([1.0] * 10 + [3.0] * 38, 40)},
    "drop_last": lambda data: {"shuffle": True, "drop_last": True},
    "a list of batches": lambda data: {"batch_size": 1, "batch_sampler": [[0, 1, 2], [7], [5, 5]]},
}


def loader_of(kind: str, data: Numbers | None = None) -> DataLoader:
    data = data or Numbers()
    return DataLoader(data, **{"batch_size": 7, **SAMPLERS[kind](data)})


@pytest.mark.parametrize("kind", sorted(SAMPLERS))
def test_order_and_draws_are_those_of_the_plain_loader(kind):
    """The same batches as the plain loader, and every generator in the same state after each batch."""
    seeded()
    loader, expected, stood = loader_of(kind), [], []
    for _ in range(2):
        for batch in loader:
            expected.append(batch.tolist())
            stood.append(streams())
    seeded()
    source, calls, _ = source_of(loader_of(kind))
    for batch, where in zip(expected, stood, strict=True):
        assert source.draw().batch.tolist() == batch
        assert streams() == where
    with pytest.raises(StopIteration):
        source.draw()
    assert calls.ended == [0, 1]


@pytest.mark.parametrize("kind", sorted(SAMPLERS))
def test_the_users_loader_is_not_modified(kind):
    loader = loader_of(kind)
    before = dict(vars(loader))
    source, *_ = source_of(loader)
    drain(source)
    source.close()
    assert vars(loader).keys() == before.keys()
    assert all(vars(loader)[k] is before[k] for k in before)
    assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "generator", "replacement from a generator"])
def test_excluded_batches_are_never_loaded(kind):
    seeded()
    loader = loader_of(kind)
    plain = [b.tolist() for _ in range(2) for b in loader]
    per_epoch = len(plain) // 2
    seeded()
    data = Numbers()
    source, calls, _ = source_of(loader_of(kind, data))
    first = source.draw().batch.tolist()
    loads = sum(data.loaded.values())
    source.exclude(Position(0, 1, len(first)), 4, "test")
    assert sum(data.loaded.values()) == loads, "excluding loads nothing"
    rest = drain(source)
    assert [first, *rest] == plain[:1] + plain[5:]
    expected = Counter(i for b in plain[:1] + plain[5:] for i in b)
    assert data.loaded == expected
    assert calls.excluded == [(Span(0, 7, 35), 4, "test")]
    assert len(rest) == 2 * per_epoch - 5


def test_a_window_past_the_end_of_an_epoch_continues_in_the_next_one():
    data = Numbers(21)
    source, calls, quarantine = source_of(DataLoader(data, batch_size=7), epochs=4)
    source.draw()
    source.exclude(source.position, 7, "long")
    assert calls.excluded == [(Span(0, 7, 21), 2, "long")]
    assert quarantine.ahead(1) == [(0, 5)]
    # Epoch 1 goes whole; of epoch 2 two batches; its remaining one and epoch 3 are served.
    assert drain(source) == [[14, 15, 16, 17, 18, 19, 20], [*range(7)], [*range(7, 14)], [*range(14, 21)]]
    assert quarantine.spans() == [Span(0, 7, 21), Span(1, 0, 21), Span(2, 0, 14)]
    assert quarantine.ahead(1) == quarantine.ahead(2) == []
    assert calls.ended == [0, 1, 2, 3]
    assert sum(data.loaded.values()) == 7 * 5


def test_a_window_in_an_epoch_that_a_seek_forgets():
    """The snapshot is in epoch 0, the onset in epoch 1: the seek forgets epoch 1, and the window waits for it."""
    source, calls, quarantine = source_of(DataLoader(Numbers(21), batch_size=7), epochs=2)
    start = source.draw() and source.position
    drain(source, 4)
    onset = Position(1, 1, 7)
    source.seek(start)
    source.exclude(onset, 1, "later")
    assert quarantine.ahead(1) == [(1, 1)]
    assert drain(source) == [[*range(7, 14)], [*range(14, 21)], [*range(7)], [*range(14, 21)]]
    assert quarantine.spans() == [Span(1, 7, 14)]
    assert calls.ended == [0, 0, 1]


def test_the_quarantine_of_a_previous_process_applies_from_the_start(tmp_path):
    kept = Quarantine(tmp_path / "quarantine.json")
    kept.add_spans([Span(0, 7, 14), Span(1, 0, 7)], "life one")
    kept.add_samples([15, 16], "life one")
    kept.add_ahead(1, 2, 1, "life one")
    data = Numbers(21)
    source, _, again = source_of(DataLoader(data, batch_size=7), Quarantine(tmp_path / "quarantine.json"))
    assert drain(source) == [[*range(7)], [14, 17, 18, 19, 20], [*range(7, 14)]]
    assert not {15, 16} & set(data.loaded)
    assert again.spans() == [Span(0, 7, 14), Span(1, 0, 7), Span(1, 14, 21)]


def test_a_batch_of_only_quarantined_samples_is_not_served():
    source, *_ = source_of(DataLoader(Numbers(21), batch_size=7), epochs=1)
    source._quarantine.add_samples(range(7, 14), "all of it")
    assert drain(source) == [[*range(7)], [*range(14, 21)]]


@pytest.mark.parametrize("index", [int, np.int64, torch.tensor])
def test_sample_ids_may_be_any_kind_of_integer(index):
    batches = [[index(i) for i in range(k, k + 3)] for k in (0, 3)]
    source, *_ = source_of(DataLoader(Numbers(6), batch_sampler=batches), epochs=1)
    source._quarantine.add_samples([1, 5], "known")
    assert drain(source) == [[0, 2], [3, 4]]


def test_a_requeued_batch_is_loaded_again_with_the_same_random_state():
    seeded()
    data = Numbers(21)
    source, *_ = source_of(DataLoader(data, batch_size=7, shuffle=True))
    first, second = source.draw(), source.draw()
    stood = streams()
    assert source.requeue([second]) is None
    again = source.draw()
    assert again.batch.tolist() == second.batch.tolist()
    assert (again.span, again.begin) == (second.span, second.begin)
    assert streams() == stood
    assert max(data.loaded[int(i)] for i in second.batch) == 2
    assert max(data.loaded[int(i)] for i in first.batch) == 1


def test_seeking_to_a_forgotten_epoch_raises():
    source, *_ = source_of(DataLoader(Numbers(21), batch_size=7), epochs=3)
    for _ in range(5):
        source.draw()
    source.forget_before(source.position)
    with pytest.raises(DataError, match="no longer on record"):
        source.seek(Position(0, 1, 7))


def test_forgetting_keeps_the_record_small():
    source, calls, _ = source_of(DataLoader(Numbers(700), batch_size=7), epochs=3)
    for _ in range(150):
        source.draw()
        source.forget_before(source.position)
        assert len(source._order._batches) <= 1
        assert len(source._orders) == 1
    assert len(drain(source)) == 150
    assert calls.ended == [0, 1, 2]


def test_an_empty_loader_raises_instead_of_looping_forever():
    with pytest.raises(DataError, match="no batches"):
        source_of(DataLoader(Numbers(3), batch_size=7, drop_last=True), epochs=None)[0].draw()


def test_workers_get_the_same_order_without_excluded_batches():
    data = Numbers(70)
    loader = DataLoader(data, batch_size=7, num_workers=2, multiprocessing_context="fork")
    source, *_ = source_of(loader, epochs=1)
    first = source.draw().batch.tolist()
    source.seek(source.position)
    source.exclude(Position(0, 3, 21), 5, "test")
    assert [first, *drain(source)] == [[*range(k, k + 7)] for k in (0, 7, 14, 56, 63)]
    source.close()


# ---- against a model of it


class Epochs(Sampler):
    """order = f(epoch), by set_epoch. Every epoch has its own ids."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return iter(order(self.count, self.epoch))


def order(count: int, epoch: int) -> list[int]:
    numbers = list(range(epoch * 1000, epoch * 1000 + count))
    random.Random(epoch).shuffle(numbers)
    return numbers


class Model:
    """A reference: batches by epoch and number, a set of excluded ones, and a position."""

    def __init__(self, count: int, size: int, epochs: int) -> None:
        self.batches = [[order(count, e)[k : k + size] for k in range(0, count, size)] for e in range(epochs)]
        self.excluded: set[tuple[int, int]] = set()
        self.place = (0, 0)

    def every(self) -> list[tuple[int, int]]:
        return [(e, k) for e, epoch in enumerate(self.batches) for k in range(len(epoch))]

    def draw(self) -> list[int] | None:
        for e, k in self.every():
            if (e, k) >= self.place and (e, k) not in self.excluded:
                self.place = (e, k + 1)
                return self.batches[e][k]
        return None

    def exclude(self, start: tuple[int, int], count: int) -> None:
        self.excluded |= set([b for b in self.every() if b >= start][:count])


class Open(Dataset):
    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(i)

    def __len__(self) -> int:
        return 10**6


@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 4), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_sequence_of_draws_seeks_and_exclusions_matches_the_reference(count, size, epochs, data):
    model = Model(count, size, epochs)
    loader = DataLoader(Open(), batch_sampler=BatchSampler(Epochs(count), size, drop_last=False))
    source, _, _ = source_of(loader, epochs=epochs)
    places: list[tuple[Position, tuple[int, int]]] = [(source.position, (0, 0))]
    kept = streams()
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["draw", "draw", "draw", "seek", "exclude", "forget"]))
        if what == "draw":
            expected = model.draw()
            if expected is None:
                with pytest.raises(StopIteration):
                    source.draw()
            else:
                draw = source.draw()
                assert draw.batch.tolist() == expected
                epoch, k = model.place
                assert draw.span == Span(epoch, (k - 1) * size, min(k * size, count))
                assert draw.begin == Position(epoch, k - 1, (k - 1) * size)
                places.append((source.position, model.place))
        elif what == "seek":
            position, place = data.draw(st.sampled_from(places))
            source.seek(position)
            model.place = place
            places = [p for p in places if p[1] <= place]
        elif what == "exclude":
            # As after a rollback: from a place at or after the one that was returned to.
            behind = data.draw(st.integers(0, 5))
            epoch, k = model.place
            start, amount = (epoch, k + behind), data.draw(st.integers(1, 12))
            source.seek(source.position)
            source.exclude(Position(max(epoch, source.position.epoch), start[1], start[1] * size), amount, "test")
            model.exclude(start, amount)
        else:
            source.forget_before(places[0][0])
    rest = drain(source)
    expected_rest = []
    while (batch := model.draw()) is not None:
        expected_rest.append(batch)
    assert rest == expected_rest
    assert streams()[1:] == kept[1:]
