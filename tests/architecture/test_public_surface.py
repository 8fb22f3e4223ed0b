"""The public surface, pinned: a name, command or option that comes or goes is a decision, made here."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import holdfast
from holdfast.cli import main, prune, train, verify
from holdfast.core.base.config import section_types
from holdfast.reference.config import TRAINER_SECTIONS, TrainConfig

PUBLIC = [
    "Config",
    "ConfigError",
    "CutLR",
    "DataError",
    "Finding",
    "Guard",
    "HoldfastError",
    "HoldfastWarning",
    "Hook",
    "Incident",
    "InstabilityError",
    "Kind",
    "MissingDependency",
    "Outcome",
    "Plan",
    "PolicyStop",
    "RanksDisagree",
    "Replay",
    "Rollback",
    "RunDirError",
    "SetupError",
    "Severity",
    "Signal",
    "Skip",
    "SkipData",
    "Status",
    "StepError",
    "StepIncomplete",
    "Stop",
    "TightenClip",
    "__version__",
    "fingerprint",
    "record",
    "resolve_resume_path",
]

COMMANDS = {
    "demo": ([], {"--seed", "--steps", "--folder", "--json"}),
    "train": (["config"], {"--resume", "--stop-at", "--json"}),
    "prepare": (["inputs"], {"--output", "-o", "--tokenizer", "--field", "--json"}),
    "init": (["path"], {"--force", "--json"}),
    "check": (["config"], {"--json"}),
    "ack": (["run"], {"--note", "--json"}),
    "diagnose": (["paths"], {"--json", "--map", "--format", "--fail-on", "--all", "--postmortem", "-o", "--output"}),
    "diff": (["first", "second"], {"--json"}),
    "plan": (
        ["run"],
        {
            "--save-cost", "--write-time", "--step-time", "--mtbf", "--node-mtbf", "--failures-per-day", "--nodes",
            "--world", "--restart", "--certify-after", "--every", "--json",
        },
    ),
    "checkpoints": ([], set()),
    "checkpoints ls": (["run"], {"--json"}),
    "checkpoints verify": (["paths"], {"--all", "--mark", "--json"}),
    "checkpoints prune": (
        ["run"],
        {
            "--keep-last", "--keep-every", "--powers", "--no-powers", "--keep-bad", "--no-verify", "--dry-run", "--yes",
            "--json",
        },
    ),
    "checkpoints resume-path": (["run"], {"--load-path", "--no-verify", "--json"}),
}  # fmt: skip


TRAINERS = {
    "model": [
        "vocab_size", "context", "layers", "heads", "width", "hidden", "qk_norm", "z_loss", "tie_embeddings",
    ],
    "dataset": ["sources", "stages", "eval_share", "workers"],
    "train": [
        "run_dir", "steps", "batch_size", "accumulate", "precision", "compile", "device", "seed", "clip_grad_norm",
        "log_every", "threads",
    ],
    "optimizer": ["lr", "beta1", "beta2", "eps", "weight_decay"],
    "scheduler": ["kind", "warmup_steps", "decay_share", "floor"],
    "eval": ["every", "batches"],
    "distributed": ["data", "shard", "tensor"],
}  # fmt: skip


def test_public_names_are_these():
    assert holdfast.__all__ == PUBLIC


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "Guard"])
def test_public_name_is_there(name):
    assert getattr(holdfast, name) is not None


def test_guard_is_there_when_asked_for():
    source = "import holdfast; print(holdfast.Guard.__name__)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("Guard\n", 0), done.stderr


def test_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Gaurd'"):
        holdfast.Gaurd  # noqa: B018


def test_every_error_is_a_holdfast_error():
    errors = [getattr(holdfast, name) for name in PUBLIC if name.endswith("Error")]
    for error in (*errors, holdfast.MissingDependency, holdfast.PolicyStop, holdfast.StepIncomplete):
        assert issubclass(error, holdfast.HoldfastError)


def test_version_is_the_one_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert holdfast.__version__ == project["version"]


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every command, those of groups under both names."""
    for name, command in group.commands.items():
        yield above + name, command
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")


def test_commands_and_their_options_are_these():
    surface = {}
    for name, command in commands(typer.main.get_command(main.app)):
        arguments = [p.name for p in command.params if p.param_type_name == "argument"]
        options = {opt for p in command.params if p.param_type_name == "option" for opt in p.opts + p.secondary_opts}
        surface[name] = (arguments, options - {"--help"})
    assert surface == COMMANDS


def test_trainers_sections_and_their_keys_are_these():
    own = {
        name: list(kind.__struct_fields__)
        for name, kind in section_types(TrainConfig).items()
        if name in TRAINER_SECTIONS
    }
    assert own == TRAINERS


def test_program_has_no_other_option_than_version():
    program = typer.main.get_command(main.app)
    assert {opt for p in program.params for opt in p.opts} - {"--help"} == {"--version"}


def test_exit_statuses_are_these():
    assert (main.EXIT_ERROR, main.EXIT_BAD_CONFIG, main.EXIT_INTERRUPTED) == (1, 78, 130)
    assert train.EXIT_RESUME == 75
    assert (verify.EXIT_DAMAGED, verify.EXIT_NOTHING, prune.EXIT_NOT_DONE, prune.EXIT_UNASKED) == (1, 3, 1, 2)
    assert holdfast.PolicyStop("stopped").code == 70
