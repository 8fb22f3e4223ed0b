"""Puts the layers together: the Guard that people use, with checkpoints on disk behind it. Imported when asked for."""

from __future__ import annotations

import os

from holdfast.core.config import Config
from holdfast.distributed.checkpoint.tier import DiskTier
from holdfast.distributed.world import World
from holdfast.runtime.guard import Guard as _Guard
from holdfast.runtime.snapshots.tier import Tier


class Guard(_Guard):
    __doc__ = _Guard.__doc__

    def _tier(self, run_dir: str | os.PathLike[str], config: Config) -> Tier | None:
        return DiskTier(run_dir, World.current(), config.checkpoint.patience_seconds)
