"""`holdfast init`: the file it writes, and when it writes none."""

from __future__ import annotations

import resource
import shutil
import subprocess
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


@pytest.mark.parametrize(
    ("option", "name", "use"), [("--slurm", "train.sbatch", "sbatch"), ("--torchrun", "train.sh", "bash")]
)
def test_script_is_written_beside_the_program_and_the_message_says_how_to_use_it(
    holdfast, tmp_path, monkeypatch, option, name, use
):
    monkeypatch.chdir(tmp_path)
    answer = holdfast("init", option, "--", "train.py", "--lr", "3e-4")
    assert answer.status == 0
    assert f"wrote {name}; " in answer.out and f"{use} {name}" in answer.out
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert "    train.py --lr 3e-4" in (tmp_path / name).read_text()
    assert holdfast("init", option).status == 1


@pytest.mark.parametrize(
    ("option", "more"),
    [
        *((option, more) for option in ("--slurm", "--torchrun") for more in ([], ["--nodes", "2", "--gpus", "8"])),
        ("--slurm", ["--gpus", "0", "--array", "0-3"]),
        ("--torchrun", ["--gpus", "0"]),
    ],
)
def test_script_is_valid_shell(holdfast, tmp_path, option, more):
    path = tmp_path / "a b.sh"
    assert holdfast("init", option, path, *more, "--", "python", "-m", "x", "it's", "a b").status == 0
    text = path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    assert """ -m x 'it'"'"'s' 'a b'""" in text
    assert "python" not in text
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


def test_options_are_in_the_batch_script(holdfast):
    text = holdfast("init", "--slurm", "-", "--nodes", "2", "--gpus", "4", "--time", "7:00", "--array", "0-3").out
    lines = [line.split("  ")[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert lines == [
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH --time=7:00",
        "#SBATCH --array=0-3",
        "#SBATCH --output=%x-%A_%a.out",
        "#SBATCH --signal=USR1@180",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    assert "--nproc-per-node 4 " in text
    without = holdfast("init", "--slurm", "-", "--gpus", "0", "--processes", "3").out
    assert "gpus" not in without and "%x-%j.out" in without and "--nproc-per-node 3 " in without


def test_dash_and_json_carry_the_script(holdfast):
    assert holdfast("init", "--torchrun", "-", "--json").json["text"] == holdfast("init", "--torchrun", "-").out


def test_command_without_a_kind_of_script_is_refused(holdfast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = holdfast("init", "--", "train.py")
    assert answer.status == 2 and "'train.py'" in answer.err and "--slurm or --torchrun" in answer.err
    assert holdfast("init", "--slurm", "--torchrun").status == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "option"),
    [
        *(((name, "2"), name) for name in ("--nodes", "--gpus", "--processes", "--time", "--array")),
        (("--torchrun", "--time", "7:00"), "--time"),
        (("--torchrun", "--array", "0-3"), "--array"),
    ],
)
def test_option_that_the_file_would_not_hold_is_refused(holdfast, words, option):
    answer = holdfast("init", "-", *words)
    assert answer.status == 2 and option in answer.err and "needs --slurm" in answer.err and answer.out == ""


@pytest.mark.parametrize("text", ["foo", "1:00\n#SBATCH --uid=0", "1:00 --uid=0", ""])
def test_value_that_would_add_a_line_to_the_script_is_refused(holdfast, text):
    for option in ("--time", "--array"):
        assert holdfast("init", "--slurm", "-", option, text).status == 2
