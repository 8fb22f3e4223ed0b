"""Streams in another process: resumed through their state_dict, or by drawing and dropping, or refused."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from test_resume_position import Numbers, Process, flat, seeded, whole_course
from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.base.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")


class Rows(IterableDataset):
    """Numbers in another order for each pass; with `drawn`, from `random` when the pass begins."""

    def __init__(self, count: int = 22, drawn: bool = False) -> None:
        self.count, self.drawn, self.begun = count, drawn, 0

    def __iter__(self):
        order = list(range(self.count))
        if self.drawn:
            random.shuffle(order)
        self.begun += 1
        yield from (torch.tensor(i) for i in order)


class Crops(Rows):
    """Draws each item from the generator that training draws from."""

    def __iter__(self):
        for i in range(self.count):
            yield torch.tensor(i) + 100 * torch.randint(1000, ())


class Known(Rows):
    """Has a state_dict, as streaming datasets do: a loaded state applies to every pass until another is loaded."""

    def __init__(self, count: int = 22) -> None:
        super().__init__(count)
        self.at, self.load, self.given = 0, None, 0

    def __iter__(self):
        self.at = 0 if self.load is None else self.load["at"]
        while self.at < self.count:
            self.at += 1
            self.given += 1
            yield torch.tensor(self.at - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "about": (1, b"x", {2: torch.ones(2)})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["about"][:2] == (1, b"x") and torch.equal(state["about"][2][2], torch.ones(2))
        self.load = copy.deepcopy(state)


STREAMS = {
    "a list": lambda: [torch.arange(k, k + 3) for k in range(0, 21, 3)],
    "an iterable dataset": lambda: DataLoader(Rows(), batch_size=4),
    "shuffled when begun": lambda: DataLoader(Rows(drawn=True), batch_size=4),
    "one by one": lambda: DataLoader(Rows(9), batch_size=None),
    "a worker": lambda: DataLoader(Rows(drawn=True), batch_size=4, num_workers=1, multiprocessing_context="fork"),
    "one with state": lambda: DataLoader(Known(), batch_size=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(STREAMS))
def test_a_resumed_stream_continues_exactly_with_the_same_random_state(kind):
    course = whole_course(STREAMS[kind], epochs=2)
    for cut in range(len(course) + 1):
        seeded()
        process = Process(STREAMS[kind](), epochs=2)
        process.draws(cut)
        saved = process.save()
        process.source.close()
        rest = Process.resumed(saved, STREAMS[kind](), epochs=2)
        rest = Process.resumed(rest.save(), STREAMS[kind](), epochs=2) if kind == "one with state" else rest
        rest.rng.restore(saved[1])
        for batch, stood in course[cut:]:
            assert rest.draw() == batch
            assert rest.rng.capture().same(stood)
        assert rest.rest() == []
        assert rest.ended[-1] == 1
        rest.source.close()


def test_the_number_of_dropped_batches_is_noted():
    process = Process(STREAMS["shuffled when begun"]())
    process.draws(8)
    rest = Process.resumed(process.save(), STREAMS["shuffled when begun"]())
    assert rest.notes == ["2 batches of the stream were drawn and dropped to reach the saved position"]


def test_with_a_state_dict_nothing_is_drawn_again():
    process = Process(DataLoader(Known(), batch_size=4))
    process.draws(4)
    data = Known()
    rest = Process.resumed(process.save(), DataLoader(data, batch_size=4))
    assert rest.notes == ["the stream resumed through its own state_dict"]
    assert rest.draw() == [16, 17, 18, 19]
    assert data.given == 4


def test_a_requeued_batch_is_served_again_by_the_next_process():
    for kind in ("an iterable dataset", "one with state"):
        for taken_before in (False, True):
            process = Process(STREAMS[kind]())
            process.draws(2)
            if taken_before:
                process.save()
            draws = [process.source.draw(), process.source.draw()]
            assert process.source.requeue(draws) is None
            position = process.source.position
            rest = Process.resumed(process.save(), STREAMS[kind]())
            assert rest.source.position == position
            assert flat(rest.rest())[:12] == [*range(8, 20)]


def test_the_rest_of_an_excluded_window_is_dropped_by_the_next_process():
    process = Process(STREAMS["an iterable dataset"](), epochs=1)
    process.draws(2)
    process.source.exclude(process.source.position, 2, "a window")
    rest = Process.resumed(process.save(), STREAMS["an iterable dataset"](), epochs=1)
    assert flat(rest.rest()) == [*range(16, 22)]


def test_saved_after_an_epoch_the_next_one_begins():
    process = Process(STREAMS["a list"](), epochs=1)
    process.rest()
    rest = Process.resumed(process.save(), STREAMS["a list"](), epochs=2)
    again = Process.resumed(rest.save(), STREAMS["a list"](), epochs=2)
    for one in (rest, again):
        assert flat(one.rest()) == [*range(21)]
        assert one.ended == [1]


# ---- refused


def test_a_stream_that_gives_other_data_is_refused():
    process = Process(DataLoader(Crops(), batch_size=4))
    process.draws(3)
    with pytest.raises(
        DataError, match="after 3 batches of epoch 0: the stream gives other data.*a generator of its own"
    ):
        Process.resumed(process.save(), DataLoader(Crops(), batch_size=4))


def test_a_stream_that_ends_too_early_is_refused():
    process = Process(DataLoader(Rows(22), batch_size=4))
    process.draws(3)
    with pytest.raises(DataError, match="the stream ended after 2"):
        Process.resumed(process.save(), DataLoader(Rows(8), batch_size=4))
    with pytest.raises(DataError, match="gives other data"):
        Process.resumed(process.save(), DataLoader(Rows(10), batch_size=4))
    process.source.draw().batch.add_(1)  # which cannot be compared any more
    with pytest.raises(DataError, match="at sample 16 of epoch 0: the stream gave 14 in as many batches"):
        Process.resumed(process.save(), DataLoader(Rows(14), batch_size=4))


@pytest.mark.parametrize("kind", [Rows, Known])
def test_another_batch_size_or_number_of_workers_is_refused(kind):
    process = Process(DataLoader(kind(), batch_size=4))
    process.draws(3)
    with pytest.raises(DataError, match="batch_size=2: it was saved with 4"):
        Process.resumed(process.save(), DataLoader(kind(), batch_size=2))
    with pytest.raises(DataError, match="num_workers=1: it was saved with 0"):
        Process.resumed(process.save(), DataLoader(kind(), batch_size=4, num_workers=1))


def test_a_position_of_indexed_data_is_refused():
    process = Process(DataLoader(Numbers(8), batch_size=4))
    process.draws(1)
    with pytest.raises(DataError, match="drew from a map-style dataset, this one draws from a stream"):
        Process.resumed(process.save(), STREAMS["a list"]())


def test_a_state_that_cannot_be_saved_is_noted_and_the_stream_is_drawn_and_dropped():
    class Odd(Known):
        def state_dict(self):
            return {"at": object()}

    process = Process(DataLoader(Odd(), batch_size=4))
    process.draws(3)
    rest = Process.resumed(process.save(), DataLoader(Odd(), batch_size=4))
    assert "it holds a object" in rest.notes[0]
    assert rest.notes[1].startswith("3 batches of the stream were drawn and dropped")
    assert rest.draw() == [12, 13, 14, 15]


def test_a_state_that_the_loader_rejects_is_refused():
    class Picky(Known):
        def load_state_dict(self, state):
            raise AssertionError("no such worker")

    process = Process(DataLoader(Picky(), batch_size=4))
    process.draws(3)
    with pytest.raises(DataError, match="Picky.load_state_dict refuses.*no such worker"):
        Process.resumed(process.save(), DataLoader(Picky(), batch_size=4))
    with pytest.raises(DataError, match="had a state_dict"):
        Process.resumed(process.save(), DataLoader(Rows(), batch_size=4))


def test_a_batch_modified_in_place_cannot_be_compared_and_that_is_noted():
    process = Process(STREAMS["an iterable dataset"]())
    process.source.draw().batch.add_(1)
    rest = Process.resumed(process.save(), STREAMS["an iterable dataset"]())
    assert "could not be checked" in rest.notes[0]
