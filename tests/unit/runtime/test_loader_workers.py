"""Random draws inside loader workers are those of a run that never loaded what was left out, after any way back."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from test_resume_position import Process, seeded
from torch.utils.data import DataLoader, Dataset, get_worker_info

from holdfast.core.base.types import Span
from holdfast.runtime.data.saved_position import check_saved_position
from marks import slow

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")

BATCHES = 7
"""in an epoch: workers are at different turns when it ends"""
SIZE = 2


class Augmented(Dataset):
    """Item i is i, who made it and with which seed, and a draw from each global generator."""

    def __init__(self, draws_from: int = 0) -> None:
        self.draws_from = draws_from
        """the first sample that draws"""

    def __len__(self) -> int:
        return BATCHES * SIZE

    def __getitem__(self, i: int) -> torch.Tensor:
        worker = get_worker_info()
        about = [i, *((worker.id, worker.seed % 2**20) if worker is not None else ())]
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))] if i >= self.draws_from else [0.0] * 3
        return torch.tensor([*about, *drawn], dtype=torch.float64)


class InOrder:
    """A batch sampler without some (epoch, batch)."""

    def __init__(self, without: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.without, self.epoch = without, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        return iter([[k * SIZE, k * SIZE + 1] for k in range(BATCHES) if (self.epoch, k) not in self.without])


def init(worker_id: int) -> None:
    """Draws, as many users' do, and seeds NumPy from torch's seed."""
    np.random.seed((torch.initial_seed() + worker_id) % 2**32)
    random.random()


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collates with a draw of its own."""
    return torch.stack(samples) + torch.rand(())


def make(
    workers: int, *, without: Any = (), persistent: bool = False, data: Any = None, method: str = "fork", **more: Any
) -> DataLoader:
    if workers:
        more |= {"persistent_workers": persistent, "multiprocessing_context": method}
    sampler = InOrder(frozenset(without))
    return DataLoader(data or Augmented(), batch_sampler=sampler, num_workers=workers, worker_init_fn=init, **more)


def plain(workers: int, epochs: int = 3, **more: Any) -> list[list[float]]:
    """Every batch of a plain loop."""
    seeded()
    loader, found = make(workers, **more), []
    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)
        found += [batch.reshape(-1).tolist() + drawn_by_training() for batch in loader]
    return found


def drawn_by_training() -> list[float]:
    return [float(torch.rand(())), random.random(), np.random.rand()]


class Training(Process):
    """Training's own draws are part of what is compared."""

    def draw(self) -> list[float]:
        return self.source.draw().batch.reshape(-1).tolist() + drawn_by_training()


def begin(workers: int, **more: Any) -> Training:
    seeded()
    return Training(make(workers, **more))


def skip(process: Training, *, moved: bool = False) -> None:
    """Draw a batch and leave it out, as the skip effect does."""
    source: Any = process.source
    draw = source.draw()
    process.quarantine.add_spans([draw.span], "test")
    process.rng.restore(source.rewind_to(draw))
    if moved:
        source.seek(draw.begin)
    else:
        source.leave_out([draw])


WORKERS = [(0, False), (2, False), (3, True), *slow((1, False), (3, False), (1, True), (2, True))]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("workers", "persistent"), WORKERS)
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("at", [[(0, 3), (0, 4)], [(0, 6), (1, 0)], *slow([(0, 0)], [(0, 6)], [(1, 0), (1, 5)])])
def test_a_skipped_batch_leaves_the_draws_of_a_run_without_it(workers, persistent, moved, at):
    process = begin(workers, persistent=persistent)
    found = []
    for epoch in range(3):
        for k in range(BATCHES):
            if (epoch, k) in at:
                skip(process, moved=moved)
            else:
                found.append(process.draw())
    process.source.close()
    assert found == plain(workers, persistent=persistent, without=at)


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("workers", "persistent"), WORKERS)
@pytest.mark.parametrize("back", [1, 4, *slow(2)])
def test_served_again_after_a_replay_or_a_rollback_over_an_epoch_border(workers, persistent, back):
    process = begin(workers, persistent=persistent)
    found: list[Any] = []
    places: list[Any] = []
    returns = [16, 9, 7, 1]
    while len(found) < 3 * BATCHES:
        if returns and len(found) == returns[-1]:
            n = max(0, returns.pop() - back)
            position, rng = places[n]
            del found[n:], places[n:]
            process.source.seek(position)
            process.rng.restore(rng)
        places.append((process.source.position, process.rng.capture()))
        process.source.save(user_code=False)  # as every snapshot does
        found.append(process.draw())
    process.source.close()
    assert found == plain(workers, persistent=persistent)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("workers", "persistent"), WORKERS)
@pytest.mark.parametrize("cut", [5, 7, 9, *slow(0, 1, 13, 14)])
def test_resumed_in_another_process(workers, persistent, cut):
    whole = plain(workers, persistent=persistent)
    process = begin(workers, persistent=persistent)
    assert process.draws(cut) == whole[:cut]
    saved = process.save()
    process.source.close()
    check_saved_position(saved[0], process.rng.capture())
    rest = Training.resumed(saved, make(workers, persistent=persistent))
    assert rest.rest() == whole[cut:]
    rest.source.close()
    assert rest.notes == []


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param({"method": "spawn", "workers": 1}, marks=pytest.mark.slow),
        {"collate_fn": mixed},
        {"pin_memory": True},
        {"prefetch_factor": 5},
    ],
    ids=["spawn", "collate_fn", "pin_memory", "prefetch_factor"],
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_whatever_the_loader_is_made_of(loader):
    workers, loader = loader.get("workers", 2), {k: v for k, v in loader.items() if k != "workers"}
    reference = plain(workers, 2, without=[(0, 1)], **loader)
    process = begin(workers, **loader)
    found = [process.draw()]
    skip(process)
    found += process.draws(2)
    saved = process.save()
    process.source.close()
    rest = Training.resumed(saved, make(workers, **loader), epochs=2)
    found += rest.rest()
    rest.source.close()
    assert found == reference


def test_samples_without_batches():
    def unbatched() -> DataLoader:
        return DataLoader(Augmented(), batch_size=None, num_workers=2, multiprocessing_context="fork")

    seeded()
    whole = [item.tolist() + drawn_by_training() for item in unbatched()]
    seeded()
    process = Training(unbatched(), epochs=1)
    found = process.draws(5)
    saved = process.save()
    process.source.close()
    rest = Training.resumed(saved, unbatched(), epochs=1)
    assert found + rest.rest() == whole
    rest.source.close()


def test_workers_that_draw_nothing_keep_what_they_prefetched():
    process = begin(2, data=Augmented(draws_from=99))
    process.draw()
    iterator = process.source._iterator
    skip(process)
    process.draws(3)
    assert process.source._iterator is iterator
    assert not process.source._workers.have_drawn
    process.source.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_draw_after_a_skip_is_exact_if_none_came_before_it(persistent):
    """The first batches draw nothing, so a skip keeps what was prefetched until one draws."""
    data = Augmented(draws_from=5 * SIZE)
    process = begin(2, data=data, persistent=persistent)
    skip(process)
    found = process.rest()
    process.source.close()
    reference = plain(2, data=data, persistent=persistent, without=[(0, 0)])
    drawn = [[row for row in batch if not isinstance(row, int)] for batch in found]
    # Batches 1 to 4 draw nothing: only the worker that they name may differ.
    assert drawn[4:] == reference[4:]
    assert [batch[::6] for batch in found] == [batch[::6] for batch in reference]


def test_memory_holds_the_states_of_saved_positions_and_of_unsettled_steps_only():
    process = begin(2)
    for n in range(20):
        if n % 5 == 0:
            process.source.save(user_code=False)
        process.draw()
    marks = [key for key, _ in process.source._workers._marks]
    assert len(marks) <= 4 + 10
    process.source.forget_before(process.source.position)
    assert len(process.source._workers._marks) == 1
    process.source.close()


def test_a_snapshot_right_after_a_skip_is_returned_to_when_nothing_older_is_known():
    process = begin(2)
    process.draws(2)
    skip(process)
    process.source.save(user_code=False)
    position, rng = process.source.position, process.rng.capture()
    process.source.forget_before(position)
    for _ in range(3):
        process.draw()
        process.source.save(user_code=False)
    process.source.seek(position)
    process.rng.restore(rng)
    found = process.rest()
    process.source.close()
    assert found == plain(2, without=[(0, 2)])[2:]


def test_notes_say_what_is_not_exact():
    process = begin(2)
    process.draws(3)
    saved, rng = process.save()
    process.source.close()
    old = {name: value for name, value in saved.items() if name != "worker_rng"}
    check_saved_position(old, process.rng.capture())
    assert "no random state of this rank's loader workers" in Training.resumed((old, rng), make(2)).notes[0]
    assert "random draws while loading them differ" in Training.resumed((saved, rng), make(3)).notes[0]
    quiet = begin(2, data=Augmented(99))
    quiet.draws(3)
    saved = quiet.save()
    quiet.source.close()
    assert Training.resumed(saved, make(3)).notes == ["num_workers was 2, it is 3: the same samples come"]


@pytest.mark.parametrize("damage", ["python", "numpy", "torch", "given"])
def test_a_damaged_worker_state_is_found_before_it_is_used(damage):
    from holdfast.core.base.errors import RunDirError

    process = begin(2)
    process.draws(3)
    saved = copy.deepcopy(process.save()[0])
    process.source.close()
    if damage == "given":
        saved["worker_rng"]["given"] = "3"
    else:
        saved["worker_rng"]["states"][0][damage] = 5
    with pytest.raises(RunDirError):
        check_saved_position(saved, process.rng.capture())


@pytest.mark.slow
def test_an_error_in_a_worker_is_raised_as_without_a_guard():
    class Broken(Augmented):
        def __getitem__(self, i: int) -> torch.Tensor:
            if i == 5:
                raise KeyError("row 5")
            return super().__getitem__(i)

    process = begin(2, data=Broken())
    process.draws(2)
    with pytest.raises(KeyError, match="row 5"):
        process.draw()
    process.source.close()
    gc.collect()  # takes 10 s, with or without a guard; later it would be among the workers of another test


def test_a_samples_span_is_left_out_ahead_as_if_it_were_not_there():
    """Data that was quarantined before it is loaded is never given to a worker."""
    process = begin(2)
    process.quarantine.add_spans([Span(0, 4, 8)], "test")
    found = process.rest()
    process.source.close()
    assert found == plain(2, without=[(0, 2), (0, 3)])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("workers", "persistent"), WORKERS)
def test_replayed_and_then_skipped(workers, persistent):
    process = begin(workers, persistent=persistent)
    found = process.draws(3)
    draw = process.source.draw()
    process.source.requeue([draw])
    process.rng.restore(process.source.rewind_to(draw))
    skip(process)
    found += process.rest()
    process.source.close()
    assert found == plain(workers, persistent=persistent, without=[(0, 3)])
