"""A journal that an earlier version wrote is read with the names of this one, and means the same."""

from __future__ import annotations

import json

from holdfast.core.base.types import CutLR, TightenClip
from holdfast.core.checkpoints.fit import compare
from holdfast.core.checkpoints.recovery_history import Intervention, RecoveryHistory
from holdfast.core.record import facts
from holdfast.core.record.journal import read, with_current_names
from holdfast.core.record.quarantine import Quarantine

CUT = {"step": 40, "action": {"action": "cut_lr", "factor": 0.5, "ramp_steps": 9}, "incident": 1, "reason": "spike"}
CLIP = {"step": 60, "action": {"action": "tighten_clip", "max_norm": 0.1, "steps": 7}, "incident": 2, "reason": "own"}
WINDOW = {"epoch": 0, "first": 30, "batches": 20, "start": [0, 30]}
OLD = [
    {"event": "action", "action": "rollback", "turns": 0, "then": [CUT], "window": WINDOW, "restored": "memory"},
    {"event": "action", "action": "cut_lr", "turn": CUT, "part": True},
    {"event": "outcome", "status": "rolled_back"},
    {"event": "action", "action": "tighten_clip", "turn": CLIP},
    {"event": "facts", "facts": {"seed": 2}, "was": {"seed": 1}},
]
MADE = [
    Intervention(40, CutLR(0.5, 9), 1, "spike"),
    Intervention(60, TightenClip(0.1, 7), 2, "own"),
]


def history(events):
    rebuilt = RecoveryHistory()
    rebuilt.rebuild(map(with_current_names, events))
    return rebuilt.interventions


def test_every_old_name_becomes_the_new_one(tmp_path):
    file = tmp_path / "journal.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in OLD))
    assert read(file).events == [
        {
            "event": "action",
            "action": "rollback",
            "interventions_kept": 0,
            "interventions": [CUT],
            "skip_window": WINDOW,
            "restored_from": "memory",
        },
        {"event": "action", "action": "cut_lr", "intervention": CUT, "part_of_rollback": True},
        {"event": "outcome", "status": "rolled_back"},
        {"event": "action", "action": "tighten_clip", "intervention": CLIP},
        {"event": "facts", "facts": {"seed": 2}, "previous": {"seed": 1}},
    ]


def test_interventions_of_an_old_journal_are_repeated():
    assert history(OLD) == MADE
    assert history([*OLD, {"event": "resumed", "turns": 1, "load_path": True}]) == MADE[:1]
    assert history([*OLD, {"event": "begun_anew"}]) == []


def test_data_window_of_an_old_rollback_is_still_excluded():
    quarantine = Quarantine()
    quarantine.complete([with_current_names(OLD[0])])
    assert quarantine.ahead(0) == [(30, 20)]


def test_suspects_of_an_old_journal_are_renamed_in_actions_and_in_findings():
    suspect = {"rank": 1, "part": 2, "part_data": [0, 4, 8], "broken": [5]}
    renamed = {"rank": 1, "micro_batch": 2, "micro_batch_data": [0, 4, 8], "nonfinite_samples": [5]}
    action = with_current_names({"event": "action", "action": "skip", "suspects": [suspect]})
    finding = with_current_names({"event": "finding", "evidence": {"origin": {"suspects": [suspect]}}})
    assert action["suspects"] == [renamed]
    assert finding["evidence"]["origin"]["suspects"] == [renamed]


def test_configuration_of_an_old_process_has_the_keys_of_this_version(tmp_path):
    old = {"event": "restart", "environment": {"config": {"checkpoint": {"keep_powers": True}}, "seed": 1}}
    new = {"config": {"checkpoint": {"keep_powers_of_two": True}}, "seed": 1}
    assert with_current_names(old)["environment"] == new
    (tmp_path / "run.json").write_text(json.dumps(old["environment"]))
    assert facts.read_run_json(tmp_path / "run.json") == new
    assert compare(old["environment"], new) == []


def test_names_of_this_version_and_strange_events_stay_as_they_are():
    for event in ({"event": "checkpoint", "step": 1}, {"event": ["list"]}, {}, {"event": "action", "evidence": 3}):
        assert with_current_names(dict(event)) == event
