"""Whatever is shown passes the cleaning function: nothing else prints, and no other console is made."""

from __future__ import annotations

import re

from package_imports import PACKAGE

# Help texts and the policy template are the package's own, and keep their layout.
PRINTS_ITS_OWN_TEXT = re.compile(r"typer\.echo\((context\.get_help\(\)|template\(\))")
PRINTS = re.compile(r"(?<![\w.])(print|Console)\(|typer\.(echo|secho)\(|sys\.(stdout|stderr)\.write\(")
MAY_PRINT = {"cli/output.py", "reports/console.py"}


def test_only_the_cleaning_console_and_the_cleaning_echo_print():
    printing = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in MAY_PRINT and path.parent.name != "examples"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PRINTS.search(line) and not PRINTS_ITS_OWN_TEXT.search(line)
    ]
    assert printing == []


def test_every_logger_is_the_cleaned_one():
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    named = {name for text in texts.values() for name in re.findall(r"getLogger\(([^)]*)\)", text)}
    assert named <= {'"holdfast"', ""}, "records of another logger are not cleaned"
    with_root = [path for path, text in texts.items() if "getLogger()." in text.replace("getLogger().handlers", "")]
    assert with_root == []
