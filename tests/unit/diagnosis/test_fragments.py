"""A few records: a leap counts with a second signal, and only then. No cause is named."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import table

from holdfast.diagnosis.diagnose import diagnose

BLOOM = [2.20, 2.22, 2.60, 2.24, 2.35, 5.10]


def kinds(**columns):
    facts = columns.pop("facts", None)
    return [verdict.kind for verdict in diagnose(table(facts=facts, **columns)).verdicts]


def test_a_leap_with_a_tenfold_gradient_is_an_incident_without_a_cause():
    report = diagnose(table(loss=BLOOM, grad_norm=[0.24, 0.25, 0.95, 2.4, 145, 960]))
    (verdict,) = report.verdicts
    assert (verdict.kind, verdict.step_start, verdict.cause) == ("spike", 5, "not established")
    assert "gradient norm" in verdict.evidence[0]


def test_the_same_leap_alone_is_no_incident():
    assert kinds(loss=BLOOM, grad_norm=[0.24, 0.25, 0.3, 0.24, 0.26, 0.3]) == []
    assert kinds(loss=BLOOM) == []


@pytest.mark.parametrize(
    ("loss", "extra", "kind"),
    [
        ([2.3, 2.2, 2.1, 3.4, 3.5, 3.4, 3.6], {}, "divergence"),
        ([2.3, 2.2, 2.1, 3.4, 4.5, 6.6], {}, "divergence"),
        ([2.3, 2.2, 2.1, 3.4, 2.2, 2.1], {"loss_scale": [4096, 4096, 4096, 512, 512, 512]}, "spike_recovered"),
        ([2.3, 2.2, 2.1, 11.2], {"facts": {"vocab_size": 50257}}, "spike"),
        ([2.1, 2.0, 1.9, 2.0, 2.2, 2.4, 2.6, 2.9], {}, "divergence"),
        ([2.1, 2.0, np.nan, np.nan], {}, "nan"),
    ],
    ids=["stays up", "climbs", "scale quartered", "above ln of the vocabulary", "climbs slowly", "nan"],
)
def test_each_second_signal_is_enough(loss, extra, kind):
    assert kinds(loss=loss, **extra) == [kind]


@pytest.mark.parametrize(
    "loss",
    [
        [10.9, 12.5, 9.8, 9.0, 8.5],
        [5.0, 4.5, 4.0, 3.6, 3.3, 3.1],
        [0.5, 0.9, 0.4, 1.1, 0.5, 0.8, 0.3, 1.0, 0.6],
        [-1.0, 2.0, -3.0, 4.0, 5.0],
        [0.0, 0.0, 0.0, 0.1],
    ],
    ids=["overshoot of the first update", "falls", "noisy", "negative", "zeros"],
)
def test_no_incident(loss):
    assert kinds(loss=loss) == []


def test_random_pieces_of_noise_give_an_incident_in_fewer_than_one_of_a_hundred():
    rng = np.random.default_rng(5)
    loud = sum(
        bool(kinds(loss=rng.uniform(1, 4) * np.exp(rng.normal(0, rng.choice([0.02, 0.1, 0.3]), rng.integers(5, 21)))))
        for _ in range(600)
    )
    assert loud < 6
