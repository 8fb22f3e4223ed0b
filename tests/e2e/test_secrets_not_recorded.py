"""A real script is started with keys on its command line and in its environment: no file of the run directory has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.base import masking

SCRIPT = """
import os, sys, torch, holdfast
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
guard = holdfast.Guard(
    model, torch.optim.SGD(model.parameters(), 0.01), run_dir=sys.argv[1],
    config={"checkpoint": {"every_steps": 2, "load_path": ""}, "metrics": {"flush_seconds": 0.1}},
)
key = sys.argv[2].partition("=")[2]
with guard:
    holdfast.record(guard, hub_token=os.environ["HUB_TOKEN"], note=f"pushed with {key}")
    for step in guard.steps(DataLoader(TensorDataset(torch.ones(64, 4)), 4), max_steps=6):
        with step:
            for (x,) in step.microbatches():
                step.backward(model(x).mean())
        if step.number == 3:
            guard.checkpoint(f"before the upload with {key}")
        if step.number == 5 and sys.argv[-1] == "fail":
            raise RuntimeError(f"401 for {key}, {os.environ['HUB_TOKEN']} at {sys.argv[5]}")
"""
KEY, TOKEN, PASSWORD, HEX = "Zk3-wandb-9f!", "hub.Value.77", "pa55word-x", "0123456789abcdef0123456789abcdef01234567"
OPTIONS = [f"--wandb-key={KEY}", "--hf-token", "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7", f"https://me:{PASSWORD}@host/repo"]


def start(tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(tmp_path / "run"), *OPTIONS, HEX, "--lr=0.01", *more]
    environment = {**os.environ, "HUB_TOKEN": TOKEN}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)


def files_with(folder: Path, secret: str) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


@pytest.fixture
def nothing_found_before(monkeypatch):
    monkeypatch.setattr(masking, "_found", set())


def test_run_json_journal_and_manifests_of_a_run_in_this_process_have_no_secret(
    tmp_path, monkeypatch, nothing_found_before
):
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "run"), *OPTIONS])
    monkeypatch.setenv("HUB_TOKEN", TOKEN)
    exec(SCRIPT, {})
    assert len(list(tmp_path.glob("run/checkpoints/*/manifest.json"))) > 1
    assert [files_with(tmp_path / "run", secret) for secret in (KEY, OPTIONS[2], PASSWORD, TOKEN)] == [[]] * 4


@pytest.mark.slow
def test_no_file_of_a_run_directory_has_a_secret_of_the_command_line_or_the_environment(tmp_path):
    failed = start(tmp_path, "fail")
    assert "RuntimeError: 401" in failed.stderr, failed.stderr
    resumed = start(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    run = tmp_path / "run"
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert {"run_begin", "restart"} <= {event["event"] for event in events}
    assert len(list(run.glob("checkpoints/*/manifest.json"))) > 1
    for secret in (KEY, OPTIONS[2], PASSWORD, HEX, TOKEN):
        assert files_with(run, secret) == []
    about = json.loads((run / "run.json").read_text())
    assert about["argv"][2:] == [
        "--wandb-key=***",
        "--hf-token",
        "***",
        "https://***@host/repo",
        "***",
        "--lr=0.01",
        "fail",
    ]
    assert about["masked"] == ["--wandb-key", "--hf-token", "argv[5]", "argv[6]"]
    assert about["facts"]["hub_token"] == "***" and about["facts"]["note"] == "pushed with ***"
