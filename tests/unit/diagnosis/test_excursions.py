"""Loss episodes: every kind with its window, and runs without an incident."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic import noise, table

from holdfast.diagnosis.find import episodes

N = 600
NAN = math.nan


def baseline(n: int = N) -> np.ndarray:
    return 2.0 + 3.0 * np.exp(-np.arange(n) / 60.0) + noise(0.03, 1, n)


def changed(*changes: tuple, n: int = N) -> np.ndarray:
    """Return the baseline with something added in some rows."""
    made = baseline(n)
    for where, what in changes:
        made[where] = made[where] + what
    return made


def fade(n: int, by: float, over: float) -> np.ndarray:
    return by * np.exp(-np.arange(n) / over)


def found(loss, **columns):
    return [(one.kind, one.start, one.end) for one in episodes.find(table(loss=loss, **columns))[0]]


def notes(loss, **columns):
    return [note for note in episodes.find(table(loss=loss, **columns))[1] if note.kind == "restart"]


# ---- NaN


@pytest.mark.parametrize(
    ("rows", "windows"),
    [
        ([300], [(300, 300)]),
        ([300, 302, 305], [(300, 305)]),
        ([300, 304, 400], [(300, 300), (304, 304), (400, 400)]),
        (slice(300, None), [(300, 599)]),
        (slice(None), [(0, 599)]),
        ([0, 599], [(0, 0), (599, 599)]),
    ],
    ids=["one", "near each other", "apart", "to the end", "all", "first and last"],
)
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_what_is_not_finite_is_grouped(rows, windows, value):
    assert found(changed((rows, value))) == [("nan", *window) for window in windows]


def test_nan_that_was_not_logged_is_no_nan():
    made = table(loss=changed((300, NAN)))
    made.present["loss"][300] = False
    assert episodes.find(made)[0] == []


def test_the_runaway_before_nan_is_a_divergence_beside_it_and_no_spike():
    loss = baseline()
    loss[296:300] *= [3.2, 6.0, 20.0, 90.0]
    loss[300:] = NAN
    assert found(loss) == [("divergence", 296, 300), ("nan", 300, 599)]


# ---- spikes and divergence


@pytest.mark.parametrize("count", [4, 10, 40])
def test_a_jump_that_comes_back_ends_where_it_comes_back(count):
    ((kind, start, end),) = found(changed((slice(300, 300 + count), 3.0)))
    assert kind == "spike_recovered"
    assert abs(start - 300) <= 1 and abs(end - (299 + count)) <= 1


def test_a_jump_that_fades_ends_where_it_is_within_noise():
    ((kind, start, end),) = found(changed((slice(300, None), fade(300, 3.0, 15.0))))
    assert (kind, start) == ("spike_recovered", 300)
    assert 330 <= end <= 370


def test_a_jump_that_comes_back_most_of_the_way_is_a_spike():
    assert found(changed((slice(300, 310), 5.0), (slice(310, None), 0.5))) == [("spike", 300, 599)]


@pytest.mark.parametrize("slope", [0.05, 0.2, 4.0])
def test_up_and_not_back_is_a_divergence(slope):
    ((kind, start, end),) = found(changed((slice(300, None), np.minimum(4.0, slope * np.arange(1, 301)))))
    assert (kind, end) == ("divergence", 599)
    assert 299 <= start <= 312


@pytest.mark.parametrize(("length", "slope"), [(600, 1.5e-3), (4000, 2e-4)])
def test_up_slowly_without_a_jump_is_a_silent_divergence(length, slope):
    half = length // 2
    loss = baseline(length) + slope * np.maximum(0, np.arange(length) - half)
    ((kind, start, end),) = found(loss)
    assert (kind, end) == ("silent_divergence", length - 1)
    assert half <= start <= half + 0.25 * length


def test_run_that_ends_above_its_best_is_one_episode():
    ((kind, start, end),) = found(changed((slice(500, None), np.linspace(0.0, 1.5, 100))))
    assert (kind, end) == ("divergence", 599)
    assert 495 <= start <= 515


def test_a_rise_over_half_the_run_is_one_episode():
    ((kind, start, end),) = found(changed((slice(300, None), np.linspace(0.0, 1.2, 300))))
    assert kind in ("divergence", "silent_divergence") and end == 599
    assert 280 <= start <= 380


def test_leap_at_the_start_is_found_before_a_baseline_exists():
    ((kind, start, end),) = found(changed((slice(4, 60), np.linspace(15.0, 0.0, 56))))
    assert (kind, start) == ("spike_recovered", 4)
    assert 40 <= end <= 62


def test_one_high_record_at_the_start_counts_only_in_a_sparse_log():
    assert found(changed((4, 15.0))) == []
    assert found(changed((4, 15.0)), step=50.0 * np.arange(N)) == [("spike_recovered", 200, 200)]


def test_windows_are_in_steps_of_the_log():
    ((_, start, end),) = found(changed((slice(300, 310), 3.0)), step=1000.0 + 50.0 * np.arange(N))
    assert (start, end) == (16_000, 16_450)


def test_two_jumps_are_two_episodes():
    both = found(changed((slice(200, 206), 3.0), (slice(450, 470), 3.0)))
    assert [kind for kind, _, _ in both] == ["spike_recovered"] * 2
    assert np.array(both)[:, 1:].astype(float) == pytest.approx(np.array([[200, 205], [450, 469]]), abs=1)


def test_evidence_has_the_level_and_the_peak():
    (one,) = episodes.find(table(loss=changed((slice(300, 310), 3.0))))[0]
    assert one.evidence["level"] == pytest.approx(2.02, abs=0.05)
    assert one.evidence["peak"] == pytest.approx(5.05, abs=0.1)
    assert one.evidence["ratio"] == pytest.approx(2.5, abs=0.1)
    assert one.evidence["rows"] == 10
    assert one.findings and one.confidence == pytest.approx(0.9)


# ---- single records


def test_a_hard_batch_is_no_incident_where_every_step_is_logged():
    assert found(changed((300, 1.0))) == []


def test_one_high_record_counts_in_a_sparse_log():
    assert found(changed((300, 1.0)), step=10.0 * np.arange(N)) == [("spike_recovered", 3000, 3000)]


def test_one_extreme_record_is_a_spike():
    assert found(changed((300, 6.0))) == [("spike_recovered", 300, 300)]


@pytest.mark.parametrize("interval", [1.0, 10.0])
def test_repeated_hard_batches_are_no_incident(interval):
    assert found(changed(([150, 230, 300, 410, 500], 1.0)), step=interval * np.arange(N)) == []


def test_a_spike_among_hard_batches_is_still_found():
    loss = changed(([150, 230, 410, 500], 1.0), (slice(300, 310), 3.0))
    assert found(loss) == [("spike_recovered", 300, 309)]


# ---- restarts


LR = np.r_[np.linspace(3e-4, 1e-5, 300), np.linspace(3e-4, 1e-5, 300)]
BACK = np.r_[np.arange(300), np.arange(200, 500)]
AGAIN = (slice(300, None), fade(300, 1.0, 60.0))


def test_jump_at_a_restart_of_the_learning_rate_is_a_restart():
    loss = changed(AGAIN)
    assert found(loss, lr=LR) == []
    (note,) = notes(loss, lr=LR)
    assert note.start == 300
    assert "from 2.027 to 2.972" in note.text and "the learning rate or the batch size restarts" in note.text
    assert found(loss, lr=np.full(N, 3e-4)) != []


def test_a_jump_where_the_steps_go_back_is_a_restart():
    loss = changed(AGAIN)
    assert found(loss, step=BACK) == []
    (note,) = notes(loss, step=BACK)
    assert note.start == 200
    assert "the step count goes back" in note.text


def test_a_restart_without_a_jump_needs_no_note():
    assert notes(changed((slice(300, None), 0.1)), step=BACK) == []
    assert notes(baseline(), lr=LR) == []


def test_nan_after_a_restart_is_a_nan():
    assert ("nan", 300, 300) in found(changed((400, NAN)), step=BACK)


# ---- what is no incident


def stairs() -> np.ndarray:
    epoch, inside = np.divmod(np.arange(1200), 200)
    return 2.0 - 0.3 * epoch + 6e-4 * inside + noise(0.02, 3, 1200)


def zeros() -> np.ndarray:
    random = np.random.default_rng(0)
    return np.where(random.random(N) < 0.9, 0.0, random.random(N))


def two_levels(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.where(random.random(N) < 0.3, 3.0, 1.0) + noise(0.05, 5, N)


def short_dip(seed: int) -> np.ndarray:
    since = np.arange(N) - 416
    return np.where((since >= -16) & (since < 0), 1.2, 1.8) + 0.0006 * since.clip(0) + noise(0.25, seed, N)


QUIET = {
    "healthy": baseline(),
    "negative": baseline() - 5.0,
    "negative, a little up": baseline() - 5.0 + np.where((np.arange(N) >= 300) & (np.arange(N) < 310), 0.3, 0.0),
    "mostly zero": zeros(),
    "epoch staircase": stairs(),
    **{f"two levels {seed}": two_levels(seed) for seed in range(6)},
    "heavy tails": 2.0 + 0.05 * np.abs(np.random.default_rng(7).standard_t(3, N)),
    **{f"a short dip {seed}": short_dip(seed) for seed in (1, 2, 3)},
    "down for good": baseline() - np.where(np.arange(N) > 300, 0.5, 0.0),
    "too short": np.array([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]),
    "one record": np.array([2.0]),
    "wide noise, low first": 2.0 + noise(0.5, 9, N),
    **{f"noise only {seed}": 2.0 + noise(0.25, seed, N) for seed in range(6)},
}


@pytest.mark.parametrize("name", QUIET)
def test_no_incident(name):
    assert found(QUIET[name]) == []


def test_a_negative_loss_that_leaps_is_an_incident():
    loss = baseline() - 5.0
    loss[300:310] += 3.0
    assert found(loss) == [("spike_recovered", 300, 309)]


def test_a_first_record_far_below_all_others_is_no_leap():
    loss = 0.004 + 0.001 * np.random.default_rng(1).random(N)
    loss[0] = 0.0002
    assert episodes.find(table(loss=loss))[0] == []


def test_the_first_record_of_an_epoch_in_a_log_of_means_is_no_spike():
    epoch = np.arange(N) // 60
    begins = np.flatnonzero(np.diff(epoch)) + 1
    means = 2.0 + noise(0.002, 4, N)
    means[begins] += 0.4 * np.where(np.arange(len(begins)) % 2, 1, -1)
    means[begins[5]] += 5.0
    assert found(means, epoch=epoch.astype(float)) == []
    means[begins[5] + 20 : begins[5] + 23] += 5.0
    assert [kind for kind, *_ in found(means, epoch=epoch.astype(float))] == ["spike_recovered"]


def test_a_sum_that_begins_again_is_judged_by_its_last_record():
    def summed(per_epoch):
        return np.concatenate([np.cumsum(np.full(20, total / 20)) for total in per_epoch])

    usual = 5.0 + noise(0.2, 5, 30)
    episodes_found, made = episodes.find(table(loss=summed(usual)))
    assert episodes_found == []
    assert "running_sum" in [note.kind for note in made]
    usual[20:] = 25.0
    assert [kind for kind, *_ in found(summed(usual))] == ["divergence"]


def test_many_single_high_records_are_the_noise_of_batches_and_one_is_a_spike():
    places = [100, 141, 190, 230, 301, 337, 390, 444, 490, 555]
    episodes_found, made = episodes.find(table(loss=changed(*((at, 9.0 + at / 100) for at in places))))
    assert episodes_found == []
    assert "outliers" in [note.kind for note in made]
    assert found(changed((301, 9.0))) == [("spike_recovered", 301.0, 301.0)]


def test_leaps_no_farther_than_the_tail_of_the_run_are_noise_and_one_beyond_it_is_a_spike():
    loss = np.exp(np.random.default_rng(8).standard_t(8, 4 * N) - 5.0)
    assert found(loss) == []
    tail = 1.0 + 0.1 * np.abs(np.random.default_rng(4).standard_t(3, N))
    tail[300] = 40.0
    assert found(tail) == [("spike_recovered", 300.0, 300.0)]


def test_restarts_of_growing_length_are_a_note():
    def restarted(places):
        loss = np.full(2000, 0.0)
        for first, last in zip([0, *places], [*places, 2000], strict=True):
            loss[first:last] = 0.1 + fade(last - first, 2.0, 20.0)
        return loss + noise(0.002, 8, 2000)

    made, made_notes = episodes.find(table(loss=restarted([100, 300, 700, 1500])))
    assert made == [] and "planned_reset" in [note.kind for note in made_notes]
    assert len(found(restarted([100, 480, 700, 1500]))) == 4


def test_a_rise_by_an_eighth_that_returns_is_none_however_quiet_the_log():
    quiet = np.round(0.0073 + noise(0.00005, 6), 4)
    quiet[300:305] = [0.0078, 0.0083, 0.0080, 0.0079, 0.0077]
    assert found(quiet) == []


def test_noise_as_large_as_the_rise_at_the_end_is_no_divergence():
    ends = [
        2.37,
        2.23,
        2.2,
        2.96,
        2.17,
        2.68,
        2.18,
        2.5,
        2.44,
        3.13,
        2.28,
        2.39,
        2.89,
        2.94,
        2.35,
        1.86,
        2.17,
        2.15,
        1.83,
    ]
    ends += [
        2.03,
        1.75,
        2.37,
        1.88,
        2.18,
        2.97,
        2.07,
        2.27,
        2.24,
        1.89,
        2.28,
        1.82,
        1.95,
        2.7,
        1.54,
        1.24,
        2.0,
        1.89,
        2.33,
    ]
    ends += [1.84, 2.01, 2.53, 2.4, 3.15, 2.87, 2.64, 3.02, 2.41, 2.02, 2.77, 2.24]
    assert found(np.array(ends)) == []
