"""Damaged or edited checkpoints are refused, and cannot request more memory than their files have bytes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import resource
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoint_files import manifest_of, save

from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.manifest import FileSum
from holdfast.distributed.checkpoint import rank_reader
from holdfast.distributed.checkpoint.checkpoint_index import read_checkpoint_index
from holdfast.distributed.checkpoint.load import read_parts, read_tensors
from holdfast.distributed.checkpoint.rank_writer import write_rank
from holdfast.runtime.tensors.inspect import checksums

NAMES = ["rank_00000.bin", "rank_00000.json", "rank_00001.bin", "rank_00001.json"]


def tensors(rank: int = 0):
    return {
        "w": torch.arange(24, dtype=torch.float32).view(4, 6),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "big": torch.arange(1000),
        "own.rng": torch.full((16,), rank, dtype=torch.uint8),
        "step": torch.tensor(3.0),
        "none": torch.empty(0, 2),
    }


@pytest.fixture
def checkpoint(tmp_path):
    return tmp_path / "c", save(tmp_path / "c", [tensors(0), tensors(1)])


def read(folder, manifest, check=True):
    return [read_tensors(folder, manifest, {}, rank=r, size=2, check=check) for r in range(2)]


def test_bit_flipped_in_any_file_is_found_and_the_file_named(checkpoint):
    folder, manifest = checkpoint
    draw = random.Random(0)
    for name in NAMES:
        content = (folder / name).read_bytes()
        for at in [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(20))]:
            damaged = bytearray(content)
            damaged[at] ^= 1 << draw.randrange(8)
            (folder / name).write_bytes(damaged)
            with pytest.raises(RunDirError, match=name):
                read(folder, manifest)
        (folder / name).write_bytes(content)
    read(folder, manifest)


def test_single_rank_verifies_files_it_does_not_need(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_reader, "MAX_UNNEEDED_BYTES", 0)
    ranks = [{"own.large": torch.full((1000,), float(r)), "w": torch.ones(3)} for r in range(2)]
    manifest = save(tmp_path, ranks)
    content = bytearray((tmp_path / "rank_00001.bin").read_bytes())
    content[100] ^= 1
    (tmp_path / "rank_00001.bin").write_bytes(content)
    with pytest.raises(RunDirError, match="rank_00001.bin is damaged"):
        read_tensors(tmp_path, manifest, {}, rank=0, size=1)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_longer_or_missing_file_is_found_and_named(checkpoint, name):
    folder, manifest = checkpoint
    content = (folder / name).read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
        (folder / name).write_bytes(damaged)
        with pytest.raises(RunDirError, match=name):
            read(folder, manifest)
    (folder / name).unlink()
    with pytest.raises(RunDirError, match=f"{name} cannot be read"):
        read(folder, manifest)


def test_tensor_damaged_before_writing_is_found_by_its_checksum(tmp_path):
    value = torch.arange(100.0)
    sums = {"w": checksums({"w": value})["w"] + 1}
    files = write_rank(tmp_path, {"w": value}, "", rank=0, size=1, sums=sums, is_private=lambda _: False)
    with pytest.raises(RunDirError, match="'w' differs from the checksum"):
        read_tensors(tmp_path, manifest_of(files, 1), {}, rank=0, size=1)
    assert torch.equal(read_tensors(tmp_path, manifest_of(files, 1), {}, rank=0, size=1, check=False)["w"], value)


def test_link_or_pipe_in_place_of_a_file_is_refused(checkpoint):
    folder, manifest = checkpoint
    shutil.move(folder / NAMES[0], folder / "elsewhere")
    (folder / NAMES[0]).symlink_to(folder / "elsewhere")
    with pytest.raises(RunDirError, match=NAMES[0]):
        read(folder, manifest)
    (folder / NAMES[1]).unlink()
    os.mkfifo(folder / NAMES[1])
    with pytest.raises(RunDirError, match=NAMES[1]):
        read(folder, manifest)


def test_files_of_another_checkpoint_or_rank_are_found(checkpoint, tmp_path):
    folder, manifest = checkpoint
    save(tmp_path / "other", [tensors()] * 3)
    kept = (folder / NAMES[1]).read_bytes()
    for other in (tmp_path / "other" / NAMES[1], folder / NAMES[3]):
        (folder / NAMES[1]).write_bytes(other.read_bytes())
        for check in (True, False):
            with pytest.raises(RunDirError):
                read(folder, manifest, check)
        (folder / NAMES[1]).write_bytes(kept)


# ---- edited indices


FORGED_VALUES = [
    -1, 0, 1, 2, 63, 64, 2**31, 2**40, 2**62, 2**63, 2**64, 10**400,
    1.5, float("nan"), True, None, "float32", [], {},
]  # fmt: skip


def edited(value, draw: random.Random):
    """Return the index with one value changed."""
    places = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, inner in items:
            places.append((node, key))
            if isinstance(inner, dict | list):
                walk(inner)

    walk(value)
    node, key = draw.choice(places)
    change = draw.randrange(4)
    if change == 0:
        del node[key]
    elif change == 1 and isinstance(node, list):
        node.insert(draw.randrange(len(node) + 1), node[key])
    elif change == 2 and isinstance(node[key], int):
        node[key] += draw.choice([-64, -1, 1, 2, 64])
    else:
        node[key] = draw.choice(FORGED_VALUES)
    return value


@pytest.fixture
def little_memory():
    """Limit memory, so that allocating a forged size fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attempt(folder, manifest):
    """Read in every way; return whether all succeeded. Any error but RunDirError fails the test."""
    for call in (
        lambda: read(folder, manifest, check=False),
        lambda: read(folder, manifest),
        lambda: read_parts(folder, 1),
        lambda: read_checkpoint_index(folder),
    ):
        try:
            call()
        except RunDirError:
            return False
    return True


@pytest.mark.usefixtures("little_memory")
def test_edited_index_is_refused_or_harmless(checkpoint):
    folder, manifest = checkpoint
    draw = random.Random(1)
    passed = 0
    for name in (NAMES[1], NAMES[3]):
        original = (folder / name).read_bytes()
        for _ in range(700):
            value = json.loads(original)
            for _ in range(draw.choice([1, 1, 2])):
                value = edited(value, draw)
            content = json.dumps(value).encode()
            (folder / name).write_bytes(content)
            # The manifest matches the edit, so only validation of the index can refuse it.
            file_sum = FileSum(len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")
            passed += attempt(folder, msgspec.structs.replace(manifest, files={**manifest.files, name: file_sum}))
        (folder / name).write_bytes(original)
    assert 0 < passed < 300  # harmless: the text of `parts`, a removed checksum, another name


@pytest.mark.usefixtures("little_memory")
def test_bytes_of_an_index_changed_at_random_are_refused_or_harmless(checkpoint):
    folder, manifest = checkpoint
    draw = random.Random(2)
    original = (folder / NAMES[1]).read_bytes()
    for _ in range(700):
        content = bytearray(original)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(content))
            content[at : at + draw.randrange(3)] = bytes(draw.randrange(256) for _ in range(draw.randrange(3)))
        (folder / NAMES[1]).write_bytes(content)
        attempt(folder, manifest)


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"1" * 5000, b'{"format":1}'],
    ids=lambda c: repr(c[:12]),
)
def test_content_that_is_not_an_index_is_refused(checkpoint, content):
    folder, manifest = checkpoint
    (folder / NAMES[1]).write_bytes(content)
    assert not attempt(folder, manifest)


def chunked(shape, chunks):
    """Return one chunk record for each rank."""
    records = []
    for offset, sizes in chunks:
        records.append(
            {
                "name": "w", "dtype": "float32", "shape": shape, "offset": offset, "sizes": sizes,
                "at": 0, "bytes": 4 * math.prod(sizes), "sum": None, "private": False,
            }
        )  # fmt: skip
    return records


@pytest.mark.parametrize(
    ("shape", "chunks", "valid"),
    [
        ([4, 4], [([0, 0], [2, 4]), ([2, 0], [2, 4])], True),
        ([4, 4], [([0, 0], [4, 1]), ([0, 1], [4, 3])], True),
        ([4, 4], [([0, 0], [2, 4]), ([1, 0], [2, 4])], False),
        ([4, 4], [([0, 0], [2, 4]), ([2, 0], [1, 4])], False),
        ([4, 4], [([0, 0], [2, 4]), ([0, 0], [2, 4])], False),
        ([4, 4], [([0, 0], [4, 4]), ([0, 0], [4, 4])], False),
        ([3, 3], [([0, 0], [2, 2]), ([1, 1], [2, 2]), ([0, 2], [1, 1])], False),
        ([3, 3], [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])], True),
        ([], [([], []), ([], [])], False),
    ],
)
def test_chunks_must_cover_their_tensor_and_not_overlap(tmp_path, shape, chunks, valid):
    for rank, entry in enumerate(chunked(shape, chunks)):
        index = {
            "format": 1, "rank": rank, "world": len(chunks), "bytes": entry["bytes"], "tensors": [entry],
            "parts": "", "parts_sum": 0,
        }  # fmt: skip
        (tmp_path / f"rank_{rank:05d}.json").write_text(json.dumps(index))
        (tmp_path / f"rank_{rank:05d}.bin").write_bytes(bytes(entry["bytes"]))
    if valid:
        assert read_checkpoint_index(tmp_path).shared()["w"][0].chunk.shape == tuple(shape)
    else:
        with pytest.raises(RunDirError, match="'w'"):
            read_checkpoint_index(tmp_path)
