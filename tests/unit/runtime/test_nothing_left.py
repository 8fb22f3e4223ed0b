"""Data of which the quarantine leaves nothing ends the run with an error; without a bound it would be read for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.open import open_source
from holdfast.runtime.data.source import SourceSetup
from holdfast.runtime.state.rng import Rng

COUNT = 12


class Endless(Sampler):
    """Draws samples with replacement and does not end. It raises after so many that the guard should have stopped."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(60_000):
            yield random.randrange(COUNT)
        raise RuntimeError("read for ever")

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError
        return self.length


class ShardAnEpoch(Sampler):
    """Yields another third of the data in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * (self.epoch % 3), 4 * (self.epoch % 3) + 4))

    def __len__(self) -> int:
        return 4


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(COUNT))


def source_of(loader: Any, quarantine: Quarantine, epochs: int | None = None, keep_batch_size: bool = False) -> Any:
    setup = SourceSetup(
        rng=Rng(),
        quarantine=quarantine,
        epochs=epochs,
        first_epoch=0,
        on_epoch_end=lambda _: None,
        before_iter=lambda: None,
        on_exclusion=lambda *_: None,
        keep_batch_size=keep_batch_size,
    )
    return open_source(loader, setup)


def map_style(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(COUNT)), **{"batch_size": 4, **options})


def without(samples: Any) -> Quarantine:
    quarantine = Quarantine()
    quarantine.add_samples(samples, "bad rows")
    return quarantine


def without_epochs(count: int) -> Quarantine:
    quarantine = Quarantine()
    quarantine.add_spans([Span(epoch, 0, COUNT) for epoch in range(count)], "bad epochs")
    return quarantine


@pytest.mark.parametrize("epochs", [None, 1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"drop_last": True, "batch_size": 5},
        {"batch_size": None},
        {"sampler": ShardAnEpoch()},
    ],
    ids=["plain", "shuffled", "drop_last", "not batched", "a shard an epoch"],
)
def test_every_sample_quarantined_is_an_error_with_the_number_and_the_cure(options, epochs):
    source = source_of(map_style(**options), without(range(COUNT)), epochs)
    with pytest.raises(DataError, match=r"no sample left .*\(12 samples.*holdfast ack RUN --release-data"):
        source.draw()


def test_workers_that_load_ahead_change_nothing():
    with pytest.raises(DataError, match="no sample left"):
        source_of(map_style(num_workers=1), without(range(COUNT))).draw()


@pytest.mark.parametrize("length", [None, COUNT])
def test_a_sampler_without_end_does_not_look_for_a_sample_for_ever(length):
    with pytest.raises(DataError, match="no sample left"):
        source_of(map_style(sampler=Endless(length)), without(range(COUNT))).draw()


def test_a_sampler_without_end_finds_the_last_sample_that_is_left():
    source = source_of(map_style(sampler=Endless(), batch_size=1), without(range(1, COUNT)))
    assert [source.draw().ids for _ in range(3)] == [[0]] * 3


def test_several_ranks_end_too_instead_of_serving_quarantined_samples():
    with pytest.raises(DataError, match="no sample left"):
        source_of(map_style(), without(range(COUNT)), keep_batch_size=True).draw()


def test_several_ranks_replace_samples_whatever_foreign_ids_are_quarantined():
    source = source_of(map_style(), without([0, *range(100, 200)]), keep_batch_size=True)
    assert source.draw().ids == [1, 1, 2, 3]


def test_samples_quarantined_in_the_middle_of_a_run_end_it():
    quarantine = Quarantine()
    source = source_of(map_style(), quarantine)
    source.draw()
    quarantine.add_samples(range(COUNT), "found to be bad")
    with pytest.raises(DataError, match="no sample left"):
        source.draw()


def test_one_epoch_without_samples_is_passed_over_if_the_next_has_some():
    source = source_of(map_style(sampler=ShardAnEpoch()), without(range(4)), epochs=5)
    ids = []
    with pytest.raises(StopIteration):
        while True:
            ids.append(source.draw().ids)
    assert ids == [[4, 5, 6, 7], [8, 9, 10, 11], [4, 5, 6, 7]]


@pytest.mark.parametrize("loader", [map_style(), DataLoader(Stream(), batch_size=4)], ids=["map_style", "stream"])
class TestRanges:
    @pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
    def test_many_whole_epochs_are_passed_over(self, loader):
        assert source_of(loader, without_epochs(100)).draw().span == Span(100, 0, 4)

    @pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
    def test_more_epochs_than_any_incident_leaves_out_are_an_error(self, loader):
        with pytest.raises(DataError, match=r"no sample left .*600 ranges"):
            source_of(loader, without_epochs(600)).draw()


def test_a_range_that_covers_the_last_epoch_is_no_error():
    with pytest.raises(StopIteration):
        source_of(map_style(), without_epochs(2), epochs=2).draw()


def test_a_window_ahead_of_more_batches_than_any_incident_leaves_out_is_an_error_and_writes_nothing():
    quarantine = Quarantine()
    quarantine.add_ahead(0, 0, 10**9, "from a stranger")
    with pytest.raises(DataError, match="no sample left"):
        source_of(map_style(), quarantine).draw()
    assert len(quarantine.entries) == 1


def test_an_empty_loader_is_an_error_also_for_one_epoch():
    with pytest.raises(DataError, match="no batches"):
        source_of(map_style(drop_last=True, batch_size=COUNT + 1), Quarantine(), epochs=1).draw()
