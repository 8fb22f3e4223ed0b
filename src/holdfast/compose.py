"""Puts the layers together: the Guard that people use, with checkpoints on disk behind it. Imported when asked for."""

from __future__ import annotations

import logging
import os

import msgspec

from holdfast.core.config import Config
from holdfast.distributed.checkpoint.tier import DiskTier
from holdfast.distributed.world import World
from holdfast.runtime.guard import Guard as _Guard
from holdfast.runtime.guard import Wired

log = logging.getLogger("holdfast")


class Guard(_Guard):
    __doc__ = _Guard.__doc__

    def _wire(self, run_dir: str | os.PathLike[str] | None, config: Config) -> Wired:
        world = World.current()
        if world.size > 1 and config.recover.mode == "heal":
            log.warning("%d ranks cannot agree on a recovery yet: findings are recorded, nothing is done", world.size)
            config = msgspec.structs.replace(config, recover=msgspec.structs.replace(config.recover, mode="observe"))
        tier = None if run_dir is None else DiskTier(run_dir, world, config.checkpoint.patience_seconds)
        return Wired(run_dir if world.rank == 0 else None, config, tier)
