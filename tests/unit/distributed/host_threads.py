"""Ranks on several hosts, as threads of one process: each host has a folder of its own, and the connections are real."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast.core.base.types import Health
from holdfast.core.checkpoints import memory_folder
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import seal, unseal_health, unseal_manifest
from holdfast.distributed.checkpoint.replicated_store import ReplicatedMemoryStore
from holdfast.distributed.world import World
from holdfast.runtime.ports.checkpoint_store import CheckpointContents, CheckpointLabel, CopyInspection
from holdfast.runtime.tensors.inspect import checksums

RUN = "a" * 32
LABEL = CheckpointLabel("certified", False, Health.GOOD, "certified in memory", {}, {})
WAIT_SECONDS = 60


class ThreadWorld(World):
    """Exchanges objects between the threads of one process."""

    def __init__(self, rank: int, size: int, values: list[Any], meeting: threading.Barrier) -> None:
        super().__init__(rank, size)
        self._values, self._meeting = values, meeting

    def all_gather_object(self, value: Any) -> list[Any]:
        self._values[self.rank] = json.dumps(value)
        self._meeting.wait(WAIT_SECONDS)
        gathered = [json.loads(each) for each in self._values]
        self._meeting.wait(WAIT_SECONDS)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value)[0]

    def barrier(self, seconds: float) -> None:
        self.all_gather_object(None)


class Job:
    """A run of ranks on hosts; `hosts` has the host of each rank. A new Job in the same folder is a restart."""

    def __init__(self, folder: Path, hosts: str, patch: pytest.MonkeyPatch, timeout: float = 30.0) -> None:
        self.folder, self.hosts = folder, list(hosts)
        (folder / "run").mkdir(parents=True, exist_ok=True)
        for host in self.hosts:
            (folder / host).mkdir(exist_ok=True)
        self._host = threading.local()
        patch.setattr(memory_folder, "root", lambda: folder / self._host.name / "holdfast-0")
        patch.setattr(ReplicatedMemoryStore, "_find_address", lambda self: (socket.AF_INET, "127.0.0.1"))
        patch.setattr(
            ReplicatedMemoryStore, "room", lambda self: (1 << 40, 1 << 40)
        )  # the disk of the tests may be full
        size = len(self.hosts)
        values, meeting = [None] * size, threading.Barrier(size)
        worlds = [ThreadWorld(rank, size, values, meeting) for rank in range(size)]
        self.stores = [ReplicatedMemoryStore(folder / "run", world, timeout, self.hosts) for world in worlds]

    def each(self, work: Callable[[ReplicatedMemoryStore], Any]) -> list[Any]:
        """Do something on every rank at the same time. Return the results, in rank order."""
        results: list[Any] = [None] * len(self.stores)

        def run(rank: int) -> None:
            self._host.name = self.hosts[rank]
            try:
                results[rank] = work(self.stores[rank])
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), "a rank waits for ever"
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def attach(self, makes: bool = True) -> list[str | None]:
        return self.each(lambda store: store.attach(RUN, lambda: None, makes=makes))

    def save(self, step: int, **given: Any) -> list[tuple[str, str]]:
        """Write a state; return what every rank reports."""

        def work(store: ReplicatedMemoryStore) -> tuple[str, str]:
            store.save(contents(step, store._world.rank, **given), LABEL)
            store.wait()
            (event,) = store.events
            store.events.clear()
            return event.status, event.why

        return self.each(work)

    def entries(self) -> list[dict[str, str | None]]:
        """Return the states that every rank sees, with what is wrong with them."""
        return self.each(lambda store: {e.name: e.damage for e in store.entries()})

    def load(self, name: str) -> list[Any]:
        """Return the tensors that every rank restores from a state."""

        def work(store: ReplicatedMemoryStore) -> Any:
            saved = store.load(store._folder.entry(name))
            return {n: t.tolist() for n, t in saved.tensors.items()}, saved.parts["rank"]

        return self.each(work)

    def crash(self) -> None:
        """End all ranks; what is in shared memory stays."""
        self.each(lambda store: store.close())

    def end(self) -> None:
        def work(store: ReplicatedMemoryStore) -> None:
            store.close()
            store.delete(RUN)

        self.each(work)

    def files(self, host: str) -> list[str]:
        return sorted(str(p.relative_to(self.folder / host)) for p in (self.folder / host).rglob("*") if p.is_file())

    def state(self, host: str, name: str) -> Path:
        (path,) = (self.folder / host).glob(f"holdfast-0/*/checkpoints/{name}")
        return path


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"t{i}": torch.randn(300 + i, generator=generator) for i in range(12)}


def contents(step: int, rank: int, wait: Callable[[str], None] = lambda name: None) -> CheckpointContents:
    tensors = tensors_of(step)
    inspection = CopyInspection(checksums(tensors), None, False)
    return CheckpointContents(
        step, Lineage(), {"rank": rank}, tensors, wait, lambda: inspection, lambda name: False, lambda: None
    )


def rewrite(state: Path, **changes: Any) -> None:
    """Change the manifest, with the checksum of itself and the health record made to fit."""
    manifest = msgspec.structs.replace(unseal_manifest((state / "manifest.json").read_bytes())[0], **changes)
    health = unseal_health((state / "health.json").read_bytes())
    content, digest = seal(manifest)
    (state / "manifest.json").write_bytes(content)
    (state / "health.json").write_bytes(seal(msgspec.structs.replace(health, manifest=digest))[0])
