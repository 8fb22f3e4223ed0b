"""A run that moves to another CUDA stream waits there for the work it queued before."""

from __future__ import annotations

import pytest
import torch

from holdfast.runtime.tensors.cuda_streams import StreamTracker

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, handle):
        self.handle, self.waited = handle, []

    def __eq__(self, other):
        return self.handle == other.handle

    __hash__ = None

    def wait_stream(self, other):
        self.waited.append(other.handle)


@pytest.fixture
def streams(monkeypatch):
    """Every stream that torch has returned as the current one; the test sets `handle`."""

    class Streams(list):
        handle = 7

        def current(self, device):
            assert device == CUDA
            self.append(Stream(self.handle))
            return self[-1]

    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current)
    return streams


def test_another_stream_waits_for_the_one_before_there_and_back(streams):
    tracker = StreamTracker([CUDA, torch.device("cpu")])
    for handle in (7, 7, 8, 8, 7):
        streams.handle = handle
        tracker.wait_for_last_stream()
    assert [s.waited for s in streams] == [[], [], [7], [], [8]]


def test_a_run_without_a_gpu_asks_for_no_stream(streams):
    StreamTracker([torch.device("cpu")]).wait_for_last_stream()
    assert not streams
