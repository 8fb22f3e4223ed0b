"""Long logs: the detectors scan only some ranges, and find the same episodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic import healthy_loss, noise, run, table

from holdfast.diagnosis.find import episodes, losses
from holdfast.diagnosis.find.losses import Losses, _medians, _outliers, _ranges
from marks import slow

N = 260_000
AT = 170_123
LATE = np.arange(N - AT)


def baseline(tails: bool = False) -> np.ndarray:
    random = np.random.default_rng(3)
    rough = 0.02 * random.standard_t(3, N) if tails else random.normal(0.0, 0.03, N)
    return 2.0 + 3.0 * np.exp(-np.arange(N) / 8000.0) + rough


def raised(count: int, by: float = 2.0, tails: bool = False) -> np.ndarray:
    made = baseline(tails)
    made[AT : AT + count] += by
    return made


def with_nan() -> np.ndarray:
    made = baseline()
    made[AT] = math.nan
    return made


def three() -> np.ndarray:
    made = raised(5)
    made[100_000] += 6.0
    made[225_000:225_030] += 2.0
    return made


def exploded() -> dict[str, np.ndarray]:
    norm = 0.3 * np.exp(np.random.default_rng(4).normal(0.0, 0.2, N))
    norm[AT : AT + 10] *= 400.0
    return {"loss": baseline(), "grad_norm": norm}


MADE = {
    "nothing": lambda: ({"loss": baseline()}, []),
    "5 records up": lambda: ({"loss": raised(5)}, [("spike_recovered", AT, AT + 4)]),
    "30 records up": lambda: ({"loss": raised(30)}, [("spike_recovered", AT, AT + 29)]),
    "200 records up": lambda: ({"loss": raised(200)}, [("spike_recovered", AT, AT + 199)]),
    "one NaN": lambda: ({"loss": with_nan()}, [("nan", AT, AT)]),
    "up for good": lambda: (
        {"loss": baseline() + np.r_[np.zeros(AT), np.minimum(3.0, 0.01 * LATE)]},
        [("divergence", AT, N - 1)],
    ),
    "up slowly": lambda: (
        {"loss": baseline() + np.r_[np.zeros(AT), np.minimum(1.0, 2e-5 * LATE)]},
        [("silent_divergence", AT, N - 1)],
    ),
    "gradient": lambda: (exploded(), [("grad_explosion", AT, AT + 9)]),
    "down for good": lambda: ({"loss": baseline() - np.r_[np.zeros(AT), np.full(N - AT, 0.6)]}, []),
    "heavy tails": lambda: ({"loss": raised(30, tails=True)}, [("spike_recovered", AT, AT + 29)]),
    "three": lambda: (
        {"loss": three()},
        [
            ("spike_recovered", 100_000, 100_000),
            ("spike_recovered", AT, AT + 4),
            ("spike_recovered", 225_000, 225_029),
        ],
    ),
}


def found(made, monkeypatch, whole):
    monkeypatch.setattr(losses, "_FULL_SCAN", whole)
    return [(one.kind, one.first, one.last) for one in episodes.find(made)[0]]


QUICK = ("up for good", "gradient", "three")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in MADE if name not in QUICK))])
def test_ranges_give_the_episodes_that_row_by_row_gives(name, monkeypatch):
    columns, planted = MADE[name]()
    made = table(**columns)
    assert len(made) > losses._FULL_SCAN
    by_ranges = found(made, monkeypatch, losses._FULL_SCAN)
    by_rows = found(made, monkeypatch, 10**9)
    assert [one[0] for one in by_ranges] == [one[0] for one in by_rows] == [one[0] for one in planted]
    slow = {"divergence": 100, "silent_divergence": 5000}
    for kind, first, last in planted:
        near = slow.get(kind, 0)
        for others in (by_ranges, by_rows):
            assert any(k == kind and abs(f - first) <= near and abs(at - last) <= near for k, f, at in others)
    for one, other in zip(by_ranges, by_rows, strict=True):
        assert abs(one[1] - other[1]) <= slow.get(one[0], 0)


def test_only_ranges_are_looked_at_row_by_row(monkeypatch):
    looked: list[int] = []
    scan = Losses._scan
    monkeypatch.setattr(
        Losses, "_scan", lambda self, first, stop, since=0: (
            looked.append(stop - first), scan(self, first, stop, since)
        )[1],
    )  # fmt: skip
    Losses(table(loss=raised(5)))
    assert 2 <= len(looked) < 40
    assert sum(looked) < N // 4


def test_a_long_log_that_went_back_keeps_its_shift_and_its_spike():
    step = np.r_[np.arange(150_000), np.arange(140_000, 250_000)]
    seen = Losses(table(loss=raised(5), step=step))
    assert seen.shifts == [150_000]
    assert {f.at for f in seen.findings if f.finding.kind == "loss_spike"} & set(range(AT, AT + 10))


# ---- the parts


def test_medians_leave_out_what_is_not_finite():
    values = np.array([1.0, 5.0, 2.0, math.nan, 4.0, math.inf, math.nan, math.nan, math.nan, 7.0, 9.0])
    middles = _medians(values, 3)
    assert middles[[0, 1, 3]].tolist() == [2.0, 4.0, 8.0]
    assert math.isnan(middles[2])
    assert _medians(np.arange(6.0), 3).tolist() == [1.0, 4.0]


def test_outliers_are_single_high_records_and_a_few_that_are_somewhat_high():
    values = 2.0 + noise(0.03, 5, 4096)
    assert len(_outliers(values)) <= 4
    values[1000] += 0.6
    values[3000:3008] += 0.09
    found = set(_outliers(values).tolist())
    assert 1000 in found
    assert found & set(range(3000, 3008))


@pytest.mark.parametrize("values", [np.full(1000, math.nan), np.zeros(1000), np.full(1000, math.inf)])
def test_values_without_a_baseline_have_no_outliers(values):
    assert len(_outliers(values)) == 0


def test_ranges_join_where_they_touch_and_end_with_the_log():
    assert _ranges(np.array([], dtype=np.intp), 10) == []
    assert _ranges(np.array([10, 500, 9000]), 9100) == [(10, 700), (9000, 9100)]


def test_places_before_and_since_a_shift():
    seen = Losses(run(step=np.r_[np.arange(300), np.arange(250, 350)], lr=None))
    assert seen.shifts == [300]
    assert (seen.since_shift(299), seen.since_shift(300)) == (0, 300)
    assert [seen.is_near_shift(i) for i in (298, 310, 380)] == [False, True, False]
    assert len(seen.before(299)) == 30 and len(seen.before(305)) == 5
    assert seen.index_of_step(260.0, 350) == 310  # after the shift, not the 260 of before
    assert seen.index_of_step(260.0, 290) == 260


def test_rows_without_a_loss_are_passed_over():
    made = run(loss=healthy_loss())
    made.present["loss"] = np.arange(len(made)) % 2 == 0
    seen = Losses(made)
    assert seen.rows.tolist() == list(range(0, len(made), 2))
    assert len(seen.loss) == len(made) // 2


def test_a_short_log_is_not_judged():
    assert Losses(table(loss=[2.0, 2.0, 2.0, 90.0, 2.0, 2.0])).findings == []
