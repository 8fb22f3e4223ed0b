"""The verdict names the rank, the phase and the line; it excuses what may take long."""

from __future__ import annotations

from typing import Any

import pytest
from flight_dumps import dump, steps

from holdfast.core.hang.verdict import RankReport, WorkerReport, judge, judge_death, render

FIRST, SECOND = ("all_reduce", [3]), ("all_gather", [5])
LIBRARY = "/usr/lib/python3.11/site-packages/torch"


def stack(*frames: str, thread: int = 0xAB) -> str:
    lines = [
        f"Thread 0x{thread:016x} (most recent call first):",
        *(f'  File "{f}", line {n} in f{n}' for n, f in enumerate(frames)),
    ]
    return "\n".join(lines) + "\n"


def report(rank: int, phase: str = "forward", **more: Any) -> RankReport:
    defaults = {"pid": 100 + rank, "host": "a", "step": 7, "seconds": 9.0, "timeout": 8.0, "state": "S", "thread": 0xAB}
    return RankReport(**{"rank": rank, "phase": phase, **defaults, **more})


def test_one_process_is_named_with_phase_step_and_line():
    found = judge([report(0, stacks=stack(f"{LIBRARY}/nn/linear.py", "/home/me/train.py"))], 1)
    assert (found.kind, found.culprits, found.phase, found.step) == ("stuck", [0], "forward", 7)
    assert found.line == "/home/me/train.py:1 in f1"
    assert "forward of step 7, since 9.0 s at /home/me/train.py:1" in render(found)


def test_a_rank_that_waits_for_its_own_device_is_told_from_one_whose_host_is_stuck():
    found = judge([report(0, "optimizer", is_device_stuck=True)], 1)
    assert (found.kind, found.culprits) == ("device", [0])
    assert "device of rank 0" in found.summary
    # On NCCL the collective itself keeps the devices of those that wait busy: the rank that never came is to blame.
    waits = [report(rank, "collective", is_device_stuck=True) for rank in range(3)]
    assert judge([*waits, report(3, "data")], 4).kind == "absent"
    found = judge([*waits, report(3, "forward", is_device_stuck=True)], 4)
    assert (found.kind, found.culprits) == ("device", [3])
    assert judge(waits, 3).kind == "network"


@pytest.mark.parametrize("size", [2, 4])
def test_without_a_flight_record_the_rank_that_is_not_in_the_exchange_is_named(size):
    ranks = [report(rank, "collective") for rank in range(size - 1)]
    found = judge([*ranks, report(size - 1, "data")], size)
    assert (found.kind, found.culprits, found.phase) == ("absent", [size - 1], "data")
    assert found.collective == "the agreement on a step"


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_gave_no_record_is_named_if_the_other_waits_in_a_call(first):
    """Its GIL is held. In which order the ranks connected must not matter."""
    waits = report(1 - first, "backward", flight_record=dump(steps(5, FIRST)))
    held = report(first, "forward", answered=False)
    for reports in ([waits, held], [held, waits]):
        found = judge(reports, 2)
        assert (found.kind, found.culprits, found.phase) == ("absent", [first], "forward")


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ranks_the_one_that_is_behind_is_named(first):
    ranks = [report(1 - first, "backward"), report(first, "forward")]
    for reports in (ranks, ranks[::-1]):
        found = judge(reports, 2)
        assert (found.culprits, found.is_certain) == ([first], False)


def test_a_rank_whose_node_sent_nothing_is_named():
    found = judge([report(0, "collective"), report(2, "collective")], 3)
    assert (found.kind, found.culprits) == ("silent", [1])


def test_a_rank_of_this_node_that_never_came_is_named_before_nodes_that_sent_nothing():
    """Nodes may write to run directories of their own."""
    ahead, late = dump(steps(5, FIRST), ranks=4), dump(steps(5), ranks=4, waits=False)
    found = judge([report(0, "collective", flight_record=ahead), report(1, "data", flight_record=late)], 4)
    assert (found.kind, found.culprits) == ("absent", [1])


def test_ranks_that_all_wait_in_the_same_call_point_to_the_network():
    same = dump(steps(5, FIRST))
    found = judge([report(0, "backward", flight_record=same), report(1, "backward", flight_record=same)], 2)
    assert found.kind == "network"
    assert "no rank is missing" in found.summary


def test_a_rank_that_waits_in_a_call_which_others_have_completed_points_to_the_network():
    ahead, behind = dump(steps(5, FIRST, SECOND)), dump(steps(5, FIRST))
    found = judge([report(0, flight_record=ahead), report(1, flight_record=behind)], 2)
    assert found.kind == "network" and "rank 1 waits in all_reduce number 16" in found.summary


def test_a_rank_that_is_late_because_it_waits_in_another_group_is_not_the_cause():
    """Rank 2 waits in group 7 for rank 3, which sleeps; ranks 0 and 1 wait in group 0 for both."""
    behind, ahead = dump(steps(3), ranks=4, waits=False), dump(steps(3, FIRST), ranks=4)
    other = {"7": {"name": "7", "desc": "tensor", "ranks": "[2, 3]"}}
    waiting = dump([FIRST], group="7")["entries"]
    second = {**behind, "entries": [*behind["entries"], *waiting], "pg_config": {**behind["pg_config"], **other}}
    third = {**behind, "pg_config": {**behind["pg_config"], **other}}
    reports = [report(n, flight_record=each) for n, each in enumerate([ahead, ahead, second, third])]
    found = judge(reports, 4)
    assert found.culprits == [3]


def test_others_wait_for_an_evaluation_of_one_rank_and_it_is_no_hang():
    reports = [report(0, "user", seconds=900.0, timeout=1800.0), report(1, "collective", seconds=900.0)]
    found = judge(reports, 2)
    assert not found.is_hang and "rank 0 is in user since 900 s" in found.summary
    assert judge([report(0, "user", seconds=1801.0, timeout=1800.0), reports[1]], 2).culprits == [0]


def test_a_phase_that_was_never_seen_is_no_hang():
    assert not judge([report(0, "eval", seconds=1200.0, timeout=None), report(1, "collective")], 2).is_hang


def test_a_rank_that_compiles_again_is_no_hang():
    compiling = stack(
        f"{LIBRARY}/_inductor/async_compile.py", f"{LIBRARY}/_dynamo/convert_frame.py", "/home/me/train.py"
    )
    assert not judge([report(0, stacks=compiling, seconds=1800.0), report(1, "collective")], 2).is_hang
    running = stack(f"{LIBRARY}/_inductor/output_code.py", f"{LIBRARY}/_dynamo/eval_frame.py", "/home/me/train.py")
    assert judge([report(0, stacks=running), report(1, "collective")], 2).is_hang


@pytest.mark.parametrize(
    "more", [{"tracer": 5}, {"state": "t"}, {"stacks": stack("/usr/lib/python3.11/pdb.py", "/home/me/a.py")}]
)
def test_a_debugged_rank_is_no_hang(more):
    found = judge([report(0, **more), report(1, "collective")], 2)
    assert (found.kind, found.is_hang) == ("debugger", False)


def test_a_stopped_rank_is_named_before_anything_else():
    found = judge([report(0, "collective", flight_record=dump(steps(5, FIRST))), report(1, state="T")], 2)
    assert (found.kind, found.culprits) == ("stopped", [1])
    assert "kill -CONT" in found.summary and found.collective.startswith("all_reduce number 16")


def test_a_backward_of_the_loop_itself_is_told_by_the_stack():
    found = judge([report(0, stacks=stack(f"{LIBRARY}/autograd/graph.py", "/home/me/train.py"))], 1)
    assert found.phase == "backward"


def test_the_line_of_the_loader_worker_that_hangs_is_named_and_not_that_of_an_idle_one():
    parents = ["/home/me/train.py"]  # a forked worker has the calls of its parent below its own
    loop = f"{LIBRARY}/utils/data/_utils/worker.py"
    idle = WorkerReport(pid=8, stacks=stack("/usr/lib/python3.11/queue.py", loop, *parents))
    stuck = WorkerReport(pid=9, stacks=stack("/home/me/dataset.py", loop, *parents))
    waits = stack(f"{LIBRARY}/utils/data/dataloader.py", *parents)
    found = judge([report(0, "data", stacks=waits, workers=[idle, stuck])], 1)
    assert found.line == "/home/me/dataset.py:0 in f0 (loader worker, process 9)"


def test_a_loader_worker_that_is_stopped_is_named():
    waits = stack(f"{LIBRARY}/utils/data/dataloader.py", "/home/me/train.py")
    found = judge([report(0, "data", stacks=waits, workers=[WorkerReport(pid=9, state="T")])], 1)
    assert "its loader worker, process 9, was stopped by a signal" in found.line


RECEIVES = stack(f"{LIBRARY}/distributed/distributed_c10d.py", "/home/me/pipe.py")


def test_a_rank_that_waits_for_another_one_by_its_stack_is_not_the_cause():
    """gloo records no send and no receive."""
    ahead, behind = dump(steps(5, FIRST), ranks=4), dump(steps(5), ranks=4, waits=False)
    sleeps = stack("/home/me/data.py")
    others = [report(0, flight_record=ahead), report(1, flight_record=ahead)]
    late = [report(2, flight_record=behind, stacks=RECEIVES), report(3, flight_record=behind, stacks=sleeps)]
    assert judge([*others, *late], 4).culprits == [3]
    three = [dump(steps(5, FIRST), ranks=3), dump(steps(5), ranks=3, waits=False)]
    found = judge([report(0, flight_record=three[0]), report(1, flight_record=three[0]),
                   report(2, flight_record=three[1], stacks=RECEIVES)], 3)  # fmt: skip
    assert (found.culprits, found.is_certain) == ([2], False) and "waits in f0 itself" in found.summary


def test_a_rank_without_a_record_is_named_if_the_others_wait_by_their_stacks():
    found = judge(
        [report(0, stacks=RECEIVES), report(1, stacks=stack("/home/me/data.py")), report(2, stacks=RECEIVES)], 3
    )
    assert (found.kind, found.culprits) == ("absent", [1])


def test_the_training_thread_is_told_from_the_others():
    both = (
        stack("/home/me/other.py", thread=0x1)
        + stack("/home/me/train.py", thread=0xAB)
        + stack("/home/me/last.py", thread=0x2)
    )
    assert judge([report(0, stacks=both)], 1).line.startswith("/home/me/train.py")


def test_the_death_of_a_rank_in_a_collective_is_explained_by_the_rank_that_is_left():
    left = report(1, flight_record=dump(steps(5, ("all_reduce", [7]))))
    found = judge_death(0, [left])
    assert found is not None and (found.kind, found.culprits) == ("desync", [1])
    assert "rank 0 died in a collective: rank 1 brought another shape to all_reduce" in found.summary
    assert judge_death(0, [report(1, flight_record=dump(steps(5, FIRST)))]) is None
    assert judge_death(0, [report(1)]) is None


def test_stacks_of_py_spy_are_read():
    text = """Process 12: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 12 (idle): "MainThread"
    wait (/usr/lib/python3.11/threading.py:324)
    load (/home/me/data.py:31)
Thread 14 (active): "holdfast-hang"
    recv (/home/me/other.py:5)
"""
    assert judge([report(0, stacks=text)], 1).line == "/home/me/data.py:31 in load"


def test_library_files_that_py_spy_names_without_their_folder_are_no_lines_of_the_user():
    text = """Process 12: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 12 (idle): "MainThread"
    wait (threading.py:324)
    get (multiprocessing/queues.py:103)
    forward (torch/nn/modules/linear.py:125)
    load (loader/data.py:31)
"""
    assert judge([report(0, stacks=text)], 1).line == "loader/data.py:31 in load"


@pytest.mark.parametrize("prefix", ["[default1]:", "[rank1]: "])
def test_stacks_behind_the_prefix_of_torchrun_are_read(prefix):
    text = "".join(f"{prefix}{line}\n" for line in stack(f"{LIBRARY}/nn/linear.py", "/home/me/train.py").splitlines())
    assert judge([report(0, stacks=text)], 1).line == "/home/me/train.py:1 in f1"
