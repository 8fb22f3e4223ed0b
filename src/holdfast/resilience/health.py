"""Checks of loss and gradients for NaN and Inf, of a GPU, and of the process group."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.core.base.config import DetectSection
from holdfast.core.base.errors import first_line
from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.core.base.types import Signal
from holdfast.core.detectors.nonfinite import NonFinite
from holdfast.distributed.world import World, collective_device
from holdfast.resilience.probes import gpu_compute
from holdfast.resilience.probes.child import run_probe, run_probes
from holdfast.resilience.probes.probe import ProbeSettings
from holdfast.runtime.tensors.inspect import first_nonfinite, nonfinite_mask
from holdfast.runtime.tensors.torch_private import cuda_is_initialized

log = logging.getLogger("holdfast")

_ACTIONS = ("warn", "skip", "raise")
_POLL_SECONDS = 0.001
_GPU_KEYS = {
    gpu_compute.ACCESS: "device_accessible",
    gpu_compute.COMPUTE: "compute_ok",
    gpu_compute.MEMORY: "memory_ok",
}
"""probe -> its key in the answer of check_gpu_health"""


@dataclass
class NaNState:
    """Counts the steps with NaN or Inf."""

    consecutive_nans: int = 0
    total_nans: int = 0
    last_good_loss: float = float("inf")
    last_good_step: int = 0
    nan_steps: list[int] = field(default_factory=list)
    """the newest `max_history` of them"""


class NaNDetector:
    """Reports NaN and Inf in the loss and the gradients, and counts them.

    action: "warn" logs a warning; "skip" does too, and mentions the skipped update; "raise" raises RuntimeError. The loop
    itself must skip the update when a check returns False.
    max_consecutive: the steps in a row with NaN or Inf after which `should_rollback` is True.
    max_history: how many step numbers `state.nan_steps` keeps.
    """

    def __init__(self, action: str = "warn", max_consecutive: int = 5, max_history: int = 100) -> None:
        if action not in _ACTIONS:
            raise ValueError(f"Invalid NaN action: {action!r} (expected {'/'.join(_ACTIONS)})")
        self.action = action
        self.max_consecutive = max_consecutive
        self.max_history = max_history
        self._rule = NonFinite(DetectSection())
        self.reset()

    def reset(self) -> None:
        """Forget all counts, as after a rollback."""
        self.state = NaNState()
        self._bad_gradients_at: int | None = None

    @property
    def should_rollback(self) -> bool:
        """Whether `max_consecutive` steps in a row had NaN or Inf."""
        return self.state.consecutive_nans >= self.max_consecutive

    def check_loss(self, loss: float | Tensor, step: int) -> bool:
        """Return whether the loss is finite on every rank. Every rank of the process group must call it, if there is one.

        Raises RuntimeError, on every rank, if it is not and the action is "raise".
        """
        value = float(loss)
        is_bad = self._rule.observe(Signal(step=step, loss=value)) is not None
        if not _on_any_rank(is_bad):
            if self._bad_gradients_at is None:  # else check_gradients decides whether the row has ended
                self.state.consecutive_nans = 0
            self.state.last_good_loss = value
            self.state.last_good_step = step
            return True
        self._bad_gradients_at = None
        self._count(step)
        counts = f"consecutive={self.state.consecutive_nans}, total={self.state.total_nans}"
        if is_bad:
            good = f"last_good_loss={self.state.last_good_loss:.4f} at step {self.state.last_good_step}"
            self._react(f"NaN/Inf loss at step {step} ({counts}, {good})")
        else:
            self._react(f"NaN/Inf detected on another rank at step {step} ({counts})")
        return False

    def check_gradients(self, model: nn.Module, step: int, *, all_ranks: bool = False) -> bool:
        """Return whether all gradients are finite. Call it before the optimizer steps.

        all_ranks: ask every rank of the process group; all of them must call it. Otherwise only this rank's gradients, or
        its shards of them, count, and ranks may get different answers.
        Raises RuntimeError if they are not finite and the action is "raise".
        """
        name = _first_bad_gradient(model)
        is_bad = _on_any_rank(name is not None) if all_ranks else name is not None
        if not is_bad:
            if self._bad_gradients_at not in (None, step):
                self.state.consecutive_nans = 0
            self._bad_gradients_at = None
            return True
        if self.state.nan_steps[-1:] != [step]:  # else the loss of this step has counted
            self._count(step)
        self._bad_gradients_at = step
        where = "on another rank" if name is None else f"in {name}"
        self._react(f"NaN/Inf gradient {where} at step {step}")
        return False

    def _count(self, step: int) -> None:
        self.state.consecutive_nans += 1
        self.state.total_nans += 1
        self.state.nan_steps.append(step)
        del self.state.nan_steps[: -self.max_history or None]

    def _react(self, message: str) -> None:
        if self.action == "raise":
            raise RuntimeError(message)
        log.warning("holdfast: %s%s", message, "; skipping the optimizer step" if self.action == "skip" else "")


def check_gpu_health(device: int = 0) -> dict[str, bool | str]:
    """Compute on a GPU with known answers and fill a megabyte of its memory. `error` is empty if it is healthy.

    The keys are cuda_available, device_accessible, compute_ok, memory_ok and error. The current device stays the same. If
    this process does not use CUDA yet, a child process computes, and no device context is left behind.
    """
    result: dict[str, bool | str] = {
        "cuda_available": torch.cuda.is_available(),
        "device_accessible": False,
        "compute_ok": False,
        "memory_ok": False,
        "error": "",
    }
    if not result["cuda_available"]:
        result["error"] = "CUDA not available"
        return result
    settings = ProbeSettings(effort="least", device=device)
    answers: dict[str, list[ProbeResult]] = {}
    if cuda_is_initialized():
        answers = {probe.name: run_probe(probe, settings) for probe in gpu_compute.PROBES if probe.name in _GPU_KEYS}
    else:
        for name, results in run_probes(gpu_compute.__name__, settings, list(_GPU_KEYS)):
            answers[name] = results or []
    for name, key in _GPU_KEYS.items():
        bad = [each for each in answers[name] if each.status not in (ProbeStatus.OK, ProbeStatus.NOTE)]
        result[key] = bool(answers[name]) and not bad
        if bad and not result["error"]:
            result["error"] = bad[0].text
            log.error("holdfast: the health check of GPU %s failed: %s", device, bad[0].text)
    return result


def check_nccl_health(timeout_sec: float = 10.0) -> bool:
    """Return whether every rank joins a small all-reduce in time. True without a process group.

    Every rank must call it. After False the group cannot be relied on: end the process, so that the launcher restarts it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return True
    ends = time.monotonic() + timeout_sec
    try:
        ones = torch.ones(1, device=_group_device())
        work = dist.all_reduce(ones, async_op=True)
        # Gloo raises when the time is up. NCCL only orders its stream after the collective, so that is waited for below.
        done = True if work is None else work.wait(timeout=timedelta(seconds=timeout_sec))
        if done is False or not _wait_for_stream(ones, ends):
            log.warning("holdfast: a collective of all ranks is not complete after %g s", timeout_sec)
            return False
        total, expected = float(ones), dist.get_world_size()
    except (RuntimeError, ValueError) as error:
        log.error("holdfast: a collective of all ranks failed: %s", first_line(error))
        return False
    if total != expected:
        log.error("holdfast: a collective of all ranks counted %g of %d", total, expected)
    return total == expected


def _wait_for_stream(value: Tensor, ends: float) -> bool:
    """Return whether the work queued on the tensor's device so far completes in time."""
    if not value.is_cuda:
        return True
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    while not event.query():
        if time.monotonic() > ends:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _group_device() -> torch.device:
    try:
        return collective_device()
    except ValueError:  # it has no default group, only others
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _on_any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank of the process group. All ranks call it."""
    world = World.current()
    if world.size == 1:
        return flag
    return bool(world.all_gather_rows(torch.tensor([flag], dtype=torch.uint8, device=_group_device())).any())


@torch.no_grad()
def _first_bad_gradient(model: nn.Module) -> str | None:
    """Return the first parameter whose gradient, or this rank's shard of it, holds NaN or Inf."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if all(gradient.device.type == "cpu" for gradient in gradients.values()):
        return first_nonfinite(gradients, lambda _: None)
    masks = {name: mask for name, g in gradients.items() if (mask := nonfinite_mask(g)) is not None}
    if not masks:
        return None
    device = next(iter(masks.values())).device
    found = torch.stack([mask.any().to(device) for mask in masks.values()]).tolist()  # the host waits once
    return next((name for name, is_bad in zip(masks, found, strict=True) if is_bad), None)
