"""A step that is not finite: where it came from is found while training, and again from its bundle on another machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_case import (
    BAD,
    BAD_STEP,
    BATCH,
    FAULT_LINE,
    UPDATE_LINE,
    HalfNet,
    Rows,
    Trained,
    ZeroDivision,
    build,
    loss_fn,
    train,
)
from torch.utils.data import DataLoader

from holdfast import Guard
from holdfast.cli import main
from holdfast.core.base.errors import PolicyStop
from holdfast.replay.bundle import read_bundle
from holdfast.replay.command import replay_incident
from holdfast.replay.entry import check_entry
from holdfast.runtime.incidents import watch
from holdfast.runtime.incidents.watch import IncidentWatch

CASE = Path(__file__).with_name("replay_case.py")
ENTRY = f"{CASE}:replay_entry"


@pytest.fixture
def holdfast(capsys):
    """Run a command in this process; return its status, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run([str(word) for word in words])
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="module", autouse=True)
def _enough_time():
    """Steps here take a millisecond, and a loaded machine may pause for longer than the guard would watch them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_MIN_SECONDS", 30.0)
        yield


@pytest.fixture(scope="module")
def log_zero(tmp_path_factory):
    """A run with a logarithm of zero in its loss, and its batch in the bundle."""
    return train(tmp_path_factory.mktemp("log") / "run", "log_zero", keep_batch=True, entry=ENTRY)


@pytest.fixture
def moved(log_zero, tmp_path) -> Path:
    """The incident of that run, on another machine."""
    return Path(shutil.copytree(log_zero.folder / "incidents" / "0001", tmp_path / "elsewhere"))


# ---- while training


@pytest.mark.parametrize("loop", ["steps", "classic"])
def test_log_of_zero_in_the_loss_names_the_line(log_zero, tmp_path, loop):
    run = log_zero if loop == "steps" else train(tmp_path / "run", "log_zero", loop=loop)
    verdict, again = run.replays("verdict")  # once in each epoch
    assert (again["file"], again["line"]) == (verdict["file"], verdict["line"])
    assert (Path(verdict["file"]).name, verdict["line"]) == (CASE.name, FAULT_LINE)
    assert "log" in verdict["op"] and verdict["cause"] == "structural" and verdict["step"] == BAD_STEP
    incident = json.loads((run.folder / "incidents/0001/incident.json").read_text())
    assert [e["replay"]["line"] for e in incident["events"] if "line" in e.get("replay", {})] == [FAULT_LINE] * 2


def test_observing_changes_no_bit_and_serves_no_further_step(log_zero, tmp_path):
    offline = train(tmp_path / "offline", "log_zero", when="offline")
    off = train(tmp_path / "off", "log_zero", when="off")
    assert log_zero.forwards == offline.forwards == off.forwards
    assert log_zero.statuses() == offline.statuses() == off.statuses() == ["replayed", "skipped"] * 2
    assert all(map(torch.equal, log_zero.weights(), off.weights())), "observed and not observed differ"
    assert offline.replays("verdict") == [] and len(offline.replays("bundle")) == 1
    assert [e for e in off.events if e["event"] == "replay"] == []
    assert not (off.folder / "incidents/0001/bundle").exists()


def flip_once(module: torch.nn.Module, args: Any, output: torch.Tensor, *, at: set[int], calls: list[int]) -> None:
    """Flip the highest bit of the exponent of one activation, in the forwards `at`: its square is not finite."""
    calls[0] += 1
    if calls[0] in at:
        output.data.view(torch.int32).view(-1)[3] ^= 0x40000000


@pytest.mark.parametrize("act", [False, True])
def test_a_bit_flipped_once_in_an_activation_is_told_from_a_fault_that_repeats(tmp_path, act):
    model, calls = build(), [0]
    model.last.register_forward_hook(lambda *a: flip_once(*a, at={3, 9}, calls=calls))
    run = train(tmp_path / "run", model=model, epochs=3, act=act)
    verdicts = run.replays("verdict")
    assert [v["cause"] for v in verdicts] == ["transient"] * len(verdicts) and len(verdicts) == 2
    assert all(map(torch.equal, run.weights(), train(tmp_path / "clean", epochs=3).weights()))
    # Only with consent does a fault count against the device; the second one in the same incident does not count again.
    assert all(("device" in v) == act for v in verdicts)


@pytest.mark.slow
def test_a_device_with_two_transient_incidents_is_excluded_with_consent(tmp_path):
    model, calls = build(), [0]
    model.last.register_forward_hook(lambda *a: flip_once(*a, at={3, 120}, calls=calls))
    run = train(tmp_path / "run", model=model, epochs=22, act=True)
    (excluded,) = [e for e in run.events if e["event"] == "excluded"]
    assert [n["reason"] for n in excluded["namings"]] == ["transient"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "workers"), [(1, 0), pytest.param(2, 2, id="batches that workers load inside the step")]
)
def test_the_bad_row_alone_is_left_out_and_the_rest_of_its_batch_is_trained_on(tmp_path, accumulate, workers):
    loading = {"accumulate": accumulate, "workers": workers}
    run = train(tmp_path / "run", "nan_row", act=True, **loading)
    (verdict,) = run.replays("verdict")
    size = BATCH // accumulate
    assert verdict["cause"] == "data_row" and verdict["samples"] == [BAD] and verdict["rows"] == [BAD % size]
    assert [e["cause"] for e in run.replays("confirmed")] == ["data_row"]
    assert "skipped" not in run.statuses()
    (cause,) = [e for e in run.events if e["event"] == "cause"]
    assert cause["cause"] == "data"
    without = train(tmp_path / "without", "nan_row", left_out=(BAD,), **loading)
    assert all(map(torch.equal, run.weights(), without.weights())), "differs from a run that never had the sample"


def test_without_consent_the_batch_is_skipped_as_before(tmp_path):
    run = train(tmp_path / "run", "nan_row")
    assert run.statuses() == ["replayed", "skipped"] and run.replays("confirmed") == []


def test_a_structural_fault_stops_the_run_if_the_verdict_may_act(tmp_path):
    with pytest.raises(PolicyStop, match=f"replay_case.py:{FAULT_LINE}"):
        train(tmp_path / "run", "log_zero", act=True)


def test_a_module_that_overflows_in_half_precision_runs_in_fp32_from_there_on(tmp_path):
    run = train(tmp_path / "run", "large_row", model=build(HalfNet), act=True, fp32_modules=True)
    assert [e["module"] for e in run.replays("confirmed")] == ["square"]
    assert [e["cause"] for e in run.replays("verdict")] == ["dtype_overflow"]
    assert [e["module"] for e in run.events if e.get("action") == "fp32_module"] == ["square"]
    assert "skipped" not in run.statuses() and len(run.replays("verdict")) == 1, "the second epoch overflows again"
    # A resumed process does the same from its checkpoint.
    resumed = train(tmp_path / "run", "large_row", model=build(HalfNet), epochs=3, act=True, fp32_modules=True)
    assert len(resumed.replays("verdict")) == 1 and "skipped" not in resumed.statuses()


# ---- weights that an update made bad


def test_an_update_that_makes_weights_nonfinite_is_named_with_its_line(tmp_path, holdfast):
    model = build()
    with pytest.raises(PolicyStop):
        train(tmp_path / "run", model=model, optimizer=lambda p: ZeroDivision(p, lr=1.0), keep_batch=True, entry=ENTRY)
    (verdict,) = Trained(tmp_path / "run", model, 0).replays("verdict")
    assert (verdict["cause"], verdict["phase"], verdict["step"]) == ("structural", "optimizer", 1)
    assert (Path(verdict["file"]).name, verdict["line"]) == (CASE.name, UPDATE_LINE) and "div" in verdict["op"]
    # A bundle has no optimizer, so the replay says what the run saw.
    status, out, _ = holdfast("replay", tmp_path / "run", "--device", "cpu", "--json")
    answer = json.loads(out)
    assert status == 0 and answer["verdict"]["cause"] == "structural"
    assert "was bad before the step" in answer["verdict"]["sentence"] and answer["origin"]["line"] == UPDATE_LINE


@pytest.mark.parametrize("gate", ["device", "host"])
def test_a_weight_that_no_update_made_bad_is_a_transient_fault(gate, tmp_path, monkeypatch):
    model, calls, watched = build(), [0], []
    plain = IncidentWatch.watch_again

    def watch_again(self: IncidentWatch, number: int) -> Any:
        evidence = plain(self, number)
        watched.extend([number] if evidence is not None else [])
        return evidence

    monkeypatch.setattr(IncidentWatch, "watch_again", watch_again)

    def overwrite(module: torch.nn.Module, args: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            module.last.weight.data[0, 1] = float("nan")

    model.register_forward_pre_hook(overwrite)
    run = train(tmp_path / "run", model=model, gate=gate, act=True)
    (verdict,) = run.replays("verdict")
    assert verdict["cause"] == "transient" and "device" not in verdict
    assert watched == [3, 4], "of the steps that run again, the one that left bad state and the one that found it"
    assert all(map(torch.equal, run.weights(), train(tmp_path / "clean", gate=gate).weights()))


def test_running_statistics_that_a_finite_batch_makes_nonfinite_are_traced_to_their_norm(tmp_path):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    rows = Rows("")
    rows.x[BAD, 2] = 1e25
    policy = {"replay": {"keep_batch": True}, "snapshot": {"every_steps": 1, "certify_after": 1}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, run_dir=tmp_path / "run", config=policy)
    with pytest.raises(PolicyStop), guard:
        for step in guard.steps(DataLoader(rows, BATCH), epochs=2):
            with step:
                for batch in step.microbatches():
                    step.backward(model(batch["x"]).square().mean())
    (verdict,) = Trained(tmp_path / "run", model, 0).replays("verdict")
    assert "batch_norm" in verdict["op"] and (verdict["module"], verdict["step"]) == ("0", BAD_STEP)
    assert verdict["outlying"] == [BAD % BATCH]
    (bundle,) = (tmp_path / "run").glob("incidents/0001/bundle/rank_00000/*")
    report = analyse_bundle(bundle, model, lambda model, batch: model(batch["x"]).square().mean())
    assert report.verdict.cause != "transient" and "running_var" in report.verdict.sentence


def analyse_bundle(path: Path, model: torch.nn.Module, step: Any) -> Any:
    entry = check_entry((model, step), "entry")
    return replay_incident(read_bundle(path), entry, torch.device("cpu"), None).report


def test_weights_that_have_run_away_are_told_from_code_that_is_not_safe(tmp_path):
    run = train(tmp_path / "run", optimizer=lambda p: torch.optim.SGD(p, lr=1e30))
    verdict = run.replays("verdict")[0]
    assert verdict["cause"] == "learning_rate" and "times what they were" in verdict["for"][0]


# ---- from the bundle


@pytest.mark.slow
def test_a_moved_bundle_gives_the_same_verdict_in_another_process(log_zero, moved):
    words = [sys.executable, "-m", "holdfast", "replay", str(moved), "--device", "cpu", "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, cwd=moved)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    verdict = log_zero.replays("verdict")[0]
    assert answer["verdict"]["cause"] == verdict["cause"]
    assert (answer["origin"]["file"], answer["origin"]["line"]) == (verdict["file"], FAULT_LINE)
    assert answer["sample"] == BAD % BATCH and answer["sample_id"] == BAD
    assert json.loads((moved / "replay.json").read_text())["verdict"] == answer["verdict"]


def test_a_loop_that_leaves_an_attempt_that_is_observed_leaves_no_hook(tmp_path):
    model, seen = build(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = count_hooks(model)
    with Guard(model, optimizer, run_dir=tmp_path) as guard:
        for batch in guard.data(DataLoader(Rows("nan_row"), BATCH)):
            seen += bool(batch["x"].isnan().any())
            if seen == 2:
                assert count_hooks(model) > before
                break
            loss = loss_fn(model, batch)
            loss.backward()
            guard.step(loss)
    assert count_hooks(model) == before and not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def count_hooks(model: torch.nn.Module) -> int:
    everywhere = (torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks)
    return sum(map(len, everywhere)) + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("gate", ["device", "host"])
def test_the_next_batch_is_compared_if_it_had_been_loaded(tmp_path, holdfast, gate):
    run = train(tmp_path / "run", "log_zero", gate=gate, keep_batch=True, entry=ENTRY)
    status, out, _ = holdfast("replay", run.folder, "--device", "cpu", "--json")
    assert status == 0, out
    compared = {each["name"]: each["finite"] for each in json.loads(out)["comparisons"]}
    assert compared["as it was"] is False
    assert compared["next batch"] is (True if gate == "device" else None)


def test_the_answer_is_shown_and_is_in_the_post_mortem(log_zero, holdfast):
    status, out, _ = holdfast("replay", log_zero.folder, "--device", "cpu")
    assert status == 0
    for expected in ("first ", "verdict: structural", f"replay_case.py:{FAULT_LINE}", "fix: ", "replay.json"):
        assert expected in out
    status, out, _ = holdfast("diagnose", log_zero.folder, "--postmortem")
    assert f"replay_case.py:{FAULT_LINE}" in " ".join(out.split()), out


def test_without_consent_the_bundle_has_no_batch_and_replay_says_so(tmp_path, holdfast):
    run = train(tmp_path / "run", "log_zero", entry=ENTRY)
    bundle = run.folder / run.replays("bundle")[0]["path"]
    assert b'"sample_ids": null' in (bundle / "manifest.json").read_bytes()
    status, _, err = holdfast("replay", run.folder)
    assert status == 1 and "keep_batch = true" in err and "Traceback" not in err


def test_weights_above_the_cap_are_named_by_their_checkpoint(tmp_path, holdfast):
    run = train(
        tmp_path / "run",
        "log_zero",
        model=build(width=60_000),
        keep_batch=True,
        max_bundle_mb=1,
        entry=f"{CASE}:wide_entry",
    )
    bundle = run.folder / run.replays("bundle")[0]["path"]
    assert sum(file.stat().st_size for file in bundle.iterdir()) < 1_000_000
    status, out, err = holdfast("replay", run.folder, "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert answer["origin"]["line"] == FAULT_LINE and "the weights are those of step_" in " ".join(answer["notes"])


@pytest.mark.slow
def test_bundles_of_older_incidents_are_removed_and_a_cap_of_zero_writes_none(tmp_path):
    run = train(tmp_path / "none", "log_zero", max_bundle_mb=0)
    assert run.replays("verdict") and not (run.folder / "incidents/0001/bundle").exists()
    model, calls = build(), [0]
    model.last.register_forward_hook(lambda *a: flip_once(*a, at={3, 120}, calls=calls))
    run = train(tmp_path / "two", model=model, epochs=22, keep=1)
    kept = [path.parent.parent.name for path in sorted(run.folder.glob("incidents/*/bundle/rank_00000"))]
    assert kept == [e["path"].split("/")[1] for e in run.replays("bundle")][-1:] == ["0002"]


@pytest.mark.parametrize("file", ["rank_00000.bin", "rank_00000.json", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "removed"])
def test_a_damaged_bundle_is_refused_without_a_traceback(moved, holdfast, file, how):
    (path,) = moved.glob(f"bundle/rank_00000/step_*/{file}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(content if how == "flipped" else content[: len(content) // 2])
    status, _, err = holdfast("replay", moved)
    assert status == 1 and file in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--entry", "no_such.py:entry"], "there is no file no_such.py"),
        (["--entry", f"{CASE}:no_such"], "has no function 'no_such'"),
        (["--entry", f"{CASE}"], "no function"),
        (["--entry", f"{CASE}:not_the_model"], "first.weight is only in the run"),
        (["--entry", "json:loads"], "raised TypeError"),
        (["--device", "warp"], "no device of torch"),
        (["--rank", "7"], "no bundle of rank 7"),
    ],
)
def test_wrong_input_is_answered_with_its_cure(moved, holdfast, words, said):
    status, _, err = holdfast("replay", moved, *words)
    assert status in (1, 78) and said in err and "Traceback" not in err


ENTRIES = """
import sys
from replay_case import build, loss_fn

def other_step():
    return build(), lambda model, batch: model(batch["x"]).square().mean()

def raises():
    return build(), lambda model, batch: batch["no such key"]

def returns_a_list():
    return build(), lambda model, batch: [loss_fn(model, batch)]

def ends():
    sys.exit(0)

def prints():
    print("text of the user's code")
    return build(), loss_fn
"""


@pytest.fixture
def entries(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(CASE.parent))
    file = tmp_path / "entries_of_a_user.py"
    file.write_text(ENTRIES)
    return file


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("raises", "raised KeyError: 'no such key' at "),
        ("returns_a_list", "returned a list"),
        ("ends", "raised SystemExit"),
    ],
)
def test_an_entry_that_cannot_run_the_step_is_an_error_and_no_answer(moved, holdfast, entries, entry, said):
    (moved / "replay.json").unlink(missing_ok=True)
    status, _, err = holdfast("replay", moved, "--entry", f"{entries}:{entry}", "--device", "cpu")
    assert status == 1 and said in err and "Traceback" not in err
    assert not (moved / "replay.json").exists()


def test_a_step_that_failed_twice_and_is_healthy_in_its_replay_is_no_transient_fault(moved, holdfast, entries):
    """The entry lacks the term of the loss that fails."""
    status, out, _ = holdfast("replay", moved, "--entry", f"{entries}:other_step", "--device", "cpu", "--json")
    verdict = json.loads(out)["verdict"]
    assert status == 0 and verdict["cause"] == "not_established"
    assert "failed twice" in verdict["evidence_for"][0] and "every term of the loss" in verdict["fix"]


def test_what_an_entry_prints_is_not_among_the_json(moved, holdfast, entries):
    status, out, err = holdfast("replay", moved, "--entry", f"{entries}:prints", "--device", "cpu", "--json")
    assert status == 0 and json.loads(out)["ok"] and "text of the user's code" in err


def test_an_incident_without_an_entry_asks_for_one(tmp_path, holdfast):
    run = train(tmp_path / "run", "log_zero", keep_batch=True)
    status, _, err = holdfast("replay", run.folder)
    assert status == 1 and "--entry FILE.py:FUNCTION" in err
    status, _, err = holdfast("replay", tmp_path)
    assert status == 1 and "holds no bundle" in err
