"""`holdfast init`: the file it writes, and when it writes none."""

from __future__ import annotations

import resource
import tomllib

import pytest

from holdfast.core.base import config


def test_written_file_is_the_default_policy(holdfast, tmp_path):
    path = tmp_path / "a.toml"
    answer = holdfast("init", path)
    assert answer.status == 0
    assert str(path) in answer.out
    assert path.read_text() == config.template()
    assert config.load(path) == config.Config()


def test_default_path_is_holdfast_toml_in_the_working_folder(holdfast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert holdfast("init").status == 0
    assert [p.name for p in tmp_path.iterdir()] == ["holdfast.toml"]


def test_existing_file_is_kept_and_the_message_names_the_cure(holdfast, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("mine")
    answer = holdfast("init", path)
    assert answer.status == 1
    assert "--force" in answer.err
    assert path.read_text() == "mine"


def test_dangling_link_counts_as_existing(holdfast, tmp_path):
    link = tmp_path / "a.toml"
    link.symlink_to(tmp_path / "nowhere")
    assert holdfast("init", link).status == 1
    assert link.is_symlink()


def test_force_replaces_the_file_and_leaves_no_other(holdfast, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("mine")
    answer = holdfast("init", path, "--force", "--json")
    assert answer.json == {"ok": True, "path": str(path), "replaced": True}
    assert path.read_text() == config.template()
    assert list(tmp_path.iterdir()) == [path]


def test_dash_prints_the_policy_and_writes_nothing(holdfast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = holdfast("init", "-")
    assert answer == (0, config.template(), "")
    assert list(tmp_path.iterdir()) == []


def test_dash_with_json_carries_the_text(holdfast):
    answer = holdfast("init", "-", "--json")
    assert tomllib.loads(answer.json["text"]).keys() == config.SECTIONS.keys()


def test_json_has_the_path_and_whether_a_file_was_replaced(holdfast, tmp_path):
    path = tmp_path / "a.toml"
    assert holdfast("init", path, "--json").json == {"ok": True, "path": str(path), "replaced": False}


def test_missing_folder_is_named_and_not_made(holdfast, tmp_path):
    answer = holdfast("init", tmp_path / "none" / "a.toml")
    assert answer.status == 1
    assert f"mkdir -p {tmp_path / 'none'}" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_folder_is_refused_with_the_file_to_name_instead(holdfast, tmp_path, force):
    answer = holdfast("init", tmp_path, *force)
    assert answer.status == 1
    assert str(tmp_path / "holdfast.toml") in answer.err
    assert list(tmp_path.iterdir()) == []


def test_path_under_a_file_is_a_message(holdfast, tmp_path):
    (tmp_path / "file").write_text("mine")
    answer = holdfast("init", tmp_path / "file" / "a.toml")
    assert answer.status == 1
    assert "Not a directory" in answer.err


def test_full_disk_leaves_the_old_file_only(installed, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("mine")

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    answer = installed("init", path, "--force", preexec_fn=full)
    assert answer.status == 1
    assert f"{path} cannot be written: File too large" in answer.err
    assert "Traceback" not in answer.err
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
