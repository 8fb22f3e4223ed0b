"""Probes of cores, memory, shared memory and limits, on this machine, and with faults where they would arise."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from holdfast.core.base.probe_result import ProbeStatus
from holdfast.resilience.probes import host
from holdfast.resilience.probes.child import run_probe
from holdfast.resilience.probes.probe import ProbeSettings

QUICK = ProbeSettings(effort="quick")


@pytest.mark.parametrize("size", [16, 48, 96])
def test_the_known_product_is_the_product(size):
    left, right, product = host.known_product(size)
    assert np.array_equal(left @ right, product)
    assert np.abs(product).max() <= 256, "whole numbers up to 256 are exact in bf16"
    sums = np.abs(np.cumsum(left[0] * right[:, 0]))
    assert sums.max() <= 9 * 30


def test_healthy_cores_and_memory_pass_and_report_figures():
    affinity = os.sched_getaffinity(0)
    cores, memory = host.check_cores(QUICK), host.check_memory(QUICK)
    assert (cores.status, memory.status) == (ProbeStatus.OK, ProbeStatus.OK)
    assert cores.numbers["one_core"].value > 0 and memory.numbers["copy"].unit == "GB/s"
    assert os.sched_getaffinity(0) == affinity


class SickMatrix(np.ndarray):
    """A matrix whose products have one wrong bit on the last core."""

    def __matmul__(self, other):
        product = np.asarray(self) @ np.asarray(other)
        if os.sched_getaffinity(0) == {max(os.sched_getaffinity(os.getppid()))} and len(product) > 1:
            product[1, 1] += 1
        return product


def test_a_core_that_computes_wrongly_is_named(monkeypatch):
    known = host.known_product
    monkeypatch.setattr(host, "known_product", lambda size: tuple(m.view(SickMatrix) for m in known(size)))
    result = host.check_cores(QUICK)
    assert (result.status, result.device) == (ProbeStatus.FAILED, "cpu")
    assert f"wrong products on cores [{max(os.sched_getaffinity(0))}]" in result.text


def test_memory_that_stores_wrongly_is_found(monkeypatch):
    class SickMemory(np.ndarray):
        def fill(self, value):
            np.asarray(self).fill(value)
            self[12345] ^= np.uint64(1 << 20)

    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda *a, **k: empty(*a, **k).view(SickMemory))
    result = host.check_memory(QUICK)
    assert (result.status, result.device) == (ProbeStatus.FAILED, "cpu")


@pytest.mark.parametrize(
    ("lowered", "expected", "status"),
    [
        ({"NOFILE": 256}, "256 open files", "warning"),
        ({"NPROC": 100}, "100 processes", "warning"),
        ({"FSIZE": 1 << 30}, "files may have 1.07 GB", "warning"),
        ({"AS": 1 << 40}, "1.1e+03 GB of address space", "warning"),
        ({"CPU": 1000}, "1000 s of processor time", "warning"),
        ({"MEMLOCK": 65536}, "0.0655 MB of locked memory", None),
    ],
)
def test_a_low_limit_is_reported_with_its_cure(lowered, expected, status):
    source = "import json, msgspec\nfrom holdfast.resilience.probes import host, probe\n"
    source += "print(json.dumps(msgspec.to_builtins(host.check_limits(probe.ProbeSettings()))))"

    def lower():
        for name, value in lowered.items():
            which = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(which, (value, resource.getrlimit(which)[1]))

    done = subprocess.run(
        [sys.executable, "-c", source], preexec_fn=lower, capture_output=True, text=True, timeout=60, check=True
    )
    assert expected in done.stdout and "ulimit -" in done.stdout
    if status is not None:
        assert f'"status": "{status}"' in done.stdout


def test_shared_memory_that_is_small_missing_or_read_only_is_reported(tmp_path):
    def check(place):
        return run_probe(host.PROBES[3], ProbeSettings(shared_memory=str(place)))[0]

    missing = check(tmp_path / "none")
    assert (missing.status, "No such file" in missing.text) == (ProbeStatus.FAILED, True)
    assert check("/proc").status == ProbeStatus.FAILED  # no room at all, and no folder to write to, even for root
    assert check("/dev/shm").numbers["free"].unit == "GB"


def test_an_unlimited_number_of_open_files_is_no_number_that_json_cannot_hold(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    json.dumps(msgspec.to_builtins(host.check_limits(QUICK)), allow_nan=False)


def test_memory_in_use_and_swap_are_warnings(monkeypatch):
    def use(**fields):
        monkeypatch.setattr(
            host, "_meminfo", lambda: {"MemTotal": 100, "MemAvailable": 50, "SwapTotal": 0, "SwapFree": 0, **fields}
        )
        monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
        return host.check_use(QUICK).status

    assert use() == ProbeStatus.OK
    assert use(MemAvailable=5) == ProbeStatus.WARNING
    assert use(SwapTotal=50, SwapFree=30) == ProbeStatus.WARNING
    assert use(SwapTotal=50, SwapFree=49) == ProbeStatus.NOTE


def test_too_little_memory_to_test_is_not_called_healthy(monkeypatch):
    monkeypatch.setattr(host, "_meminfo", lambda: {"MemAvailable": 1 << 20})
    assert host.check_memory(QUICK).status == ProbeStatus.NOT_CHECKED
