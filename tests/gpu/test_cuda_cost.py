"""Counts what a healthy step costs on a GPU: waits, launches, allocations, graph breaks. Skipped without a GPU."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.runtime.tensors import checksum as bits
from holdfast.runtime.tensors.inspect import bit_checksum
from holdfast.runtime.tensors.norms import clip_factor
from holdfast.runtime.update import fused_measurements
from holdfast.runtime.update.fused_measurements import FusedPacker
from holdfast.runtime.update.measurements import DeviceMeasurements, MeasurementPacker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WIDTH, ROWS = 64, 8
QUIET = {"snapshot": {"enabled": False}, "checkpoint": {"enabled": False}, "integrity": {"between_updates_every": 0}}


def build(optimizer: str = "adamw") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).cuda()
    if optimizer == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loader(pinned: bool = True) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS * 400, WIDTH, generator=draw)
    return DataLoader(TensorDataset(x, x[:, :1].tanh()), batch_size=ROWS, pin_memory=pinned)


class Bare:
    """Runs an unguarded loop, some steps at a time."""

    def __init__(self, how: Any = None, precision: str = "fp32", optimizer: str = "adamw") -> None:
        self.model, self.optimizer = build(optimizer)
        self.scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None
        self.precision, self.batches = precision, iter(loader())
        self.call = self.model if how is None else how(self.model)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = (t.to("cuda", non_blocking=True) for t in batch)
        with torch.autocast("cuda", torch.float16, enabled=self.precision == "fp16"):
            return nn.functional.mse_loss(self.call(x).float(), y)

    def steps(self, count: int) -> None:
        for _ in range(count):
            loss = self.loss(next(self.batches))
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()


class Guarded(Bare):
    def __init__(self, run_dir: Path, config: dict[str, Any] | None = None, *, pinned: bool = True, **how: Any) -> None:
        super().__init__(**how)
        self.guard = holdfast.Guard(
            self.model,
            self.optimizer,
            scaler=self.scaler,
            clip_grad_norm=1.0,
            run_dir=run_dir,
            config=QUIET if config is None else config,
        )
        self.guard.__enter__()
        self.served = iter(self.guard.steps(loader(pinned), max_steps=10_000))

    def steps(self, count: int) -> None:
        for _ in range(count):
            step = next(self.served)
            with step:
                for batch in step.microbatches():
                    step.backward(self.loss(batch))

    def close(self) -> None:
        self.guard.__exit__(None, None, None)
        assert self.guard.summary().status == "clean"


def counted(run: Bare, steps: int = 20) -> dict[str, float]:
    """Return the CUDA calls of one step."""
    run.steps(60)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run.steps(steps)
    names = [event.name for event in found.events()]
    return {
        "stream": sum(n == "cudaStreamSynchronize" for n in names) / steps,
        "device": sum(n == "cudaDeviceSynchronize" for n in names) / steps,
        "event": sum(n == "cudaEventSynchronize" for n in names) / steps,
        "launches": sum(
            n in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx") for n in names
        )
        / steps,
    }


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_healthy_step_waits_for_one_event_and_nothing_else(optimizer, precision, tmp_path):
    bare = counted(Bare(precision=precision, optimizer=optimizer))
    run = Guarded(tmp_path / "run", precision=precision, optimizer=optimizer)
    ours = counted(run)
    run.close()
    assert ours["stream"] <= bare["stream"]
    # The profiler itself waits for the device once, at its end.
    assert ours["device"] <= max(bare["device"], 0.05)
    assert ours["event"] <= bare["event"] + 1.0
    assert ours["launches"] <= bare["launches"] + 25


@pytest.mark.parametrize("config", [QUIET, {"checkpoint": {"enabled": False}}], ids=["alone", "with snapshots"])
def test_between_two_steps_nothing_synchronises_either(config, tmp_path):
    run = Guarded(tmp_path / "run", config)
    run.steps(60)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.steps(130)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.close()


def test_steps_allocate_no_new_device_or_pinned_memory(tmp_path):
    """Neither allocator asks the driver for more memory. The batches are not pinned: how many are in flight at once is up to
    the loop, and grows if the device is busy."""
    run = Guarded(tmp_path / "run", pinned=False)
    run.steps(80)
    torch.cuda.synchronize()
    before, pinned = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    run.steps(100)
    torch.cuda.synchronize()
    after, then = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    run.close()
    assert after["num_device_alloc"] == before["num_device_alloc"]
    assert after["allocated_bytes.all.current"] <= before["allocated_bytes.all.current"] + 4096
    assert then["num_host_alloc"] == pinned["num_host_alloc"]


def bits_of(run: Bare) -> list[torch.Tensor]:
    found = [p.detach() for p in run.model.parameters()]
    found += [v for p in run.model.parameters() for _, v in sorted(run.optimizer.state[p].items())]
    return [t.reshape(-1).view(torch.uint8) for t in found]


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True)


def graphed(model: nn.Module) -> Any:
    return torch.cuda.make_graphed_callables(model, (torch.randn(ROWS, WIDTH, device="cuda"),))


@pytest.mark.parametrize("how", [compiled, graphed], ids=["compiled", "graphed"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_compiled_and_graphed_models_train_to_the_same_bits_without_a_break(how, precision, tmp_path):
    if how is graphed and precision == "fp16":
        pytest.skip("autocast outside of a graphed callable is not graphed with it")
    torch.use_deterministic_algorithms(True)
    try:
        torch._dynamo.reset()
        bare = Bare(how, precision)
        bare.steps(70)
        made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = Guarded(tmp_path / "run", {"checkpoint": {"enabled": False}}, how=how, precision=precision)
        run.steps(70)
        run.close()
        counters = torch._dynamo.utils.counters
        assert not counters["graph_break"]
        assert how is graphed or counters["stats"]["unique_graphs"] <= made
        assert all(torch.equal(a, b) for a, b in zip(bits_of(run), bits_of(bare), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    found = {
        "large": torch.randn(3, 300_007, generator=draw),
        "odd": torch.randn(7, generator=draw),
        "one": torch.tensor(3.5),
        "count": torch.tensor(9),
        "bf16": torch.randn(1001, generator=draw).bfloat16(),
        "fp16": torch.randn(1001, generator=draw).half(),
        "double": torch.randn(33, generator=draw).double(),
        "whole": torch.arange(-9, 9, dtype=torch.int32),
        "mask": torch.tensor([True, False, True]),
        "complex": torch.randn(5, dtype=torch.complex64, generator=draw),
        "none": torch.empty(0, 3),
    }
    there = {name: value.cuda() for name, value in found.items()}
    return {**there, "across": there["large"].T, "slice": there["large"].view(-1)[1:99_999]}


def test_one_pass_over_all_tensors_says_what_each_says_by_itself():
    assert bits.KERNEL.get(torch.device("cuda", 0)) is not None, "see the log for what Triton lacks here"
    found = tensors()
    side = torch.cuda.Stream()
    seen = bits.checksum_and_finite(found)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        again = bits.checksum_and_finite(found)
    torch.cuda.synchronize()
    expected = [int(bit_checksum(value)) for value in found.values()]
    assert seen.sums.tolist() == again.sums.tolist() == expected
    assert [int(bit_checksum(value.cpu())) for value in found.values()] == expected
    assert not any(
        seen.maybe_nonfinite[n]
        for n, name in enumerate(seen.names)
        if name in ("large", "bf16", "fp16", "double", "one")
    )


@pytest.mark.parametrize("name", ["large", "odd", "one", "bf16", "fp16", "double", "complex"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, -1])
def test_one_value_that_is_not_finite_is_seen(name, value, at):
    found = tensors()
    found[name].view(-1)[at] = value
    seen = bits.checksum_and_finite(found)
    assert int(seen.maybe_nonfinite[seen.names.index(name)]) == 1
    assert int(seen.maybe_nonfinite[seen.names.index("whole")]) == 0


def test_one_flipped_bit_changes_one_sum():
    found = tensors()
    before = bits.checksum_and_finite(found).sums.clone()
    for name in ("large", "odd", "one", "bf16", "double", "whole"):
        raw = found[name].view(-1).view(torch.uint8)
        for byte in (0, len(raw) - 1):
            raw[byte] ^= 16
            seen = bits.checksum_and_finite(found)
            touched = {name} | ({"across", "slice"} if name == "large" else set())
            differ = {n for n, a, b in zip(seen.names, before.tolist(), seen.sums.tolist(), strict=True) if a != b}
            assert name in differ and differ <= touched
            raw[byte] ^= 16


LARGEST = torch.finfo(torch.float32).max
VALUES = [1.0, -1.0, 5.0, 3e38, LARGEST, -LARGEST, math.inf, -math.inf, math.nan]
LIMITS = [None, 5.0, -2.0, 1e300, -1e300, math.inf]


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_the_kernel_the_torch_operations_and_the_host_veto_the_same_steps(found_inf):
    fused, packer = FusedPacker(), MeasurementPacker()
    draw = torch.Generator().manual_seed(0)
    cases = list(itertools.product(VALUES, VALUES, LIMITS, LIMITS))
    cases += torch.exp(3 * torch.randn(500, 4, generator=draw)).tolist()
    for loss, norm, loss_limit, norm_limit in cases:
        tensors = [None if v is None else torch.tensor(v, device="cuda") for v in (loss, norm, found_inf)]
        scale = None if found_inf is None else torch.tensor(64.0, device="cuda")
        measured = DeviceMeasurements(tensors[0], tensors[1], (loss_limit, norm_limit), tensors[2], scale)
        by_kernel, by_torch = fused.pack(measured), packer.pack(measured)
        assert by_kernel is not None
        case, veto = (loss, norm, loss_limit, norm_limit), float(by_kernel.veto)
        assert veto == float(packer.veto(measured, by_torch)), case
        read = by_kernel.read()
        assert veto == (1.0 if read.flags else 0.0), case
        assert str(read) == str(by_torch.read()), case


def test_the_clip_factor_of_the_kernel_is_bit_for_bit_that_of_torch():
    fused, draw = FusedPacker(), torch.Generator().manual_seed(0)
    norms = [*torch.exp(4 * torch.randn(2000, generator=draw)).tolist(), 0.0, 1e-42, math.inf, math.nan]
    limits = torch.exp(2 * torch.randn(len(norms), generator=draw)).tolist()
    for norm, max_norm in zip(norms, limits, strict=True):
        measured = torch.tensor(norm, device="cuda")
        packed = fused.pack(DeviceMeasurements(torch.ones((), device="cuda"), measured, (None, None)), max_norm)
        assert packed is not None
        packed.read()
        assert str(float(packed.clip_factor)) == str(float(clip_factor(max_norm, measured))), (norm, max_norm)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_without_triton_it_is_the_same_run(optimizer, tmp_path, monkeypatch):
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for number in range(2):
            if number:
                for kernel in (bits.KERNEL, fused_measurements.KERNEL):
                    monkeypatch.setattr(kernel, "_kernel", None)
            run = Guarded(tmp_path / str(number), {"checkpoint": {"enabled": False}}, optimizer=optimizer)
            run.steps(120)
            run.close()
            runs.append(run)
        assert all(torch.equal(a, b) for a, b in zip(bits_of(runs[0]), bits_of(runs[1]), strict=True))
        rows = [(tmp_path / str(n) / "metrics.jsonl").read_text().splitlines() for n in range(2)]
        for ours, theirs in zip(*(map(json.loads, lines) for lines in rows), strict=True):
            assert ours["loss"] == theirs["loss"] and ours["grad_norm"] == theirs["grad_norm"]
            assert ours.get("update_rms") == pytest.approx(theirs.get("update_rms"), rel=1e-3)
    finally:
        torch.use_deterministic_algorithms(False)
