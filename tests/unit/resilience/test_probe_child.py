"""Probes run in a child process: one that hangs, dies or raises is itself a finding, and the parent always ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.core.base.probe_result import Measured, ProbeResult, ProbeStatus, exit_status, worst
from holdfast.resilience.probes import child
from holdfast.resilience.probes.probe import ProbeSettings

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(HERE)


def run(*names: str) -> dict[str, ProbeResult]:
    answers = child.run_probes("odd_probes", ProbeSettings(), names)
    return {name: results[0] for name, results in answers if results is not None}


def test_a_probe_that_raises_or_prints_does_not_disturb_the_others():
    results = run("talk", "fail", "after")
    assert (results["talk"].status, results["talk"].text) == (ProbeStatus.OK, "fine")
    assert results["talk"].numbers == {"one": Measured(1.0, "s")}, "a number that is not finite is left out"
    assert (results["fail"].status, results["fail"].text) == (ProbeStatus.NOT_CHECKED, "ValueError: a bug")
    assert results["after"].status == ProbeStatus.OK


@pytest.mark.parametrize(
    ("name", "text"),
    [("die", "was killed by SIGSEGV"), ("leave", "ended its process with status 7")],
)
def test_a_probe_that_dies_has_failed_and_those_after_it_are_not_checked(name, text):
    results = run(name, "after")
    assert (results[name].status, results[name].text) == (ProbeStatus.FAILED, text)
    assert results["after"].status == ProbeStatus.NOT_CHECKED
    assert f"{name} {text}" in results["after"].text


@pytest.mark.parametrize("name", ["hang", "deaf"])
def test_a_probe_that_hangs_is_killed_and_has_failed(name, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    began = time.monotonic()
    results = run(name, "after")
    assert time.monotonic() - began < 60
    assert results[name].status == ProbeStatus.FAILED and "did not answer within 0.2 s" in results[name].text
    assert results["after"].status == ProbeStatus.NOT_CHECKED
    assert started[0].poll() is not None, "the child is gone"


def test_a_hang_on_one_gpu_points_at_it():
    settings = ProbeSettings(device=3)
    (result,) = [found[0] for _, found in child.run_probes("odd_probes", settings, ["leave"]) if found is not None]
    assert (result.status, result.device) == (ProbeStatus.FAILED, "gpu 3")


def test_a_child_that_does_not_start_is_not_called_healthy(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = run("after")["after"]
    assert result.status == ProbeStatus.NOT_CHECKED and "did not start" in result.text


def test_the_working_folder_provides_no_modules(tmp_path, monkeypatch):
    (tmp_path / "msgspec.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert run("after")["after"].status == ProbeStatus.OK


@pytest.mark.parametrize(
    ("statuses", "strict", "expected"),
    [
        ([], False, 0),
        (["ok", "note", "not checked"], True, 0),
        (["ok", "warning"], False, 0),
        (["ok", "warning"], True, 3),
        (["failed", "warning"], False, 4),
        (["failed", "warning"], True, 4),
    ],
)
def test_exit_status_follows_the_worst_result(statuses, strict, expected):
    results = [ProbeResult(name="a", status=ProbeStatus(status), text="") for status in statuses]
    assert exit_status(results, strict=strict) == expected
    assert worst(results) == max(statuses, key=list(ProbeStatus).index, default="ok")


def test_importing_the_probes_imports_neither_torch_nor_numpy():
    source = """
import sys
from holdfast.resilience.probes import disk, gpu_compute, gpu_state, host, ranks
from holdfast.resilience import doctor
assert not {"torch", "numpy", "pynvml"} & set(sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", source], timeout=60).returncode == 0
