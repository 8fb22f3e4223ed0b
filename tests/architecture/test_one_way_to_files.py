"""Files are opened, made and removed by core/base/durable.py alone, which follows no link and waits for no pipe."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from package_imports import PACKAGE

DURABLE = "core/base/durable.py"
OTHER_FILES = {
    "core/base/config.py": "the policy file that the user names",
    "core/profile/trace.py": "the trace that the user names",
    "core/record/fingerprint.py": "the user's data and tokenizer",
    "diagnosis/importers/reading/log_source.py": "the log that the user names",
    "diagnosis/tree/load.py": "part of the package",
    "reports/page.py": "part of the package",
    "reference/prepare.py": "texts that the user names",
    "reference/tokens.py": "token files that the user names",
    "reference/trainer.py": "a probe whose name tempfile makes",
    "runtime/record/environment.py": "the git repository and the script of the user",
    "runtime/record/memory_readings.py": "/proc",
    "runtime/snapshots/memory.py": "/proc and /sys",
    "trainers/lightning_state.py": "checkpoints of Lightning's own",
}
"""modules that open files, none of which is in a run directory"""
PATH_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "unlink", "rmdir", "touch", "rename"}
OS_CALLS = {
    "open",
    "mkdir",
    "makedirs",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "removedirs",
    "symlink",
    "link",
}


def file_calls(tree: ast.AST) -> Iterator[str]:
    """Yield every use of a call that opens, makes, renames or removes a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            yield from names & {"shutil", "tempfile", "gzip"}
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner in ("os", "io") and node.attr in OS_CALLS) or (owner != "durable" and node.attr in PATH_METHODS):
                yield f"{owner}.{node.attr}, line {node.lineno}"
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            mode = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            is_path_open = isinstance(node.func, ast.Attribute) and node.func.attr == "open" and isinstance(mode, str)
            if name == "open" or (is_path_open and set(str(mode)) <= set("rwabxt+")):
                yield f"open, line {node.lineno}"


def test_files_of_a_run_directory_are_opened_one_way():
    calls = {
        path.relative_to(PACKAGE).as_posix(): sorted(set(file_calls(ast.parse(path.read_text(encoding="utf-8")))))
        for path in PACKAGE.rglob("*.py")
    }
    known = {DURABLE, *OTHER_FILES}
    assert {name: found for name, found in calls.items() if found and name not in known} == {}, (
        "use core/base/durable.py"
    )
    assert [name for name in known if not calls[name]] == [], "these open no files any more"
