"""GPU probes without a GPU: NVML and CUDA are thin fakes, and the code that judges is the real one."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.resilience import check_gpu_health
from holdfast.resilience.probes import gpu_compute, gpu_state
from holdfast.resilience.probes.probe import ProbeSettings

HEALTHY: dict[str, Any] = {
    "UUID": "GPU-1", "TotalEccErrors": (0, 0), "RemappedRows": (0, 0, 0, 0), "CurrentClocksEventReasons": 1,
    "Temperature": 40, "TemperatureThreshold": 90, "PowerUsage": 80_000, "EnforcedPowerLimit": 700_000,
    "CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16, "CurrPcieLinkGeneration": 1, "MaxPcieLinkGeneration": 5,
}  # fmt: skip


class FakeNVMLError(Exception):
    pass


def fake_nvml(**changed: Any) -> SimpleNamespace:
    """A driver with one GPU. A value of None: not supported, which NVML reports as an error."""
    state = {**HEALTHY, **changed}

    def getter(name: str):
        def get(handle, *arguments):
            value = state[name]
            if value is None:
                raise FakeNVMLError("Not Supported")
            return value[arguments[1]] if name == "TotalEccErrors" else value

        return get

    def handle(index: int):
        if state.get("lost"):
            raise FakeNVMLError("GPU is lost")
        return index

    return SimpleNamespace(
        NVMLError=FakeNVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: state.get("count", 1),
        nvmlDeviceGetHandleByIndex=handle,
        **{f"nvmlDeviceGet{name}": getter(name) for name in HEALTHY},
    )


def state_of(monkeypatch, **changed: Any) -> list[ProbeResult]:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**changed))
    results = gpu_state.check_state(ProbeSettings())
    return results if isinstance(results, list) else [results]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ["ok", "ok", "ok"]),
        ({"TotalEccErrors": (1, 1)}, ["failed", "ok", "ok"]),
        ({"TotalEccErrors": (0, 7)}, ["note", "ok", "ok"]),
        ({"RemappedRows": (0, 1, 1, 0)}, ["warning", "ok", "ok"]),
        ({"RemappedRows": (0, 1, 0, 1)}, ["failed", "ok", "ok"]),
        ({"TotalEccErrors": None, "RemappedRows": None}, ["not checked", "ok", "ok"]),
        ({"CurrentClocksEventReasons": 0x40 | 0x8}, ["ok", "warning", "ok"]),
        ({"CurrentClocksEventReasons": 0x20}, ["ok", "warning", "ok"]),
        ({"CurrentClocksEventReasons": 0x4}, ["ok", "note", "ok"]),
        ({"CurrentClocksEventReasons": None}, ["ok", "not checked", "ok"]),
        ({"Temperature": 93}, ["ok", "warning", "ok"]),
        ({"Temperature": 88, "TemperatureThreshold": None}, ["ok", "warning", "ok"]),
        ({"CurrPcieLinkWidth": 8}, ["ok", "ok", "warning"]),
        ({"CurrPcieLinkWidth": None}, ["ok", "ok", "not checked"]),
        ({"lost": True}, ["failed"]),
        ({"count": 0}, ["not checked"]),
        ({"count": 2}, ["ok"] * 6),
    ],
)
def test_the_state_of_a_gpu_is_judged(monkeypatch, changed, expected):
    results = state_of(monkeypatch, **changed)
    assert [str(result.status) for result in results] == expected
    assert all(result.device for result in results if result.status == ProbeStatus.FAILED)
    assert all(result.cure for result in results if result.status in (ProbeStatus.FAILED, ProbeStatus.WARNING))


def test_an_old_driver_that_has_only_throttle_reasons_is_read(monkeypatch):
    nvml = fake_nvml()
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x80
    del nvml.nvmlDeviceGetCurrentClocksEventReasons
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert "power brake" in gpu_state.check_state(ProbeSettings())[1].text


def test_without_the_package_or_the_driver_nothing_is_called_healthy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = gpu_state.check_state(ProbeSettings())
    assert (missing.status, "pip install nvidia-ml-py" in missing.cure) == (ProbeStatus.NOT_CHECKED, True)

    def refuse():
        raise FakeNVMLError("Driver Not Loaded")

    nvml = fake_nvml()
    nvml.nvmlInit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_state.check_state(ProbeSettings()).status == ProbeStatus.NOT_CHECKED


LOG = """[    1.000000] Linux version 6
[  {at}] NVRM: Xid (PCI:0000:19:00): {number}, pid='<unknown>', name=<unknown>, message
[  {at}] usb 1-1: Xid is not the driver's here
"""


@pytest.mark.parametrize(
    ("number", "hours_ago", "status"),
    [(79, 1, "warning"), (48, 1, "warning"), (63, 1, "warning"), (31, 1, "note"), (79, 40, "note"), (13, 40, "note")],
)
def test_driver_messages_are_judged_by_number_and_age(number, hours_ago, status):
    now = 200_000.0
    xids = gpu_state.find_xids(LOG.format(at=f"{now - 3600 * hours_ago:.6f}", number=number), now)
    result = gpu_state.judge_xids(xids)
    assert [(x.number, x.pci) for x in xids] == [(number, "0000:19:00")]
    assert str(result.status) == status and f"Xid {number} on 0000:19:00" in result.text


def test_a_log_without_messages_is_healthy():
    assert gpu_state.judge_xids(gpu_state.find_xids("[ 1.0] hello\n" * 3, 9.0)).status == ProbeStatus.OK


# Computing: the fake device is the CPU


class OnCpu(TorchFunctionMode):
    """Runs what is meant for a GPU on the CPU. `spoil` changes the result of each operation: a sick device."""

    def __init__(self, spoil=lambda function, result: result) -> None:
        super().__init__()
        self.spoil = spoil

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(value, str) and value == "cuda" else value for value in args)
        return self.spoil(getattr(function, "__name__", ""), function(*args, **kwargs))


@pytest.fixture
def cuda(monkeypatch):
    """A GPU named H200 that computes on the CPU."""
    monkeypatch.setattr(gpu_compute, "DEVICE_FILES", ("/",))
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "device": lambda index: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda index: (80e9, 141e9),
        "get_device_name": lambda index: "NVIDIA H200",
        "get_device_properties": lambda index: SimpleNamespace(uuid="aaaa-bbbb"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


LEAST = ProbeSettings(effort="least", device=0)


def compute(spoil=lambda function, result: result) -> dict[str, ProbeResult]:
    with OnCpu(spoil):
        return {probe.name: probe.run(LEAST)[0] for probe in gpu_compute.PROBES}


def test_a_healthy_gpu_passes_with_figures_beside_the_data_sheet(cuda):
    results = compute()
    assert {str(result.status) for result in results.values()} == {"ok"}, results
    assert results["gpu compute"].name == "gpu 0 compute" and results["gpu compute"].device == "GPU-aaaa-bbbb"
    assert results["gpu compute"].numbers["data_sheet"].value == 989
    assert results["gpu memory"].numbers["data_sheet"].value == 4800
    assert "of the data sheet" in results["gpu memory"].text


def spoil_one_bit(named: str):
    def spoil(function, result):
        if named in function and isinstance(result, torch.Tensor) and result.numel() > 100:
            result.view(-1)[7] = 3
        return result

    return spoil


@pytest.mark.parametrize(
    ("operation", "probe"),
    [("matmul", "gpu compute"), ("fill_", "gpu memory"), ("copy_", "gpu memory"), ("copy_", "gpu transfer")],
)
def test_a_gpu_that_computes_or_stores_wrongly_has_failed(cuda, operation, probe):
    result = compute(spoil_one_bit(operation))[probe]
    assert (result.status, result.device) == (ProbeStatus.FAILED, "GPU-aaaa-bbbb"), result
    assert result.cure


def test_a_gpu_that_gives_other_bits_the_second_time_has_failed(cuda):
    calls = []

    def flicker(function, result):
        if function == "matmul" and result.dtype == torch.bfloat16:
            calls.append(1)
            if len(calls) == 3:
                result.view(-1)[5] += 1.0
        return result

    assert "different bits" in compute(flicker)["gpu compute"].text


def test_a_gpu_that_raises_has_failed_and_one_in_use_is_not_checked(cuda):
    def refuse(function, result):
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    result = compute(refuse)["gpu access"]
    assert (result.status, result.text) == (ProbeStatus.FAILED, "CUDA error: an illegal memory access")

    def full(function, result):
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert compute(full)["gpu memory"].status == ProbeStatus.NOT_CHECKED


def test_the_short_check_of_a_process_that_uses_cuda_runs_in_it(cuda):
    with OnCpu():
        assert check_gpu_health() == {
            "cuda_available": True, "device_accessible": True, "compute_ok": True, "memory_ok": True, "error": "",
        }  # fmt: skip
    with OnCpu(spoil_one_bit("matmul")):
        sick = check_gpu_health()
    assert (sick["device_accessible"], sick["compute_ok"], sick["memory_ok"]) == (True, False, True)
    assert "wrong values" in sick["error"]


def test_a_driver_without_a_gpu_is_a_warning_and_nothing_is_called_healthy(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = [probe.run(LEAST).status for probe in gpu_compute.PROBES]
    assert found == [ProbeStatus.WARNING, *[ProbeStatus.NOT_CHECKED] * 3]


def test_without_a_device_file_torch_is_not_even_imported(monkeypatch):
    monkeypatch.setattr(gpu_compute, "DEVICE_FILES", ("/none",))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_compute.PROBES[0].run(ProbeSettings()).status == ProbeStatus.NOT_CHECKED


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", None)],
)
def test_data_sheets_are_found_by_name(name, tflops):
    sheet = gpu_compute.find_data_sheet(name)
    assert (sheet and sheet.tflops) == tflops


@pytest.mark.parametrize(
    ("effort", "share", "status"), [("full", 0.5, "warning"), ("full", 0.8, "ok"), ("quick", 0.5, "ok")]
)
def test_a_slow_device_is_a_warning_only_after_enough_work(effort, share, status):
    result = gpu_compute._beside("", "text", 4800 * share, "GB/s", 4800, ProbeSettings(effort=effort))
    assert str(result.status) == status
