"""The public surface, pinned: a name, command or option that comes or goes is a decision, made here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import holdfast
from holdfast import resilience
from holdfast.cli import main, prune, train, verify
from holdfast.core.base import errors
from holdfast.core.base.config import section_types
from holdfast.core.base.probe_result import EXIT_FAILED, EXIT_WARNING
from holdfast.reference.config import TRAINER_SECTIONS, TrainConfig

PUBLIC = [
    "Config",
    "ConfigError",
    "CutLR",
    "DataError",
    "Detector",
    "Finding",
    "Guard",
    "HoldfastError",
    "HoldfastWarning",
    "Hook",
    "Incident",
    "InstabilityError",
    "Kind",
    "LogRefused",
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
    "Shutdown",
    "Signal",
    "Skip",
    "SkipData",
    "Span",
    "Status",
    "Step",
    "StepError",
    "StepIncomplete",
    "Stop",
    "Summary",
    "TightenClip",
    "UnreadableError",
    "__version__",
    "fingerprint",
    "open_run",
    "record",
    "resolve_resume_path",
]

NEED_TORCH = ["Guard", "Step"]

COMMANDS = {
    "demo": ([], {"--seed", "--steps", "--folder", "--json"}),
    "train": (["config"], {"--resume", "--stop-at", "--json"}),
    "prepare": (["inputs"], {"--output", "-o", "--tokenizer", "--field", "--json"}),
    "init": (
        ["path"],
        {"--slurm", "--torchrun", "--nodes", "--gpus", "--processes", "--time", "--array", "--force", "--json"},
    ),
    "check": (["config"], {"--json"}),
    "ack": (["run"], {"--note", "--release-data", "--json"}),
    "diagnose": (["paths"], {"--json", "--map", "--format", "--fail-on", "--all", "--postmortem", "-o", "--output"}),
    "diff": (["first", "second"], {"--html", "--json", "--map"}),
    "report": (["run"], {"-o", "--output", "--format", "--map", "--json"}),
    "ui": (["folder"], {"--host", "--port", "--token", "--json"}),
    "hang": (["paths"], {"--all", "--json"}),
    "replay": (["incident"], {"--entry", "--device", "--rank", "--seconds", "--json"}),
    "plan": (
        ["run"],
        {
            "--save-cost", "--write-time", "--step-time", "--mtbf", "--node-mtbf", "--failures-per-day", "--nodes",
            "--world", "--restart", "--certify-after", "--every", "--json", "--params", "--dtype", "--optimizer-states",
            "--state-dtype", "--ranks", "--ranks-per-host", "--host-memory", "--memory-gb",
        },
    ),
    "doctor": (["folder"], {"--quick", "--strict", "--excluded", "--format", "--json"}),
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
    "checkpoints export": (["checkpoint"], {"--format", "--output", "-o", "--json"}),
    "checkpoints resume-path": (["run"], {"--load-path", "--no-verify", "--json"}),
}  # fmt: skip

STAND_ALONE = [
    "DeviceMemoryMonitor", "LossSpikeWatchdog", "MetricsTracker", "NaNDetector", "NaNState", "SLURMInfo",
    "ShutdownHandler", "check_gpu_health", "check_nccl_health", "count_flops", "get_slurm_info", "is_slurm_job",
    "is_slurm_requeue", "log_job_info", "print_profiler_summary", "resolve_resume_path", "seconds_left",
]  # fmt: skip

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


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NEED_TORCH])
def test_public_name_is_there(name):
    assert getattr(holdfast, name) is not None


def test_names_that_need_torch_are_there_when_asked_for():
    source = "import holdfast; print(holdfast.Step.__name__, holdfast.Guard.__name__)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("Step Guard\n", 0), done.stderr


def test_parts_that_stand_alone_are_these():
    assert sorted(resilience.__all__) == sorted(STAND_ALONE)
    assert all(callable(getattr(resilience, name)) for name in STAND_ALONE)


def test_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Gaurd'"):
        holdfast.Gaurd  # noqa: B018


def test_every_error_is_public_and_drawn_in_the_tree_under_its_base():
    drawn: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"( {4}[ │├└─]*)(\w+) ", line):
            indent, name = len(match[1]), match[2]
            above = [pair for pair in above if pair[0] < indent]
            drawn[name] = above[-1][1] if above else None
            above.append((indent, name))
    defined = {n: v for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, BaseException)}
    bases = {name: value.__bases__[0].__name__ for name, value in defined.items()}
    assert drawn == {name: base if base in defined else None for name, base in bases.items()}
    assert all(getattr(holdfast, name) is value for name, value in defined.items())


def test_every_policy_stop_is_logged_where_it_is_made():
    """A PolicyStop is an Exception: an `except Exception` around the loop catches it, and the log line remains."""
    source = Path(holdfast.__file__).parent
    makers = []
    for path in source.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                if "PolicyStop" in calls:
                    makers.append(function.name)
                    assert "log.error" in calls, f"{path.relative_to(source)}: {function.name}"
    assert sorted(makers) == ["_refuse_if_stopped", "close", "perform", "run_on_all"]


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
    assert (EXIT_WARNING, EXIT_FAILED) == (3, 4)
    assert holdfast.PolicyStop("stopped").code == 70
