"""Counts in a profile what a healthy step does: waits of the host, launches, kernels, and host time outside the model."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.blocks import markdown, synchronize
from benchmarks.loops import Case, Guarded, Loop, Subject, let_go

STEPS = 20
STEP, MODEL = "benchmark.step", "benchmark.model"
BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""calls in which the host waits; `cudaMemcpy` is the synchronous copy"""
WAITS = (*BLOCKING, "aten::item")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cudaFreeHost")
"""they wait for the device as well"""
ALLOWED = {"cudaEventSynchronize": 1.0, "aten::item": float("inf")}
"""allowed above bare, a step: the wait for the step before; numbers that are on the host already"""
SNAPSHOTS = {"snapshot": {"every_steps": 10, "reach_steps": 10}}


def profile_case(case: Case, folder: Path) -> dict[str, Any]:
    """Profile bare, guarded, and guarded with snapshots. Return the counts, and the waits that are too many."""
    counts_by_name: dict[str, Any] = {}
    makers: dict[str, Callable[[], Loop]] = {
        "bare": lambda: Loop(Subject(case)),
        "guard": lambda: Guarded(Subject(case), folder / "profile"),
        "guard, host snapshots every 10": lambda: Guarded(Subject(case), folder / "profile-10", SNAPSHOTS),
    }
    for name, make in makers.items():
        loop = make()
        try:
            loop.warm_up()
            counts_by_name[name] = profiled(loop)
        finally:
            loop.close()
        del loop
        let_go(case.device)
    wrong = []
    if case.optimizer in ("fused", "sgd"):
        for name in list(counts_by_name)[1:]:
            for wait, count in counts_by_name[name]["waits"].items():
                if count - counts_by_name["bare"]["waits"][wait] > ALLOWED.get(wait, 0.0):
                    wrong.append(f"{name}: {count:g} {wait} a step, bare {counts_by_name['bare']['waits'][wait]:g}")
    return {"ways": counts_by_name, "problems": wrong, "lines": [f"{case}, profiled, a step:", _table(counts_by_name)]}


def _table(counts_by_name: dict[str, Any]) -> str:
    head = ["", *WAITS, "in other threads", "allocations", "launches", "kernels", "copies"]
    head += ["kernel us", "own host us", "waited us"]
    columns = ("allocations", "launches", "kernels", "copies", "kernel_us", "own_us", "waited_us")
    lines = []
    for name, counts in counts_by_name.items():
        elsewhere = " ".join(f"{n:g} {wait}" for wait, n in counts["waits_elsewhere"].items() if n) or "0"
        row = [name, *(f"{n:g}" for n in counts["waits"].values()), elsewhere]
        row += [f"{counts[key]:.1f}" for key in columns]
        lines.append(row)
    return markdown(head, lines)


def profiled(loop: Loop, steps: int = STEPS) -> dict[str, Any]:
    """Profile some steps of a loop that has warmed up. Every count is for one step."""
    on_gpu = loop.subject.case.device != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _marked(loop.subject):
        synchronize(loop.subject.case.device)
        with profile(activities=activities) as trace:
            for _ in range(steps):
                with record_function(STEP):
                    loop.block(1)
            synchronize(loop.subject.case.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return counted([e for e in events if e.get("ph") == "X"], steps)


@contextmanager
def _marked(subject: Subject) -> Iterator[None]:
    """Mark the model's forward and backward in the profile."""
    forward, backward = subject.loss, torch.autograd.backward

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with record_function(MODEL):
                return function(*args, **options)

        return call

    subject.loss = marked(forward)  # type: ignore[method-assign]
    torch.autograd.backward = marked(backward)
    try:
        yield
    finally:
        subject.loss = forward  # type: ignore[method-assign]
        torch.autograd.backward = backward


def counted(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Count in a trace's events: waits on the training thread inside steps and on others, launches, kernels and their time,
    and host time outside the model."""
    marks = [e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    training = (marks[0]["pid"], marks[0]["tid"])
    model = [e for e in events if e["name"] == MODEL and e.get("cat") == "user_annotation"]
    waits, other_threads = Counter[str](), Counter[str]()
    waited = 0.0
    for e in (e for e in events if e["name"] in WAITS):
        if (e["pid"], e["tid"]) == training and any(_within(e, m) for m in marks):
            waits[e["name"]] += 1
            if e["name"] in BLOCKING and not any(_within(e, m) for m in model):
                waited += e["dur"]
        elif (e["pid"], e["tid"]) != training:
            other_threads[e["name"]] += 1
    kernels = [e for e in events if e.get("cat") == "kernel"]
    outside_model = sum(m["dur"] for m in marks) - sum(m["dur"] for m in model) - waited
    return {
        "waits": {name: waits[name] / steps for name in WAITS},
        "waits_elsewhere": {name: other_threads[name] / steps for name in WAITS},
        "allocations": sum(e["name"] in ALLOCATIONS for e in events) / steps,
        "launches": sum(e["name"] in LAUNCHES for e in events) / steps,
        "kernels": len(kernels) / steps,
        "copies": sum(e.get("cat") == "gpu_memcpy" for e in events) / steps,
        "kernel_us": sum(e["dur"] for e in kernels) / steps,
        "own_us": outside_model / steps,
        "waited_us": waited / steps,
    }


def _within(event: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(other["ts"] <= event["ts"] < other["ts"] + other["dur"])
