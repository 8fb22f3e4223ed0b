"""Defines the public Guard: the runtime with checkpoints on disk and other ranks. `holdfast` imports it on first use."""

from __future__ import annotations

import os
import secrets
import socket

from holdfast.core.base.config import Config
from holdfast.core.base.errors import SetupError
from holdfast.core.record.rank_records import RankRecords
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
from holdfast.distributed.checkpoint.memory_store import MemoryCheckpointStore
from holdfast.distributed.checkpoint.replicated_store import ReplicatedMemoryStore
from holdfast.distributed.norms import MeshNorms
from holdfast.distributed.replicas import MeshReplicas
from holdfast.distributed.watchdog import StoreWatchdog
from holdfast.distributed.world import World
from holdfast.replay.bundle_store import DiskBundleStore
from holdfast.resilience.run_signals import RunSignals
from holdfast.runtime.guard.guard import GuardBase, Wiring
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.ports.hang_watch import HangWatch, NoHangWatch
from holdfast.runtime.ports.ranks import NoWatchdog, RankWatchdog
from holdfast.runtime.ports.shutdown import NoSignals
from holdfast.runtime.tensors.device_progress import watch_device
from holdfast.runtime.tensors.norms import LocalNorms
from holdfast.runtime.tensors.torch_private import dump_flight_record
from holdfast.sinks import make_sinks
from holdfast.supervise.sidecar_client import SidecarClient


class Guard(GuardBase):
    __doc__ = GuardBase.__doc__

    def _wire(self, run_dir: str | os.PathLike[str] | None, config: Config) -> Wiring:
        world = World.current()
        timeout = config.checkpoint.rank_timeout_seconds
        about = [socket.gethostname(), secrets.token_hex(8)]
        hosts, sessions = zip(*(world.all_gather_object(about) if world.size > 1 else [about]), strict=True)
        hang_watch = _make_hang_watch(run_dir, config, world, sessions[0])
        store = None if run_dir is None else DiskCheckpointStore(run_dir, world, timeout)
        signals = NoSignals() if store is None or not config.checkpoint.enabled else RunSignals(config.shutdown)
        bundles = None if run_dir is None else DiskBundleStore(run_dir, world.rank, config.replay.keep)
        memory = None if run_dir is None else _make_memory_store(run_dir, world, timeout, list(hosts))
        if world.size == 1:  # tensors may be DTensors nevertheless
            norms = MeshNorms(1) if World.is_initialized() else LocalNorms()
            context = DistributedContext(norms=norms, make_watchdog=_check_still_single)
            return Wiring(run_dir, store, context, signals, memory, hang_watch, bundles, make_sinks)
        context = DistributedContext(
            world,
            MeshNorms(world.size),
            MeshReplicas(world.size),
            lambda: _make_watchdog(run_dir, config, world, sessions[0], hang_watch),
            ranks_per_host=hosts.count(hosts[world.rank]),
            hosts=hosts,
        )
        folder = run_dir if world.rank == 0 else None
        return Wiring(folder, store, context, signals, memory, hang_watch, bundles, make_sinks)


def _make_memory_store(
    run_dir: str | os.PathLike[str], world: World, timeout: float, hosts: list[str]
) -> MemoryCheckpointStore:
    if len(set(hosts)) > 1:
        return ReplicatedMemoryStore(run_dir, world, timeout, hosts)
    return MemoryCheckpointStore(run_dir, world, timeout)


def _check_still_single() -> RankWatchdog:
    """Raise SetupError if the process joined a group after the Guard was made: each rank would then decide alone."""
    size = World.current().size
    if size > 1:
        raise SetupError(
            f"the Guard was made before torch.distributed was initialized, but there are {size} ranks now: call "
            "init_process_group, wrap the model (DistributedDataParallel, fully_shard), and make the Guard after that"
        )
    return NoWatchdog()


def _make_watchdog(
    run_dir: str | os.PathLike[str] | None, config: Config, world: World, session: str, hang_watch: HangWatch
) -> RankWatchdog:
    records = None if run_dir is None else RankRecords(run_dir, world.rank)
    record = (lambda *_, **__: None) if records is None else records.write
    watchdog = StoreWatchdog(world.rank, world.size, config.liveness, record=record, session=session)
    if isinstance(hang_watch, SidecarClient):
        hang_watch.on_end = watchdog.end_hang
    return watchdog


def _make_hang_watch(run_dir: str | os.PathLike[str] | None, config: Config, world: World, session: str) -> HangWatch:
    if run_dir is None or not config.hang.enabled:
        return NoHangWatch()
    dump = dump_flight_record if world.size > 1 else lambda: None
    return SidecarClient(run_dir, world.rank, world.size, session, config.hang, dump, watch_device)
