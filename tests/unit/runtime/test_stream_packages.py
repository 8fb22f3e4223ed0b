"""Loaders of torchdata, Hugging Face datasets and WebDataset: what a resume through their own state gives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from test_resume_position import Process, seeded, whole_course
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from holdfast.core.base.errors import DataError, HoldfastWarning
from holdfast.runtime.data.indexed import IndexedSource
from marks import slow

pytestmark = pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")


class Share(IterableDataset):
    """Every worker's share of some numbers."""

    def __init__(self) -> None:
        self.at, self.load = 0, None

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self.at, self.load = first if self.load is None else self.load, None
        while self.at < 30:
            self.at += stride
            yield torch.tensor(self.at - stride)


class Known(Share):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.load = state["at"]


class Noisy(Dataset):
    """Draws in its worker."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(i + random.random()) + torch.rand(())


def workers(count: int) -> dict[str, Any]:
    return {"num_workers": count, "multiprocessing_context": "fork" if count else None}


def resumed(make: Any, cut: int, epochs: int = 2) -> tuple[list[Any], list[Any], list[str]]:
    """Return what follows a resume, what follows without one, and the notes."""
    course = [batch for batch, _ in whole_course(make, epochs=epochs)]
    seeded()
    loader = make()
    process = Process(loader, epochs=epochs)
    process.draws(cut)
    saved = process.save()
    process.source.close()
    loader._iterator = (
        None  # torchdata's loader keeps its workers; collected among those of others they take long to end
    )
    rest = Process.resumed(saved, make(), epochs=epochs)
    found = rest.rest()
    rest.source.close()
    return found, course[cut:], rest.notes


@pytest.mark.slow
@pytest.mark.parametrize("cut", [3, *slow(8, 10)])
@pytest.mark.parametrize("count", [2, *slow(0, 1)])
@pytest.mark.parametrize("data", [Known, *slow(Share)])
def test_torchdata_resumes_an_iterable_dataset_through_its_state(data, count, cut):
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    found, expected, notes = resumed(lambda: StatefulDataLoader(data(), batch_size=4, **workers(count)), cut)
    assert found == expected
    assert notes == ["the stream resumed through its own state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [5, *slow(0, 8, 11)])
@pytest.mark.parametrize(("count", "persistent"), [(2, False), *slow((0, False), (1, True), (2, True))])
def test_torchdata_over_a_map_style_dataset_is_exact_in_its_workers_too(count, persistent, cut):
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        about = {**workers(count), "persistent_workers": persistent}
        return StatefulDataLoader(Noisy(), batch_size=4, shuffle=True, **about)

    found, expected, notes = resumed(make, cut)
    assert found == expected and notes == []
    course = [batch for batch, _ in whole_course(make, epochs=2)]
    seeded()
    process = Process(make(), epochs=2)
    assert isinstance(process.source, IndexedSource)
    process.draws(3)
    position, rng = process.source.position, process.rng.capture()
    process.draws(7)
    process.source.seek(position)
    process.rng.restore(rng)
    assert process.rest() == course[3:]
    process.source.close()


@pytest.mark.parametrize(("count", "persistent"), [(2, False), *slow((0, False), (2, True))])
def test_torchdata_gives_the_order_that_it_gives_without_the_guard(count, persistent):
    """Its sampler draws when it is iterated over, and its loader with workers does that twice."""
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        about = {**workers(count), "persistent_workers": persistent}
        return StatefulDataLoader(Noisy(), batch_size=4, shuffle=True, **about)

    seeded()
    loader = make()
    expected = []
    for batch in (batch for _ in range(2) for batch in loader):
        expected.append(batch.tolist())
        torch.rand(3), random.random(), np.random.rand()  # as `Process.draw` does
    loader._iterator = None
    assert [batch for batch, _ in whole_course(make, epochs=2)] == expected


def test_a_state_that_was_loaded_into_a_map_style_loader_is_refused():
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Noisy(), batch_size=4)
    next(iter(loader))
    again = StatefulDataLoader(Noisy(), batch_size=4)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="a state was loaded into the StatefulDataLoader"):
        Process(again)
    seeded()
    used = Process(loader, epochs=1)  # read and asked for its state before: that changes nothing
    assert len(used.rest()) == 8


@pytest.mark.parametrize("cut", range(2, 16))
def test_a_dataset_that_accelerate_reads_one_batch_ahead_resumes_at_the_next_batch(cut):
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader

    def make() -> Any:
        return prepare(DataLoader(Known(), batch_size=4), num_processes=1, process_index=0)

    course = [batch for batch, _ in whole_course(make, epochs=2)]
    seeded()
    process = Process(make(), epochs=2)
    for number in range(cut):  # a state is kept at the draw after it was asked for
        process.draws(1)
        if number % 3 == 0:
            process.save()
    rest = Process.resumed(process.save(), make(), epochs=2)
    assert rest.rest() == course[cut:]
    is_by_state = any(note.endswith("through its own state_dict") for note in rest.notes)
    assert is_by_state == (cut not in (9, 10)), "there, the epoch has begun, and no state was asked for before a draw"


def rows(batch: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([int(row["x"]) for row in batch])


@pytest.mark.parametrize("count", [0, *slow(2)])
@pytest.mark.parametrize("kind", ["map-style", "iterable", *slow("iterable, torchdata")])
def test_hugging_face_datasets(kind, count):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(40))})

    def make() -> Any:
        about: dict[str, Any] = {"batch_size": 4, "collate_fn": rows, **workers(count)}
        if kind == "map-style":
            return DataLoader(data.with_format("torch"), shuffle=True, **about)
        stream = data.to_iterable_dataset(num_shards=4).with_format("torch")
        if kind == "iterable":
            return DataLoader(stream, **about)
        pytest.importorskip("torchdata")
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(stream, **about)

    for cut in (3, 10, 12):
        found, expected, notes = resumed(make, cut)
        assert found == expected
        if kind == "iterable" and cut != 10:
            assert notes[0].endswith("through its own state_dict" if count == 0 else "to reach the saved position")


def test_a_shuffle_buffer_that_a_state_does_not_hold_is_reported_at_the_start():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=2)
    shuffled = stream.shuffle(seed=1, buffer_size=8).with_format("torch")
    for data, is_lost in ((stream.with_format("torch"), False), (shuffled, True)):
        with pytest.warns(HoldfastWarning, match="through its state_dict") as warned:
            Process(DataLoader(data, batch_size=4, collate_fn=rows))
        assert any("shuffle buffer" in str(each.message) for each in warned) == is_lost


def test_that_a_state_does_not_hold_the_draws_of_workers_is_reported_at_the_start():
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    for count in (0, 1):
        with pytest.warns(HoldfastWarning, match="through its state_dict") as warned:
            Process(StatefulDataLoader(Known(), batch_size=4, **workers(count)))
        assert any("what its workers draw at random" in str(each.message) for each in warned) == bool(count)


def webdataset(folder: Any, shuffled: bool) -> Any:
    wds = pytest.importorskip("webdataset")
    for shard in range(2):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as tar:
            for i in range(12):
                tar.write({"__key__": f"{shard * 12 + i:04d}", "cls": shard * 12 + i})
    data = wds.WebDataset(str(folder / "{0..1}.tar"), shardshuffle=False, empty_check=False)
    data = data.shuffle(8) if shuffled else data
    data = data.decode().to_tuple("cls").map(lambda row: torch.tensor(int(row[0])))
    return DataLoader(data, batch_size=4)


class AskedByItsLoader(Known):
    """As MosaicML's StreamingDataset: only its own loader knows what to ask for."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"at": num_samples}


def test_a_state_dict_that_takes_arguments_is_left_to_its_own_loader():
    found, expected, notes = resumed(lambda: DataLoader(AskedByItsLoader(), batch_size=4), 3)
    assert found == expected
    assert notes == ["3 batches of the stream were drawn and dropped to reach the saved position"]
    with pytest.warns(HoldfastWarning, match="it has no state_dict: a new process draws and drops"):
        Process(DataLoader(AskedByItsLoader(), batch_size=4))


def test_webdataset_is_drawn_and_dropped(tmp_path):
    found, expected, notes = resumed(lambda: webdataset(tmp_path, shuffled=False), 3)
    assert found == expected
    assert notes == ["3 batches of the stream were drawn and dropped to reach the saved position"]


def test_webdatasets_shuffle_draws_its_seed_from_the_clock_so_a_resume_is_refused(tmp_path):
    with pytest.raises(DataError, match="the stream gives other data"):
        resumed(lambda: webdataset(tmp_path, shuffled=True), 3)


def test_what_a_resume_does_with_a_stream_is_said_when_the_run_starts(caplog):
    class Crops(Share):
        def __iter__(self) -> Any:
            return (torch.tensor(k) + torch.randint(100, ()) for k in range(9))

    with pytest.warns(HoldfastWarning, match="ends if the stream then gives other data"):
        process = Process(DataLoader(Crops(), batch_size=3))
    with pytest.warns(HoldfastWarning, match="a loader with in_order=False"):
        Process(DataLoader(Noisy(), batch_size=3, num_workers=2, in_order=False))
    process.draws(2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and lines[0].startswith("holdfast: the stream draws its items from the random generators")
    caplog.clear()
    Process(DataLoader(Share(), batch_size=3)).draws(2)
    assert caplog.records == []


class Late:
    """Begins to iterate its loader with the first batch, as Accelerate's does: the seed of workers is drawn then."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        yield from self.loader


def test_the_seed_of_workers_is_not_taken_for_items_that_a_stream_draws(caplog):
    with pytest.warns(HoldfastWarning):
        Process(Late(DataLoader(Share(), batch_size=3))).draws(3)
    assert caplog.records == []
    with pytest.warns(HoldfastWarning):
        Process(Late(DataLoader(Noisy(), batch_size=3))).draws(3)
    assert "draws its items from the random generators" in caplog.text
