"""A run into one file, and on from one: everything it is, between two steps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.core.errors import SetupError, StepError
from holdfast.runtime.snapshots import file as snapshot_file

if TYPE_CHECKING:
    from holdfast.runtime.run import Run


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Everything the run is, as of now."""
    run.flush()
    if run.source is None:
        raise StepError("save(): there is nothing to save before guard.steps() has been called")
    light, tensors = run.state.light()
    buffers = {f"buffer.{n}": b for n, b in run.state.buffers.named().items()}
    parts = {
        "step": run.step,
        "light": light,
        "detectors": run.engine.state_dict(),
        "rng": snapshot_file.pack_rng(run.rng.capture()),
        "position": run.source.position,
        "last_ids": run.source.last_ids(),
    }
    run.keeper.before_update()
    snapshot_file.save(path, parts, {**run.state.heavy(), **tensors, **buffers, **run.state.frozen()})
    run.engine.write("snapshot_saved", step=run.step, path=str(path))


def go_on(run: Run, parts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put the run where the file was written. Its loader must be there, and nothing trained yet."""
    assert run.source is not None
    why = run.state.fits(parts["light"], tensors)
    if why is not None:
        raise SetupError(f"the snapshot file does not fit this run: {why}")
    run.state.join(parts["light"], tensors)
    named = {n.removeprefix("buffer."): t for n, t in tensors.items() if n.startswith("buffer.")}
    run.state.buffers.restore(run.state.buffers.from_named(named))
    run.source.resume(parts["position"], parts["last_ids"])
    run.rng.restore(snapshot_file.unpack_rng(parts["rng"]))
    run.step = parts["step"]
    run.engine.write("resumed", durable=True, step=run.step, position=parts["position"])
    run.engine.resume(parts["detectors"], run.step)
