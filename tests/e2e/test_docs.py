"""What the docs print is what the code does: every command and every code block in them is run as printed."""

from __future__ import annotations

import csv
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import doc_blocks
import plain
import pytest
import torch
import torch.distributed as dist
import typer.main
from doc_blocks import PAGES, ROOT, Block
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.cli.main import app
from holdfast.core.base import config
from holdfast.core.base.config import template
from marks import slow

# What cannot be run here, and why.
NOT_RUN = {
    r"make ": "runs the tests, the demo or a benchmark",
    r"python -m benchmarks\.": "a benchmark: tests/unit/benchmarks runs them at small sizes",
    r".*configs/160m\.toml": "needs a GPU",
    r"torchrun --nproc-per-node 8 ": "needs 8 GPUs",
    r".* PATH\.\.\.$": "a synopsis",
    r"holdfast ui ": "serves until it is interrupted",
    r"holdfast report .*\.png": "needs matplotlib",
}
STATUS = {
    "holdfast diagnose runs/* --fail-on nan --fail-on divergence": 3,  # runs/b has a NaN
    "holdfast hang runs/a": 3,  # it has none
    "holdfast replay runs/a --entry train.py:entry": 1,  # it has no incident
    "holdfast replay runs/a/incidents/0001 --entry train.py:replay_entry": 1,
    "holdfast replay runs/a": 1,
    "holdfast replay /mnt/usb/0001 --device cpu --json": 1,
    "holdfast hang /tmp/nccl_trace_rank_* stacks_rank_2.txt": 1,  # there are no such files
}


def every_command() -> list[str]:
    return list(dict.fromkeys(command for block in doc_blocks.blocks() for command in doc_blocks.commands(block)))


def reason_not_to_run(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)


def train(run_dir: Path, seed: int = 0, bad: int | None = None, fails: int | None = None) -> None:
    """A small run with checkpoints. The batch of step `bad` is NaN; the program fails in step `fails`."""
    torch.manual_seed(seed)
    x = torch.randn(4 * 60, 8)
    y = x.sum(1, keepdim=True).sin()
    if bad is not None:
        x[4 * bad : 4 * bad + 4] = float("nan")
    model = torch.nn.Linear(8, 1)
    checkpoint = {"every_steps": 10, "certify_after": 2, "keep_last": 2}
    guard = holdfast.Guard(
        model, torch.optim.AdamW(model.parameters(), 1e-3), run_dir=run_dir, config={"checkpoint": checkpoint}
    )
    with guard:
        for step in guard.steps(DataLoader(TensorDataset(x, y), 4), epochs=1):
            if step.number == fails:
                raise RuntimeError("out of luck")
            with step:
                for batch, target in step.microbatches():
                    step.backward(torch.nn.functional.mse_loss(model(batch), target))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder with everything that the docs name: runs, logs of other tools, text, a policy."""
    folder = tmp_path_factory.mktemp("docs")
    with warnings.catch_warnings(action="ignore", category=holdfast.HoldfastWarning):
        with pytest.raises(RuntimeError, match="out of luck"):
            train(folder / "runs" / "a", fails=25)
        train(folder / "runs" / "a")
        train(folder / "runs" / "b", seed=1, bad=30)
    for name in ("good", "bad"):
        shutil.copytree(folder / "runs" / ("a" if name == "good" else "b"), folder / "runs" / name)
    losses = [3.0 / (1 + n / 50) + 0.01 * (n % 7) for n in range(200)]
    history = [{"step": n + 1, "loss": loss, "epoch": n / 100, "learning_rate": 1e-4} for n, loss in enumerate(losses)]
    (folder / "old").mkdir()
    for state in (folder / "trainer_state.json", folder / "old" / "trainer_state.json"):
        state.write_text(json.dumps({"log_history": history, "global_step": 200, "max_steps": 200}))
    lines = [f" iteration {n + 1:8d}/ 200 | lm loss: {loss:.6E} | grad norm: 1.000" for n, loss in enumerate(losses)]
    (folder / "slurm-1234.out").write_text("\n".join(lines) + "\n")
    (folder / "slurm-4711.out").write_text(
        "[rank3]:[E1118 03:12:44.123456789 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=712, OpType=ALLREDUCE, NumelIn=4096, Timeout(ms)=600000) ran for 600029 milliseconds\n"
    )
    with (folder / "log.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["iter", "nll", "train_nll"])
        rows.writerows([n, loss, loss] for n, loss in enumerate(losses))
    for name in ("books", "data", "data/train"):
        (folder / name).mkdir()
    (folder / "books" / "one.txt").write_text("It was the best of times, it was the worst of times.\n" * 200)
    (folder / "evaluate.py").write_text("import os, sys\nassert os.path.isdir(sys.argv[2])\n")
    shutil.copytree(ROOT / "configs", folder / "configs")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", [c for c in every_command() if not reason_not_to_run(c)])
def test_every_command_in_the_docs_runs(command, prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "docs")
    if not command.startswith("holdfast init"):
        (folder / "holdfast.toml").write_text(template())
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == STATUS.get(command, 0), f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr


# What a page leaves to the reader.
PRELUDE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import holdfast

class MyHook(holdfast.Hook):
    def on_step_end(self, outcome): ...

torch.manual_seed(0)
model, scaler, inputs = torch.nn.Linear(4, 1), None, torch.randn(64, 4)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, 8)
tokenizer = {"a": 0}
batch, world_size, accumulate = inputs[:8], 1, 1
"""
PYTHON = [block for block in doc_blocks.blocks() if doc_blocks.is_python(block)]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", *slow(*sorted({block.page for block in PYTHON} - {"README.md"}))])
def test_every_python_block_in_the_docs_runs(page, tmp_path, monkeypatch):
    """The blocks of a page run in order, after the prelude. They run on the CPU if they name a GPU."""
    monkeypatch.chdir(tmp_path)
    Path("holdfast.toml").write_text(template())
    Path("data/train").mkdir(parents=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    names: dict[str, object] = {}
    exec(PRELUDE, names)
    try:
        for block in PYTHON:
            if block.page == page:
                if "guard" not in names and re.search(r"\bguard\b(?! = )", block.text.partition("guard = ")[0]):
                    names["guard"] = open_guard(names)
                text = block.text.replace('"nccl"', '"gloo"').replace(".cuda()", "")
                exec(compile(text, str(block), "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_guard(names: dict[str, Any]) -> holdfast.Guard:
    """Return the guard of a run that exists, for a block that needs one and does not make it."""
    guard = holdfast.Guard(names["model"], names["optimizer"], run_dir="runs/a")
    with guard:
        pass
    return guard


@pytest.mark.parametrize("block", [b for b in doc_blocks.blocks() if b.language == "toml"], ids=str)
def test_every_policy_in_the_docs_is_valid(block: Block):
    config.load(tomllib.loads(block.text))  # raises if a key is wrong


@pytest.mark.parametrize("command", every_command())
def test_every_command_in_the_docs_exists_with_these_options(command):
    words = shlex.split(command)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif "-m" in words:
        module = words[words.index("-m") + 1]
        assert importlib.util.find_spec(module) is not None
        words = words[words.index("-m") + 1 :]
    if words[0] == "holdfast":
        program, arguments = typer.main.get_command(app), words[1:]
        context = program.make_context("holdfast", list(arguments))
        while hasattr(program, "resolve_command"):
            name, program, arguments = program.resolve_command(context, arguments)
            context = program.make_context(name, list(arguments), parent=context)


def test_every_exception_is_still_printed():
    commands = every_command()
    assert [p for p in NOT_RUN if not any(re.match(p, command) for command in commands)] == []
    assert set(STATUS) <= set(commands)


def test_the_reader_finds_indented_and_fenced_commands(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n    holdfast check a.toml      what it does\n    not a command\n\n    X=1 holdfast init  # and this\n\n"
        "- a list\n\n```sh\npython -m a \\\n  --b\n```\n\n    $ holdfast ls\n    holdfast printed this\n\n"
        "```python\nholdfast.Guard()\n```\n\n    holdfast.record(guard, a=1)\n"
    )
    found = list(doc_blocks.blocks([page]))
    assert [doc_blocks.commands(block) for block in found] == [
        ["holdfast check a.toml", "X=1 holdfast init"],
        ["python -m a --b"],
        ["holdfast ls"],
        [],
        [],
    ]
    assert [doc_blocks.is_python(block) for block in found] == [False, False, False, True, True]
    assert (found[0].line, found[1].line) == (3, 11)


def test_the_plain_loop_in_the_docs_is_the_one_compared_with():
    assert inspect.getsource(plain.plain_loop) in (ROOT / "docs" / "exactness.md").read_text()


def test_the_policy_file_in_the_docs_is_the_one_init_writes():
    assert template() in (ROOT / "docs" / "policy.md").read_text()


def test_every_link_between_the_docs_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_example_prints_what_the_readme_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["loop", str(tmp_path / "run")])
    runpy.run_module("holdfast.examples.loop", run_name="__main__")
    readme = (ROOT / "README.md").read_text()
    printed = capsys.readouterr().out
    shown = [line for line in printed.splitlines() if line.startswith(("recovered", "data left out", "incident"))]
    assert len(shown) >= 4
    for line in shown:  # Times and losses are the machine's; what was found and done is not.
        assert f"    {line}\n" in readme, line


def test_the_projects_files_do_not_name_the_machine_they_were_written_on():
    for path in [*ROOT.glob("*.*"), *ROOT.glob("docs/*"), *ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        if path.is_file() and path.name != ".git":
            text = path.read_text(errors="replace")
            assert not re.search(r"/(work|root)/" + "main", text), path
