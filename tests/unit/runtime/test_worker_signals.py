"""Loader workers outlive a SIGTERM from outside, if their process handles it, and end when their process says so."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast
from holdfast.runtime.data.worker_signals import iterate

SAMPLES = 24


class Pids(Dataset):
    """The process that loads each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> int:
        return os.getpid()


class PidStream(IterableDataset):
    def __iter__(self):
        return iter(Pids()[i] for i in range(SAMPLES))


@pytest.fixture
def handled():
    earlier = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, earlier)


def terminate_from_outside(pid: int) -> None:
    subprocess.run(["sh", "-c", f"kill -TERM {pid}"], check=True, timeout=30)


@pytest.mark.filterwarnings("ignore:an iterable dataset has no resumable position")
@pytest.mark.parametrize("data", [Pids(), PidStream()], ids=["map", "stream"])
def test_run_continues_although_its_workers_got_sigterm(handled, data, tmp_path):
    model = torch.nn.Linear(1, 1)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run")
    pids = set()
    with guard:
        for step in guard.steps(DataLoader(data, 1, num_workers=1), epochs=1):
            with step:
                for batch in step.microbatches():
                    step.backward(model(torch.ones(1, 1)).sum())
                    pids.add(int(batch[0]))
            if step.number == 3:
                terminate_from_outside(*pids)
    assert guard.step == SAMPLES
    assert len(pids) == 1


def test_worker_ends_when_its_own_process_says_so(handled):
    iterator = iterate(DataLoader(Pids(), 1, num_workers=1))
    pid = int(next(iterator)[0])
    terminate_from_outside(pid)
    assert int(next(iterator)[0]) == pid
    (worker,) = iterator._workers
    for _ in range(60):  # a signal is lost while an earlier one of the same number waits for the worker
        worker.terminate()
        worker.join(0.5)
        if worker.exitcode is not None:
            break
    assert worker.exitcode == 0


def test_loader_stays_as_it_was(handled):
    def init(worker_id: int) -> None:
        torch.manual_seed(worker_id)

    loader = DataLoader(Pids(), 1, num_workers=1, worker_init_fn=init)
    iterate(loader)
    assert loader.worker_init_fn is init


def test_without_a_handler_sigterm_ends_a_worker():
    iterator = iterate(DataLoader(Pids(), 1, num_workers=1))
    (worker,) = iterator._workers
    next(iterator)
    with pytest.raises(RuntimeError, match="killed by signal|exited unexpectedly"):
        terminate_from_outside(worker.pid)
        worker.join(30)
        list(iterator)
