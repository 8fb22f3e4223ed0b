"""`holdfast diff` prints the verdict first, lists what it could not compare, and reports errors as messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from holdfast.cli import main
from holdfast.core.record.journal import Journal, dumps
from holdfast.core.record.rundir import to_json
from holdfast.diagnosis.rundiff.report import SCHEMA, DiffReport

STEPS = 200


def write_run(folder, *, lr=3e-3, weights=(0.7, 0.3), facts=None, seconds=0.1):
    """A run directory as a Guard leaves it, without training."""
    folder.mkdir(parents=True)
    about = {
        "holdfast": "0.1.0",
        "torch": "2.13.0",
        "argv": ["holdfast", "train", "a.toml", f"--train.run_dir={folder}"],
        "trainer": "holdfast reference",
        "config": {"optimizer": {"lr": lr}, "train": {"run_dir": str(folder), "seed": 1}},
        "facts": {
            "sources": {"web": weights[0], "code": weights[1]},
            "tokens_per_step": 64,
            "vocab_size": 256,
            "eval": {"hellaswag": 0.3 + weights[0] / 10},
            **(facts or {}),
        },
    }
    (folder / "run.json").write_text(to_json(about))
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(1, STEPS + 1):
            loss = 2 + 3 / step + 0.01 * ((step * 7919 + int(1e4 * lr + 10 * weights[0])) % 13)
            row = {"step": step, "loss": loss, "grad_norm": 1.0, "lr": lr, "seconds": seconds, "status": "committed"}
            file.write(dumps(row))
    log = Journal(folder / "journal.jsonl")
    log.write("run_begin")
    log.write("run_end", step=STEPS, summary={"status": "clean"})
    log.close()
    return folder


@pytest.fixture
def runs(tmp_path):
    return write_run(tmp_path / "a"), write_run(tmp_path / "b", weights=(0.4, 0.6))


def test_verdict_comes_first_and_the_next_step_last(runs, holdfast):
    answer = holdfast("diff", *runs)
    assert (answer.status, answer.err) == (0, "")
    text = " ".join(answer.out.split())
    assert text.startswith(
        "B is worse: hellaswag 0.34 against 0.37 (higher is better). The runs differ in: data mixture."
    )
    assert answer.out.splitlines()[-1].startswith("next: ")
    for words in ("suspects", "curves at equal tokens", "what could not be compared", "evaluations"):
        assert words in answer.out
    assert text.index("suspects") < text.index("what could not be compared") < text.index("next: ")


def test_map_names_the_loss_of_the_log_that_has_the_column(tmp_path, holdfast):
    own, usual = tmp_path / "a.csv", tmp_path / "b.csv"
    own.write_text("it,train_nll\n" + "".join(f"{i},{2 + 3 / (1 + i)}\n" for i in range(200)))
    usual.write_text("step,loss\n" + "".join(f"{i},{2.5 + 3 / (1 + i)}\n" for i in range(200)))
    answer = holdfast("diff", own, usual, "--map", "loss=train_nll")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("B is worse: its training loss ends at 2.5")
    assert "has no column 'nll'" in holdfast("diff", own, usual, "--map", "loss=nll").err
    assert "not NAME=COLUMN" in holdfast("diff", own, usual, "--map", "loss").err


def test_map_keeps_the_names_that_a_log_has_if_it_lacks_another(tmp_path, holdfast):
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("it,train_nll,gn\n" + "".join(f"{i},{2 + 3 / (1 + i)},1.0\n" for i in range(200)))
    b.write_text("it,train_nll\n" + "".join(f"{i},{2.5 + 3 / (1 + i)}\n" for i in range(200)))
    answer = holdfast("diff", a, b, "--map", "loss=train_nll", "--map", "grad_norm=gn")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("B is worse: its training loss ends at 2.5")


def test_picture_shows_both(runs, holdfast):
    out = holdfast("diff", *runs).out
    assert any(0x2800 < ord(letter) < 0x2900 for letter in out)
    assert "A  B  loss, medians of" in out


def test_values_that_no_run_recorded_are_listed(runs, holdfast):
    out = holdfast("diff", *runs).out
    assert "decode settings: neither run records the decode setting" in out
    assert "tokenizer: neither run records the tokenizer" in out


def test_next_step_is_a_command_if_there_is_one(tmp_path, holdfast):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=1e-3)
    answer = holdfast("diff", a, b, "--json").json
    assert answer["suspects"][0]["check"] == "lr_schedule"
    assert answer["next"].startswith(f"holdfast train a.toml --optimizer.lr=0.003 --train.run_dir={b}-check")


def test_identical_runs_are_reported_as_identical(tmp_path, holdfast):
    answer = holdfast("diff", write_run(tmp_path / "a"), write_run(tmp_path / "b", seconds=9.0))
    assert answer.status == 0
    assert "The runs are identical" in answer.out


def test_json_is_the_documented_schema(runs, holdfast):
    answer = holdfast("diff", *runs, "--json").json
    assert answer["schema"] == SCHEMA == "holdfast.diff/1"
    assert list(answer) == list(DiffReport.__struct_fields__)
    assert [r["path"] for r in (answer["a"], answer["b"])] == [str(run) for run in runs]
    assert answer["verdict"]["suspect"] == "mixture"
    assert answer["verdict"]["worse"] == "b"
    assert answer["axis"] == "tokens"
    assert {"check", "name", "why"} == set(answer["not_compared"][0])


def test_nan_in_a_result_is_written_as_nan(tmp_path, holdfast):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", facts={"eval": {"hellaswag": float("nan")}})
    answer = holdfast("diff", a, b, "--json")
    assert '"b": NaN' in answer.out
    assert json.loads(answer.out)["verdict"]["worse"] == "b"
    assert holdfast("diff", a, b).status == 0


def test_brackets_in_names_are_not_taken_for_markup(tmp_path, holdfast):
    a = write_run(tmp_path / "a", facts={"note": "[red]x[/red] [/]"})
    b = write_run(tmp_path / "b", facts={"note": "[bold]"})
    answer = holdfast("diff", a, b)
    assert answer.status == 0 and "[red]x[/red] [/]" in answer.out


def test_control_characters_of_a_run_are_not_printed(tmp_path, installed):
    a = write_run(tmp_path / "a", facts={"note": "\x1b[2J", "eval": {"\x1b[31mx": 0.5}})
    b = write_run(tmp_path / "b", facts={"note": "\ud800\x00", "eval": {"\x1b[31mx": 0.4}})
    answer = installed("diff", a, b)
    assert answer.status == 0, answer.err
    assert "\x1b" not in answer.out and "?? " in answer.out


@pytest.mark.parametrize("width", ["20", "40", "200"])
def test_any_width_will_do(runs, holdfast, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    assert holdfast("diff", *runs).status == 0


# ---- errors


def failed(answer, words) -> None:
    assert answer.status == 1
    assert answer.err.startswith("error: ") and words in answer.err
    assert "Traceback" not in answer.err
    assert answer.err.count("\n") == 1


def test_missing_folder(runs, holdfast, tmp_path):
    failed(holdfast("diff", runs[0], tmp_path / "none"), "none: no such file or folder; name a run directory")


def test_folder_that_is_no_run(runs, holdfast, tmp_path):
    (tmp_path / "empty").mkdir()
    failed(holdfast("diff", tmp_path / "empty", runs[0]), "empty")


def test_advice_for_a_folder_that_is_no_run_is_given_once(runs, holdfast, tmp_path):
    (tmp_path / "empty").mkdir()
    answer = holdfast("diff", runs[0], tmp_path / "empty")
    failed(answer, "name the log, or a run directory")
    assert answer.err.count("; ") == 1


def test_folder_of_runs_is_refused_and_one_of_them_is_named(runs, holdfast, tmp_path):
    failed(
        holdfast("diff", tmp_path, runs[0]), f"{tmp_path} is not a run directory: it has no journal.jsonl; did you mean"
    )


def test_log_beside_a_run_directory_is_still_compared(runs, holdfast, tmp_path):
    (tmp_path / "hf" / "guarded").mkdir(parents=True)
    for name in ("metrics.jsonl", "journal.jsonl"):
        (tmp_path / "hf" / "guarded" / name).write_bytes((Path(runs[0]) / name).read_bytes())
    history = [{"step": n, "loss": 2.0 - n / 100} for n in range(1, 60)]
    (tmp_path / "hf" / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": 59}))
    assert holdfast("diff", runs[0], tmp_path / "hf").status == 0


def test_map_is_refused_if_both_are_run_directories_and_applied_to_the_log_if_one_is(runs, holdfast, tmp_path):
    failed(holdfast("diff", *runs, "--map", "loss=foo"), "--map loss=foo: a run directory has no columns to map")
    (tmp_path / "log.csv").write_text("step,nll\n" + "".join(f"{n},{2 - n / 100}\n" for n in range(60)))
    assert holdfast("diff", runs[0], tmp_path / "log.csv", "--map", "loss=nll").status == 0


def test_file_that_is_no_log(runs, holdfast, tmp_path):
    (tmp_path / "poem.txt").write_text("nothing to see\n" * 3)
    failed(holdfast("diff", tmp_path / "poem.txt", runs[0]), "poem.txt")


def test_same_run_twice(runs, holdfast):
    failed(holdfast("diff", runs[0], f"{runs[0]}/../a"), "are the same run; name two")


def test_error_is_json_too(runs, holdfast, tmp_path):
    answer = holdfast("diff", runs[0], tmp_path / "none", "--json")
    assert answer.json["ok"] is False and "no such file or folder" in answer.json["errors"][0]


def test_help_has_examples(holdfast):
    out = holdfast("diff", "--help").out
    assert "holdfast diff runs/a runs/b" in out and "--json" in out
    assert typer.main.get_command(main.app).commands["diff"].name == "diff"
