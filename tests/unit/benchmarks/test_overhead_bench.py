"""The overhead benchmarks: fair blocks, what they take for a failure, and all of them run in their smallest form."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import blocks, comparing, loops
from benchmarks import overhead as on_cpu
from benchmarks.gpt import SIZES
from benchmarks.gpu import growth, overhead, profiling, rollback
from benchmarks.loops import Guarded, Loop, Subject, Training
from benchmarks.stopping import Patience, asked_to_stop

TINY = ["--device", "cpu", "--quick", "--steps", "2", "--rounds", "1"]
THREADS = ["--threads", str(torch.get_num_threads())]


def tiny(**how: Any) -> Training:
    return Training("tiny", SIZES["tiny"], device="cpu", precision="fp32", **how)


def run(main: Any, words: list[str], tmp_path: Path) -> tuple[int, dict[str, Any]]:
    status = main([*words, "--json", str(tmp_path / "found.json")])
    return status, json.loads((tmp_path / "found.json").read_text())


# ---- blocks


def test_every_way_has_a_block_in_every_round_and_the_first_round_is_not_counted() -> None:
    seen: list[str] = []
    ways = {name: lambda steps, name=name: seen.append(f"{name}{steps}") for name in "abc"}
    times = blocks.interleave(ways, steps=4, rounds=6, device="cpu")
    rounds = [seen[n : n + 3] for n in range(0, len(seen), 3)]
    assert len(rounds) == 7 and all(sorted(r) == ["a4", "b4", "c4"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "the order is shuffled"
    assert all(list(found) == [1, 2, 3, 4, 5, 6] for found in times.values())


def test_the_order_is_the_same_each_time() -> None:
    orders = []
    for _ in range(2):
        seen: list[str] = []
        ways = {name: lambda steps, name=name, seen=seen: seen.append(name) for name in "abcd"}
        blocks.interleave(ways, steps=1, rounds=5, device="cpu")
        orders.append(seen)
    assert orders[0] == orders[1]


def test_a_way_that_takes_part_in_fewer_rounds_is_counted_in_those() -> None:
    ways: dict[str, Any] = {"a": lambda steps: None, "b": lambda steps: None}
    times = blocks.interleave(ways, steps=1, rounds=5, device="cpu", fewer={"b": 2})
    assert list(times["a"]) == [1, 2, 3, 4, 5] and list(times["b"]) == [1, 2]


def test_a_way_that_fails_is_left_out_and_told_of_and_the_others_go_on() -> None:
    count, told = [0], []

    def fails(steps: int) -> None:
        count[0] += 1
        if count[0] == 3:
            raise RuntimeError("out of memory")

    ways: dict[str, Any] = {"a": lambda steps: None, "b": fails}
    times = blocks.interleave(
        ways, steps=1, rounds=5, device="cpu", failed=lambda name, error: told.append((name, str(error)))
    )
    assert told == [("b", "out of memory")] and count == [3]
    assert list(times["a"]) == [1, 2, 3, 4, 5] and list(times["b"]) == [1]


def test_where_the_first_way_fails_there_is_nothing_to_compare_with() -> None:
    def fails(steps: int) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        blocks.interleave({"a": fails}, steps=1, rounds=1, device="cpu", failed=lambda name, error: None)


def test_ratios_are_taken_within_a_round() -> None:
    found = blocks.against({1: 10.0, 2: 20.0, 3: 40.0}, {1: 11.0, 2: 24.0, 3: 44.0})
    assert found["ratio"]["median"] == pytest.approx(1.1)
    assert found["ratio"]["quartiles"] == pytest.approx([1.1, 1.15])
    assert found["added_ms"]["median"] == pytest.approx(4.0)
    assert found["overall"] == pytest.approx(79 / 70)


def test_a_cost_that_comes_in_one_block_shows_in_the_overall_ratio() -> None:
    found = blocks.against(dict.fromkeys(range(5), 10.0), {0: 10.0, 1: 10.0, 2: 20.0, 3: 10.0, 4: 10.0})
    assert found["ratio"]["median"] == 1.0 and found["overall"] == pytest.approx(1.2)


# ---- on a GPU, tried out on the CPU


@pytest.mark.slow
def test_the_gpu_benchmark_runs_every_variant(tmp_path: Path) -> None:
    status, found = run(overhead.main, [*TINY, "--check-equal"], tmp_path)
    (case,) = found["cases"]
    assert status == 0 and case["equal"] == "identical"
    assert list(case["variants"]) == list(comparing.VARIANTS)
    for entry in case["variants"].values():
        assert entry["ratio"]["count"] == 1 and entry["problems"] == []
    assert case["variants"]["bare"]["ratio"]["median"] == 1.0
    assert "slots of" in case["variants"]["snap10"]["notes"][0]
    text = comparing.table(found)
    assert text.count("| tiny (") == len(comparing.VARIANTS)


@pytest.mark.slow
def test_a_variant_that_cannot_be_is_told_of_in_the_table_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = comparing.VARIANTS["snap10"]._replace(place="nowhere")
    monkeypatch.setitem(comparing.VARIANTS, "snap10", nowhere)
    monkeypatch.setattr(overhead, "BARS", {"tiny": {"snap10": 1000.0}})
    words = [*TINY, "--variants", "guard", "snap10"]
    status, found = run(overhead.main, words, tmp_path)
    ours = found["cases"][0]["variants"]
    assert status == 0 and ours["guard"]["ratio"]["count"] == 1
    assert ours["snap10"]["failed"].startswith("ConfigError") and "ratio" not in ours["snap10"]
    assert "| - | - | - | - | ConfigError" in comparing.table(found)
    assert overhead.main([*words, "--check"]) == 1, "a bar that was not measured is not passed"


@pytest.mark.slow
def test_compiled_and_other_optimizers_are_cases_of_their_own(tmp_path: Path) -> None:
    words = [*TINY, "--modes", "compile", "--backend", "eager", "--optimizers", "foreach", "sgd", "--variants", "guard"]
    status, found = run(overhead.main, words, tmp_path)
    assert status == 0
    assert [c["case"] for c in found["cases"]] == ["tiny 4x16 compile fp32 foreach", "tiny 4x16 compile fp32 sgd"]


@pytest.mark.slow
def test_a_guard_that_is_slow_is_above_its_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = Guarded.block

    def slow(self: Guarded, steps: int) -> None:
        began = time.perf_counter()
        quick(self, steps)
        while time.perf_counter() < began + 0.5 * steps:
            pass

    monkeypatch.setattr(overhead, "BARS", {"tiny": {"guard": 1.5}})
    monkeypatch.setattr(Guarded, "warm_up", lambda self: None)
    monkeypatch.setattr(Guarded, "block", slow)
    status, found = run(overhead.main, [*TINY, "--variants", "guard", "--check"], tmp_path)
    assert status == 1 and found["cases"][0]["variants"]["guard"]["ratio"]["median"] > 1.5
    assert "is above 1.5" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_a_guard_that_changes_the_run_is_not_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = Guarded.block

    def changed(self: Guarded, steps: int) -> None:
        honest(self, steps)
        self.guard.flush()
        self.subject.parameters[3].data.view(torch.int32).view(-1)[0].bitwise_xor_(1)

    monkeypatch.setattr(Guarded, "block", changed)
    status, found = run(overhead.main, [*TINY, "--rounds", "0", "--check-equal"], tmp_path)
    assert status == 1 and found["cases"][0]["equal"].startswith("tensor 3 of")
    assert "guarded is not what bare is" in capsys.readouterr().out.splitlines()[-1]


def test_over_the_budget_cases_are_left_out_and_named(tmp_path: Path) -> None:
    status, found = run(overhead.main, [*TINY, "--budget", "1e-9"], tmp_path)
    assert status == 1 and found["cases"] == []
    assert found["left_out"] == [{"case": "tiny eager fp32 fused", "why": "over the budget", "crashed": False}]


@pytest.mark.slow
def test_what_was_to_be_measured_and_was_not_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "--optimizers", "fused", "sgd", "--variants", "guard", "--budget", "1e-9"]
    monkeypatch.setattr(Patience, "over", _after(1))
    status, found = run(overhead.main, words, tmp_path)
    assert status == 0 and [c["optimizer"] for c in found["cases"]] == ["fused"]
    monkeypatch.setattr(Patience, "over", _after(1))
    assert overhead.main([*words, "--check"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "tiny eager fp32 sgd: not measured: over the budget"


def _after(times: int) -> Any:
    asked = [0]

    def over(self: Patience) -> bool:
        asked[0] += 1
        return asked[0] > times

    return over


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["guard", "snap50", "disk"])
def test_a_guard_that_crashes_is_a_failure_with_or_without_bars(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crashes(self: Guarded, steps: int) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Guarded, "block", crashes)
    status, found = run(overhead.main, [*TINY, "--variants", "item", variant], tmp_path)
    assert status == 1 and found["cases"][0]["variants"]["item"]["ratio"]["count"] == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("RuntimeError: broken")
    assert overhead.main([*TINY, "--variants", variant, "--check"]) == 1


@pytest.mark.slow
def test_a_peer_that_crashes_is_told_of_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crashes(self: Any, loss: Any, norm: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(comparing.VARIANTS["item"].peer, "before_update", crashes)
    monkeypatch.setattr(comparing.VARIANTS["item"].peer, "after_update", crashes)
    status, found = run(overhead.main, [*TINY, "--variants", "item", "guard"], tmp_path)
    assert status == 0 and "broken" in found["cases"][0]["variants"]["item"]["failed"]


@pytest.mark.slow
def test_a_case_that_fails_is_left_out_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model(self: Training) -> Any:
        if self.optimizer == "fused":
            raise torch.OutOfMemoryError("too large")
        return whole(self)

    whole = Training.model
    monkeypatch.setattr(Training, "model", model)
    words = [*TINY, "--optimizers", "fused", "sgd", "--variants", "guard"]
    status, found = run(overhead.main, words, tmp_path)
    assert status == 0 and [c["optimizer"] for c in found["cases"]] == ["sgd"]
    (left,) = found["left_out"]
    assert left == {"case": "tiny eager fp32 fused", "why": "OutOfMemoryError: too large", "crashed": False}


@pytest.mark.slow
def test_a_case_that_crashes_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--modes", "eager", "compile", "--backend", "nonsense", "--variants", "guard"]
    status, found = run(overhead.main, words, tmp_path)
    assert status == 1 and [c["mode"] for c in found["cases"]] == ["eager"] and found["left_out"][0]["crashed"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("tiny compile fp32 fused: not measured: ")


def test_a_batch_may_be_larger_than_the_data_usually_is() -> None:
    case = tiny(batch=(1 << 14) + 5, length=2)
    assert case.sample().shape[0] == case.batch


@pytest.mark.parametrize(
    "words",
    [
        ["--models", "7b"],
        ["--device", "cpu", "--graphed"],
        ["--device", "cpu", "--rounds", "-1"],
        ["--steps", "0"],
        ["--seconds", "nan"],
        ["--budget", "-1"],
        ["--json", "."],
        ["--json", "/dev/null/x"],
        ["x"],
    ],
)
@pytest.mark.parametrize("main", [overhead.main, growth.main, on_cpu.main], ids=["gpu", "growth", "cpu"])
def test_wrong_flags_are_refused(main: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2 and "error:" in capsys.readouterr().err


def test_without_an_axis_the_models_of_the_bars_come_first() -> None:
    options = overhead.parse_options(["--device", "cpu", "--variants", "guard"])
    wished = overhead.requested_cases(options)
    assert {w.model for w in wished} == set(overhead.BARS) and wished[0].model == "160m"
    assert all(w.variants == ["guard"] for w in wished)
    options = overhead.parse_options(["--device", "cpu", "--models", "30m", "1.4b", "--precision", "bf16", "fp16"])
    assert [(w.model, w.precision) for w in overhead.requested_cases(options)] == [
        ("30m", "bf16"),
        ("30m", "fp16"),
        ("1.4b", "bf16"),
        ("1.4b", "fp16"),
    ]


def test_what_fills_a_disk_is_asked_for_by_name() -> None:
    (large,) = overhead.requested_cases(overhead.parse_options(["--device", "cpu", "--models", "1.4b"]))
    assert "disk" not in large.variants and {"guard", "snap10", "arc"} < set(large.variants)
    (asked,) = overhead.requested_cases(
        overhead.parse_options(["--device", "cpu", "--models", "1.4b", "--variants", "disk"])
    )
    assert asked.variants == ["disk"]


@pytest.mark.parametrize(("name", "millions"), [("30m", 30), ("30m-small", 30), ("160m", 160), ("1.4b", 1400)])
def test_models_are_as_large_as_their_names_say(name: str, millions: int) -> None:
    case = Training(name, SIZES[name], device="meta")
    assert sum(p.numel() for p in case.model().parameters()) / 1e6 == pytest.approx(millions, rel=0.05)


def measured(ratio: float, optimizer: str = "fused", **other: Any) -> dict[str, Any]:
    entry = {"label": "guard", "problems": [], "ratio": {"median": ratio}, **other}
    case = {"name": "160m", "case": "160m", "optimizer": optimizer, "variants": {"guard": entry}}
    return {"cases": [case]}


def test_bars_bind_optimizers_that_the_device_gates() -> None:
    assert comparing.failures(measured(1.003), overhead.bar) == []
    assert comparing.failures(measured(1.0031), overhead.bar) == ["160m, guard: 1.0031 is above 1.003"]
    assert comparing.failures(measured(1.2, "foreach"), overhead.bar) == []
    assert comparing.failures(measured(1.2), None) == []


def test_what_could_not_be_measured_has_not_passed() -> None:
    found = measured(1.0, failed="OutOfMemoryError: 3 GB")
    del found["cases"][0]["variants"]["guard"]["ratio"]
    assert comparing.failures(found, overhead.bar) == ["160m, guard: not measured: OutOfMemoryError: 3 GB"]


def test_a_step_that_is_not_committed_is_a_failure_with_or_without_bars() -> None:
    said = ["160m, guard: 1 steps skipped"]
    assert comparing.failures(measured(1.0, problems=["1 steps skipped"]), None) == said


# ---- what a guarded run is checked for


def test_a_guarded_run_as_configured_has_no_problems(tmp_path: Path) -> None:
    loop = Guarded(Subject(tiny()), tmp_path, {"snapshot": {"every_steps": 4, "reach_steps": 4}}, every=4)
    loop.warm_up()
    assert loop.done % 4 == 2, "a block begins between two snapshots"
    loop.block(8)
    loop.close()
    assert loop.problems() == [] and loop.snapshots == loop.done // 4 + 1


def test_a_skipped_step_is_a_problem(tmp_path: Path) -> None:
    subject = Subject(tiny())
    loop = Guarded(subject, tmp_path, {"recover": {"nan_action": "skip"}})
    loop.block(3)
    sound = subject.loss
    subject.loss = lambda batch: sound(batch) * float("nan")  # type: ignore[method-assign]
    loop.block(2)  # it runs again, and is skipped when it fails again
    subject.loss = sound  # type: ignore[method-assign]
    loop.block(3)
    loop.close()
    said = loop.problems()
    assert {"1 steps skipped", "1 steps replayed", "6 of 8 steps committed"} <= set(said)


def test_snapshots_that_were_not_taken_are_a_problem(tmp_path: Path) -> None:
    loop = Guarded(Subject(tiny()), tmp_path, {"snapshot": {"every_steps": 2, "memory_gb": 1e-9}}, every=2)
    loop.block(9)
    loop.close()
    assert loop.problems() == ["0 snapshots taken where 5 were due"]


def test_checkpoints_are_counted_and_their_bytes_told(tmp_path: Path) -> None:
    saves = {"every_steps": 3, "at_start": False, "at_end": False}
    loop = Guarded(Subject(tiny()), tmp_path, {"checkpoint": saves}, every=3)
    loop.block(10)
    loop.between()
    loop.close()
    assert loop.problems() == []
    assert loop.notes[-1].startswith("3 checkpoints, 0.00 GB written at ")
    loop.config["checkpoint"] = {**saves, "every_steps": 2}
    assert loop.problems() == ["3 checkpoints written where 5 were due"]


# ---- the profile


def event(name: str, ts: float, dur: float, *, tid: int = 1, cat: str = "cuda_runtime") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "cat": cat}


def test_a_profile_counts_waits_by_thread_and_the_hosts_own_time() -> None:
    events = [
        event(profiling.STEP, 0, 100, cat="user_annotation"),
        event(profiling.STEP, 100, 100, cat="user_annotation"),
        event(profiling.STEP, 0, 500, tid=7, cat="gpu_user_annotation"),
        event(profiling.MODEL, 10, 60, cat="user_annotation"),
        event(profiling.MODEL, 110, 60, cat="user_annotation"),
        event("cudaStreamSynchronize", 20, 30),
        event("cudaEventSynchronize", 80, 10),
        event("cudaEventSynchronize", 85, 100, tid=2),
        event("cudaDeviceSynchronize", 300, 50),
        event("cudaHostAlloc", 75, 1),
        event("cudaLaunchKernel", 15, 1),
        event("cudaLaunchKernel", 15, 1, tid=2),
        event("gemm", 15, 40, tid=7, cat="kernel"),
        event("Memcpy DtoH", 15, 5, tid=8, cat="gpu_memcpy"),
    ]
    found = profiling.counted(events, 2)
    assert found["waits"] == {
        **dict.fromkeys(profiling.WAITS, 0.0),
        "cudaStreamSynchronize": 0.5,
        "cudaEventSynchronize": 0.5,
    }
    assert (
        found["waits_elsewhere"]["cudaEventSynchronize"] == 0.5
        and found["waits_elsewhere"]["cudaDeviceSynchronize"] == 0
    )
    assert found["allocations"] == 0.5
    assert (found["launches"], found["kernels"], found["copies"], found["kernel_us"]) == (1.0, 0.5, 0.5, 20.0)
    assert found["own_us"] == (200 - 120 - 10) / 2 and found["waited_us"] == 5.0


@pytest.mark.slow
def test_a_wait_that_a_guard_adds_is_a_problem_but_for_the_one_on_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(loop: Loop) -> dict[str, Any]:
        guarded = isinstance(loop, Guarded)
        waits = dict.fromkeys(profiling.WAITS, 0.0) | {"cudaEventSynchronize": 1.0 * guarded}
        if guarded and loop.takes_snapshots:
            waits["cudaStreamSynchronize"] = 0.1
        rest = ("allocations", "launches", "kernels", "copies", "kernel_us", "own_us", "waited_us")
        return {"waits": waits, "waits_elsewhere": waits, **dict.fromkeys(rest, 0.0)}

    monkeypatch.setattr(profiling, "profiled", found)
    monkeypatch.setattr(loops, "LEARNT", 5)
    result = profiling.profile_case(tiny(), tmp_path)
    assert result["problems"] == ["guard, host snapshots every 10: 0.1 cudaStreamSynchronize a step, bare 0"]


def test_a_real_profile_tells_the_model_from_the_rest() -> None:
    loop = Loop(Subject(tiny()))
    loop.warm_up()
    whole = torch.autograd.backward
    found = profiling.profiled(loop, 3)
    assert found["waits"]["aten::item"] > 0 and found["own_us"] > 0 and torch.autograd.backward is whole


# ---- rollbacks


@pytest.mark.slow
def test_a_rollback_is_made_to_happen_and_timed(tmp_path: Path) -> None:
    found = rollback.rollback_case(tiny(), tmp_path)
    one = found["places"]["host"]
    assert one["seconds"]["count"] == rollback.TIMES and 0 < one["share"] < one["copy_share"]
    steps_of_adam = 4 * len(list(tiny().model().parameters()))
    assert one["bytes"] == Subject(tiny()).nbytes() + steps_of_adam
    assert found["lines"][0].startswith("tiny 4x16 eager fp32 fused: rollback from host memory: 0.000 GB restored in ")


def test_a_rollback_below_its_share_is_a_problem() -> None:
    assert rollback.problems({"host": {"share": 0.9}, "device": {"share": 0.5}}) == []
    said = rollback.problems({"host": {"share": 0.89}, "device": {"failed": "does not fit"}})
    assert said == [
        "rollback from host memory: 89% of the bandwidth, less than 90%",
        "rollback from device memory: does not fit",
    ]


# ---- growth


@pytest.mark.slow
def test_growth_is_measured_over_parameters_and_tensors(tmp_path: Path) -> None:
    status, found = run(growth.main, ["--device", "cpu", "--quick", "--rounds", "1"], tmp_path)
    assert status == 0
    assert [(c["parameters"], c["tensors"]) for c in found["costs"]] == [
        (1000, 100),
        (10_000, 100),
        (10_000, 10),
        (10_000, 100),
    ]
    assert all(c["guard"]["ratio"]["count"] == 1 for c in found["costs"])


def test_a_long_run_is_measured_in_windows(tmp_path: Path) -> None:
    status, found = run(growth.main, ["--steps", "200"], tmp_path)
    assert status == 0
    assert [w["steps"] for w in found["long"]["windows"]] == list(range(20, 201, 20))
    assert all(w["rss_mb"] > 1 for w in found["long"]["windows"])


@pytest.mark.parametrize("words", [["--steps", "50"], ["--steps", "0"], ["--what", "tensors", "--steps", "1000"]])
def test_steps_of_no_long_run_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        growth.main(["--device", "cpu", *words])
    assert refused.value.code == 2 and "--steps" in capsys.readouterr().err


def test_the_long_run_never_stops_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has nothing left to learn is no training: by the weights of the run's end, had it begun there."""
    subject = Subject(growth.Parts(1000, 10, "cpu", growth.Endless))
    for p in subject.parameters:
        p.data.fill_(0.5)  # what the batches are on average
    loop = Guarded(subject, tmp_path / "sound")
    loop.block(200)
    loop.close()
    assert loop.problems() == []
    monkeypatch.setattr(growth.Flat, "forward", lambda self, batch: 0.0 * self.parts[0].sum())
    loop = Guarded(Subject(growth.Parts(1000, 10, "cpu")), tmp_path / "dead")
    loop.block(200)
    loop.close()
    assert loop.problems() == ["nothing was trained any more at step 32"]


def windows(ratio: float, memory: float) -> list[dict[str, Any]]:
    return [
        {"steps": n * 100_000, "bare": 1.0, "guard": 2.0 + ratio * n, "rss_mb": 300.0 + memory * n + 50.0 * (n > 0)}
        for n in range(1, 11)
    ]


def test_what_grows_with_the_steps_is_a_failure() -> None:
    for ratio, memory, said in ((0.0, 0.0, 0), (0.05, 0.0, 1), (0.0, 1.5, 1), (0.005, 0.5, 0)):
        long = {"steps": 1_000_000, "problems": [], **growth.growth(windows(ratio, memory))}
        assert len(growth.failures({"costs": [], "long": long}, bars=True)) == said, (ratio, memory)
        assert growth.failures({"costs": [], "long": long}, bars=False) == []
    assert growth.growth(windows(0.0, 1.5))["memory_growth"] == pytest.approx(1.5)


# ---- on the CPU


@pytest.mark.slow
def test_the_cpu_benchmark_runs_and_says_what_a_step_really_took(tmp_path: Path) -> None:
    words = [
        "--targets",
        "3",
        "--optimizers",
        "default",
        "--rounds",
        "1",
        "--peer-rounds",
        "1",
        "--steps",
        "2",
        *THREADS,
    ]
    status, found = run(on_cpu.main, words, tmp_path)
    (case,) = found["cases"]
    assert status == 0 and case["equal"] == "identical" and case["target_ms"] == 3
    assert list(case["variants"]) == ["bare", "guard", "snapshots", "item", "isfinite"]
    assert case["variants"]["bare"]["ms"]["median"] > 0
    status, found = run(on_cpu.main, [*words, "--most", "0.001"], tmp_path)
    assert status == 1, "no guard costs a thousandth of a bare loop"


def test_the_batch_is_chosen_by_the_milliseconds_a_step_is_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "seconds_a_step", lambda loop, steps: 1e-3 * (2 + 0.5 * loop.subject.case.batch))
    assert on_cpu.calibrated(5.0, "sgd").batch in (5, 6, 7)
    assert on_cpu.calibrated(1.0, "sgd").batch == 1
    with pytest.raises(SystemExit):
        on_cpu.main(["--targets", "0"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_nothing_further_begins(number: int) -> None:
    patience, seen = Patience(), []
    before = signal.getsignal(signal.SIGINT)

    def block(steps: int) -> None:
        seen.append(steps)
        if len(seen) == 5:
            os.kill(os.getpid(), number)

    with asked_to_stop(patience):
        times = blocks.interleave({"a": block, "b": block}, steps=3, rounds=9, device="cpu", patience=patience)
    assert len(seen) == 5 and len(times["a"]) + len(times["b"]) == 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_what_was_measured_on_the_cpu_is_shown_when_it_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick, count = Loop.block, [0]

    def block(self: Loop, steps: int) -> None:
        quick(self, steps)
        count[0] += type(self) is Loop and steps == 2
        if count[0] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            count[0] += 1

    monkeypatch.setattr(Loop, "block", block)
    words = ["--targets", "3", "--optimizers", "sgd", "default", "--rounds", "1000", "--steps", "2", *THREADS]
    status, found = run(on_cpu.main, words, tmp_path)
    assert status == 0 and [c["optimizer"] for c in found["cases"]] == ["sgd"]
    assert 0 < found["cases"][0]["variants"]["guard"]["ratio"]["count"] < 10
    assert "left out: 3 ms default (asked to stop)" in capsys.readouterr().out


def test_what_was_measured_of_growth_is_shown_when_it_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [0]
    resident = growth.resident_mb

    def told() -> float:
        measured[0] += 1
        if measured[0] == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return resident()

    monkeypatch.setattr(growth, "resident_mb", told)
    status, found = run(growth.main, ["--steps", "200"], tmp_path)
    assert status == 0 and found["long"]["steps"] == 80, "four windows of 20"
    measured[0] = 0
    assert growth.main(["--steps", "200", "--check"]) == 1, "not all was measured"


@pytest.mark.slow
def test_what_was_measured_is_shown_when_it_is_told_to_stop(tmp_path):
    words = (
        "-m benchmarks.gpu.overhead --models tiny --device cpu --variants bare guard --rounds 100000 --steps 10 --json"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", *words.split(), str(tmp_path / "found.json")],
        cwd=Path(__file__).resolve().parents[3],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "round 1 of 100000" in line:
            break
    process.send_signal(signal.SIGTERM)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "asked to stop" in said
    assert len([line for line in shown.splitlines() if line.startswith("| tiny")]) == 2
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert 0 < case["variants"]["guard"]["ms"]["count"] < 1000
