"""Writes the bundle of an incident on a thread of its own, in the format of a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from holdfast.core.base import durable
from holdfast.core.checkpoints.bundles import KIND, bundle_folder, prune
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import Manifest, name_of
from holdfast.distributed.checkpoint.rank_writer import write_rank
from holdfast.runtime.ports.bundle_store import BundleContents
from holdfast.runtime.snapshots.encoding import encode
from holdfast.runtime.tensors.inspect import checksums


class DiskBundleStore:
    """Implements BundleStore in the incident folders of a run directory. Each rank writes its own bundles."""

    def __init__(self, run_dir: str | os.PathLike[str], rank: int, keep: int) -> None:
        self._run_dir, self._rank, self._keep = Path(run_dir).resolve(), rank, keep
        self._run = ""
        self._check: Callable[[], None] = lambda: None
        self._worker: ThreadPoolExecutor | None = None
        self._failures: list[str] = []

    def open(self, run: str, check: Callable[[], None]) -> None:
        """Note the identity of the run. `check` raises if this process may not write to the run directory."""
        self._run, self._check = run, check

    def save(self, contents: BundleContents) -> str:
        """Begin to write a bundle, and return the path it will have in the run directory."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="holdfast-bundle")
        self._worker.submit(self._save, contents)
        path = bundle_folder(self._run_dir, contents.incident, self._rank) / name_of(contents.step, 0)
        return path.relative_to(self._run_dir).as_posix()

    def pop_failures(self) -> list[str]:
        """Return why bundles could not be written since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Wait until all bundles are written."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _save(self, contents: BundleContents) -> None:
        try:
            self._write(contents)
            prune(self._run_dir, self._rank, self._keep)
        except Exception as error:  # a full disk, a batch that JSON cannot hold: the run continues without the bundle
            why = str(error) or type(error).__name__
            self._failures.append(f"the bundle of incident {contents.incident} could not be written: {why}")

    def _write(self, contents: BundleContents) -> None:
        path = bundle_folder(self._run_dir, contents.incident, self._rank)
        self._check()
        durable.make_folder_inside(self._run_dir, path)
        folder = Folder(path, self._run, self._check)
        small: dict[str, Tensor] = {}
        parts = encode(contents.parts, small)
        tensors = {**contents.tensors, **small}
        staging = folder.staging(name_of(contents.step, 0))
        try:
            files = write_rank(
                staging, tensors, parts, rank=0, size=1, sums=lambda: checksums(tensors), is_private=lambda name: False
            )
        except BaseException:
            durable.remove_tree(staging)
            raise
        now = time.time()
        about = {"kind": KIND, "incident": contents.incident, "rank": self._rank, **contents.about}
        manifest = Manifest(
            run=self._run, step=contents.step, lineage=Lineage(), reason="incident", time=now, about=about, files=files
        )
        folder.publish(staging, manifest, time=now)
