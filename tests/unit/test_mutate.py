"""The mutation sampler: what it changes, and what it makes of the results."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mutate


def made(source: str) -> set[str]:
    """Return every mutant of a source, as whole text; each is valid Python."""
    texts = {mutant.apply(source.encode()).decode() for mutant in mutate.mutants_of(Path("a.py"), source)}
    for text in texts:
        ast.parse(text)
    return texts


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {"x = (a <= b)"}),
        ("x = a < b <= c", {"x = (a <= b <= c)", "x = (a < b < c)"}),
        ("x = a is not b", {"x = (a is b)"}),
        ("x = a in b", {"x = (a not in b)"}),
        ("x = a and b and c", {"x = (a or b or c)"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x = a // b", {"x = (a * b)"}),
        ("x = f(3)", {"x = f((2))", "x = f((4))"}),
        ("x = 0.5", {"x = (-0.5)", "x = (1.5)"}),
        ("x = True", {"x = False"}),
        ("if a:\n    b()", {"if (not a):\n    b()", "if a:\n    pass"}),
        ("while not a:\n    b = c", {"while (a):\n    b = c"}),
        ("x = a if b else c", {"x = a if (not b) else c"}),
        (
            "def f():\n    os.fsync(3)",
            {"def f():\n    pass", "def f():\n    os.fsync((2))", "def f():\n    os.fsync((4))"},
        ),
        ("def f():\n    return x", {"def f():\n    return None"}),
        ("self.x = y", {"pass"}),
        ("x += y", {"pass"}),
        ("for x in y:\n    continue", {"for x in y:\n    pass"}),
        ("raise x", {"pass"}),
        ("é = 'ü'; x = a < b", {"é = 'ü'; x = (a <= b)"}),
        ("x = (\n    a <\n    b\n)", {"x = (\n    (a <= b)\n)"}),
    ],
)
def test_every_operator_changes_what_it_is_for(source, expected):
    assert made(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "x: int | None = y",
        "def f(a: Literal[3]) -> Literal[4]: ...",
        "@cache(3)\nclass A(B[3]): ...",
        "assert a < 3",
        'x = f"{a < 3}"',
        "x = y + 'text'",
        "if TYPE_CHECKING:\n    import a",
        "x = y",
        "return_nothing = None",
        "def f():\n    return None",
    ],
)
def test_what_says_nothing_about_behaviour_is_left_alone(source):
    assert made(source) == set()


def test_a_mutant_has_its_line_and_its_diff(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n\ny = a < b\n")
    (mutant,) = [m for m in mutate.all_mutants(tmp_path, ["a.py"]) if m.kind == "comparison"]
    assert (mutant.path, mutant.line) == (Path("a.py"), 3)
    assert mutant.diff(tmp_path).splitlines()[-2:] == ["-y = a < b", "+y = (a <= b)"]


def test_the_same_seed_draws_the_same_mutants_from_different_places():
    every = mutate.mutants_of(Path("a.py"), "\n".join(f"x = f({n})" for n in range(2, 50)))
    drawn = mutate.draw(every, 20, seed=1)
    assert drawn == mutate.draw(every, 20, seed=1) != mutate.draw(every, 20, seed=2)
    assert len({mutant.line for mutant in drawn}) == 20
    assert {mutant.text for mutant in mutate.draw(every, 99, seed=1)} != {mutant.text for mutant in every[::2]}
    assert len(mutate.draw(every, 99, seed=1)) == 48


def test_files_that_need_a_gpu_are_left_out(tmp_path):
    (tmp_path / "kernel.py").write_text("try:\n    import triton\nexcept ImportError:\n    x = 1 < 2\n")
    assert mutate.all_mutants(tmp_path, ["."]) == []


def test_tests_that_import_the_module_come_first_and_expensive_ones_last():
    likely, others = mutate.tests_by_likelihood(mutate.ROOT, Path("src/holdfast/core/record/journal.py"))
    assert "tests/unit/core/test_journal.py" in likely and len(likely) < len(others)
    assert others.index("tests/e2e/test_exact.py") < others.index("tests/architecture/test_layers.py")
    assert len(set(likely + others)) == len(likely) + len(others) > 100


@pytest.mark.parametrize(
    ("noticed", "count", "low", "high"), [(64, 64, 0.9434, 1.0), (95, 100, 0.8882, 0.9785), (0, 0, 0, 1)]
)
def test_interval_is_wilson_s(noticed, count, low, high):
    assert mutate.wilson(noticed, count) == pytest.approx((low, high), abs=1e-4)


def test_report_lists_survivors_and_the_share(tmp_path):
    (tmp_path / "a.py").write_text("y = a < b\nz = c < d\n")
    one, other = mutate.all_mutants(tmp_path, ["a.py"])
    text = mutate.report([mutate.Result(one, True, "t", 1.0), mutate.Result(other, False, "", 1.0)], tmp_path)
    assert "survived: a.py:2: comparison" in text and "+z = (c <= d)" in text and "a.py:1" not in text
    assert text.splitlines()[-1].startswith("1 of 2 noticed: 50.0% (95% interval ")
