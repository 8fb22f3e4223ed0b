"""The memory tier of ranks on several hosts: each host keeps the files of its ranks, and a copy of those of the host before.

Hosts are in the order of their lowest ranks, the last one before the first. The lowest rank of a host is its lead. While a
state is written, every rank sends its files to a rank of the next host, and its note to rank 0. With all notes rank 0 has
the leads publish the same manifest, then publishes it on its own host. So a state that is listed anywhere has all its
files on two hosts, unless the ranks died in that moment. The state before it is removed after that.

A folder of a state may lack files that other hosts hold. Before a resume each host fetches them, and replaces those whose
checksum differs from the manifest's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from holdfast.core.base import durable
from holdfast.core.base.errors import HoldfastError, RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints import memory_folder
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.manifest import (
    HEALTH,
    MANIFEST,
    FileSum,
    HealthRecord,
    Manifest,
    is_file_name,
    is_name,
    name_of,
    seal,
    unseal_health,
    unseal_manifest,
)
from holdfast.core.checkpoints.verify import compare_file
from holdfast.distributed.checkpoint.memory_store import MemoryCheckpointStore, identify
from holdfast.distributed.checkpoint.rank_index import bin_name, index_name
from holdfast.distributed.checkpoint.replication import FileExchange, Peer, Request, Transfer
from holdfast.distributed.peer_links import local_address
from holdfast.distributed.world import World
from holdfast.runtime.checkpoint.memory_tier import describe_missing_room
from holdfast.runtime.ports.checkpoint_store import CheckpointContents, CheckpointLabel
from holdfast.runtime.tensors.torch_private import default_store

log = logging.getLogger("holdfast")

_NOTE = re.compile(r"\.note-\d{5,9}")
_MAX_FETCH_SECONDS = 300.0
"""at a resume; shorter than the usual timeout of a collective, in which ranks that are done wait for the others"""
_SHORT_SECONDS = 5.0
"""for a request whose failure harms nothing"""


class _Listed(NamedTuple):
    """A state on one host: the checksum of its manifest, its files that are present, and those that are not."""

    digest: str
    present: list[str]
    missing: list[str]


class ReplicatedMemoryStore(MemoryCheckpointStore):
    """Implements MemoryStore for ranks on several hosts. `hosts` has the host of every rank."""

    def __init__(
        self, run_dir: str | os.PathLike[str], world: World, rank_timeout_seconds: float, hosts: Sequence[str]
    ) -> None:
        super().__init__(run_dir, world, rank_timeout_seconds)
        self._fetch_seconds = min(rank_timeout_seconds, _MAX_FETCH_SECONDS)
        self._host = hosts[world.rank]
        self._groups = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        """the ranks of each host, in ring order"""
        self._index = next(n for n, group in enumerate(self._groups) if world.rank in group)
        self._local, self._previous = self._groups[self._index], self._groups[self._index - 1]
        self._next = self._groups[(self._index + 1) % len(self._groups)]
        self.owns_folder = world.rank == self._local[0]
        self.kept_fraction = min(1.0, (len(self._local) + len(self._previous)) / world.size)
        self._exchange = FileExchange(world.rank, self._host, self._handle, self._fetch_seconds)
        self._peers: list[Peer] = []
        self._findings: list[str] = []
        """what this rank has found in the memory of its host and repaired"""

    # ---- opening and closing

    def attach(self, run: str, check: Callable[[], None], *, makes: bool) -> str | None:
        """Find or make the folder of the run on every host, and learn where the other ranks accept files. If one host has
        a folder, all make one. All ranks call it."""
        path = memory_folder.path_of(self._of_run, run)
        if not any(self._world.all_gather_object(makes or os.path.lexists(path))):
            return None
        found: list[Any] | None = None
        problem = None
        try:
            found = self._find(path, makes=True) if self.owns_folder else None
            self._exchange.listen(*self._find_address())
        except FileExistsError:  # the other host was faster by an instant
            problem = f"hosts of different names share {path}; give each a folder of its own (HOLDFAST_SHM)"
        except OSError as error:
            problem = f"{error.filename or path} on {self._host}: {error.strerror or error}"
        except HoldfastError as error:
            problem = str(error)
        told = self._world.all_gather_object([found, problem, msgspec.to_builtins(self._exchange.local)])
        problem = next((why for _, why, _ in told if why), None)
        lead_found = told[self._local[0]][0]
        if problem is None and not all(self._world.all_gather_object(identify(path) == lead_found)):
            problem = f"not every rank of a host sees {path} of the host's first rank"
        if problem is None and len({tuple(told[group[0]][0]) for group in self._groups}) < len(self._groups):
            problem = f"hosts of different names share {path}; give each a folder of its own (HOLDFAST_SHM)"
        if problem is not None:
            self._exchange.close()
            return problem
        self._peers = [msgspec.convert(peer, Peer) for _, _, peer in told]
        self._use(path, run, check)
        return None

    def _find_address(self) -> tuple[socket.AddressFamily, str]:
        """Return the address at which the ranks of other hosts reach this one. RunDirError if there is none."""
        family, address = local_address(default_store(dist))
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            raise RunDirError(
                f"rank {self._world.rank} on {self._host} is at {address}, which other hosts cannot reach; set MASTER_ADDR, "
                "or the rendezvous endpoint, to an address of the network"
            )
        return family, address

    def abort(self) -> None:
        super().abort()
        self._exchange.close()

    def close(self) -> None:
        super().close()
        self._exchange.close()

    def _other_leads(self) -> Iterator[Peer]:
        return (self._peers[group[0]] for group in self._groups if group is not self._local)

    # ---- writing, in the background

    def _save_distributed(self, contents: CheckpointContents, label: CheckpointLabel) -> tuple[Path, int]:
        try:
            return super()._save_distributed(contents, label)
        except BaseException:
            if self.is_rank_zero:  # or the other hosts would wait for the timeout
                self._remove_elsewhere(name_of(contents.step, contents.lineage.branch))
            raise

    def _make_staging(self, name: str) -> Path:
        try:
            return super()._make_staging(name)
        except Exception as error:
            if not self.is_rank_zero:  # rank 0 would wait for the note
                with contextlib.suppress(RunDirError, OSError):
                    self._leave_note(name, {}, RunDirError(f"rank {self._world.rank}: {error}"))
            raise

    def _replicate(self, name: str, files: dict[str, FileSum], staging: Path) -> None:
        peer = self._peers[self._next[self._local.index(self._world.rank) % len(self._next)]]
        for file, expected in files.items():
            self._exchange.send(peer, "put", name, self._timeout, file, staging / file, sums=expected)

    def _write_note(self, name: str, file: str, note: bytes) -> None:
        if 0 in self._local:
            super()._write_note(name, file, note)
        else:
            self._exchange.send(self._peers[0], "put", name, self._timeout, file, note)

    def _publish_elsewhere(self, manifest: Manifest, health: HealthRecord) -> None:
        content = json.dumps([seal(manifest)[0].decode(), seal(health)[0].decode()]).encode()
        for peer in self._other_leads():
            self._exchange.send(peer, "publish", manifest.name, self._timeout, content=content)

    def _held_files(self, manifest: Manifest) -> set[str]:
        ranks = {*self._local, *self._previous}
        return {name(rank) for rank in ranks for name in (bin_name, index_name)}

    def _remove(self, name: str) -> None:
        self._remove_elsewhere(name)
        super()._remove(name)

    def _remove_elsewhere(self, name: str) -> None:
        for peer in self._other_leads():
            with contextlib.suppress(RunDirError):  # the next process finds it and removes it
                self._exchange.send(peer, "remove", name, _SHORT_SECONDS)

    # ---- requests of other ranks, each on a thread of its own

    def _handle(self, request: Request, transfer: Transfer) -> Path | None:
        """Carry out a request. Only the lead of a host changes which states there are."""
        name, file = request.state, request.file
        if not is_name(name) or not self.is_attached:
            raise RunDirError(f"{name[:80]!r} is not the name of a state, or the run has not begun")
        if request.action == "get" and (is_file_name(file) or file in (MANIFEST, HEALTH)):
            path = self._folder.path / name / file
            if not durable.is_regular(path):
                raise RunDirError(f"{name} has no {file}")
            return path
        if request.action == "put" and (is_file_name(file) or _NOTE.fullmatch(file)):
            staging = self._staging_of(name)
            self._wait_until(staging.is_dir, lambda: f"{staging} was not made")
            transfer.receive_file(staging / file, FileSum(request.bytes, request.sum))
        elif request.action == "publish" and self.owns_folder:
            self._publish_received(name, transfer.receive_bytes())
        elif request.action == "remove" and self.owns_folder:
            durable.remove_tree(self._staging_of(name))
            if os.path.lexists(self._folder.path / name):
                self._folder.remove(name)
        else:
            raise RunDirError(f"{request.action} of {file[:80]!r} is no request to rank {self._world.rank}")
        return None

    def _publish_received(self, name: str, content: bytes) -> None:
        try:
            manifest_text, health_text = msgspec.json.decode(content, type=tuple[str, str])
        except msgspec.MsgspecError as error:
            raise RunDirError(f"the manifest of {name} cannot be read: {error}") from None
        manifest, health = unseal_manifest(manifest_text.encode())[0], unseal_health(health_text.encode())
        if manifest.name != name or manifest.run != self._run:
            raise RunDirError(f"the manifest is of {manifest.name} of run {manifest.run}, not of {name}")
        self._publish_here(self._staging_of(name), manifest, health)

    # ---- reading, on the training thread

    def states(self) -> list[list[Any]]:
        listed = [[e.name, e.step, e.branch] for e in self._folder.entries()] if self.owns_folder else []
        union = {each[0]: each for listing in self._world.all_gather_object(listed) for each in listing}
        return sorted(union.values(), key=lambda each: (each[1], each[2]))

    def entries(self) -> list[CheckpointEntry]:
        """Return the states. Those that are not complete and verified on every host are damaged, with the reason.

        Fetches the newest that is complete among the hosts. All ranks call it.
        """
        if not self.is_attached:
            return []
        self.wait()
        self._world.all_gather_object(None)  # rank 0 may have removed states of other hosts
        listings = self._world.all_gather_object(self._list() if self.owns_folder else {})
        names = sorted({name for listing in listings for name in listing}, key=_step_and_branch)
        problems: dict[str, str] = {}
        is_complete = False
        for name in reversed(names):
            problems[name] = "a newer state is complete" if is_complete else self._complete(name, listings)
            is_complete = is_complete or not problems[name]
        for finding in itertools.chain(*self._world.all_gather_object(self._findings)):
            log.warning("holdfast: %s", finding)  # by rank 0; the others log errors only
        self._findings.clear()
        found = {name: read_entry(self._folder.path / name) for name in names}
        return [
            entry._replace(in_memory=True)
            if entry is not None and not problems[name]
            else _unusable(self._folder.path / name, entry, problems[name])
            for name, entry in found.items()
        ]

    def _list(self) -> dict[str, Any]:
        """Return the states on this host, without files for those that are damaged or of another run."""
        listing: dict[str, Any] = {}
        for entry in self._folder.entries():
            run, files = ("", {}) if entry.manifest is None else (entry.manifest.run, entry.manifest.files)
            if entry.damage is not None or run != self._run:
                why, files = entry.damage or f"it belongs to run {run}", {}
                self._findings.append(f"{entry.name} in the shared memory of {self._host} is passed over: {why}")
            present = {n for n, f in files.items() if _length(entry.path / n) == f.bytes}
            listing[entry.name] = _Listed(entry.digest, sorted(present), sorted(set(files) - present))
        return listing

    def _complete(self, name: str, listings: list[dict[str, Any]]) -> str:
        """Fetch what this host lacks of a state. Return why the state is not complete on every host; empty if it is."""
        listed = {n: _Listed(*listings[g[0]][name]) for n, g in enumerate(self._groups) if name in listings[g[0]]}
        digest, holders = _choose_manifest(listed)
        if not holders:
            return "no host has a valid manifest of this run"
        files = sorted({file for each in holders.values() for file in (*each.present, *each.missing)})
        lacking = [file for file in files if not any(file in each.present for each in holders.values())]
        if lacking:
            return f"no host has {lacking[0]}" + (f" and {len(lacking) - 1} more of its files" if lacking[1:] else "")
        why = self._agree(lambda: self._prepare(name, digest, holders) if self.owns_folder else None)
        mine = files[self._local.index(self._world.rank) :: len(self._local)]
        return why or self._agree(lambda: self._obtain(name, mine, holders))

    def _agree(self, work: Callable[[], None]) -> str:
        """Do what may fail on this rank. Return the problem of the first rank that has one."""
        problem = ""
        try:
            work()
        except (OSError, RunDirError) as error:
            problem = f"{self._host}: {error}"
        return next((each for each in self._world.all_gather_object(problem) if each), "")

    def _prepare(self, name: str, digest: str, holders: dict[int, _Listed]) -> None:
        """Make the folder of a state, with manifest and health, if this host has none. RunDirError if there is no room."""
        if self._index not in holders:
            source = self._peers[self._groups[min(holders)][0]]
            texts = [self._exchange.get_bytes(source, name, n, self._fetch_seconds) for n in (MANIFEST, HEALTH)]
            (manifest, received), health = unseal_manifest(texts[0]), unseal_health(texts[1])
            if received != digest or health.manifest != digest:
                raise RunDirError(f"{name} of {source.host} has another manifest than was listed")
            if os.path.lexists(self._folder.path / name):
                self._folder.remove(name)
            staging = self._folder.staging(name)
            self._folder.publish(
                staging, manifest, health.health, health.why, time=health.time, handover=health.handover, held=()
            )
        manifest = self._manifest_of(name)
        present = holders[self._index].present if self._index in holders else []
        needed = sum(f.bytes for n, f in manifest.files.items() if n not in present)
        room = self.room()
        if room is not None and needed and (missing := describe_missing_room(*room, needed)) is not None:
            raise RunDirError(f"to fetch the rest of {name} it needs {missing}")

    def _obtain(self, name: str, files: list[str], holders: dict[int, _Listed]) -> None:
        """Verify files of a state on this host; fetch those that are missing or damaged from a host that has them."""
        manifest, ends = self._manifest_of(name), time.monotonic() + self._fetch_seconds
        for file in files:
            path, expected = self._folder.path / name / file, manifest.files[file]
            problems = []
            if os.path.lexists(path):
                if (difference := compare_file(path, expected)) is None:
                    continue
                problems.append(f"{self._host}: {difference}")
            for host in (n for n, each in holders.items() if file in each.present and n != self._index):
                peer = self._peers[self._groups[host][self._world.rank % len(self._groups[host])]]
                try:
                    self._exchange.get_file(peer, name, path, expected, ends - time.monotonic())
                except RunDirError as error:
                    problems.append(str(error))
                    continue
                if problems:
                    self._findings.append(f"{name} in memory: {'; '.join(problems)}; fetched from {peer.host}")
                break
            else:
                raise RunDirError("; ".join(problems))

    def _manifest_of(self, name: str) -> Manifest:
        manifest = self._folder.entry(name).manifest
        if manifest is None:
            raise RunDirError(f"{name} has no {MANIFEST}")
        return manifest


def _choose_manifest(listed: dict[int, _Listed]) -> tuple[str, dict[int, _Listed]]:
    """Return the manifest that most hosts have, by its checksum, and those hosts."""
    valid = {host: each for host, each in listed.items() if each.present or each.missing}
    digests = [each.digest for each in valid.values()]
    digest = max(digests, key=digests.count, default="")
    return digest, {host: each for host, each in valid.items() if each.digest == digest}


def _unusable(path: Path, entry: CheckpointEntry | None, problem: str) -> CheckpointEntry:
    damage = problem or "its folder is gone"
    manifest = None if entry is None else entry.manifest
    return CheckpointEntry(path.name, path, manifest, "", Health.BAD, damage, damage, in_memory=True)


def _step_and_branch(name: str) -> tuple[int, int]:
    step, _, branch = name.removeprefix("step_").partition(".b")
    return int(step), int(branch or 0)


def _length(path: Path) -> int:
    """Return the length of a regular file; -1 if there is none."""
    return durable.retry_interrupted(os.lstat, path).st_size if durable.is_regular(path) else -1
