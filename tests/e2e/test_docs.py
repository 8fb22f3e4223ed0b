"""What the docs print is what the code does."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import plain
import pytest
import torch.distributed as dist
import typer.main

from holdfast.cli.main import app
from holdfast.core.base.config import template

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {page.name: re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S) for page in PAGES}
COMMANDS = [
    (page.name, line.partition("#")[0].split("   ")[0].strip())
    for page in PAGES
    for line in re.findall(r"^    ((?:holdfast|make|python|torchrun) .*)$", page.read_text(), re.M)
]

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
"""


def test_the_plain_loop_in_the_docs_is_the_one_compared_with():
    assert inspect.getsource(plain.plain_loop) in (ROOT / "docs" / "exactness.md").read_text()


def test_the_policy_file_in_the_docs_is_the_one_init_writes():
    assert template() in (ROOT / "docs" / "policy.md").read_text()


def test_every_link_between_the_docs_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [name for name, blocks in BLOCKS.items() if blocks])
def test_python_blocks_run_as_printed(page, tmp_path, monkeypatch):
    """The blocks of a page run in order, after the prelude."""
    monkeypatch.chdir(tmp_path)
    Path("holdfast.toml").write_text(template())
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    names: dict[str, object] = {}
    exec(PRELUDE, names)
    try:
        for block in BLOCKS[page]:
            exec(block.replace('"nccl"', '"gloo"').replace(".cuda()", ""), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_exist_with_these_options(page, line):
    words = shlex.split(line)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif "-m" in words:
        module = words[words.index("-m") + 1]
        assert importlib.util.find_spec(module) is not None
        words = words[words.index("-m") + 1 :]
    if words[0] == "holdfast":
        command, arguments = typer.main.get_command(app), words[1:]
        context = command.make_context("holdfast", list(arguments))
        while hasattr(command, "resolve_command"):
            name, command, arguments = command.resolve_command(context, arguments)
            context = command.make_context(name, list(arguments), parent=context)


def test_the_example_prints_what_the_readme_shows(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "loop.py"), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text()
    for line in done.stdout.splitlines():
        # Times and losses are the machine's; what was found and done is not.
        if line.startswith(("recovered", "data left out", "incident")):
            assert f"    {line}\n" in readme, line


def test_the_projects_files_do_not_name_the_machine_they_were_written_on():
    for path in [*ROOT.glob("*.*"), *ROOT.glob("docs/*"), *ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        if path.is_file() and path.name != ".git":
            text = path.read_text(errors="replace")
            assert not re.search(r"/(work|root)/" + "main", text), path
