"""Metrics for any training loop, by the names of KempnerForge: `start_step` before each step, `end_step` after it."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsFloat, get_args

import msgspec

from holdfast.core.base import durable
from holdfast.core.base.clock import SystemClock
from holdfast.core.base.config import MetricsSection, SinkName
from holdfast.core.record.metrics import MetricsFile
from holdfast.core.record.sink_thread import SinkRun, SinkThread, size_of
from holdfast.sinks import make_sinks

_EMA = 0.1
_MAX_BYTES = 4096


class StepMetrics(msgspec.Struct, kw_only=True):
    """The metrics of one step."""

    loss: float
    smoothed_loss: float
    grad_norm: float
    lr: float
    tokens_per_sec: float
    mfu: float
    step_time_sec: float


class MetricsTracker:
    """Measures steps and writes them to `folder`/metrics.jsonl and to the sinks. Nothing here waits for a device.

    folder: also keeps the identity of the run, so that a restart continues it. sinks: as in `[metrics] sinks`. MFU needs
    flops_per_token (see count_flops) and gpu_peak_tflops. log_interval: steps between two results of `end_step`.
    """

    def __init__(
        self,
        folder: str | Path = "metrics",
        sinks: Sequence[SinkName] = ("console",),
        *,
        num_gpus: int = 1,
        gpu_peak_tflops: float | None = None,
        flops_per_token: float | None = None,
        log_interval: int = 10,
        total_steps: int | None = None,
    ) -> None:
        names = get_args(SinkName)
        if isinstance(sinks, str) or not set(sinks) <= set(names):
            raise ValueError(f"sinks={sinks!r}: give a list of {', '.join(map(repr, names))}")
        if log_interval < 1:
            raise ValueError(f"log_interval={log_interval}: give a number of steps from 1")
        path = Path(folder).resolve()
        durable.make_folder(path)
        identity, is_restart = _find_identity(path / "tracker.json")
        self._peak = 1e12 * (gpu_peak_tflops or 0.0) * num_gpus
        self._flops_per_token, self._interval = flops_per_token or 0.0, log_interval
        earlier = size_of(path / "metrics.jsonl")
        self._file = MetricsFile(path / "metrics.jsonl", 1.0, SystemClock(), _encode)
        config = MetricsSection(sinks=tuple(sinks), console_every=log_interval)
        self._sinks = [SinkThread(sink) for sink in make_sinks(config)]
        for sink in self._sinks:
            sink.start(SinkRun(identity, path, is_restart, lambda: total_steps, earlier))
            if is_restart:
                sink.put_event({"event": "restart", "time": time.time()})
        self._began = time.perf_counter()
        self._smoothed: float | None = None

    def start_step(self) -> None:
        """Mark the beginning of a step."""
        self._began = time.perf_counter()

    def end_step(
        self,
        step: int,
        loss: SupportsFloat,
        grad_norm: SupportsFloat,
        lr: SupportsFloat,
        tokens_in_step: SupportsFloat,
        loss_scale: SupportsFloat | None = None,
    ) -> StepMetrics | None:
        """Mark the end of a step. Return its metrics at step 1 and every `log_interval` steps; None at others.

        tokens_in_step: of all ranks together. A tensor of one value, such as the result of clip_grad_norm_, is read: give
        numbers where waiting for the device matters. A loss that is not finite is left out of the smoothed one.
        """
        seconds = max(time.perf_counter() - self._began, 1e-9)
        loss, grad_norm, lr = map(_to_float, (loss, grad_norm, lr))
        if math.isfinite(loss):
            self._smoothed = loss if self._smoothed is None else self._smoothed + _EMA * (loss - self._smoothed)
        smoothed = loss if self._smoothed is None else self._smoothed
        speed = float(tokens_in_step) / seconds
        mfu = speed * self._flops_per_token / self._peak if self._peak else 0.0
        row: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "loss_smooth": smoothed,
            "grad_norm": grad_norm,
            "lr": lr,
        }
        row |= {"step_seconds": seconds, "tokens_per_second": speed, "status": "committed", "time": time.time()}
        row |= {"mfu": mfu} if mfu else {}
        row |= {} if loss_scale is None else {"loss_scale": float(loss_scale)}
        self._file.write(row)
        for sink in self._sinks:
            sink.put_row(row)
        if step != 1 and step % self._interval:
            return None
        return StepMetrics(
            loss=loss,
            smoothed_loss=smoothed,
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_sec=speed,
            mfu=mfu,
            step_time_sec=seconds,
        )

    def close(self) -> None:
        """Write what waits, and close all sinks."""
        self._file.close()
        for sink in self._sinks:
            sink.close()


def _to_float(value: Any) -> float:
    """Return a number or a tensor of one value as a float. Torch warns if a loss that has gradients is read."""
    return float(value.detach() if hasattr(value, "detach") else value)


def _encode(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _find_identity(path: Path) -> tuple[str, bool]:
    """Return the identity that an earlier process has left, or a new one; and whether there was one."""
    try:
        known = json.loads(durable.read_file(path, _MAX_BYTES))["run"]
        if isinstance(known, str) and known:
            return known, True
    except (OSError, ValueError, KeyError, TypeError):
        pass
    identity = secrets.token_hex(16)
    durable.replace_file(path, json.dumps({"run": identity}).encode())
    return identity, False
