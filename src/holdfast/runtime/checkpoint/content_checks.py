"""Check all of a checkpoint against the live run, before anything of the run is touched.

The checksums prove that the files are what was written; they do not prove who wrote them, nor for which program. So every
value is checked for its type, and compared with the live model, optimizers, schedulers, scaler and generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

from holdfast.core.base.errors import RunDirError, SetupError
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.runtime.context import Context
from holdfast.runtime.data.saved_position import check_saved_position
from holdfast.runtime.ports.checkpoint_store import TensorSpec
from holdfast.runtime.snapshots.encoding import PART
from holdfast.runtime.state.rng import RngState
from holdfast.runtime.state.schedule import Interventions

_PREFIXES = ("model.", "frozen.", "optimizer.", "own.", "group.", "registered.", "buffer.", "scaler.", "print.", PART)
_TIMES_THE_MODEL, _SMALL_BYTES = 16, 64 << 20
"""state of unknown size, such as that of an optimizer that has made none yet, may be this many times as large as the model
if the disk does not hold it: some file systems compress"""


class _SmallState(msgspec.Struct):
    optimizer_state: list[dict[Any, Any]]
    optimizer_groups: list[list[dict[str, Any]]]
    optimizer_own: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    interventions: Interventions
    scaler: dict[str, Any] | None
    registered: dict[str, Any]
    splits: Any
    wrapped: list[bool | None]
    gradient_orders: list[list[int] | None]
    flags: tuple[str, str] | None = None


class _SavedRng(msgspec.Struct):
    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: Any
    devices: tuple[Any, ...]
    generators: tuple[Any, ...]


class _SavedParts(msgspec.Struct):
    step: int
    light: _SmallState
    detectors: dict[str, Any]
    rng: _SavedRng
    data: dict[str, Any]
    journal_bytes: int


class RunChecks:
    """Implements ContentChecks for a run."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def check_layout(self, manifest: Manifest, layout: Mapping[str, TensorSpec], bytes_on_disk: int) -> None:
        stranger = next((name for name in layout if not name.startswith(_PREFIXES)), None)
        if stranger is not None:
            raise RunDirError(f"it holds a tensor {stranger[:80]!r}, and no part of a run has such a name")
        state = self._context.state
        if (why := state.parameter_mismatch(layout, whole=True)) is not None:
            raise _misfit(manifest, why)
        unexpected, own = state.unexpected_bytes(layout)
        if unexpected > max(bytes_on_disk, _TIMES_THE_MODEL * own, _SMALL_BYTES):
            raise RunDirError(
                f"it declares {unexpected:,} bytes beside the model's {own:,}, and has {bytes_on_disk:,} bytes on disk: its "
                "files have holes"
            )

    def check_parts(self, manifest: Manifest, parts: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        context = self._context
        try:
            saved = msgspec.convert(parts, _SavedParts)
            rng = RngState.of(msgspec.structs.asdict(saved.rng))
            rng.try_out()
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
            raise RunDirError(f"the saved state cannot be read: {type(error).__name__}: {error}") from None
        if saved.step != manifest.step:
            raise RunDirError(f"its state is that of step {saved.step}, and its manifest says step {manifest.step}")
        check_saved_position(saved.data, context.rng.capture())
        why = context.state.find_mismatch(parts["light"], tensors) or context.rng.find_mismatch(rng)
        if why is not None:
            raise _misfit(manifest, why)


def _misfit(manifest: Manifest, why: str) -> SetupError:
    return SetupError(
        f"checkpoint {manifest.name} does not fit this run: {why}; build the run as it was then, name another run_dir for "
        'another run, or set [checkpoint] resume = "never"'
    )
