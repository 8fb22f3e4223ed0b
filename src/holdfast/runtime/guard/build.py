"""Build a run from what the user gave: every part once, each with what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from torch import float32

from holdfast.core.base.clock import Clock
from holdfast.core.base.config import Config
from holdfast.core.base.types import Incident, Plan, Span
from holdfast.core.checkpoints.recovery_history import RecoveryHistory
from holdfast.core.decide.engine import Engine
from holdfast.core.detectors.base import Detector
from holdfast.core.hang.heartbeat import Heartbeat
from holdfast.core.record.row_metrics import RowMetrics
from holdfast.core.record.step_times import PhaseSplit
from holdfast.runtime.agree.coordinator import RankCoordinator
from holdfast.runtime.checkpoint.manager import CheckpointManager
from holdfast.runtime.context import Context
from holdfast.runtime.data.feeder import Feeder
from holdfast.runtime.incidents.watch import IncidentWatch
from holdfast.runtime.integrity.first_steps import FirstSteps
from holdfast.runtime.integrity.monitor import IntegrityMonitor
from holdfast.runtime.ports.bundle_store import BundleStore
from holdfast.runtime.ports.checkpoint_store import CheckpointStore, MemoryStore
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.ports.hang_watch import HangWatch
from holdfast.runtime.ports.hooks import Hooks
from holdfast.runtime.ports.ranks import LateWatchdog, MonitoredRanks, Ranks
from holdfast.runtime.ports.shutdown import ShutdownSignals
from holdfast.runtime.profile.speed_watch import SpeedWatch
from holdfast.runtime.record.flops import peak_of_ranks
from holdfast.runtime.record.memory_watch import MemoryWatch
from holdfast.runtime.record.records import Records
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.snapshots.memory import available_bytes
from holdfast.runtime.state.rng import Rng
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.state.schedule import UnknownSchedulers
from holdfast.runtime.step.pipeline import Parts
from holdfast.runtime.step.run import GuardedRun
from holdfast.runtime.tensors.cuda_streams import StreamTracker
from holdfast.runtime.tensors.device_span import DeviceSpan
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.gradient_sync import GradientSync
from holdfast.runtime.update.local_grad_norms import LocalGradNorms
from holdfast.runtime.update.update_size import UpdateSize


def build_run(
    state: RunState,
    config: Config,
    *,
    clip: float | None,
    hooks: Hooks,
    detectors: Sequence[Detector],
    records: Records,
    clock: Clock,
    store: CheckpointStore | None,
    bundles: BundleStore | None,
    memory: MemoryStore | None,
    distributed: DistributedContext,
    signals: ShutdownSignals,
    heartbeat: Heartbeat,
    hang_watch: HangWatch,
) -> GuardedRun:
    """Return a guarded run, not opened yet."""
    watchdog = LateWatchdog(distributed.make_watchdog)
    ranks: Ranks = distributed.ranks
    is_distributed = ranks.size > 1
    if is_distributed:
        ranks = MonitoredRanks(ranks, watchdog.get, heartbeat)
    coordinator = RankCoordinator(ranks, config, distributed.hosts)
    hooks.heartbeat = heartbeat

    def ask_hooks(incident: Incident) -> Plan | None:
        """Return the plan of the user's hooks; on several ranks, that of rank 0."""
        plan = hooks.plan(incident)
        return coordinator.share_plan(plan) if hooks.broadcasts_plans else None

    engine = Engine(config, detectors=detectors, on_instability=ask_hooks)

    def journal_exclusion(span: Span, batches: int, reason: str) -> None:
        engine.write("quarantine", durable=True, spans=[span], batches=batches, reason=reason)

    devices = list({p.device for _, module in state.modules for p in module.parameters()})
    dtype = next((p.dtype for _, module in state.modules for p in module.parameters()), float32)
    records.row_metrics = RowMetrics(
        PhaseSplit(heartbeat),
        clock.wall,
        monotonic_ns,
        lambda: records.facts,
        lambda facts: peak_of_ranks(devices, dtype, facts, ranks.size),
    )
    context = Context(state, config, engine, ranks, records, hooks, clock, Rng(devices), RecoveryHistory(), heartbeat)
    feeder = Feeder(context.rng, journal_exclusion, is_distributed=is_distributed)
    checkpoints = CheckpointManager(context, store, feeder, memory)
    memory_watch = MemoryWatch(devices, clock, available_bytes, enabled=config.detect.advisory)
    records.memory_row = memory_watch.row
    on_cuda = state.optimizers.can_veto_on_cuda() and all(map(distributed.ranks.supports_device, devices))
    snapshots = SnapshotManager(
        config.snapshot, state, context.rng, checkpoints, ranks, ranks_per_host=distributed.ranks_per_host
    )
    span = DeviceSpan(devices[0]) if len(devices) == 1 else None
    parts = Parts(
        feeder=feeder,
        gate=Gate(
            state.optimizers,
            state.scaler,
            config.detect.gate,
            config.recover.mode == "heal",
            on_cuda,
            norms=distributed.norms,
        ),
        norms=distributed.norms,
        update_size=UpdateSize(state.optimizers) if config.detect.update_spike else None,
        local_grad_norms=LocalGradNorms(state.modules, enabled=is_distributed, now=clock.monotonic, span=span),
        gradient_sync=GradientSync(state.wrapped_modules),
        coordinator=coordinator,
        snapshots=snapshots,
        checkpoints=checkpoints,
        incidents=IncidentWatch(context, snapshots, checkpoints, bundles),
        integrity=IntegrityMonitor(context, distributed.replicas),
        first_steps=FirstSteps(context),
        unknown_schedulers=UnknownSchedulers(state.optimizers, state.schedulers),
        streams=StreamTracker(devices) if any(device.type == "cuda" for device in devices) else None,
        watchdog=watchdog,
        signals=signals,
        hang_watch=hang_watch,
        memory=memory_watch,
    )
    speed = None
    folder = None if records.rundir is None else records.rundir.path
    is_watched = config.metrics.slowdown and config.metrics.enabled and folder is not None
    if is_watched or config.metrics.profile_signal:
        speed = SpeedWatch(config.metrics, folder, devices, checkpoints.is_writing, engine.add_note)
        records.on_row = speed.observe if is_watched else None
    return GuardedRun(context, parts, clip, speed)
