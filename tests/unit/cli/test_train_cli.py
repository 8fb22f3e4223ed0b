"""`holdfast train`: bad input is one message and status 78; the printed output and the JSON."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from holdfast.core.base.types import Outcome, Signal, Status
from holdfast.core.record import journal
from holdfast.reference.config import parse
from holdfast.reference.progress import TerminalProgress
from holdfast.reference.tokens import TokenWriter

SMALL = """
[model]
layers = 1
width = 16
heads = 2
context = 16
[train]
steps = 12
batch_size = 2
device = "cpu"
threads = 1
log_every = 5
[scheduler]
warmup_steps = 2
[eval]
every = 5
batches = 2
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A small configuration, in the working folder."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def tokens(path, vocab_size=256, count=3000):
    writer = TokenWriter(path, vocab_size, "bytes")
    writer.write(np.arange(count) % vocab_size)
    writer.close()
    return path


def source(path) -> str:
    return f'--dataset.sources=[{{path="{path}"}}]'


def refused(answer) -> str:
    """One message, on stderr only, with status 78."""
    assert answer.status == 78, answer.err
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert answer.err.count("error: ") == 1
    assert "Traceback" not in answer.err
    return answer.err


# ---- bad input


def test_missing_configuration_error_names_a_shipped_one(holdfast, tmp_path):
    message = refused(holdfast("train", tmp_path / "none.toml"))
    assert "none.toml" in message and "no such file" in message and "configs/tiny.toml" in message


def test_configuration_that_is_a_folder_is_refused(holdfast, tmp_path):
    assert "is a folder" in refused(holdfast("train", tmp_path))


def test_malformed_toml_error_names_the_line(holdfast, file):
    file.write_text("[model]\nwidth = \n")
    message = refused(holdfast("train", file))
    assert "is not TOML" in message and "line 2" in message


@pytest.mark.parametrize("override", ["--train.stesp=3", "--model.widht=3", "--recover.mod=heal", "--trian.steps=3"])
def test_unknown_key_error_suggests_the_nearest(holdfast, file, override):
    assert "did you mean" in refused(holdfast("train", file, override))


def test_all_errors_are_reported_at_once(holdfast, file):
    message = refused(holdfast("train", file, "--model.width=15", "--optimizer.lr=0", "--verbose", "--train.x=1"))
    assert "4 errors" in message
    for part in ("'--verbose'", "width = 15", "[optimizer] lr", "[train] x"):
        assert part in message


def test_missing_token_file_names_the_command_that_makes_one(holdfast, file):
    message = refused(holdfast("train", file, source("none.tokens")))
    assert "none.tokens: no such token file" in message and "holdfast prepare" in message


def test_empty_token_file_is_refused(holdfast, file, tmp_path):
    (tmp_path / "a.tokens").touch()
    assert "a.tokens: is empty" in refused(holdfast("train", file, source("a.tokens")))


def test_truncated_token_file_is_refused(holdfast, file, tmp_path):
    path = tokens(tmp_path / "a.tokens")
    path.write_bytes(path.read_bytes()[:-100])
    message = refused(holdfast("train", file, source(path)))
    assert "truncated" in message and "3000 tokens" in message


def test_text_instead_of_tokens_is_refused(holdfast, file, tmp_path):
    (tmp_path / "a.txt").write_text("Once upon a time. " * 500)
    assert "is not a token file" in refused(holdfast("train", file, source("a.txt")))


def test_token_file_too_short_for_the_context_is_refused(holdfast, file, tmp_path):
    path = tokens(tmp_path / "a.tokens", count=20)
    assert "too few" in refused(holdfast("train", file, source(path)))


def test_vocabulary_larger_than_the_models_names_the_size_to_set(holdfast, file, tmp_path):
    path = tokens(tmp_path / "a.tokens", vocab_size=1000)
    assert "set [model] vocab_size = 1000 or more" in refused(holdfast("train", file, source(path)))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--model.heads=3", "multiple of 2 x heads"),
        ("--model.width=2", "multiple of 2 x heads"),
        ("--model.vocab_size=16", "less than 256"),
        ("--model.layers=0", "[model] layers = 0"),
        ("--scheduler.warmup_steps=12", "leaves nothing of 12 steps"),
    ],
)
def test_impossible_shape_is_refused_with_its_numbers(holdfast, file, override, expected):
    assert expected in refused(holdfast("train", file, override))


def test_run_directory_that_is_a_file_is_refused(holdfast, file, tmp_path):
    (tmp_path / "taken").write_text("mine")
    message = refused(holdfast("train", file, "--train.run_dir=taken"))
    assert "run_dir" in message and "'taken' is a file" in message
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("run_dir", ["taken/below", "/proc/none/here"])
def test_run_directory_that_cannot_be_made_is_refused(holdfast, file, tmp_path, run_dir):
    (tmp_path / "taken").write_text("mine")
    assert "cannot be written" in refused(holdfast("train", file, f"--train.run_dir={run_dir}"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_error_names_the_setting_to_change(holdfast, file):
    message = refused(holdfast("train", file, "--train.device=cuda"))
    assert "no GPU" in message and '"cpu"' in message


def test_missing_and_foreign_checkpoints_are_refused(holdfast, file, tmp_path):
    assert "no such folder" in refused(holdfast("train", file, "--resume", "none"))
    (tmp_path / "a.pt").write_text("text")
    message = holdfast("train", file, "--resume", "a.pt")
    assert message.status == 78 and "Traceback" not in message.err


def test_run_directory_of_another_model_is_refused_with_what_differs(holdfast, file):
    assert holdfast("train", file, "--stop-at", 3).status == 75
    answer = holdfast("train", file, "--model.layers=2", "--json")
    assert answer.status == 78
    assert "belongs to another run" in answer.json["errors"][0]
    assert "parameters" in answer.json["errors"][0]


def notes(folder) -> str:
    """The notes in the journal of the run."""
    events = journal.read(folder / "runs/train/journal.jsonl").events
    return "; ".join(e["message"] for e in events if e["event"] == "note")


def test_another_batch_size_resumes_with_a_note(holdfast, file, tmp_path):
    assert holdfast("train", file, "--stop-at", 3).status == 75
    answer = holdfast("train", file, "--train.batch_size=3")
    assert answer.status == 0
    assert "at the exact next one" in notes(tmp_path)


def test_named_checkpoint_overrides_the_newest_with_a_note(holdfast, file, tmp_path):
    assert holdfast("train", file, "--stop-at", 3).status == 75
    assert holdfast("train", file, "--stop-at", 6).status == 75
    for words in (["--resume", "runs/train/checkpoints/step_00000003"], ["--checkpoint.load_path=runs/train"]):
        answer = holdfast("train", file, "--stop-at", 7, *words)
        assert answer.status == 75
    assert "step_00000003; automatic resume would have chosen step_00000006" in notes(tmp_path)


def test_errors_are_json_when_asked_for(holdfast, file):
    answer = holdfast("train", file, source("none.tokens"), "--json")
    assert answer.status == 78
    assert answer.json["ok"] is False
    (error,) = answer.json["errors"]
    assert error.startswith("none.tokens: no such token file")


def test_no_configuration_at_all_is_a_usage_error(holdfast):
    answer = holdfast("train")
    assert answer.status == 2
    assert "CONFIG" in answer.err


def test_stop_at_must_be_at_least_one(holdfast, file):
    assert holdfast("train", file, "--stop-at", 0).status == 2


# ---- output


def test_run_without_a_terminal_prints_log_lines_and_a_summary(holdfast, file, tmp_path):
    answer = holdfast("train", file)
    assert answer.status == 0
    assert answer.out == ""
    lines = answer.err.splitlines()
    assert "parameters, fp32, on" in lines[0] and "standard library" in lines[0]
    assert [line.split()[1] for line in lines if line.startswith("step ") and "tok/s" in line] == [
        "1/12",
        "5/12",
        "10/12",
    ]
    assert all(part in lines[1] for part in ("loss ", "tok/s", "ms/step", "ETA "))
    assert [line.split()[1] for line in lines if "  eval loss" in line] == ["5", "10", "12"]
    assert any(line.startswith("clean: 12 steps committed") for line in lines)
    assert lines[-1].endswith("records: runs/train")
    assert {p.name for p in (tmp_path / "runs/train").iterdir()} >= {"run.json", "metrics.jsonl", "journal.jsonl"}


def test_json_answer_is_one_object_and_nothing_else(holdfast, file):
    answer = holdfast("train", file, "--json")
    assert answer.status == 0
    assert answer.err == ""
    assert answer.json["ok"] is True
    assert (answer.json["steps"], answer.json["stopped"]) == (12, None)
    assert answer.json["checkpoint"].endswith("checkpoints/step_00000012")
    assert answer.json["tokens"] == 12 * 2 * 16
    assert 0 < answer.json["eval_loss"] < 10
    assert answer.json["summary"]["status"] == "clean"


def test_stopped_run_is_status_75_and_the_same_command_resumes_it(holdfast, file, tmp_path):
    answer = holdfast("train", file, "--stop-at", 6, "--json")
    assert answer.status == 75
    assert answer.json["checkpoint"].endswith("runs/train/checkpoints/step_00000006")
    assert answer.err.splitlines()[-1].endswith("the same command resumes it")
    resumed = holdfast("train", file, "--json")
    assert (resumed.status, resumed.json["steps"]) == (0, 12)
    whole = holdfast("train", file, "--train.run_dir=whole", "--json")
    assert resumed.json["eval_loss"] == whole.json["eval_loss"]
    steps = [row["step"] for row in journal.read_rows(tmp_path / "runs/train/metrics.jsonl").events]
    assert steps == list(range(1, 13))


def test_run_stopped_at_its_last_step_is_done(holdfast, file):
    answer = holdfast("train", file, "--stop-at", 12)
    assert answer.status == 0
    assert "--resume" not in answer.err


def test_stopped_unguarded_run_reports_no_checkpoint(holdfast, file, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    answer = holdfast("train", file, "--stop-at", 6)
    assert answer.status == 1
    assert "--resume" not in answer.err
    assert "records: HOLDFAST_OFF=1 writes none" in answer.err
    assert "there is no checkpoint to resume from" in answer.err
    assert "HOLDFAST_OFF" in refused(holdfast("train", file, "--resume", "any.pt"))


def test_override_may_come_before_the_file(holdfast, file):
    assert holdfast("train", "--train.steps=3", file, "--json").json["steps"] == 3


def test_name_of_a_source_with_brackets_is_shown_as_it_is(holdfast, file, tmp_path):
    tokens(tmp_path / "[red]web[bold].tokens")
    answer = holdfast("train", file, source("[red]web[bold].tokens"))
    assert "[red]web[bold].tokens (3,000 tokens)" in answer.err


def test_policy_stop_is_status_70_and_names_the_cure(holdfast, file):
    words = ("train", file, "--recover.ladder=['stop']", "--detect.warmup_steps=2", "--detect.loss_z=1e-9")
    stopped = holdfast(*words, "--recover.preset=strict", "--detect.loss_z_rollback=1e-9", "--detect.loss_rise=0",
                       "--detect.loss_rise_initial=0", "--detect.loss_rise_rollback=0", "--train.steps=200")  # fmt: skip
    assert stopped.status == 70
    assert "Traceback" not in stopped.err
    again = holdfast("train", file)
    assert again.status == 70
    assert "holdfast ack" in again.err


# ---- the bar


def outcome(step: int, seconds: float | None) -> Outcome:
    return Outcome(status=Status.COMMITTED, signal=Signal(step=step, loss=2.5, seconds=seconds))


def shown(width: int, *, terminal: bool, seconds: float | None = 0.02) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=width, color_system=None)
    view = TerminalProgress(console)
    config = parse({"train": {"steps": 400, "log_every": 1}}, "test")
    about = {"parameters": 8240, "precision": "fp32", "device": "cpu", "tokens_per_step": 32, "data": []}
    view.show_begin(config, about)
    for step in range(1, 301):
        view.show_step(outcome(step, seconds), 3200.0)
    view.close()
    return screen.getvalue()


@pytest.mark.parametrize("width", [30, 40, 70, 80, 120])
def test_bar_shows_step_and_loss_at_every_width(width):
    last = shown(width, terminal=True).replace("\r", "\n").split("\x1b[2K")[-1].splitlines()[0]
    assert "300/400" in last
    assert "loss 2.5000" in last
    if width >= 70:
        assert "3,200 tok/s" in last and "20 ms/step" in last
    assert len(last) <= width


def test_step_time_is_shown_when_the_guard_measures_none():
    line = shown(120, terminal=False, seconds=None).splitlines()[-1]
    assert "10 ms/step" in line  # 32 tokens at 3,200 a second
    assert "ETA 1 s" in line


def test_result_is_plain_json(holdfast, file):
    answer = holdfast("train", file, "--json")
    json.dumps(answer.json, allow_nan=False)
