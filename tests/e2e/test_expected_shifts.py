"""Expected shifts in real runs: recognised where the loop makes them, and none where it only looks so."""

from __future__ import annotations

import json

import pytest
import torch
from cases import Case
from test_exact import Heals
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from marks import slow
from users_detector import QuietDetector


def events(path, *kinds: str) -> list[dict]:
    lines = (path / "journal.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] in kinds]


class Small:
    """A model that learns little: its loss has a level."""

    def __init__(self, path, **more) -> None:
        torch.manual_seed(0)
        self.path = path
        self.x = torch.randn(2000, 4)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.guard = holdfast.Guard(self.model, self.optimizer, run_dir=path, **more)

    def loader(self, batch_size: int = 8, samples: int = 2000) -> DataLoader:
        return DataLoader(TensorDataset(self.x[:samples]), batch_size=batch_size)

    def train(self, loader, **how) -> None:
        for step in self.guard.steps(loader, **how):
            with step:
                for (x,) in step.microbatches():
                    step.backward((self.model(x) - 1.0).square().mean())

    def shifts(self) -> list[tuple[int, str]]:
        return [(e["step"], e["reason"]) for e in events(self.path, "shift")]


def test_more_accumulation_is_recognised(tmp_path):
    run = Small(tmp_path / "run")
    loader = run.loader()
    with run.guard:
        run.train(loader, max_steps=60)
        run.train(loader, max_steps=120, accumulate=4)
    assert run.shifts() == [(62, "the batch size went from 8 to 32 samples")]


def test_another_loader_is_a_shift_before_its_batch_size_is_seen_to_be_another(tmp_path, caplog):
    run = Small(tmp_path / "run")
    with run.guard:
        run.train(run.loader(), max_steps=60)
        run.train(run.loader(16), max_steps=64)
    assert run.shifts()[0] == (60, "another loader")
    assert len(run.shifts()) == 2
    assert caplog.text.count("make the loader once") == 1


def test_short_last_batch_of_every_epoch_is_no_shift(tmp_path):
    run = Small(tmp_path / "run")
    with run.guard:
        run.train(run.loader(samples=8 * 60 + 3), epochs=4)
    assert run.guard.step == 244
    assert run.shifts() == []


class Sequences(torch.utils.data.Dataset):
    """Batches of sequences, as long as `length(n)` says."""

    def __init__(self, length) -> None:
        self._length = length

    def __len__(self) -> int:
        return 200

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.arange(4 * self._length(n)).reshape(4, -1) % 10 + n


@pytest.mark.parametrize(
    ("length", "shifts"),
    [
        (lambda n: 16, []),
        (lambda n: 16 if n < 100 else 32, [(102, "the sequence length went from 16 to 32")]),
        (lambda n: 8 + n * 7 % 23, []),
    ],
)
def test_sequence_length(length, shifts, tmp_path):
    run = Small(tmp_path / "run")
    with run.guard:
        loader = DataLoader(Sequences(length), batch_size=None)
        for step in run.guard.steps(loader, epochs=1):
            with step:
                for tokens in step.microbatches():
                    step.backward((run.model(tokens[:, :4].float() * 0.001) - 1.0).square().mean())
    assert run.shifts() == shifts
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["length"] for row in rows] == [length(n) for n in range(200)]


# ---- going on


def windows(guard) -> str:
    return json.dumps(guard._run.context.engine.state_dict())


def test_resumed_the_windows_go_on_and_nothing_is_shifted(tmp_path):
    whole = Small(tmp_path / "whole")
    with whole.guard:
        whole.train(whole.loader(), max_steps=140)
    first = Small(tmp_path / "parts")
    with first.guard:
        first.train(first.loader(), max_steps=70)
    second = Small(tmp_path / "parts")
    with second.guard:
        second.train(second.loader(), max_steps=140)
    assert windows(second.guard) == windows(whole.guard)
    assert second.shifts() == []
    assert events(second.path, "finding") == events(whole.path, "finding") == []


def test_resumed_with_a_detector_the_checkpoint_does_not_know_only_that_one_begins_anew(tmp_path):
    first = Small(tmp_path / "parts", config={"detect": {"divergence": False}})
    with first.guard:
        first.train(first.loader(), max_steps=70)
    second = Small(tmp_path / "parts")
    with second.guard:
        second.train(second.loader(), max_steps=140)
    found = events(second.path, "shift")
    assert [(e["step"], e["detectors"]) for e in found] == [(70, ["divergence"])]
    assert events(second.path, "finding") == []


def test_restarted_without_a_checkpoint_detectors_begin_anew_and_find_nothing(tmp_path):
    for level in (1.0, 30.0):
        run = Small(tmp_path / "run", config={"checkpoint": {"enabled": False}})
        run.x = run.x + level
        with run.guard:
            run.train(run.loader(), max_steps=100)
    assert events(run.path, "finding", "incident_opened") == []


# ---- after a recovery


@pytest.mark.parametrize(
    ("factor", "ramp"),
    [
        (0.01, 1),
        *slow((0.1, 10), (0.5, 1), (0.5, 3), (0.5, 100), (0.01, 100), (0.01, 40)),
    ],
)
def test_the_ramp_back_to_the_schedule_raises_nothing(factor, ramp, tmp_path):
    case = Case(scheduler="none", shuffle="none", count=8 * 400, epochs=1, dropout=0.0)
    heals = Heals(returns=2)
    case.faults = {8 * batch: heals for batch in range(150, 154)}
    recover = {"max_consecutive": 2, "lr_factor": factor, "lr_ramp_steps": ramp, "skip_batches": 2}
    case.config = {"recover": recover, "quarantine": {"nonfinite_samples": False}}
    run = case.guarded(tmp_path / "run", hooks=[heals])
    assert {"rollback", "cut_lr"} <= set(run.actions())
    journal = run.journal()
    cut = next(n for n, e in enumerate(journal) if e.get("action") == "cut_lr")
    assert [e for e in journal[cut:] if e["event"] in ("finding", "incident_opened")] == []
    assert run.guard.summary().incidents[0].state == "closed"


# ---- what is only noted


@pytest.mark.parametrize("mode", ["heal", "observe"])
def test_a_note_leaves_the_step_healthy_and_the_run_clean(mode, tmp_path, caplog):
    class Talkative(QuietDetector):
        """Notes something at every step."""

        name = "talkative"

        def observe(self, signal):
            return holdfast.Finding(
                kind="lr_jump",
                severity=holdfast.Severity.NOTE,
                step=signal.step,
                onset=signal.step,
                detector=self.name,
                message="",
                new=signal.step == 30,
            )

    config = {"recover": {"mode": mode}, "snapshot": {"every_steps": 5, "certify_after": 10}}
    run = Small(tmp_path / "run", config=config, detectors=[Talkative()])
    with run.guard:
        run.train(run.loader(), max_steps=60)
        ring = run.guard._run.parts.snapshots.ring
        assert {s.step: s.health.name for s in ring}[40] == "GOOD"
        assert run.guard._run.context.engine.policy.state.clock == 60
    assert run.guard.summary().status == "clean"
    assert len(events(run.path, "finding")) == 60
    assert events(run.path, "incident_opened", "action", "outcome") == []
    assert [r.levelname for r in caplog.records if "lr_jump" in r.message] == ["WARNING"]
