"""What a healthy step does without: kernels of its own for a single part, an encoder where it trains, a thread at a fork."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from operations import Operations
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.types import Outcome, Plan, Signal, Span, Status
from holdfast.core.record.journal import dumps
from holdfast.runtime.record.records import encode_metrics


def operations(of: Any) -> list[str]:
    with Operations() as seen:
        of()
    return sorted(seen.names)


# ---- a step's own kernels


def test_backward_of_a_single_part_adds_one_detach_and_its_mean_nothing():
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(x), batch_size=4)
    with guard:
        for step in guard.steps(loader, max_steps=1):
            with step:
                for (batch,) in step.microbatches():
                    bare = operations(model(batch).square().mean().backward)
                    model.zero_grad()
                    loss = model(batch).square().mean()
                    guarded = operations(partial(step.backward, loss))
                    assert operations(step.mean_loss) == []
                    assert torch.equal(step.mean_loss(), loss.detach())
    assert Counter(guarded) - Counter(bare) == {"aten.detach.default": 1}


def test_the_mean_of_several_parts_is_by_their_weights():
    model = nn.Linear(3, 1)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(torch.randn(5, 3)), batch_size=5)
    with guard:
        for step in guard.steps(loader, max_steps=1):
            losses = []
            with step:
                for part in step.microbatches(2):
                    loss = model(part[0]).square().mean()
                    losses.append(loss.detach())
                    step.backward(loss)
                expected = (losses[0] + losses[1] * (2 / 3)) / (1 + 2 / 3)
                assert torch.allclose(step.mean_loss(), expected)
                assert not torch.equal(step.mean_loss(), losses[0])


# ---- a row of metrics.jsonl


def row_as_a_dict(outcome: Outcome) -> bytes:
    signal = outcome.signal
    row = {name: getattr(signal, name) for name in signal.__struct_fields__ if name != "batch"}
    return dumps({**{k: v for k, v in row.items() if v is not None}, "status": outcome.status})


numbers = st.floats(allow_nan=True, allow_infinity=True)
maybe = st.none() | numbers
signals = st.builds(
    Signal, step=st.integers(0, 10**12), loss=numbers, grad_norm=maybe, lr=maybe, loss_scale=maybe, update_rms=maybe,
    batch=st.none() | st.integers(0, 2**32), flags=st.integers(0, 31), overflow=st.booleans(), loss_limit=maybe,
    data=st.lists(st.builds(Span, *[st.integers(0, 10**9)] * 3), max_size=3).map(tuple), samples=st.none() | st.integers(0),
    seconds=maybe,
)  # fmt: skip


@given(signals, st.sampled_from(Status))
def test_a_line_is_the_row_as_it_always_was(signal, status):
    outcome = Outcome(status=status, signal=signal, plan=Plan(reason="not in it"))
    assert encode_metrics(outcome) == row_as_a_dict(outcome)


def test_a_limit_that_is_a_number_of_another_library_is_a_number_in_the_line():
    for limit in (np.float32(1.5), np.float64(1.5), torch.tensor(1.5), np.int64(2)):
        outcome = Outcome(status=Status.COMMITTED, signal=Signal(step=1, loss=1.0, loss_limit=limit))  # type: ignore[arg-type]
        assert encode_metrics(outcome) == row_as_a_dict(outcome)
        assert b'"loss_limit":%g' % float(limit) in encode_metrics(outcome)


# ---- threads and forks


def test_no_thread_of_the_metrics_runs_while_workers_are_forked(tmp_path, monkeypatch):
    model = nn.Linear(2, 1)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), run_dir=tmp_path)
    loader = DataLoader(torch.randn(8, 2), batch_size=4, num_workers=1, multiprocessing_context="fork")
    at_fork: list[bool] = []
    make = DataLoader._get_iterator

    def forks(self: Any) -> Any:
        at_fork.append(any(t.name == "holdfast-metrics" for t in threading.enumerate()))
        return make(self)

    monkeypatch.setattr(DataLoader, "_get_iterator", forks)
    between: list[bool] = []
    with guard:
        for step in guard.steps(loader, epochs=3):
            with step:
                for batch in step.microbatches():
                    step.backward(model(batch).mean())
            between.append(any(t.name == "holdfast-metrics" for t in threading.enumerate()))
    assert at_fork == [False] * 3
    assert any(between)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
