"""What holds for every command: help, statuses, errors as messages and as JSON."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as package
from holdfast.cli import init
from holdfast.core.base.errors import PolicyStop

COMMANDS = ("demo", "train", "prepare", "init", "check", "ack")


def test_bare_command_shows_help_with_every_command_and_ends_well(holdfast):
    answer = holdfast()
    assert answer.status == 0
    assert answer.err == ""
    assert "Examples:" in answer.out
    for command in COMMANDS:
        assert f"\n  {command} " in answer.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples_that_name_it_and_the_json_switch(holdfast, command):
    answer = holdfast(command, "--help")
    assert holdfast(command, "-h").out == answer.out
    assert answer.status == 0
    examples = answer.out.partition("Examples:")[2]
    assert f"  holdfast {command} " in examples
    assert "--json" in answer.out


def test_installed_program_prints_its_version(installed):
    assert installed("--version") == (0, f"holdfast {package.__version__}\n", "")


def test_unknown_command_is_a_usage_error(holdfast):
    answer = holdfast("initt")
    assert answer.status == 2
    assert answer.out == ""
    assert "initt" in answer.err


def test_usage_error_is_json_too_when_asked_for(holdfast):
    answer = holdfast("ack", "--json")
    assert answer.status == 2
    assert answer.json["ok"] is False
    assert "RUN" in answer.json["errors"][0]
    assert "RUN" in answer.err


def test_bad_configuration_is_status_78_and_no_traceback(installed, tmp_path):
    answer = installed("check", tmp_path / "none.toml")
    assert answer.status == 78
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err


def test_other_user_errors_are_status_1_and_no_traceback(installed, tmp_path):
    answer = installed("ack", tmp_path / "none")
    assert answer.status == 1
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err


def test_error_with_json_is_on_stdout_and_on_stderr(holdfast, tmp_path):
    answer = holdfast("ack", tmp_path / "none", "--json")
    assert answer.json == {"ok": False, "errors": [answer.err.removeprefix("error: ").rstrip()]}


def test_policy_stop_ends_with_its_own_status(holdfast, monkeypatch):
    def stop() -> str:
        raise PolicyStop("a person must look")

    monkeypatch.setattr(init, "template", stop)
    assert holdfast("init", "-") == (70, "", "error: a person must look\n")


def test_system_error_that_names_a_file_is_a_message(holdfast):
    answer = holdfast("ack", "x" * 5000)
    assert answer.status == 1
    assert "File name too long" in answer.err


def test_internal_bug_keeps_its_traceback(holdfast, monkeypatch):
    def bug() -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(init, "template", bug)
    with pytest.raises(ZeroDivisionError):
        holdfast("init", "-")


def test_closed_pipe_causes_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        program = Path(sys.executable).with_name("holdfast")
        done = subprocess.run([program, "init", "-"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writing)
    assert "Traceback" not in done.stderr
    assert done.returncode != 0
