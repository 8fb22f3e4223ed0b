"""What stands beside the loss: rewards, parts of a loss, columns that turn NaN, messages, resets, skipped updates."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import N, cosine, healthy_loss, healthy_norm, noise, put, run, table

from holdfast.diagnosis.diagnose import diagnose, severity_key
from holdfast.diagnosis.importers import read


def kinds(made):
    return [verdict.kind for verdict in diagnose(made).verdicts]


def spiked() -> np.ndarray:
    return put(healthy_loss(), slice(300, 306), 9.0)


def test_a_spike_while_the_reward_rises_is_a_note_and_with_a_falling_reward_an_incident():
    rising = np.arange(N) * 0.1 + noise(0.05, 3)
    report = diagnose(run(loss=spiked(), reward=rising, grad_norm=None))
    assert report.verdicts == []
    assert "loss_without_reward" in [note.kind for note in report.notes]
    assert kinds(run(loss=spiked(), reward=put(rising, slice(301, 330), 5.0), grad_norm=None)) == ["spike_recovered"]


def test_a_reward_that_falls_far_and_stays_low_is_an_incident_and_a_noisy_one_is_none():
    learned = np.minimum(np.arange(N) * 0.5, 100.0)
    lost = put(learned + noise(6.0, 5), slice(300, None), 5.0)
    for signals in ({"loss": healthy_loss()}, {"loss": None}):
        report = diagnose(run(reward=lost, grad_norm=None, **signals))
        (verdict,) = report.verdicts
        assert verdict.kind == "divergence"
        assert 290 <= verdict.step_start <= 312
        assert "the reward falls from" in verdict.headline
    assert kinds(run(reward=learned + noise(30.0, 6), grad_norm=None)) == []
    assert kinds(run(reward=noise(30.0, 7), grad_norm=None)) == []
    assert kinds(run(reward=put(learned, slice(300, 330), 5.0), grad_norm=None)) == []  # it comes back


def test_any_column_that_turns_nan_for_good_is_an_incident_with_its_name():
    report = diagnose(run(aux=put(noise(1.0, 4), slice(350, None), np.nan)))
    (verdict,) = report.verdicts
    assert (verdict.kind, verdict.step_start) == ("nan", 350)
    assert report.summary.startswith("aux is NaN or Inf from step 350 on")
    assert kinds(run(aux=put(noise(1.0, 4), slice(350, 352), np.nan))) == []


def test_a_part_of_the_loss_that_is_never_trained_is_a_dead_run():
    parts = {
        "facts": {"parts_of_loss": ["train/box", "train/cls"]},
        "train/box": np.zeros(N),
        "train/cls": healthy_loss(),
    }
    held_out = {"val/box": (np.arange(10.0) * 40, np.full(10, 3.5))}
    assert kinds(table(loss=healthy_loss(), evals=held_out, **parts)) == ["dead_run"]
    assert kinds(table(loss=healthy_loss(), **parts)) == []


def test_spikes_at_equal_distances_are_a_planned_reset():
    loss = healthy_loss()
    for at in (100, 180, 260, 340):
        loss = put(loss, slice(at, at + 6), 9.0)
    report = diagnose(run(loss=loss))
    assert "planned_reset" in [note.kind for note in report.notes]
    assert not [v for v in report.verdicts if v.kind == "spike_recovered"]


def test_a_gradient_that_is_not_finite_where_the_rate_stands_still_is_a_skipped_update():
    rate = cosine()
    skipped = np.concatenate([rate[:200], rate[199:-1]])
    bad = put(healthy_norm(), 199, np.inf)
    report = diagnose(run(grad_norm=bad, lr=skipped))
    assert report.verdicts == []
    assert "skipped_update" in [note.kind for note in report.notes]
    assert kinds(run(grad_norm=bad)) == ["grad_nonfinite"]


def test_a_lasting_step_up_is_found_at_any_interval_and_also_at_the_end():
    level = np.full(60, 2.25) + noise(0.01, 6, 60)
    up = put(level, slice(40, None), level[40:] + 0.85)
    for interval in (1, 10, 1000):
        assert kinds(table(loss=up, step=np.arange(60) * interval)) == ["divergence"]
    rising = put(level, slice(56, None), [2.9, 3.4, 4.1, 5.5])
    assert kinds(table(loss=rising)) == ["divergence"]
    assert kinds(table(loss=level)) == []


def test_a_line_that_says_why_the_run_was_stopped_is_believed():
    report = diagnose(run(events=[(399, "nan", "Loss is nan, stopping training")]))
    assert [v.kind for v in report.verdicts] == ["nan"]
    assert "Loss is nan, stopping training" in report.summary


def test_rank_follows_damage_and_length_and_not_the_confidence_in_a_cause():
    made = run(loss=put(put(healthy_loss(), slice(150, 160), 4.5), slice(350, None), 9.0))
    verdicts = diagnose(made).verdicts
    worst = max(verdicts, key=lambda verdict: severity_key(made, verdict))
    assert worst.kind == "divergence" and worst.step_start >= 345
    before = severity_key(made, worst)
    worst.confidence = 0.01
    assert severity_key(made, worst) == before


def test_no_incident_refutes_itself():
    for seed in range(20):
        made = run(loss=2.0 + np.random.default_rng(seed).standard_t(2, N) * 0.05)
        for verdict in diagnose(made).verdicts:
            assert verdict.size > 1.05, verdict.headline


@pytest.mark.parametrize(
    ("parts", "rise", "found"),
    [
        (["D loss", "G loss"], 2.0, []),
        (["policy_loss", "value_loss"], 2.0, []),
        (["D loss", "G loss"], 40.0, ["divergence"]),
        (["box_loss", "cls_loss"], 2.0, ["divergence"]),
    ],
)
def test_opposed_losses_may_rise_but_not_run_away(tmp_path, parts, rise, found):
    noise = np.random.default_rng(0).normal(0, 0.02, (400, 2))
    first = np.where(np.arange(400) < 250, 1.0, rise)
    path = tmp_path / "log.txt"
    path.write_text(
        "".join(
            f"step {n} {parts[0]}: {1 + noise[n, 0]:.4f} {parts[1]}: {first[n] + noise[n, 1]:.4f}\n" for n in range(400)
        )
    )
    (table,) = read(path)
    report = diagnose(table)
    assert [verdict.kind for verdict in report.verdicts] == found
    assert found or "opposed_losses" in [note.kind for note in report.notes]


def test_the_line_that_says_that_the_run_was_killed_is_a_note_if_it_is_the_last(tmp_path):
    records = [f"step={i}, loss={3 - i / 100:.3f}" for i in range(40)]
    killed = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-06-21T06:53:28 DUE TO TIME LIMIT ***"
    noted = []
    for name, lines in (("last", [*records, killed]), ("between", [*records[:20], killed, *records[20:]])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        report = diagnose(read(tmp_path / name)[0])
        assert report.verdicts == []
        noted.append([note.text for note in report.notes if note.kind == "ended_killed"])
    assert noted == [[f"the log ends with: {killed}"], []]
