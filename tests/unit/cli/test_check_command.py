"""`holdfast check` reports all errors of a file at once, or the keys that are not at their default."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli import overrides
from holdfast.core.base import config


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("[recover]\nmode = 'heal'\nskip_batches = 7\n")
    return path


def test_default_policy_is_ok_and_changes_nothing(holdfast, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(config.template())
    answer = holdfast("check", path)
    assert answer.status == 0
    assert answer.out == f"ok: {path}; every key has its default\n"


def test_keys_that_differ_are_listed_with_value_and_default(holdfast, policy):
    answer = holdfast("check", policy)
    assert answer.status == 0
    assert answer.out.startswith("ok: ")
    row = next(line for line in answer.out.splitlines() if "recover.skip_batches" in line)
    assert "7" in row
    assert "200" in row
    assert "recover.mode" not in answer.out


def test_json_lists_the_same(holdfast, policy):
    answer = holdfast("check", policy, "--recover.ladder=['stop']", "--json")
    assert answer.json == {
        "ok": True,
        "config": str(policy),
        "changed": {
            "recover.skip_batches": {"value": 7, "default": 200},
            "recover.ladder": {"value": ["stop"], "default": ["replay", "skip", "rollback", "stop"]},
        },
    }


def test_overrides_may_be_anywhere_on_the_command_line(holdfast, policy):
    answer = holdfast("check", "--recover.mode=observe", policy, "--detect.loss_z=10", "--json")
    assert set(answer.json["changed"]) == {"recover.mode", "detect.loss_z", "recover.skip_batches"}
    assert answer.json["changed"]["detect.loss_z"]["value"] == 10.0


def test_override_wins_over_the_file(holdfast, policy):
    changed = holdfast("check", policy, "--recover.skip_batches=9", "--json").json["changed"]
    assert changed == {"recover.skip_batches": {"value": 9, "default": 200}}


def test_every_error_of_file_and_command_line_is_reported_at_once(holdfast, policy):
    policy.write_text("[recover]\nmod = 'heal'\n[snapshot]\nevery_steps = 0\n[nowhere]\n")
    answer = holdfast("check", policy, "--detect.loss_z=-1", "--verbose", "more.toml", "--json")
    assert answer.status == 78
    expected = ("'--verbose'", "'more.toml'", "[recover] mod", "[snapshot] every_steps", "[nowhere]", "[detect] loss_z")
    assert len(answer.json["errors"]) == len(expected)
    for name, error in zip(expected, answer.json["errors"], strict=True):
        assert error.startswith(name)
        assert error in answer.err


def test_errors_as_text_leave_stdout_empty(holdfast, policy):
    policy.write_text("[nowhere]\n")
    answer = holdfast("check", policy)
    assert answer.status == 78
    assert answer.out == ""
    assert "1 error\n" in answer.err


def test_broken_toml_is_a_message_with_its_line(holdfast, policy):
    policy.write_text("[recover]\nmode = \n")
    answer = holdfast("check", policy)
    assert answer.status == 78
    assert "line 2" in answer.err


def test_missing_file_names_the_command_that_writes_one(holdfast, tmp_path):
    answer = holdfast("check", tmp_path / "none.toml")
    assert answer.status == 78
    assert "holdfast init" in answer.err


def test_overrides_without_a_file_ask_for_it(holdfast):
    answer = holdfast("check", "--recover.mode=observe")
    assert answer.status == 78
    assert "holdfast check CONFIG" in answer.err


def test_value_after_a_space_is_one_error_that_shows_how_to_write_it(holdfast, policy):
    answer = holdfast("check", policy, "--recover.mode", "observe", "--json")
    assert answer.status == 78
    (error,) = answer.json["errors"]
    assert "--recover.mode=observe" in error


def test_markup_in_a_value_is_shown_as_it_is(holdfast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("[recover]\nmode = '[red]'\n")
    assert "'[red]'" in holdfast("check", "a.toml").err


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("--verbose", "--section.key=value"),
        ("-x", "--section.key=value"),
        ("--recover=1", "--section.key=value"),
        ("--.mode=1", "--section.key=value"),
        ("--recover.=1", "--section.key=value"),
        ("--=1", "--section.key=value"),
        ("-recover.mode=observe", "--section.key=value"),
        ("--recover.mode", "--recover.mode=VALUE"),
    ],
)
def test_word_that_is_no_override_is_an_error_with_the_cure(word, cure):
    words = overrides.parse_words(["a.toml", word])
    assert words.overrides == []
    (error,) = words.errors
    assert repr(word) in error
    assert cure in error


@pytest.mark.parametrize("word", ["--recover.mode=observe", "--a.b=", "--a.b.c==x", "--a.b=two words", "--a.b=1\n2"])
def test_override_is_distinguished_from_the_file(word):
    assert overrides.parse_words([word, "a.toml"]) == ("a.toml", [word], [])


def test_only_the_word_right_after_an_option_is_taken_for_its_value():
    words = overrides.parse_words(["a.toml", "--recover.mode", "--detect.loss_z=9", "b.toml"])
    assert words.overrides == ["--detect.loss_z=9"]
    missing, second = words.errors
    assert "--recover.mode=VALUE" in missing
    assert "only one file" in second


# ---- trainer files

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration_is_ok(holdfast, path):
    answer = holdfast("check", path)
    assert answer.status == 0
    assert "train.run_dir" in answer.out


def test_changed_trainer_keys_are_listed_with_those_of_the_policy(holdfast, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[train]\nsteps = 77\n[recover]\nskip_batches = 7\n[[dataset.sources]]\npath = 'a'\n")
    assert holdfast("check", path, "--optimizer.lr=1e-3", "--json").json["changed"] == {
        "recover.skip_batches": {"value": 7, "default": 200},
        "dataset.sources": {"value": [{"path": "a", "weight": 1.0}], "default": []},
        "train.steps": {"value": 77, "default": 400},
        "optimizer.lr": {"value": 1e-3, "default": 3e-3},
    }
    table = holdfast("check", path)
    assert table.status == 0
    assert "train.steps" in table.out


def test_errors_in_both_kinds_of_section_are_reported_at_once(holdfast, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[model]\nwidht = 3\nwidth = 30\n[recover]\nmod = 'heal'\n[[dataset.sources]]\nfile = 'a'\n")
    answer = holdfast("check", path, "--json")
    assert answer.status == 78
    expected = ("[model] widht", "[model] width = 30", "[recover] mod", "[[dataset.sources]] number 1: file")
    for name in expected:
        assert sum(error.startswith(name) for error in answer.json["errors"]) == 1
    assert all(error in answer.err for error in answer.json["errors"])


def test_one_trainer_section_makes_it_a_trainer_file(holdfast, policy):
    assert holdfast("check", policy, "--train.steps=10", "--scheduler.warmup_steps=20").status == 78
    assert holdfast("check", policy, "--train.steps=100").status == 0


def test_policy_file_gets_no_trainer_sections_suggested(holdfast, policy):
    policy.write_text("[recovr]\nmode = 'heal'\n")
    assert "did you mean 'recover'?" in holdfast("check", policy).err


def test_what_check_accepts_is_what_train_accepts(holdfast, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[model]\nwidth = 30\n[trian]\n")
    checked, trained = (holdfast(command, path, "--json").json["errors"] for command in ("check", "train"))
    assert checked == trained
    assert len(checked) == 2
