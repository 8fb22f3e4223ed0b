"""The examples run as printed, and come through their faults."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest
import torch

from holdfast.core.record.journal import read


def play(name: str, run_dir: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [name, str(run_dir)])
    return runpy.run_module(f"holdfast.examples.{name}", run_name="__main__")


def causes(run_dir: Any) -> list[str]:
    return [event["cause"] for event in read(run_dir / "journal.jsonl").events if event["event"] == "cause"]


@pytest.mark.slow
def test_the_classic_loop_and_the_loop_with_its_own_lines_end_alike(tmp_path, monkeypatch, capsys):
    ends = []
    for name in ("classic", "wrap"):
        played = play(name, tmp_path / name, monkeypatch)
        assert causes(tmp_path / name) == ["data", "transient"]
        assert played["guard"].step == 383
        ends.append(played["model"].state_dict())
    assert "recovered: 383 steps committed, 1 skipped, 1 replayed, 1 rolled back" in capsys.readouterr().out
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_a_loop_without_a_loader_ends_as_if_nothing_had_happened_and_goes_on_in_another_process(
    tmp_path, monkeypatch, capsys
):
    played = play("no_loader", tmp_path / "run", monkeypatch)
    assert causes(tmp_path / "run") == ["transient"]
    again = play("no_loader", tmp_path / "run", monkeypatch)
    assert "recovered: 200 steps committed, 1 replayed" in capsys.readouterr().out
    assert again["guard"].step == 200
    for name, value in played["model"].state_dict().items():
        assert torch.equal(value, again["model"].state_dict()[name])
