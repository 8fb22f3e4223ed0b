"""The wheel holds all that the README shows: the shipped configurations and the examples, run from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--model.layers=1", "--model.context=16", "--eval.batches=1", "--train.threads=1")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build the wheel from a copy of the sources, offline, and unpack it: the environment stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source, wheels, target = folder / "source", folder / "wheels", folder / "site"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source, cwd=folder)
    (wheel,) = wheels.glob("*.whl")
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--target", target, wheel, cwd=folder)
    return target


def run(*words: object, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=200, **options)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def from_wheel(installed, tmp_path):
    """Run Python on the unpacked wheel, in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    place = run(sys.executable, "-c", "import holdfast; print(holdfast.__file__)", cwd=tmp_path, env=environment)
    assert Path(place.stdout.strip()).is_relative_to(installed)
    return lambda *words: run(sys.executable, *words, cwd=tmp_path, env=environment)


@pytest.mark.slow
def test_shipped_configuration_trains_from_an_empty_folder(from_wheel, tmp_path):
    steps = ("--train.steps=3", "--scheduler.warmup_steps=1")
    done = from_wheel("-m", "holdfast", "train", "configs/tiny.toml", *steps, *SMALL)
    assert "configs/tiny.toml: not in this folder; using the file that ships with holdfast" in done.stderr
    assert "clean: 3 steps committed" in done.stderr
    assert (tmp_path / "runs" / "tiny" / "journal.jsonl").is_file()


@pytest.mark.slow
def test_type_checkers_find_the_marker_of_a_typed_package(installed):
    assert (installed / "holdfast" / "py.typed").is_file()


@pytest.mark.slow
def test_every_shipped_configuration_is_valid(from_wheel):
    for name in ("tiny", "160m", "1.4b"):
        assert from_wheel("-m", "holdfast", "check", f"configs/{name}.toml").stdout.startswith("ok: ")


@pytest.mark.slow
def test_example_loop_recovers_as_the_readme_shows(from_wheel):
    shown = (ROOT / "README.md").read_text().partition("python -m holdfast.examples.loop")[2]
    lines = [line.strip() for line in shown.split("\n\n")[1].splitlines()]
    assert len(lines) == 4
    assert set(lines) <= set(from_wheel("-m", "holdfast.examples.loop").stdout.splitlines())
