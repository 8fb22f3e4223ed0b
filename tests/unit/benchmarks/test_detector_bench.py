"""The detectors' benchmark: its curves, its scoring, and what it makes of both."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.detectors import bars, contenders, corpus, loops, plot, report, runs
from benchmarks.detectors.alarms import Alarm, Holdfast, Rule, scaled, signals
from benchmarks.detectors.contenders import Contender, compete
from benchmarks.detectors.curves import ANOMALY, CLEAN, SEEDS, make, seeds
from benchmarks.detectors.healthy_run import Curve, Event
from benchmarks.detectors.intervals import poisson, wilson
from benchmarks.detectors.scoring import Score, judge, latched, score
from benchmarks.experiments.training import train
from benchmarks.experiments.workloads import build

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Signal
from holdfast.diagnosis.model.table import Table


def flat(steps: int = 200, events: list[Event] | None = None, kind: str = "made") -> Curve:
    ones = np.ones(steps)
    return Curve(kind, 0, 2 * ones, ones, 1e-3 * ones, events=events or [])


class At(Rule):
    """Alarms at given steps."""

    name = "at"

    def __init__(self, *steps: int, costly: bool = True) -> None:
        self._steps, self.costly = set(steps), costly

    def reset(self) -> None:
        pass

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        return step in self._steps


# ---- curves


@pytest.mark.parametrize("kind", [*CLEAN, *ANOMALY])
def test_a_curve_is_the_same_for_the_same_kind_and_seed(kind: str) -> None:
    one, again, other = make(kind, 3), make(kind, 3), make(kind, 4)
    for name in ("loss", "grad_norm", "lr"):
        assert np.array_equal(getattr(one, name), getattr(again, name), equal_nan=True)
    assert not np.array_equal(one.loss, other.loss, equal_nan=True)
    assert one.events == again.events and one.shifts == again.shifts


@pytest.mark.parametrize("kind", ANOMALY)
def test_events_lie_inside_the_curve_and_in_order(kind: str) -> None:
    for seed in range(12):
        curve = make(kind, seed)
        assert not curve.clean
        assert all(0 < e.start <= e.end < len(curve) for e in curve.events)
        assert all(a.end < b.start for a, b in zip(curve.events, curve.events[1:], strict=False))
        assert len(curve.loss) == len(curve.grad_norm) == len(curve.lr)


@pytest.mark.parametrize("kind", CLEAN)
def test_clean_curves_are_finite_and_have_no_event(kind: str) -> None:
    curve = make(kind, 1)
    assert curve.clean and np.isfinite(curve.loss).all() and np.isfinite(curve.grad_norm).all()


def test_test_seeds_are_apart_from_tuning_seeds_and_enough() -> None:
    for sort in ("clean", "anomaly", "loop"):
        assert max(SEEDS["tuning"][sort]) < 100 <= 10_000 <= min(SEEDS["test"][sort])
    records = {kind: len(make(kind, 0)) for kind in CLEAN}
    assert sum(n * len(SEEDS["test"]["clean"]) for n in records.values()) >= 900_000
    assert len(SEEDS["test"]["anomaly"]) >= 200
    assert set(seeds("test", "plain", quick=True)) < set(seeds("test", "plain"))


def test_the_spikes_of_the_bars_stand_out_of_their_noise() -> None:
    for kind in bars.SPIKES:
        for seed in range(10):
            curve = make(kind, seed)
            for event in curve.events:
                before = curve.loss[event.start - 30 : event.start]
                noise = np.std(np.diff(before)) / math.sqrt(2)
                assert curve.loss[event.start : event.end + 1].max() > np.median(before[-6:]) + 3 * noise


# ---- scoring


def test_a_detector_that_never_alarms_finds_nothing_and_is_never_wrong() -> None:
    found = score(At(), [flat(), flat(events=[Event("spike_small", 100, 110)])])
    assert found.false().count == 0 and found.recall(["spike_small"]).share == 0
    assert math.isnan(found.recall(["spike_small"]).median) and math.isnan(found.wasted(["spike_small"]))


def test_a_detector_that_always_alarms_is_one_false_alarm_by_the_latch_and_finds_all_at_once() -> None:
    always = At(*range(200))
    found = score(always, [flat(), flat(events=[Event("spike_small", 100, 110)])])
    assert found.false(True).count == 1 and found.false(False).count == 0 and found.false().steps == 200
    assert found.recall(["spike_small"]).share == 1 and found.recall(["spike_small"]).median == 0


def test_a_detector_three_steps_late_has_latency_three() -> None:
    found = score(At(103), [flat(events=[Event("spike_small", 100, 101)])])
    assert found.recall(["spike_small"]).latencies == [3]
    assert found.wasted(["spike_small"]) == 103 - 3  # a costly rule without an onset goes back a hundred steps
    cheap = score(At(103, costly=False), [flat(events=[Event("spike_small", 100, 101)])])
    assert cheap.recall(["spike_small"]).share == 1 and cheap.recall(["spike_small"], costly=True).share == 0


@pytest.mark.parametrize(
    ("kind", "step", "hit"),
    [
        ("spike_small", 99, False),
        ("spike_small", 120, True),
        ("spike_small", 121, False),
        ("divergence_fast", 190, True),
        ("divergence_fast", 191, False),
        ("divergence_slow", 210, True),
        ("divergence_slow", 211, False),
    ],
)
def test_an_event_is_found_from_its_start_to_its_tolerance(kind: str, step: int, hit: bool) -> None:
    found = score(At(step), [flat(400, [Event(kind, 100, 110)])])
    assert found.recall([kind]).share == hit


def test_one_alarm_does_not_find_the_next_event_too() -> None:
    curve = flat(events=[Event("spike_burst", 100, 105), Event("spike_burst", 110, 115)])
    assert score(At(112), [curve]).recall(["spike_burst"]).latencies == [2]


def test_alarms_within_fifty_steps_are_one() -> None:
    assert latched([]) == 0
    assert latched([10, 60, 110]) == 1
    assert latched([10, 61, 112]) == 3


def test_cheap_and_costly_alarms_are_scored_apart() -> None:
    event = flat(events=[Event("spike_small", 100, 110)])
    alarms = [Alarm(101, False, 100), Alarm(104, True, 90)]
    (found,) = judge(event, alarms).found
    assert (found.any, found.costly, found.wasted) == (1, 4, 14)
    clean = judge(flat(), alarms)
    assert (clean.false_costly, clean.false_cheap) == (1, 1)


def test_the_intervals_are_the_tabulated_ones() -> None:
    assert poisson(0) == pytest.approx((0.0, 3.689), abs=1e-3)
    assert poisson(5) == pytest.approx((1.623, 11.668), abs=1e-3)
    assert poisson(1000) == pytest.approx((938.97, 1063.94), abs=0.1)
    assert wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


# ---- this project's detectors


class Asked:
    """A detector that notes what it is given."""

    name = "asked"
    seen: ClassVar[list[object]] = []

    def observe(self, signal: object) -> None:
        self.seen.append(signal)

    def rebaseline(self) -> None:
        self.seen.append("rebaseline")


def test_the_adapter_gives_what_the_runtime_gives_and_declares_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.detectors.alarms.build", lambda config: [Asked()])
    Asked.seen = []
    curve = flat(3)
    curve.shifts = [1]
    assert Holdfast().run(curve) == []
    assert [getattr(s, "step", s) for s in Asked.seen] == [0, "rebaseline", 1, 2]
    first = signals(curve)[0]
    assert (first.loss, first.grad_norm, first.lr, first.flags, first.loss_limit) == (2.0, 1.0, 1e-3, 0, None)


def test_a_plain_nan_is_found_by_the_detectors_as_built() -> None:
    found = score(Holdfast(), [make("nan", 0), make("nan_grad", 0)])
    assert found.recall(["nan", "nan_grad"]).latencies == [0, 0]


def test_a_factor_scales_what_counts_deviations_and_nothing_else() -> None:
    plain, double = DetectSection(), scaled(DetectSection(), 2.0)
    assert double.loss_z == 2 * plain.loss_z and double.grad_z == 2 * plain.grad_z
    assert double.warmup_steps == plain.warmup_steps


# ---- the whole


def test_the_same_scores_on_one_core_and_on_two() -> None:
    plan = {"plain": range(2), "nan": range(4)}
    entered = (Contender("megatron"), Contender("3-sigma/100"))
    one, two = (compete(entered, plan, workers, chunk=2) for workers in (1, 2))
    assert {c: s.verdicts for c, s in one.items()} == {c: s.verdicts for c, s in two.items()}
    assert one[Contender("megatron")].recall(["nan"]).share == 1


def _scores() -> dict[Contender, Score]:
    curves = [flat(kind="plain"), flat(events=[Event("spike_small", 100, 110)], kind="spike_small")]
    ours, other = score(At(101), curves), score(At(), curves)
    ours.name, other.name = contenders.OURS, "megatron"
    return {Contender(contenders.OURS): ours, Contender("megatron", 10.0): other}


def test_a_rule_ahead_on_both_is_named_and_one_ahead_on_one_is_not() -> None:
    scores = _scores()
    ours, other = scores.values()
    assert list(bars.ahead(scores, {Contender("megatron", 10.0): other})) == []  # fewer false alarms, less found
    assert len(list(bars.ahead({Contender(contenders.OURS): other}, {Contender("megatron", 10.0): ours}))) == 0
    both = score(At(), [flat(kind="plain")])
    both.verdicts += score(At(100), [flat(events=[Event("spike_small", 100, 110)])]).verdicts
    late = score(At(1), [flat(kind="plain"), flat(events=[Event("spike_small", 100, 110)])])
    (named,) = bars.ahead({Contender(contenders.OURS): late}, {Contender("megatron", 2.0): both})
    assert "megatron at 2.0" in named


def test_the_bars_fail_a_detector_that_finds_nothing() -> None:
    met = {bar.what.split(",")[0]: bar.met for bar in bars.bars(_scores()[Contender("megatron", 10.0)])}
    assert met["spike recall >= 0.99"] is False and met["divergence_fast within 80 steps"] is False


def test_table_numbers_and_plot_come_from_the_same_scores() -> None:
    scores = _scores()
    table = report.table(scores, {"further": {"megatron": "7"}}, "title")
    assert [c.header for c in table.columns] == ["", "holdfast", "holdfast costly", "megatron"]
    assert report.as_data(scores)[0]["recall"]["spike_small"]["any"]["share"] == 1
    drawn = plot.svg(scores)
    assert drawn.startswith("<svg") and "megatron" in drawn and "nan" not in drawn


def test_a_log_becomes_a_curve_with_what_is_absent_kept_absent() -> None:
    columns = {"loss": np.array([2.0, 0.0, math.nan]), "grad_norm": np.ones(3), "lr": np.full(3, 1e-3)}
    present = {"loss": np.array([1, 0, 1]) > 0, "grad_norm": np.array([1, 0, 0]) > 0, "lr": np.array([0, 1, 0]) > 0}
    curve = corpus.as_curve(Table("a.csv", "csv", np.array([10.0, 20.0, 30.0]), columns, present), "a.csv")
    assert curve.steps.tolist() == [10, 30] and curve.norms() == [1.0, None] and math.isnan(curve.loss[1])
    case = corpus.Case("a.csv", curve, False, False, (corpus.Sought("nan", 31, 40), corpus.Sought("spike", 100, 110)))
    assert corpus.found(case, [Alarm(1, False, 0)]) == [True, False]


def test_the_corpus_is_skipped_with_a_message_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_CORPUS", str(tmp_path))
    rows, data = corpus.rows([Contender("megatron")])
    assert "HOLDFAST_CORPUS" in data["message"] and list(rows) == [data["message"]]


def test_a_fault_counts_only_where_the_run_leaves_its_twin() -> None:
    twin, same, worse = flat(), flat(), flat()
    worse.loss[120:] += 1.0
    plan = runs.Plan("made", 0, ("LrTimes", (110, 10.0)))
    assert runs.label(plan, same, twin).events == []
    assert runs.label(plan, worse, twin).events == [Event("made", 109, 180)]
    broken = flat()
    broken.grad_norm[115] = math.inf
    assert runs.harmed(broken, twin, 110) == 115


# ---- real loops


def test_a_loop_that_is_observed_is_the_unguarded_one(tmp_path: Path) -> None:
    watched = train(build("triplet", 3), 20, tmp_path / "run", loops.OBSERVE)
    assert watched.digest == train(build("triplet", 3), 20, None).digest
    curve = runs.curve_of("triplet", 3, list(watched.signals.values()))
    assert curve.loss.tolist() == list(watched.losses.values()) and np.isfinite(curve.grad_norm).all()


def test_a_number_that_was_not_measured_is_absent_for_the_detectors_and_a_nan_is_a_nan() -> None:
    norms = [7.0 if step % 50 == 0 else None for step in range(200)]
    live = [Signal(step=step, loss=2.0, grad_norm=1.0, lr=1e-3, weight_norm=norm) for step, norm in enumerate(norms)]
    curve = runs.curve_of("made", 0, live)
    assert [signal.weight_norm for signal in signals(curve)] == norms and Holdfast().run(curve) == []
    live[150] = Signal(step=150, loss=2.0, grad_norm=1.0, lr=1e-3, weight_norm=math.nan)
    assert [alarm.step for alarm in Holdfast().run(runs.curve_of("made", 0, live))] == [150]


@pytest.mark.slow
def test_new_data_in_a_clean_loop_is_an_alarm_and_would_begin_one_experiment() -> None:
    ours, other = Contender(contenders.OURS), Contender("3-sigma/100")
    row = loops.measure("continual", 3, 420, (ours, other))
    assert row["finite_steps"] == 420 and row["returns"] == 1 and row["other_actions"] == []
    assert row["verdicts"][ours].false_costly == 1 and row["verdicts"][other].false_costly >= 1


def test_alarms_of_loops_are_per_thousand_steps_and_returns_are_counted() -> None:
    ours, other = entered = Contender(contenders.OURS), Contender("megatron")
    row = {"kind": "gan", "returns": 1, "finite_steps": 200, "other_actions": []}
    alarms = [Alarm(10, True, 0), Alarm(20, False, 19), Alarm(120, False, 119)]
    found = [{**row, "verdicts": {ours: judge(flat(), alarms), other: judge(flat(), [])}} for _ in range(2)]
    table, kinds = loops.tabulate(found, entered)
    (cells,) = table.values()
    assert cells == {"holdfast": "15.00", "holdfast costly": "5.00", "megatron": "0.00"} and "2 returns" in next(
        iter(table)
    )
    assert kinds["gan"]["alarms_per_1000"]["holdfast"] == {"costly": 5.0, "cheap": 10.0}
    assert loops.would_do({"reason": "observe only; would rollback + cut_lr: why: so"}) == "rollback + cut_lr"


@pytest.mark.parametrize(
    ("changed", "met"),
    [({}, [True, True]), ({"finite_steps": [9]}, [False, True]), ({"other_actions": ["skip"]}, [True, False])],
)
def test_a_loop_that_is_short_or_would_lose_data_misses_a_bar(changed: dict[str, object], met: list[bool]) -> None:
    kind = {"finite_steps": [10], "other_actions": [], **changed}
    assert [bar.met for bar in loops.bars({"steps": 10, "kinds": {"gan": kind}})] == met
