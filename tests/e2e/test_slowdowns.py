"""Slowdowns that are built into a real loop are found with their onset, phase and cause; a signal and a schedule profile."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any

import pytest
import torch
from benchmarks.gpu import slowdown
from benchmarks.gpu.slowdown import CASES, Rows, judge, train
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from holdfast.runtime.profile.profiler import StepProfile

pytestmark = pytest.mark.finds_slowdowns
QUICK = ("loader", "copies", "disk")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES if name != "rank"]
)
def test_onset_phase_and_cause_are_named(tmp_path, fault):
    for attempt in ("first", "second"):  # other programs may slow the first down by as much as the fault
        folder = tmp_path / attempt
        found, onset = train(folder, fault)
        is_right, text = judge(fault, found, onset)
        if is_right:
            break
    assert is_right, (text, found)
    evidence = next(each["evidence"] for each in found if abs(each["onset"] - onset) <= 8)
    if fault in ("copies", "loop"):
        assert evidence["line"].startswith(f"{slowdown.__file__}:")
    profile = folder / evidence["profile"]
    assert (profile / "trace.json.gz").is_file() and "| Category |" in (profile / "summary.md").read_text()
    assert evidence["slowdown_cause"].replace("_", " ") in (profile / "comparison.md").read_text()


def test_a_signal_and_a_schedule_take_profiles_and_the_handler_returns(tmp_path):
    before = signal.getsignal(signal.SIGUSR2)

    def after_step(number: int) -> None:
        if number == 100:
            os.kill(os.getpid(), signal.SIGUSR2)

    train(tmp_path, "none", steps=150, after_step=after_step, profile_signal="SIGUSR2", profile_every=60)
    names = sorted(path.name.split("_")[0] for path in (tmp_path / "profiles").iterdir())
    assert "signal" in names and "step" in names
    assert signal.getsignal(signal.SIGUSR2) is before


def test_profiles_change_no_bit(tmp_path):
    def weights(**metrics: Any) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(256, 64), nn.Dropout(0.1), nn.Linear(64, 256))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = {"metrics": {"flush_seconds": 0.01, **metrics}, "hang": {"enabled": False}}
        with holdfast.Guard(model, optimizer, run_dir=tmp_path / str(len(metrics)), config=config) as guard:
            for step in guard.steps(DataLoader(Rows(256), batch_size=4, shuffle=True), max_steps=130):
                with step:
                    for batch in step.microbatches():
                        step.backward((model(batch) - 1).square().mean())
        kept.extend(p.detach().clone() for p in model.parameters())
        return kept

    profiled = weights(profile="on", profile_every=20, sinks=["prometheus"])
    assert (tmp_path / "3" / "profiles").is_dir() and (tmp_path / "3" / "metrics.prom").is_file()
    for one, other in zip(profiled, weights(profile="off"), strict=True):
        assert torch.equal(one, other)


def test_a_profile_that_cannot_be_written_leaves_nothing_switched_on(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    profile = StepProfile(tmp_path / "file", 1)
    assert profile.start()
    profile.step()
    profile.step()
    assert profile.read() is None
    assert profile.is_over and sys.getprofile() is None


def test_a_trace_that_cannot_be_read_gives_no_profile(tmp_path, monkeypatch, caplog):
    profile = StepProfile(tmp_path, 1)
    assert profile.start()
    profile.step()
    profile.step()
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: open(path, "w").close())
    assert profile.read() is None
    assert "no traceEvents found" in caplog.text


def test_no_profile_is_taken_while_the_program_has_a_profiler(tmp_path):
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1)) as own:
        for _ in range(4):
            assert not StepProfile(tmp_path, 1).start()
            torch.ones(3).sum()
            own.step()
    del own
    gc.collect()
    profile = StepProfile(tmp_path / "profile", 1)
    assert profile.start()
    profile.abort()


def test_a_fact_that_is_no_number_ends_nothing(tmp_path, caplog):
    model = nn.Linear(4, 1)
    config = {"metrics": {"flush_seconds": 0.01}, "hang": {"enabled": False}}
    with holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=tmp_path, config=config) as guard:
        guard.record(flops_per_token={"a": 1}, tokens_per_step=8)
        for step in guard.steps(DataLoader(torch.randn(64, 4), 8), max_steps=8):
            with step:
                for batch in step.microbatches():
                    step.backward(model(batch).square().mean())
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 8 and "tokens_per_second" in rows[-1] and "mfu" not in rows[-1]
