"""MetricsTracker and print_profiler_summary work in a loop of one's own."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.resilience import MetricsTracker, print_profiler_summary


def test_steps_are_measured_written_and_continued(tmp_path, capsys):
    for first in (1, 21):
        tracker = MetricsTracker(tmp_path, gpu_peak_tflops=1e-6, flops_per_token=3.0, log_interval=5, total_steps=40)
        shown = []
        for step in range(first, first + 20):
            tracker.start_step()
            found = tracker.end_step(step, 2.0 / step, 1.0, 1e-3, tokens_in_step=1000, loss_scale=4.0)
            shown += [] if found is None else [found]
        tracker.close()
        assert len(shown) == (5 if first == 1 else 4)
        last = shown[-1]
        assert last.mfu > 0 and last.tokens_per_sec == 1000 / last.step_time_sec and last.smoothed_loss > last.loss
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41)) and rows[-1]["loss_scale"] == 4.0
    assert "restarted" in capsys.readouterr().err


def test_a_profile_is_printed_and_kept(tmp_path, capsys):
    x = torch.randn(200, 200)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(20):
            x = torch.relu(x @ x)
    print_profiler_summary(profiler, str(tmp_path / "traces"))
    text = capsys.readouterr().out
    assert "| Category | Time (s) | % |" in text and "MatMul/GEMM" in text
    assert (tmp_path / "traces" / "summary.md").read_text().strip() == text.strip()
    assert (tmp_path / "traces" / "trace.json.gz").is_file()
    print_profiler_summary(profiler)
    assert "MatMul/GEMM" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"sinks": ["consol"]}, {"sinks": "console"}, {"log_interval": 0}])
def test_wrong_settings_name_the_value_and_the_choices(tmp_path, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}=.*: give a"):
        MetricsTracker(tmp_path, **wrong)
    assert list(tmp_path.iterdir()) == []


def test_values_as_torch_returns_them_are_written_and_one_nan_does_not_stay(tmp_path):
    tracker, weight = MetricsTracker(tmp_path, sinks=(), log_interval=1), torch.nn.Parameter(torch.ones(4))
    for step, loss in enumerate((2.0, math.nan, 1.0), 1):
        (weight.sum() * loss).backward()
        norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
        found = tracker.end_step(step, weight.sum() * 0 + loss, norm, np.float32(0.5), np.int64(8))
    tracker.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["grad_norm"] == pytest.approx(4.0)
    assert found is not None and found.smoothed_loss == pytest.approx(1.9) and type(found.lr) is float
