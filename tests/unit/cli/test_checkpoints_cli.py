"""`holdfast checkpoints` on run directories made by real Guards, some of them then damaged."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import saved_runs

from holdfast.cli import checkpoint_list
from holdfast.core.base.config import template
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Fork, Lineage
from holdfast.core.checkpoints.manifest import Manifest, name_of
from holdfast.core.checkpoints.measured import measure
from holdfast.core.checkpoints.resume import Survey, resolve_resume_path
from holdfast.core.record import journal
from marks import slow

HOLD = """
import sys
from holdfast.core.record.rundir import RunDir
RunDir(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""
LEFT = ["step_00000060.b1", "step_00000050.b1"]
STRAIGHT = [f"step_{step:08d}" for step in (35, 30, 20, 10, 0)]


@pytest.fixture
def straight(made, tmp_path):
    return Path(shutil.copytree(made("straight"), tmp_path / "straight"))


@pytest.fixture
def forked(made, tmp_path):
    return Path(shutil.copytree(made("forked"), tmp_path / "forked"))


@pytest.fixture
def killed(made, tmp_path):
    return Path(shutil.copytree(made("killed"), tmp_path / "killed"))


def flip(path: Path, offset: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def at(run: Path, name: str) -> Path:
    return run / "checkpoints" / name


def names(run: Path) -> list[str]:
    return [e.name for e in reversed(Folder(run / "checkpoints").entries())]


def content(run: Path) -> dict[str, bytes]:
    """Every file but the lock, which says who held it last."""
    return {str(p): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


def pruned(run: Path) -> list[str]:
    events = journal.read(run / "journal.jsonl").events
    return [e["name"] for e in events if e.get("status") == "pruned" and e.get("by") == "holdfast checkpoints"]


# ---- ls


def test_list_is_newest_first_with_health_and_an_arrow_at_the_resume_choice(holdfast, straight):
    answer = holdfast("checkpoints", "ls", straight)
    assert answer.status == 0
    lines = [line for line in answer.out.splitlines() if "step_0" in line]
    assert [next(w for w in line.split() if w.startswith("step_")) for line in lines[:5]] == STRAIGHT
    assert lines[0].startswith("→") and "… candidate" in lines[0] and "end" in lines[0]
    assert "✓ good" in lines[1] and "2 healthy steps have followed it" in lines[1]
    assert "→ a resume would use step_00000035" in answer.out
    assert "●" not in answer.out, "one branch needs no tree"


def test_abandoned_branch_is_listed_above_its_fork_point(holdfast, forked):
    answer = holdfast("checkpoints", "ls", forked)
    lines = answer.out.splitlines()
    where = {name: next(n for n, line in enumerate(lines) if name in line) for name in (*LEFT, "step_00000040.b1")}
    left = next(n for n, line in enumerate(lines) if "├─╯ abandoned at step 40" in line)
    assert where["step_00000060.b1"] < where["step_00000050.b1"] < left < where["step_00000040.b1"]
    for name in LEFT:
        assert "│ ○" in lines[where[name]] and "⊘ quarantined" in lines[where[name]]
    assert lines[where["step_00000040.b1"]].startswith("→ ●")
    below = answer.out.partition("passed over, newest first")[2]
    assert "step_00000060.b1: quarantined: left by the rollback to step 40" in below


def test_candidate_is_passed_over_with_the_reason(holdfast, tmp_path):
    saved_runs.train(tmp_path / "a", 21, at_end=False)
    answer = holdfast("checkpoints", "ls", tmp_path / "a")
    assert "→ a resume would use step_00000010 (good: 2 healthy steps have followed it)" in answer.out
    assert "step_00000020: candidate: too few healthy steps have followed it" in answer.out


def test_tree_of_branches_abandoned_at_several_steps(tmp_path):
    """Branch 1 began at 20 and was left at 30 for 2, which was left at 20 for 3, the run's own."""
    courses = [(0, 10), (0, 20), (1, 30), (1, 40), (2, 30), (2, 50), (3, 20), (3, 30), (9, 60)]
    lineages = {
        0: ((0, 0),),
        1: ((0, 0), (1, 20)),
        2: ((0, 0), (1, 20), (2, 30)),
        3: ((0, 0), (3, 20)),
    }

    def entry(branch: int, step: int) -> CheckpointEntry:
        forks = lineages.get(branch)
        name, lineage = name_of(step, branch), Lineage(tuple(Fork(*f) for f in forks or ((0, 0),)))
        manifest = Manifest(run="a", step=step, lineage=lineage, reason="scheduled", time=0.0) if forks else None
        return CheckpointEntry(
            name, tmp_path / name, manifest, "", Health.GOOD, "", None if forks else "manifest.json is missing"
        )

    entries = [entry(*course) for course in courses]
    lineage = Lineage((Fork(0, 0), Fork(3, 20)))
    found = checkpoint_list.tree_rows(Survey(entries, "a", lineage, None, [], None))
    assert [(row.graph, row.entry.name if row.entry else row.note) for row in found] == [
        ("│ ○", "step_00000060.b9"),
        ("├─╯", "abandoned at step 60"),
        ("●", "step_00000030.b3"),
        ("●", "step_00000020.b3"),
        ("│ ○", "step_00000050.b2"),
        ("│ ○", "step_00000040.b1"),
        ("│ ○", "step_00000030.b2"),
        ("│ ○", "step_00000030.b1"),
        ("├─╯", "abandoned at step 20"),
        ("●", "step_00000020"),
        ("●", "step_00000010"),
    ]


@pytest.mark.parametrize("columns", [60, 200, *slow(80, 100, 120)])
def test_table_fits_the_terminal(installed, forked, columns):
    answer = installed("checkpoints", "ls", forked, env={"COLUMNS": str(columns), "PYTHONUTF8": "1"})
    table = answer.out.partition("\n\n")[0].splitlines()
    assert all(len(line) <= columns for line in table)
    if columns >= 80:
        assert [name for name in names(forked) if not any(name in line for line in table)] == []
    if 80 <= columns < 110:  # wider tables also say why, on more lines if need be
        assert [line for line in table[1:] if "step" not in line] == [], "a row is on one line"


def test_run_killed_in_a_rollback_lists_the_abandoned_branch_as_quarantined(holdfast, killed):
    assert all(e.health == "good" for e in Folder(killed / "checkpoints").entries() if e.step != 35)
    answer = holdfast("checkpoints", "ls", killed)
    assert "→ a resume would use step_00000040.b1" in answer.out
    assert "step_00000060.b1: quarantined: the journal says that the run left its branch" in answer.out


@pytest.mark.parametrize("columns", ["80", "120"])
def test_damaged_checkpoints_are_listed_with_the_damage(holdfast, straight, monkeypatch, columns):
    flip(at(straight, "step_00000030") / "manifest.json")
    (at(straight, "step_00000010") / "health.json").unlink()
    monkeypatch.setenv("COLUMNS", columns)
    answer = holdfast("checkpoints", "ls", straight)
    assert answer.status == 0
    assert answer.out.count("✗ damaged") == 2
    assert "manifest.json" in " ".join(answer.out.split())
    assert "health.json is missing" in " ".join(answer.out.split())


def test_run_without_a_usable_checkpoint_is_listed_as_refusing_to_start(holdfast, straight):
    for name in STRAIGHT:
        (at(straight, name) / "manifest.json").write_text("{}")
    answer = holdfast("checkpoints", "ls", straight)
    assert answer.status == 0
    assert "the run would refuse to start" in answer.out
    assert answer.out.count("✗ damaged") == 5


def test_list_as_json_has_every_field_and_is_strict_json(holdfast, forked):
    flip(at(forked, "step_00000010") / "manifest.json")
    answer = holdfast("checkpoints", "ls", forked, "--json").json
    json.dumps(answer, allow_nan=False)
    assert answer["schema"] == "holdfast.checkpoints/1" and answer["ok"] is True
    assert answer["path"] == str(forked)
    assert answer["lineage"] == [[0, 0], [1, 35], [2, 40]]
    assert answer["resume"]["name"] == "step_00000040.b1"
    assert answer["resume"]["path"] == str(at(forked, "step_00000040.b1"))
    assert [p["name"] for p in answer["resume"]["passed_over"]] == LEFT
    by_name = {c["name"]: c for c in answer["checkpoints"]}
    assert list(by_name) == names(forked)
    good = by_name["step_00000040.b1"]
    assert (good["step"], good["branch"], good["health"], good["on_lineage"]) == (40, 1, "good", True)
    assert (good["ranks"], good["reason"], good["damage"], good["handover"]) == (1, "scheduled", None, False)
    assert good["run"] == answer["run"] and 0 <= good["age_seconds"] < 3600
    assert good["bytes"] == sum(p.stat().st_size for p in at(forked, good["name"]).iterdir())
    assert by_name["step_00000060.b1"]["on_lineage"] is False
    damaged = by_name["step_00000010"]
    assert (damaged["health"], damaged["time"], damaged["ranks"]) == ("bad", None, None)
    assert "manifest.json" in damaged["damage"]
    assert answer["bytes"] == sum(c["bytes"] for c in answer["checkpoints"])


def test_checkpoint_of_another_run_is_listed_but_not_used(holdfast, straight, forked):
    shutil.copytree(at(forked, "step_00000060.b1"), at(straight, "step_00000060.b1"))
    answer = holdfast("checkpoints", "ls", straight)
    assert "→ a resume would use step_00000035" in answer.out
    assert "it belongs to run" in answer.out
    by_name = {c["name"]: c for c in holdfast("checkpoints", "ls", straight, "--json").json["checkpoints"]}
    assert by_name["step_00000060.b1"]["on_lineage"] is False


def test_unfinished_checkpoint_is_named(holdfast, straight):
    at(straight, ".tmp-step_00000040").mkdir()
    assert ".tmp-step_00000040: unfinished" in holdfast("checkpoints", "ls", straight).out
    assert holdfast("checkpoints", "ls", straight, "--json").json["in_the_making"] == [".tmp-step_00000040"]


def test_setting_resume_never_is_reported(holdfast, tmp_path):
    saved_runs.train(tmp_path / "a", 12, resume="never")
    assert 'resume = "never"' in holdfast("checkpoints", "ls", tmp_path / "a").out


# ---- verify


def test_whole_run_verifies(holdfast, straight):
    before = content(straight)
    answer = holdfast("checkpoints", "verify", straight)
    assert answer.status == 0
    assert answer.out.count("ok") == 5 and "5 checkpoints" in answer.out and "all intact" in answer.out
    assert answer.err == ""
    assert content(straight) == before


@pytest.mark.parametrize(
    ("file", "how", "expected"),
    [
        ("rank_00000.bin", flip, "rank_00000.bin is not what was saved: its checksum is crc32:"),
        ("rank_00000.json", flip, "rank_00000.json is not what was saved: its checksum is"),
        ("rank_00000.bin", lambda p: os.truncate(p, 1000), "rank_00000.bin has 1,000 bytes, not"),
        ("rank_00000.json", Path.unlink, "rank_00000.json is missing"),
        ("manifest.json", flip, "manifest.json"),
        ("health.json", Path.unlink, "health.json is missing"),
        ("more.bin", Path.touch, "more.bin is not part of the checkpoint"),
    ],
)
def test_damage_is_reported_and_nothing_is_changed(holdfast, straight, file, how, expected):
    how(at(straight, "step_00000020") / file)
    before = content(straight)
    answer = holdfast("checkpoints", "verify", straight)
    assert answer.status == 1
    line = next(line for line in answer.out.splitlines() if "step_00000020" in line)
    assert line.startswith("✗") and expected in line
    assert "1 of 5 checkpoints damaged" in answer.out
    assert content(straight) == before
    as_json = holdfast("checkpoints", "verify", straight, "--json")
    assert as_json.status == 1 and as_json.json["ok"] is False and as_json.json["damaged"] == 1
    wrong = {c["name"]: c["wrong"] for c in as_json.json["checkpoints"] if not c["ok"]}
    assert list(wrong) == ["step_00000020"] and expected in wrong["step_00000020"]


def test_one_checkpoint_by_its_path_or_by_a_link_to_it(holdfast, straight, tmp_path):
    flip(at(straight, "step_00000020") / "rank_00000.bin")
    (tmp_path / "link").symlink_to(at(straight, "step_00000030"))
    assert holdfast("checkpoints", "verify", at(straight, "step_00000010"), tmp_path / "link").status == 0
    assert holdfast("checkpoints", "verify", at(straight, "step_00000020")).status == 1


def test_several_runs_are_listed_by_path_and_read_once(holdfast, straight, forked):
    answer = holdfast("checkpoints", "verify", straight, forked, at(straight, "step_00000010"), "--json").json
    paths = [c["path"] for c in answer["checkpoints"]]
    assert len(paths) == len(set(paths)) == 5 + 6
    assert answer["not_read"] == 2
    assert str(forked) in holdfast("checkpoints", "verify", straight, forked).out


def test_bad_and_quarantined_checkpoints_are_verified_only_with_all(holdfast, forked):
    flip(at(forked, "step_00000060.b1") / "rank_00000.bin")
    answer = holdfast("checkpoints", "verify", forked)
    assert answer.status == 0 and "skipped 2 others marked bad or quarantined: see --all" in answer.out
    assert holdfast("checkpoints", "verify", forked, "--all").status == 1


def test_mark_records_damage_as_bad_in_health_and_journal(holdfast, straight):
    flip(at(straight, "step_00000035") / "rank_00000.bin")
    answer = holdfast("checkpoints", "verify", straight, "--mark")
    assert answer.status == 1 and "(marked bad)" in answer.out
    marked = Folder(straight / "checkpoints").entry("step_00000035")
    assert marked.health == "bad" and "rank_00000.bin" in marked.why
    last = journal.read(straight / "journal.jsonl").events[-1]
    assert (last["event"], last["status"], last["name"]) == ("checkpoint", "bad", "step_00000035")
    assert holdfast("checkpoints", "verify", straight).status == 0, "a bad checkpoint is not read again"
    assert "→ a resume would use step_00000030" in holdfast("checkpoints", "ls", straight).out


def test_mark_is_refused_while_the_run_is_alive_and_verify_is_not(holdfast, straight, start):
    flip(at(straight, "step_00000020") / "rank_00000.bin")
    assert start(HOLD, straight).line() == "held"
    before = content(straight)
    refused = holdfast("checkpoints", "verify", straight, "--mark")
    assert refused.status == 1 and "in use by process" in refused.err and refused.out == ""
    assert holdfast("checkpoints", "verify", straight).status == 1
    assert holdfast("checkpoints", "ls", straight).status == 0
    assert holdfast("checkpoints", "resume-path", straight).status == 0
    assert content(straight) == before


def test_copy_outside_a_run_is_verified_and_not_marked(holdfast, straight, tmp_path):
    copy = shutil.copytree(at(straight, "step_00000020"), tmp_path / "kept" / "step_00000020")
    assert holdfast("checkpoints", "verify", copy).status == 0
    refused = holdfast("checkpoints", "verify", copy, "--mark")
    assert refused.status == 1 and "without --mark" in refused.err


# ---- prune


def test_dry_run_lists_removals_with_reasons_and_removes_nothing(holdfast, forked):
    before = content(forked)
    answer = holdfast("checkpoints", "prune", forked, "--dry-run", "--keep-last", "2")
    assert answer.status == 0
    text = " ".join(answer.out.split())
    assert "step_00000060.b1 quarantined" in text
    assert "the run went back to step 40 and left this branch there" in text
    assert "good, but older than the newest 2 that are" in text
    assert "would remove" in text and "rules: --keep-last 2 --keep-every 0 --no-powers --keep-bad 1" in text
    assert content(forked) == before


def test_prune_journals_and_removes_what_the_dry_run_listed_and_the_run_resumes(holdfast, forked):
    as_json = holdfast("checkpoints", "prune", forked, "--dry-run", "--keep-last", "2", "--json").json
    answer = holdfast("checkpoints", "prune", forked, "--yes", "--keep-last", "2")
    assert answer.status == 0 and "removed 6 checkpoints" in answer.out
    assert pruned(forked) == [g["name"] for g in as_json["going"]]
    assert names(forked) == ["step_00000040.b1", "step_00000035"]
    assert as_json["kept"] == 2 and as_json["bytes"] > 0
    assert "nothing to remove" in holdfast("checkpoints", "prune", forked, "--yes", "--keep-last", "2").out
    saved_runs.train(forked, 50)
    assert next(e for e in reversed(journal.read(forked / "journal.jsonl").events) if e["event"] == "resumed")[
        "checkpoint"
    ] == "step_00000040.b1"  # fmt: skip


def test_rules_default_to_those_of_the_run(holdfast, tmp_path):
    saved_runs.train(tmp_path / "a", 45)
    saved_runs.train(
        tmp_path / "a", 45, keep_last=2, keep_every=20, keep_powers_of_two=True, keep_bad=0
    )  # done: only the record
    answer = holdfast("checkpoints", "prune", tmp_path / "a", "--dry-run", "--json").json
    assert answer["rules"] == {"keep_last": 2, "keep_every": 20, "powers": True, "keep_bad": 0}
    options = ["--keep-last", "1", "--keep-every", "0", "--no-powers", "--keep-bad", "3"]
    answer = holdfast("checkpoints", "prune", tmp_path / "a", "--dry-run", "--json", *options).json
    assert answer["rules"] == {"keep_last": 1, "keep_every": 0, "powers": False, "keep_bad": 3}


def test_rules_of_a_run_without_a_record_are_the_defaults(holdfast, straight):
    (straight / "journal.jsonl").unlink()
    run = json.loads((straight / "run.json").read_text())
    run["config"]["checkpoint"] = {"keep_last": "many", "keep_every": -1, "keep_powers_of_two": 1, "keep_bad": None}
    (straight / "run.json").write_text(json.dumps(run))
    answer = holdfast("checkpoints", "prune", straight, "--dry-run", "--json").json
    assert answer["rules"] == {"keep_last": 3, "keep_every": 0, "powers": False, "keep_bad": 1}


def test_prune_without_a_terminal_needs_yes(holdfast, forked):
    before = content(forked)
    for extra in ([], ["--json"]):
        answer = holdfast("checkpoints", "prune", forked, *extra)
        assert answer.status == 2
    assert "--yes" in holdfast("checkpoints", "prune", forked).out
    assert content(forked) == before


def test_damaged_newest_good_checkpoint_does_not_count_and_the_previous_one_is_kept(holdfast, straight):
    flip(at(straight, "step_00000030") / "rank_00000.bin")
    answer = holdfast("checkpoints", "prune", straight, "--keep-last", "1", "--yes")
    assert answer.status == 0
    assert "step_00000030 is marked good but damaged" in answer.out
    assert names(straight) == ["step_00000035", "step_00000030", "step_00000020"]
    assert resolve_resume_path(straight) == at(straight, "step_00000035")


def test_last_good_checkpoint_is_always_kept(holdfast, straight):
    shutil.rmtree(at(straight, "step_00000035"))
    options = ["--keep-last", "1", "--keep-every", "0", "--no-powers", "--keep-bad", "0", "--yes"]
    assert holdfast("checkpoints", "prune", straight, *options).status == 0
    assert names(straight) == ["step_00000030"]
    assert holdfast("checkpoints", "prune", straight, *options).status == 0
    assert names(straight) == ["step_00000030"]


def test_branch_abandoned_by_a_killed_run_is_pruned(holdfast, killed):
    assert holdfast("checkpoints", "prune", killed, "--yes").status == 0
    assert pruned(killed) == ["step_00000050.b1", "step_00000060.b1"]


def test_damaged_checkpoint_of_an_unknown_branch_is_left_alone(holdfast, straight):
    shutil.copytree(at(straight, "step_00000030"), at(straight, "step_00000050.b7"))
    answer = holdfast("checkpoints", "prune", straight, "--keep-last", "1", "--yes")
    assert answer.status == 0 and "step_00000050.b7 is damaged" in answer.out
    assert "step_00000050.b7" in names(straight)


def test_prune_is_refused_while_the_run_is_alive_and_a_dry_run_is_not(holdfast, forked, start):
    assert start(HOLD, forked).line() == "held"
    refused = holdfast("checkpoints", "prune", forked, "--yes")
    assert refused.status == 1 and "in use by process" in refused.err
    assert holdfast("checkpoints", "prune", forked, "--dry-run").status == 0
    assert len(names(forked)) == 8


def test_failed_removal_is_reported_and_the_others_are_removed(holdfast, forked, monkeypatch):
    rename = os.rename

    def failing(source, target, **options):
        if "step_00000050.b1" in str(source):
            raise PermissionError(1, "Operation not permitted")
        return rename(source, target, **options)

    monkeypatch.setattr(os, "rename", failing)
    answer = holdfast("checkpoints", "prune", forked, "--yes")
    assert answer.status == 1
    assert "step_00000050.b1 was not removed" in answer.out and "Operation not permitted" in answer.out
    assert "step_00000050.b1" in names(forked) and "step_00000060.b1" not in names(forked)


def test_prune_event_does_not_extend_the_running_time(tmp_path):
    record = [("run_begin", 0.0, {}), ("note", 100.0, {}), ("checkpoint", 9000.0, {"by": "holdfast checkpoints"})]
    record += [("restart", 9010.0, {}), ("note", 9110.0, {})]
    lines = [json.dumps({"event": event, "time": time, **more}) for event, time, more in record]
    (tmp_path / "journal.jsonl").write_text("\n".join(lines) + "\n")
    assert measure(str(tmp_path)).running == 200.0


# ---- resume-path


def test_resume_path_is_alone_on_stdout_and_the_reasons_on_stderr(holdfast, forked):
    answer = holdfast("checkpoints", "resume-path", forked)
    assert (answer.status, answer.out) == (0, f"{at(forked, 'step_00000040.b1')}\n")
    assert "passed over" in answer.err and "step_00000060.b1: quarantined" in answer.err


def test_resume_path_of_a_run_killed_in_a_rollback_is_what_its_next_start_uses(holdfast, killed):
    found = holdfast("checkpoints", "resume-path", killed).out.strip()
    assert Path(found).name == "step_00000040.b1"
    saved_runs.train(killed, 50)
    resumed = [e for e in journal.read(killed / "journal.jsonl").events if e["event"] == "resumed"]
    assert resumed[-1]["checkpoint"] == Path(found).name


def test_run_started_over_after_a_resume_resumes_from_its_new_checkpoints(holdfast, straight):
    saved_runs.train(straight, 45)
    saved_runs.train(straight, 25, resume="never")
    found = holdfast("checkpoints", "resume-path", straight).out.strip()
    assert Path(found).name == "step_00000025.b2"
    saved_runs.train(straight, 30)
    resumed = [e for e in journal.read(straight / "journal.jsonl").events if e["event"] == "resumed"]
    assert resumed[-1]["checkpoint"] == Path(found).name


def test_step_saved_twice_after_a_resume_keeps_later_checkpoints_usable(holdfast, straight):
    saved_runs.train(straight, 65, hooks=(saved_runs.SaveTwice(43),))
    found = holdfast("checkpoints", "resume-path", straight).out.strip()
    assert Path(found).name == "step_00000065.b2"
    saved_runs.train(straight, 70)
    resumed = [e for e in journal.read(straight / "journal.jsonl").events if e["event"] == "resumed"]
    assert resumed[-1]["checkpoint"] == Path(found).name


def test_resume_path_reads_every_byte_without_no_verify(holdfast, straight):
    flip(at(straight, "step_00000035") / "rank_00000.bin")
    answer = holdfast("checkpoints", "resume-path", straight)
    assert answer.out.strip().endswith("step_00000030") and "rank_00000.bin is not what was saved" in answer.err
    assert holdfast("checkpoints", "resume-path", straight, "--no-verify").out.strip().endswith("step_00000035")


def test_resume_path_with_load_path_names_the_checkpoint_it_overrides(holdfast, straight, forked):
    answer = holdfast("checkpoints", "resume-path", straight, "--load-path", forked)
    assert answer.out.strip() == str(at(forked, "step_00000040.b1"))
    assert f"would use {at(straight, 'step_00000035')}" in answer.err
    wrong = holdfast("checkpoints", "resume-path", straight, "--load-path", straight / "none")
    assert wrong.status == 1 and wrong.out == "" and "no such folder" in wrong.err


def test_relative_run_gives_an_absolute_path(holdfast, straight, monkeypatch):
    monkeypatch.chdir(straight.parent)
    assert holdfast("checkpoints", "resume-path", "straight").out.strip() == str(at(straight, "step_00000035"))


@pytest.mark.parametrize("kind", ["not there", "empty", "no checkpoints"])
def test_run_with_nothing_to_resume_from_is_status_3(holdfast, tmp_path, kind):
    run = tmp_path / "a"
    if kind != "not there":
        run.mkdir()
    if kind == "no checkpoints":
        saved_runs.train(run, 5, enabled=False)
    answer = holdfast("checkpoints", "resume-path", run)
    assert (answer.status, answer.out) == (3, "") and "starts from the beginning" in answer.err
    as_json = holdfast("checkpoints", "resume-path", run, "--json")
    assert (as_json.status, as_json.json["ok"], as_json.json["path"]) == (3, True, None)


def test_run_without_a_usable_checkpoint_is_an_error(holdfast, straight):
    for name in STRAIGHT:
        flip(at(straight, name) / "rank_00000.bin")
    answer = holdfast("checkpoints", "resume-path", straight, "--json")
    assert answer.status == 1 and answer.json["ok"] is False
    assert "none of 5 checkpoints is usable" in answer.json["errors"][0]


def test_logger_is_restored_afterwards(holdfast, straight):
    log = logging.getLogger("holdfast")
    before = (log.level, log.propagate, list(log.handlers))
    holdfast("checkpoints", "resume-path", straight)
    assert (log.level, log.propagate, list(log.handlers)) == before


# ---- wrong input, all commands


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("none", "no such folder"),
        ("file", "is a file"),
        ("other", "is not a run directory: it has no checkpoints, no run.json and no journal.jsonl"),
        ("above", "did you mean"),
    ],
)
def test_path_that_is_no_run_directory_is_an_error_with_the_cure(holdfast, tmp_path, command, what, expected):
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "above" / "a").mkdir(parents=True)
    (tmp_path / "above" / "a" / "journal.jsonl").touch()
    for extra in ([], ["--json"]):
        answer = holdfast("checkpoints", command, tmp_path / what, *extra)
        assert answer.status == 1 and answer.err.startswith("error: ") and expected in answer.err
        if extra:
            assert answer.json == {"ok": False, "errors": [answer.err.removeprefix("error: ").rstrip("\n")]}
    assert not (tmp_path / "none").exists()


def test_folder_that_is_something_else_has_no_resume_path(holdfast, tmp_path):
    (tmp_path / "notes.txt").touch()
    answer = holdfast("checkpoints", "resume-path", tmp_path)
    assert answer.status == 1 and "is not a run directory" in answer.err


def test_checkpoint_given_as_run_names_its_run(holdfast, straight):
    answer = holdfast("checkpoints", "ls", at(straight, "step_00000010"))
    assert answer.status == 1 and f"name the run directory it is in: {straight}" in answer.err


def test_checkpoints_folder_is_accepted_as_run(holdfast, straight):
    assert holdfast("checkpoints", "ls", straight / "checkpoints").status == 0
    assert holdfast("checkpoints", "verify", straight / "checkpoints").status == 0


def test_run_without_checkpoints_yet_is_no_error_but_nothing_was_verified(holdfast, tmp_path):
    saved_runs.train(tmp_path / "a", 5, enabled=False)
    assert "has no checkpoints yet" in holdfast("checkpoints", "ls", tmp_path / "a").out
    assert holdfast("checkpoints", "ls", tmp_path / "a", "--json").json["checkpoints"] == []
    assert holdfast("checkpoints", "verify", tmp_path / "a").status == 3
    assert holdfast("checkpoints", "prune", tmp_path / "a", "--yes").status == 0
    assert not (tmp_path / "a" / "checkpoints").exists()


def test_list_works_with_damaged_run_json_and_journal(holdfast, straight):
    (straight / "run.json").write_text("{")
    (straight / "journal.jsonl").write_bytes(b"\xff\x00{]")
    for command in ("ls", "verify"):
        answer = holdfast("checkpoints", command, straight)
        assert answer.status == 0 and "step_00000035" in answer.out, answer.err


def test_unreadable_folder_is_an_error_message(straight):
    """As another user if this is root, who may read everything.

    That user may not enter the folder of the program or of the other tests. So the program imports what it needs by a first
    call, and the run is in a folder that everyone may enter.
    """
    source = """
import contextlib, os, sys
from holdfast.cli import main
run = sys.argv[1]
with contextlib.suppress(SystemExit):
    main.run(["checkpoints", "ls", run])
os.chmod(run + "/checkpoints", 0)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
main.run(["checkpoints", "ls", run])
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        run = shutil.copytree(straight, Path(folder) / "run")
        done = subprocess.run([sys.executable, "-c", source, run], capture_output=True, text=True, timeout=60)
        at(run, "").chmod(0o755)
    assert "step_00000035" in done.stdout  # the first call
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error: {run}/checkpoints") and "Permission denied" in done.stderr


def test_bare_group_shows_help_and_every_command_has_examples(holdfast):
    answer = holdfast("checkpoints")
    assert answer.status == 0
    for command in ("ls", "verify", "prune", "resume-path"):
        assert f"\n  {command} " in answer.out
        helped = holdfast("checkpoints", command, "--help")
        assert helped.status == 0 and "--json" in helped.out
        assert f"  holdfast checkpoints {command} " in helped.out.partition("Examples:")[2]


def test_wrong_words_are_usage_errors(holdfast, straight):
    assert holdfast("checkpoints", "list").status == 2
    assert holdfast("checkpoints", "verify").status == 2
    assert holdfast("checkpoints", "prune", straight, "--keep-last", "0").status == 2


def test_commands_do_not_import_torch(forked):
    source = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
from holdfast.cli import main
import holdfast
assert holdfast.resolve_resume_path(sys.argv[1]).name == "step_00000040.b1"
for words in (["ls"], ["verify"], ["prune", "--yes"], ["resume-path"]):
    try:
        main.run(["checkpoints", *words, sys.argv[1]])
    except SystemExit as ended:
        assert ended.code == 0, words
"""
    done = subprocess.run([sys.executable, "-c", source, str(forked)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_old_encoding_gets_question_marks_and_no_traceback(installed, forked):
    for command in ("ls", "verify"):
        answer = installed("checkpoints", command, forked, env={"PYTHONIOENCODING": "ascii"})
        assert answer.status == 0 and "?" in answer.out, answer.err


# ---- at a terminal


def at_terminal(*words: object, typed: str = "") -> tuple[int, str]:
    """The installed program with a terminal on all three streams; its status and all it showed."""
    main, side = pty.openpty()
    program = [str(Path(sys.executable).with_name("holdfast")), *map(str, words)]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm", "PYTHONUTF8": "1"}
    child = subprocess.Popen(program, stdin=side, stdout=side, stderr=side, env=environment, close_fds=True)
    os.close(side)
    shown, ends = b"", time.monotonic() + 60
    try:
        if typed:
            os.write(main, typed.encode())
        while time.monotonic() < ends:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the other side has closed
                break
            if not piece:
                break
            shown += piece
        return child.wait(30), shown.decode()
    finally:
        child.kill()
        child.wait(30)
        os.close(main)


def test_person_is_asked_and_no_means_no(forked):
    status, shown = at_terminal("checkpoints", "prune", forked, typed="n\n")
    assert status == 1
    assert "remove 2 checkpoints" in shown and "nothing was removed" in shown
    assert len(names(forked)) == 8


def test_person_is_asked_and_yes_means_yes(forked):
    status, shown = at_terminal("checkpoints", "prune", forked, typed="y\n")
    assert status == 0 and "removed 2 checkpoints" in shown
    assert len(names(forked)) == 6


def test_terminal_has_a_bar_and_colours_and_a_pipe_has_neither(installed, straight):
    status, shown = at_terminal("checkpoints", "verify", straight)
    assert status == 0 and "━" in shown and "\x1b[" in shown
    piped = installed("checkpoints", "verify", straight, env={"PYTHONUTF8": "1"})
    assert piped.err == "" and "\x1b" not in piped.out and "━" not in piped.out


# ---- the page


PAGE = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()


def leveled(text: str) -> list[str]:
    """The lines of an answer without sizes, ages, checksums and repeated blanks."""
    for pattern, put in (
        (r"[\d.]+ kB", "N kB"),
        (r"\b\d+ s\b|\b[\d.]+ min\b", "N s"),
        (r"crc32:[0-9a-f]{8}", "crc32:N"),
        (r" +", " "),
    ):
        text = re.sub(pattern, put, text)
    return [line.strip() for line in text.splitlines()]


def test_page_shows_what_the_commands_print(installed, forked, tmp_path):
    run = Path(shutil.copytree(forked, tmp_path / "runs" / "a"))
    options = {"cwd": tmp_path, "env": {"COLUMNS": "80", "PYTHONUTF8": "1"}}
    shown = [line for line in leveled(PAGE) if line]
    for command in ("ls", "verify", "prune"):
        if command == "verify":
            flip(at(run, "step_00000040.b1") / "rank_00000.bin", 5000)
        words = ["--keep-last", "2", "--dry-run"] if command == "prune" else []
        answer = installed("checkpoints", command, "runs/a", *words, **options)
        start = shown.index(" ".join(["$ holdfast checkpoints", command, "runs/a", *words])) + 1
        lines = [line for line in leveled(answer.out) if line]
        assert shown[start : start + len(lines)] == lines


def test_page_has_every_setting_as_init_writes_it():
    written = template()
    begin = written.index("[checkpoint]")
    assert written[begin : written.index("\n\n", begin)] in PAGE
