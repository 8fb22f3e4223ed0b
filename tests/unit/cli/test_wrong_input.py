"""Wrong input to every command: no traceback; the message has the problem, the value and the cure."""

from __future__ import annotations

import re

import pytest

from holdfast.core.base.errors import RunDirError, SetupError
from holdfast.core.checkpoints.bundles import bundle_folder, find_bundle
from holdfast.replay.entry import call_entry

PATHS = {
    "missing": r"no such (file|folder)",
    "folder": r"is a folder|not a run directory|no file in this folder can be a log|has no checkpoints",
    "empty.log": r"is a file; name the run directory|the file is empty; name|hold no text",
    "binary.log": r"is a file; name the run directory|bytes that are not text|is not UTF-8 text.*; name a TOML file",
    "words.log": r"is a file; name the run directory|no step, loss or other metric|is not TOML",
}
RUN_COMMANDS = ["ack", "plan", "checkpoints ls", "checkpoints verify", "checkpoints prune", "checkpoints resume-path"]
COMMANDS = [*RUN_COMMANDS, "check", "train", "diagnose", "report", "diff", "prepare"]
ACCEPTED = {
    ("check", "empty.log"),  # every key is optional
    ("train", "empty.log"),
    ("prepare", "binary.log"),  # the tokens are bytes
    ("prepare", "words.log"),
    ("checkpoints resume-path", "missing"),  # a run that has not begun starts from the beginning
}


@pytest.fixture(autouse=True)
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.log").touch()
    (tmp_path / "binary.log").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "words.log").write_text("[rank0] hello\nno numbers at all\n")
    (tmp_path / "good.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.9}\n')


def words(command: str, path: str) -> list[str]:
    more = {"diff": ["good.jsonl"], "prepare": ["-o", "out.tokens"], "checkpoints prune": ["--yes"]}
    return [*command.split(), path, *more.get(command, [])]


@pytest.mark.parametrize(("command", "path"), [(c, p) for c in COMMANDS for p in PATHS if (c, p) not in ACCEPTED])
def test_wrong_path_is_named_with_the_problem(holdfast, command, path):
    answer = holdfast(*words(command, path))
    assert answer.status in (1, 3, 78)
    message = " ".join(answer.err.split())
    assert path in message or (path == "empty.log" and command == "prepare")
    assert answer.out == "" and "Traceback" not in message
    assert re.search(PATHS[path], message), message


@pytest.mark.parametrize("command", [*COMMANDS, "init"])
def test_empty_argument_is_a_usage_error_not_the_working_folder(holdfast, command):
    answer = holdfast(*words(command, ""))
    assert answer.status == 2
    assert "'' names no file or folder; is a shell variable unset?" in answer.err


def test_empty_argument_among_others_is_refused(holdfast):
    assert holdfast("diagnose", "good.jsonl", "").status == 2


@pytest.mark.parametrize(
    "line",
    [
        "demo --folder",
        "train good.jsonl --resume",
        "checkpoints resume-path folder --load-path",
        "prepare words.log -o",
        "diagnose good.jsonl --postmortem -o",
    ],
)
def test_empty_path_of_an_option_is_refused_too(holdfast, line):
    answer = holdfast(*line.split(), "")
    assert (answer.status, answer.out) == (2, "")
    assert "is a shell variable unset?" in answer.err


def test_empty_option_that_is_no_path_is_accepted(holdfast):
    assert holdfast("ack", "folder", "--note", "").status == 1


@pytest.mark.parametrize("command", [*COMMANDS, "init", "demo"])
def test_unknown_option_is_named(holdfast, command):
    answer = holdfast(*command.split(), "--nope", *([] if command == "demo" else ["missing"]))
    assert answer.status == (78 if command in ("check", "train") else 2)
    assert "--nope" in answer.err and "o such option" in answer.err


@pytest.mark.parametrize(
    "line",
    [
        "demo --steps ten",
        "demo --seed=ten",
        "train missing --stop-at ten",
        "plan --nodes ten",
        "plan --save-cost ten",
        "checkpoints prune folder --keep-last ten",
        "diagnose good.jsonl --map ten",
        "diagnose good.jsonl --format ten",
        "diagnose good.jsonl --fail-on ten",
        "prepare words.log -o out.tokens --tokenizer ten",
        "check good.jsonl ten",
    ],
)
def test_wrong_option_value_is_in_the_message(holdfast, line):
    answer = holdfast(*line.split())
    assert answer.status in (2, 78)
    assert "ten" in answer.err.replace("integer", "")


def test_value_out_of_range_precedes_the_range(holdfast):
    assert "Invalid value for '--steps': '3': Input should be" in holdfast("demo", "--steps", "3").err


def test_refused_log_names_the_option_that_may_help(holdfast):
    answer = holdfast("diff", "words.log", "good.jsonl")
    assert "--map" in answer.err and "; name a run directory or another log" in answer.err
    assert "--map" in holdfast("diagnose", "words.log").err


def test_log_that_begins_with_a_bracket_is_not_called_json(holdfast):
    assert "JSON" not in holdfast("diagnose", "words.log").err


def test_post_mortem_that_cannot_be_written_tells_what_to_do(holdfast):
    answer = holdfast("diagnose", "good.jsonl", "--postmortem", "-o", "folder")
    assert (answer.status, answer.out) == (78, "")
    assert "-o folder: is a folder; name a file in it: -o folder/postmortem.md" in answer.err
    answer = holdfast("diagnose", "good.jsonl", "--postmortem", "-o", "missing/a.md")
    assert "-o missing/a.md: no folder missing; make it: mkdir -p missing" in answer.err


@pytest.mark.parametrize("command", [*RUN_COMMANDS[:4], "replay", "report", "hang", "diff"])
def test_folder_of_runs_names_one_of_them(holdfast, tmp_path, command):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "journal.jsonl").write_text('{"event": "note", "step": 1}\n')
    answer = holdfast(*words(command, "runs"))
    assert answer.status in (1, 78) and "did you mean runs/a?" in " ".join(answer.err.split())


def test_file_is_refused_with_the_folder_that_the_command_needs(holdfast):
    assert "the folder that holds journal.jsonl" in " ".join(holdfast("ack", "words.log").err.split())
    assert "words.log: is a file; name a folder" in " ".join(holdfast("ui", "words.log").err.split())
    assert "missing: no such folder" in " ".join(holdfast("ui", "missing").err.split())


def test_map_to_a_column_that_a_run_directory_does_not_have_is_refused(holdfast, tmp_path):
    (tmp_path / "folder" / "journal.jsonl").write_text('{"event": "note", "step": 1}\n')
    rows = "".join(f'{{"step": {n}, "status": "committed", "loss": 2.0, "train_nll": 2.0}}\n' for n in range(20))
    (tmp_path / "folder" / "metrics.jsonl").write_text(rows)
    answer = holdfast("diagnose", "folder", "--map", "loss=foo")
    assert answer.status == 1 and "--map loss=foo: the log has no column 'foo'" in answer.err
    assert holdfast("diagnose", "folder", "--map", "loss=train_nll").status == 0


def test_entry_that_is_missing_is_answered_with_the_functions_of_its_file(tmp_path):
    (tmp_path / "entries.py").write_text("class Toy: ...\ndef loss_of(): ...\ndef replay_entry(): ...\n")
    with pytest.raises(SetupError, match=r"has no function 'nope'; it has loss_of, replay_entry$"):
        call_entry(f"{tmp_path / 'entries.py'}:nope")
    (tmp_path / "classes.py").write_text("class Toy: ...\n")
    with pytest.raises(SetupError, match=r"has no function 'nope'; write one that returns \(model, step\)$"):
        call_entry(f"{tmp_path / 'classes.py'}:nope")


def test_rank_without_a_bundle_is_answered_with_the_ranks_that_have_one(tmp_path):
    for rank in (0, 3):
        (bundle_folder(tmp_path, 1, rank) / "step_00000012").mkdir(parents=True)
    with pytest.raises(RunDirError, match=r"holds no bundle of rank 5; it has bundles of ranks: 0, 3$"):
        find_bundle(tmp_path, 5)
