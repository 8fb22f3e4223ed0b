"""What the docs print is what the code does."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import plain

from holdfast.core.base.config import template

ROOT = Path(__file__).parents[2]


def test_the_plain_loop_in_the_docs_is_the_one_compared_with():
    assert inspect.getsource(plain.plain_loop) in (ROOT / "docs" / "exactness.md").read_text()


def test_the_policy_file_in_the_docs_is_the_one_init_writes():
    assert template() in (ROOT / "docs" / "policy.md").read_text()


def test_every_link_between_the_docs_leads_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
        if path.is_file():
            text = path.read_text(errors="replace")
            assert not re.search(r"/(work|root)/" + "main", text), path
