"""Every nanosecond between two rows belongs to one phase, also if the ring of the heartbeat was overwritten."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from holdfast.core.base.types import Signal
from holdfast.core.hang import heartbeat as beats
from holdfast.core.hang.heartbeat import BACKWARD, DATA, FORWARD, OPTIMIZER, USER, Heartbeat
from holdfast.core.record.device_peaks import find_peak
from holdfast.core.record.row_metrics import RowMetrics
from holdfast.core.record.step_times import PhaseSplit

MS = 1_000_000


@pytest.fixture
def clock(monkeypatch):
    now = [1_000 * MS]
    monkeypatch.setattr(beats, "monotonic_ns", lambda: now[0])
    return now


def run_step(heartbeat: Heartbeat, clock: list[int], lengths: dict[int, int]) -> None:
    for phase, length in lengths.items():
        heartbeat.enter(phase)
        clock[0] += length


def test_phases_add_up_to_the_time_between_rows(clock):
    heartbeat, noise = Heartbeat(), random.Random(3)
    times, ends = PhaseSplit(heartbeat), []
    for _ in range(300):
        lengths = {phase: noise.randrange(1, 40) * MS for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER)}
        run_step(heartbeat, clock, lengths)
        ends.append((clock[0], lengths))  # settled inside the optimizer's phase
        run_step(heartbeat, clock, {OPTIMIZER: 2 * MS, USER: 3 * MS})
    assert times.take(ends[0][0]) == (None, None)
    for at, lengths in ends[1:]:
        seconds, phases = times.take(at, update_ns=MS // 2, wait_ns=MS // 4)
        assert phases is not None and sum(phases.values()) == pytest.approx(seconds)
        assert phases["forward"] == lengths[FORWARD] / 1e9 and phases["between"] == 0.003
        assert phases["optimizer"] == 0.0005 and phases["device"] == 0.00025
        assert phases["guard"] == pytest.approx(lengths[OPTIMIZER] / 1e9 + 0.002 - 0.00075)


def test_an_overwritten_heartbeat_gives_times_without_phases_and_then_phases_again(clock):
    heartbeat = Heartbeat()
    times, ends = PhaseSplit(heartbeat), []
    times.take(clock[0])
    run_step(heartbeat, clock, {DATA: MS})
    times.take(clock[0])
    for _ in range(5000):
        run_step(heartbeat, clock, {FORWARD: MS, OPTIMIZER: MS})
        ends.append(clock[0])
    found = [times.take(at) for at in ends]
    assert {seconds for seconds, _ in found} == {0.002} and all(phases is None for _, phases in found[:-1])
    run_step(heartbeat, clock, {FORWARD: MS, OPTIMIZER: MS})
    assert times.take(clock[0])[1] == {"forward": 0.001, "guard": 0.001}


def test_memory_of_the_sidecar_is_not_held(clock):
    heartbeat, memory = Heartbeat(), bytearray(beats.SIZE)
    times = PhaseSplit(heartbeat)
    heartbeat.share(memoryview(memory))
    run_step(heartbeat, clock, {DATA: MS, FORWARD: MS})
    times.take(clock[0])
    heartbeat.unshare()
    memory.append(0)  # BufferError while anything refers to it
    run_step(heartbeat, clock, {DATA: MS, FORWARD: MS})
    assert times.take(clock[0])[1] == {"data": 0.001, "forward": 0.001}


class Times(PhaseSplit):
    def __init__(self) -> None:
        super().__init__(Heartbeat())

    def take(self, at: int, update_ns: int = 0, wait_ns: int = 0) -> Any:
        return 0.5, {"forward": 0.5}


def test_a_row_has_speed_mfu_smoothed_loss_and_the_slowest_rank():
    facts = {"flops_per_token": 1e9}
    metrics = RowMetrics(Times(), lambda: 100.0, lambda: 0, lambda: facts, lambda facts: 4e12)
    ranks = np.array([[0.0, 0.0, 0.0], [0.0, 0.3, 0.0], [0.2, 0.2, 0.2], [0.3, 0.0, 0.3]])
    losses = [4.0, 2.0, float("nan"), 3.0]
    rows = [
        metrics.fields(Signal(step=n, loss=loss, samples=8, length=100), "committed", 0, ranks=ranks)
        for n, loss in enumerate(losses, 1)
    ]
    assert [row.get("loss_smooth") for row in rows] == [4.0, 3.0, None, 3.0]
    assert rows[0]["tokens_per_second"] == 1600.0 and rows[0]["mfu"] == 0.4
    assert rows[0]["slowest_rank"] == 1 and rows[0]["straggler_seconds"] == pytest.approx(0.3)
    assert "tokens_per_second" not in metrics.fields(Signal(step=5, loss=1.0, samples=8, length=9), "skipped", 0)


@pytest.mark.parametrize(
    ("name", "dtype", "watts", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 700, 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 350, 756e12),
        ("NVIDIA H100 NVL", "fp8", None, 1670e12),
        ("NVIDIA H100", "bf16", 350, 756e12),
        ("NVIDIA H200", "fp32", 700, 66.9e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", None, 156e12),
        ("NVIDIA A100-PCIE-40GB", "bf16", None, 312e12),
        ("Tesla V100-PCIE-16GB", "fp16", None, 112e12),
        ("Tesla V100-SXM2-32GB", "bf16", None, None),
        ("NVIDIA GeForce RTX 4090", "bf16", None, 165.2e12),
        ("NVIDIA L40S", "fp8", None, 733e12),
        ("NVIDIA L40", "bf16", None, 181e12),
        ("NVIDIA A10", "bf16", None, 125e12),
        ("NVIDIA H200 NVL", "bf16", 600, 835.5e12),
        ("NVIDIA H800 PCIe", "bf16", 350, None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None, None),
        ("NVIDIA GeForce RTX 4090 D", "fp32", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None, None),
        ("GRID A100-10C", "bf16", None, None),
        ("NVIDIA A10G", "bf16", None, None),
        ("AMD Instinct MI250", "fp16", None, 181e12),
        ("AMD Instinct MI300X OAM", "fp32", None, 163.4e12),
        ("AMD Instinct MI250X", "bf16", None, 191.5e12),
        ("AMD Instinct MI300X OAM", "bf16", None, 1307.4e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None, None),
        ("Quadro FX 580", "fp32", None, None),
    ],
)
def test_peaks_tell_variants_apart(name, dtype, watts, expected):
    assert find_peak(name, dtype, watts) == pytest.approx(expected)
