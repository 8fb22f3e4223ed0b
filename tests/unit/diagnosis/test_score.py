"""The score against labels: what counts as met, what as quiet, what as a trap; and the real logs, where they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.diagnosis.score import (
    MIN_SHARES,
    ScoredLog,
    confident_events,
    diagnose_corpus,
    folder,
    is_met,
    score,
)
from synthetic import healthy_loss

from holdfast.diagnosis.diagnose import DiagnosisReport, IncidentVerdict

FORMATS = {
    "csv_measurements", "deepspeed_text", "edge_cases", "fairseq_text", "hf_console", "hf_trainer_state", "lightning_csv",
    "llamafactory_trainer_log", "megatron_text", "tensorboard", "text_mlperf", "text_nanogpt", "text_other", "wandb_csv",
}  # fmt: skip
"""the formats of the corpus that have an importer: the bars are for these"""


def verdict(kind, start, end):
    return IncidentVerdict(
        kind=kind, cause="", step_start=start, step_end=end, confidence=0.9, evidence=[], against=[], action="", leaf="",
        status="", confirm="", unchecked=[], trail=[], rivals=[], findings=[], detected=0.9, row_start=0, row_end=0,
    )  # fmt: skip


def event(kind="spike", start=500, end=510, confidence=0.9):
    return {"kind": kind, "start_step": start, "end_step": end, "confidence": confidence}


def case(*verdicts, label="anomaly", expected=(), file="a", group=None, trap=None, interval=1.0, length=1000.0):
    report = DiagnosisReport(
        path=file, format="made", points=1000, limits=[], verdicts=list(verdicts), notes=[], summary=""
    )
    about = {"label": label, "events": list(expected), "trap": trap}
    return ScoredLog(file, about, group or file, report, interval, length)


@pytest.mark.parametrize(
    ("said", "ok"),
    [
        (("spike", 500, 510), True),
        (("spike_recovered", 505, 600), True),
        (("spike", 400, 500), True),
        (("spike", 525, 540), False),
        (("spike", 518, 540), True),
        (("spike", 480, 490), True),
        (("spike", 479, 490), False),
        (("divergence", 500, 510), False),
        (("nan", 500, 510), False),
    ],
)
def test_an_event_is_met_by_overlap_or_by_a_start_within_two_percent(said, ok):
    assert is_met(case(verdict(*said)), event()) is ok


def test_three_log_intervals_count_where_they_are_more_than_two_percent():
    assert is_met(case(verdict("spike", 560, 570), interval=20.0), event())
    assert not is_met(case(verdict("spike", 561, 570), interval=20.0), event())


def test_kinds_that_say_the_same_count_as_the_same():
    assert is_met(case(verdict("silent_divergence", 500, 510)), event("divergence"))
    assert is_met(case(verdict("grad_nonfinite", 500, 510)), event("grad_explosion"))
    assert not is_met(case(verdict("spike", 500, 510)), event("divergence"))


def test_unsure_events_and_unknown_kinds_are_left_out():
    made = case(expected=[event(confidence=0.5), event("restart"), event("nan")])
    assert [one["kind"] for one in confident_events(made)] == ["nan"]


def test_the_share_of_events_met_and_those_missed():
    result = score(
        [
            case(verdict("spike", 500, 510), expected=[event(), event("nan", 800, 999)], file="a"),
            case(verdict("nan", 20, 30), expected=[event("nan", 20, 30)], file="b"),
        ]
    )
    assert (result["met"], result["events"], result["share"]) == (2, 3, pytest.approx(2 / 3))
    assert result["by_kind"] == {"nan": [1, 2], "spike": [1, 1]}
    assert [(miss["file"], miss["kind"]) for miss in result["missed"]] == [("a", "nan")]


def test_quiet_runs_count_once_however_many_files_they_left():
    result = score(
        [
            case(label="healthy", file="a", group="run"),
            case(verdict("spike", 1, 2), label="healthy", file="b", group="run"),
            case(label="noisy", file="c"),
            case(verdict("nan", 20, 30), label="noisy", expected=[event("nan", 20, 30)], file="d"),
        ]
    )
    assert (result["quiet"], result["quiet_without_incident"], result["quiet_share"]) == (2, 1, 0.5)
    assert result["loud"] == {"run": ["spike 1-2"]}


def test_a_trap_is_avoided_by_no_incident():
    result = score(
        [
            case(label="healthy", file="a", trap="restart"),
            case(verdict("spike", 1, 2), label="healthy", file="b", trap="restart"),
            case(verdict("nan", 20, 30), expected=[event("nan", 20, 30)], file="c", trap="means"),
        ]
    )
    assert {file: trap["avoided"] for file, trap in result["traps"].items()} == {"a": True, "b": False, "c": True}


def test_nothing_at_all_is_no_success():
    result = score([])
    assert (result["share"], result["quiet_share"]) == (0.0, 0.0)


def test_labels_under_the_line_and_refused_files_are_left_out(tmp_path):
    rows = "\n".join(f"{i},{v:.4f}" for i, v in enumerate(healthy_loss(100)))
    (tmp_path / "a.csv").write_text(f"step,loss\n{rows}\n")
    (tmp_path / "empty.csv").touch()
    files = [("a.csv", 0.9), ("a.csv", 0.5), ("empty.csv", 0.9)]
    labels = [
        {"file": name, "label": "healthy", "label_confidence": sure, "events": [], "trap": None} for name, sure in files
    ]
    (tmp_path / "LABELS.jsonl").write_text("\n".join(map(json.dumps, labels)))
    (tmp_path / "INDEX.jsonl").write_text("\n".join(json.dumps({"file": name, "run_group": "g"}) for name, _ in files))
    (made,) = diagnose_corpus(tmp_path)
    assert (made.file, made.group, made.length, made.interval) == ("a.csv", "g", 99.0, 1.0)
    assert made.report.verdicts == []


def test_a_corpus_that_is_not_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CORPUS", str(tmp_path))
    assert folder() is None


@pytest.mark.slow
@pytest.mark.skipif(folder() is None, reason="the corpus of real logs is not here; set HOLDFAST_CORPUS to its folder")
def test_real_logs_are_diagnosed_as_they_are_labelled():
    corpus = folder()
    assert corpus is not None
    formats = {e["file"]: e["format"] for e in map(json.loads, (corpus / "INDEX.jsonl").read_text().splitlines())}
    supported = [log for log in diagnose_corpus(corpus) if formats[log.file] in FORMATS]
    result = score(supported)
    assert result["events"] >= 50 and result["quiet"] >= 30
    assert result["share"] >= MIN_SHARES["events"] >= 0.85, result["missed"]
    assert result["quiet_share"] >= MIN_SHARES["quiet"] >= 0.95, result["loud"]
    assert all(trap["avoided"] for trap in result["traps"].values()), result["traps"]
