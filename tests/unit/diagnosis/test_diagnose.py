"""From a table to a report: several incidents, notes, and nothing for a healthy run."""

from __future__ import annotations

import numpy as np
import pytest
from leaf_cases import CASES, FP32, jump
from synthetic import N, cosine, episode, healthy_loss, healthy_norm, noise, put, run, table

from holdfast.diagnosis import diagnose as module
from holdfast.diagnosis.diagnose import diagnose
from holdfast.diagnosis.find import episodes, hang, memory, throughput
from holdfast.diagnosis.model.episode import Episode, Note
from holdfast.diagnosis.model.wording import headline
from holdfast.diagnosis.tree.load import load_tree

NAN = float("nan")


@pytest.fixture
def found(monkeypatch):
    """Replaces the detectors: the test chooses the episodes and notes."""

    def say(*which, notes=()):
        monkeypatch.setattr(episodes, "find", lambda made: (list(which), list(notes)))

    say()
    return say


def test_healthy_run_has_no_verdict_and_no_note(found):
    report = diagnose(run())
    assert report.verdicts == []
    assert report.notes == []
    assert report.points == N
    assert report.summary == "No incident in 400 records, steps 0 to 399."


def test_several_incidents_each_have_their_own_window_and_verdict(found):
    loss = put(healthy_loss(), slice(300, None), NAN)
    loss[120] += 5.0
    made = run(loss=loss, grad_norm=put(put(healthy_norm(), 120, 30.0), slice(300, None), NAN), facts=FP32)
    found(episode(made, "nan", 300, N - 1), episode(made, "spike_recovered", 120, 120))
    first, second = diagnose(made).verdicts
    assert (first.kind, first.step_start, first.step_end, first.leaf) == (
        "spike_recovered",
        120.0,
        120.0,
        "long_tail_batch",
    )
    assert (second.kind, second.step_start, second.step_end, second.leaf) == (
        "nan",
        300.0,
        399.0,
        "fp32_zero_over_zero",
    )
    assert diagnose(made).summary.startswith(
        "2 incidents in 400 records; the worst: the loss is NaN or Inf from step 300 to 399"
    )


def test_an_episode_that_turns_out_harmless_is_a_note(found):
    made, where = CASES["scaler_finds_level"].build()
    found(where)
    report = diagnose(made)
    assert report.verdicts == []
    (note,) = [n for n in report.notes if n.leaf == "scaler_finds_level"]
    assert note.kind == "grad_nonfinite"
    assert "does not mean that activations overflow" in note.action


def test_detector_notes_are_kept_and_not_repeated(found):
    made = table(loss=2.0 + noise(0.03, 7), lr=cosine())
    found(notes=[Note(kind="plateau", start=100, end=399, text="level since step 100")])
    assert [(n.kind, n.text) for n in diagnose(made).notes] == [("plateau", "level since step 100")]


def test_rule_that_fires_is_a_note_with_an_action(found):
    report = diagnose(run(pad_share=np.full(N, 0.8)))
    assert report.verdicts == []
    (note,) = report.notes
    assert (note.kind, note.leaf) == ("padding", "mostly_padding")
    assert note.action


@pytest.mark.parametrize(
    "leaf",
    [
        "leak",
        "fragments",
        "capacity",
        "fragments_by_text",
        "full_by_text",
        "host_full",
        "oom_open",
        "rank_absent",
        "slow_open",
        "straggling_rank",
    ],
)
def test_machine_incidents_are_found_in_the_table(found, leaf):
    made, where = CASES[leaf].build()
    (verdict,) = diagnose(made).verdicts
    assert (verdict.kind, verdict.leaf) == (where.kind, leaf)
    assert abs(verdict.row_start - where.first) <= 20
    assert abs(verdict.row_end - where.last) <= 20


def test_abstaining_verdict_names_no_cause_and_lists_the_missing_data(found):
    made, where = jump(300, 300, 2.0, "spike_recovered", grad_norm=None, lr=None)
    found(where)
    (verdict,) = diagnose(made).verdicts
    assert (verdict.cause, verdict.status) == ("not established", "unknown")
    assert any("gradient norm" in need for need in verdict.unchecked)
    assert verdict.confidence == pytest.approx(where.confidence)


def test_empty_table_has_nothing_to_diagnose(found):
    report = diagnose(table(loss=[]))
    assert report.verdicts == [] and report.notes == []
    assert "Not judged" in report.summary


# ---- memory, speed and hangs: no incident


def thresholds(name):
    return load_tree().thresholds(name)


def kinds(made):
    return [e.kind for e in module.find_machine_episodes(made, load_tree())]


@pytest.mark.parametrize(
    "allocated",
    [
        20.0 + noise(0.1, 1),
        np.r_[np.linspace(2.0, 20.0, 30), 20.0 + noise(0.1, 1, 370)],
        np.r_[np.full(200, 20.0), np.full(200, 25.0)] + noise(0.1, 2),
        20.0 + 5.0 * np.sin(np.arange(N) / 30.0),
        20.0 + 5.0 * np.abs(noise(1.0, 3)),
        np.linspace(30.0, 20.0, N),
        20.0 + 0.0005 * np.arange(N),
    ],
    ids=["level", "warm-up", "one step up", "swings", "varies by batch", "falls", "under 5%"],
)
def test_memory_that_does_not_creep_is_no_incident(allocated):
    assert kinds(run(memory_allocated=allocated, memory_reserved=allocated + 4.0)) == []


def test_staircase_and_slope_are_both_leaks():
    stairs = 20.0 + np.floor(np.arange(N) / 20.0)
    assert kinds(run(memory_allocated=stairs)) == ["memory_leak"]
    assert kinds(run(memory_allocated=20.0 + 0.05 * np.arange(N))) == ["memory_leak"]


def test_peak_alone_is_weaker_evidence():
    rising = 20.0 + 0.05 * np.arange(N)
    sure, weak = (memory.find(run(**{n: rising}), thresholds("allocated_rises"), thresholds("reserved_grows_apart"))[0]
                  for n in ("memory_allocated", "memory_peak"))  # fmt: skip
    assert weak.confidence < sure.confidence


BASE = 0.5 + noise(0.01, 4)


@pytest.mark.parametrize(
    "seconds",
    [
        BASE,
        np.r_[5.0 + noise(0.1, 5, 15), BASE[15:]],
        put(BASE, slice(0, N, 50), 60.0),
        put(BASE, slice(200, 230), 1.5),
        np.where(np.arange(N) % 2 == 0, 0.5, 1.2),
        np.exp(noise(0.8, 6)),
        BASE * np.r_[np.ones(200), np.full(200, 1.3)],
        np.r_[np.full(200, 1.0), np.full(200, 0.5)],
        np.linspace(0.5, 0.7, N),
    ],
    ids=["level", "compile", "evaluations", "a pause of 30", "alternates", "wild", "1.3x", "faster", "drifts"],
)
def test_speed_that_does_not_halve_for_good_is_no_incident(seconds):
    assert kinds(run(seconds=seconds)) == []


def test_throughput_that_halves_is_found_where_it_halves():
    tokens = np.r_[np.full(230, 1000.0), np.full(170, 480.0)] * np.exp(noise(0.03, 8))
    (drop,) = throughput.find(run(tokens_per_second=tokens), thresholds("steps_slower"), thresholds("one_rank_slow"))
    assert drop.kind == "throughput_drop"
    assert drop.start == pytest.approx(230, abs=10)
    assert drop.evidence["ratio"] == pytest.approx(1000 / 480, rel=0.05)


def test_throughput_that_recovers_ends_where_it_recovers():
    seconds = put(BASE, slice(150, 270), 1.2)
    (drop,) = throughput.find(run(seconds=seconds), thresholds("steps_slower"), thresholds("one_rank_slow"))
    assert (drop.start, drop.end) == (pytest.approx(150, abs=10), pytest.approx(270, abs=12))


def test_a_long_log_is_searched_in_bounded_time():
    seconds = np.r_[np.full(700_000, 0.5), np.full(300_000, 1.0)] + noise(0.01, 9, 1_000_000)
    (drop,) = throughput.find(table(seconds=seconds), thresholds("steps_slower"), thresholds("one_rank_slow"))
    assert drop.start == pytest.approx(700_000, abs=2000)


def test_silence_alone_is_no_hang():
    assert hang.find(run(seconds=put(BASE, 200, 7200.0))) == []


@pytest.mark.parametrize(
    ("end", "lasts", "when"),
    [(30, False, "at step 30"), (31, False, "from step 30 to 31"), (30, True, "from step 30 on")],
)
def test_a_loss_that_is_nan_once_is_nan_at_that_step(end, lasts, when):
    episode = Episode(
        kind="nan", start=30.0, end=float(end), first=30, last=end, confidence=0.9, evidence={"lasts": lasts}
    )
    assert headline(episode, "step") == f"the loss is NaN or Inf {when}"
