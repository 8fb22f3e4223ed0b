"""`holdfast diagnose` reads traces of torch's profiler: real ones of this machine, one or two."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from typer.testing import CliRunner

from holdfast.cli.main import app


def record(path, work) -> None:
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=4, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        with_stack=True,
    ) as profiler:
        for _ in range(5):
            work()
            profiler.step()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, x, big = tmp_path_factory.mktemp("traces"), torch.randn(256, 256), torch.randn(1000, 1000)

    def healthy() -> None:
        for _ in range(20):
            torch.relu(x @ x)

    def copies() -> None:
        healthy()
        for _ in range(200):  # much more than other programs of a busy machine take
            big.to("cpu", copy=True)

    def loop() -> None:
        healthy()
        total = torch.zeros(())
        for _ in range(15_000):
            total = total + 1

    record(folder / "healthy.json", healthy)
    record(folder / "copies.json.gz", copies)
    record(folder / "loop.json", loop)
    return folder


def run(*paths) -> dict:
    result = CliRunner().invoke(app, ["diagnose", *map(str, paths), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause"), [("copies.json.gz", "host_device_copies"), ("loop.json", "framework_overhead")]
)
def test_two_traces_give_the_cause(folder, name, cause):
    answer = run(folder / "healthy.json", folder / name)
    assert answer["cause"] == cause
    assert [trace["steps"] for trace in answer["traces"]] == [4, 4]
    for trace in answer["traces"]:
        assert sum(trace["seconds"].values()) == pytest.approx(trace["kernel_time"], rel=0.01)
    if cause == "host_device_copies":
        assert "copies" in answer["evidence"]["line"]


def test_one_trace_is_summed_up(folder):
    result = CliRunner().invoke(app, ["diagnose", str(folder / "healthy.json")])
    assert result.exit_code == 0 and "MatMul/GEMM" in result.output and "aten::mm" in result.output


def test_three_traces_are_refused(folder):
    result = CliRunner().invoke(app, ["diagnose", *[str(folder / "healthy.json")] * 3])
    assert result.exit_code != 0 and "Traceback" not in result.output


def test_a_trace_and_something_else_are_refused(holdfast, folder, tmp_path):
    (tmp_path / "log.csv").write_text("step,loss\n1,2.0\n")
    answer = holdfast("diagnose", folder / "healthy.json", tmp_path / "log.csv")
    assert answer.status == 78 and "log.csv is not" in answer.err


def test_a_folder_names_the_one_trace_in_it(holdfast, folder, tmp_path):
    data = (folder / "healthy.json").read_bytes()
    for name in ("host_1.2.pt.trace.json", "host_1.3.pt.trace.json"):
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        answer = holdfast("diagnose", tmp_path, "--json")
        if name == "host_1.2.pt.trace.json":
            assert answer.json["traces"][0]["is_cut"] and "its end is missing" in answer.err
    assert answer.status == 78 and "has 2 traces" in answer.err
