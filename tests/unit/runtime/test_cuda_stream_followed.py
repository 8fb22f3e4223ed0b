"""Which stream a run is on is asked cheaply, and another one is made to wait for what was queued before it."""

from __future__ import annotations

import pytest
import torch

from holdfast.runtime.tensors import cuda_streams
from holdfast.runtime.tensors.cuda_streams import StreamTracker, current_stream

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
def device(monkeypatch):
    """A device of which the test says what stream is the current one; `made` are the objects torch has made."""

    class Device:
        def __init__(self):
            self.handle, self.made = 7, []

        def current(self, device):
            assert device == CUDA
            self.made.append(Stream(self.handle))
            return self.made[-1]

    found = Device()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.handle, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", found.current)
    monkeypatch.setattr(cuda_streams, "_last", {})
    return found


def test_an_object_is_made_only_for_another_stream(device):
    first = current_stream(CUDA)
    assert current_stream(CUDA) is first and len(device.made) == 1
    device.handle = 8
    assert current_stream(CUDA).handle == 8 and current_stream(CUDA) is device.made[1]
    device.handle = 7
    assert current_stream(CUDA).handle == 7 and len(device.made) == 3


def test_another_stream_waits_for_the_one_before_there_and_back(device):
    streams = StreamTracker([CUDA, torch.device("cpu")])
    streams.wait_for_last_stream()
    streams.wait_for_last_stream()
    assert [s.waited for s in device.made] == [[]]
    device.handle = 8
    streams.wait_for_last_stream()
    streams.wait_for_last_stream()
    device.handle = 7
    streams.wait_for_last_stream()
    assert [(s.handle, s.waited) for s in device.made] == [(7, []), (8, [7]), (7, [8])]


def test_what_others_have_asked_in_between_makes_no_difference(device):
    streams = StreamTracker([CUDA])
    streams.wait_for_last_stream()
    device.handle = 8
    current_stream(CUDA)
    device.handle = 7
    streams.wait_for_last_stream()
    assert all(s.waited == [] for s in device.made)
    device.handle = 8
    current_stream(CUDA)
    streams.wait_for_last_stream()
    assert device.made[-1].waited == [7]


def test_a_run_without_a_gpu_asks_nobody(device):
    StreamTracker([torch.device("cpu")]).wait_for_last_stream()
    assert device.made == []
