"""A loss far above its baseline: one step, or several of the last few.

When the excursion ends, a note tells how: recovered, or persistent; then the new level becomes the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector
from holdfast.core.detectors.baseline import LARGEST, Baseline

_REBASELINE = 24
_GROSS_Z, _GROSS_RATIO = 50.0, 5.0
_LOG_SHARE = 0.6
_LARGEST_LOG_RISE = math.log(5.0)
"""however wide multiplicative noise is, five times the baseline is out of range"""
_PERSISTENT_STEPS = 100
_SINGLE_STEPS = 2
# The score of an excursion, for a limit of 6 deviations: each loss adds its deviations minus the slack, at most
# _LARGEST_GAIN, so that it takes three losses to exceed _ROLLBACK_SCORE; a loss on the baseline subtracts the slack.
_UNIT = 6.0
_SLACK, _LARGEST_GAIN, _ROLLBACK_SCORE, _LARGEST_SCORE = 2.0, 3.7, 7.5, 15.0
_OPEN_SCORE = 2.0
_AUTOCORRELATION_SLACK = 13.0
_JUMP, _LARGEST_JUMP_GAIN = 4.0, 2.5
# Losses as far below the baseline as above it are noise that has become wide, not a spike.
_WIDE_DEPTH, _DEPTH_DECAY, _LARGEST_DEPTH = 2.4, 0.985, 6.0
_LOSS_HIGH = int(Flag.LOSS_HIGH)


class LossSpike(LimitlessDetector):
    """Raises two alarms, each with its own threshold.

    SKIP: the loss is more than `loss_z` deviations above its baseline, and by at least `loss_rise`. ROLLBACK: a running
    score of the deviations (a CUSUM) shows that at least three losses are high together; it is reported once per
    excursion. In a run neither vetoes anything: a finite step lands, and an excursion is watched. The more neighbouring
    losses correlate, the more it takes. While a new baseline is
    learned after an expected shift, only a gross rise over the old one counts. A loss of exactly zero (a hinge that no
    sample violates) is never high and does not enter the baseline.
    """

    name = "loss_spike"
    per_group = True
    field, needs_loss, max_block = "loss", True, 16
    saved: ClassVar = {
        "course": "_baseline", "log": "_log_baseline", "positive": "_positive", "began": "_initial_level",
        "score": "_score", "under": "_depth", "before": "_previous_deviations", "onset": "_onset", "open": "_open",
        "out": "_steps_out", "peak": ("_peak", tuple), "latched": "_rollback_reported", "said": "_reported",
        "gross": "_gross",
    }  # fmt: skip

    def __init__(self, config: DetectSection) -> None:
        self._config = config
        self._baseline = Baseline(config.warmup_steps)
        # If noise is multiplicative (a loss near zero), only its logarithm has an even scale: both baselines must agree.
        self._log_baseline = Baseline(config.warmup_steps)
        self._positive = True
        # The largest the slack can be. If a skip needs more than that, one limit proves that there is no finding.
        largest_slack = (_SLACK + _AUTOCORRELATION_SLACK * 0.65**2) * config.loss_z_rollback / _UNIT
        self._skips_above_slack = config.loss_z >= largest_slack and config.loss_rise >= config.loss_rise_rollback
        self._initial_level: float | None = None
        """about the level of the first losses: a rise that is small against it does not count"""
        self._score = 0.0
        self._onset = 0
        """the step at which the score left zero"""
        self._previous_deviations = 0.0
        self._depth = 0.0
        """how far below the baseline losses have lately been, in deviations"""
        self._open = False
        self._steps_out = 0
        self._peak = (0.0, 0.0)
        self._rollback_reported = False
        self._reported = False
        self._gross: float | None = None

    def _high_limit(self) -> float:
        """Return the loss above which a single step is reported."""
        if self._baseline.ready:
            return self._limit(self._config.loss_z, self._config.loss_rise)
        return math.inf if self._gross is None else self._gross

    def _limit(self, z: float, share: float, ahead: int = 1) -> float:
        """Return the loss that is `z` deviations and a share `share` above both baselines."""
        baseline, log_baseline = self._baseline, self._log_baseline
        expected = baseline.next_expected if ahead == 1 else baseline.expected(ahead)
        smallest_rise = self._smallest_rise(share, expected)
        distance = baseline.threshold_distance(z)
        log_distance = log_baseline.threshold_distance(z) if self._positive and log_baseline.ready else None
        limit = expected + max(distance, smallest_rise)
        if log_distance is not None:
            rise = min(_LARGEST_LOG_RISE, _LOG_SHARE * log_distance)
            log_expected = log_baseline.next_expected if ahead == 1 else log_baseline.expected(ahead)
            limit = max(limit, math.exp(min(700.0, log_expected + rise)))
        return limit

    def _smallest_rise(self, share: float, expected: float) -> float:
        return max(share * abs(expected), self._config.loss_rise_initial * abs(self._initial_level or 0.0))

    def _deviations(self, loss: float, ahead: int = 1) -> float:
        """Return how far a loss is above the baseline, scaled so that `loss_z_rollback` deviations are `_UNIT`."""
        baseline, log_baseline = self._baseline, self._log_baseline
        expected = baseline.next_expected if ahead == 1 else baseline.expected(ahead)
        rise = loss - expected
        if loss == 0.0 or rise < self._smallest_rise(self._config.loss_rise_rollback, expected):
            return 0.0
        z = rise / baseline.threshold_distance(1.0)
        if self._positive and log_baseline.ready and loss > 0.0:
            unit = min(_LARGEST_LOG_RISE / _UNIT, _LOG_SHARE * log_baseline.threshold_distance(1.0))
            z = min(z, (math.log(loss) - log_baseline.expected(ahead)) / unit)
        return z / max(1.0, self._depth / _WIDE_DEPTH) * _UNIT / self._config.loss_z_rollback

    def _score_gain(self, deviations: float) -> float:
        """Return what a loss adds to the score. Correlated noise rises slowly, so a jump from the last loss adds more."""
        correlation, previous, slack = self._baseline.autocorrelation, self._previous_deviations, self._slack()
        if deviations == 0.0 and previous == 0.0:  # a shortcut: the lines below give the same
            return -slack
        self._previous_deviations = deviations if deviations > slack else 0.0
        jump = (deviations - correlation * previous) / math.sqrt(1.0 - 0.9 * correlation * correlation)
        return deviations - slack + min(_LARGEST_JUMP_GAIN, max(0.0, 0.6 * (jump - _JUMP)))

    def _slack(self) -> float:
        """Return the deviations that count as chance: more of them if neighbouring losses correlate."""
        return _SLACK + _AUTOCORRELATION_SLACK * max(0.0, self._baseline.autocorrelation - 0.35) ** 2

    def _harmless_deviations(self) -> float:
        """Return the deviations up to which a loss adds nothing to a score of zero, including the gain for a jump."""
        correlation, slack = self._baseline.autocorrelation, self._slack()
        unit = math.sqrt(1.0 - 0.9 * correlation * correlation)
        harmless = slack if slack <= _JUMP * unit else (slack + 0.6 * _JUMP) / (1.0 + 0.6 / unit)
        return harmless * (1.0 - 1e-9)

    def _learn(self, signal: Signal) -> None:
        loss = signal.loss
        if signal.flags or loss == 0.0:  # the gate vetoed it: its loss need not belong to the baseline
            return
        self._baseline.update(loss)
        self._positive = self._positive and loss > 0
        if self._positive:
            self._log_baseline.update(math.log(loss))
        if self._initial_level is None and self._baseline.ready:
            self._initial_level = self._baseline.level

    def observe(self, signal: Signal) -> Finding | None:
        loss, flags, baseline = signal.loss, signal.flags, self._baseline
        if not math.isfinite(loss) or signal.overflow:
            return None
        if self._gross is None and not baseline.ready:
            self._learn(signal)
            return None
        limit = self._high_limit()
        high = loss > limit or bool(flags & _LOSS_HIGH)
        if not baseline.ready:
            return self._observe_while_learning(signal, high, limit)
        self._depth *= _DEPTH_DECAY
        if loss != 0.0 and not flags:
            self._depth = max(self._depth, min(_LARGEST_DEPTH, (baseline.next_expected - loss) / baseline.scale))
        gain = self._score_gain(self._deviations(loss)) if not high else _LARGEST_GAIN
        if self._score == 0.0:
            self._onset = signal.step
        self._score = min(_LARGEST_SCORE, max(0.0, self._score + min(gain, _LARGEST_GAIN)))
        if high or self._score > _OPEN_SCORE:
            self._open = True
            if gain > 0:
                return self._observe_excursion(signal, high, limit)
        self._learn(signal)
        return self._close_excursion(signal) if self._open and self._score == 0.0 else None

    def absorb_normal(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the leading losses that `observe` would find nothing wrong with, and return their number.

        Uses the baselines, limits and score of `observe`, a block at a time. Returns 0 if `observe` must judge the next.
        """
        baseline, config = self._baseline, self._config
        if self._open or not baseline.ready or not losses:
            return 0
        count = min(len(losses), baseline.values_until_update())
        if self._positive:
            count = min(count, self._log_baseline.values_until_update())
        block = losses[:count]
        limit = self._limit(
            self._harmless_deviations() * config.loss_z_rollback / _UNIT, config.loss_rise_rollback, count
        )
        if not self._skips_above_slack:
            limit = min(limit, self._limit(config.loss_z, config.loss_rise, count))
        lowest = min(block)
        if (
            not -LARGEST < lowest <= max(block) < LARGEST
            or (self._positive and not lowest > 0.0)
            or (lowest <= 0.0 and 0.0 in block)
        ):
            return 0
        if self._score > 0.0 or max(block) > limit:
            count = self._absorb_scored(block, steps, limit)
            block = block[:count]
            if not count:
                return 0
        else:
            self._previous_deviations = 0.0
            self._depth = baseline.track_depth(block, self._depth, _DEPTH_DECAY, _LARGEST_DEPTH)
        baseline.extend(block)
        if self._positive:
            self._log_baseline.extend([math.log(v) for v in block])
        return count

    def _absorb_scored(self, losses: Sequence[float], steps: Sequence[float], limit: float) -> int:
        """Add losses to the score until one would open an excursion; return the number before that one."""
        skip_limit = self._limit(self._config.loss_z, self._config.loss_rise, len(losses))
        for i, loss in enumerate(losses):
            z = self._baseline.z(loss, i + 1)
            depth = max(self._depth * _DEPTH_DECAY, min(_LARGEST_DEPTH, -z))
            if self._score == 0.0 and loss <= limit:
                self._previous_deviations, self._depth = 0.0, depth
                continue
            before = self._previous_deviations, self._depth
            self._depth = depth
            gain = self._score_gain(self._deviations(loss, i + 1))
            score = min(_LARGEST_SCORE, max(0.0, self._score + min(gain, _LARGEST_GAIN)))
            if loss > skip_limit or score > _OPEN_SCORE:
                self._previous_deviations, self._depth = before
                return i
            if self._score == 0.0:
                self._onset = int(steps[i])
            self._score = score
        return len(losses)

    def _observe_excursion(self, signal: Signal, high: bool, limit: float) -> Finding | None:
        self._steps_out += 1
        if self._steps_out == 1 or signal.loss > self._peak[1]:
            z = self._baseline.z(signal.loss)
            if self._positive and self._log_baseline.ready and signal.loss > 0:
                z = min(z, self._log_baseline.z(math.log(signal.loss)))
            self._peak = (z, signal.loss)
        if self._steps_out >= _PERSISTENT_STEPS and not signal.flags:
            return self._report_persistent(signal, limit)
        if not self._rollback_reported and self._score > _ROLLBACK_SCORE:
            self._rollback_reported = True
            return self._finding(signal, Severity.ROLLBACK, self._onset, limit, "several losses are")
        if high:
            return self._finding(signal, Severity.SKIP, self._onset, limit, "the loss is")
        return None

    def _close_excursion(self, signal: Signal) -> Finding | None:
        onset, steps_out, (z, peak) = self._onset, self._steps_out, self._peak
        was_reported = self._reported or self._rollback_reported
        self._reset_excursion()
        if 0 < steps_out <= _SINGLE_STEPS:
            self._baseline.add_outlier(z)
            self._log_baseline.add_outlier(z)
        if not was_reported:
            return None
        message = (
            f"the loss is back at its baseline {signal.step - onset} steps after step {onset}; its peak was {peak:.6g}"
        )
        evidence = {"outcome": "recovered", "peak": peak, "steps_out": steps_out, "loss": signal.loss}
        return self.report(signal, Kind.LOSS_SPIKE, Severity.NOTE, onset, message, evidence, new=False)

    def _report_persistent(self, signal: Signal, limit: float) -> Finding:
        onset, steps_out, peak = self._onset, self._steps_out, self._peak[1]
        expected = self._baseline.next_expected
        self._accept_level(signal.loss)
        message = f"the loss has not recovered in {steps_out} steps since step {onset}: accepted as the new level"
        evidence = {"outcome": "persistent", "peak": peak, "steps_out": steps_out, "loss": signal.loss}
        evidence |= {"expected": expected, "limit": limit}
        return self.report(signal, Kind.LOSS_SPIKE, Severity.NOTE, onset, message, evidence, new=False)

    def _accept_level(self, loss: float) -> None:
        """Learn a baseline at this level; until then only a gross rise over it counts."""
        self.rebaseline()
        self._gross = loss + _GROSS_RATIO * abs(loss)

    def _observe_while_learning(self, signal: Signal, high: bool, limit: float) -> Finding | None:
        if not high:
            self._learn(signal)
            self._reported, self._steps_out = False, 0
            return None
        self._steps_out += 1
        if self._steps_out >= _PERSISTENT_STEPS and not signal.flags:
            self._accept_level(signal.loss)
            return None
        return self._finding(signal, Severity.SKIP, signal.step, limit, "after an expected shift the loss is")

    def _finding(self, signal: Signal, severity: Severity, onset: int, limit: float, what: str) -> Finding:
        baseline, new, self._reported = self._baseline, not self._reported, True
        return self.report(
            signal,
            Kind.LOSS_SPIKE,
            severity,
            onset,
            f"{what} far above the baseline: {signal.loss:.6g} against {baseline.next_expected:.6g}",
            {
                "loss": signal.loss,
                "expected": baseline.next_expected,
                "deviation": baseline.scale,
                "tail": baseline.tail,
                "z": baseline.z(signal.loss) if baseline.ready else None,
                "limit": limit,
                "score": self._score,
                "enough": _ROLLBACK_SCORE,
                "grad_norm": signal.grad_norm,
            },
            new=new,
        )

    def _reset_excursion(self) -> None:
        self._score, self._steps_out, self._open, self._rollback_reported, self._reported = 0.0, 0, False, False, False

    def rebaseline(self) -> None:
        if self._baseline.ready:
            expected = self._baseline.next_expected
            self._gross = expected + max(_GROSS_Z * self._baseline.scale, _GROSS_RATIO * abs(expected))
        # Before the first baseline is learned, learning takes as long as the first time.
        start = None if self._gross is None else min(_REBASELINE, self._config.warmup_steps)
        self._baseline.restart(start)
        self._log_baseline.restart(start)
        self._reset_excursion()
