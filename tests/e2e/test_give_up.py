"""A process that fails at the same step as the ones before it, with the same error, ends with status 70."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.cli.ack import ack
from holdfast.core.record.journal import read


def train(run_dir: Path, error: BaseException | None, step: int = 4, **recover: int) -> None:
    """Train eight steps. The forward pass of one step raises."""
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2)
    config = {"recover": recover, "checkpoint": {"at_end": False}}
    with holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=run_dir, config=config) as guard:
        for each in guard.steps(loader, epochs=1):
            with each:
                for (x,) in each.microbatches():
                    if error is not None and each.number == step:
                        raise error
                    each.backward(model(x).mean())


def test_third_process_with_the_same_failure_gives_up_and_the_next_needs_an_ack(tmp_path, caplog):
    for n in range(2):
        with pytest.raises(ValueError, match="bad"):
            train(tmp_path, ValueError(f"row {n} is bad"))
    with pytest.raises(holdfast.PolicyStop, match="step 4 failed in the same way in 3 processes in a row") as third:
        train(tmp_path, ValueError("row 2 is bad"))
    assert third.value.code == 70 and isinstance(third.value.__cause__, ValueError)
    assert "raise error" in caplog.text  # the traceback, which a SystemExit does not show
    with pytest.raises(holdfast.PolicyStop, match="holdfast ack"):
        train(tmp_path, None)
    ack(str(tmp_path))
    train(tmp_path, None)
    events = read(tmp_path / "journal.jsonl").events
    assert [e["step"] for e in events if e["event"] == "failure"] == [4, 4, 4]
    assert [e["reset"]["latched"][:6] for e in events if e["event"] == "ack"] == ["step 4"]
    assert events[-1]["policy"]["failure"] is None


def test_other_failures_orders_to_end_and_a_limit_of_zero_never_give_up(tmp_path):
    for error in (ValueError("a"), KeyError("a"), ValueError("b"), KeyboardInterrupt(), SystemExit(3), ValueError("a")):
        with pytest.raises(type(error)):
            train(tmp_path / "others", error)
    for _ in range(4):
        with pytest.raises(ValueError, match="a"):
            train(tmp_path / "zero", ValueError("a"), max_failure_repeats=0)


def test_failure_at_a_later_step_counts_anew(tmp_path):
    for step in (3, 3, 5, 5):
        with pytest.raises(ValueError, match="a"):
            train(tmp_path, ValueError("a"), step)


@pytest.mark.slow
def test_script_ends_with_status_70_and_shows_the_traceback(tmp_path):
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_give_up import train
        train(Path(sys.argv[1]), ValueError("row is bad"))
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment) for _ in range(4)]
    assert [run.returncode for run in runs] == [1, 1, 70, 70]
    assert "ValueError: row is bad" in runs[2].stderr and "holdfast ack" in runs[2].stderr
    assert "holdfast ack" in runs[3].stderr
