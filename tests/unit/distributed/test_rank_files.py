"""Written tensors are read back bit for bit; tensors that cannot be written are refused by name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import zlib

import pytest
import torch
from checkpoint_files import bits, is_private, same, save, tensors_of_every_dtype, tensors_of_every_layout

from holdfast.core.base.errors import RunDirError
from holdfast.distributed.checkpoint import rank_reader, rank_writer
from holdfast.distributed.checkpoint.checkpoint_index import read_checkpoint_index
from holdfast.distributed.checkpoint.load import read_parts, read_tensors
from holdfast.distributed.checkpoint.rank_writer import write_rank


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    tensors = tensors_of_every_dtype() | tensors_of_every_layout()
    manifest = save(tmp_path, [tensors])
    back = read_tensors(tmp_path, manifest, tensors, rank=0, size=1)
    assert list(back) == list(tensors)
    assert [n for n in tensors if not same(tensors[n], back[n])] == []
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in back.values())


def test_tensors_read_back_share_no_memory(tmp_path):
    tensors = {"a": torch.zeros(100), "b": torch.zeros(100)}
    manifest = save(tmp_path, [tensors])
    back = read_tensors(tmp_path, manifest, {}, rank=0, size=1)
    back["a"].fill_(1)
    assert back["b"].sum() == 0
    assert read_tensors(tmp_path, manifest, {}, rank=0, size=1)["a"].sum() == 0


def test_file_checksums_are_those_of_the_files_on_disk(tmp_path):
    manifest = save(tmp_path, [tensors_of_every_dtype() | tensors_of_every_layout()])
    data, index = (tmp_path / "rank_00000.bin").read_bytes(), (tmp_path / "rank_00000.json").read_bytes()
    assert manifest.files["rank_00000.bin"].sum == f"crc32:{zlib.crc32(data):08x}"
    assert manifest.files["rank_00000.bin"].bytes == len(data)
    assert manifest.files["rank_00000.json"].sum == f"sha256:{hashlib.sha256(index).hexdigest()}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank_00000.bin", "rank_00000.json"]


def test_every_tensor_starts_at_a_multiple_of_64(tmp_path):
    tensors = tensors_of_every_dtype() | tensors_of_every_layout()
    save(tmp_path, [tensors])
    data = (tmp_path / "rank_00000.bin").read_bytes()
    for entry in json.loads((tmp_path / "rank_00000.json").read_text())["tensors"]:
        assert entry["at"] % 64 == 0
        assert data[entry["at"] : entry["at"] + entry["bytes"]] == bits(tensors[entry["name"]])


def test_write_size_does_not_change_the_file(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(100_003), "b": torch.randn(17), "c": torch.randn(50_001)}
    plain = save(tmp_path / "plain", [tensors])
    monkeypatch.setattr(rank_writer, "WRITE_BYTES", 4099)
    monkeypatch.setattr(rank_writer, "SMALL_BYTES", 100)
    monkeypatch.setattr(rank_writer, "EARLY_SYNC_BYTES", 10_000)
    monkeypatch.setattr(rank_reader, "READ_BYTES", 1013)
    sliced = save(tmp_path / "sliced", [tensors])
    assert sliced.files == plain.files
    back = read_tensors(tmp_path / "sliced", sliced, {}, rank=0, size=1)
    assert all(same(tensors[n], back[n]) for n in tensors)


def test_parts_are_kept_verbatim_for_each_rank(tmp_path):
    text = '{"a": [1,  NaN, "\\u00e9 \\ud800 \\""], "b":1e400}\n'
    save(tmp_path, [{}, {}], parts=text)
    assert [read_parts(tmp_path, rank) for rank in (0, 1)] == [text, text]
    assert read_checkpoint_index(tmp_path).world_size == 2
    with pytest.raises(RunDirError, match="rank_00002.json cannot be read"):
        read_parts(tmp_path, 2)


def test_checkpoint_without_tensors_can_be_read(tmp_path):
    manifest = save(tmp_path, [{}], parts="[]")
    assert read_tensors(tmp_path, manifest, {}, rank=0, size=1) == {}


# ---- several ranks


def test_plain_values_that_no_reader_would_take_are_refused_when_they_are_written(tmp_path):
    with pytest.raises(
        RunDirError, match="would hold 68 MB of numbers and text, and may hold 64 MB: keep large values"
    ):
        save(tmp_path, [{"a": torch.zeros(1)}], parts="[" + "1," * (34 << 20) + "1]")


def test_replicated_tensors_are_written_once_and_evenly(tmp_path):
    sizes = [10_000, 9_000, 8_000, 5_000, 4_000, 3_000, 100, 50, 1, 0]
    tensors = {f"t{i}": torch.randn(n) for i, n in enumerate(sizes)}
    manifest = save(tmp_path, [tensors] * 3)
    names = [e["name"] for r in range(3) for e in json.loads((tmp_path / f"rank_0000{r}.json").read_text())["tensors"]]
    assert sorted(names) == sorted(tensors)
    written = [manifest.files[f"rank_0000{r}.bin"].bytes for r in range(3)]
    assert max(written) - min(written) < 4 * 1_500
    for rank, size in ((0, 1), (0, 2), (4, 5)):
        back = read_tensors(tmp_path, manifest, {}, rank=rank, size=size)
        assert all(same(tensors[n], back[n]) for n in tensors)


def test_each_rank_gets_its_own_private_tensors_and_new_ranks_get_none(tmp_path):
    ranks = [{"own.rng": torch.full((5,), float(r)), "w": torch.ones(3)} for r in range(2)]
    manifest = save(tmp_path, ranks)
    back = [read_tensors(tmp_path, manifest, {}, rank=r, size=3) for r in range(3)]
    assert [b["own.rng"].tolist() if "own.rng" in b else None for b in back] == [[0.0] * 5, [1.0] * 5, None]
    assert all(same(b["w"], torch.ones(3)) for b in back)


def test_nothing_is_ever_unpickled(tmp_path, monkeypatch):
    tensors = tensors_of_every_dtype()
    manifest = save(tmp_path, [tensors])

    def fail(*_, **__):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, fail)
    read_tensors(tmp_path, manifest, {}, rank=0, size=1)


# ---- refused tensors and failing writes


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
    ids=["coo", "csr", "nested", "meta", "quantised"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unsupported_tensor_is_refused_by_name_and_nothing_is_written(tmp_path, make):
    value = make()
    with pytest.raises(RunDirError, match="model.unsupported"):
        write_rank(tmp_path, {"model.unsupported": value}, "", rank=0, size=1, sums={}, is_private=is_private)
    assert list(tmp_path.iterdir()) == []


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Failing:
    """A function of `os` whose n-th call fails. A failing close still closes the descriptor, as in Linux."""

    def __init__(self, name: str, nth: int, code: int) -> None:
        self._name, self._nth, self._code = name, nth, code
        self._real = getattr(os, name)
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls != self._nth:
            return self._real(*args, **kwargs)
        if self._name == "close":
            self._real(*args, **kwargs)
        raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize("name", ["open", "write", "fsync", "fdatasync", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failing_call_names_path_and_cure_and_leaves_nothing_open(tmp_path, monkeypatch, name, code):
    """Let each call of that function fail in turn."""
    monkeypatch.setattr(rank_writer, "EARLY_SYNC_BYTES", 100_000)
    monkeypatch.setattr(rank_writer, "WRITE_BYTES", 60_000)
    monkeypatch.setattr(rank_writer, "SMALL_BYTES", 1_000)
    tensors = {"a": torch.randn(100_000), "b": torch.randn(3)}
    before = descriptors()
    for nth in range(1, 100):
        failing, message, folder = Failing(name, nth, code), "", tmp_path / str(nth)
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            try:
                write_rank(folder, tensors, "{}", rank=0, size=1, sums={}, is_private=is_private)
            except RunDirError as error:
                message = str(error)
        assert descriptors() == before
        if failing.calls < nth:
            break
        assert "rank_00000." in message and f"{os.strerror(code)}; " in message
    assert nth > (2 if name != "fdatasync" else 1)


def test_interrupted_and_short_calls_change_nothing(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(100_000)}
    plain = save(tmp_path / "plain", [tensors])
    write, preadv, calls = os.write, os.preadv, [0]

    def short(call, descriptor, data, *rest):
        calls[0] += 1
        if calls[0] % 2:
            raise InterruptedError
        return call(descriptor, data, *rest)

    monkeypatch.setattr(os, "write", lambda fd, data: short(write, fd, memoryview(data)[:7919]))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: short(preadv, fd, [into[0][:7919]], at))
    manifest = save(tmp_path / "short", [tensors])
    assert manifest.files == plain.files
    assert same(read_tensors(tmp_path / "short", manifest, {}, rank=0, size=1)["a"], tensors["a"])
