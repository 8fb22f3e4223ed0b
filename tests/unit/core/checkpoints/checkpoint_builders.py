"""Checkpoints for the tests: small, real, on disk; and file-system calls that fail on request."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.base import durable
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import Manifest, name_of
from holdfast.core.checkpoints.verify import checksum_file

RUN = "5f0e"
GOOD, CANDIDATE, BAD, QUARANTINED = Health.GOOD, Health.CANDIDATE, Health.BAD, Health.QUARANTINED
FILES = ("rank_00000.bin", "rank_00000.json", "rank_00001.bin")


def content_of(name: str, step: int, size: int = 4096) -> bytes:
    return b"".join(f"{name} {step} {i};".encode() for i in range(size // 16))[:size]


def save(
    folder: Folder,
    step: int,
    health: Health = GOOD,
    *,
    lineage: Lineage = Lineage(),
    run: str = RUN,
    handover: bool = False,
    why: str = "",
    size: int = 4096,
) -> CheckpointEntry:
    """A checkpoint the way a writer makes one."""
    staging = folder.staging(name_of(step, lineage.branch))
    for name in FILES:
        durable.write_file(staging / name, content_of(name, step, size))
    sums = {name: checksum_file(staging / name, "sha256" if name.endswith(".json") else "crc32") for name in FILES}
    about = {"learning_rate": 1e-05, "text": "é", "loss": float("nan")}
    manifest = Manifest(run=run, step=step, lineage=lineage, reason="scheduled", time=1.5, about=about, files=sums)
    return folder.publish(staging, manifest, health, why, time=2.5, handover=handover)


def hidden(folder: Folder) -> list[str]:
    """Every file and folder that is not a part of a checkpoint."""
    return sorted(str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.name.startswith("."))


class Failing:
    """While it is on, the n-th call to `os` fails, or is cut short; `calls` counts them."""

    NAMES = (
        *("open", "read", "write", "close", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir"),
        *("listdir", "scandir", "stat", "lstat", "fstat"),
    )

    def __init__(self, patch: pytest.MonkeyPatch, n: int, error: int | None) -> None:
        self.n, self.error, self.calls = n, error, 0
        self.hit = ""
        for name in self.NAMES:
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.error is None and name != "write":
                return call(*args, **kwargs)
            self.calls += 1
            if self.calls != self.n:
                return call(*args, **kwargs)
            self.hit = f"{name}{args[:1]}"
            if self.error is None:
                return call(args[0], args[1][: max(1, len(args[1]) // 2)])
            if name == "close":
                call(*args)  # the descriptor is gone, whatever close says
            raise OSError(self.error, os.strerror(self.error))

        return wrapper


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
