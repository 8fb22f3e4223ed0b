"""The source stays easy to follow: a step passes through few files, and every class name means one thing."""

from __future__ import annotations

import pytest
from trace_step import MAX_FILES, MAX_HOPS, Call, StepPath, class_names, report, sizes, trace_step


@pytest.fixture(scope="module")
def path():
    return trace_step()


def test_a_healthy_step_passes_through_few_files(path):
    assert len(path.files) <= MAX_FILES, sorted(path.files)


def test_a_healthy_step_hops_between_files_seldom(path):
    assert path.hops <= MAX_HOPS, report(path)


def test_no_class_name_is_used_twice():
    assert {name: places for name, places in class_names().items() if len(places) > 1} == {}


# The measurements themselves


def test_the_trace_holds_one_whole_step(path):
    functions = [call.function for call in path.calls]
    assert any(name.endswith(".backward") for name in functions)
    assert any(call.file.startswith("core/detectors/") for call in path.calls)
    assert functions.count("Step.__exit__") == 1


def test_a_hop_is_a_call_into_another_file_than_the_call_before():
    path = StepPath([Call("a", "f", ""), Call("a", "g", "a"), Call("b", "h", "a"), Call("a", "g", "a")])
    assert (path.hops, path.calls_between_files, path.files) == (2, 1, {"a", "b"})


def test_sizes_and_names_are_read_from_the_source(tmp_path):
    (tmp_path / "one.py").write_text("class A:\n    def f(self):\n        class B: ...\n")
    (tmp_path / "two.py").write_text("class A: ...\n")
    assert [size.lines for size in sizes(tmp_path)["class"]] == [3, 1, 1]
    assert sizes(tmp_path)["function"] == [(2, "one.py:2 f")]
    assert sizes(tmp_path)["file"] == [(3, "one.py"), (1, "two.py")]
    assert class_names(tmp_path) == {"A": ["one.py", "two.py"], "B": ["one.py"]}
