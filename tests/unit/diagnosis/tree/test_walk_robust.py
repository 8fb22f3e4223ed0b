"""For any log, every question answers and every walk ends at a leaf."""

from __future__ import annotations

import io
import json
import warnings

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from synthetic import episode, table

from holdfast.diagnosis.diagnose import diagnose, find_machine_episodes
from holdfast.diagnosis.find import episodes
from holdfast.diagnosis.model.episode import CURVE_KINDS, INCIDENT_KINDS
from holdfast.diagnosis.postmortem import build
from holdfast.diagnosis.tree import walk
from holdfast.diagnosis.tree.load import load_tree
from holdfast.reports import markdown, terminal
from marks import examples

NAMES = [
    "loss", "grad_norm", "lr", "loss_scale", "weight_norm", "seconds", "tokens_per_second", "memory_allocated",
    "memory_reserved", "batch_size", "epoch", "batch", "perplexity", "grad/layers.0", "grad/layers.3", "update_ratio",
    "data_time", "cpu", "gpu", "rank0_time", "rank1_time", "grad_accum", "input_nan", "attention_entropy",
]  # fmt: skip
ODD = [0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 1e25, 65504.0]
TEXTS = ["CUDA out of memory", "overflow! skipping step", "NCCL health check failed", "resuming from checkpoint", "["]


@st.composite
def logs(draw):
    n = draw(st.integers(0, 260))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns, present = {}, {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=10)):
        values = rng.choice([rng.normal(), 10.0 ** rng.integers(-12, 12)]) * np.abs(rng.normal(size=n)) ** rng.integers(
            0, 4
        )
        odd = rng.random(n) < rng.choice([0.0, 0.02, 0.5, 1.0])
        values[odd] = rng.choice(ODD, size=int(odd.sum()))
        columns[name] = values
        present[name] = rng.random(n) < rng.choice([1.0, 0.5, 0.01])
    made = table(**(columns or {"loss": np.zeros(n)}), step=np.cumsum(rng.choice([1, 1, 1, 10, -50], size=n)))
    made.present.update(present)
    made.evals = {
        name: type(made.series("loss"))(np.sort(rng.random(9)) * n, rng.choice(ODD + [2.0] * 20, size=9))
        for name in draw(st.lists(st.sampled_from(["eval_loss", "eval_accuracy", "ppl"]), unique=True))
    }
    events = [
        (draw(st.none() | st.integers(-5, 300)), "error", t) for t in draw(st.lists(st.sampled_from(TEXTS), max_size=3))
    ]
    made.events = [type(e)(*e) for e in table(events=events, loss=[1.0]).events]
    made.facts = draw(
        st.sampled_from([{}, {"precision": "fp16"}, {"config": {"dtype": None, "vocab_size": "x"}}, {"vocab_size": 0}])
    )
    return made


@settings(max_examples=examples(150))
@given(logs(), st.data())
def test_every_walk_ends_at_a_leaf(made, data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in walk.check_rules(load_tree(), made):
            assert found.confidence > 0
        made_here = find_machine_episodes(made, load_tree())
        if not len(made):
            assert made_here == []
            return
        first = data.draw(st.integers(0, len(made) - 1))
        last = data.draw(st.integers(first, len(made) - 1))
        for where in [episode(made, data.draw(st.sampled_from(sorted(INCIDENT_KINDS))), first, last), *made_here]:
            where.evidence = {"before": 1.0, "after": 2.0, "ratio": 2.0} | where.evidence
            found = walk.walk(load_tree(), made, where)
            assert found.id in load_tree().leaf
            assert 0.0 < found.confidence <= 1.0


@settings(max_examples=40)
@given(logs(), st.data())
def test_every_log_can_be_reported_in_every_form(made, data):
    where = []
    if len(made):
        first = data.draw(st.integers(0, len(made) - 1))
        where = [episode(made, data.draw(st.sampled_from(sorted(CURVE_KINDS))), first, len(made) - 1)]
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr(episodes, "find", lambda table: (where, []))
        report = diagnose(made)
        json.dumps(msgspec.to_builtins(report))
        told = build(made, report)
        console = Console(file=io.StringIO(), width=80)
        terminal.show(console, made, report)
        terminal.show_postmortem(console, told)
        assert "16. Raw evidence" in console.file.getvalue()
        assert "## 16. Raw evidence" in markdown.render_postmortem(told)


@pytest.mark.parametrize("kind", sorted(INCIDENT_KINDS))
def test_one_record_is_enough_to_walk(kind):
    made = table(loss=[1.0])
    assert walk.walk(load_tree(), made, episode(made, kind, 0, 0)).leaf.action
