"""Hold what every stage of a run reads. Built once by `guard/build.py`; no field is ever reassigned."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.base.clock import Clock
from holdfast.core.base.config import Config
from holdfast.core.checkpoints.recovery_history import RecoveryHistory
from holdfast.core.decide.engine import Engine
from holdfast.core.hang.heartbeat import Heartbeat
from holdfast.runtime.ports.hooks import Hooks
from holdfast.runtime.ports.ranks import Ranks
from holdfast.runtime.record.records import Records
from holdfast.runtime.state.rng import Rng
from holdfast.runtime.state.run_state import RunState


@dataclass(frozen=True, slots=True)
class Context:
    """Holds the run's state, its policy, its judgement, its records and its ranks."""

    state: RunState
    config: Config
    engine: Engine
    ranks: Ranks
    records: Records
    hooks: Hooks
    clock: Clock
    rng: Rng
    history: RecoveryHistory
    heartbeat: Heartbeat
